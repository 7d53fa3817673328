"""Figures of a run, computed from its sample records. `COLUMNS` states each once: its name, meaning and computation.

Every figure that may vary from draw to draw comes with a 95% interval, by bootstrap over images: questions on one image
are not independent, so whole images are drawn again, not questions (the cluster bootstrap; Davison and Hinkley,
Bootstrap Methods and their Application, 1997, 3.8). The seed is fixed: equal values give equal intervals.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from semkv.tiers.checking import wilson
from semkv.types import Status
from semkv_lab.samples import Cold, SampleRecord, answers_match, at, normalise_answer

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Figures = dict[str, Any]
"""Figures by name: counts, `Estimate`, `times`, and more of the same."""

RESAMPLES = 2_000
_SEED = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure over ``n`` values with its 95% interval; all None for no values, no interval from one image."""

    n: int
    value: float | None
    low: float | None = None
    high: float | None = None


def read_estimate(summary: Mapping[str, Any], path: str) -> Estimate:
    """A figure of a summary by its dotted path; empty where there is none, or something else."""
    found = at(summary, *path.split("."))
    if not isinstance(found, Mapping):
        return Estimate(0, None)
    named: list[Any] = [found.get(name) for name in ("n", "value", "low", "high")]
    are_numbers = all(isinstance(number, int | float | None) for number in named)
    if not are_numbers or not isinstance(named[0], int):
        return Estimate(0, None)
    return Estimate(*named)


def mean(values: Sequence[tuple[str, float]]) -> Estimate:
    """The mean of (image, value) pairs; empty for no pairs."""

    return _estimate(values, lambda numbers, counts: float(np.average(numbers, weights=counts)))


def median(values: Sequence[tuple[str, float]]) -> Estimate:
    """The median of (image, value) pairs; empty for no pairs."""

    def of(numbers: Floats, counts: Integers) -> float:
        below = counts.cumsum()
        places = [below.searchsorted(below[-1] / 2, side) for side in ("left", "right")]
        return float(numbers[places].mean())

    return _estimate(values, of)


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


def _estimate(
    values: Sequence[tuple[str, float]], of: Callable[[Floats, Integers], float]
) -> Estimate:
    """A figure and its percentile interval. ``of`` gets the values in ascending order, and how often each was drawn."""
    if not values:
        return Estimate(0, None)
    index: dict[str, int] = {}
    images = np.array([index.setdefault(image, len(index)) for image, _ in values])
    numbers = np.array([value for _, value in values], dtype=np.float64)
    order = np.argsort(numbers, kind="stable")
    images = images[order]
    numbers = numbers[order]
    once = np.ones(len(values), np.int64)
    found = Estimate(len(values), of(numbers, once))
    if len(index) == 1:
        return found
    rng = np.random.default_rng(_SEED)
    even = np.full(len(index), 1 / len(index))
    drawn = []
    for _ in range(RESAMPLES):
        counts = rng.multinomial(len(index), even)
        drawn.append(of(numbers, counts[images]))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return replace(found, low=float(low), high=float(high))


def times(values: Iterable[float | None]) -> Figures:
    """Median and 95th percentile of the seconds that are known; None where none is."""
    known = [seconds for seconds in values if seconds is not None]
    middle, late = np.percentile(known, [50, 95]).tolist() if known else (None, None)
    return {
        "n": len(known),
        "p50_s": middle,
        "p95_s": late,
    }


# -- how right the answers are ------------------------------------------------------------


def accuracy(answers: Iterable[SampleRecord | Cold]) -> Estimate:
    """Accuracy over the answers that have an expected one."""
    return share([(a.image, a.match) for a in answers if a.match is not None])


def given(record: SampleRecord) -> str | None:
    """What a hit gave; in dry-run mode what it would have given, None where only a part of the donor stood in."""
    return record.text if record.applied else record.donor_answer


def accuracy_on_hits(records: Iterable[SampleRecord]) -> Estimate:
    """Accuracy of what hits gave (`given`), over those of which it is known and that have an expected answer."""
    judged = []
    for record in records:
        text = given(record)
        if record.hit and text is not None and record.answer is not None:
            judged.append((record.image, answers_match(text, record.answer)))
    return share(judged)


def consistency(records: Sequence[SampleRecord]) -> Estimate:
    """GQA's consistency (Hudson and Manning, GQA, CVPR 2019): do the answers contradict one another?

    The mean, over the questions that were answered correctly, of the share of the questions each entails that were
    answered correctly too; those that the run did not ask are left out.
    """
    outcome = {r.sample_id: r.match for r in records}
    scores = []
    for record in records:
        # The loader leaves a question's own id out: that of a repeat in a trace is another.
        asked = [outcome.get(name) for name in record.entailed if name != record.sample_id]
        judged = [right for right in asked if right is not None]
        if record.match and judged:
            scores.append((record.image, sum(judged) / len(judged)))
    return mean(scores)


