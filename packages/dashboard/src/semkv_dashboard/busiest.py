"""Counts for the most frequent names."""

from __future__ import annotations

from collections import Counter as Counts


class Busiest:
    """Counts by name, in bounded memory, for the names that come most often (the space-saving algorithm).

    A name that is new takes the place of the rarest one, and its rank with it, so that what comes often enough is
    never pushed out by many that come once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ranks: dict[str, int] = {}  # no less than how often a name came
        self._counts: dict[str, Counts[str]] = {}

    def add(
        self,
        name: str,
        what: str,
    ) -> int:
        """Count ``what`` for a name. Returns how often the name was counted since it has its place."""
        if name not in self._ranks:
            self._ranks[name] = self._make_room()
            self._counts[name] = Counts()
        self._ranks[name] += 1
        counts = self._counts[name]
        counts[what] += 1
        return counts.total()

    @property
    def names(self) -> set[str]:
        """The names that have a place."""
        return set(self._counts)

    def _make_room(self) -> int:
        """The rank that a new name begins with."""
        if len(self._ranks) < self._most:
            return 0
        rarest = min(self._ranks, key=self._ranks.__getitem__)
        del self._counts[rarest]
        return self._ranks.pop(rarest)
