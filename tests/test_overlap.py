"""The upstream is asked while the lookup runs, where lookups rarely find anything and nobody is there to be joined.

What it finds before the answer is whole is used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_helpers import Pair, chat, wait_until
from semkv.server.request_key import CanonicalRequest
from test_paraphrases import HUNDRED, ONE, OTHER, a_tenant, asked, beside, paraphrases, said


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("semkv.server.cache_client._LOOKUP_S", 120.0)  # a busy machine is no fault
        folder = tmp_path_factory.mktemp("overlap")
        with Pair(folder, semantic=True, similarity_threshold=0.8, store_timeout=60.0) as pair:
            yield pair


@pytest.fixture
def pair(running: Pair) -> Iterator[Pair]:
    running.upstream.calls.clear()
    running.app.gateway.cache.found_share = 0.0
    yield running
    running.upstream.script = {}
    running.upstream.gate.set()
    wait_until(
        lambda: not running.app.gateway.outgoing.background and not len(running.app.gateway.outgoing.flights.running)
    )
    assert not len(paraphrases(running))
    wait_until(lambda: running.app.gateway.outgoing.flights.held_bytes == 0)
    assert running.metric("semkv_faults_total") == 0


class Held:
    """Lookups that wait until they are let go."""

    def __init__(self, pair: Pair, patch: pytest.MonkeyPatch) -> None:
        semantic = pair.app.gateway.cache.semantic
        assert semantic is not None
        self.go, self.waiting, look = threading.Event(), threading.Event(), semantic.try_reuse

        def slow(*args: Any, **kwargs: Any) -> Any:
            self.waiting.set()
            assert self.go.wait(30)
            return look(*args, **kwargs)

        patch.setattr(semantic, "try_reuse", slow)


def entries(pair: Pair) -> int:
    semantic = pair.app.gateway.cache.semantic
    assert semantic is not None
    return semantic.stats().entries


def let_in(pair: Pair) -> tuple[dict[str, str], int]:
    """A tenant whose key the upstream has accepted, and how many entries there are."""
    tenant, before = a_tenant(), entries(pair)
    pair.post("Let me in.", headers=tenant)
    wait_until(lambda: entries(pair) == before + 1)
    return tenant, before + 1


def answered_once(pair: Pair) -> tuple[dict[str, str], int]:
    """The same, after the first question was answered and recorded."""
    tenant, before = let_in(pair)
    pair.post(ONE, headers=tenant)
    wait_until(lambda: entries(pair) == before + 1)
    return tenant, before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_whole_waits_for_no_lookup(pair: Pair, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Nothing is left to save. It is recorded all the same."""
    tenant, before = let_in(pair)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        held = Held(pair, patch)
        first = pool.submit(pair.post, ONE, headers=tenant, stream=stream)
        assert held.waiting.wait(30)
        answer = first.result(30)
        assert entries(pair) == before
        held.go.set()
    assert (said(answer), answer.headers["x-semkv"]) == (f"You said: {ONE}", "miss")
    wait_until(lambda: entries(pair) == before + 1)
    pair.upstream.gate.clear()
    similar = pair.post(OTHER, headers=tenant)
    assert similar.headers["x-semkv"].startswith("hit tier=text:semantic")
    assert said(similar) == f"You said: {ONE}"


def test_a_hit_that_comes_first_cuts_the_request_off(pair: Pair) -> None:
    tenant, before = answered_once(pair)
    aborted, cut = pair.upstream.aborted, pair.metric("semkv_overlap_cut_total")
    pair.upstream.gate.clear()  # the upstream takes the request, and does not answer
    similar = pair.post(OTHER, headers=tenant)
    assert said(similar) == f"You said: {ONE}"
    assert asked(pair)[-1] == OTHER
    wait_until(lambda: pair.upstream.aborted == aborted + 1)
    assert pair.metric("semkv_overlap_cut_total") == cut + 1
    assert entries(pair) == before, "nothing is recorded of what was cut off"