def distribution(records: Sequence[SampleRecord]) -> float | None:
    """GQA's: the chi-square of the answers against the expected ones, by global group and weighted by its size.

    0 where both are alike, None without groups. Answers that nothing expects do not count, as in GQA's script.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for r in records:
        if r.group and r.answer is not None:
            groups.setdefault(r.group, []).append(
                (normalise_answer(r.answer), normalise_answer(r.text))
            )
    if not groups:
        return None
    weighted = 0.0
    for answers in groups.values():
        expected, found = (Counter(column) for column in zip(*answers, strict=True))
        off = [(found[answer] - count) ** 2 / count for answer, count in expected.items()]
        weighted += len(answers) * sum(off)
    return weighted / sum(map(len, groups.values()))


def by_type(records: Sequence[SampleRecord]) -> dict[str, Estimate]:
    """GQA's accuracy by structural and semantic type, such as ``structural verify``, and of ``binary`` and ``open``
    questions."""
    types: dict[str, list[SampleRecord]] = {}
    for r in records:
        if r.types:
            form = "open" if r.types[0] == "query" else "binary"
            for name in (f"structural {r.types[0]}", f"semantic {r.types[1]}", form):
                types.setdefault(name, []).append(r)
    return {name: accuracy(of_it) for name, of_it in sorted(types.items())}


def without(record: SampleRecord) -> str | None:
    """What the request would have got without its hit, where that is known: the cold answer, of a dry run its own."""
    if not record.applied:
        return record.text
    return None if record.cold is None else record.cold.text


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


# -- a whole run ------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a run has: the samples that were answered, in order, and every answer of the cold pass."""

    records: Sequence[SampleRecord]
    cold: Sequence[Cold] = ()

    @cached_property
    def hits(self) -> list[SampleRecord]:
        return [r for r in self.records if r.hit]

    @cached_property
    def pairs(self) -> list[tuple[SampleRecord, Cold]]:
        """Samples that were answered both ways."""
        return [(r, r.cold) for r in self.records if r.cold is not None]

    @cached_property
    def hit_pairs(self) -> list[tuple[SampleRecord, Cold]]:
        """Of them, those to which a donor's prompt was sent."""
        return [(r, c) for r, c in self.pairs if r.hit and r.applied]

    @cached_property
    def timed(self) -> list[tuple[SampleRecord, float, float]]:
        """Samples with a time to their first token both ways: cold, and with semkv."""
        every = [(r, c.ttft_s, r.ttft_s) for r, c in self.pairs]
        return [
            (r, before, now) for r, before, now in every if before is not None and now is not None
        ]

    @cached_property
    def twice(self) -> list[tuple[Cold, str]]:
        """Prompts that were asked twice on the baseline engine, the second time under a cache salt of their own, so
        that vLLM computed all of the prompt again. What differs here says how little a difference elsewhere means."""
        return [(c, c.again_text) for c in self.cold if c.again_text is not None]


class Column(NamedTuple):
    """A figure of a run that has an interval.

    Attributes:
        name: as the console and a report call it.
        path: its place in a summary.
        compute: the figure; empty where the run does not have it.
        unit: ``%`` of a share, ``ms`` of seconds, ``x`` of a ratio, or none.
        meaning: for a report, which leaves out those without.
    """

    name: str
    path: str
    compute: Callable[[Run], Estimate]
    unit: str = "%"
    meaning: str = ""


def _same_tokens(pairs: Iterable[tuple[SampleRecord, Cold]]) -> Estimate:
    return share([(r.image, r.token_ids == c.token_ids) for r, c in pairs])


def _saved_tokens(pairs: Iterable[tuple[SampleRecord, Cold]]) -> Estimate:
    return mean([(r.image, c.computed_tokens - r.computed_tokens) for r, c in pairs])


def _saved_latency(pairs: Iterable[tuple[SampleRecord, Cold]]) -> list[tuple[str, float]]:
    """The lookup is paid for; recording and checks come after the answer (``after_s`` of a record)."""
    return [(r.image, c.latency_s - r.latency_s) for r, c in pairs]


def _first_token(run: Run) -> Estimate:
    ratios = []
    for record, before, now in run.timed:
        served = now - record.lookup_s
        if record.hit and record.applied and served > 0:
            ratios.append((record.image, before / served))
    return median(ratios)


