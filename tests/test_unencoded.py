"""L1 encodes a text only where there is something to compare it with: entries come without a vector, and get it with
the next request of their partition."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_helpers import Bench, WrittenEncoder, line
from gateway_helpers import wait_until
from semkv.encoders.timed import EncoderLateError, TimedEncoder
from semkv.stores.catalog import Catalog
from semkv.tiers.similar import _ENCODED, _FEW
from semkv.types import Plan, ReuseReport

KEY = "semantic_text@written"


class Passes(WrittenEncoder):
    """It notes what came in one pass, and fails on some texts."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[list[str]] = []
        self.fails_on: tuple[str, ...] = ()
        self.entered = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.passes.append(list(texts))
        self.entered.set()
        self.go.wait()
        if set(self.fails_on) & set(texts):
            raise ValueError("it does not like that")
        return super().encode(texts)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return a_bench(tmp_path)


def a_bench(root: Path, **settings: Any) -> Bench:
    bench = Bench(
        root,
        embedding_layers=(),
        embedding_hook="none",
        similarity_threshold=0.9,
        **settings,
    )
    bench.encoder = Passes()
    bench.reopen()
    return bench


def record(bench: Bench, question: str) -> str:
    """Record a request that was not looked up; the entry's id."""
    request = bench.request(question)
    report = ReuseReport(request, Plan(request.segments), {})
    return str(bench.cache.add_observation(report, question))


def kept(bench: Bench) -> int:
    """How many vectors the catalog's file has."""
    with_it = Catalog(bench.root / "cache" / "catalog.sqlite")
    rows = with_it.vectors([KEY], 0, 1000)
    with_it.close()
    return len(rows)


def test_the_first_text_of_a_partition_is_encoded_with_the_second(bench: Bench) -> None:
    report = bench.ask("color", system="s")
    assert line(report) == "exact_text=miss, semantic_text=miss"
    bench.ask("color", system="another")
    bench.ask("color", tenant="another")
    assert bench.encoder.passes == []
    assert bench.look("color~0.95", system="s").provenance == "text:semantic"
    assert bench.encoder.passes == [["color~0.95", "color"]]
    assert bench.look("color~0.96", system="s").hit
    assert bench.encoder.passes[1:] == [["color~0.96"]]


def test_what_the_guards_tell_apart_is_not_encoded(tmp_path: Path) -> None:
    bench = a_bench(tmp_path, guards=True)
    asked = "What color is the object above the cube?"
    bench.ask(asked)
    for other in ("below", "left of"):
        report = bench.look(asked.replace("above", other))
        assert line(report) == "exact_text=miss, semantic_text=miss"
    assert bench.encoder.passes == []
    assert sum(bench.cache.stats().told_apart.values()) == 2
    for number in range(_FEW):
        record(bench, f"What color is the object with number {number}?")
    bench.look(asked.replace("above", "below"))
    assert len(bench.encoder.passes) == 1


def test_after_a_restart_what_has_no_vector_gets_one_and_keeps_it(bench: Bench) -> None:
    bench.ask("color")
    bench.reopen()
    assert kept(bench) == 0
    assert bench.look("color~0.95").hit
    bench.reopen()
    assert kept(bench) == 1
    bench.encoder.passes.clear()
    assert bench.look("color~0.96").hit
    assert bench.encoder.passes == [["color~0.96"]]


def test_what_another_cache_of_the_directory_records_gets_its_vector_here(bench: Bench) -> None:
    other = a_bench(bench.root)
    other.ask("color")
    assert other.encoder.passes == []
    assert bench.look("color~0.95").hit
    assert other.look("color~0.96").hit
    assert other.encoder.passes == [["color~0.96", "color"]]


def test_entries_of_another_encoder_get_vectors_of_this_one(bench: Bench) -> None:
    bench.ask("color")
    assert bench.look("color~0.95").hit
    bench.encoder.fingerprint = "another"
    bench.reopen()
    assert bench.look("color~0.95").hit
    bench.encoder.fingerprint = "written"
    bench.reopen()
    bench.encoder.passes.clear()
    assert bench.look("color~0.96").hit
    assert bench.encoder.passes == [["color~0.96"]]


def test_a_large_partition_is_encoded_a_part_with_each_lookup_the_latest_first(
    bench: Bench,
) -> None:
    topics = [f"topic{n}" for n in range(2 * _ENCODED)]
    for topic in topics:
        record(bench, topic)
    assert bench.encoder.passes == []
    assert bench.look(f"{topics[-1]}~0.95").hit
    assert bench.look(f"{topics[0]}~0.95").hit
    assert bench.encoder.passes == [
        [f"{topics[-1]}~0.95", *reversed(topics[_ENCODED:])],
        [f"{topics[0]}~0.95", *reversed(topics[:_ENCODED])],
    ]


def test_a_text_on_which_the_encoder_fails_leaves_the_others_alone(bench: Bench) -> None:
    bench.encoder.fails_on = ("bad",)
    record(bench, "bad")
    record(bench, "color")
    assert bench.look("color~0.95").hit
    assert bench.look("color~0.96").hit
    assert bench.cache.stats().faults == {"vector": 2}
    assert bench.encoder.passes[-1] == ["color~0.96"], "it is not tried again"
    bench.encoder.fails_on = ()
    bench.reopen()
    assert bench.look("bad~0.95").hit


@pytest.mark.parametrize("rows", [0.0, np.nan])
def test_a_vector_that_is_no_direction_leaves_the_others_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, rows: float
) -> None:
    work = bench.encoder.encode

    def encode(texts: Sequence[str]) -> np.ndarray:
        found = work(texts)
        found[[text == "bad" for text in texts]] = rows
        return found

    record(bench, "bad")
    record(bench, "color")
    monkeypatch.setattr(bench.encoder, "encode", encode)
    assert bench.look("color~0.95").hit
    assert not bench.look("bad~0.95").hit


