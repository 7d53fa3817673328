"""What a tier hands out, what counts faults, and the parts that a tier or a vector index of the user's own plugs into.

A tier or index of the user's own never decides alone. A donor must agree with the request on everything but the
question, in its tenant and model; guards and policy have the last word. A fault in either is a counted miss.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from semkv.errors import ConfigError
from semkv.index import Index, Neighbour, Row, as_cosine
from semkv.types import Entry, Request, Score

if TYPE_CHECKING:
    from semkv.types import Vector

logger = logging.getLogger("semkv")

EXACT, SEMANTIC = "exact_text", "semantic_text"

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A donor that a tier proposes. The texts of the run are the same but for typing, except the ``similar`` one."""

    donor: Entry
    run: int  # how many of its leading segments stand in for as many of the request's
    tier: str  # status key of what decided
    score: float  # cosine of what decided; 1.0 for an exact or normalised match
    agreed: tuple[str, ...]  # status keys that say ``hit`` when this candidate is taken
    others: tuple[Score, ...] = ()  # see `Match.others`
    similar: int | None = None  # position of the text that was found similar
    checked: bool = False  # whether the tier itself has compared how every text is typed


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
        """A ``with`` block where faults end: counted here, and the code after the block goes on."""
        return Boundary(self, kind)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Boundary:
    """See `Tally.boundary`. A `ConfigError` is no fault: it says what to change."""

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


def status_of(layer: str) -> str:
    """The key of a layer's status."""
    return SEMANTIC if layer == SEMANTIC else f"embedding:{layer}"


class Layer:
    """One layer of vectors and its index, which may be the user's own: its faults are counted, and what it finds in
    another partition, or without a cosine, is no result. A row that it fails on is missing until the next start.

    Args:
        name: of its vectors in a lookup.
        key: the catalog's name of the layer.
        dim: length of the vectors.
        threshold: least cosine.
        partition: the catalog's field in which entries must agree to be compared.
    """

    def __init__(
        self, name: str, key: str, dim: int, threshold: float, partition: str, index: Index, tally: Tally
    ) -> None:
        self.name, self.key, self.dim, self.threshold = name, key, dim, threshold
        self.status = status_of(name)
        self.partition, self.index, self._tally = partition, index, tally
        self.items: dict[str, str] = {}  # with the partition of each

    def extend(self, rows: Iterable[Row]) -> None:
        new = {row.item: row for row in rows if row.item not in self.items}
        with self._tally.boundary("index"):
            self.index.extend(new.values())
            self.items.update({row.item: row.partition for row in new.values()})

    def remove(self, items: Iterable[str]) -> None:
        known = [item for item in items if self.items.pop(item, None) is not None]
        with self._tally.boundary("index"):
            self.index.remove(known)

    def search(self, partition: str, vector: Vector, most: int) -> list[Neighbour]:
        """The nearest above the threshold, best first."""
        with self._tally.boundary("index"):
            found = [Neighbour(n.item, as_cosine(n.score)) for n in self.index.search(partition, vector, most)]
            own = [n for n in found if n.score >= self.threshold and self.items.get(n.item) == partition]
            return sorted(own, key=lambda n: -n.score)[:most]
        return []

    def score(self, item: str, vector: Vector) -> float:
        """The cosine of an item; -1, the least, where it is not there."""
        with self._tally.boundary("index"):
            found = self.index.score(item, vector) if item in self.items else None
            return -1.0 if found is None else as_cosine(found)
        return -1.0

    def close(self) -> None:
        """Call the index's own ``close``, where it has one."""
        with self._tally.boundary("index"):
            getattr(self.index, "close", lambda: None)()
