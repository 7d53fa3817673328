"""What a tier hands out (candidates), what counts its faults, and tiers and vector indexes of the user's own.

A tier or index of the user's own never decides alone. A donor must agree with the request on everything but the
question, in its tenant and model; guards and policy have the last word. A fault in either is a counted miss.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from semkv import plug
from semkv.config import CacheConfig
from semkv.errors import ConfigError
from semkv.index import Neighbour, Row
from semkv.keys import digest
from semkv.stores.catalog import Catalog
from semkv.tiers.prompt_keys import SPELLINGS, Keyed, same_texts
from semkv.types import Entry, Request, Scope, Score

if TYPE_CHECKING:
    from semkv.types import Vector

logger = logging.getLogger("semkv")

EXACT = "exact_text"

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A donor that a tier proposes.

    Attributes:
        donor: the entry.
        run: how many of its leading segments stand in for as many of the request's.
        tier: the status key of what decided.
        score: cosine of what decided; 1.0 for an exact or normalised match.
        agreed: status keys that say ``hit`` when this candidate is taken.
        others: see `Match.others`.
    """

    donor: Entry
    run: int
    tier: str
    score: float
    agreed: tuple[str, ...]
    others: tuple[Score, ...] = ()


class Latest(OrderedDict[_K, _V]):
    """A dictionary of the latest ``most`` keys that were set."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class Tally:
    """Counters that any thread may add to; faults are logged as warnings, each kind's first time, then as debug."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def fault(self, kind: str, error: BaseException) -> None:
        """Count a fault inside the cache; the request goes on as a miss."""
        name = f"fault:{kind}"
        self.add(name)
        level = logging.WARNING if self._counts[name] == 1 else logging.DEBUG
        logger.log(level, "%s: %s: %s (counted as a miss)", kind, type(error).__name__, error)

    def boundary(self, kind: str) -> Boundary:
        """A block whose faults are counted here."""
        return Boundary(self, kind)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Boundary:
    """A ``with`` block where faults end: counted, logged, and the code after the block goes on.

    A fault is any exception but a `ConfigError`, which says what to change.
    """

    def __init__(self, tally: Tally, kind: str) -> None:
        self._tally, self._kind = tally, kind

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, ConfigError):
            return False
        self._tally.fault(self._kind, error)
        return True


