"""The figures of a whole run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from semkv.types import Status
from semkv_lab.metrics.compare import (
    AgainstCold,
    NoiseFloor,
    Saved,
    Tokens,
    against_cold,
    noise_floor,
    saved,
    tokens,
)
from semkv_lab.metrics.intervals import Estimate, Times, share, times
from semkv_lab.metrics.quality import (
    ChrArea,
    accuracy,
    accuracy_on_hits,
    chr_area,
    cold_accuracy,
    consistency,
    wrong_hit_share,
)
from semkv_lab.metrics.records import Cold, SampleRecord, answers_match

_MISS, _ALL = "miss", "all"


@dataclass(frozen=True, slots=True)
class TierRow:
    """One line of the table by tier: ``tier`` is a provenance, ``miss`` or ``all``.

    ``share`` is ``rate`` with its interval; ``saved`` is None without a baseline.
    """

    tier: str
    n: int
    rate: float
    share: Estimate
    latency: Times
    ttft: Times
    accuracy: Estimate
    saved: Saved | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run; ``--summary-out`` writes them as JSON.

    Attributes:
        hit_share: ``hit_rate`` with its interval.
        accuracy_on_hits: of what hits gave; in dry-run mode of what they would have given.
        wrong_hit_share: wrong hits (`wrong_hit`) a request, over the requests that can be judged.
        consistency: GQA's, over ``entailed``.
        chr_area: P-CHR AUC.
        donor_agreement: share of full hits whose answer equals the donor's stored one. In dry-run mode, where each
            request was answered as it came, it estimates what a live run would get right without having run one.
        saved: over vLLM's prefix cache and encoder cache; None without a baseline, as ``noise_floor``.
    """

    samples: int
    hits: int
    hit_rate: float
    hit_share: Estimate
    tiers: tuple[TierRow, ...]
    lookup: Times
    after: Times
    tokens: Tokens
    accuracy: Estimate
    accuracy_on_hits: Estimate
    accuracy_on_misses: Estimate
    wrong_hit_share: Estimate
    consistency: Estimate
    chr_area: ChrArea
    statuses: Mapping[str, Mapping[str, int]]
    donor_agreement: Estimate
    refused: int = 0
    bytes_on_disk: int = 0
    baseline_latency: Times | None = None
    baseline_ttft: Times | None = None
    baseline_accuracy: Estimate | None = None
    against_cold: AgainstCold | None = None
    saved: Saved | None = None
    noise_floor: NoiseFloor | None = None
    interrupted: bool = False
    faults: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _tier_row(tier: str, chosen: Sequence[SampleRecord], records: Sequence[SampleRecord]) -> TierRow:
    members = {id(r) for r in chosen}
    return TierRow(
        tier=tier,
        n=len(chosen),
        rate=len(chosen) / max(1, len(records)),
        share=share([(r.image, id(r) in members) for r in records]),
        latency=times((r.image, r.latency_s) for r in chosen),
        ttft=times((r.image, r.ttft_s) for r in chosen),
        accuracy=accuracy(chosen) if tier in (_MISS, _ALL) else accuracy_on_hits(chosen),
        saved=saved(chosen),
    )


def count_statuses(records: Iterable[SampleRecord]) -> dict[str, dict[str, int]]:
    """How often each tier hit, missed and was skipped."""
    counts: dict[str, dict[str, int]] = {}
    for record in records:
        for tier, status in record.statuses.items():
            row = counts.setdefault(tier, {str(s): 0 for s in Status})
            row[str(status)] += 1
    return counts


def summarise(
    records: Sequence[SampleRecord],
    cold: Sequence[Cold] = (),
    *,
    bytes_on_disk: int = 0,
    refused: int = 0,
    interrupted: bool = False,
    faults: Mapping[str, int] | None = None,
) -> Summary:
    """The figures of a run.

    Args:
        records: every sample that was answered, in order; may be empty.
        cold: every answer of the cold pass; more than the records have when the run was interrupted.
        refused: approximate matches that were turned down after the search.
        bytes_on_disk: what the cache folders hold now.
        interrupted: whether the run was stopped before its last sample.
        faults: counted faults inside the cache, by name.
    """
    hits, misses = [r for r in records if r.hit], [r for r in records if not r.hit]
    names = sorted({r.provenance for r in hits})
    rows = [_tier_row(name, [r for r in hits if r.provenance == name], records) for name in names]
    rows += [_tier_row(_MISS, misses, records), _tier_row(_ALL, records, records)]
    donors = [(r.image, answers_match(r.text, r.donor_answer)) for r in hits if r.donor_answer is not None]
    return Summary(
        samples=len(records),
        hits=len(hits),
        hit_rate=len(hits) / max(1, len(records)),
        hit_share=share([(r.image, r.hit) for r in records]),
        tiers=tuple(rows),
        lookup=times((r.image, r.lookup_s) for r in records),
        after=times((r.image, r.after_s) for r in records),
        tokens=tokens(records),
        accuracy=accuracy(records),
        accuracy_on_hits=accuracy_on_hits(hits),
        accuracy_on_misses=accuracy(misses),
        wrong_hit_share=wrong_hit_share(records),
        consistency=consistency(records),
        chr_area=chr_area(records),
        statuses=count_statuses(records),
        donor_agreement=share(donors),
        refused=refused,
        bytes_on_disk=bytes_on_disk,
        baseline_latency=times((c.image, c.latency_s) for c in cold) if cold else None,
        baseline_ttft=times((c.image, c.ttft_s) for c in cold) if cold else None,
        baseline_accuracy=cold_accuracy(cold) if cold else None,
        against_cold=against_cold(records),
        saved=saved(records),
        noise_floor=noise_floor(cold),
        interrupted=interrupted,
        faults=dict(faults or {}),
    )
