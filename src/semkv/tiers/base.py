"""What every tier hands out: candidates, best first, from which the cache takes the first that can be used."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv.encoders.text import TextEncoder
from semkv.errors import ConfigError, SemkvError
from semkv.types import Entry, Score

if TYPE_CHECKING:
    from semkv.encoders.text import Matrix

logger = logging.getLogger("semkv")

EXACT = "exact_text"


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


class PartError(SemkvError):
    """A hook, an encoder or a decider raised; the cache counts it and treats the request as a miss."""


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


class GuardedEncoder:
    """A text encoder whose every failure is a `PartError`; what may be plugged in may raise anything."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder

    @property
    def dim(self) -> int:
        return self._encoder.dim

    @property
    def fingerprint(self) -> str:
        return self._encoder.fingerprint

    def fits(self, text: str) -> bool:
        with _part():
            return self._encoder.fits(text)

    def encode(self, texts: Sequence[str]) -> Matrix:
        with _part():
            return self._encoder.encode(texts)

    def forget(self) -> None:
        """Drop the texts in memory, where it keeps any."""
        try:
            getattr(self._encoder, "forget", lambda: None)()
        except Exception as error:
            raise PartError(f"text encoder: {error!r}") from error


@contextmanager
def _part() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise PartError(f"text encoder: {error!r}") from error