def test_while_the_encoder_fails_nothing_is_lost(bench: Bench) -> None:
    record(bench, "color")
    bench.encoder.error = RuntimeError("away")
    assert not bench.look("color~0.95").hit
    bench.ask("shape")
    bench.encoder.error = None
    assert bench.look("color~0.95").hit
    assert bench.look("shape~0.95").hit


def test_what_was_removed_before_it_had_a_vector_is_forgotten(bench: Bench) -> None:
    other = a_bench(bench.root)
    first, *_ = [record(bench, text) for text in ("color", "shape", "size")]
    waiting = bench.cache._similar._unencoded
    assert len(waiting.entries()) == 3
    bench.cache.invalidate(entry_id=first)
    assert first not in waiting.entries()
    other.cache.invalidate(namespace=bench.request("").namespace)
    wait_until(lambda: not waiting.entries())
    assert not bench.look("color~0.95").hit
    assert bench.encoder.passes == []
    assert bench.cache.stats().faults == {}


def test_a_damaged_text_is_a_counted_miss_and_its_entry_goes(bench: Bench) -> None:
    record(bench, "color")
    record(bench, "shape")
    database = bench.cache._catalog.database
    with database.write() as db:
        db.execute("UPDATE entries SET chunk_text='size' WHERE chunk_text='color'")
    assert bench.look("shape~0.95").hit
    assert not bench.look("size~0.95").hit
    assert bench.cache.stats().faults == {"catalog": 1}
    assert bench.cache.stats().entries == 1


def test_a_text_that_no_vector_stands_for_is_not_compared(bench: Bench) -> None:
    long = "word " * 21
    record(bench, long)
    record(bench, "color")
    assert line(bench.look(long + "more")) == "exact_text=miss, semantic_text=skip"
    assert bench.encoder.passes == []
    assert bench.look("color~0.95").hit
    assert bench.encoder.passes == [["color~0.95", "color"]]


# -- a limit on waiting -----------------------------------------------------------------------------------------------


def together(encoder: Passes, timed: TimedEncoder, *calls: Sequence[str]) -> list[Any]:
    """What calls bring, rows or an error. The first is encoding when the others come, and those wait together."""
    encoder.go.clear()
    with ThreadPoolExecutor(len(calls)) as pool:
        first = pool.submit(timed.encode, calls[0])
        wait_until(encoder.entered.is_set)
        others = [pool.submit(timed.encode, texts) for texts in calls[1:]]
        wait_until(lambda: timed._calls.qsize() == len(others))
        encoder.go.set()
        done = [first, *others]
        return [call.exception() or call.result() for call in done]


def test_calls_that_wait_together_share_a_pass() -> None:
    encoder = Passes()
    timed = TimedEncoder(encoder, 300.0)
    calls = [[text, "common"] for text in ("a", "b", "c")]
    found = together(encoder, timed, *calls)
    assert encoder.passes[0] == ["a", "common"]
    assert len(encoder.passes) == 2
    assert sorted(encoder.passes[1]) == ["b", "c", "common"]
    for texts, rows in zip(calls, found, strict=True):
        assert np.array_equal(rows, WrittenEncoder().encode(texts))
    timed.close()
    timed._thread.join()


def test_of_calls_that_share_a_pass_only_the_one_with_a_bad_text_fails() -> None:
    encoder = Passes()
    encoder.fails_on = ("bad",)
    timed = TimedEncoder(encoder, 300.0)
    _, bad, good = together(encoder, timed, ["a"], ["bad"], ["c"])
    assert isinstance(bad, ValueError)
    assert np.array_equal(good, WrittenEncoder().encode(["c"]))
    timed.close()


@pytest.mark.parametrize("error", [SystemExit(1), TimeoutError("its own"), MemoryError()])
def test_an_encoder_that_raises_is_asked_again(error: BaseException) -> None:
    encoder = Passes()
    timed = TimedEncoder(encoder, 300.0)
    encoder.error = error  # type: ignore[assignment]
    with pytest.raises((RuntimeError, TimeoutError, MemoryError)):
        timed.encode(["a"])
    encoder.error = None
    assert timed.encode(["a"]).shape == (1, encoder.dim)
    timed.close()


def test_while_a_pass_hangs_nobody_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    encoder = Passes()
    timed = TimedEncoder(encoder, 0.01)
    encoder.go.clear()
    with pytest.raises(EncoderLateError, match="no vector within"):
        timed.encode(["a"])
    for _ in range(3):
        with pytest.raises(EncoderLateError, match="is late"):
            timed.encode(["b"])
    assert len(encoder.passes) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    timed._limit_s = 300.0
    encoder.go.set()
    wait_until(lambda: timed._began is None)
    assert timed.encode(["b"]).shape == (1, encoder.dim)
    timed.close()


def test_after_three_late_passes_the_encoder_has_a_pause() -> None:
    encoder = Passes()
    timed = TimedEncoder(encoder, 0.01)
    for number in range(3):
        encoder.entered.clear()
        encoder.go.clear()
        with pytest.raises(EncoderLateError):
            timed.encode(["a"])
        wait_until(encoder.entered.is_set)
        began = timed._began
        wait_until(lambda began=began: timed._away() or timed._began != began)
        encoder.go.set()
        wait_until(lambda: timed._began is None)
        assert (timed._closed_until > 0) == (number == 2)
    timed._limit_s = 300.0
    with pytest.raises(EncoderLateError, match="is late"):
        timed.encode(["a"])
    timed._closed_until = 0.0
    timed.encode(["a"])
    assert timed._late == 0
    timed.close()
