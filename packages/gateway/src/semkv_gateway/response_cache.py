"""The response tier: whole answers under exact keys, in memory before a store, each for as long as rules say."""

from __future__ import annotations

import logging
import random
import re
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar, cast

from semkv.counting import Tally
from semkv.errors import ConfigError, CorruptValue, StoreError
from semkv.latest import Latest
from semkv.periodic import Every
from semkv_gateway.responses.listing import listed
from semkv_gateway.responses.spread import AWAY
from semkv_gateway.responses.store import (
    KeepsSeveral,
    MemoryStore,
    ResponseStore,
    Selector,
    StoredResponse,
)

log = logging.getLogger("semkv.server")

_T = TypeVar("_T")
_SKEW_S = 10.0  # between the clocks of gateways on one store
FULL = "full"  # `StoreError.reason` of a store without room
_AWAY = 5  # after so many failed looks for invalidations a store is called away
_CLOSING_S = 5.0  # at the end, to write the answers that only memory has into the store
_UNWRITTEN = 100_000  # answers that only memory has, and that are written into the store later
FOREVER = float("inf")
_FORM = "FIELD:PATTERN=TTL[,stale=S][,jitter=SHARE], FIELD being prompt, model or tag, such as tag:news=5m"
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


# -- lifetimes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long an answer may be served.

    Attributes:
        ttl_s: seconds until it is stale; infinity for ever; 0: it is not kept at all.
        stale_s: seconds after that in which it is still served while a fresh one is fetched.
        jitter: share of ``ttl_s``. A random part of it is taken off, so that answers stored together do not expire
            together.
    """

    ttl_s: float = FOREVER
    stale_s: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ttl_s", "stale_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(name, getattr(self, name), "0 or more seconds")
        if not 0.0 <= self.jitter < 1.0:
            raise ConfigError("jitter", self.jitter, "a share from 0 to below 1")

    def draw(self) -> float:
        """Seconds that one answer lives, jitter taken off."""
        return self.ttl_s * (1.0 - self.jitter * random.random()) if self.jitter else self.ttl_s  # noqa: S311


@dataclass(frozen=True, slots=True)
class Pattern:
    """Picks requests or answers by a text of theirs; case does not count.

    Attributes:
        name: of the text: ``prompt``, ``model`` or ``tag``; rules about what is cached know more.
        pattern: a glob over the whole of it. A regular expression may take minutes over a text, a glob does not.
    """

    name: str
    pattern: str

    def fits(self, prompt: str, model: str, tags: Sequence[str] = ()) -> bool:
        """Whether it picks this answer."""
        values = tags if self.name == "tag" else (prompt if self.name == "prompt" else model,)
        return self.matches(values)

    def matches(self, values: Iterable[str]) -> bool:
        """Whether one of the values is what it picks."""
        pattern = _as_read(self.pattern)
        return any(fnmatchcase(_as_read(value), pattern) for value in values)


def _as_read(text: str) -> str:
    """A text without case, without what is not seen, and in one form where Unicode has several."""
    if text.isascii():
        return text.lower()
    seen = (letter for letter in text if unicodedata.category(letter) != "Cf")
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", "".join(seen)).casefold())


LifetimeRule = tuple[Pattern, Lifetime]
"""Picks answers, and how long they may be served."""


def parse_rule(text: str, key: str = "--ttl-rule") -> LifetimeRule:
    """Read ``FIELD:PATTERN=TTL[,stale=S][,jitter=SHARE]``.

    Times are seconds, or end in s, m, h or d; ``inf`` is for ever.

    >>> pattern, lifetime = parse_rule("prompt:*weather*=5m,stale=60")
    >>> lifetime
    Lifetime(ttl_s=300.0, stale_s=60.0, jitter=0.0)

    Raises:
        ConfigError: the text has another form.
    """
    form = re.fullmatch(
        r"(?P<name>prompt|model|tag):(?P<pattern>.+?)=(?P<ttl>\w+(?:\.\d+)?)"
        r"(?P<options>(?:,(?:stale=[\w.]+|jitter=[\d.]+))*)",
        text,
        re.DOTALL,
    )
    if form is None:
        raise ConfigError(key, text, _FORM)
    try:
        lifetime = Lifetime(_seconds(form["ttl"]))
        for option in form["options"].split(",")[1:]:
            word = option.partition("=")[0]
            value = option.partition("=")[2]
            if word == "stale":
                lifetime = replace(lifetime, stale_s=_seconds(value))
            else:
                lifetime = replace(lifetime, jitter=float(value))
        return Pattern(form["name"], form["pattern"]), lifetime
    except ValueError:
        raise ConfigError(key, text, _FORM) from None


def _seconds(text: str) -> float:
    if text == "inf":
        return FOREVER
    number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
    if unit not in _UNITS:
        raise ValueError(text)
    return float(number) * _UNITS[unit]


# -- answers ---------------------------------------------------------------------------------------------------------


class Answerable(Protocol):
    """What an answer is kept by; `semkv_gateway.request_key.CanonicalRequest` is one."""

    @property
    def key(self) -> str: ...
    @property
    def partition(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def sampled(self) -> bool: ...
    def refusal(self, payload: bytes, status: int) -> str:
        """Why an answer must not be kept, in a word or two; empty for a complete one."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """A stored answer that may be served."""

    response: StoredResponse
    age_s: float  # since it was kept
    stale: bool  # past its time, but within the grace in which it is served while a fresh one is fetched


class ResponseCache:
    """Answers in memory, bounded in bytes, in front of a store. Any thread may call any method.

    No method but `invalidate` raises because of the store: a fault is counted and becomes a miss. A thread
    follows the invalidations that others log in the store: memory applies one after ``poll_s`` seconds. Once the
    store has not answered for ``unheard_s``, nothing is served from memory: another replica may reach the store and
    invalidate answers there.

    Args:
        store: behind the memory; None for memory alone.
        max_bytes: bound on what memory holds, overhead included.
        lifetime: of answers that no rule picks; of several rules the first decides.
        poll_s: seconds between two looks for invalidations.
        unheard_s: how long memory is served while the store does not answer.
        pause_s: how long a store is left alone after a fault.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: ResponseStore | None,
        *,
        max_bytes: int = 256 << 20,
        lifetime: Lifetime = Lifetime(),
        rules: Sequence[LifetimeRule] = (),
        poll_s: float = 1.0,
        unheard_s: float = 30.0,
        pause_s: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._memory = MemoryStore(max_bytes, clock=clock)
        self._store = store
        self._clock = clock
        self._tally = Tally()
        self._lifetime = lifetime
        self._rules = rules
        self._pause_s = pause_s
        self._pausing = threading.Lock()
        # Of reads and of writes: a full store can still be read.
        self._quiet_until = {
            False: 0.0,
            True: 0.0,
        }
        self._hits = 0
        self._poll_s = poll_s
        self._unheard_s = unheard_s
        # so far memory holds nothing that could be invalidated
        self._cursor = ""
        self._heard = time.monotonic()
        self._following = threading.Lock()
        self._follows = 0  # that have begun
        self._follower: Every | None = None
        self._write_fault = ""  # why the store took nothing when it was last written to
        self._unwritten: Latest[str, str] = Latest(_UNWRITTEN)  # by key: where the store's log was
        if store is not None:
            self.follow()
            self._follower = Every(poll_s, self._tend, "semkv-invalidations")

    # -- reading ------------------------------------------------------------------------------------------------

    def peek(self, key: str) -> Found | None:
        """From memory alone; never blocks."""
        if self._unheard():
            return None
        response = self._memory.get(key)
        if response is None:
            return None
        self._hits += 1
        return self._found(response)

    def _found(self, response: StoredResponse) -> Found:
        now = self._clock()
        return Found(response, max(0.0, now - response.created), now >= response.expires)

    def _unheard(self) -> bool:
        return self._store is not None and time.monotonic() - self._heard > self._unheard_s

    @property
    def store_up(self) -> bool:
        """Whether the store answered in the last few seconds; True without one. Never blocks."""
        return self._store is None or (
            bool(self._cursor) and time.monotonic() - self._heard <= _AWAY * self._poll_s
        )

    @property
    def store_state(self) -> str:
        """``up``; ``away`` where the store does not answer; else why it takes nothing new, such as ``full``. Never
        blocks."""
        return (self._write_fault or "up") if self.store_up else "away"

    @property
    def takes_several(self) -> bool:
        """Whether the store keeps several answers in the time of one."""
        return isinstance(self._store, KeepsSeveral)

    def lookup(self, *keys: str) -> Found | None:
        """The first answer under one of the keys, from memory, else from the store; a stale one where none is fresh.
        Blocks."""
        return self.lookup_all([keys])[0]

    def lookup_all(self, wanted: Sequence[Sequence[str]]) -> list[Found | None]:
        """What `lookup` finds under each of several groups of keys. Blocks."""
        found = [self._first(keys) for keys in wanted]
        if any(one is None or one.stale for one in found):
            # An answer that is computed now is refused for every invalidation after the last that was heard of.
            self.follow()
        self._tally.add("miss", found.count(None))
        return found

    def _first(self, keys: Sequence[str]) -> Found | None:
        stale: Found | None = None
        for key in keys:
            found = self.peek(key) or self._from_store(key)
            if found is not None and not found.stale:
                return found
            stale = stale or found
        return stale

    def _from_store(self, key: str) -> Found | None:
        response = self._memory.get(key) if self._store is None else self._fetch(key)
        if response is None or response.stale_until <= self._clock():
            return None
        self._tally.add("hit:store" if self._store is not None else "hit:memory")
        return self._found(response)

    def _fetch(self, key: str) -> StoredResponse | None:
        since = self._memory.cursor
        held = None if self._unheard() else self._memory.get(key)
        response = self._ask("get", lambda store: store.get(key), None)
        # A clock went back: its age is unknown.
        if response is not None and response.created > self._clock() + _SKEW_S:
            response = None
        if held is not None and (response is None or response.created < held.created):
            return held  # still on its way to the store
        if response is not None:
            # Refused where it was invalidated since the store was asked.
            self._memory.put(response, since)
        return response

    # -- keeping ------------------------------------------------------------------------------------------------

    def begin(self) -> str:
        """To be called before the upstream is asked: hand it to `keep`, which keeps no answer that was invalidated
        meanwhile, here or by another replica. Never blocks."""
        return f"{self._memory.cursor} {self._cursor}"

    def keep(
        self,
        request: Answerable,
        payload: bytes,
        *,
        status: int = 200,
        since: str = "",
        tags: Sequence[str] = (),
    ) -> bool:
        """Keep an answer if it is complete. Blocks. A refused answer is counted under the reason.

        Args:
            request: the canonical request it was computed from.
            payload: its JSON, or the events of its stream.
            status: HTTP status of the answer.
            since: what `begin` returned before the upstream was asked.
            tags: labels for invalidation.

        Returns:
            Whether it was kept, in the store or, where that is down, in memory. Where it is True and the store takes
            answers, the answer outlives this process.
        """
        response = self.prepared(request, payload, status=status, tags=tags)
        return response is not None and self.keep_all([(response, since)])[0]

    def prepared(
        self, request: Answerable, payload: bytes, *, status: int = 200, tags: Sequence[str] = ()
    ) -> StoredResponse | None:
        """What to keep of an answer, for `keep_all`; None, counted, where `keep` would keep nothing of it. Never
        blocks."""
        found = self._stored(request, payload, status, tuple(tags))
        if isinstance(found, str):
            self._tally.add(f"refused:{found}")
            return None
        return found

    def keep_all(self, answers: Sequence[tuple[StoredResponse, str]]) -> list[bool]:
        """Keep answers, each beside what `begin` returned before the upstream was asked; whether each was kept, as
        `keep` says it. One that cannot be kept costs the others nothing. Blocks."""
        kept = self._write(answers)
        for is_kept in kept:
            self._tally.add("kept" if is_kept else "refused:invalidated or too large")
        return kept

    def keeps(self, request: Answerable, tags: Sequence[str] = ()) -> bool:
        """Whether a complete answer to a request would be kept: not one drawn at random, nor one without a lifetime."""
        return not request.sampled and bool(self._lifetime_of(request, tags).ttl_s)

    def _lifetime_of(self, request: Answerable, tags: Sequence[str]) -> Lifetime:
        for pattern, lifetime in self._rules:
            if pattern.fits(request.prompt, request.model, tags):
                return lifetime
        return self._lifetime

    def _stored(
        self, request: Answerable, payload: bytes, status: int, tags: tuple[str, ...]
    ) -> StoredResponse | str:
        """What to keep of an answer, or why nothing."""
        reason = "sampled" if request.sampled else request.refusal(payload, status)
        if reason:
            return reason
        lifetime = self._lifetime_of(request, tags)
        if not lifetime.ttl_s:
            return "no lifetime"
        now, ttl = self._clock(), lifetime.draw()
        return StoredResponse(
            key=request.key,
            partition=request.partition,
            model=request.model,
            payload=payload,
            created=now,
            expires=now + ttl,
            stale_until=now + ttl + lifetime.stale_s,
            tags=tags,
            prompt=request.prompt,
        )

    def _write(self, answers: Sequence[tuple[StoredResponse, str]]) -> list[bool]:
        """Write each to memory, then to the store; whether one of them has it."""
        in_memory = [
            self._memory.put(response, since.partition(" ")[0] or self._memory.cursor)
            for response, since in answers
        ]
        if self._store is None:
            return in_memory
        places = [_place(since) for _, since in answers]
        known = [
            (response, place)
            for (response, _), place in zip(answers, places, strict=True)
            if place is not None
        ]
        puts = iter(self._put(known))
        kept = []
        for number, (response, _) in enumerate(answers):
            place = places[number]
            put = None if place is None else next(puts)
            if put is False:
                # Perhaps another replica has invalidated it, and memory has not read that yet.
                self._memory.invalidate(Selector(key=response.key))
            elif put is None and in_memory[number]:
                self._note_unwritten(response.key, place)
            kept.append(in_memory[number] if put is None else put)
        return kept

    def _put(self, answers: Sequence[tuple[StoredResponse, str]]) -> list[bool | None]:
        """Write to the store: `ResponseStore.put` of each, and None where it fails or is left alone after a fault."""
        if self.takes_several and answers:
            failed: list[bool | None] = [None] * len(answers)
            return self._ask("put", lambda _: self._put_several(answers), failed)
        return [self._put_one(response, place) for response, place in answers]

    def _put_several(self, answers: Sequence[tuple[StoredResponse, str]]) -> list[bool | None]:
        """Write all at once. Where there is no room for all, write the small ones that there is room for. Raises where
        nothing can be written."""
        several = cast("KeepsSeveral", self._store)
        try:
            return list(several.put_all(answers))
        except StoreError as error:
            if error.reason != FULL or len(answers) == 1:
                raise
        found: list[bool | None] = [None] * len(answers)
        by_size = sorted(range(len(answers)), key=lambda number: len(answers[number][0].payload))
        for number in by_size:
            try:
                found[number] = several.put_all([answers[number]])[0]
            except StoreError as error:
                if error.reason != FULL or number == by_size[0]:
                    raise
                self._tally.fault("store put", error)
                break  # the rest is larger
        return found

    def _put_one(self, response: StoredResponse, place: str) -> bool | None:
        return self._ask("put", lambda store: store.put(response, place), None)

    # -- what the store has not taken ---------------------------------------------------------------------------

    def _note_unwritten(self, key: str, since: str | None) -> None:
        """Count an answer that only memory has. It is brought to the store once that takes answers again, where it was
        begun at a known place of the store's log."""
        is_away = since is None or bool(self._quiet_until[False])
        self._tally.add(f"unwritten:{self._write_fault or ('away' if is_away else FULL)}")
        if since is not None:
            with self._pausing:
                self._unwritten[key] = since

    def _bring(self, until: float = float("inf")) -> None:
        """Write what only memory has, as long as the store takes it. Blocks, at most until that time of the monotonic
        clock."""
        while time.monotonic() < until:
            with self._pausing:
                key, since = next(iter(self._unwritten.items()), ("", ""))
            if not key:
                return
            response = self._memory.get(key)  # None where it has gone meanwhile
            if response is not None and not self._is_stored(response):
                put = self._put([(response, since)])[0]
                if put is None:
                    with self._pausing:
                        self._unwritten[key] = since  # the next time another one is tried first
                        if self._write_fault == FULL:  # for this one; there may be room for others
                            self._quiet_until[True] = 0.0
                    return
                self._tally.add("written late" if put else "refused:invalidated on its way")
            with self._pausing:
                self._unwritten.pop(key, None)

    def _is_stored(self, response: StoredResponse) -> bool:
        """Whether the store has this answer or a newer one, of another replica."""
        stored = self._ask("get", lambda store: store.get(response.key), None)
        return stored is not None and stored.created >= response.created

    # -- credentials --------------------------------------------------------------------------------------------

    def refused(self, name: str) -> bool | None:
        """Whether credentials were refused, by their digest; None where the store does not say. Blocks."""
        if self._store is None:
            return self._memory.refused(name)
        return self._ask("get", lambda store: store.refused(name), None)

    def refuse(self, name: str, *, refused: bool) -> None:
        """Note that credentials were refused, or are accepted again, where the store can be reached. Blocks."""
        if self._store is None:
            self._memory.refuse(name, refused=refused)
        self._ask("put", lambda store: store.refuse(name, refused=refused), None)

    # -- invalidation -------------------------------------------------------------------------------------------

    def invalidate(self, selector: Selector, *, dry_run: bool = False) -> int:
        """Delete what the selector names, in the store and in every replica's memory, or only count it.

        Raises:
            StoreError: the store could not be reached; nothing is promised then, so do it again.
        """
        if self._store is None:
            return self._memory.invalidate(selector, dry_run=dry_run)
        if not dry_run:
            self._memory.invalidate(selector)
        before = _unreplicated(self._store)
        gone = self._store.invalidate(selector, dry_run=dry_run)
        if not dry_run:
            self._note_unreplicated(_unreplicated(self._store) - before)
            self.follow()
        return gone

    def _note_unreplicated(self, count: int) -> None:
        """Warn of invalidations that a fail-over may undo."""
        if count:
            self._tally.add("invalidated, not replicated", count)
            log.warning(
                "no replica of Redis has confirmed an invalidation; after a fail-over now, repeat it"
            )

    def follow(self) -> None:
        """Heed the invalidations logged since the last time. Blocks; the cache's own thread does it every second.

        Of callers that come while one is at it, the next one does it for all.
        """
        begun = self._follows
        with self._following:
            if self._follows != begun:  # another began after this call, and has ended
                return
            self._follows += 1
            cursor = self._cursor
            news = self._ask("news", lambda store: store.news(cursor), None)
            if news is None:
                return
            # Without a cursor, an invalidation of something in memory may have been missed.
            if news.selectors is None or not cursor:
                self._memory.invalidate(Selector())
            for selector in news.selectors or ():
                self._memory.invalidate(selector)
            self._cursor = news.cursor
            self._heard = time.monotonic()

    def _tend(self) -> None:
        self.follow()
        self._bring()

    def _ask(self, kind: str, work: Callable[[ResponseStore], _T], otherwise: _T) -> _T:
        """What ``work`` gets from the store; ``otherwise`` where it fails (counted) or is left alone after a fault."""
        writes = kind == "put"
        if self._store is None or not self._may_ask(writes):
            return otherwise
        try:
            result = work(self._store)
        except CorruptValue as error:
            self._tally.fault("corrupt", error)
            result = otherwise
        except (StoreError, OSError, ValueError) as error:
            self._tally.fault(f"store {kind}", error)
            reason = getattr(error, "reason", "failed")
            if reason != AWAY:  # a part is left alone by itself
                self._quiet_until[writes] = time.monotonic() + self._pause_s
            if writes:
                self._write_fault = reason
            return otherwise
        self._quiet_until[writes] = 0.0
        if writes:
            self._write_fault = ""
        return result

    def _may_ask(self, writes: bool) -> bool:
        """False for a while after a fault; then one caller tries, and the others once the store answers. A store that
        cannot be read is not written to: whether an answer may be kept depends on its invalidations."""
        with self._pausing:
            now = time.monotonic()
            if writes and self._quiet_until[False]:
                return False
            until = self._quiet_until[writes]
            if until and now >= until:
                self._quiet_until[writes] = now + self._pause_s  # the others wait for this one
            return now >= until

    # -- operators ----------------------------------------------------------------------------------------------

    def counts(self) -> Mapping[str, int]:
        """``hit:memory``, ``hit:store``, ``miss``, ``kept``, ``refused:<reason>``, ``evicted``, ``fault:<kind>``;
        ``unwritten:<reason>`` where memory alone has an answer, and ``written late`` once the store has it, too."""
        counts = self._tally.counts()
        counts["hit:memory"] = counts.get("hit:memory", 0) + self._hits
        counts["evicted"] = self._memory.evicted
        return counts

    def sizes(self) -> Mapping[str, int]:
        """``memory_entries``, ``memory_bytes``, ``store_up``, ``store_writable`` and, where the store says so,
        ``response_entries`` and ``response_bytes``. Blocks."""
        entries, nbytes = self._memory.usage()
        state = self.store_state
        sizes = {"memory_entries": entries, "memory_bytes": nbytes, "store_up": int(self.store_up)}
        sizes["store_writable"] = int(state == "up")
        sizes["unwritten_entries"] = len(self._unwritten)
        usage = self._ask("usage", lambda store: store.usage(), None)
        return (
            sizes
            if usage is None
            else sizes | {"response_entries": usage[0], "response_bytes": usage[1]}
        )

    def read(self, key: str) -> StoredResponse | None:
        """What is stored under a key. Blocks."""
        return self._ask("get", lambda store: store.get(key), None) or self._memory.get(key)

    def scan(self, after: str, most: int) -> list[tuple[str, StoredResponse]]:
        """Answers without their payloads after a place, the latest first, each with its own place. Blocks.

        Raises:
            StoreError: the store cannot list what it has.
        """
        return listed(self._store or self._memory, after, most, self._clock())

    def close(self) -> None:
        """Stop following invalidations, close the store."""
        if self._follower is not None:
            self._follower.stop(5.0)
            self._bring(time.monotonic() + _CLOSING_S)
        if self._store is not None:
            self._store.close()


def _unreplicated(store: ResponseStore) -> int:
    """How many invalidations of a store no replica has confirmed, where it can say so."""
    return int(getattr(store, "unreplicated", 0))


def _place(since: str) -> str | None:
    """The place in the store's log that `ResponseCache.begin` noted. None where the store had not answered yet: only
    memory keeps such an answer."""
    place = since.partition(" ")[2]
    return place if place or not since else None
