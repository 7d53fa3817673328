"""The upstream is asked while the lookup runs, where lookups rarely find anything and nobody is there to be joined.

What it finds before the answer is whole is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway_helpers import ONE, OTHER, PATIENT, Held, Pair, a_tenant, asks, beside, chat, near_pair, said, wait_until

NEAR_HIT = "hit tier=text:semantic"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with near_pair(tmp_path_factory.mktemp("overlap")) as pair:
        yield pair


@pytest.fixture
def pair(running: Pair) -> Iterator[Pair]:
    running.app.gateway.cache.found_share = 0.0
    yield running
    running.settle()


@pytest.fixture
def tenant(pair: Pair) -> dict[str, str]:
    """A tenant whose key the upstream has accepted."""
    given, before = a_tenant(), pair.entries
    pair.post("Let me in.", headers=given)
    wait_until(lambda: pair.entries == before + 1)
    pair.upstream.calls.clear()
    return given


@pytest.fixture
def answered(pair: Pair, tenant: dict[str, str]) -> dict[str, str]:
    """The same, after the first question was answered and recorded."""
    before = pair.entries
    pair.post(ONE, headers=tenant)
    wait_until(lambda: pair.entries == before + 1)
    pair.upstream.calls.clear()
    return tenant


def lookups(pair: Pair, text: str = "", *, after: bool = False) -> Held:
    """Lookups (of a text) that wait."""
    return Held(pair.semantic, "try_reuse", asks(text) if text else bool, after=after)


def forget(pair: Pair) -> None:
    """Empty the memory of answers; the store keeps them."""
    memory = pair.app.gateway.cache.responses._memory
    for key in list(memory._entries):
        memory._drop(key)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_whole_waits_for_no_lookup(pair: Pair, tenant: dict[str, str], stream: bool) -> None:
    """Nothing is left to save. It is recorded all the same."""
    before = pair.entries
    with lookups(pair) as held:
        answer = pair.post(ONE, headers=tenant, stream=stream)
        wait_until(held.waiting.is_set)
        assert pair.entries == before
    assert (said(answer), answer.headers["x-semkv"]) == (f"You said: {ONE}", "miss")
    wait_until(lambda: pair.entries == before + 1)
    pair.upstream.gate.clear()
    similar = pair.post(OTHER, headers=tenant)
    assert similar.headers["x-semkv"].startswith(NEAR_HIT)
    assert said(similar) == f"You said: {ONE}"


def test_a_hit_that_comes_first_cuts_the_request_off(pair: Pair, answered: dict[str, str]) -> None:
    before, aborted, cut = pair.entries, pair.upstream.aborted, pair.metric("semkv_overlap_cut_total")
    pair.upstream.gate.clear()  # the upstream takes the request, and does not answer
    similar = pair.post(OTHER, headers=answered)
    assert said(similar) == f"You said: {ONE}"
    assert pair.asked == [OTHER]
    wait_until(lambda: pair.upstream.aborted == aborted + 1)
    assert pair.metric("semkv_overlap_cut_total") == cut + 1
    assert pair.entries == before, "nothing is recorded of what was cut off"


def test_a_stream_that_has_begun_to_come_in_waits_for_the_lookup(pair: Pair, answered: dict[str, str]) -> None:
    """What is still to come can be saved, and nothing of it has gone out."""
    pair.upstream.hold_at = 2
    pair.upstream.gate.clear()
    with lookups(pair):
        similar = pair.soon(OTHER, headers=answered, stream=True)
        wait_until(lambda: any(flight.chunk(0) for flight in list(pair.app.gateway.flights.running)))
        assert not similar.done()
    assert similar.result().headers["x-semkv"].startswith(NEAR_HIT)
    assert said(similar.result()) == f"You said: {ONE}"


def test_a_donor_found_after_the_answer_has_no_part_in_it(pair: Pair, answered: dict[str, str]) -> None:
    """The policy learns from it what the donor was worth."""
    before, learned = pair.entries, list[tuple[str, str]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair.semantic._checking._decider, "learns", True, raising=False)
        patch.setattr(pair.semantic._checking, "_same", lambda one, other: not learned.append((one, other)))
        with lookups(pair):
            answer = pair.post(OTHER, headers=answered)
        wait_until(lambda: pair.entries == before + 1)
    assert (said(answer), answer.headers["x-semkv"]) == (f"You said: {OTHER}", "miss")
    assert learned == [(f"You said: {ONE}", f"You said: {OTHER}")]


def test_a_failure_waits_for_the_lookup(pair: Pair, answered: dict[str, str]) -> None:
    pair.upstream.script = {text: {"status": "503"} for text in (OTHER, "A question of its own?")}
    similar = pair.post(OTHER, headers=answered)
    assert (similar.status_code, said(similar)) == (200, f"You said: {ONE}")
    assert pair.post("A question of its own?", headers=answered).status_code == 503


def test_a_paraphrase_waits_for_the_lookup_of_one_that_went_before_it(pair: Pair, tenant: dict[str, str]) -> None:
    """The second lookup is over first: without waiting it would find nobody to join, and go upstream itself."""
    over = Held(pair.semantic, "try_reuse", asks(OTHER), after=True)
    over.go.set()
    with over, lookups(pair, ONE, after=True) as first, beside(pair, ONE, headers=tenant):
        second = pair.soon(OTHER, headers=tenant)
        wait_until(over.waiting.is_set)
        first.go.set()
        wait_until(lambda: pair.readers == 2)
        pair.upstream.gate.set()
        answer = second.result()
    assert said(answer) == f"You said: {ONE}"
    assert answer.headers["x-semkv"].endswith("joined")
    assert pair.asked == [ONE]


def test_a_request_of_another_tenant_waits_for_nobody(pair: Pair, tenant: dict[str, str]) -> None:
    pair.upstream.gate.clear()
    stranger = a_tenant()
    with lookups(pair):
        both = [pair.soon(text, headers=who) for text, who in ((ONE, tenant), (OTHER, stranger))]
        wait_until(lambda: sorted(pair.asked) == sorted([ONE, OTHER]))
    pair.upstream.gate.set()
    assert [said(one.result()) for one in both] == [f"You said: {ONE}", f"You said: {OTHER}"]


def test_a_request_that_was_answered_holds_no_paraphrase_up(pair: Pair, tenant: dict[str, str]) -> None:
    """Its lookup still runs, and to wait for that would take longer than to ask. The second one's own is over."""
    over = Held(pair.semantic, "try_reuse", asks(OTHER), after=True)
    over.go.set()
    with over, lookups(pair, ONE):
        assert said(pair.post(ONE, headers=tenant)) == f"You said: {ONE}"
        pair.upstream.gate.clear()
        second = pair.soon(OTHER, headers=tenant)
        wait_until(over.waiting.is_set)
        wait_until(lambda: OTHER in pair.asked)
        pair.upstream.gate.set()
        assert said(second.result()) == f"You said: {OTHER}"


