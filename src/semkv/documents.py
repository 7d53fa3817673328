"""The order of documents in a prompt: the one whose beginning an engine most likely still holds.

An engine reuses a prompt as far as its beginning was computed before. Where the order of some documents says nothing,
any order is the same prompt to a user, and another one to the engine. `DocumentOrder` remembers what was sent and
finds, for the next request, the order that begins with as much of it as possible. The documents left over follow by
popularity, so that popular documents come to stand in front, where most requests share them. The engine computes what
it is sent: nothing here is approximate. `objection` and `has_place` look for what is no longer right once documents
have changed places.

To align a request with an index of earlier ones is ContextPilot's idea (MLSys 2026, arXiv:2511.03475). Its index is a
tree of clusters. This one is a tree of what was sent, as an engine's prefix cache is.

>>> order = DocumentOrder()
>>> order.sent(b"tenant", b"", [Document.of(text) for text in ("apples", "pears", "plums")])
>>> order.choose(b"tenant", b"", [Document.of(text) for text in ("nuts", "pears", "apples")])
(2, 1, 0)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from semkv.latest import Latest
from semkv_guards.places import (
    has_place,
    is_understood,
    may_tell_by_place,
    unknown_words,
    words_of,
)

__all__ = [
    "MOST_DOCUMENTS",
    "TOLD",
    "UNKNOWN_WORD",
    "UNREAD",
    "Document",
    "DocumentOrder",
    "has_place",
    "may_tell_by_place",
    "objection",
]

MOST_DOCUMENTS = 256
"""In one prompt. More are left as they came."""

TOLD = "told by place"
UNREAD = "not understood"
UNKNOWN_WORD = "unknown word"

_MOST = 65_536
_LOOKUPS = 20_000  # in the tree for one choice: some milliseconds
_HALF_LIFE = 4096  # choices after which a request counts half as much for a document's popularity
# How much an engine holds is not known. What was sent less than `_HELD` characters ago it holds, and nothing that was
# sent more than `_GONE` ago. Between them every order of magnitude is as likely.
_HELD = 80_000
_GONE = 80_000_000
_LEAST = 0.02  # the chance of what was sent before that, so that it is still better than nothing
_DIGEST = 16  # bytes


class Document(NamedTuple):
    """What is known of a document: a digest that tells it from all others, and its length in characters."""

    digest: bytes
    size: int

    @classmethod
    def of(cls, text: str) -> Document:
        """The document that a text is."""
        return cls(_digest(text.encode("utf-8", "surrogatepass")), len(text))


class _Node(NamedTuple):
    """A document behind those that stood before it in a prompt that was sent."""

    number: int
    sent_at: int  # by the clock of characters


class _Way(NamedTuple):
    """A way down the tree."""

    node: _Node  # where it ends
    held: float  # characters that the engine is expected to hold
    places: tuple[int, ...]  # of the documents along it


class DocumentOrder:
    """Chooses the order of documents by what was sent lately. May be used by several threads; holds no text.

    What is remembered of one scope (an upstream, a tenant, a salt) is never looked at for another. An equal set of
    documents gets an equal order as long as it is remembered, in whatever order it comes.

    Args:
        most: documents in all places of the tree, and as many sets and counts of documents. The oldest are forgotten.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._lock = threading.Lock()
        # By the number of the node before and the document. A node is always older than the one before it, so what is
        # forgotten first has none behind it.
        self._nodes: Latest[tuple[int, bytes], _Node] = Latest(most)
        self._orders: Latest[bytes, bytes] = Latest(most)  # by set
        self._counts: Latest[tuple[bytes, bytes], tuple[float, int]] = Latest(most)
        self._choices = 0
        self._clock = 0  # characters of all documents that were sent
        self._next_number = 1

    def __len__(self) -> int:
        """How many documents in their places are remembered."""
        return len(self._nodes)

    def is_known(
        self,
        scope: bytes,
        before: bytes,
        documents: Sequence[Document],
    ) -> bool:
        """Whether an order for this set is remembered."""
        with self._lock:
            return _set_key(scope, before, documents) in self._orders

    def choose(self, scope: bytes, before: bytes, documents: Sequence[Document]) -> tuple[int, ...]:
        """The positions of the documents, in the order in which to send them.

        Args:
            scope: to whom they belong.
            before: a digest of all that stands before them in the prompt.
            documents: in any order; one may come twice.
        """
        if len(documents) > MOST_DOCUMENTS:
            return tuple(range(len(documents)))
        sorted_positions = sorted(range(len(documents)), key=documents.__getitem__)
        key = _set_key(scope, before, documents)
        with self._lock:
            self._count(scope, documents)
            places = self._orders.get(key)
            if places is None:
                in_order = [documents[i] for i in sorted_positions]
                places = self._new_order(scope, before, in_order)
            self._orders[key] = places
        return tuple(sorted_positions[place] for place in places)

    def sent(
        self,
        scope: bytes,
        before: bytes,
        documents: Sequence[Document],
    ) -> None:
        """Note that documents were sent in this order."""
        if len(documents) > MOST_DOCUMENTS:
            return
        with self._lock:
            self._clock += sum(document.size for document in documents)
            number = 0
            path = list[tuple[tuple[int, bytes], int]]()
            digests = [document.digest for document in documents]
            for name in (_root(scope, before), *digests):
                key = (number, name)
                node = self._nodes.get(key)
                number = self._new_number() if node is None else node.number
                path.append((key, number))
            for key, number in reversed(path):
                self._nodes[key] = _Node(number, self._clock)

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number

    # -- popularity -------------------------------------------------------------------------------------------------

    def _count(self, scope: bytes, documents: Sequence[Document]) -> None:
        self._choices += 1
        for document in set(documents):
            count = self._popularity(scope, document) + 1
            self._counts[scope, document.digest] = (count, self._choices)

    def _popularity(self, scope: bytes, document: Document) -> float:
        """In how many requests a document came, of which older ones count less."""
        count, at = self._counts.get((scope, document.digest), (0.0, 0))
        age = (self._choices - at) / _HALF_LIFE
        return count * math.exp2(-age)

    # -- a new order ------------------------------------------------------------------------------------------------

    def _new_order(self, scope: bytes, before: bytes, documents: Sequence[Document]) -> bytes:
        """The places of documents that stand in the order of their digests."""
        by_popularity = sorted(
            range(len(documents)),
            key=lambda place: (-self._popularity(scope, documents[place]), place),
        )
        first = self._best_beginning(_root(scope, before), documents, by_popularity)
        rest = [place for place in by_popularity if place not in first]
        return bytes([*first, *rest])

    def _best_beginning(
        self,
        root: bytes,
        documents: Sequence[Document],
        by_popularity: Sequence[int],
    ) -> tuple[int, ...]:
        """The places along the way down the tree of which the engine is expected to hold most; of equals the one that
        was sent last."""
        start = self._nodes.get((0, root))
        if start is None:
            return ()
        best = _Way(start, 0.0, ())
        ways = [best]
        lookups = 0
        while ways and lookups < _LOOKUPS:
            way = ways.pop()
            if (way.held, way.node.sent_at) > (best.held, best.node.sent_at):
                best = way
            lookups += len(documents)
            for place in reversed(by_popularity):
                document = documents[place]
                child = self._nodes.get((way.node.number, document.digest))
                if child is None or place in way.places:
                    continue
                held = way.held + document.size * self._chance(child)
                places = (*way.places, place)
                ways.append(_Way(child, held, places))
        return best.places

    def _chance(self, node: _Node) -> float:
        """How likely the engine still holds a document in its place."""
        age = max(_HELD, self._clock - node.sent_at)
        left = math.log(_GONE / age)
        chance = left / math.log(_GONE / _HELD)
        return max(_LEAST, chance)


