"""The KV store: blocks of a model's KV cache, found by the engine's own block hashes.

A block is opaque bytes. What they mean is in the layout, which is part of the namespace and of every file's header,
so that a block is never read back under another layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from semkv.errors import CorruptValue
from semkv.keys import digest
from semkv.stores.bounds import Bounds
from semkv.stores.container import Bytes, room
from semkv.stores.directory import valid_id
from semkv.stores.extents import ExtentStore
from semkv.stores.host_pool import runs


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """How one layer's share of a block looks.

    Attributes:
        name: the engine's name of the layer.
        dtype: the engine's name of the element type, such as ``bfloat16``.
        shape: of one block, without the block dimension.
        strides: of one block in the engine's memory, in elements; told apart because kernels differ by it.
        nbytes: bytes of one block in this layer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a row of the store is made up: one block of every layer, in this order.

    Attributes:
        layers: in the order of their bytes in a row.
        block_size: tokens per block.
        backend: the attention backend's name, where it is known.
    """

    layers: tuple[LayerLayout, ...]
    block_size: int
    backend: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def document(self) -> Any:
        """The layout as a JSON value, as it stands in the headers."""
        return json.loads(json.dumps(asdict(self)))

    def digest(self) -> str:
        return digest("layout", json.dumps(self.document(), sort_keys=True))

    @classmethod
    def parse(cls, document: Any) -> KVLayout:
        """Read `document` back.

        Raises:
            CorruptValue: it is not a layout.
        """
        try:
            layers = tuple(
                LayerLayout(x["name"], x["dtype"], tuple(x["shape"]), tuple(x["strides"]), x["nbytes"])
                for x in document["layers"]
            )
            return cls(layers, document["block_size"], document["backend"])
        except (KeyError, TypeError) as error:
            raise CorruptValue(f"not a layout: {error}") from error


@dataclass(frozen=True, slots=True)
class KVChunk:
    """A run of KV blocks.

    Attributes:
        chunk_id: the extent's id; empty for a chunk that is not stored, or spans extents.
        block_hashes: the engine's hash of each block, in prompt order; a hash covers all tokens before it.
        tensors: per layer name the blocks' bytes, uint8 ``[n_blocks, layer bytes]``.
        layout: what the bytes mean.
        block_ids: where the engine held the blocks, or None.
        position: index in the prompt of the first block.
        namespace: of the store that it is of; empty where that is not known.
    """

    chunk_id: str
    block_hashes: tuple[bytes, ...]
    tensors: Mapping[str, Bytes]
    layout: KVLayout
    block_ids: tuple[int, ...] | None = None
    position: int = 0
    namespace: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens the chunk covers, all of its blocks being full."""
        return len(self.block_hashes) * self.layout.block_size

    def rows(self) -> Bytes:
        """The blocks as rows, uint8 ``[n_blocks, row_bytes]``."""
        return np.concatenate([self.tensors[layer.name] for layer in self.layout.layers], axis=1)

    def typed(self, name: str) -> npt.NDArray[Any]:
        """One layer's blocks ``[n_blocks, *shape]`` in its own dtype; bfloat16 and fp8 come as unsigned integers."""
        layer = next(x for x in self.layout.layers if x.name == name)
        size = layer.nbytes // max(1, int(np.prod(layer.shape)))
        native = {"float16": np.float16, "float32": np.float32, "int8": np.int8}
        dtype = native.get(layer.dtype, {1: np.uint8, 2: np.uint16, 4: np.uint32}[size])
        return np.ascontiguousarray(self.tensors[name]).view(dtype).reshape(-1, *layer.shape)

    @classmethod
    def from_rows(
        cls,
        rows: Bytes,
        hashes: Sequence[bytes],
        layout: KVLayout,
        *,
        chunk_id: str = "",
        block_ids: Sequence[int] | None = None,
        position: int = 0,
        namespace: str = "",
    ) -> KVChunk:
        """Cut rows (uint8 ``[n_blocks, row_bytes]``) into layers; the tensors are views of ``rows``."""
        tensors, start = {}, 0
        for layer in layout.layers:
            tensors[layer.name] = rows[:, start : start + layer.nbytes]
            start += layer.nbytes
        ids = None if block_ids is None else tuple(block_ids)
        return cls(chunk_id, tuple(hashes), tensors, layout, ids, position, namespace)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds and did since it was opened.

    Attributes:
        extents, blocks, nbytes: of this namespace, on disk now.
        counters: see `ExtentStore.counters`.
    """

    extents: int
    blocks: int
    nbytes: int
    counters: Mapping[str, int] = field(default_factory=dict)


class KVStore:
    """The KV blocks of one model, layout and rank. Safe to use from several threads and processes."""

    def __init__(self, extents: ExtentStore, namespace: str, layout: KVLayout) -> None:
        self._extents = extents
        self.layout = layout
        self.namespace = digest("kv", namespace, layout.digest())
        self._document = layout.document()

    @classmethod
    def open(cls, directory: Path, namespace_digest: str, layout: KVLayout, bounds: Bounds | None = None) -> KVStore:
        """Open or create the store under ``directory``.

        Args:
            directory: shared by all models, layouts and ranks; the bounds count them together.
            namespace_digest: digest of everything but the layout that shapes a block's bytes, the rank included.
            layout: of a block.
            bounds: of the directory.

        Raises:
            StoreError: ``directory`` is a file, or was written by another format version.
        """
        return cls(ExtentStore(directory, "kv", bounds or Bounds()), namespace_digest, layout)

    @property
    def on(self) -> bool:
        """False after a fault that put the store out of use."""
        return self._extents.on

    def adopt(self) -> None:
        """See `ExtentStore.adopt`."""
        self._extents.adopt()

    def lookup(self, hashes: Sequence[bytes], holder: str = "") -> int:
        """How many leading blocks of ``hashes`` are stored. Nothing is read but the index.

        Args:
            hashes: of consecutive blocks from the prompt's start.
            holder: who will read them; until `release`, or for a minute, no process evicts them.
        """
        return len(self._extents.find_prefix(self.namespace, hashes, holder))

    def release(self, holder: str) -> None:
        """``holder`` has read what its lookup found, or will not."""
        self._extents.release(holder)

    def ends(self, hashes: Sequence[bytes]) -> float:
        """When the first of the stored ``hashes`` is too old to be served, in seconds since the epoch."""
        return self._extents.ends(self.namespace, hashes)

    def stored(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which of ``hashes`` are stored, and note that they were used."""
        return self._extents.stored(self.namespace, hashes)

    def read_rows(self, hashes: Sequence[bytes], out: Bytes | None = None) -> Bytes:
        """Read and check the longest stored leading run of ``hashes``.

        Args:
            hashes: of consecutive blocks.
            out: where to put it, uint8 ``[>= len(hashes), row_bytes]``; allocated when None.

        Returns:
            uint8 ``[n, row_bytes]``, n <= len(hashes): a view of ``out``. What is damaged ends the run.
        """
        refs = self._extents.find_prefix(self.namespace, hashes)
        if out is None:
            out = room(len(refs), self.layout.row_bytes)
        return out[: self._extents.read(self.namespace, self._document, hashes, refs, out[: len(refs)])]

    def load(self, chunk_id: str) -> KVChunk | None:
        """Load one extent by its id; None when it is gone, damaged, or of another model or layout."""
        described = self._extents.files.describe(chunk_id) if valid_id(chunk_id) else None
        if described is None:
            return None
        header, _ = described
        if header.namespace != self.namespace or header.layout != self._document:
            return None
        hashes = [bytes.fromhex(h) for h in header.hashes]
        rows = self.read_rows(hashes)
        if len(rows) < len(hashes):
            return None
        return KVChunk.from_rows(
            rows, hashes, self.layout, chunk_id=chunk_id, position=header.position, namespace=self.namespace
        )

    def save(self, chunk: KVChunk) -> str | None:
        """Store the blocks of ``chunk`` that are not stored yet, and return the new extent's id.

        None when there was nothing new, or the disk or the bounds did not allow it.

        Raises:
            ValueError: the chunk has another layout.
        """
        if chunk.layout != self.layout:
            raise ValueError("the chunk's layout differs from the store's")
        return self.save_rows(chunk.block_hashes, chunk.rows(), position=chunk.position)

    def save_rows(
        self,
        hashes: Sequence[bytes],
        *parts: Bytes,
        position: int = 0,
        generation: str | None = None,
        owner: str = "",
    ) -> str | None:
        """`save` for rows, in any number of parts (uint8 ``[n, row_bytes]`` each) with one row for each hash.

        ``generation``: of the store when the rows were computed; what was purged since is not stored again.
        ``owner``: see `container.owner_of`.
        """
        if sum(map(len, parts)) != len(hashes) or any(part.shape[1:] != (self.layout.row_bytes,) for part in parts):
            shapes = ", ".join(str(part.shape) for part in parts)
            raise ValueError(f"rows of shape {shapes}, expected {(len(hashes), self.layout.row_bytes)}")
        there = self._extents.stored(self.namespace, hashes)
        if any(there):
            hashes, parts = _without(there, hashes, parts)
        sizes = {layer.nbytes for layer in self.layout.layers}
        shape = (len(hashes), len(self.layout.layers), sizes.pop()) if len(sizes) == 1 else None
        return self._extents.write(
            self.namespace,
            self._document,
            hashes,
            parts,
            position=position,
            shape=shape,
            generation=generation,
            owner=owner,
        )

    def stats(self) -> StoreStats:
        return StoreStats(*self._extents.totals(self.namespace), dict(self._extents.counters))

    def disown(self) -> bool:
        """See `ExtentStore.disown`."""
        return self._extents.disown(self.namespace)

    def purge(self) -> int:
        """Delete what this namespace holds; returns the number of extents."""
        return self._extents.purge(self.namespace)

    def close(self) -> None:
        self._extents.close()


def _without(
    there: Sequence[bool], hashes: Sequence[bytes], parts: Sequence[Bytes]
) -> tuple[list[bytes], tuple[Bytes, ...]]:
    """What is not there; of the rows, views."""
    kept: list[Bytes] = []
    at = 0
    for part in parts:
        new = [i for i in range(len(part)) if not there[at + i]]
        kept += [part[run.first : run.first + run.count] for run in runs(new)]
        at += len(part)
    return [h for h, known in zip(hashes, there, strict=True) if not known], tuple(kept)