def test_what_the_store_has_is_served_in_place_of_what_was_asked(pair: Pair, answered: dict[str, str]) -> None:
    """Memory has lost it, so the upstream is asked while the store is."""
    forget(pair)
    pair.upstream.gate.clear()
    cut, aborted = pair.metric("semkv_overlap_cut_total"), pair.upstream.aborted
    assert pair.post(ONE, headers=answered).headers["x-semkv"].startswith("hit tier=exact")
    wait_until(lambda: pair.upstream.aborted == aborted + 1)
    assert pair.metric("semkv_overlap_cut_total") == cut + 1


def test_without_the_semantic_tiers_the_store_is_asked_meanwhile(tmp_path: Path) -> None:
    with Pair(tmp_path, **PATIENT) as pair:
        pair.post(ONE)
        cache = pair.app.gateway.cache
        cache.found_share = 0.0
        with Held(cache.responses, "lookup"):
            assert pair.post(OTHER).headers["x-semkv"] == "miss"
        wait_until(lambda: not cache._running)
        assert cache.found_share == 0.0, "what it was answered meanwhile is no hit"


def test_an_answer_that_came_before_the_store_was_asked_is_recorded(pair: Pair, tenant: dict[str, str]) -> None:
    """The look into the store finds what the request itself has brought: a miss, with a lookup as any."""
    before = pair.entries
    with Held(pair.app.gateway.cache.responses, "lookup"):
        assert pair.post(ONE, headers=tenant).headers["x-semkv"] == "miss"
    wait_until(lambda: pair.entries == before + 1)


