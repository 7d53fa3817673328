"""What a store of responses is: whole responses under exact keys. One is here, in memory.

The stored form of a response is a JSON head, with the checksums of both, and the payload as it came.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, runtime_checkable

import xxhash

from semkv.errors import CorruptValue

FORMAT = 1
REFUSALS = 100_000  # the latest refused credentials that a store remembers
REFUSED_S = 90 * 86_400.0  # for so long
CHECKSUM = 32  # bytes of the head before its JSON
LOG = 1000  # invalidations that a store remembers
_TIMES = ("created", "expires", "stale_until")
_TEXTS = ("key", "partition", "model", "prompt")
_OVERHEAD = 640  # bytes of an entry without its strings: objects, dictionary slot, allocator (measured: 500 to 620)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response, as the upstream gave it.

    Times are seconds since the epoch; infinity means never.

    Attributes:
        key: hex HMAC-SHA256 of the canonical request it was computed from.
        partition: digest of the tenant; empty for a single-tenant deployment.
        model: as the client named it.
        payload: JSON of the complete response, or the events of its stream; byte for byte.
        created: when it was kept.
        expires: from then on it is stale.
        stale_until: from then on it is not served at all; never before ``expires``.
        tags: labels for invalidation.
        prompt: text of the last user turn, for operators' eyes and for invalidation by prefix.
    """

    key: str
    partition: str
    model: str
    payload: bytes
    created: float
    expires: float = float("inf")
    stale_until: float = float("inf")
    tags: tuple[str, ...] = ()
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Selector:
    """Which responses to invalidate: those that meet every criterion given; without one, all.

    ``prefix`` is one of the prompt, ``before`` of the time when a response was kept, in seconds since the epoch.
    """

    key: str | None = None
    tag: str | None = None
    model: str | None = None
    partition: str | None = None
    prefix: str | None = None
    before: float | None = None

    def matches(self, response: StoredResponse) -> bool:
        """Whether a response meets every criterion."""
        return (
            (self.key is None or self.key == response.key)
            and (self.tag is None or self.tag in response.tags)
            and (self.model is None or self.model == response.model)
            and (self.partition is None or self.partition == response.partition)
            and (self.prefix is None or response.prompt.startswith(self.prefix))
            and (self.before is None or response.created < self.before)
        )

    def view(self) -> dict[str, Any]:
        """The criteria given, as JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, view: dict[str, Any]) -> Selector:
        """The reverse of `view`. Raises a ValueError at a name that is no criterion, or a value of another type."""
        names = {field.name for field in fields(cls)}
        for name, value in view.items():
            right = isinstance(value, (int, float)) if name == "before" else isinstance(value, str)
            if name not in names or not right or isinstance(value, bool):
                raise ValueError(
                    f"{name}: {value!r} is no criterion; there are {', '.join(sorted(names))}"
                )
        return cls(**view)


@dataclass(frozen=True, slots=True)
class News:
    """The invalidations since a cursor, in order, and the cursor for the next time. ``selectors`` is None where the log
    does not reach back to the cursor, so anything may be invalid.
    """

    cursor: str
    selectors: tuple[Selector, ...] | None = ()

    def hit(self, response: StoredResponse) -> bool:
        """Whether one of them concerns a response."""
        return self.selectors is None or any(
            selector.matches(response) for selector in self.selectors
        )


def read_selectors(texts: Iterable[str | bytes]) -> tuple[Selector, ...] | None:
    """Logged invalidations; None where one cannot be read, of a newer version perhaps: anything may be invalid then."""
    try:
        return tuple(Selector.of(json.loads(text)) for text in texts)
    except (ValueError, TypeError, AttributeError):
        return None


# -- the stored form --------------------------------------------------------------------------------------------------


def encode(response: StoredResponse) -> tuple[bytes, bytes]:
    """Head and payload. The head begins with its own checksum, and holds that of the payload."""
    head = {
        "format": FORMAT,
        **{name: getattr(response, name) for name in _TEXTS},
        "tags": response.tags,
        "sum": xxhash.xxh3_128_hexdigest(response.payload),
        **{
            name: None if math.isinf(value := getattr(response, name)) else value for name in _TIMES
        },
    }
    text = json.dumps(head).encode()
    return xxhash.xxh3_128_hexdigest(text).encode() + text, response.payload


def decode(key: str | None, head: bytes, payload: bytes | None) -> StoredResponse:
    """The reverse of `encode`; without a payload for selection alone. A key of None is any.

    Raises:
        CorruptValue: a checksum, the format or the key is not what it should be.
    """
    text = head[CHECKSUM:]
    if head[:CHECKSUM] != xxhash.xxh3_128_hexdigest(text).encode():
        raise CorruptValue(f"response {key}: the head fails its checksum")
    try:
        values: dict[str, Any] = json.loads(text)
        if values["format"] != FORMAT or key not in (None, values["key"]):
            raise CorruptValue(f"response {key}: of another format, or under another key")
        if payload is not None and values["sum"] != xxhash.xxh3_128_hexdigest(payload):
            raise CorruptValue(f"response {key}: the payload fails its checksum")
        known = {name: values[name] for name in _TEXTS}
        "".join((*known.values(), *values["tags"]))  # a TypeError where one is no text
        known |= {
            name: math.inf if values[name] is None else float(values[name]) for name in _TIMES
        }
        return StoredResponse(**known, tags=tuple(values["tags"]), payload=payload or b"")
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CorruptValue(f"response {key}: {error!r}") from error


# -- the contract -----------------------------------------------------------------------------------------------------


class ResponseStore(Protocol):
    """Responses under exact keys, bounded in bytes; the least recently used go first.

    ``--store`` calls a dotted path with the default file and the most bytes.

    Every method blocks, may be called from any thread and may raise `StoreError` (unreachable, locked, full).
    The store itself logs invalidations, and `news` returns them: so they reach all processes that share the store, even
    those that were away at the time.
    """

    def get(self, key: str) -> StoredResponse | None:
        """The response under a key, stale ones too; None where there is none or it may no longer be served.

        Raises:
            CorruptValue: it failed its test and was deleted.
        """

    def put(self, response: StoredResponse, since: str = "") -> bool:
        """Keep a response, in place of an older one under its key; durable when this returns. False where it was
        invalidated since the cursor ``since``, when it began to be computed, or is larger than the store.
        """

    def invalidate(self, selector: Selector, *, dry_run: bool = False) -> int:
        """Delete what the selector names and log it, or with ``dry_run`` only count it, expired responses that are
        still there included."""

    def news(self, cursor: str) -> News:
        """The invalidations since ``cursor``; an empty cursor asks for the present place alone."""

    def refuse(self, name: str, *, refused: bool) -> None:
        """Note that the upstream refused somebody's credentials, by their digest, or that it accepts them again. The
        latest `REFUSALS` are held, for `REFUSED_S` seconds."""

    def refused(self, name: str) -> bool:
        """Whether credentials were refused, and not accepted since."""

    def usage(self) -> tuple[int, int]:
        """Entries and bytes held, entries that have run out but are not deleted yet included."""

    def close(self) -> None:
        """Let go of files and connections. Every later call raises `StoreError`."""


@runtime_checkable
class KeepsSeveral(Protocol):
    """A store that keeps several responses in the time of one. One thread uses it, then."""

    def put_all(self, responses: Sequence[tuple[StoredResponse, str]]) -> Sequence[bool]:
        """`ResponseStore.put` of several, each beside the cursor of its request: all are durable when this returns.
        Where it raises, none is."""


class SteadyClock:
    """Seconds since the epoch that do not go back when the machine's clock (``wall``) does: nothing lives longer for
    that. ``passed`` are seconds since any moment, which never go back.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, passed: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall = wall
        self._passed = passed
        self._start = float("-inf")  # the largest difference of the two so far

    def __call__(self) -> float:
        passed = self._passed()
        self._start = max(self._start, self._wall() - passed)
        return self._start + passed


