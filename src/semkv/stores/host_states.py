"""Fusion states in host memory: each in as many rows of a `HostPool` as it takes, behind a head of 128 bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from semkv.stores.container import Bytes
from semkv.stores.fusion import FusionState
from semkv.stores.host_policy import FOREVER
from semkv.stores.host_pool import HostPool, Loan

_HEAD = 128


class HeldState:
    """A fusion state in pieces, which stay what they are while this object lives; it travels to other processes whole.

    Attributes:
        shape, dtype: see `FusionState`.
        parts: its bytes in order, uint8 ``[n]`` each.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, parts: Sequence[Bytes], loan: Loan | None = None) -> None:
        self.shape, self.dtype, self.parts, self._loan = shape, dtype, parts, loan

    @classmethod
    def of(cls, state: FusionState) -> HeldState:
        """A state that owns its bytes."""
        return cls(state.shape, state.dtype, [state.data])

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return HeldState, (self.shape, self.dtype, [np.concatenate(self.parts)])


class HostStates:
    """The fusion states of one namespace, and of one generation of its store, in a pool that others use as well."""

    def __init__(self, pool: HostPool, namespace: str, generation: str = "") -> None:
        self.pool = pool
        self._prefix = f"fusion {namespace} {generation} ".encode()

    def _keys(self, key: str, count: int) -> list[bytes]:
        prefix = self._prefix + key.encode()
        return [prefix + b" %d" % i for i in range(count)]

    def get(self, key: str) -> HeldState | None:
        """The state, which counts as used now; None where not all of it is there."""
        if self.pool.row_bytes < _HEAD or (head := self.pool.lend(self._keys(key, 1))) is None:
            return None
        document = json.loads(bytes(head.parts[0][0, :_HEAD]))
        nbytes = int(document["nbytes"])
        loan = self.pool.lend(self._keys(key, -(-(_HEAD + nbytes) // self.pool.row_bytes)))
        if loan is None:
            return None
        return HeldState(tuple(document["shape"]), document["dtype"], _cut(loan.parts, nbytes), loan)

    def put(self, key: str, state: FusionState, ends: float = FOREVER) -> None:
        """Keep a copy until it is pushed out, or too old at ``ends``; without room for it nothing happens."""
        nbytes = len(state.data)
        head = json.dumps({"nbytes": nbytes, "shape": state.shape, "dtype": state.dtype}).encode().ljust(_HEAD)
        count = -(-(_HEAD + nbytes) // self.pool.row_bytes)
        if len(head) > _HEAD or self.pool.row_bytes < _HEAD or count > len(self.pool.rows):
            return
        keys = self._keys(key, count)
        if (found := self.pool.reserve_all(keys)) is None:
            return
        rows = [self.pool.view(run) for run in found]
        rows[0].reshape(-1)[:_HEAD] = np.frombuffer(head, np.uint8)
        at = 0
        for part in _cut(rows, nbytes):
            part[:] = state.data[at : at + len(part)]
            at += len(part)
        self.pool.publish(keys, ends)
        self.pool.release(keys)


def _cut(rows: Sequence[Bytes], nbytes: int) -> list[Bytes]:
    """Where a state's bytes are in its rows (uint8 ``[n, row_bytes]`` each): behind the head, up to its length."""
    parts, at = [], -_HEAD
    for run in rows:
        flat = run.reshape(-1)
        parts.append(flat[max(0, -at) : nbytes - at])
        at += len(flat)
    return parts