def test_paraphrases_wait_for_nothing_that_does_not_come(tmp_path: Path) -> None:
    """The lookup of the first fails: a counted miss, there is nobody to join, and nobody waits any more."""
    with near_pair(tmp_path) as pair, pytest.MonkeyPatch.context() as patch:
        tenant = a_tenant()
        pair.app.gateway.cache.found_share = 0.0
        patch.setattr(pair.semantic, "try_reuse", None)
        with beside(pair, ONE, headers=tenant) as first:
            wait_until(lambda: pair.metric("semkv_faults_total") == 1)
        assert said(first.result()) == f"You said: {ONE}"
        patch.undo()
        assert pair.post(OTHER, headers=tenant).headers["x-semkv"] == "miss"


def test_an_answer_that_is_too_old_for_the_client_costs_one_request(pair: Pair, answered: dict[str, str]) -> None:
    time.sleep(1.1)
    cut = pair.metric("semkv_overlap_cut_total")
    assert (
        pair.post(ONE, headers={**answered, "Cache-Control": "max-age=1"}).headers["x-semkv"] == "miss reason=too-old"
    )
    assert pair.asked == [ONE]
    assert pair.metric("semkv_overlap_cut_total") == cut


def test_a_key_that_the_upstream_refuses_gets_nothing(pair: Pair, answered: dict[str, str]) -> None:
    """Not even where the lookup finds a donor after the refusal came."""
    pair.upstream.script = {text: {"status": "401"} for text in (ONE, OTHER)}
    with lookups(pair):
        similar = pair.soon(OTHER, headers=answered)
        wait_until(lambda: OTHER in pair.asked and not pair.app.gateway.flights.running)
    assert similar.result().status_code == 401
    assert pair.post(ONE, headers=answered).status_code == 401, "nor what was stored"


