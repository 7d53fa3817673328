"""The gateway under what breaks gateways: a kill under load, a fuzzer, strangers with similar questions."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from gateway_helpers import ADMIN, ONE, OTHER, PATIENT, Pair, Served, Started, chat, said, wait_until
from scripted_upstream import Scripted


def test_every_answer_that_was_given_survives_kill_9(tmp_path: Path) -> None:
    with Served(Scripted()) as behind:
        given: dict[str, bytes] = {}

        def load(url: str, worker: int) -> None:
            with httpx.Client(timeout=120) as client, suppress(httpx.HTTPError):
                for i in itertools.count():
                    text = f"question {i} of {worker}"
                    answer = client.post(f"{url}/v1/chat/completions", json=chat(text, stream=i % 2 == 1))
                    if i % 2 == 0 or answer.text.endswith("[DONE]\n\n"):
                        given[text] = answer.content

        with Started(behind.url, tmp_path) as first:
            workers = [threading.Thread(target=load, args=(first.url, i)) for i in range(4)]
            for worker in workers:
                worker.start()
            wait_until(lambda: len(given) > 150)
            first.kill()
            for worker in workers:
                worker.join(120)
        with Started(behind.url, tmp_path) as second, httpx.Client(timeout=120) as client:
            for text, content in given.items():
                answer = client.post(f"{second.url}/v1/chat/completions", json=chat(text))
                assert answer.headers["x-semkv"].startswith("hit"), text
                assert answer.json()["choices"][0]["message"]["content"] == f"You said: {text}"
                assert answer.content == content or content.startswith(b"data:")
            assert second.stop() == 0
        assert all(json.loads(line)["level"] != "error" for line in second.log.read_text().splitlines())


def test_open_requests_are_finished_on_a_signal_to_stop(tmp_path: Path) -> None:
    with Served(Scripted()) as behind, Started(behind.url, tmp_path) as gateway, ThreadPoolExecutor() as pool:
        asked = pool.submit(httpx.post, f"{gateway.url}/v1/chat/completions", json=chat("[delay=1.5]"), timeout=120)
        wait_until(lambda: behind.app.running == 1)
        os.kill(gateway.pid, signal.SIGTERM)
        assert asked.result(120).status_code == 200


@pytest.fixture(scope="module")
def semantic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    settings = {"similarity_threshold": 0.8, **PATIENT}  # a busy machine is no fault
    with Pair(tmp_path_factory.mktemp("semantic"), semantic=True, **settings) as running:
        yield running


class TestTenantsWithNeighbours:
    """The answer itself says whose it is, and what the upstream was asked."""

    def test_a_neighbour_of_ones_own_is_found(self, semantic: Pair) -> None:
        owner = {"Authorization": "Bearer owner"}
        first = semantic.post(ONE, headers=owner)

        def found() -> bool:
            answer = semantic.post(OTHER, headers=owner)
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