def _gained(run: Run) -> Estimate:
    gained = []
    for record, cold in run.pairs:
        if record.match is not None and cold.match is not None:
            is_served = record.hit and record.applied
            gained.append((record.image, is_served and record.match and not cold.match))
    return share(gained)


def _among(records: Iterable[SampleRecord], name: str) -> Estimate:
    return share([(r.image, value) for r in records if (value := getattr(r, name)) is not None])


COLUMNS = (
    Column(
        name="hit rate",
        path="hit_share",
        compute=lambda run: share([(r.image, r.hit) for r in run.records]),
        meaning="requests that found a donor",
    ),
    Column(
        name="accuracy",
        path="accuracy",
        compute=lambda run: accuracy(run.records),
        meaning="answers that are right",
    ),
    Column(
        name="accuracy on hits",
        path="accuracy_on_hits",
        compute=lambda run: accuracy_on_hits(run.hits),
        meaning="hits that are right; of a dry run what the donor answered",
    ),
    Column(
        name="wrong hits a request",
        path="wrong_hit_share",
        compute=lambda run: wrong_hit_share(run.records),
        meaning="hits that spoiled an answer which is right without them; needs --baseline",
    ),
    Column(
        name="gained hits a request",
        path="gained_hit_share",
        compute=_gained,
        meaning="hits that are right where the answer without semkv is wrong; needs --baseline",
    ),
    Column(
        name="consistency (entailed)",
        path="consistency",
        compute=lambda run: consistency(run.records),
        meaning="GQA's: of right answers, the share of entailed questions that are right too",
    ),
    Column(
        name="validity",
        path="gqa.validity",
        compute=lambda run: _among(run.records, "valid"),
    ),
    Column(
        name="plausibility",
        path="gqa.plausibility",
        compute=lambda run: _among(run.records, "plausible"),
    ),
    Column(
        name="cold: accuracy",
        path="baseline_accuracy",
        compute=lambda run: accuracy(run.cold),
    ),
    Column(
        name="hits run cold: accuracy",
        path="against_cold.cold_accuracy_on_hits",
        compute=lambda run: accuracy(c for _, c in run.hit_pairs),
    ),
    Column(
        name="hits: same answer as cold",
        path="against_cold.agreement",
        compute=lambda run: share(
            [(r.image, answers_match(r.text, c.text)) for r, c in run.hit_pairs]
        ),
        meaning="hits with the answer that came without semkv",
    ),
    Column(
        name="hits: same tokens as cold",
        path="against_cold.same_tokens",
        compute=lambda run: _same_tokens(run.hit_pairs),
        meaning="hits with the tokens that came without semkv",
    ),
    Column(
        name="hits: tokens saved",
        path="against_cold.saved_tokens",
        unit="",
        compute=lambda run: _saved_tokens(run.hit_pairs),
        meaning="prompt tokens that a hit saved over the cold run, mean",
    ),
    Column(
        name="hits: cold TTFT / cached, without lookup",
        path="against_cold.first_token",
        unit="x",
        compute=_first_token,
        meaning="cold time to first token over a hit's without the lookup, median",
    ),
    Column(
        name="hits: cold latency / cached",
        path="against_cold.speedup",
        unit="x",
        compute=lambda run: median(
            [(r.image, c.latency_s / r.latency_s) for r, c in run.hit_pairs if r.latency_s > 0]
        ),
        meaning="cold latency over a hit's with its lookup, median",
    ),
    Column(
        name="exact prompts: tokens equal cold",
        path="against_cold.identical_tokens",
        compute=lambda run: _same_tokens(
            (r, c) for r, c in run.pairs if not r.applied or r.exactness == "exact"
        ),
    ),
    Column(
        name="saved a request: tokens",
        path="saved.tokens",
        unit="",
        compute=lambda run: _saved_tokens(run.pairs),
        meaning="prompt tokens that semkv's caches saved, mean",
    ),
    Column(
        name="saved a request: latency, mean",
        path="saved.latency_s",
        unit="ms",
        compute=lambda run: mean(_saved_latency(run.pairs)),
        meaning="time that semkv's caches saved, lookup paid for",
    ),
    Column(
        name="saved a request: TTFT, mean",
        path="saved.ttft_s",
        unit="ms",
        compute=lambda run: mean([(r.image, before - now) for r, before, now in run.timed]),
    ),
    Column(
        name="noise floor: answers differ",
        path="noise_floor.answers",
        compute=lambda run: share(
            [(c.image, not answers_match(c.text, again)) for c, again in run.twice]
        ),
    ),
    Column(
        name="noise floor: tokens differ",
        path="noise_floor.tokens",
        compute=lambda run: share(
            [(c.image, c.token_ids != c.again_token_ids) for c, _ in run.twice]
        ),
    ),
    Column(
        name="answer equals the donor's",
        path="donor_agreement",
        compute=lambda run: share(
            [
                (r.image, answers_match(r.text, r.donor_answer))
                for r in run.hits
                if r.donor_answer is not None
            ]
        ),
    ),
)
"""Every figure with an interval, in the order in which it is shown. Cold is the same sample without semkv, on vLLM
with its prefix cache and encoder cache; what is saved is cold less cached, and negative where the cache costs more than
it saves. The agreement with the donor estimates, in dry-run mode, what a live run would get right."""


