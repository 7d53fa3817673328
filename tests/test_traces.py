"""Traces: which samples are asked, in which order, how often."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from semkv.errors import ConfigError
from semkv_lab.samples import ZIPF_EXPONENT, ImageRef, Sample, Trace, TraceKind, arrange
from semkv_lab.settings import resolve

SAMPLES = [
    Sample(f"{image}-{number}", f"question {number} on {image}", images=(ImageRef(f"i{image}", None),))
    for image in range(40)
    for number in range(5)
]
ORIGINALS = {sample.sample_id: sample for sample in SAMPLES}


def ids(trace: Trace) -> list[str]:
    return [sample.sample_id for sample in arrange(SAMPLES, trace)]


@pytest.mark.parametrize("kind", TraceKind)
def test_equal_settings_give_equal_requests_under_ids_of_their_own(kind: TraceKind) -> None:
    requests = arrange(SAMPLES, Trace(kind, seed=3, requests=700))
    assert requests == arrange(SAMPLES, Trace(kind, seed=3, requests=700))
    assert arrange(SAMPLES, Trace(kind, seed=3, requests=90)) == requests[:90]
    assert (kind is TraceKind.IN_ORDER) == (ids(Trace(kind, seed=4, requests=90)) == ids(Trace(kind, 3, 90)))
    assert len({r.sample_id for r in requests}) == len(requests) == 700
    for request in requests:
        original = ORIGINALS[request.sample_id.partition("#")[0]]
        assert (request.question, request.images) == (original.question, original.images)


def test_in_order_is_the_data_sets_own_order_round_and_round() -> None:
    assert arrange(SAMPLES, Trace()) == SAMPLES
    assert ids(Trace(requests=202))[200:] == ["0-0#2", "0-1#2"]
    assert ids(Trace(requests=3)) == ["0-0", "0-1", "0-2"]


def test_a_repeat_takes_no_id_of_the_data_set_and_counts_with_its_original() -> None:
    samples = [Sample("a", "one?"), Sample("a#2", "two?"), Sample("a#2#2", "three?")]
    requests = arrange(samples, Trace(requests=9))
    assert [r.sample_id for r in requests] == [
        "a", "a#2", "a#2#2", "a#3", "a#2#3", "a#2#2#2", "a#4", "a#2#4", "a#2#2#3",
    ]  # fmt: skip
    assert [r.image_name for r in requests] == ["a", "a#2", "a#2#2"] * 3


def test_zipf_asks_for_the_image_of_rank_r_in_proportion_to_r_to_the_minus_exponent() -> None:
    asked = Counter(r.image_name for r in arrange(SAMPLES, Trace(TraceKind.ZIPF, requests=40_000)))
    counts = [n for _, n in asked.most_common()]
    total = sum(rank**-ZIPF_EXPONENT for rank in range(1, 41))
    for rank in (1, 2, 4, 8):
        assert counts[rank - 1] / 40_000 == pytest.approx(rank**-ZIPF_EXPONENT / total, rel=0.1)


def test_wrong_values_are_named(tmp_path: Path) -> None:
    for flags, words in (
        ({"trace": "random"}, ("--trace", "'random'", "in-order", "zipf")),
        ({"trace_requests": 0}, ("--trace-requests", "0", "positive")),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(cache_dir=tmp_path, **flags)  # type: ignore[arg-type]
        assert all(word in str(caught.value) for word in words)
