"""What a reset leaves the connectors to do: vLLM's word for weights that may be others from now on.

vLLM tells the KV connector alone. It passes the word on to the encoder-cache connector of the same engine: both have
their scheduler halves in one process, and in one thread of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

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


class Follower(Protocol):
    """Who must know of it."""

    def reset(self) -> bool:
        """The weights may be others from now on; whether nothing of the old ones is left to be served."""


_FOLLOWERS: WeakKeyDictionary[Follower, str] = WeakKeyDictionary()


def follow(engine: str, follower: Follower) -> None:
    """Tell ``follower`` of the weights of ``engine`` (vLLM's ``instance_id``), until `leave` or its end."""
    _FOLLOWERS[follower] = engine


def leave(follower: Follower) -> None:
    """Tell it nothing more."""
    _FOLLOWERS.pop(follower, None)


def may_have_changed(engine: str) -> bool:
    """The weights of ``engine`` may be others from now on; what all who follow it say."""
    said = [follower.reset() for follower, name in list(_FOLLOWERS.items()) if name == engine]
    return all(said)