def tokens(records: Sequence[SampleRecord]) -> Figures:
    """Prompt tokens of all samples, and where those that were not computed came from.

    ``beyond`` is what our caches saved over vLLM's own prefix cache: tokens the baseline computed less tokens this
    run computed. None without a baseline.
    """

    def split_up(of: Sequence[SampleRecord | Cold]) -> tuple[int, int, int]:
        prompt = sum(r.prompt_tokens for r in of)
        computed = sum(r.computed_tokens for r in of)
        return prompt, computed, prompt - computed

    cold = [r.cold for r in records if r.cold is not None]
    own = split_up(records)
    base = split_up(cold) if cold and len(cold) == len(records) else (None, None, None)
    names = ("prompt", "computed", "not_computed")
    return {
        **dict(zip(names, own, strict=True)),
        "from_store": sum(r.loaded_tokens or 0 for r in records),
        "from_prefix_cache": sum(r.prefix_tokens for r in records),
        **{f"baseline_{name}": value for name, value in zip(names, base, strict=True)},
        "beyond": None if base[1] is None else base[1] - own[1],
    }


def _tier_row(
    tier: str, chosen: Sequence[SampleRecord], records: Sequence[SampleRecord]
) -> Figures:
    members = {id(r) for r in chosen}
    return {
        "tier": tier,
        "n": len(chosen),
        "rate": len(chosen) / max(1, len(records)),
        "share": share([(r.image, id(r) in members) for r in records]),
        "latency": times(r.latency_s for r in chosen),
        "ttft": times(r.ttft_s for r in chosen),
        "accuracy": accuracy(chosen) if tier in ("miss", "all") else accuracy_on_hits(chosen),
        "saved": {"latency_p50_s": median(_saved_latency(Run(chosen).pairs))},
    }


def _tier_rows(run: Run) -> list[Figures]:
    """A row for each tier that hit, one for the misses, and one for all."""
    names = sorted({r.provenance for r in run.hits})
    chosen = {name: [r for r in run.hits if r.provenance == name] for name in names}
    chosen["miss"] = [r for r in run.records if not r.hit]
    chosen["all"] = list(run.records)
    return [_tier_row(name, of_it, run.records) for name, of_it in chosen.items()]


def _statuses(records: Sequence[SampleRecord]) -> Figures:
    """By tier, how often it had each status."""
    counts = Counter((tier, status) for r in records for tier, status in r.statuses.items())
    return {tier: {str(status): counts[tier, status] for status in Status} for tier, _ in counts}


def summarise(
    records: Sequence[SampleRecord],
    cold: Sequence[Cold] = (),
    **more: Any,
) -> Figures:
    """The figures of a run as ``--summary-out`` writes them: an `Estimate` is an object of its fields.

    ``cold`` has every answer of the cold pass, more than the records have where a run was interrupted. ``more`` is what
    the run itself knows: ``refused`` (approximate matches that were turned down after the search), ``bytes_on_disk``,
    ``interrupted``, ``skipped`` (ids of samples without an image file), ``faults``, ``worth`` (`semkv_lab.worth`).
    """
    run = Run(records, cold)
    found = {
        "samples": len(records),
        "hits": len(run.hits),
        "hit_rate": len(run.hits) / max(1, len(records)),
        "tiers": _tier_rows(run),
        "lookup": times(r.lookup_s for r in records),
        "after": times(r.after_s for r in records),
        "tokens": tokens(records),
        "statuses": _statuses(records),
        "baseline_latency": times(c.latency_s for c in cold),
        "baseline_ttft": times(c.ttft_s for c in cold),
        "gqa": {"distribution": distribution(records), "by_type": by_type(records)},
        "refused": 0,
        "bytes_on_disk": 0,
        "interrupted": False,
        "skipped": (),
        "faults": {},
        "worth": {},
    } | more
    for column in COLUMNS:
        *groups, name = column.path.split(".")
        place: Figures = found
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = column.compute(run)
    plain: Figures = json.loads(json.dumps(found, default=asdict))
    return plain
