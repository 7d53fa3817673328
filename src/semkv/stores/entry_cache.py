"""A bounded memory of entries by key, so that a repeated exact hit reads no file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from semkv.types import Entry, TextSegment

_SMALL = 8192  # characters of an entry


class EntryCache:
    """What a catalog found under a key, the least recently used dropped first. Its owner locks.

    Args:
        most: bound on keys.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._found: OrderedDict[str, tuple[int, tuple[Entry, ...]]] = OrderedDict()

    def get(self, key: str, limit: int) -> tuple[Entry, ...] | None:
        """The first ``limit`` entries under a key; None where that is not known."""
        known = self._found.get(key)
        if known is None:
            return None
        asked, entries = known
        if limit > asked and len(entries) == asked:  # there may be more
            return None
        self._found.move_to_end(key)
        return entries[:limit]

    def put(self, key: str, limit: int, entries: Sequence[Entry]) -> None:
        """Remember what was found, unless it was nothing or any of it is long."""
        if not entries or max(map(_length, entries)) > _SMALL:
            return
        self._found[key] = limit, tuple(entries)
        self._found.move_to_end(key)
        if len(self._found) > self._most:
            self._found.popitem(last=False)

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._found.pop(key, None)

    def clear(self) -> None:
        self._found.clear()


def _length(entry: Entry) -> int:
    texts = (segment.text for segment in entry.segments if isinstance(segment, TextSegment))
    return len(entry.response) + len(entry.chunk_text) + sum(map(len, texts))
