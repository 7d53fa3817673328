"""The gateway under what breaks gateways: a kill under load, a fuzzer, strangers with similar questions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from command_line import invoke
from gateway_helpers import ADMIN, ONE, OTHER, PATIENT, SECRET, Pair, Served, chat, said, wait_until
from ports import free_port
from scripted_upstream import Scripted
from semkv.config import CacheConfig, Variables, parse
from semkv.connectors.settings import KVSettings, read_settings
from semkv.errors import ConfigError
from semkv.server.settings import ServerSettings, secret_of
from semkv_lab.settings import resolve


class Process:
    """``semkv serve`` as its own process."""

    def __init__(self, folder: Path, upstream: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "semkv", "serve", "--upstream", upstream, "--port", str(self.port)]
        command += ["--cache-dir", str(folder), "--no-semantic", "--store-timeout", "10"]
        self.process = subprocess.Popen(command, env={**os.environ, "SEMKV_SECRET": SECRET}, stderr=subprocess.PIPE)
        wait_until(self._answers, 60)

    def _answers(self) -> bool:
        assert self.process.poll() is None
        try:
            return httpx.get(f"{self.url}/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    def end(self, how: signal.Signals) -> str:
        self.process.send_signal(how)
        return self.process.communicate(timeout=120)[1].decode()


def test_every_answer_that_was_given_survives_kill_9(tmp_path: Path) -> None:
    with Served(Scripted()) as behind:
        first = Process(tmp_path, behind.url)
        given: dict[str, bytes] = {}
        stop = threading.Event()

        def load(worker: int) -> None:
            with httpx.Client(timeout=120) as client:
                for i in range(100_000):
                    text = f"question {i} of {worker}"
                    try:
                        answer = client.post(f"{first.url}/v1/chat/completions", json=chat(text, stream=i % 2 == 1))
                    except httpx.HTTPError:
                        return
                    if i % 2 == 0 or answer.text.endswith("[DONE]\n\n"):
                        given[text] = answer.content
                    if stop.is_set():
                        return

        workers = [threading.Thread(target=load, args=(i,)) for i in range(4)]
        for worker in workers:
            worker.start()
        wait_until(lambda: len(given) > 150)
        first.end(signal.SIGKILL)
        stop.set()
        for worker in workers:
            worker.join(120)
        second = Process(tmp_path, behind.url)
        try:
            with httpx.Client(timeout=120) as client:
                for text, content in given.items():
                    answer = client.post(f"{second.url}/v1/chat/completions", json=chat(text))
                    assert answer.headers["x-semkv"].startswith("hit"), text
                    assert answer.json()["choices"][0]["message"]["content"] == f"You said: {text}"
                    assert answer.content == content or content.startswith(b"data:")
        finally:
            log = second.end(signal.SIGTERM)
        assert second.process.returncode in (0, -signal.SIGTERM)
        assert all(json.loads(line)["level"] != "error" for line in log.splitlines())


def test_open_requests_are_finished_on_a_signal_to_stop(tmp_path: Path) -> None:
    with Served(Scripted()) as behind:
        gateway = Process(tmp_path, behind.url)
        found: list[httpx.Response] = []
        ask = threading.Thread(
            target=lambda: found.append(httpx.post(f"{gateway.url}/v1/chat/completions", json=chat("[delay=1.5]")))
        )
        ask.start()
        wait_until(lambda: behind.app.running == 1)
        gateway.end(signal.SIGTERM)
        ask.join(120)
        assert found[0].status_code == 200


@pytest.fixture(scope="module")
def semantic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    settings = {"tell": False, "similarity_threshold": 0.8, **PATIENT}  # a busy machine is no fault
    with Pair(tmp_path_factory.mktemp("semantic"), semantic=True, **settings) as running:
        yield running


class TestTenantsWithNeighbours:
    """Headers that tell are off: the answer itself says whose it is, and what the upstream was asked."""

    def test_a_neighbour_of_ones_own_is_found(self, semantic: Pair) -> None:
        owner = {"Authorization": "Bearer owner"}
        first = semantic.post(ONE, headers=owner)

        def found() -> bool:
            answer = semantic.post(OTHER, headers=owner)
            assert "x-semkv" not in answer.headers
            return answer.json()["id"] == first.json()["id"]

        wait_until(found)

    def test_a_strangers_neighbour_is_not(self, semantic: Pair) -> None:
        before = len(semantic.upstream.calls)
        for text in (ONE, OTHER, ONE.upper()):
            for stream in (False, True):
                answer = semantic.post(
                    text, headers={"Authorization": f"Bearer stranger {text} {stream}"}, stream=stream
                )
                assert f"You said: {text}" in answer.text or stream
        sent = [body["messages"][-1]["content"] for body in semantic.upstream.calls[before:]]
        assert sorted(sent) == sorted([ONE, OTHER, ONE.upper()] * 2), "each was asked as it came"

    def test_an_approximate_plan_is_sent_as_the_donors_prompt_under_the_tenants_salt(self, semantic: Pair) -> None:
        headers = {"Authorization": "Bearer planner"}
        entries = semantic.entries
        semantic.post("How do I repair a flat bicycle tyre?", headers=headers)
        wait_until(lambda: semantic.entries > entries)
        before = len(semantic.upstream.calls)

        def planned() -> bool:  # other parameters, so the donor's answer will not do
            semantic.post(
                "how do i repair  a flat bicycle tyre?", headers=headers, max_tokens=17 + len(semantic.upstream.calls)
            )
            return semantic.upstream.calls[-1]["messages"][-1]["content"] == "How do I repair a flat bicycle tyre?"

        wait_until(planned)
        salts = {body["cache_salt"] for body in semantic.upstream.calls[before:]}
        assert len(salts) == 1
        semantic.post("How do I repair a flat bicycle tyre?", headers={"Authorization": "Bearer other"})
        assert semantic.upstream.calls[-1]["cache_salt"] not in salts


def test_checked_hits_count_wrong_ones_and_keep_the_own_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair(tmp_path, semantic=True, similarity_threshold=0.8, verify_rate=1.0) as pair:
        monkeypatch.setattr(pair.app.gateway.cache.semantic, "same_answer", lambda first, second: first == second)
        pair.post(ONE, seed=4)
        wait_until(lambda: pair.metric("semkv_semantic_entries") == 1)
        assert pair.post(OTHER, seed=4).headers["x-semkv"].startswith("hit tier=text:semantic")
        wait_until(lambda: pair.metric("semkv_hits_checked") == 1)
        assert pair.metric("semkv_wrong_hit_share") == 1.0, "the scripted server says what it was asked"
        answer = pair.post(OTHER, seed=4)
        assert answer.headers["x-semkv"].startswith("hit tier=exact")
        assert said(answer) == f"You said: {OTHER}"
        wait_until(lambda: pair.metric("semkv_semantic_entries") == 2)
        third = "How could I bake sourdough bread at home?"  # with a seed for which the donor's answer is not there yet
        assert pair.post(third, seed=5).headers["x-semkv"].startswith("miss reuse=text:semantic")
        wait_until(lambda: pair.metric("semkv_hits_checked") == 2)
        wait_until(lambda: pair.post(third, seed=5).headers["x-semkv"].startswith("hit tier=exact"))


def test_a_key_that_is_refused_in_a_check_reads_no_more(tmp_path: Path) -> None:
    with Pair(tmp_path, semantic=True, similarity_threshold=0.8, verify_rate=1.0) as pair:
        pair.post(ONE)
        wait_until(lambda: pair.metric("semkv_semantic_entries") == 1)
        pair.upstream.script = {OTHER: {"status": "403"}}
        assert pair.post(OTHER).headers["x-semkv"].startswith("hit tier=text:semantic")
        wait_until(lambda: pair.post(ONE).headers["x-semkv"].startswith("miss"))


@pytest.mark.parametrize(("settings", "kept"), [({}, False), ({"ttl": 0.0}, True)], ids=["default", "for ever"])
def test_an_answer_lives_a_day_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, float], kept: bool
) -> None:
    with Pair(tmp_path, **settings) as pair:
        responses = pair.app.gateway.cache.responses
        clocks = [part for part in (responses, *vars(responses).values()) if hasattr(part, "_clock")]
        pair.post("news")
        for seconds, found in ((86_000, True), (86_500, kept)):
            for part in clocks:
                monkeypatch.setattr(part, "_clock", lambda late=seconds: time.time() + late)
            assert pair.post("news").headers["x-semkv"].startswith("hit" if found else "miss")


def test_a_stale_answer_is_served_while_a_fresh_one_is_fetched(tmp_path: Path) -> None:
    with Pair(tmp_path, ttl=1.0, stale=60.0) as pair:
        first = pair.post("news")
        time.sleep(1.2)
        served = pair.post("news")
        assert served.json()["id"] == first.json()["id"]
        assert served.headers["x-semkv"].endswith("stale")
        wait_until(lambda: pair.post("news").json()["id"] != first.json()["id"])
        assert pair.post("news", headers={"Cache-Control": "max-age=30"}).headers["x-semkv"].startswith("hit")


class TestFuzz:
    @pytest.fixture(scope="class")
    def schema(self, semantic: Pair) -> object:
        return schemathesis.openapi.from_url(f"{semantic.url}/openapi.json")

    def test_no_500(self, semantic: Pair, schema: schemathesis.schemas.BaseSchema) -> None:
        seen: set[tuple[str, int]] = set()
        asked = semantic.upstream.total
        for operation in (result.ok() for result in schema.get_all_operations()):
            modes = schemathesis.GenerationMode
            for mode in modes if operation.method == "post" else [modes.POSITIVE]:

                @settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
                @given(case=operation.as_strategy(generation_mode=mode))
                def check(case: schemathesis.Case) -> None:
                    case.headers["Authorization"] = f"Bearer {ADMIN}"
                    answer = case.call(timeout=120)
                    seen.add((case.path, answer.status_code))
                    assert answer.status_code < 500, f"{case.path}: {answer.status_code} {answer.text[:200]}"

                check()
        assert semantic.upstream.total > asked
        assert ("/semkv/api/invalidate", 200) in seen
        assert semantic.metric("semkv_faults_total") == 0

    @pytest.mark.parametrize(
        "raw",
        [
            b'{"model": "m", "model": "n", "messages": []}',
            b'{"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "\\ud800"}]}',
            b'{"model": "m", "temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}',
            b'{"model": "m", "seed": ' + b"9" * 5000 + b', "messages": [{"role": "user", "content": "x"}]}',
            b'{"model": ["m"], "temperature": {}, "stream": "yes", "messages": {"role": 1}}',
            b'{"model": "m", "temperature": 0, "messages": [{"role": "user", "content": [{"type": "image_url", '
            b'"image_url": {"url": "data:image/png;base64,####"}}, {"type": "text", "text": "x"}]}]}',
            b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        ],
    )
    def test_hand_made_malice(self, semantic: Pair, raw: bytes) -> None:
        for path in ("/v1/chat/completions", "/v1/completions"):
            headers = {"Content-Type": "application/json"}
            answer = httpx.post(f"{semantic.url}{path}", content=raw, headers=headers, timeout=120)
            assert answer.status_code in (200, 400)


def served(monkeypatch: pytest.MonkeyPatch, *flags: str) -> ServerSettings:
    """The settings that ``semkv serve`` makes of its flags."""
    found: list[ServerSettings] = []
    monkeypatch.setattr("semkv.server.serve.run_server", lambda settings, *_, **more: found.append(settings))
    assert invoke(["serve", *flags]).exit_code == 0
    return found[0]


def from_environment(variables: Mapping[str, str]) -> ServerSettings:
    return parse(ServerSettings, [], Variables(ServerSettings, variables))


class TestSettings:
    def test_from_the_environment(self) -> None:
        found = from_environment({"SEMKV_TTL": "60", "SEMKV_SEMANTIC": "0", "SEMKV_TRUSTED_PROXIES": "10.0.0.0/8, ::1"})
        assert (found.ttl, found.semantic, len(found.networks)) == (60.0, False, 2)

    @pytest.mark.parametrize("value", [None, "", "~/answers", "answers"])
    def test_every_part_means_the_same_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("SEMKV_CACHE_DIR", raising=False)
        if value is not None:
            monkeypatch.setenv("SEMKV_CACHE_DIR", value)
        folders = {
            served(monkeypatch).cache_dir,
            ServerSettings().cache_dir,
            from_environment(os.environ).cache_dir,
            read_settings(KVSettings, None).cache_dir,
            resolve().cache.cache_dir,
        }
        default = tmp_path / ".cache" / "semkv"
        assert folders == {default if not value else Path(value).expanduser()}

    def test_the_bounds_of_donors_are_the_caches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        configs = [
            served(monkeypatch).cache_config(),
            served(monkeypatch, "--max-entries=7", "--media-mib=3").cache_config(),
        ]
        configs.append(from_environment({"SEMKV_MAX_ENTRIES": "7", "SEMKV_MEDIA_MIB": "3"}).cache_config())
        configs.append(resolve(max_entries=7, media_mib=3).cache)
        default = CacheConfig(Path())
        bounds = [(config.max_entries, config.media_mib) for config in configs if config is not None]
        assert bounds == [(default.max_entries, default.media_mib), *[(7, 3)] * 3]

    @pytest.mark.parametrize(
        ("variable", "value"),
        [
            ("SEMKV_TTL", "soon"),
            ("SEMKV_TTL", "-1"),
            ("SEMKV_SEMANTIC", "maybe"),
            ("SEMKV_TRUSTED_PROXIES", "everybody"),
            ("SEMKV_MODE", "fast"),
            ("SEMKV_UPSTREAM", "localhost:8000"),
            ("SEMKV_MEMORY_MIB", "0"),
            ("SEMKV_MEDIA_MIB", "0"),
        ],
    )
    def test_a_wrong_value_is_named(self, variable: str, value: str) -> None:
        with pytest.raises(ConfigError, match=value):
            _ = from_environment({variable: value}).networks

    def test_the_secret_is_made_once(self, tmp_path: Path) -> None:
        given = ServerSettings(cache_dir=tmp_path)
        assert secret_of(given, {}) == secret_of(given, {})
        assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
        with pytest.raises(ConfigError, match="SEMKV_SECRET"):
            secret_of(ServerSettings(cache_dir=tmp_path, store="redis://localhost"), {})
