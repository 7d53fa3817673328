"""The figures of a run: pure functions over sample records."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv.experiments import metrics
from semkv.experiments.metrics import Cold, SampleRecord


def record(**values: Any) -> SampleRecord:
    base: dict[str, Any] = {
        "sample_id": "05515938", "image": "a", "question": "q", "text": "red", "answer": "red", "match": True,
        "provenance": "", "exactness": "", "applied": False, "score": None, "donor": "", "donor_answer": None,
        "statuses": {}, "latency_s": 0.032, "lookup_s": 0.002, "ttft_s": 0.03, "prompt_tokens": 10,
        "cached_tokens": 0, "loaded_tokens": 0, "prefix_tokens": 0,
    }  # fmt: skip
    return SampleRecord(**{**base, **values})


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
    assert metrics.percentiles([None, None]) == metrics.Times(0, None, None)
    times = metrics.percentiles([0.1, None, 0.2, 0.3])
    assert times.n == 3
    assert times.p50_s == pytest.approx(0.2)
    assert times.p95_s == pytest.approx(0.29)


def test_an_interval_widens_with_the_clusters() -> None:
    outcomes = [(str(i // 20), (i // 20) % 2 == 0) for i in range(400)]  # whole images right or wrong
    alone = [(str(i), right) for i, (_, right) in enumerate(outcomes)]
    clustered, independent = metrics.share(outcomes), metrics.share(alone)
    assert clustered.value == independent.value == 0.5
    assert clustered.low is not None
    assert clustered.high is not None
    assert independent.low is not None
    assert independent.high is not None
    assert clustered.high - clustered.low > 3 * (independent.high - independent.low)
    # Independent samples: 1.96 * sqrt(.25 / 400) = 0.049.
    assert independent.high - 0.5 == pytest.approx(0.049, abs=0.006)
    assert metrics.share(outcomes) == clustered


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=30))
def test_an_interval_holds_its_value(outcomes: list[tuple[str, bool]]) -> None:
    share = metrics.share(outcomes)
    assert share.value == pytest.approx(sum(x for _, x in outcomes) / len(outcomes))
    assert share.low is not None
    assert share.high is not None
    assert 0 <= share.low <= share.high <= 1


def test_no_records_make_a_summary() -> None:
    summary = metrics.summarise([])
    assert (summary.samples, summary.hit_rate) == (0, 0.0)
    assert summary.accuracy.value is None
    json.dumps(summary.to_json())


def test_beyond_counts_every_sample_and_may_be_negative() -> None:
    def cold(computed: int) -> Cold:
        return Cold("a", "red", True, 0.1, 0.1, 10, 10 - computed)

    records = [record(cached_tokens=8, cold=cold(10)), record(cached_tokens=0, cold=cold(4))]
    tokens = metrics.tokens(records)
    assert (tokens.computed, tokens.baseline_computed, tokens.beyond) == (12, 14, 2)
    assert metrics.tokens([record(cached_tokens=0, cold=cold(4))]).beyond == -6
    assert metrics.tokens([record(), record(cold=cold(4))]).beyond is None


def test_hits_against_cold() -> None:
    def pair(text: str, cold_text: str, **values: Any) -> SampleRecord:
        cold = Cold("a", cold_text, cold_text == "red", 0.064, 0.1, 10, 0, (1, 2))
        return record(
            text=text, match=text == "red", provenance="p", applied=True, cold=cold, token_ids=(1, 2), **values
        )

    records = [pair("red", "red"), pair("blue", "red"), pair("red", "blue"), pair("blue", "blue", exactness="exact")]
    compared = metrics.against_cold(records)
    assert compared is not None
    assert (compared.n, compared.wrong_hits, compared.gained_hits) == (4, 1, 1)
    assert compared.agreement.value == 0.5
    assert (compared.identical_tokens.n, compared.identical_tokens.value) == (1, 1.0)
    assert compared.speedup == pytest.approx(2.0)
