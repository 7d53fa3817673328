"""The fusion store: encoder outputs by key, checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from block_helpers import files
from semkv.errors import CorruptValue
from semkv_stores.fusion import FusionState, FusionStore


def state(key: str = "picture", tokens: int = 6, seed: int = 0) -> FusionState:
    values = np.random.default_rng(seed).standard_normal((tokens, 8), dtype=np.float32)
    return FusionState.from_array(key, values)


def test_round_trip_and_no_second_copy(tmp_path: Path) -> None:
    store = FusionStore.open(tmp_path, "ns")
    assert store.save(state())
    assert not store.save(state())
    got = store.load("picture")
    assert got is not None
    assert np.array_equal(got.to_array(), state().to_array())
    assert (got.shape, got.dtype) == ((6, 8), "float32")
    assert "picture" in store
    assert "another" not in store
    assert store.load("another") is None
    assert FusionStore.open(tmp_path, "other model").load("picture") is None


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80], np.uint16)  # 1, -2, infinity
    store = FusionStore.open(tmp_path, "ns")
    store.save(FusionState("k", bits.view(np.uint8), (3,), "bfloat16"))
    got = store.load("k")
    assert got is not None
    assert np.array_equal(got.data.view(np.uint16), bits)
    assert got.to_array().tolist() == [1.0, -2.0, np.inf]


@pytest.mark.parametrize(("right", "wrong"), [(b"float32", b"float31"), (b"[6, 8]", b"[9, 8]")])
def test_a_damaged_head_is_a_counted_miss(tmp_path: Path, right: bytes, wrong: bytes) -> None:
    store = FusionStore.open(tmp_path, "ns")
    store.save(state())
    (file,) = files(tmp_path)
    raw = file.read_bytes()
    assert right in raw
    file.write_bytes(raw.replace(right, wrong))
    assert store.load("picture") is None
    assert store.blocks.counters["corrupt"] == 1
    assert store.save(state())
    got = store.load("picture")
    assert got is not None
    assert np.array_equal(got.to_array(), state().to_array())


def test_a_state_must_fit_its_shape() -> None:
    with pytest.raises(CorruptValue):
        FusionState("k", np.zeros(7, np.uint8), (2, 2), "bfloat16")
    with pytest.raises(CorruptValue):
        FusionState("k", np.zeros(4, np.uint8), (2,), "pickle")