def test_a_stream_that_has_begun_to_come_in_waits_for_the_lookup(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still to come can be saved, and nothing of it has gone out."""
    tenant, _ = answered_once(pair)
    pair.upstream.hold_at = 2
    pair.upstream.gate.clear()
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        held = Held(pair, patch)
        similar = pool.submit(pair.post, OTHER, headers=tenant, stream=True)
        wait_until(lambda: any(flight.chunk(0) is not None for flight in pair.app.gateway.outgoing.flights.running))
        assert not similar.done()
        held.go.set()
        answer = similar.result(30)
    pair.upstream.hold_at = 0
    assert answer.headers["x-semkv"].startswith("hit tier=text:semantic")
    assert said(answer) == f"You said: {ONE}"


def test_a_donor_found_after_the_answer_has_no_part_in_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant, before = answered_once(pair)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        held = Held(pair, patch)
        answer = pool.submit(pair.post, OTHER, headers=tenant).result(30)
        held.go.set()
        wait_until(lambda: entries(pair) == before + 1)
    assert (said(answer), answer.headers["x-semkv"]) == (f"You said: {OTHER}", "miss")


def test_a_failure_waits_for_the_lookup(pair: Pair) -> None:
    tenant, _ = answered_once(pair)
    pair.upstream.script = {OTHER: {"status": "503"}}
    similar = pair.post(OTHER, headers=tenant)
    assert (similar.status_code, said(similar)) == (200, f"You said: {ONE}")
    pair.upstream.script = {"A question of its own?": {"status": "503"}}
    assert pair.post("A question of its own?", headers=tenant).status_code == 503


def test_a_paraphrase_of_a_request_on_its_way_joins_it_and_asks_for_nothing(pair: Pair) -> None:
    tenant, _ = let_in(pair)
    pair.upstream.calls.clear()
    with beside(pair, ONE, headers=tenant):
        wait_until(lambda: len(paraphrases(pair)) == 1)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(pair.post, OTHER, headers=tenant)
            wait_until(lambda: sum(len(f.readers) for f in pair.app.gateway.outgoing.flights.running) == 2)
            pair.upstream.gate.set()
            answer = second.result(30)
    assert said(answer) == f"You said: {ONE}"
    assert answer.headers["x-semkv"].endswith("joined")
    assert asked(pair) == [ONE]


def test_a_paraphrase_waits_for_the_lookup_of_one_that_went_before_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second lookup is over first: without waiting it would find nobody to join, and go upstream itself."""
    tenant, _ = let_in(pair)
    pair.upstream.calls.clear()
    semantic = pair.app.gateway.cache.semantic
    assert semantic is not None
    over, go, look = threading.Event(), threading.Event(), semantic.try_reuse

    def first_waits(request: Any) -> Any:
        report = look(request)
        if request.segments[-1].text == ONE:
            assert go.wait(30)
        else:
            over.set()
        return report

    with monkeypatch.context() as patch:
        patch.setattr(semantic, "try_reuse", first_waits)
        with beside(pair, ONE, headers=tenant), ThreadPoolExecutor(1) as pool:
            second = pool.submit(pair.post, OTHER, headers=tenant)
            assert over.wait(30)
            time.sleep(0.1)
            assert asked(pair) == [ONE]
            go.set()
            wait_until(lambda: sum(len(f.readers) for f in pair.app.gateway.outgoing.flights.running) == 2)
            pair.upstream.gate.set()
            answer = second.result(30)
    assert said(answer) == f"You said: {ONE}"
    assert asked(pair) == [ONE]


def test_who_is_alone_waits_for_no_group(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is worked out for those who come meanwhile; one of another group does not wait either."""
    (tenant, _), (other, _), (other_still, _) = let_in(pair), let_in(pair), let_in(pair)
    pair.upstream.calls.clear()
    third_one = HUNDRED[3]
    caches, sorted_by = pair.app.gateway.cache, list[str]()
    work_out = caches.pending_group

    def noted(canonical: CanonicalRequest) -> str:
        sorted_by.append(canonical.prompt)
        return work_out(canonical)

    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:
        held = Held(pair, patch)
        pair.upstream.gate.clear()
        patch.setattr(caches, "pending_group", noted)
        first = pool.submit(pair.post, ONE, headers=tenant)
        wait_until(lambda: asked(pair) == [ONE])
        assert sorted_by == []
        second = pool.submit(pair.post, OTHER, headers=other)
        wait_until(lambda: asked(pair) == [ONE, OTHER])
        assert sorted_by == [OTHER, ONE]
        third = pool.submit(pair.post, third_one, headers=other_still)
        wait_until(lambda: asked(pair) == [ONE, OTHER, third_one])
        assert sorted_by == [OTHER, ONE, third_one]  # of each once
        held.go.set()
        pair.upstream.gate.set()
        assert said(first.result(30)) == f"You said: {ONE}"
        assert said(second.result(30)) == f"You said: {OTHER}"
        assert said(third.result(30)) == f"You said: {third_one}"


def test_who_was_answered_at_once_holds_no_paraphrase_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's lookup still runs when its answer is there. To wait for it would take longer than to ask."""
    tenant, _ = let_in(pair)
    pair.upstream.calls.clear()
    with monkeypatch.context() as patch, ThreadPoolExecutor(20) as pool:
        held = Held(pair, patch)
        assert said(pool.submit(pair.post, ONE, headers=tenant).result(30)) == f"You said: {ONE}"
        assert said(pool.submit(pair.post, OTHER, headers=tenant).result(30)) == f"You said: {OTHER}"
        held.go.set()
    assert asked(pair) == [ONE, OTHER]


def test_what_the_store_has_is_served_in_place_of_what_was_asked(pair: Pair) -> None:
    """Memory has lost it, so the upstream is asked while the store is."""
    tenant, _ = answered_once(pair)
    responses = pair.app.gateway.cache.responses
    for key in list(responses._memory._entries):
        responses._memory._drop(key)
    pair.upstream.gate.clear()
    cut, aborted = pair.metric("semkv_overlap_cut_total"), pair.upstream.aborted
    again = pair.post(ONE, headers=tenant)
    assert again.headers["x-semkv"].startswith("hit tier=exact")
    wait_until(lambda: pair.upstream.aborted == aborted + 1)
    assert pair.metric("semkv_overlap_cut_total") == cut + 1


def test_without_the_semantic_tiers_the_store_is_asked_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pair(tmp_path, store_timeout=60.0) as pair, ThreadPoolExecutor(1) as pool:
        pair.post(ONE)
        caches, go = pair.app.gateway.cache, threading.Event()
        caches.found_share, get = 0.0, caches.responses.lookup

        def slow(key: str) -> Any:
            assert go.wait(30)
            return get(key)

        monkeypatch.setattr(caches.responses, "lookup", slow)
        assert pool.submit(pair.post, OTHER).result(30).headers["x-semkv"] == "miss"
        assert asked(pair) == [ONE, OTHER]
        go.set()
        wait_until(lambda: not caches._running)
        assert caches.found_share == 0.0, "what it was answered meanwhile is no hit"


def test_an_answer_that_came_before_the_store_was_asked_is_recorded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look into the store finds what the request itself has brought: a miss, with a lookup as any."""
    tenant, before = let_in(pair)
    responses, go = pair.app.gateway.cache.responses, threading.Event()
    look = responses.lookup

    def late(key: str) -> Any:
        assert go.wait(30)
        return look(key)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(responses, "lookup", late)
        assert pool.submit(pair.post, ONE, headers=tenant).result(30).headers["x-semkv"] == "miss"
        go.set()
        wait_until(lambda: entries(pair) == before + 1)


def test_paraphrases_wait_for_nothing_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup of the first fails: there is nobody to join, and its group is free again."""
    with Pair(tmp_path, semantic=True, similarity_threshold=0.8) as pair:
        semantic = pair.app.gateway.cache.semantic
        assert semantic is not None
        tenant, _ = let_in(pair)
        pair.app.gateway.cache.found_share = 0.0

        def broken(request: Any) -> Any:
            raise RuntimeError("no lookup today")

        with monkeypatch.context() as patch:
            patch.setattr(semantic, "try_reuse", broken)
            with beside(pair, ONE, headers=tenant) as first:
                wait_until(lambda: [p.looked_up.done() for p in paraphrases(pair)._running] == [True])
            assert said(first.result(30)) == f"You said: {ONE}"
        assert pair.metric("semkv_faults_total") == 1
        assert pair.post(OTHER, headers=tenant).headers["x-semkv"] == "miss"


def test_an_answer_that_is_too_old_for_the_client_costs_one_request(pair: Pair) -> None:
    tenant, _ = let_in(pair)
    pair.post(ONE, headers=tenant)
    time.sleep(1.1)
    pair.upstream.calls.clear()
    cut = pair.metric("semkv_overlap_cut_total")
    assert pair.post(ONE, headers={**tenant, "Cache-Control": "max-age=1"}).headers["x-semkv"] == "miss"
    assert asked(pair) == [ONE]
    assert pair.metric("semkv_overlap_cut_total") == cut


def test_a_key_that_the_upstream_refuses_gets_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the lookup finds a donor after the refusal came."""
    tenant, _ = answered_once(pair)
    pair.upstream.script = {OTHER: {"status": "401"}}
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        held = Held(pair, patch)
        similar = pool.submit(pair.post, OTHER, headers=tenant)
        wait_until(lambda: OTHER in asked(pair) and not len(pair.app.gateway.outgoing.flights.running))
        held.go.set()
        assert similar.result(30).status_code == 401
    pair.upstream.script = {ONE: {"status": "401"}}
    assert pair.post(ONE, headers=tenant).status_code == 401, "nor what was stored"


def test_an_equal_request_that_has_just_ended_is_not_joined(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is forgotten during the next one's lookup; its key would lead that one to the flight it started itself."""
    tenant, _ = let_in(pair)
    pair.upstream.script = {ONE: {"length": ""}}
    monkeypatch.setattr("semkv.server.upstream_requests._RECORD_DELAY_S", 0.5)
    pair.post(ONE, headers=tenant, stream=True)
    wait_until(lambda: not pair.app.gateway.cache._running)
    pair.upstream.hold_at = 2
    pair.upstream.gate.clear()

    def ask() -> str:
        body = chat(ONE, stream=True)
        with httpx.stream("POST", f"{pair.url}/v1/chat/completions", json=body, headers=tenant, timeout=30) as answer:
            pair.upstream.gate.set()
            answer.read()
        return f"{answer.status_code} {answer.headers.get('x-semkv')}"

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        held = Held(pair, patch)
        second = pool.submit(ask)
        assert held.waiting.wait(30)
        wait_until(lambda: len(paraphrases(pair)) == 1)
        held.go.set()
        assert second.result(30) == "200 miss"
    pair.upstream.hold_at = 0


def test_a_stale_answer_is_renewed_by_what_was_asked_meanwhile(tmp_path: Path) -> None:
    with Pair(tmp_path, ttl=0.5, stale=60.0, store_timeout=60.0) as pair:
        first, gateway = pair.post(ONE), pair.app.gateway
        gateway.cache.found_share = 0.0
        time.sleep(0.6)
        responses = gateway.cache.responses
        for key in list(responses._memory._entries):
            responses._memory._drop(key)
        with beside(pair, ONE) as second:
            assert second.result(30).headers["x-semkv"].endswith("stale")
            assert second.result().json() == first.json()
        wait_until(lambda: not gateway.outgoing.background and not len(gateway.outgoing.flights.running))
        assert asked(pair) == [ONE, ONE]
        assert (pair.upstream.aborted, pair.metric("semkv_overlap_cut_total")) == (0, 0)
        assert pair.post(ONE).json()["id"] != first.json()["id"]


def test_who_was_recorded_during_a_lookup_is_found_all_the_same(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup looked before the record, and is over after it: the donor is in neither place any more."""
    tenant, before = let_in(pair)
    semantic = pair.app.gateway.cache.semantic
    assert semantic is not None
    seen, go, look = threading.Event(), threading.Event(), semantic.try_reuse

    def late(request: Any) -> Any:
        report = look(request)
        if request.segments[-1].text == OTHER:
            seen.set()
            assert go.wait(30)
        return report

    pair.app.gateway.cache.found_share = 1.0
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(semantic, "try_reuse", late)
        with beside(pair, ONE, headers=tenant):
            second = pool.submit(pair.post, OTHER, headers=tenant)
            assert seen.wait(30)
        wait_until(lambda: entries(pair) == before + 1 and not len(paraphrases(pair)))
        go.set()
        answer = second.result(30)
    assert said(answer) == f"You said: {ONE}"
    assert OTHER not in asked(pair)


def test_at_first_and_where_lookups_find_things_they_come_first(pair: Pair) -> None:
    tenant, _ = answered_once(pair)
    for share in (1.0, 0.05):
        pair.app.gateway.cache.found_share = share
        pair.upstream.calls.clear()
        assert pair.post(OTHER, headers=tenant).headers["x-semkv"].startswith("hit tier=text:semantic")
        assert asked(pair) == []


def test_the_upstream_is_asked_meanwhile_once_fewer_than_5_in_100_lookups_find_something(pair: Pair) -> None:
    cache, count = pair.app.gateway.cache, 0
    cache.found_share = 1.0
    while not cache.rarely_finds:
        cache._count(found=False)
        count += 1
    assert count == 191
    for _ in range(4):
        cache._count(found=True)
    assert not cache.rarely_finds


def test_equal_requests_share_one(pair: Pair) -> None:
    tenant, _ = let_in(pair)
    pair.upstream.calls.clear()
    pair.upstream.gate.clear()
    with ThreadPoolExecutor(16) as pool:
        several = [pool.submit(pair.post, "The same for all?", headers=tenant) for _ in range(16)]
        wait_until(lambda: sum(len(f.readers) for f in pair.app.gateway.outgoing.flights.running) == 16)
        pair.upstream.gate.set()
        assert {said(one.result(30)) for one in several} == {"You said: The same for all?"}
    assert asked(pair) == ["The same for all?"]


def test_many_at_once_get_an_answer_of_their_kind(pair: Pair) -> None:
    tenant, _ = let_in(pair)
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda text: pair.post(text, headers=tenant), HUNDRED[:40]))
    assert {answer.status_code for answer in answers} == {200}
    assert {said(answer).removeprefix("You said: ") for answer in answers} <= set(HUNDRED)


def test_a_key_that_was_not_let_in_yet_waits_for_the_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all keys are one tenant, one that may be wrong has no part in what is shared."""
    with Pair(tmp_path, semantic=True, single_tenant=True) as pair:
        pair.app.gateway.cache.found_share = 0.0
        with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
            held = Held(pair, patch)
            first = pool.submit(pair.post, ONE, headers=a_tenant())
            assert held.waiting.wait(30)
            time.sleep(0.1)
            assert asked(pair) == []
            held.go.set()
            assert first.result(30).headers["x-semkv"] == "miss"


def test_the_same_prompt_is_no_reuse(tmp_path: Path) -> None:
    """After an answer was invalidated its entry is there still: the prompt that is sent is the request's own."""
    with Pair(tmp_path, semantic=True) as pair:
        semantic = pair.app.gateway.cache.semantic
        assert semantic is not None
        pair.post(ONE)
        wait_until(lambda: semantic.stats().entries == 1)
        assert pair.admin("invalidate", {"model": "scripted", "dry_run": False}).json()["count"] == 1
        assert pair.post(ONE).headers["x-semkv"] == "miss"
        assert pair.post(ONE).headers["x-semkv"].startswith("hit tier=exact ")


def test_lookups_that_fall_behind_are_left_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind others a lookup would come after the answer: it is not made, and nothing of it is recorded."""
    tenant, before = let_in(pair)
    left_out = pair.metric("semkv_overlap_left_out_total")
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr("semkv.server.cache_client._OVERLAPPED", 0)
        held = Held(pair, patch)
        assert said(pool.submit(pair.post, ONE, headers=tenant).result(30)) == f"You said: {ONE}"
        assert said(pool.submit(pair.post, OTHER, headers=tenant).result(30)) == f"You said: {OTHER}"
        held.go.set()
        wait_until(lambda: entries(pair) == before + 1)
    assert pair.metric("semkv_overlap_left_out_total") == left_out + 1


def test_what_a_donor_was_worth_is_learnt_from_the_answer_that_came_first(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, before = answered_once(pair)
    semantic = pair.app.gateway.cache.semantic
    assert semantic is not None
    learnt = list[tuple[str, str]]()
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(semantic._checking._decider, "learns", True, raising=False)
        patch.setattr(semantic._checking, "_same", lambda one, other: bool(learnt.append((one, other))) or True)
        held = Held(pair, patch)
        answer = pool.submit(pair.post, OTHER, headers=tenant).result(30)
        held.go.set()
        wait_until(lambda: entries(pair) == before + 1)
    assert said(answer) == f"You said: {OTHER}"
    assert learnt == [(f"You said: {ONE}", f"You said: {OTHER}")]


def test_a_whole_answer_waits_for_nobody_elses_lookup(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one's own lookup is over and found nothing; the first one's, which it might join, is not."""
    tenant, _ = let_in(pair)
    semantic = pair.app.gateway.cache.semantic
    assert semantic is not None
    go, look = threading.Event(), semantic.try_reuse

    def first_waits(request: Any) -> Any:
        if request.segments[-1].text == ONE:
            assert go.wait(30)
        return look(request)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(semantic, "try_reuse", first_waits)
        assert said(pool.submit(pair.post, ONE, headers=tenant).result(30)) == f"You said: {ONE}"
        pair.upstream.gate.clear()
        second = pool.submit(pair.post, "Something else?", headers=tenant)
        wait_until(lambda: "Something else?" in asked(pair))
        time.sleep(0.2)  # its own lookup is over meanwhile
        pair.upstream.gate.set()
        assert said(second.result(30)) == "You said: Something else?"
        go.set()