def objection(
    said_in_front: Sequence[str],
    said: Sequence[str],
    documents: Sequence[str],
) -> str:
    """Why documents may not change places, in a few words; empty where all is understood that is said about them.

    A word behind the documents must be one that the guards' tables have, or one that stands in a document. Whoever
    asks about what documents say uses their words. Any other word may mean a place.

    Args:
        said_in_front: texts in front of the documents, of which the operator knows that they go by no place.
        said: texts behind them.
        documents: their texts.
    """
    for text in said_in_front:
        if may_tell_by_place(text, in_front=True):
            return TOLD
    for text in said:
        if may_tell_by_place(text):
            return TOLD
    if not all(map(is_understood, (*said_in_front, *said))):
        return UNREAD
    unknown = {word for text in said for word in unknown_words(text)}
    for document in documents:
        if unknown:
            unknown -= words_of(document)
    return UNKNOWN_WORD if unknown else ""


def _set_key(scope: bytes, before: bytes, documents: Sequence[Document]) -> bytes:
    digests = sorted(document.digest for document in documents)
    return _digest(scope, before, *digests)


def _root(scope: bytes, before: bytes) -> bytes:
    return _digest(scope, before)


def _digest(*parts: bytes) -> bytes:
    """Of parts that cannot run into one another."""
    sizes = [len(part) for part in parts]
    hasher = blake2b(repr(sizes).encode(), digest_size=_DIGEST)
    for part in parts:
        hasher.update(part)
    return hasher.digest()
