"""``semkv serve`` as an operator meets it: what it says when it starts, when it cannot, and when it stops."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from command_line import invoke
from gateway_helpers import ADMIN, Served, Started, chat, wait_until
from ports import free_port
from scripted_upstream import Scripted
from semkv.server import serve
from semkv.server.metrics import FOLDER
from semkv.server.serve import listening

ADMITTED = {"Authorization": f"Bearer {ADMIN}"}
KEY = {"SEMKV_ADMIN_KEY": "an admin key of sufficient length"}


def semkv(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "semkv", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "", "::1"])
def test_an_address_is_listened_on(host: str) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("needs IPv6 on the loopback interface")
    with listening(host, 0) as sock:
        assert sock.getsockname()[1]


def test_operators_may_have_a_port_of_their_own(tmp_path: Path) -> None:
    port = free_port()
    with Served(Scripted()) as behind, Started(behind.url, tmp_path, f"--admin-port={port}", **KEY) as gateway:
        admin, own = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {KEY['SEMKV_ADMIN_KEY']}"}
        for path in ("/metrics", "/semkv/metrics", "/semkv/", "/semkv/app.js", "/semkv/api/stats", "/openapi.json"):
            assert httpx.get(admin + path, headers=own).status_code == 200, path
            assert httpx.get(gateway.url + path, headers=own).status_code == 404, path
        for path in ("/healthz", "/readyz", "/semkv/readyz"):
            assert httpx.get(admin + path).status_code == httpx.get(gateway.url + path).status_code == 200
        for path in ("/v1/chat/completions", "/v1/other", "/"):
            assert httpx.post(admin + path, json=chat("hello")).status_code == 404, "it answers no clients"
        assert behind.app.total == 0
        assert httpx.post(f"{gateway.url}/v1/chat/completions", json=chat("hello")).status_code == 200
        said = gateway.log.read_text()
        assert f"dashboard at port {port}, /semkv" in said
        out = semkv("serve", "--port", 0, "--admin-port", port, "--no-semantic", "--cache-dir", tmp_path / "other")
        assert re.match(f"semkv: --admin-port {port}, .* in use", out.stderr.splitlines()[-1])
    out = semkv("serve", "--port", port, "--admin-port", port, "--cache-dir", tmp_path / "other")
    assert out.stderr == f"semkv: --admin-port: {port} is not allowed; expected another port than --port\n"


def test_the_start_says_step_by_step_what_it_does(tmp_path: Path) -> None:
    def said(gateway: Started) -> list[str]:
        return [json.loads(line)["message"] for line in gateway.log.read_text().splitlines()]

    with Served(Scripted()) as behind, Started(behind.url, tmp_path) as gateway:
        wait_until(lambda: "the upstream answers" in said(gateway))
        assert said(gateway)[0].endswith(f": responses are kept in {tmp_path / 'cache' / 'catalog.sqlite'}")
    nobody = f"http://127.0.0.1:{free_port()}"
    with Started(nobody, tmp_path, "--store", "redis://:pass@word@127.0.0.1:1/0") as gateway:
        wait_until(lambda: any(line.startswith("the upstream does not answer yet") for line in said(gateway)))
        assert said(gateway)[0].endswith(": responses are kept in redis://127.0.0.1:1/0")
        assert "pass" not in gateway.log.read_text()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.HTTPError:
        return False


def test_connections_are_bounded_by_files_and_operators_have_room_of_their_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as out:
        running = subprocess.Popen(
            [sys.executable, "-m", "semkv", "serve", "--port=0", f"--cache-dir={tmp_path / 'cache'}", "--no-semantic"],
            stderr=out,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (300, 400)),
        )
    lines: list[socket.socket] = []

    def ask() -> int:
        return httpx.post(f"{url}/v1/chat/completions", content=b"{}", timeout=60).status_code

    try:
        wait_until(lambda: "startup complete" in log.read_text() or running.poll() is not None, 300)
        (url,) = re.findall(r"http://127.0.0.1:\d+(?=: upstream)", log.read_text())
        wait_until(lambda: answers(url))
        assert resource.prlimit(running.pid, resource.RLIMIT_NOFILE) == (400, 400)
        address = ("127.0.0.1", httpx.URL(url).port or 0)
        most = (400 - 256) // 2 - 32
        lines += [socket.create_connection(address, timeout=60) for _ in range(most)]
        wait_until(lambda: ask() == 503)
        assert answers(url)
        text = httpx.get(f"{url}/metrics").text
        assert 'semkv_turned_away_total{what="connections"} 1.0' in text
        lines += [socket.create_connection(address, timeout=60) for _ in range(32)]
        with socket.create_connection(address, timeout=60) as turned:
            assert turned.recv(4096)[9:12] == b"503"
        for line in lines:
            line.close()
        wait_until(lambda: answers(url) and ask() != 503)
    finally:
        for line in lines:
            line.close()
        running.kill()
        running.wait()


def test_what_it_cannot_start_with_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    folder = tmp_path / "file" / "cache"
    for command in (["serve", "--port", 0], ["run", "--engine", "scripted", "--max-samples", 1]):
        out = semkv(*command, "--cache-dir", folder)
        assert out.returncode == 2
        assert out.stderr == f"semkv: {folder} cannot be written (Not a directory); choose another --cache-dir\n"
    said = invoke(["serve", "--trusted-proxy", "foo"])
    assert said.exit_code == 2
    assert said.stderr.startswith("semkv: --trusted-proxy: 'foo' is not allowed; expected networks")
    assert "--port" in invoke(["serve", "--port", "99999"]).stderr


class TestWorkers:
    """Two processes on one port and one directory."""

    @pytest.fixture
    def started(self, tmp_path: Path) -> Iterator[tuple[Started, Scripted]]:
        upstream = Scripted()
        with Served(upstream) as behind:
            running = Started(behind.url, tmp_path, "--workers=2", SEMKV_ADMIN_KEY=ADMIN)
            with running:
                wait_until(lambda: running.log.read_text().count("startup complete") == 2)
                yield running, upstream

    def test_they_share_answers_figures_and_invalidations(self, started: tuple[Started, Scripted]) -> None:
        running, upstream = started
        both = workers_of(running)
        assert len(both) == 2
        for number in range(40):  # each on a connection of its own, so that both take some
            assert ask(running, f"question {number % 4}").status_code == 200
        assert upstream.total <= 4 * 2
        wait_until(lambda: figure(running, "semkv_requests_total") >= 40)
        stats = httpx.get(f"{running.url}/semkv/api/stats", headers=ADMITTED).json()
        assert stats["workers"] == 2
        assert sum(stats["totals"]["tiers"].values()) == figure(running, "semkv_requests_total")
        assert figure(running, "semkv_response_entries") == 4
        wrong = httpx.post(f"{running.url}/semkv/api/wrong", headers=ADMITTED, json={"id": "another worker's"})
        assert (wrong.status_code, wrong.headers["connection"]) == (404, "close")  # the next try reaches either worker
        gone = {"prefix": "question", "dry_run": False}
        assert httpx.post(f"{running.url}/semkv/api/invalidate", headers=ADMITTED, json=gone).json()["count"] == 4
        upstream.script["question 1"] = {"status": "418"}  # so that what is old is told from what is new
        wait_until(lambda: {ask(running, "question 1").status_code for _ in range(20)} == {418})

    def test_one_that_is_killed_is_started_again_and_nothing_is_lost(self, started: tuple[Started, Scripted]) -> None:
        running, _ = started
        whole: list[str] = []
        stop = threading.Event()

        def traffic() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                with suppress(httpx.HTTPError):  # on its way at the killed worker
                    assert ask(running, f"traffic {number}").status_code == 200
                    whole.append(f"traffic {number}")

        asking = threading.Thread(target=traffic)
        asking.start()
        for _ in range(3):
            before, so_far = workers_of(running), len(whole)
            wait_until(lambda so_far=so_far: len(whole) > so_far + 5)
            os.kill(before[0], signal.SIGKILL)
            wait_until(lambda before=before: len(set(workers_of(running)) - set(before)) == 1)
        wait_until(lambda: running.log.read_text().count("startup complete") == 5)
        stop.set()
        asking.join()
        wait_until(lambda: all(ask(running, text).headers["x-semkv"].startswith("hit") for text in whole))
        assert running.stop() == 0
        assert all(not Path(f"/proc/{pid}").exists() for pid in before)
        with sqlite3.connect(running.log.parent / "cache" / "catalog.sqlite") as db:
            assert db.execute("SELECT COUNT(*) FROM responses").fetchone()[0] >= len(whole)

    def test_they_end_with_their_parent(self, started: tuple[Started, Scripted]) -> None:
        running, _ = started
        both = workers_of(running)
        environment = Path(f"/proc/{both[0]}/environ").read_text()
        (figures,) = re.findall(rf"{FOLDER}=([^\0]+)", environment)
        assert Path(figures).is_dir()
        running.kill()
        wait_until(lambda: all(not Path(f"/proc/{pid}").exists() for pid in both))
        assert not Path(figures).exists()


@pytest.mark.parametrize("serves", [True, False])
def test_a_worker_that_cannot_start_ends_the_others_only_where_none_serves(
    serves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Worker:
        def __init__(self, *_: object, exitcode: int | None = None) -> None:
            self.exitcode, self.pid, self.started = exitcode, 2**22, False

        def is_alive(self, timeout: float) -> bool:
            raise AssertionError(f"a worker that has died does not answer for {timeout} s")

        def is_ready(self, timeout: float) -> bool:
            return serves

        def start(self) -> None:
            self.started = True

    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(serve, "Process", Worker)
    workers: Any = serve.Workers.__new__(serve.Workers)
    workers.config, workers.sockets, workers.should_exit = None, [], threading.Event()
    workers.processes = [Worker(), Worker(exitcode=serve.STARTUP_FAILURE)]
    workers.keep_subprocess_alive()
    assert (workers.failed, workers.should_exit.is_set()) == (not serves, not serves)
    assert [worker.started for worker in workers.processes] == [False, serves]


def test_workers_without_a_store_are_refused(tmp_path: Path) -> None:
    out = semkv("serve", "--workers", 2, "--port", 0, "--store", "memory", "--cache-dir", tmp_path)
    assert out.returncode == 2
    assert "--workers: 2 is not allowed" in out.stderr


def workers_of(running: Started) -> list[int]:
    """The processes that answer."""
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    found = []
    for pid in children:
        with suppress(ProcessLookupError, FileNotFoundError):  # it ends at this moment
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def ask(running: Started, text: str) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/chat/completions", json=chat(text), timeout=120)


def figure(running: Started, name: str) -> float:
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.split("[{ ]", line)[0] == name)