class Every(threading.Thread):
    """Calls a method every so many seconds, until it is stopped or nobody has the method's object any more. What the
    method raises is logged."""

    def __init__(self, seconds: float, method: Callable[[], object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._seconds, self._method, self._stopping = seconds, weakref.WeakMethod(method), threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stopping.wait(self._seconds):
            method = self._method()
            if method is None:
                return
            try:
                method()
            except Exception:
                logger.exception("%s failed", self.name)
            del method

    def stop(self, timeout_s: float | None = None) -> None:
        """Wait for the call that goes on."""
        self._stopping.set()
        self.join(timeout_s)


# -- the user's own ------------------------------------------------------------------------------------------------


class Index(Protocol):
    """Nearest vectors by cosine within a partition. Any thread may call any method.

    It lives in memory: at each start it gets the vectors of the catalog again. `semkv.index.VectorIndex` is one.
    """

    def extend(self, rows: Iterable[Row]) -> None:
        """Add rows, each new and a float32 unit vector of the index's dimension."""
        ...

    def remove(self, items: Iterable[str]) -> None:
        """Forget items."""
        ...

    def search(self, partition: str, vector: Vector, k: int = 1) -> Sequence[Neighbour]:
        """The ``k`` nearest items of a partition with their cosines."""
        ...

    def score(self, item: str, vector: Vector) -> float | None:
        """The cosine of one item; None where it is unknown."""
        ...


class Tier(Protocol):
    """A way of matching, asked after the built-in tiers. Any thread may call any method.

    An entry that shares a key with a request, and all of the prompt but the question, is a candidate. Keys lie in the
    catalog, by tenant and model, so the tier itself keeps nothing.

    Attributes:
        name: its status key, such as ``stems``.
    """

    @property
    def name(self) -> str: ...

    def keys(self, request: Request) -> Collection[str]:
        """The keys of a prompt; none where the tier has no say. An entry keeps those it was recorded with."""
        ...

    def score(self, request: Request, donor: Entry) -> float:
        """How alike they are, above 0 and at most 1; 0 for no candidate."""
        ...


class PluggedIndex:
    """An `Index` that may fail or err: its faults are counted as ``index``, and what it finds in another partition, or
    without a cosine, is no result. A row that it fails on is missing until the next start.

    Args:
        dim: length of every vector.
        make: called with ``dim``.
        tally: counts faults.

    Raises:
        ConfigError: what it makes is no `Index`.
    """

    def __init__(self, dim: int, make: Callable[[int], Index], tally: Tally) -> None:
        self.dim, self._tally = dim, tally
        self._index: Index = plug.require("index", make(dim), Index)
        self._partition: dict[str, str] = {}

    def __contains__(self, item: str) -> bool:
        return item in self._partition

    def items(self) -> list[str]:
        return list(self._partition)

    def extend(self, rows: Iterable[Row]) -> None:
        new = {row.item: row for row in rows if row.item not in self._partition}
        with self._tally.boundary("index"):
            self._index.extend(new.values())
            self._partition.update({row.item: row.partition for row in new.values()})

    def remove(self, items: Iterable[str]) -> None:
        known = [item for item in items if self._partition.pop(item, None) is not None]
        with self._tally.boundary("index"):
            self._index.remove(known)

    def search(self, partition: str, vector: Vector, k: int = 1) -> list[Neighbour]:
        with self._tally.boundary("index"):
            found = [Neighbour(n.item, _cosine(n.score)) for n in self._index.search(partition, vector, k)]
            own = [n for n in found if self._partition.get(n.item) == partition]
            return sorted(own, key=lambda n: -n.score)[:k]
        return []

    def score(self, item: str, vector: Vector) -> float | None:
        with self._tally.boundary("index"):
            found = self._index.score(item, vector) if item in self._partition else None
            return None if found is None else _cosine(found)
        return None

    def apply_purges(self) -> None:
        """What a purge deleted was removed before."""

    def close(self) -> None:
        """Call the index's own ``close``, where it has one."""
        with self._tally.boundary("index"):
            getattr(self._index, "close", lambda: None)()


def _cosine(score: float) -> float:
    """A number in [-1, 1]; one that is none is -1, the least."""
    return max(-1.0, min(1.0, float(score))) if math.isfinite(score) else -1.0


class PluggedTiers:
    """The user's tiers over the catalog.

    Args:
        tiers: in the order in which they are asked.
        config: settings.
        catalog: where keys and entries are.
        tally: counts faults, under a tier's name.
        taken: names that the built-in tiers have.

    Raises:
        ConfigError: one is no `Tier`, or has a name that another one has.
    """

    def __init__(
        self, tiers: Sequence[Tier], config: CacheConfig, catalog: Catalog, tally: Tally, taken: Collection[str]
    ) -> None:
        self.tiers: tuple[Tier, ...] = tuple(plug.require("tiers", tier, Tier) for tier in tiers)
        self._config, self._catalog, self._tally = config, catalog, tally
        taken = (*taken, "kv_cache", "fusion")  # what an engine adds
        names = [*taken, *(tier.name for tier in self.tiers)]
        for tier in self.tiers:
            if names.count(tier.name) > 1:
                raise ConfigError("tiers", tier.name, f"names that differ, and from {', '.join(sorted(taken))}")

    def keys(self, tier: Tier, request: Request, keyed: Keyed) -> list[str]:
        """The catalog's keys of a prompt in a tier; none where it has no question, or the tier fails."""
        frame = keyed.frame(with_media=self._config.scope is Scope.MEDIA)
        with self._tally.boundary(tier.name):
            return [digest("tier", tier.name, frame, key) for key in tier.keys(request) if frame]
        return []

    def entry_keys(self, entry: Entry, keyed: Keyed) -> list[str]:
        """The keys of an entry in all tiers."""
        if not self.tiers:
            return []
        request = Request(entry.entry_id, entry.namespace, entry.segments, entry.chunk_text)
        return [key for tier in self.tiers for key in self.keys(tier, request, keyed)]

    def candidates(
        self, tier: Tier, request: Request, keyed: Keyed, keys: Sequence[str], most: int
    ) -> Iterator[Candidate]:
        """Those that share a key and all but the question, the best first."""
        donors = {donor.entry_id: donor for key in keys for donor in self._catalog.find(key, SPELLINGS)}
        scored = [(_cosine(tier.score(request, donor)), donor) for donor in donors.values()]
        for score, donor in sorted(scored, key=lambda pair: -pair[0])[:most]:
            same = self._config.normalised or same_texts(keyed.segments, donor.segments, keyed.question)
            if score > 0.0 and same:
                yield Candidate(donor, len(donor.segments), tier.name, score, (tier.name,))
