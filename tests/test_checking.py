"""Checks of approximate hits: the sample, the estimate, what a wrong one changes, the second stage."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_helpers import Bench, WrittenEncoder
from semkv.counting import Tally
from semkv.errors import StoreError
from semkv.stores.catalog import Catalog
from semkv.tiers.checking import Checking, SameMeaning, same_text, wilson
from semkv.tiers.policies import FEATURES, Calibration, Decision, FixedThreshold
from semkv.types import (
    CacheMode,
    Exactness,
    Match,
    Namespace,
    PolicyName,
    Request,
    ReuseReport,
    TextSegment,
)


def asking(text: str = "a") -> Request:
    return Request("1", Namespace(), (TextSegment(text),))


APPROXIMATE = Match("semantic_text", "d", 0.95, Exactness.APPROXIMATE)


def test_wilson_agrees_with_tables() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert wilson(5, 100) == pytest.approx((0.0215, 0.1118), abs=1e-3)


class At(WrittenEncoder):
    """Any two texts have this cosine."""

    def __init__(self, cosine: float) -> None:
        super().__init__()
        self.cosine = cosine

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        return np.array([[1, 0], [self.cosine, (1 - self.cosine**2) ** 0.5]], dtype=np.float32)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        # Short ones as strings, whatever their cosine.
        ("Yes.", "yes", True),
        ("the car", "Car", True),
        ("red", "blue", False),
        ("", " ", True),
        # Longer ones by cosine and guards.
        ("The cube in front is a red one.", "The cube in front is red, as you see.", True),
        (
            "Yes, you can safely take both of them together.",
            "No, you cannot safely take both of them together.",
            False,
        ),
        (
            "The usual dose for an adult is 50 mg a day.",
            "The usual dose for an adult is 500 mg a day.",
            False,
        ),
        ("word " * 30, "word " * 31, False),  # beyond the window
    ],
)
def test_answers_are_compared_as_strings_or_by_meaning(first: str, second: str, same: bool) -> None:
    assert SameMeaning(At(0.95))(first, second) is same
    if same_text(first, second) is not same:
        assert not SameMeaning(At(0.8))(first, second), "the cosine counts"


def checking(folder: Path, rate: float) -> Checking:
    return Checking(
        rate,
        FixedThreshold(),
        same=same_text,
        remove=pytest.fail,
        share=pytest.fail,
        catalog=Catalog(folder / "catalog.sqlite"),
        fingerprint="f",
        tally=Tally(),
    )


def test_the_share_is_drawn_and_the_policy_may_ask_for_more(tmp_path: Path) -> None:
    some, silent, always = (checking(tmp_path, rate) for rate in (0.2, 0.0, 1.0))
    drawn = sum(some.selected(some.open(asking(), APPROXIMATE)) for _ in range(2000))
    assert 320 < drawn < 480
    assert some.selected(some.open(asking(), APPROXIMATE, Decision(True, check=1.0)))
    assert not silent.selected(silent.open(asking(), APPROXIMATE, Decision(True, check=1.0)))
    assert not always.selected(
        always.open(asking(), replace(APPROXIMATE, exactness=Exactness.EXACT))
    )


def test_open_hits_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semkv.tiers.checking._OPEN_HITS", 10)
    few = checking(tmp_path, 1.0)
    ids = [few.open(asking(), APPROXIMATE) for _ in range(30)]
    assert len(set(ids)) == 30
    assert not few.checked(ids[0], True)
    assert few.checked(ids[-1], True)
    assert not few.checked(ids[-1], True), "closed"


def plain(tmp_path: Path, **settings: Any) -> Bench:
    return Bench(
        tmp_path,
        **{"embedding_layers": (), "embedding_hook": "none", "verify_rate": 1.0, **settings},
    )


def test_checks_count_once_give_an_interval_and_keep_a_wrong_donor_from_its_text(
    tmp_path: Path,
) -> None:
    bench = plain(tmp_path)
    bench.ask("color")
    hits = [bench.look("color~0.95"), bench.look("color~0.96")]
    assert all(bench.cache.should_check(report) for report in hits)
    assert bench.cache.checked(hits[0].hit_id, True)
    assert bench.cache.checked(hits[1].hit_id, False)
    assert not bench.cache.checked(hits[0].hit_id, False), "closed"
    assert not bench.cache.checked("never seen", True)
    assert not bench.cache.should_check(hits[0])
    stats = bench.cache.stats()
    assert (stats.checked, stats.checked_wrong, stats.wrong_rate) == (2, 1, 0.5)
    assert stats.wrong_interval == pytest.approx(wilson(1, 2))
    assert bench.look("color~0.95").hit, "another text may still"
    assert not bench.look("color~0.96").hit
    assert bench.cache.stats().barred == 1
    bench.reopen()
    assert not bench.look("color~0.96").hit, "after a restart, too"
    bench.cache.add_observation(hits[1].unchanged(), "its own")
    again = bench.look("color~0.96")
    assert (again.provenance, again.donor_response) == ("text:exact", "its own")


def test_what_was_found_wrong_is_known_after_a_crash_and_to_other_processes(tmp_path: Path) -> None:
    bench = plain(tmp_path)
    bench.ask("color")
    bench.ask("size")
    assert bench.cache.checked(bench.look("color~0.95").hit_id, False)
    assert bench.cache.report_wrong(bench.look("size~0.95").hit_id)
    first = bench.cache
    bench.open()  # which closes nothing
    assert bench.look("color").hit
    assert not bench.look("color~0.95").hit
    assert not bench.look("size~0.95").hit
    bench.ask("form")
    assert bench.cache.report_wrong(bench.look("form~0.95").hit_id)
    bench.cache.close()
    bench.cache = first
    assert not bench.look("form~0.95").hit, "another process has heard of it"


def test_a_policy_that_fails_ends_neither_a_request_nor_the_cache(
    tmp_path: Path, monkeypatch: Any
) -> None:
    bench = plain(tmp_path)
    bench.ask("color")
    report = bench.look("color~0.95")
    decider = bench.cache._decider

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory")

    for name in ("observe", "state"):
        monkeypatch.setattr(decider, name, broken)
    assert bench.cache.checked(report.hit_id, False)
    monkeypatch.setattr(decider, "accept", lambda *_: None)
    assert not bench.look("color~0.96").hit
    assert bench.ask("another")
    assert "decider" in bench.cache.stats().faults
    bench.reopen()
    assert not bench.look("color~0.95").hit, "what was found wrong is kept all the same"


def test_a_report_removes_an_exact_entry_and_tightens_an_approximate_one(tmp_path: Path) -> None:
    bench = plain(tmp_path)
    bench.ask("color")
    assert bench.cache.report_wrong(bench.look("color~0.95").hit_id)
    assert bench.look("color").hit, "the donor is right for its own text"
    assert bench.cache.report_wrong(bench.look("color~0.96").hit_id)
    assert not bench.look("color").hit, "wrong for two texts: gone"
    bench.ask("color")
    assert bench.cache.report_wrong(bench.look("color").hit_id)
    assert not bench.look("color").hit
    assert not bench.cache.report_wrong("unknown")
    assert bench.cache.stats().reported_wrong == 3


def test_a_report_that_cannot_be_noted_is_an_error_and_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = plain(tmp_path)
    bench.ask("color")
    hit = bench.look("color~0.95").hit_id

    def full(*_: object) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(bench.cache._catalog, "bar", full)
        with pytest.raises(StoreError, match="full"):
            bench.cache.report_wrong(hit)
    assert bench.cache.report_wrong(hit)
    assert not bench.look("color~0.95").hit
    assert bench.cache.stats().reported_wrong == 1


def answered(bench: Bench, report: ReuseReport, *, right: bool = True) -> None:
    if bench.cache.should_check(report):
        bench.cache.checked(report.hit_id, right)


def test_the_bounded_policy_learns_from_misses_at_no_cost(tmp_path: Path) -> None:
    bench = plain(tmp_path, policy=PolicyName.BOUNDED, max_error_rate=0.01)
    for number in range(300):
        bench.ask(f"topic {number}", response="yes")
        answered(bench, bench.ask(f"topic {number}~0.97", response="yes"))
    stats = bench.cache.stats()
    assert stats.hits.get("semantic_text", 0) > 30, (
        "refused ones turned out right, so later ones are served"
    )
    assert stats.refused > 5
    bench.cache.close()
    kept = json.loads((tmp_path / "cache" / "policy.json").read_text())
    assert (tmp_path / "cache" / "policy.json").stat().st_mode & 0o777 == 0o600
    assert kept["fingerprint"] == "written"
    assert sum(kept["policy"]["arms"][0]["seen"]) > 5
    bench.open()
    assert bench.cache.stats().faults == {}
    for number in range(80):
        bench.ask(f"fresh {number}", response="yes")
        answered(bench, bench.ask(f"fresh {number}~0.97", response="yes"))
    assert bench.cache.stats().hits.get("semantic_text", 0) > 5, (
        "what was learned outlives the process"
    )


@pytest.mark.parametrize("policy", PolicyName)
def test_a_veto_is_final_whatever_was_learned(tmp_path: Path, policy: PolicyName) -> None:
    rosy = tmp_path / "rosy.json"
    Calibration("written", -9.0, dict.fromkeys(FEATURES, 0.0), 0.5).save(rosy)
    learned: dict[str, Any] = {"policy": policy}
    if policy in (PolicyName.CALIBRATED, PolicyName.BOUNDED):
        learned["calibration"] = rosy
    if policy == PolicyName.BOUNDED:
        learned["max_error_rate"] = 0.5
    bench = plain(tmp_path, guards=True, **learned)
    for number in range(150):
        bench.ask(f"is lamp {number} on the left", chunk=f"lamp {number}", response="yes")
        report = bench.look(f"is lamp {number} on the right", chunk=f"lamp {number}")
        assert not report.hit
        bench.cache.add_observation(report, "yes")
    bench.ask("is the lamp on the left", chunk="lamp", response="yes")
    assert bench.look("is the lamp at left", chunk="lamp").hit, "what no guard objects to"
    assert bench.cache.stats().vetoes["direction"] >= 150


def test_a_damaged_memory_is_a_counted_fault(tmp_path: Path) -> None:
    bench = plain(tmp_path, policy=PolicyName.BOUNDED)
    bench.cache.close()
    for number, content in enumerate(
        ("{", '{"format": 2}', '{"format": 1, "fingerprint": "written", "hits": 3}')
    ):
        (tmp_path / "cache" / "policy.json").write_text(content)
        bench.open()
        assert bench.cache.stats().faults == {"policy": 1}
        assert not bench.ask(f"color {number}").hit
        bench.cache.close()
    (tmp_path / "cache" / "policy.json").unlink()
    os.mkfifo(tmp_path / "cache" / "policy.json")  # a reader would wait for a writer
    bench.open()
    assert bench.cache.stats().faults == {"policy": 1}
    bench.cache.close()


def test_a_dry_run_checks_every_hit_for_nothing(tmp_path: Path) -> None:
    bench = plain(tmp_path, policy=PolicyName.BOUNDED, max_error_rate=0.5, mode=CacheMode.DRY_RUN)
    for number in range(40):
        bench.ask(f"topic {number}", response="yes")
        report = bench.ask(f"topic {number}~0.97", response="no")
        assert not bench.cache.should_check(report)
    assert bench.cache.stats().checked > 0
    assert bench.cache.stats().wrong_rate == 1.0


@pytest.mark.parametrize("table", ["barred", "judged"])
def test_no_tenant_pushes_out_what_was_found_wrong_or_judged_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    monkeypatch.setattr(f"semkv.stores.catalog._{table.upper()}", 100)
    with closing(Catalog(tmp_path / "catalog.sqlite")) as catalog:

        def note(pair: str, tenant: str) -> None:
            if table == "barred":
                catalog.bar(pair, "an entry", tenant)
            else:
                catalog.judge(pair, tenant, same=True)

        def is_there(pair: str) -> bool:
            return catalog.is_barred(pair) if table == "barred" else bool(catalog.verdict(pair))

        for number in range(10):
            note(f"few {number}", "few")
        for number in range(300):
            note(f"many {number}", "many")
        assert all(is_there(f"few {number}") for number in range(10))
        assert is_there("many 299")
        assert not is_there("many 0")
        for name in (table, f"{table}_by"):
            assert catalog.database.rows(f"SELECT COUNT(*) FROM {name}") == [(100,)]
