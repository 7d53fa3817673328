"""What can happen to a block file: functions of the file, a random source and all files of the store."""

from __future__ import annotations

import os
import random
from pathlib import Path

from block_helpers import header, rewrite


def flip(path: Path, rng: random.Random, _: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random, _: list[Path]) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def grow(path: Path, rng: random.Random, _: list[Path]) -> None:
    with path.open("ab") as f:
        f.write(rng.randbytes(rng.randint(1, 4096)))


def zero(path: Path, rng: random.Random, _: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data) - 64)
    data[start : start + 64] = bytes(64)
    path.write_bytes(data)


def swap(path: Path, rng: random.Random, every: list[Path]) -> None:
    other = rng.choice([p for p in every if p != path])
    shelf = path.with_suffix(".shelf")
    path.rename(shelf)
    other.rename(path)
    shelf.rename(other)


def relabel(path: Path, rng: random.Random, _: list[Path]) -> None:
    """A well-formed file of another layout, model, kind, version or set of blocks."""
    mine = header(path)
    changes = {
        "version": 3,
        "kind": "fusion",
        "namespace": "another model",
        "layout": "{}",
        "keys": " ".join(mine["keys"].split()[::-1]),
        "file": "f" * 16,
        "owner": "another tenant",
        "checksums": " ".join(mine["checksums"].split()[::-1]),
    }
    field = rng.choice(sorted(changes))
    rewrite(path, **{field: changes[field]})


def remove(path: Path, rng: random.Random, _: list[Path]) -> None:
    path.unlink()


FAULTS = [flip, truncate, grow, zero, swap, relabel, remove]
