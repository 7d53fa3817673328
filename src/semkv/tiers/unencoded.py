"""Entries whose text has no vector yet. They get one when their partition is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


class Unencoded:
    """Entries without a vector, by partition. Callers that change or list it hold the lock of the indexes. Whether a
    partition is in it may be asked without the lock."""

    def __init__(self) -> None:
        self._by_partition: dict[str, dict[str, None]] = {}  # the oldest first
        self._partition_of: dict[str, str] = {}

    def add(self, entry_id: str, partition: str) -> None:
        self._partition_of[entry_id] = partition
        self._by_partition.setdefault(partition, {})[entry_id] = None

    def __contains__(self, partition: str) -> bool:
        return partition in self._by_partition

    def discard(self, entry_ids: Iterable[str]) -> None:
        """Forget those of some entries that are here."""
        for entry_id in entry_ids:
            partition = self._partition_of.pop(entry_id, None)
            if partition is None:
                continue
            rest = self._by_partition[partition]
            del rest[entry_id]
            if not rest:
                del self._by_partition[partition]

    def of(self, partition: str, most: int) -> list[str]:
        """The latest entries of a partition."""
        return list(islice(reversed(self._by_partition.get(partition, {})), most))

    def entries(self) -> set[str]:
        """All of them."""
        return set(self._partition_of)
