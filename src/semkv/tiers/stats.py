"""What the cache counted, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Counted under their own names beside the faults that were raised as exceptions.
_PLAIN_FAULTS = ("donor media lost", "media not found", "index out of step")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since this object was made, and sizes now.

    Attributes:
        lookups, lookup_s: calls of `SemanticCache.try_reuse` and the seconds they took.
        hits: by the status key of the tier that decided.
        partial: hits that substituted only a leading part.
        recorded, repeats: new entries, and observations that counted as a hit on an entry.
        refused: approximate matches that the decider turned down.
        faults: things that went wrong inside the cache and became misses, by kind.
        entries, media_bytes: what is stored.
    """

    lookups: int = 0
    lookup_s: float = 0.0
    hits: Mapping[str, int] = field(default_factory=dict)
    partial: int = 0
    recorded: int = 0
    repeats: int = 0
    refused: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    entries: int = 0
    media_bytes: int = 0


def stats_of(counts: Mapping[str, int], lookup_s: float, entries: int, media_bytes: int) -> CacheStats:
    """Sort a `Tally`'s counts into `CacheStats`."""
    faults = {name.removeprefix("fault:"): n for name, n in counts.items() if name.startswith("fault:")}
    return CacheStats(
        lookups=counts.get("lookups", 0),
        lookup_s=lookup_s,
        hits={name.removeprefix("hit:"): n for name, n in counts.items() if name.startswith("hit:")},
        partial=counts.get("partial", 0),
        recorded=counts.get("recorded", 0),
        repeats=counts.get("repeats", 0),
        refused=counts.get("refused", 0),
        faults=faults | {name: counts[name] for name in _PLAIN_FAULTS if name in counts},
        entries=entries,
        media_bytes=media_bytes,
    )
