"""The upstream is asked while the lookup runs, where lookups rarely find anything and nobody is there to be joined.

What it finds before the answer is whole is used.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway_helpers import (
    ONE,
    OTHER,
    Held,
    Pair,
    a_tenant,
    asks,
    beside,
    near_pair,
    said,
    wait_until,
)

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


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_whole_waits_for_no_lookup(
    pair: Pair, tenant: dict[str, str], stream: bool
) -> None:
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
    before, aborted = pair.entries, pair.upstream.aborted
    pair.upstream.gate.clear()  # the upstream takes the request, and does not answer
    similar = pair.post(OTHER, headers=answered)
    assert said(similar) == f"You said: {ONE}"
    assert pair.asked == [OTHER]
    wait_until(lambda: pair.upstream.aborted == aborted + 1)
    assert pair.entries == before, "nothing is recorded of what was cut off"


def test_a_stream_that_has_begun_to_come_in_waits_for_the_lookup(
    pair: Pair, answered: dict[str, str]
) -> None:
    """What is still to come can be saved, and nothing of it has gone out."""
    pair.upstream.hold_at = 2
    pair.upstream.gate.clear()
    with lookups(pair):
        similar = pair.soon(OTHER, headers=answered, stream=True)
        wait_until(
            lambda: any(flight.chunk(0) for flight in list(pair.app.gateway.flights.running))
        )
        assert not similar.done()
    assert similar.result().headers["x-semkv"].startswith(NEAR_HIT)
    assert said(similar.result()) == f"You said: {ONE}"


def test_a_donor_found_after_the_answer_has_no_part_in_it(
    pair: Pair, answered: dict[str, str]
) -> None:
    """The policy learns from it what the donor was worth."""
    before, learned = pair.entries, list[tuple[str, str]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair.semantic._checking._decider, "learns", True, raising=False)
        patch.setattr(
            pair.semantic._checking, "_same", lambda one, other: not learned.append((one, other))
        )
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


def test_a_paraphrase_waits_for_the_lookup_of_one_that_went_before_it(
    pair: Pair, tenant: dict[str, str]
) -> None:
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


@pytest.mark.parametrize(("share", "began"), [(0.0, "before"), (1.0, "before"), (1.0, "meanwhile")])
def test_a_paraphrase_uses_what_was_recorded_while_its_lookup_ran(
    pair: Pair, tenant: dict[str, str], monkeypatch: pytest.MonkeyPatch, share: float, began: str
) -> None:
    """The lookup searched before the record was there, and ends when the other request is on its way no longer. An
    equal request that comes even later shares the lookup, so it uses the record too."""
    cache, before, looks, asked = pair.app.gateway.cache, pair.entries, list[object](), []
    cache.found_share, look_up = share, cache.look_up
    monkeypatch.setattr(
        cache, "look_up", lambda *given, **more: looks.append(given) or look_up(*given, **more)
    )

    def ask() -> None:
        asked.append(pair.soon(OTHER, headers=tenant))
        wait_until(held.waiting.is_set)

    with lookups(pair, OTHER, after=True) as held:
        if began == "meanwhile":
            ask()
        with beside(pair, ONE, headers=tenant):
            if began == "before":
                ask()
        wait_until(lambda: pair.entries == before + 1 and not pair.app.gateway.pending)
        if share:  # else it asks the upstream meanwhile
            ask()
            wait_until(lambda: len(looks) == 3)
        assert pair.asked == [ONE]
    for answer in (one.result() for one in asked):
        assert (said(answer), answer.headers["x-semkv"].startswith(NEAR_HIT)) == (
            f"You said: {ONE}",
            True,
        )
    assert (pair.asked, pair.app.gateway._seen) == ([ONE], {})


def test_a_paraphrase_joins_none_that_has_failed_meanwhile(
    pair: Pair, tenant: dict[str, str]
) -> None:
    """Though it is the nearest of those that were on their way during the lookup."""
    pair.app.gateway.cache.found_share, failed = 1.0, OTHER.replace("?", ", please?")
    pair.upstream.script = {failed: {"status": "503"}}
    with lookups(pair, OTHER, after=True) as held:
        second = pair.soon(OTHER, headers=tenant)
        wait_until(held.waiting.is_set)
        assert pair.post(failed, headers=tenant).status_code == 503
        with beside(pair, ONE, headers=tenant):
            held.go.set()
            wait_until(lambda: pair.readers == 2)
    assert said(second.result()) == f"You said: {ONE}"
    assert pair.asked == [failed, ONE]


def test_an_answer_that_came_before_the_store_was_asked_is_recorded(
    pair: Pair, tenant: dict[str, str]
) -> None:
    """The look into the store finds what the request itself has brought: a miss, with a lookup as any."""
    before, cache = pair.entries, pair.app.gateway.cache
    with Held(cache.responses, "lookup"):
        assert pair.post(ONE, headers=tenant).headers["x-semkv"] == "miss"
    wait_until(lambda: pair.entries == before + 1)
    assert cache.found_share == 0.0, "it is no hit"


def test_the_upstream_is_asked_meanwhile_once_fewer_than_5_in_100_lookups_find_something(
    pair: Pair, answered: dict[str, str]
) -> None:
    cache = pair.app.gateway.cache
    cache.found_share = 1.0
    for times, rarely, found in ((190, False, False), (1, True, False), (4, False, True)):
        for _ in range(times):
            cache._count(found=found)
        assert cache.rarely_finds is rarely
    assert pair.post(OTHER, headers=answered).headers["x-semkv"].startswith(NEAR_HIT)
    assert pair.asked == []


def test_where_few_find_anything_a_lookup_behind_many_is_left_out(
    pair: Pair, answered: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = pair.semantic.stats().lookups
    monkeypatch.setattr("semkv_gateway.cache_client._UNLIKELY", -1)
    pair.app.gateway.cache.found_share = 0.0
    assert pair.post(OTHER, headers=answered).headers["x-semkv"] == "miss"
    assert pair.semantic.stats().lookups == lookups
    pair.app.gateway.cache.found_share = 1.0
    assert (
        pair.post(OTHER + " ", headers=answered)
        .headers["x-semkv"]
        .startswith(("hit tier=exact", NEAR_HIT))
    )