# -- in memory --------------------------------------------------------------------------------------------------------


def weight(response: StoredResponse) -> int:
    """Bytes that a response takes in memory."""
    texts = (response.key, response.partition, response.model, response.prompt, *response.tags)
    return sys.getsizeof(response.payload) + sum(map(sys.getsizeof, texts)) + _OVERHEAD


class MemoryStore(ResponseStore):
    """An LRU bounded in bytes, overhead included. No method waits for anything but a short lock."""

    def __init__(
        self, max_bytes: int = 256 << 20, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.max_bytes = max_bytes
        self.evicted = 0
        self._clock = clock
        self._entries: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()
        self._log: deque[Selector] = deque(maxlen=LOG)
        self._number = 0  # of the latest invalidation
        self._refused: OrderedDict[str, float] = OrderedDict()

    @property
    def cursor(self) -> str:
        """The place of the latest invalidation."""
        return str(self._number)

    def get(self, key: str) -> StoredResponse | None:
        with self._lock:
            held = self._entries.get(key)
            if held is None:
                return None
            if held[0].stale_until <= self._clock():
                self._drop(key)
                return None
            self._entries.move_to_end(key)
            return held[0]

    def put(self, response: StoredResponse, since: str = "") -> bool:
        size = weight(response)
        with self._lock:
            if size > self.max_bytes or (since and self.news(since).hit(response)):
                return False
            self._drop(response.key)
            self._entries[response.key] = (response, size)
            self._bytes += size
            while self._bytes > self.max_bytes:
                self._drop(next(iter(self._entries)))
                self.evicted += 1
            return True

    def _drop(self, key: str) -> None:
        held = self._entries.pop(key, None)
        if held is not None:
            self._bytes -= held[1]

    def invalidate(self, selector: Selector, *, dry_run: bool = False) -> int:
        with self._lock:
            gone = [
                key for key, (response, _) in self._entries.items() if selector.matches(response)
            ]
            if not dry_run:
                self._number += 1
                self._log.append(selector)
                for key in gone:
                    self._drop(key)
            return len(gone)

    def news(self, cursor: str) -> News:
        with self._lock:
            unheard = self._number - int(cursor or self._number)
            if unheard > len(self._log):
                return News(self.cursor, None)
            return News(self.cursor, tuple(self._log)[len(self._log) - unheard :])

    def refuse(self, name: str, *, refused: bool) -> None:
        with self._lock:
            self._refused.pop(name, None)
            if refused:
                self._refused[name] = self._clock()
            if len(self._refused) > REFUSALS:
                self._refused.popitem(last=False)

    def refused(self, name: str) -> bool:
        return self._clock() - self._refused.get(name, float("-inf")) < REFUSED_S

    def usage(self) -> tuple[int, int]:
        with self._lock:
            return len(self._entries), self._bytes

    def held(self) -> list[StoredResponse]:
        """All of them."""
        with self._lock:
            return [response for response, _ in self._entries.values()]

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0
