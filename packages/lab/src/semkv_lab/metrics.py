"""Figures of a run, computed from its sample records. Pure functions, no input or output.

Every figure that may vary from draw to draw comes with a 95% interval, by bootstrap over images: questions on one image
are not independent, so whole images are drawn again, not questions (the cluster bootstrap; Davison and Hinkley,
Bootstrap Methods and their Application, 1997, 3.8). The seed is fixed: equal values give equal intervals.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from semkv.tiers.checking import wilson
from semkv.types import Status
from semkv_lab.records import Cold, SampleRecord, answers_match, at, normalise_answer

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Figures = dict[str, Any]
"""Figures by name: counts, `Estimate`, `Times`, and more of the same."""

RESAMPLES, FEW_RESAMPLES = 2_000, 500
_MANY_IMAGES = 2_000  # from so many on, fewer draws
_AT_ONCE = 2_000_000  # numbers drawn at a time, to bound memory
_SEED = 0
_HUGE = 1e18  # of a file: what is as large, infinity too, is no figure


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure over ``n`` values with its 95% interval; all None for no values, no interval from one image."""

    n: int
    value: float | None
    low: float | None = None
    high: float | None = None


def read_estimate(summary: Mapping[str, Any], *path: str) -> Estimate:
    """A figure of a summary; empty where there is none at this path."""
    found = at(summary, *path)
    n, value, low, high = (number(at(found, key)) for key in ("n", "value", "low", "high"))
    return Estimate(int(n or 0), value, low, high)


def number(value: Any) -> float | None:
    """The value where it is a number that can be drawn and added up, else None."""
    there = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _HUGE
    return float(value) if there else None


@dataclass(frozen=True, slots=True)
class Times:
    """Median, its 95% interval, and the 95th percentile, in seconds; None for no samples."""

    n: int
    p50_s: float | None
    p95_s: float | None
    p50_low_s: float | None = None
    p50_high_s: float | None = None


def mean(values: Sequence[tuple[str, float]]) -> Estimate:
    """The mean of (image, value) pairs; empty for no pairs."""
    if not values:
        return Estimate(0, None)
    groups, numbers = split(values)
    total, sums = np.bincount(groups).astype(np.float64), np.bincount(groups, weights=numbers)
    drawn = ((counts @ sums) / (counts @ total) for counts in resamples(len(total)))
    return estimate(len(values), float(sums.sum() / total.sum()), drawn if len(total) > 1 else ())


def share(outcomes: Sequence[tuple[str, bool]]) -> Estimate:
    """The share of True among (image, outcome) pairs.

    Where all outcomes are alike, drawing images again shows no spread, though there is one: the interval is Wilson's
    then, with as many trials as images.
    """
    found = mean([(image, float(outcome)) for image, outcome in outcomes])
    if found.value not in (0.0, 1.0):
        return found
    images = len({image for image, _ in outcomes})
    low, high = wilson(int(found.value) * images, images)
    return replace(found, low=low, high=high)


def median(values: Sequence[tuple[str, float]]) -> Estimate:
    """The median of (image, value) pairs; empty for no pairs."""
    if not values:
        return Estimate(0, None)
    groups, numbers = split(values)
    order = np.argsort(numbers, kind="stable")
    groups, numbers = groups[order], numbers[order]

    def medians() -> Iterator[Floats]:
        for counts in resamples(int(groups.max()) + 1, len(groups)):
            below = counts[:, groups].cumsum(axis=1)
            half = below[:, -1:] / 2
            lower, upper = (below >= half).argmax(axis=1), (below > half).argmax(axis=1)
            yield (numbers[lower] + numbers[upper]) / 2

    return estimate(len(values), float(np.median(numbers)), medians() if groups.any() else ())


def times(values: Iterable[tuple[str, float | None]]) -> Times:
    """Median with its interval, and 95th percentile, of the (image, seconds) pairs that have seconds."""
    there = [(image, seconds) for image, seconds in values if seconds is not None]
    if not there:
        return Times(0, None, None)
    middle = median(there)
    return Times(len(there), middle.value, float(np.percentile([s for _, s in there], 95)), middle.low, middle.high)


