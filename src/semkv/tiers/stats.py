"""What the cache counted, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from semkv.tiers.checking import wilson

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
        vetoes: approximate matches that a guard turned down, by reason.
        overruled: approximate hits to which a guard objected and which the policy allowed, by reason.
        barred: approximate matches turned down because the donor was found wrong for the same text before.
        checked, checked_wrong: approximate hits of the random sample that were checked, and that were wrong.
        checked_beside: checks that the policy asked for beside the sample.
        reported_wrong: hits that a user reported.
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
    vetoes: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)
    entries: int = 0
    media_bytes: int = 0
    overruled: Mapping[str, int] = field(default_factory=dict)
    barred: int = 0
    checked: int = 0
    checked_wrong: int = 0
    checked_beside: int = 0
    reported_wrong: int = 0

    @property
    def wrong_rate(self) -> float | None:
        """Share of approximate hits that are wrong, from the random sample; None where nothing was checked.

        As the comparator sees it, not corrected for its errors (Rogan and Gladen, 1978): they depend on how the answers
        are worded. Long answers that are merely reworded count as wrong, so there it is rather too high.
        """
        return self.checked_wrong / self.checked if self.checked else None

    @property
    def wrong_interval(self) -> tuple[float, float]:
        """Its 95% interval (Wilson's), of chance alone; (0, 1) where nothing was checked."""
        return wilson(self.checked_wrong, self.checked)


def stats_of(counts: Mapping[str, int], lookup_s: float, entries: int, media_bytes: int) -> CacheStats:
    """Sort a `Tally`'s counts into `CacheStats`."""
    faults = _named(counts, "fault:")
    return CacheStats(
        lookups=counts.get("lookups", 0),
        lookup_s=lookup_s,
        hits=_named(counts, "hit:"),
        partial=counts.get("partial", 0),
        recorded=counts.get("recorded", 0),
        repeats=counts.get("repeats", 0),
        refused=counts.get("refused", 0),
        vetoes=_named(counts, "veto:"),
        faults=faults | {name: counts[name] for name in _PLAIN_FAULTS if name in counts},
        entries=entries,
        media_bytes=media_bytes,
        overruled=_named(counts, "overruled:"),
        barred=counts.get("barred", 0),
        checked=counts.get("checked", 0),
        checked_wrong=counts.get("checked wrong", 0),
        checked_beside=counts.get("checked beside the sample", 0),
        reported_wrong=counts.get("reported wrong", 0),
    )


def _named(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    """The counters under a prefix, by the rest of their name."""
    return {name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)}
