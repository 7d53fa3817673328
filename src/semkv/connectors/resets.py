"""What a reset leaves the connectors to do: vLLM's word for weights that may be others from now on.

vLLM tells the KV connector alone. It passes the word on to the encoder-cache connector of the same engine: both have
their scheduler halves in one process, and in one thread of it.
"""

from __future__ import annotations

import logging
import uuid
from typing import Protocol
from weakref import WeakKeyDictionary

from semkv.keys import digest

log = logging.getLogger("semkv.connectors")


def namespace_after(namespace: str) -> str:
    """A namespace that nobody else has, for what an engine computes from now on."""
    return digest("after reset", namespace, uuid.uuid4().hex)


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
    said = [_reset(follower) for follower, name in list(_FOLLOWERS.items()) if name == engine]
    return all(said)


def _reset(follower: Follower) -> bool:
    try:
        return follower.reset()
    except Exception:
        log.warning("semkv: a connector could not be told of other weights", exc_info=True)
        return False
