"""The fusion store: what the vision encoder and projector put out, one tensor per media item."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from semkv.errors import CorruptValue
from semkv.keys import digest
from semkv.stores.blocks import StoreStats
from semkv.stores.bounds import Bounds
from semkv.stores.container import Bytes, room
from semkv.stores.extents import ExtentStore

FUSION_MAX_BYTES = 8 << 30
_ITEM_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class FusionState:
    """The encoder's output for one media item.

    Attributes:
        key: a digest over the media item and everything that shapes the output, tenant included.
        data: the tensor's bytes in row-major order, uint8 ``[nbytes]``.
        shape: usually ``(tokens, width)``; Qwen3-VL's width is hidden size times (1 + deepstack layers).
        dtype: ``bfloat16``, ``float16``, ``float32`` or ``float64``.
    """

    key: str
    data: Bytes
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        size = _ITEM_SIZE.get(self.dtype)
        if size is None or self.data.dtype != np.uint8 or self.data.shape != (int(np.prod(self.shape)) * size,):
            raise CorruptValue(f"{self.data.shape} bytes are no {self.dtype} tensor of shape {self.shape}")

    @classmethod
    def from_array(cls, key: str, array: npt.NDArray[Any]) -> FusionState:
        """Take a float16, float32 or float64 array."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return cls(key, flat, tuple(array.shape), str(array.dtype))

    def to_array(self) -> npt.NDArray[Any]:
        """The values; bfloat16, which numpy lacks, comes as the float32 of the same value."""
        if self.dtype == "bfloat16":
            wide = self.data.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        return self.data.view(np.dtype(self.dtype)).reshape(self.shape)


class FusionStore:
    """Fusion states of one namespace on disk. Safe to use from several threads and processes."""

    def __init__(self, extents: ExtentStore, namespace: str) -> None:
        self._extents = extents
        self.namespace = digest("fusion", namespace)

    @classmethod
    def open(cls, directory: Path, namespace_digest: str, bounds: Bounds | None = None) -> FusionStore:
        """Open or create the store under ``directory``.

        Args:
            directory: shared by all models; the bounds count them together, and a block is one media item.
            namespace_digest: digest of everything that shapes an encoder's output.
            bounds: of the directory; 8 GiB by default.

        Raises:
            StoreError: ``directory`` is a file, or was written by another format version.
        """
        return cls(ExtentStore(directory, "fusion", bounds or Bounds(FUSION_MAX_BYTES)), namespace_digest)

    @property
    def writer(self) -> str:
        """See `ExtentStore.writer`."""
        return self._extents.writer

    def apart(self, namespace_digest: str) -> FusionStore:
        """The states of another namespace in the same directory."""
        return FusionStore(self._extents, namespace_digest)

    def _hash(self, key: str) -> bytes:
        return bytes.fromhex(digest("item", key))

    def __contains__(self, key: str) -> bool:
        return bool(self._extents.find_prefix(self.namespace, [self._hash(key)]))

    def load(self, key: str) -> FusionState | None:
        """Read and check a state; None when it is not stored or was damaged."""
        hashes = [self._hash(key)]
        refs = self._extents.find_prefix(self.namespace, hashes)
        if not refs:
            return None
        header, row_bytes = self._extents.files.describe(refs[0].extent) or (None, 0)
        row = room(1, row_bytes)
        layout: Any = None if header is None else header.layout
        if self._extents.read(self.namespace, layout, hashes, refs, row) != 1:  # counts and deletes what is damaged
            return None
        try:
            shape, dtype = layout["shape"], layout["dtype"]
            return FusionState(key, row[0], tuple(int(n) for n in shape), str(dtype))
        except (KeyError, TypeError, ValueError, CorruptValue):  # another writer's header
            self._extents.reject(refs[0].extent)
            return None

    def ends(self, key: str) -> float:
        """When a stored state is too old to be served, in seconds since the epoch."""
        return self._extents.ends(self.namespace, [self._hash(key)])

    def renew(self) -> str:
        """See `ExtentStore.renew`."""
        return self._extents.renew()

    def save(self, state: FusionState, generation: str | None = None, owner: str = "") -> bool:
        """Store a state; False when it was there already, or the disk or the bounds did not allow it.

        ``generation``: of the store when the state was computed; what was purged since is not stored again.
        ``owner``: see `container.owner_of`.
        """
        if state.key in self:
            return False
        layout = {"shape": list(state.shape), "dtype": state.dtype}
        rows = state.data.reshape(1, -1)
        hashes = [self._hash(state.key)]
        written = self._extents.write(self.namespace, layout, hashes, [rows], generation=generation, owner=owner)
        return written is not None

    def stats(self) -> StoreStats:
        return StoreStats(*self._extents.totals(self.namespace), dict(self._extents.counters))

    def disown(self) -> bool:
        """See `ExtentStore.disown`."""
        return self._extents.disown(self.namespace)

    def purge(self) -> int:
        """Delete what this namespace holds; returns the number of states."""
        return self._extents.purge(self.namespace)

    def close(self) -> None:
        self._extents.close()
