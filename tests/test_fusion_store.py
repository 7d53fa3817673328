"""The fusion store: encoder outputs by key, checked."""

from __future__ import annotations

import errno
import operator
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from block_helpers import files
from semkv.errors import CorruptValue
from semkv_stores import block_file
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


@pytest.mark.parametrize(
    "code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EIO, errno.EACCES]
)
@pytest.mark.parametrize("call", ["open_file", "os.pread", "os.preadv"])
def test_a_fault_while_reading_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    """At whichever of its calls it comes, once: it says nothing of the file."""
    store = FusionStore.open(tmp_path, "model")
    stored = state("item")
    assert store.save(stored)
    real, calls = operator.attrgetter(call)(block_file), 0

    def counted(*args: Any, **fields: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails:
            raise OSError(code, os.strerror(code))
        return real(*args, **fields)

    monkeypatch.setattr(f"semkv_stores.block_file.{call}", counted)
    for fails in range(1, 20):
        calls = 0
        found = store.load("item")
        if calls < fails:
            break
        assert found is None
        assert (store.blocks.counters["corrupt"], store.blocks.counters["missing"]) == (0, 0)
    assert fails > 1, "the call is made"
    assert store.blocks.counters["errors"] == fails - 1
    assert found is not None
    assert np.array_equal(found.data, stored.data)


def test_a_file_that_comes_in_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of a regular file may give less than was asked for."""
    store = FusionStore.open(tmp_path, "model")
    assert store.save(state("item"))
    pread = os.pread
    monkeypatch.setattr(
        block_file.os, "pread", lambda file, length, at: pread(file, min(length, 7), at)
    )
    assert store.load("item") is not None
