"""A block store with blocks of known content."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from semkv_stores import block_index
from semkv_stores.block_file import room
from semkv_stores.blocks import BlockStore, Bounds

ROW = 512
LAYOUT = {"layers": [{"name": "layer0", "dtype": "bfloat16", "shape": [256]}], "block_size": 16}


def key(i: int) -> bytes:
    return struct.pack(">Q", i) * 4 + b"grp0"


def keys(first: int, count: int) -> list[bytes]:
    return [key(i) for i in range(first, first + count)]


def value(i: int, row_bytes: int = ROW) -> np.ndarray:
    """The one right content of block ``i``."""
    return np.random.default_rng(i).integers(0, 256, row_bytes, dtype=np.uint8)


def open_store(root: Path, bounds: Bounds | None = None, writer: str = "") -> BlockStore:
    return BlockStore(root, "kv", bounds or Bounds(), writer)


def save(
    store: BlockStore, first: int, count: int = 1, namespace: str = "ns", **options: Any
) -> str | None:
    rows = [value(i) for i in range(first, first + count)]
    return store.write(namespace, LAYOUT, keys(first, count), rows, **options)


def served(store: BlockStore, blocks: Sequence[int], namespace: str = "ns") -> list[int]:
    """Which blocks are found and read, each of them checked."""
    wanted = [key(i) for i in blocks]
    found = [
        (i, k, ref)
        for i, k, ref in zip(blocks, wanted, store.find(namespace, wanted), strict=True)
        if ref
    ]
    memory = room(len(found), ROW)
    memory[:] = 0
    good = store.read(
        LAYOUT, namespace, [k for _, k, _ in found], [ref for *_, ref in found], list(memory)
    )
    for (i, *_), row, is_good in zip(found, memory, good, strict=True):
        assert not is_good or np.array_equal(row, value(i)), f"block {i}"
    return [i for (i, *_), is_good in zip(found, good, strict=True) if is_good]


def right(store: BlockStore, first: int, count: int, namespace: str = "ns") -> int:
    """How many of a run of blocks are served."""
    return len(served(store, range(first, first + count), namespace))


def found(store: BlockStore, first: int, count: int = 1, namespace: str = "ns") -> int:
    """How many of a run of blocks the index knows."""
    return sum(ref is not None for ref in store.find(namespace, keys(first, count)))


def totals(store: BlockStore) -> tuple[int, int, int]:
    """Files, blocks and bytes in the index, with what is being written."""
    return store.ask(block_index.totals, (0, 0, 0))


def file_ids(store: BlockStore) -> list[str]:
    """Of all files in the index."""
    return store.ask(lambda db: block_index.file_ids(db, {}), [])


def files(root: Path) -> list[Path]:
    """What lies where block files do, the oldest first."""
    return sorted((root / "extents").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)


def lose_index(root: Path) -> None:
    for path in (root / f"index.sqlite{suffix}" for suffix in ("", "-wal", "-shm")):
        path.unlink(missing_ok=True)


def restamp(file: Path, version: int, application: int = 0x73656D6B) -> None:
    """Make a database one of another version, or of another program."""
    with closing(sqlite3.connect(file)) as db:
        db.execute(f"PRAGMA user_version={version}")
        db.execute(f"PRAGMA application_id={application}")


def flip_last(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def header(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    document: dict[str, Any] = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    inner: dict[str, Any] = json.loads(document["__metadata__"]["semkv"])
    return inner


def rewrite(path: Path, **fields: Any) -> None:
    """Give a file another header, with a right checksum."""
    from semkv_stores import block_file

    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    document = json.loads(raw[8 : 8 + length])
    text, tensor = json.dumps(header(path) | fields), fields.pop("tensor", document["blocks"])
    checksum = block_file._head_checksum(text, tensor)
    head = json.dumps(
        {"__metadata__": {"semkv": text, "checksum": checksum}, "blocks": tensor}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + raw[8 + length :])
