"""Taking over extents whose index was lost: their headers are read, their blocks named again.

Opening a directory reads no file, however many there are: what was found without an index is a miss until it has been
read here, beside the engine. Processes that share a directory may do so at the same time; the index takes each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from semkv.errors import CorruptValue
from semkv.stores.block_index import BlockIndex, NewExtent
from semkv.stores.directory import ExtentDirectory

BATCH = 128
"""Extents read at once, and named in one transaction."""

_READERS = 4  # for a disk that has nothing of it in memory


@dataclass(frozen=True, slots=True)
class Adopted:
    """What became of a batch, beside what is found by lookups now: whose files must go.

    Attributes:
        useless: all of their blocks are stored elsewhere, or the file cannot be read.
        corrupt: the header fails its checks.
    """

    useless: tuple[str, ...]
    corrupt: tuple[str, ...]


def adopt(index: BlockIndex, files: ExtentDirectory, extents: Sequence[str]) -> Adopted:
    """Read the headers of ``extents`` and name their blocks.

    Raises:
        sqlite3.Error: see `BlockIndex`.
    """
    with ThreadPoolExecutor(_READERS, "semkv-adoption") as readers:
        heads = dict(zip(extents, readers.map(lambda extent: _head(files, extent), extents), strict=True))
    useless = index.adopt(head for head in heads.values() if not isinstance(head, Exception))
    corrupt = tuple(extent for extent, head in heads.items() if isinstance(head, CorruptValue))
    useless += [extent for extent, head in heads.items() if isinstance(head, OSError)]  # or evicted meanwhile
    index.remove([*corrupt, *useless])
    return Adopted(tuple(useless), corrupt)


def _head(files: ExtentDirectory, extent: str) -> tuple[NewExtent, Sequence[bytes]] | CorruptValue | OSError:
    try:
        return files.read_head(extent)
    except (CorruptValue, OSError) as error:
        return error
