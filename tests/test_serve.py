"""``semkv serve`` as an operator meets it: what it says when it starts, when it cannot, and when it stops."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import select
import signal
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from command_line import invoke
from gateway_helpers import ADMIN, Pair, Served, Started, chat, kind, wait_until
from ports import free_port
from scripted_upstream import Scripted
from semkv_gateway import serve
from semkv_gateway.metrics import FOLDER
from semkv_gateway.serve import listening
from vllm_forks import prepare

KEY = {"Authorization": f"Bearer {ADMIN}"}


def semkv(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [prepare() / "semkv", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def ask(running: Started, text: str) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/chat/completions", json=chat(text), timeout=120)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "", "::1"])
def test_an_address_is_listened_on(host: str) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("needs IPv6 on the loopback interface")
    with listening(host, 0) as sock:
        assert sock.getsockname()[1]


def said(gateway: Started) -> list[str]:
    """The messages in its log."""
    return [json.loads(line)["message"] for line in gateway.log.read_text().splitlines()]


def test_connections_are_bounded_by_files_and_operators_have_room_of_their_own(
    tmp_path: Path,
) -> None:
    """With an upstream that is not there, and a store with a password in its name."""
    store, nobody = "--store=redis://:pass@word@127.0.0.1:1/0", f"http://127.0.0.1:{free_port()}"
    with Started(nobody, tmp_path, store, files=(300, 400)) as gateway, ExitStack() as lines:
        assert said(gateway)[0].endswith(": responses are kept in redis://127.0.0.1:1/0")
        assert "pass" not in gateway.log.read_text()
        assert resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE) == (400, 400)
        address = ("127.0.0.1", httpx.URL(gateway.url).port or 0)

        def connect(number: int) -> list[socket.socket]:
            return [
                lines.enter_context(socket.create_connection(address, timeout=60))
                for _ in range(number)
            ]

        def answers() -> bool:
            try:
                return httpx.get(f"{gateway.url}/healthz").status_code == 200
            except httpx.HTTPError:
                return False

        connect((400 - 256) // 2 - 32)
        wait_until(lambda: ask(gateway, "full").status_code == 503)
        assert answers()
        assert (
            'semkv_turned_away_total{what="connections"} 1.0'
            in httpx.get(f"{gateway.url}/metrics").text
        )
        more = connect(40)
        wait_until(lambda: select.select(more, [], [], 0)[0])
        assert select.select(more, [], [], 0)[0][0].recv(4096)[9:12] == b"503", (
            "it has room for 32 of them"
        )
        lines.close()
        wait_until(lambda: answers() and ask(gateway, "no more").status_code == 502)


def test_what_it_cannot_start_with_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "set_up_logs", lambda *_: None)  # this process's own
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    folder = tmp_path / "file" / "cache"
    for command in (
        ["serve", "--port", "0"],
        ["run", "--engine", "scripted", "--max-samples", "1"],
    ):
        out = invoke([*command, "--cache-dir", str(folder)])
        assert out.exit_code == 2
        assert (
            out.stderr
            == f"semkv: {folder} cannot be written (Not a directory); choose another --cache-dir\n"
        )
    with listening("127.0.0.1", 0) as taken:
        taken.listen()
        out = invoke(["serve", "--port", str(taken.getsockname()[1])])
        assert re.fullmatch(
            r"semkv: --port \d+, --host 127.0.0.1: cannot listen .* in use\); name another\n",
            out.stderr,
        )
    own = free_port()
    for flags, named in (
        (
            ["--port", str(own), "--upstream", f"http://localhost:{own}/"],
            "--upstream: 'http://localhost:",
        ),
        (["--trusted-proxy", "foo"], "--trusted-proxy: 'foo' is not allowed; expected networks"),
        (["--port", "99999"], 'Invalid value "99999" for --port. Must be <= 65535'),
        (["--workers", "2", "--store", "memory"], "--workers: 2 is not allowed"),
        (["--upstream", "http://[::1"], "--upstream: 'http://[::1' is not allowed; expected a URL"),
        (
            ["--upstream", "http://me:secret@a"],
            "--upstream: 'http://a' is not allowed; expected a URL without",
        ),
        (
            ["--upstream", "http://a/v1/"],
            "--upstream: 'http://a/v1/' is not allowed; expected a URL without",
        ),
    ):
        out = invoke(["serve", *flags])
        assert out.exit_code == 2
        assert out.stderr.startswith(f"semkv: {named}")


def test_what_was_warmed_is_there(tmp_path: Path) -> None:
    """Also a prompt with a line break that ends no line of JSON, in a file with a byte order mark."""
    text = "one\u2028line"
    (tmp_path / "prompts").write_text(json.dumps(text, ensure_ascii=False) + "\r\n\n", "utf-8-sig")
    with Pair(tmp_path) as pair:
        for outcome in ("1 kept, 0 there already", "0 kept, 1 there already"):
            out = semkv(
                "warm", tmp_path / "prompts", "--url", pair.url, "--model", "scripted"
            ).stdout
            assert out == f"{outcome}, 0 not kept, 0 failed\n"
        assert kind(httpx.post(f"{pair.url}/v1/chat/completions", json=chat(text))) == "hit"


def test_what_could_not_be_kept_is_counted_with_its_reason(tmp_path: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
    lines = [
        "kept",
        "cut off [length]",
        {"messages": [{"role": "user", "content": "drawn"}], "temperature": 0.7},
        {"messages": [{"role": "user", "content": [picture, {"type": "text", "text": "seen?"}]}]},
    ]
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    with Pair(tmp_path) as pair:
        for kept in ("1 kept, 0 there already", "0 kept, 1 there already"):
            out = semkv("warm", tmp_path / "prompts", "--url", pair.url, "--model", "scripted")
            assert out.stdout == f"{kept}, 3 not kept, 0 failed\n"
            for reason in ("sampled", "media_that_is_not_in_the_request", "unfinished"):
                assert f"not kept: 1 ({reason})" in out.stderr


def test_documents_are_sent_alone_and_no_answer_is_kept(tmp_path: Path) -> None:
    lines = ["a document", [5, 6, 7]]
    (tmp_path / "documents").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    (tmp_path / "wrong").write_text('[1, "2"]', "utf-8")
    with Pair(tmp_path) as pair:
        said = ["--url", pair.url, "--model", "scripted"]
        for total in (2, 4):  # again and again: the engine may have dropped them
            out = semkv("warm", "--documents", tmp_path / "documents", *said)
            assert out.stdout == "2 sent, 0 failed\n"
            assert pair.upstream.total == total
        sent = [body for body in pair.upstream.calls if "prompt" in body][-2:]
        assert sorted(map(str, (body["prompt"] for body in sent))) == ["[5, 6, 7]", "a document"]
        assert {body["max_tokens"] for body in sent} == {1}
        assert {body["add_special_tokens"] for body in sent} == {False}
        again = httpx.post(f"{pair.url}/v1/completions", json=sent[0])
        assert kind(again) != "hit"
    out = invoke(["warm", "--documents", str(tmp_path / "wrong")])
    assert (out.exit_code, "line 1" in out.stderr) == (2, True)


class TestWorkers:
    """Two processes on one port and one directory."""

    @pytest.fixture
    def started(self, tmp_path: Path) -> Iterator[tuple[Started, Scripted]]:
        upstream = Scripted()
        with (
            Served(upstream) as behind,
            Started(behind.url, tmp_path, "--workers=2", SEMKV_ADMIN_KEY=ADMIN) as running,
        ):
            wait_until(lambda: running.log.read_text().count("startup complete") == 2)
            yield running, upstream

    def test_they_share_answers_figures_and_invalidations(
        self, started: tuple[Started, Scripted]
    ) -> None:
        running, upstream = started
        for number in range(40):  # each on a connection of its own, so that both take some
            assert ask(running, f"question {number % 4}").status_code == 200
        assert upstream.total <= 4 * 2
        wait_until(lambda: figure(running, "semkv_requests_total") >= 40)
        stats = httpx.get(f"{running.url}/semkv/api/stats", headers=KEY).json()
        assert stats["workers"] == len(workers_of(running)) == 2
        assert sum(stats["totals"]["tiers"].values()) == figure(running, "semkv_requests_total")
        wait_until(lambda: figure(running, "semkv_response_entries") == 4)
        recent = f"{running.url}/semkv/api/recent"
        everything = [f"question {number}" for number in range(4)]

        def shown() -> dict[str, str]:
            """Questions of all workers' hits, with the ids of the hits."""
            hits = httpx.get(recent, headers=KEY).json()["hits"]
            return {hit["asked"][0]["text"]: hit["id"] for hit in hits}

        def both_tell() -> bool:
            lengths = {len(httpx.get(recent, headers=KEY).json()["hits"]) for _ in range(8)}
            return lengths == {40 - upstream.total}

        wait_until(both_tell)  # whichever worker is asked
        assert sorted(shown()) == everything
        url = f"{running.url}/semkv/api/wrong"
        removed = [
            httpx.post(url, headers=KEY, json={"id": shown()["question 3"]}).json()
            for _ in range(8)  # at either worker
        ]
        assert removed[0] == {"removed": 1}
        assert httpx.post(url, headers=KEY, json={"id": "none"}).status_code == 404
        gone = {"prefix": "question", "dry_run": False}
        assert (
            httpx.post(f"{running.url}/semkv/api/invalidate", headers=KEY, json=gone).json()[
                "count"
            ]
            == 3
        )
        upstream.script["question 1"] = {
            "status": "418"
        }  # so that what is old is told from what is new
        wait_until(lambda: {ask(running, "question 1").status_code for _ in range(20)} == {418})
        both = workers_of(running)
        (figures,) = re.findall(rf"{FOLDER}=([^\0]+)", Path(f"/proc/{both[0]}/environ").read_text())
        assert Path(figures).is_dir()
        running.kill()  # they end with their parent
        wait_until(lambda: all(not Path(f"/proc/{pid}").exists() for pid in both))
        assert not Path(figures).exists()

    def test_one_that_is_killed_or_replaced_takes_nothing_along(
        self, started: tuple[Started, Scripted]
    ) -> None:
        running, _ = started
        whole: list[str] = []
        stop = threading.Event()

        def traffic() -> None:
            for number in itertools.count():
                if stop.is_set():
                    return
                with suppress(httpx.HTTPError):  # on its way at the killed worker
                    assert ask(running, f"traffic {number}").status_code == 200
                    whole.append(f"traffic {number}")

        asking = threading.Thread(target=traffic)
        asking.start()
        for _ in range(2):
            before, so_far = workers_of(running), len(whole)
            wait_until(lambda so_far=so_far: len(whole) > so_far + 5)
            os.kill(before[0], signal.SIGKILL)
            wait_until(lambda before=before: len(set(workers_of(running)) - set(before)) == 1)
        wait_until(lambda: running.log.read_text().count("startup complete") == 4)
        before = workers_of(running)
        os.kill(running.pid, signal.SIGHUP)  # a reload: one after the other is replaced
        wait_until(lambda: len(workers_of(running)) == 2 and not {*workers_of(running)} & {*before})
        wait_until(
            lambda: figure(running, "semkv_memory_limit_bytes") == 2 * (256 << 20)
        )  # those that run
        stop.set()
        asking.join()
        wait_until(lambda: all(kind(ask(running, text)) == "hit" for text in whole))
        with closing(sqlite3.connect(running.log.parent / "cache" / "catalog.sqlite")) as db:
            wait_until(
                lambda: db.execute("SELECT COUNT(*) FROM responses").fetchone()[0] >= len(whole)
            )
        both = workers_of(running)
        assert running.stop() == 0
        assert all(not Path(f"/proc/{pid}").exists() for pid in both)


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


def workers_of(running: Started) -> list[int]:
    """The processes that answer."""
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    found = []
    for pid in children:
        with suppress(ProcessLookupError, FileNotFoundError):  # it ends at this moment
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def figure(running: Started, name: str) -> float:
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.split("[{ ]", line)[0] == name)