def split(values: Sequence[tuple[str, float]]) -> tuple[Integers, Floats]:
    """Images as numbers from 0 in order of appearance, and the values."""
    index: dict[str, int] = {}
    groups = [index.setdefault(image, len(index)) for image, _ in values]
    return np.array(groups), np.array([value for _, value in values], dtype=np.float64)


def resamples(images: int, rows: int = 0, most: int = RESAMPLES) -> Iterator[Integers]:
    """How often each image is there in draws with replacement, [draws, images]; ``rows`` are made of each draw.

    Some draws come at a time, to bound memory, and fewer of many images.
    """
    rng = np.random.default_rng(_SEED)
    left, at_once = most if images <= _MANY_IMAGES else FEW_RESAMPLES, max(1, _AT_ONCE // max(images, rows))
    for start in range(0, left, at_once):
        yield rng.multinomial(images, np.full(images, 1 / images), size=min(at_once, left - start))


def estimate(n: int, value: float, drawn: Iterable[Floats]) -> Estimate:
    """With the percentile interval of the figures of all resamples; draws without a figure (NaN) are left out."""
    figures = list(drawn)
    if not figures:
        return Estimate(n, value)
    low, high = np.nanpercentile(np.concatenate(figures), [2.5, 97.5])
    return Estimate(n, value, float(low), float(high))


# -- how right the answers are ------------------------------------------------------------


def accuracy(answers: Iterable[SampleRecord | Cold]) -> Estimate:
    """Accuracy over the answers that have an expected one."""
    return share([(a.image, a.match) for a in answers if a.match is not None])


def given(record: SampleRecord) -> str | None:
    """What a hit gave; in dry-run mode what it would have given, None where only a part of the donor stood in."""
    return record.text if record.applied else record.donor_answer


def accuracy_on_hits(records: Iterable[SampleRecord]) -> Estimate:
    """Accuracy of what hits gave (`given`), over those of which it is known and that have an expected answer."""
    hits = [(r, text) for r in records if r.hit and (text := given(r)) is not None]
    return share([(r.image, answers_match(text, r.answer)) for r, text in hits if r.answer is not None])


def consistency(records: Sequence[SampleRecord], *, cold: bool = False) -> Estimate:
    """GQA's consistency (Hudson and Manning, GQA, CVPR 2019): do the answers contradict one another?

    The mean, over the questions that were answered correctly, of the share of the questions each entails that were
    answered correctly too; those that the run did not ask are left out. ``cold``: of the cold answers.
    """

    def right(record: SampleRecord) -> bool | None:
        return record.match if not cold else record.cold.match if record.cold is not None else None

    outcome = {r.sample_id: right(r) for r in records}
    scores = []
    for record in records:
        # The loader leaves a question's own id out: that of a repeat in a trace is another.
        asked = [outcome.get(name) for name in record.entailed if name != record.sample_id]
        judged = [o for o in asked if o is not None]
        if right(record) and judged:
            scores.append((record.image, sum(judged) / len(judged)))
    return mean(scores)


def gqa(records: Sequence[SampleRecord]) -> Figures:
    """GQA's own measures beside consistency (Hudson and Manning, GQA, CVPR 2019), where it has the annotations.

    ``validity`` and ``plausibility`` are the shares of answers of the question's kind, and of those that occur with its
    objects; ``distribution`` is the chi-square of the answers against the expected ones, by global group and weighted
    by its size, 0 where both are alike and None without groups; ``by_type`` is the accuracy by structural and semantic
    type (``structural verify``), and of ``binary`` and ``open`` questions. Over all questions that were asked; GQA's
    own script leaves out those that are not balanced.
    """
    types: dict[str, list[SampleRecord]] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    for r in records:
        if r.types:
            form = "open" if r.types[0] == "query" else "binary"
            for name in (f"structural {r.types[0]}", f"semantic {r.types[1]}", form):
                types.setdefault(name, []).append(r)
        if r.group and r.answer is not None:
            groups.setdefault(r.group, []).append((normalise_answer(r.answer), normalise_answer(r.text)))
    weighted = sum(_chi_square(answers) * len(answers) for answers in groups.values())
    return {
        "validity": share([(r.image, r.valid) for r in records if r.valid is not None]),
        "plausibility": share([(r.image, r.plausible) for r in records if r.plausible is not None]),
        "distribution": weighted / sum(map(len, groups.values())) if groups else None,
        "by_type": {name: accuracy(of_it) for name, of_it in sorted(types.items())},
    }


def _chi_square(answers: Sequence[tuple[str, str]]) -> float:
    """Of (expected, given) answers; as in GQA's script, answers that nothing expects do not count."""
    expected, given = (Counter(column) for column in zip(*answers, strict=True))
    return sum((given[answer] - count) ** 2 / count for answer, count in expected.items())


def without(record: SampleRecord) -> str | None:
    """What the request would have got without its hit, where that is known: the cold answer, of a dry run its own."""
    return record.text if not record.applied else record.cold.text if record.cold is not None else None


def stands_for(record: SampleRecord) -> bool | None:
    """Whether a hit gave what the request would have got without it, else the expected answer where that is not known;
    None for a miss and where nothing tells.
    """
    own, text = without(record), given(record)
    if not record.hit or text is None:
        return None
    return record.match if own is None else answers_match(text, own)


def wrong_hit(record: SampleRecord) -> bool | None:
    """Whether the cache spoiled this answer: a hit that is wrong where the answer without it was right. False for a
    miss, None for a hit that nothing judges: without a cold answer (``--baseline``) the model's own mistakes look the
    same. Without an expected answer a hit that differs is wrong.
    """
    own, text = without(record), given(record)
    if not record.hit:
        return False
    if own is None or text is None:
        return None
    if record.answer is None:
        return not answers_match(text, own)
    return answers_match(own, record.answer) and not answers_match(text, record.answer)


def wrong_hit_share(records: Sequence[SampleRecord]) -> Estimate:
    """Wrong hits a request, over the requests that can be judged: those with a cold answer, and all of a dry run."""
    dry = any(r.hit and not r.applied for r in records)
    judged = [(r.image, wrong_hit(r)) for r in records if dry or r.cold is not None]
    return share([(image, wrong) for image, wrong in judged if wrong is not None])


def chr_area(records: Sequence[SampleRecord]) -> Figures:
    """P-CHR AUC: the area under precision against cache-hit ratio, as the threshold on the score falls.

    Introduced by Baral et al., Closing the Calibration Gap in Semantic Caching, 2026, arXiv:2606.19719.

    At a threshold t the cache-hit ratio is the share of all requests that hit with a score of at least t, and the
    precision is the share of these hits that give what the request would have got without (`stands_for`). Exact hits
    have score 1; hits that nothing can judge are left out; requests that missed count in the ratio only, so the curve
    ends at the run's hit rate: the area is divided by that ratio. 1 means that every hit was right at every threshold
    from the run's own upwards. For a whole curve run with a low threshold, ``--disable-guards`` and ``--cache-mode
    dry-run``. Only areas that reach a like ratio can be compared: ``reached`` is that ratio, 0 without a hit.
    """
    rows = [
        (1.0 if r.score is None else r.score, n, good)
        for n, r in enumerate(records)
        if (good := stands_for(r)) is not None
    ]
    if not rows:
        return {"area": Estimate(0, None), "reached": 0.0}
    scores, places, right = map(np.array, zip(*sorted(rows, key=lambda hit: -hit[0]), strict=True))
    last = np.flatnonzero(np.append(np.diff(scores) != 0, True))  # of one score, together

    def area(weights: Integers) -> tuple[float, float]:
        """The area, and the ratio it reaches, where each record counts so often; level before the first point."""
        counts = weights[places]
        found = counts.cumsum()[last]
        there = found > 0
        if not there.any():
            return np.nan, 0.0
        ratio, precision = found[there] / weights.sum(), (counts * right).cumsum()[last][there] / found[there]
        reached = float(ratio[-1])
        return float(np.trapezoid([precision[0], *precision], [0.0, *ratio])) / reached, reached

    value, reached = area(np.ones(len(records), dtype=np.int64))
    groups, _ = split([(r.image, 0.0) for r in records])
    draws = resamples(int(groups.max()) + 1, len(records), FEW_RESAMPLES) if groups.any() else ()
    drawn = (np.array([area(weights)[0] for weights in counts[:, groups]]) for counts in draws)
    return {"area": estimate(len(rows), value, drawn), "reached": reached}


# -- compared with the same samples run cold --------------------------------------------------


def tokens(records: Sequence[SampleRecord]) -> Figures:
    """Prompt tokens of all samples, and where those that were not computed came from.

    ``beyond`` is what our caches saved over vLLM's own prefix cache: tokens the baseline computed less tokens this
    run computed. None without a baseline.
    """

    def split_up(of: Sequence[SampleRecord | Cold]) -> tuple[int, int, int]:
        prompt, computed = sum(r.prompt_tokens for r in of), sum(r.computed_tokens for r in of)
        return prompt, computed, prompt - computed

    cold = [r.cold for r in records if r.cold is not None]
    own, base = split_up(records), split_up(cold) if cold and len(cold) == len(records) else (None, None, None)
    names = ("prompt", "computed", "not_computed")
    return {
        **dict(zip(names, own, strict=True)),
        "from_store": sum(r.loaded_tokens or 0 for r in records),
        "from_prefix_cache": sum(r.prefix_tokens for r in records),
        **{f"baseline_{name}": value for name, value in zip(names, base, strict=True)},
        "beyond": None if base[1] is None else base[1] - own[1],
    }


def saved(records: Iterable[SampleRecord]) -> Figures | None:
    """What a request saved over vLLM's prefix cache and encoder cache: cold less cached, sample by sample.

    The lookup is paid for in the times; recording and checks come after the answer (``after_s`` of a record). Means,
    and the median of the latency; negative where the cache costs more than it saves. None without a baseline.
    """
    pairs = [(r, r.cold) for r in records if r.cold is not None]
    if not pairs:
        return None
    seconds = [(r.image, c.latency_s - r.latency_s) for r, c in pairs]
    first = [(r.image, c.ttft_s - r.ttft_s) for r, c in pairs if c.ttft_s is not None and r.ttft_s is not None]
    return {
        "tokens": mean([(r.image, c.computed_tokens - r.computed_tokens) for r, c in pairs]),
        "latency_s": mean(seconds),
        "latency_p50_s": median(seconds),
        "ttft_s": mean(first),
    }


def noise_floor(cold: Iterable[Cold]) -> Figures | None:
    """The shares of prompts whose two answers, and whose generated tokens, differ on the baseline engine.

    The first time a prompt is answered as the cold pass goes, prefix cache and all; the second time under a cache salt
    of its own, so that vLLM computes all of it again. A difference from the cold answers below these shares says
    nothing. None where no prompt was asked twice.
    """
    twice = [(c, c.again_text) for c in cold if c.again_text is not None]
    if not twice:
        return None
    return {
        "answers": share([(c.image, not answers_match(c.text, again)) for c, again in twice]),
        "tokens": share([(c.image, c.token_ids != c.again_token_ids) for c, _ in twice]),
    }


def against_cold(records: Sequence[SampleRecord]) -> Figures | None:
    """Hits compared with the same samples run cold; None without a baseline."""
    pairs = [(r, r.cold) for r in records if r.cold is not None]
    if not pairs:
        return None
    hits = [(r, c) for r, c in pairs if r.hit and r.applied]
    exact = [(r, c) for r, c in pairs if not r.applied or r.exactness == "exact"]  # sent these very bytes
    timed = [(r, c.ttft_s, r.ttft_s) for r, c in hits if r.ttft_s is not None and c.ttft_s is not None]
    judged = [(r.match, c.match) for r, c in hits if r.match is not None and c.match is not None]
    return {
        "n": len(hits),
        "cold_accuracy_on_hits": accuracy(c for _, c in hits),
        "agreement": share([(r.image, answers_match(r.text, c.text)) for r, c in hits]),
        "agreement_all": share([(r.image, answers_match(r.text, c.text)) for r, c in pairs]),
        "identical_tokens": share([(r.image, r.token_ids == c.token_ids) for r, c in exact]),
        "wrong_hits": sum(not now and before for now, before in judged),
        "gained_hits": sum(now and not before for now, before in judged),
        "speedup": median([(r.image, c.latency_s / r.latency_s) for r, c in hits if r.latency_s > 0]),
        "same_tokens": share([(r.image, r.token_ids == c.token_ids) for r, c in hits]),
        # Cold over cached time to first token, the lookup left out.
        "first_token": median([(r.image, before / (now - r.lookup_s)) for r, before, now in timed if now > r.lookup_s]),
        "saved_tokens": mean([(r.image, c.computed_tokens - r.computed_tokens) for r, c in hits]),
        "consistency": consistency(records, cold=True),
    }


# -- the figures of a whole run --------------------------------------------------


def _tier_row(tier: str, chosen: Sequence[SampleRecord], records: Sequence[SampleRecord]) -> Figures:
    members = {id(r) for r in chosen}
    return {
        "tier": tier,
        "n": len(chosen),
        "rate": len(chosen) / max(1, len(records)),
        "share": share([(r.image, id(r) in members) for r in records]),
        "latency": times((r.image, r.latency_s) for r in chosen),
        "ttft": times((r.image, r.ttft_s) for r in chosen),
        "accuracy": accuracy(chosen) if tier in ("miss", "all") else accuracy_on_hits(chosen),
        "saved": saved(chosen),
    }


def summarise(
    records: Sequence[SampleRecord],
    cold: Sequence[Cold] = (),
    *,
    bytes_on_disk: int = 0,
    refused: int = 0,
    interrupted: bool = False,
    skipped: tuple[str, ...] = (),
    faults: Mapping[str, int] | None = None,
) -> Figures:
    """The figures of a run as ``--summary-out`` writes them: an `Estimate` and `Times` are objects of their fields.

    ``donor_agreement`` is the share of full hits whose answer equals the donor's stored one. In dry-run mode, where
    each request was answered as it came, it estimates what a live run would get right without having run one.

    Args:
        records: every sample that was answered, in order; may be empty.
        cold: every answer of the cold pass; more than the records have when the run was interrupted.
        refused: approximate matches that were turned down after the search.
        bytes_on_disk: what the cache folders hold now.
        interrupted: whether the run was stopped before its last sample.
        skipped: ids of samples that were left out, since an image has no file.
        faults: counted faults inside the cache, by name.
    """
    hits, misses = [r for r in records if r.hit], [r for r in records if not r.hit]
    names = sorted({r.provenance for r in hits})
    rows = [_tier_row(name, [r for r in hits if r.provenance == name], records) for name in names]
    counts = Counter((tier, status) for r in records for tier, status in r.statuses.items())
    donors = [(r.image, answers_match(r.text, r.donor_answer)) for r in hits if r.donor_answer is not None]
    found = {
        "samples": len(records),
        "hits": len(hits),
        "hit_rate": len(hits) / max(1, len(records)),
        "hit_share": share([(r.image, r.hit) for r in records]),
        "tiers": [*rows, _tier_row("miss", misses, records), _tier_row("all", records, records)],
        "lookup": times((r.image, r.lookup_s) for r in records),
        "after": times((r.image, r.after_s) for r in records),
        "tokens": tokens(records),
        "accuracy": accuracy(records),
        "accuracy_on_hits": accuracy_on_hits(hits),
        "accuracy_on_misses": accuracy(misses),
        "wrong_hit_share": wrong_hit_share(records),
        "consistency": consistency(records),
        "chr_area": chr_area(records),
        "statuses": {tier: {str(s): counts[tier, s] for s in Status} for r in records for tier in r.statuses},
        "donor_agreement": share(donors),
        "refused": refused,
        "bytes_on_disk": bytes_on_disk,
        "baseline_latency": times((c.image, c.latency_s) for c in cold) if cold else None,
        "baseline_ttft": times((c.image, c.ttft_s) for c in cold) if cold else None,
        "baseline_accuracy": accuracy(cold) if cold else None,
        "against_cold": against_cold(records),
        "saved": saved(records),
        "noise_floor": noise_floor(cold),
        "interrupted": interrupted,
        "gqa": gqa(records),
        "skipped": skipped,
        "faults": faults or {},
    }
    plain: Figures = json.loads(json.dumps(found, default=asdict))
    return plain