def test_an_equal_request_that_has_just_ended_is_not_joined(
    pair: Pair, tenant: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is forgotten during the next one's lookup; its key would lead that one to the flight it started itself."""
    pair.upstream.script = {ONE: {"length": ""}}
    monkeypatch.setattr("semkv.server.gateway._RECORD_DELAY_S", 0.5)
    pair.post(ONE, headers=tenant, stream=True)
    wait_until(lambda: not pair.app.gateway.cache._running)
    pair.upstream.hold_at = 2
    pair.upstream.gate.clear()
    body, url = chat(ONE, stream=True), f"{pair.url}/v1/chat/completions"
    with lookups(pair) as held, httpx.Client(timeout=120) as client:
        held.go.set()
        with client.stream("POST", url, json=body, headers=tenant) as answer:
            pair.upstream.gate.set()
            answer.read()
    assert (answer.status_code, answer.headers["x-semkv"]) == (200, "miss")


def test_a_stale_answer_is_renewed_by_what_was_asked_meanwhile(tmp_path: Path) -> None:
    with Pair(tmp_path, ttl=0.5, stale=3600.0, **PATIENT) as pair:
        first = pair.post(ONE)
        pair.app.gateway.cache.found_share = 0.0
        time.sleep(0.6)
        forget(pair)
        with beside(pair, ONE) as second:
            assert second.result().headers["x-semkv"].endswith("stale")
            assert second.result().json() == first.json()
        wait_until(lambda: not pair.app.gateway.background and not pair.app.gateway.flights.running)
        assert pair.asked == [ONE, ONE]
        assert (pair.upstream.aborted, pair.metric("semkv_overlap_cut_total")) == (0, 0)
        assert pair.post(ONE).json()["id"] != first.json()["id"]


def test_a_request_recorded_during_a_lookup_is_found_all_the_same(pair: Pair, tenant: dict[str, str]) -> None:
    """The lookup looked before the record, and is over after it: the donor is in neither place any more."""
    before = pair.entries
    pair.app.gateway.cache.found_share = 1.0
    with lookups(pair, OTHER, after=True) as held:
        with beside(pair, ONE, headers=tenant):
            second = pair.soon(OTHER, headers=tenant)
            wait_until(held.waiting.is_set)
        wait_until(lambda: pair.entries == before + 1 and not len(pair.app.gateway.pending))
        held.go.set()
        assert said(second.result()) == f"You said: {ONE}"
    assert pair.asked == [ONE]


def test_at_first_and_where_lookups_find_things_they_come_first(pair: Pair, answered: dict[str, str]) -> None:
    for share in (1.0, 0.05):
        pair.app.gateway.cache.found_share = share
        assert pair.post(OTHER, headers=answered).headers["x-semkv"].startswith(NEAR_HIT)
        assert pair.asked == []


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


def test_equal_requests_share_one(pair: Pair, tenant: dict[str, str]) -> None:
    pair.upstream.gate.clear()
    several = [pair.soon(ONE, headers=tenant) for _ in range(16)]
    wait_until(lambda: pair.readers == 16)
    pair.upstream.gate.set()
    assert {said(one.result()) for one in several} == {f"You said: {ONE}"}
    assert pair.asked == [ONE]


def test_many_at_once_get_their_own_answer_or_say_whose(pair: Pair, tenant: dict[str, str]) -> None:
    texts = [f"How {verb} I bake {thing}?" for verb in ("do", "can", "could") for thing in ("bread", "rye", "a cake")]
    for text, answer in [(text, pair.soon(text, headers=tenant)) for text in texts * 4]:
        header, given = answer.result().headers["x-semkv"], said(answer.result()).removeprefix("You said: ")
        borrowed = header.startswith(NEAR_HIT)
        assert (given in texts) if borrowed else given == text
        assert header.split()[0] in ("hit", "miss", "joined")


def test_a_key_that_was_not_let_in_yet_waits_for_the_lookup(tmp_path: Path) -> None:
    """Where all keys are one tenant, one that may be wrong has no part in what is shared."""
    with Pair(tmp_path, semantic=True, single_tenant=True) as pair:
        pair.app.gateway.cache.found_share = 0.0
        with lookups(pair) as held:
            first = pair.soon(ONE, headers=a_tenant())
            wait_until(held.waiting.is_set)
            assert pair.asked == []
        assert first.result().headers["x-semkv"] == "miss reason=key"


def test_the_same_prompt_is_no_reuse(pair: Pair, answered: dict[str, str]) -> None:
    """After an answer was invalidated its entry is there still: the prompt that is sent is the request's own."""
    pair.app.gateway.cache.found_share = 1.0
    assert pair.admin("invalidate", {"prefix": ONE, "dry_run": False}).json()["count"] >= 1
    assert pair.post(ONE, headers=answered).headers["x-semkv"] == "miss"
    assert pair.post(ONE, headers=answered).headers["x-semkv"].startswith("hit tier=exact ")


def test_lookups_that_fall_behind_are_left_out(
    pair: Pair, tenant: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind others a lookup would come after the answer: it is not made, and nothing of it is recorded."""
    before, left_out = pair.entries, pair.metric("semkv_overlap_left_out_total")
    monkeypatch.setattr("semkv.server.cache_client._OVERLAPPED", 0)
    with lookups(pair):
        for text in (ONE, OTHER):
            assert said(pair.post(text, headers=tenant)) == f"You said: {text}"
    wait_until(lambda: pair.entries == before + 1)
    assert pair.metric("semkv_overlap_left_out_total") == left_out + 1
