"""What a reset leaves a connector to do: vLLM's word for weights that may be others from now on."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Protocol

from semkv.keys import digest


class Store(Protocol):
    """Some values under one namespace."""

    def disown(self) -> bool:
        """Delete what this engine wrote, and take nothing more of it; False where that failed."""


def namespace_after(namespace: str) -> str:
    """A namespace that nobody else has, for what an engine computes from now on."""
    return digest("after reset", namespace, uuid.uuid4().hex)


class Disowned:
    """Stores of one directory of which an engine takes back what it wrote; what fails is tried again."""

    def __init__(self) -> None:
        self._left: list[Store] = []

    def add(self, stores: Iterable[Store]) -> bool:
        """Take back what is in these too, each of which waits for a busy index this once; see `settle`."""
        self._left[:0] = [store for store in stores if not store.disown()]
        return self.settle()

    def settle(self) -> bool:
        """Try again, up to the first that fails, since all are in one index; whether nothing is left."""
        while self._left and self._left[0].disown():
            del self._left[0]
        return not self._left


class FreshBlocks:
    """Which of the engine's blocks rest on nothing from before the last reset: all of them, while there was none."""

    def __init__(self) -> None:
        self._ids: set[int] | None = None

    @property
    def after_reset(self) -> bool:
        """Whether there was a reset."""
        return self._ids is not None

    def reset(self) -> None:
        """None of them does."""
        self._ids = set()

    def cover(self, block_ids: Iterable[int]) -> bool:
        """Whether all of these do."""
        return self._ids is None or self._ids.issuperset(block_ids)

    def note(self, block_ids: Iterable[int], *, mixed: bool = False) -> None:
        """These get new contents, ``mixed`` with something from before or not."""
        if self._ids is not None:
            (self._ids.difference_update if mixed else self._ids.update)(block_ids)
