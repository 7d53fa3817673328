"""`SemanticCache.pending`: a request whose answer is on its way, as a donor for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cache_helpers import Bench, line
from semkv.tiers.policies import Decision, FixedThreshold
from semkv.types import CacheMode, Request, ReuseReport


def joined(bench: Bench, first: Request, second: Request) -> ReuseReport | None:
    """The second request, once the first is on its way."""
    reports = [bench.cache.try_reuse(request) for request in (first, second)]
    one, other = (bench.cache.pending.entry(report) for report in reports)
    assert one is not None
    assert other is not None
    similar = bench.cache.pending.similar(other, [one])
    assert one.meets(other) or not similar
    return next((bench.cache.pending.try_reuse(reports[1], c) for _, c in similar), None)


@pytest.fixture
def plain(tmp_path: Path) -> Bench:
    return Bench(
        tmp_path,
        embedding_layers=(),
        embedding_hook="none",
        similarity_threshold=0.9,
        verify_rate=1.0,
    )


def test_a_similar_question_joins_and_counts_as_a_hit(plain: Bench) -> None:
    first = plain.request("color", system="s")
    report = joined(plain, first, plain.request("color~0.95", system="s"))
    assert report is not None
    assert (report.provenance, report.plan.segments, report.plan.full) == (
        "text:semantic",
        first.segments,
        True,
    )
    assert report.plan.match.score == pytest.approx(0.95, abs=1e-3)
    assert line(report) == "exact_text=miss, semantic_text=hit"
    assert plain.cache.should_check(report)
    stats = plain.cache.stats()
    assert (stats.lookups, stats.hits) == (2, {"semantic_text": 1})
    entry = plain.cache.add_observation(plain.cache.try_reuse(first), "red")
    assert report.plan.match.entry_id == entry, "what it is recorded as"
    plain.cache.checked(report.hit_id, False)
    assert not plain.look("color~0.95", system="s").hit, "barred"


def test_the_same_text_folded_unless_byte_equal_texts_alone_are_taken(plain: Bench) -> None:
    report = joined(plain, plain.request("The color"), plain.request("the  color"))
    assert report is not None
    assert (report.provenance, report.plan.match.score) == ("text:normalised", 1.0)
    first, similar = (
        plain.request("color", system="answer the question"),
        plain.request("color~0.95", system="ANSWER THE QUESTION"),
    )
    assert joined(plain, first, similar) is not None
    plain.reopen(normalised=False)
    assert joined(plain, first, similar) is None


def test_what_differs_in_more_than_the_question_joins_nobody(plain: Bench) -> None:
    mine = plain.request("color")
    for theirs in (
        plain.request("color~0.85"),
        plain.request("color~0.95", tenant="another"),
        plain.request("color~0.95", "car"),
        plain.request("color~0.95", context="A document."),
        plain.request("Color", tenant="another"),
        plain.request("word " * 21),
        plain.request(None, system="s"),
    ):
        assert joined(plain, mine, theirs) is joined(plain, theirs, mine) is None


def test_a_fault_is_no_hit(plain: Bench) -> None:
    class Broken(FixedThreshold):
        def accept(self, *_: Any) -> Decision:
            raise RuntimeError("broken")

    plain.cache._planner._decider = Broken()
    assert joined(plain, plain.request("color"), plain.request("color~0.95")) is None
    stats = plain.cache.stats()
    assert (stats.faults, stats.hits) == ({"join": 1}, {})


def test_only_what_goes_as_it_is_and_only_live(plain: Bench) -> None:
    plain.ask("color")
    assert plain.cache.pending.entry(plain.look("color~0.95")) is None, "it found a donor"
    plain.reopen(mode=CacheMode.DRY_RUN)
    assert plain.cache.pending.entry(plain.look("another")) is None
