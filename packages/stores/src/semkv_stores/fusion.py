"""The fusion store: what the vision encoder and projector put out, one tensor per media item."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from semkv_stores.block_file import Bytes, room
from semkv_stores.block_index import BlockRef
from semkv_stores.blocks import BlockStore, Bounds
from semkv_stores.digests import digest
from semkv_stores.errors import CorruptValue

FUSION_MAX_BYTES = 8 << 30
_ITEM_SIZE = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}


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
        if (
            size is None
            or self.data.dtype != np.uint8
            or self.data.shape != (int(np.prod(self.shape)) * size,)
        ):
            raise CorruptValue(
                f"{self.data.shape} bytes are no {self.dtype} tensor of shape {self.shape}"
            )

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
    """Fusion states of one namespace, in a store of blocks. Safe to use from several threads and processes."""

    def __init__(self, blocks: BlockStore, namespace: str) -> None:
        self.blocks = blocks
        self.namespace = digest("fusion", namespace)

    @classmethod
    def open(
        cls, directory: Path, namespace_digest: str, bounds: Bounds | None = None
    ) -> FusionStore:
        """Open or create the store under ``directory``.

        Args:
            directory: shared by all models; the bounds count them together, and a block is one media item.
            namespace_digest: digest of everything that shapes an encoder's output.
            bounds: of the directory; 8 GiB by default.

        Raises:
            StoreError: see `BlockStore`.
        """
        return cls(
            BlockStore(directory, "fusion", bounds or Bounds(FUSION_MAX_BYTES)), namespace_digest
        )

    def __contains__(self, key: str) -> bool:
        return self.blocks.find(self.namespace, [_block(key)])[0] is not None

    def far(self, key: str) -> tuple[bytes, BlockRef] | None:
        """The block of a state that is in the bucket only, and where it is there; None for others."""
        block = _block(key)
        (ref,) = self.blocks.find(self.namespace, [block])
        return None if ref is None or ref.here else (block, ref)

    def load(self, key: str) -> FusionState | None:
        """Read and check a state; None when it is not stored in this directory or was damaged."""
        block = _block(key)
        (ref,) = self.blocks.find(self.namespace, [block])
        if ref is None or not ref.here:
            return None
        found = self.blocks.layout(ref)
        if found is None:
            return None
        layout, row_bytes = found
        row = room(1, row_bytes)[0]
        try:
            document = json.loads(layout)
            # Counts and deletes what is damaged.
            if not self.blocks.read(document, self.namespace, [block], [ref], [row])[0]:
                return None
            return FusionState(
                key, row, tuple(int(n) for n in document["shape"]), str(document["dtype"])
            )
        except (
            LookupError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
            CorruptValue,
        ):  # another writer's
            self.blocks.reject(ref.file)
            return None

    def save(
        self,
        state: FusionState,
        owner: str = "",
        since: int | None = None,
    ) -> bool:
        """Store a state; False when it was there already, or the disk or the bounds did not allow it.

        ``owner``, ``since``: see `BlockStore.write`.
        """
        block = [_block(state.key)]
        layout = {"shape": list(state.shape), "dtype": state.dtype}
        return (
            self.blocks.write(self.namespace, layout, block, [state.data], owner=owner, since=since)
            is not None
        )

    def close(self) -> None:
        self.blocks.close()


def _block(key: str) -> bytes:
    return bytes.fromhex(digest("item", key))
