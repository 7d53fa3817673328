"""`SemanticCache.pending`: a request whose answer is on its way, as a donor for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_helpers import Bench, direction, line
from semkv.tiers import Candidate
from semkv.tiers.policies import Decision, FixedThreshold
from semkv.types import CacheMode, Request, ReuseReport


def two(bench: Bench, first: Request, second: Request) -> tuple[ReuseReport, Candidate | None]:
    reports = [bench.cache.try_reuse(request) for request in (first, second)]
    one, other = (bench.cache.pending.entry(report) for report in reports)
    assert one is not None
    assert other is not None
    return reports[1], one.donate(other)


def joined(bench: Bench, first: Request, second: Request) -> ReuseReport | None:
    report, candidate = two(bench, first, second)
    return None if candidate is None else bench.cache.pending.try_reuse(report, candidate)


@pytest.fixture
def plain(tmp_path: Path) -> Bench:
    return Bench(tmp_path, embedding_layers=(), embedding_hook="none", similarity_threshold=0.9, verify_rate=1.0)


def test_a_similar_question_joins_and_counts_as_a_hit(plain: Bench) -> None:
    first = plain.request("color", system="s")
    report = joined(plain, first, plain.request("color~0.95", system="s"))
    assert report is not None
    assert (report.provenance, report.plan.segments, report.plan.full) == ("text:semantic", first.segments, True)
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
    first, similar = plain.request("color", system="in english"), plain.request("color~0.95", system="IN ENGLISH")
    assert joined(plain, first, similar) is not None
    plain.reopen(normalised=False)
    assert joined(plain, first, similar) is None
    assert joined(plain, first, plain.request("color~0.95", system="in english")) is not None


def test_what_differs_in_more_than_the_question_is_no_candidate(plain: Bench) -> None:
    mine = plain.request("color")
    for theirs in (
        plain.request("color~0.85"),
        plain.request("color~0.95", system="another"),
        plain.request("color~0.95", tenant="another"),
        plain.request("color~0.95", "car"),
        plain.request("color~0.95", context="A document."),
        plain.request("Color", tenant="another"),
        plain.request("Color", "car"),
        plain.request("word " * 21),
        plain.request(None, system="s"),
    ):
        assert two(plain, mine, theirs)[1] is two(plain, theirs, mine)[1] is None


def test_the_guards_veto(tmp_path: Path) -> None:
    settings = {"embedding_layers": (), "embedding_hook": "none", "similarity_threshold": 0.0, "guards": True}
    bench = Bench(tmp_path, **settings)
    bench.encoder.encode = lambda texts: np.stack([direction("all alike")] * len(texts))  # type: ignore[method-assign]
    assert joined(bench, bench.request("is it red?"), bench.request("is it not red?")) is None
    assert bench.cache.stats().vetoes == {"negation": 1}


def test_a_fault_is_no_hit(plain: Bench) -> None:
    class Broken(FixedThreshold):
        def accept(self, *_: Any) -> Decision:
            raise RuntimeError("broken")

    plain.cache._planner._decider = Broken({})
    assert joined(plain, plain.request("color"), plain.request("color~0.95")) is None
    plain.reopen()
    plain.cache._checking.open = Broken.accept  # type: ignore[method-assign]
    assert joined(plain, plain.request("color"), plain.request("color~0.95")) is None
    stats = plain.cache.stats()
    assert (stats.faults, stats.hits) == ({"join": 1}, {})


def test_only_what_goes_as_it_is_and_only_live(plain: Bench) -> None:
    plain.ask("color")
    assert plain.cache.pending.entry(plain.look("color~0.95")) is None, "it found a donor"
    plain.reopen(mode=CacheMode.DRY_RUN)
    assert plain.cache.pending.entry(plain.look("another")) is None
