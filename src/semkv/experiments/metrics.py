"""Figures of a run, computed from its sample records. Pure functions, no input or output."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from semkv.types import Status

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_RESAMPLES = 2_000
_SEED = 0


def normalise_answer(text: str) -> str:
    """Lowercase, punctuation removed, outer white space stripped: lmms-eval's exact match for GQA."""
    return text.lower().translate(_PUNCTUATION).strip()


def answers_match(prediction: str, answer: str) -> bool:
    """Whether two answers are equal but for case and punctuation."""
    return normalise_answer(prediction) == normalise_answer(answer)


@dataclass(frozen=True, slots=True)
class Cold:
    """The same sample on an engine with vLLM's prefix cache alone."""

    image: str
    text: str
    match: bool | None
    latency_s: float
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...] = ()

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """All that is known about one sample of a run; a line of ``--samples-out``.

    Attributes:
        provenance: `ReuseReport.provenance`: which tier hit, empty on a miss.
        exactness: of the substitution, empty on a miss.
        applied: whether the donor's segments were sent (False on a miss and in dry-run mode).
        donor_answer: what the donor answered, where all of its prompt stands in (or would, in dry-run mode).
        answer: what was expected, or None.
        match: whether the text equals ``answer`` (`answers_match`), None without an answer.
        latency_s: lookup and generation together.
        lookup_s: the lookup alone, encoders included.
        cached_tokens: prompt tokens not computed; ``loaded_tokens`` of them from our KV store (None: no connector),
            ``prefix_tokens`` from vLLM's own prefix cache.
        cold: the same sample without our caches, when a baseline was run.
    """

    sample_id: str
    image: str
    question: str
    text: str
    answer: str | None
    match: bool | None
    provenance: str
    exactness: str
    applied: bool
    score: float | None
    donor: str
    donor_answer: str | None
    statuses: Mapping[str, Status]
    latency_s: float
    lookup_s: float
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int | None
    prefix_tokens: int
    finish_reason: str = ""
    token_ids: tuple[int, ...] = ()
    variant: str = ""
    cold: Cold | None = None

    @property
    def hit(self) -> bool:
        return bool(self.provenance)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def to_json(self) -> dict[str, Any]:
        return {"hit": self.hit, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Share:
    """A share of samples with its 95% interval, both None for no samples."""

    n: int
    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """Median and 95th percentile in seconds, None for no samples."""

    n: int
    p50_s: float | None
    p95_s: float | None


@dataclass(frozen=True, slots=True)
class TierRow:
    """One line of the table by tier: ``tier`` is a provenance, ``miss`` or ``all``."""

    tier: str
    n: int
    rate: float
    latency: Times
    ttft: Times
    accuracy: Share


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens of all samples, and where those that were not computed came from.

    ``beyond`` is what our caches saved over vLLM's own prefix cache: tokens the baseline computed less tokens this
    run computed. None without a baseline.
    """

    prompt: int
    computed: int
    not_computed: int
    from_store: int
    from_prefix_cache: int
    baseline_prompt: int | None = None
    baseline_computed: int | None = None
    baseline_not_computed: int | None = None
    beyond: int | None = None


@dataclass(frozen=True, slots=True)
class AgainstCold:
    """Hits compared with the same samples run cold.

    Attributes:
        accuracy_on_hits, cold_accuracy_on_hits: on the same samples.
        agreement: share of hits whose answer equals the cold one (`answers_match`).
        identical_tokens: share of all samples that sent their own prompt or a byte-equal one, whose tokens equal the
            cold run's one by one.
        wrong_hits: hits that answer wrongly where the cold run was right.
        gained_hits: hits that answer rightly where the cold run was wrong.
        speedup: median of cold latency over cached latency, sample by sample, over hits.
    """

    n: int
    accuracy_on_hits: Share
    cold_accuracy_on_hits: Share
    agreement: Share
    identical_tokens: Share
    wrong_hits: int
    gained_hits: int
    speedup: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run; ``--summary-out`` writes them as JSON.

    ``donor_agreement`` is the share of full hits whose answer equals the donor's stored one. In dry-run mode, where
    each request was answered as it came, it estimates what a live run would get right without having run one.
    """

    samples: int
    hits: int
    hit_rate: float
    tiers: tuple[TierRow, ...]
    lookup: Times
    tokens: Tokens
    accuracy: Share
    accuracy_on_hits: Share
    accuracy_on_misses: Share
    statuses: Mapping[str, Mapping[str, int]]
    donor_agreement: Share
    refused: int = 0
    bytes_on_disk: int = 0
    baseline_latency: Times | None = None
    baseline_ttft: Times | None = None
    baseline_accuracy: Share | None = None
    against_cold: AgainstCold | None = None
    interrupted: bool = False
    faults: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def percentiles(seconds: Iterable[float | None]) -> Times:
    """Median and 95th percentile of the values that are there."""
    import numpy as np

    values = [s for s in seconds if s is not None]
    if not values:
        return Times(0, None, None)
    p50, p95 = np.percentile(values, [50, 95])
    return Times(len(values), float(p50), float(p95))


def share(outcomes: Sequence[tuple[str, bool]]) -> Share:
    """The share of True with a 95% bootstrap interval over clusters.

    Questions on one image are not independent, so whole images are drawn again, not questions (the cluster bootstrap;
    Davison and Hinkley, Bootstrap Methods and their Application, 1997, 3.8). The seed is fixed: equal records give
    equal intervals.

    Args:
        outcomes: (cluster, outcome) per sample.
    """
    import numpy as np

    if not outcomes:
        return Share(0, None)
    index: dict[str, int] = {}
    for cluster, _ in outcomes:
        index.setdefault(cluster, len(index))
    total, right = np.zeros(len(index)), np.zeros(len(index))
    for cluster, outcome in outcomes:
        total[index[cluster]] += 1
        right[index[cluster]] += outcome
    value = float(right.sum() / total.sum())
    low, high = np.percentile(_resampled(right, total), [2.5, 97.5])
    return Share(len(outcomes), value, float(low), float(high))


def _resampled(right: Floats, total: Floats) -> Floats:
    import numpy as np

    rng, groups, out = np.random.default_rng(_SEED), len(total), []
    for _ in range(_RESAMPLES // 100):  # in parts: 100 x groups counts at a time
        drawn = rng.integers(0, groups, size=(100, groups))
        out.append(right[drawn].sum(axis=1) / total[drawn].sum(axis=1))
    return np.concatenate(out)


def accuracy(records: Iterable[SampleRecord]) -> Share:
    """Accuracy over the records that have an expected answer."""
    return share([(r.image, r.match) for r in records if r.match is not None])


def cold_accuracy(cold: Iterable[Cold]) -> Share:
    """Accuracy over the cold answers that have an expected answer."""
    return share([(c.image, c.match) for c in cold if c.match is not None])


def tokens(records: Sequence[SampleRecord]) -> Tokens:
    """Prompt tokens, split by where they came from."""
    prompt, computed = sum(r.prompt_tokens for r in records), sum(r.computed_tokens for r in records)
    cold = [r.cold for r in records if r.cold is not None]
    parts: dict[str, int] = {}
    if cold and len(cold) == len(records):
        cold_prompt, cold_computed = sum(c.prompt_tokens for c in cold), sum(c.computed_tokens for c in cold)
        parts = {
            "baseline_prompt": cold_prompt,
            "baseline_computed": cold_computed,
            "baseline_not_computed": cold_prompt - cold_computed,
            "beyond": cold_computed - computed,
        }
    return Tokens(
        prompt=prompt,
        computed=computed,
        not_computed=prompt - computed,
        from_store=sum(r.loaded_tokens or 0 for r in records),
        from_prefix_cache=sum(r.prefix_tokens for r in records),
        **parts,
    )


def against_cold(records: Sequence[SampleRecord]) -> AgainstCold | None:
    """Hits against the same samples run cold; None without a baseline."""
    if not any(r.cold is not None for r in records):
        return None
    pairs = [(r, r.cold) for r in records if r.cold is not None]
    hits = [(r, c) for r, c in pairs if r.hit and r.applied]
    exact = [(r, c) for r, c in pairs if not r.applied or r.exactness == "exact"]
    judged = [(r.match, c.match) for r, c in hits if r.match is not None and c.match is not None]
    return AgainstCold(
        n=len(hits),
        accuracy_on_hits=accuracy(r for r, _ in hits),
        cold_accuracy_on_hits=cold_accuracy(c for _, c in hits),
        agreement=share([(r.image, answers_match(r.text, c.text)) for r, c in hits]),
        identical_tokens=share([(r.image, r.token_ids == c.token_ids) for r, c in exact]),
        wrong_hits=sum(not now and before for now, before in judged),
        gained_hits=sum(now and not before for now, before in judged),
        speedup=_median([c.latency_s / r.latency_s for r, c in hits if r.latency_s > 0]),
    )


def _median(values: Sequence[float]) -> float | None:
    import numpy as np

    return float(np.median(values)) if values else None


def _tier_row(tier: str, records: Sequence[SampleRecord], total: int) -> TierRow:
    return TierRow(
        tier=tier,
        n=len(records),
        rate=len(records) / total,
        latency=percentiles(r.latency_s for r in records),
        ttft=percentiles(r.ttft_s for r in records),
        accuracy=accuracy(records),
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
    total = max(1, len(records))
    hits, misses = [r for r in records if r.hit], [r for r in records if not r.hit]
    names = sorted({r.provenance for r in hits})
    rows = [_tier_row(name, [r for r in hits if r.provenance == name], total) for name in names]
    rows += [_tier_row("miss", misses, total), _tier_row("all", records, total)]
    return Summary(
        samples=len(records),
        hits=len(hits),
        hit_rate=len(hits) / total,
        tiers=tuple(rows),
        lookup=percentiles(r.lookup_s for r in records),
        tokens=tokens(records),
        accuracy=accuracy(records),
        accuracy_on_hits=accuracy(hits),
        accuracy_on_misses=accuracy(misses),
        statuses=count_statuses(records),
        donor_agreement=share(
            [(r.image, answers_match(r.text, r.donor_answer)) for r in hits if r.donor_answer is not None]
        ),
        refused=refused,
        bytes_on_disk=bytes_on_disk,
        baseline_latency=percentiles(c.latency_s for c in cold) if cold else None,
        baseline_ttft=percentiles(c.ttft_s for c in cold) if cold else None,
        baseline_accuracy=cold_accuracy(cold) if cold else None,
        against_cold=against_cold(records),
        interrupted=interrupted,
        faults=dict(faults or {}),
    )
