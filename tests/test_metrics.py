"""The figures of a run: pure functions over sample records."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab_helpers import record
from semkv.errors import DatasetError
from semkv.tiers.checking import wilson
from semkv.types import Status
from semkv_lab import metrics
from semkv_lab.samples import Cold, SampleRecord, read_rows


@pytest.mark.parametrize(
    ("prediction", "answer", "equal"),
    [
        ("Red.", "red", True),
        (" yes ", "Yes", True),
        ("t-shirt", "tshirt", True),
        ("red car", "red", False),
        ("", "x", False),
    ],
)
def test_answers_match_as_in_lmms_eval(prediction: str, answer: str, equal: bool) -> None:
    assert metrics.answers_match(prediction, answer) is equal


def test_percentiles() -> None:
    assert metrics.times([None]) == {"n": 0, "p50_s": None, "p95_s": None}
    assert metrics.times([0.1, None, 0.2, 0.3]) == {
        "n": 3,
        "p50_s": pytest.approx(0.2),
        "p95_s": pytest.approx(0.29),
    }


def figure(path: str, *records: SampleRecord, cold: list[Cold] | None = None) -> metrics.Estimate:
    """One of `COLUMNS`."""
    column = next(column for column in metrics.COLUMNS if column.path == path)
    return column.compute(metrics.Run(records, cold or []))


def width(estimate: metrics.Estimate) -> float:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.high - estimate.low


def test_an_interval_widens_with_the_clusters() -> None:
    outcomes = [
        (str(i // 20), (i // 20) % 2 == 0) for i in range(400)
    ]  # whole images right or wrong
    clustered, alone = (
        metrics.share(outcomes),
        metrics.share([(str(i), x) for i, (_, x) in enumerate(outcomes)]),
    )
    assert clustered.value == alone.value == 0.5
    assert width(clustered) > 3 * width(alone)
    assert width(alone) / 2 == pytest.approx(
        0.049, abs=0.006
    )  # independent: 1.96 * sqrt(.25 / 400)
    assert metrics.share(outcomes) == clustered


def test_equal_outcomes_leave_an_interval_that_narrows_with_the_images() -> None:
    for value in (True, False):
        widths = [
            width(metrics.share([(str(i % n), value) for i in range(200)])) for n in (1, 10, 100)
        ]
        assert widths[0] > 0.7
        assert widths[1] == pytest.approx(0.278, abs=0.001)  # Wilson: 10 of 10 is 72.2 to 100%
        assert widths[2] < 0.04


def test_no_records_make_a_summary() -> None:
    summary = metrics.summarise([])
    assert (summary["samples"], summary["hit_rate"]) == (0, 0.0)
    assert summary["accuracy"]["value"] is None
    json.dumps(summary)


def test_beyond_counts_every_sample_and_may_be_negative() -> None:
    def cold(computed: int) -> Cold:
        return Cold("a", "red", True, 0.1, 0.1, 10, 10 - computed)

    records = [record(cached_tokens=8, cold=cold(10)), record(cached_tokens=0, cold=cold(4))]
    tokens = metrics.tokens(records)
    assert (tokens["computed"], tokens["baseline_computed"], tokens["beyond"]) == (12, 14, 2)
    assert metrics.tokens([record(cached_tokens=0, cold=cold(4))])["beyond"] == -6
    assert metrics.tokens([record(), record(cold=cold(4))])["beyond"] is None


def test_hits_against_cold() -> None:
    def pair(text: str, cold_text: str, **values: Any) -> SampleRecord:
        cold = Cold("a", cold_text, cold_text == "red", 0.064, 0.1, 10, 0, (1, 2))
        return record(
            text=text,
            match=text == "red",
            provenance="p",
            applied=True,
            cold=cold,
            token_ids=(1, 2),
            **values,
        )

    records = [
        pair("red", "red"),
        pair("blue", "red"),
        pair("red", "blue"),
        pair("blue", "blue", exactness="exact"),
    ]
    assert figure("against_cold.agreement", *records).value == 0.5
    assert figure("against_cold.identical_tokens", *records) == metrics.Estimate(
        1, 1.0, *wilson(1, 1)
    )
    # Cold 100 ms, cached 30 ms with a lookup of 2 ms in it.
    assert figure("against_cold.first_token", *records).value == pytest.approx(100 / 28)
    assert figure("against_cold.speedup", *records).value == pytest.approx(64 / 32)
    assert figure("gained_hit_share", *records).value == 0.25
    assert figure("against_cold.saved_tokens", *records).value == 0.0
    other = record(
        provenance="p", applied=True, cached_tokens=7, token_ids=(3,), cold=records[0].cold
    )
    assert figure("against_cold.same_tokens", *records, other).value == 0.8
    assert figure("against_cold.saved_tokens", *records, other).value == pytest.approx(1.4)
    assert [metrics.wrong_hit(r) for r in records] == [False, True, False, False]
    assert metrics.summarise(records)["wrong_hit_share"]["value"] == 0.25


# --- intervals


PAIRS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.floats(-1e3, 1e3, allow_nan=False)),
    min_size=1,
    max_size=30,
)


@settings(max_examples=30, deadline=None)  # each draws two bootstraps
@given(PAIRS)
def test_intervals_lie_inside_the_values(values: list[tuple[str, float]]) -> None:
    numbers = [v for _, v in values]
    right = [v > 0 for v in numbers]
    share = metrics.share([(image, v) for (image, _), v in zip(values, right, strict=True)])
    assert share.value == pytest.approx(np.mean(right))
    for figure, value in (
        (metrics.mean(values), np.mean(numbers)),
        (metrics.median(values), np.median(numbers)),
    ):
        assert figure.value == pytest.approx(value)
        assert (figure.low is None) == (len({image for image, _ in values}) == 1)
        if figure.low is not None and figure.high is not None:
            assert min(numbers) - 1e-9 <= figure.low <= figure.high <= max(numbers) + 1e-9


# --- how right the answers are


def test_consistency_is_gqas() -> None:
    def asked(name: str, right: bool, *entailed: str) -> SampleRecord:
        return record(sample_id=name, image=name, match=right, entailed=entailed)

    records = [
        asked("a", True, "a", "b", "c"),  # itself does not count: b right, c wrong
        asked("b", True, "c"),  # wrong
        asked("c", False, "a"),  # wrong itself: not asked
        asked("d", True, "b"),  # right
        asked("e", True, "nowhere"),  # not in this run
        asked("f", True),
    ]
    found = metrics.consistency(records)
    assert (found.n, found.value) == (3, pytest.approx((0.5 + 0 + 1) / 3))


def hit(score: float, right: bool, **values: Any) -> SampleRecord:
    return record(provenance="text:semantic", applied=True, score=score, match=right, **values)


def test_what_nothing_judges_is_neither_right_nor_wrong() -> None:
    unlabelled = {"answer": None, "match": None}
    blind = replace(hit(0.9, True), **unlabelled)
    assert metrics.wrong_hit(blind) is None
    assert metrics.wrong_hit(replace(blind, applied=False, donor_answer=None)) is None
    assert metrics.summarise([blind, record(**unlabelled)])["wrong_hit_share"]["n"] == 0
    # One in two has a cold answer, hits and misses alike: the share is that of those.
    cold = Cold("a", "red", True, 0.1, 0.1, 10, 0)
    half = [
        hit(0.9, False, image="a", text="blue", cold=cold),
        record(image="b", cold=cold),
        blind,
        record(**unlabelled),
    ]
    assert metrics.wrong_hit_share(half).value == 0.5


def test_a_dry_run_is_judged_by_what_its_hits_would_have_given() -> None:
    def dry(own: str, donor: str | None, answer: str | None = "red") -> SampleRecord:
        match = None if answer is None else own == answer
        return replace(
            hit(0.9, True, text=own), applied=False, donor_answer=donor, answer=answer, match=match
        )

    hits = [
        dry("red", "red"),
        dry("red", "blue"),
        dry("blue", "red"),
        dry("blue", "blue"),
        dry("red", None),
    ]
    assert [metrics.wrong_hit(r) for r in hits] == [False, True, False, False, None]
    summary = metrics.summarise([*hits, record()])
    assert (summary["accuracy_on_hits"]["n"], summary["accuracy_on_hits"]["value"]) == (4, 0.5)
    assert summary["tiers"][0]["accuracy"] == summary["accuracy_on_hits"]
    assert summary["accuracy"]["value"] == pytest.approx(4 / 6)
    assert (summary["wrong_hit_share"]["n"], summary["wrong_hit_share"]["value"]) == (5, 0.2)
    blind = [dry("red", "blue", None), dry("red", "red", None), record(answer=None, match=None)]
    assert metrics.wrong_hit_share(blind).value == pytest.approx(1 / 3)


def test_gqas_measures_by_hand() -> None:
    query, verify = ("query", "attr", "categoryAttr"), ("verify", "obj", "existC")
    color = partial(record, group="color", types=query)
    records = [
        color(text="red", answer="red", match=True, valid=True, plausible=True),
        color(text="red", answer="blue", match=False, valid=True, plausible=False),
        color(text="wood", answer="red", match=False, valid=False, plausible=False),
        record(text="yes", answer="yes", match=True, group="there", types=verify),
    ]
    assert figure("gqa.validity", *records).value == pytest.approx(2 / 3)
    assert figure("gqa.plausibility", *records).value == pytest.approx(1 / 3)
    # color: red expected twice and given twice, blue once and never: 1, weighted 3 of 4; there: 0.
    assert metrics.distribution(records) == pytest.approx(0.75)
    values = {name: value.value for name, value in metrics.by_type(records).items()}
    assert values == {
        "binary": 1.0, "open": pytest.approx(1 / 3), "structural query": pytest.approx(1 / 3),
        "structural verify": 1.0, "semantic attr": pytest.approx(1 / 3), "semantic obj": 1.0,
    }  # fmt: skip
    assert metrics.summarise([record()])["gqa"]["distribution"] is None


# --- savings, noise, files


def test_savings_may_be_losses() -> None:
    records = [
        record(
            image=str(i),
            latency_s=0.030,
            ttft_s=None,
            cached_tokens=4,
            cold=Cold(str(i), "", None, x, 0.1, 10, 2),
        )
        for i, x in enumerate((0.010, 0.020, 0.090))
    ]
    assert figure("saved.tokens", *records) == metrics.Estimate(3, 2.0, 2.0, 2.0)
    assert figure("saved.latency_s", *records).value == pytest.approx(0.010)
    assert figure("saved.ttft_s", *records).n == figure("saved.tokens", record()).n == 0
    row = metrics.summarise(records)["tiers"][-1]
    assert (row["tier"], row["saved"]["latency_p50_s"]["value"]) == ("all", pytest.approx(-0.010))


def test_the_noise_floor_compares_text_and_tokens() -> None:
    def cold(again: str | None, ids: tuple[int, ...] | None) -> Cold:
        return Cold("a", "red", None, 0.1, 0.1, 10, 0, (1,), again, ids)

    asked = [cold("Red.", (1,)), cold("red", (2,)), cold("blue", (3,)), cold(None, None)]
    answers = figure("noise_floor.answers", cold=asked)
    assert (answers.n, answers.value) == (3, pytest.approx(1 / 3))
    assert figure("noise_floor.tokens", cold=asked).value == pytest.approx(2 / 3)
    assert figure("noise_floor.answers", cold=[cold(None, None)]).n == 0


def test_a_record_comes_back_from_its_line(tmp_path: Path) -> None:
    cold = Cold("a", "red", None, 0.1, None, 10, 0, (1, 2), "red", (1, 3))
    first = hit(
        0.9,
        True,
        cold=cold,
        statuses={"exact_text": Status.MISS},
        token_ids=(1, 2),
        entailed=("x",),
    )
    line = first.to_json()

    def read(row: dict[str, Any]) -> list[SampleRecord]:
        (tmp_path / "s.jsonl").write_text(
            json.dumps(row) + "\n" + json.dumps(row)[:50], encoding="utf-8"
        )
        return read_rows(tmp_path / "s.jsonl", SampleRecord, cut_off=True)

    assert read(line | {"from a later version": 1}) == [first]
    for field, value in (
        ("answer", 5), ("score", "high"), ("token_ids", ["one"]), ("statuses", {"exact_text": "maybe"}), ("cold", 3),
    ):  # fmt: skip
        with pytest.raises(DatasetError, match=f"line 1: {field}"):
            read(line | {field: value})
