"""How right the answers are: accuracy, GQA's consistency, wrong hits, and precision against the cache-hit ratio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_lab.metrics.intervals import Estimate, mean, share, statistic
from semkv_lab.metrics.records import Cold, SampleRecord, answers_match

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_CHR_DRAWS = 500


@dataclass(frozen=True, slots=True)
class ChrArea:
    """`chr_area`: the area, and the largest cache-hit ratio it was averaged over (0 without a hit)."""

    area: Estimate
    reached: float


def accuracy(records: Iterable[SampleRecord]) -> Estimate:
    """Accuracy over the records that have an expected answer."""
    return share([(r.image, r.match) for r in records if r.match is not None])


def given(record: SampleRecord) -> str | None:
    """What a hit gave; in dry-run mode what it would have given, None where only a part of the donor stood in."""
    return record.text if record.applied else record.donor_answer


def accuracy_on_hits(records: Iterable[SampleRecord]) -> Estimate:
    """Accuracy of what hits gave (`given`), over those of which it is known and that have an expected answer."""
    hits = [(r, text) for r in records if r.hit and (text := given(r)) is not None]
    return share([(r.image, answers_match(text, r.answer)) for r, text in hits if r.answer is not None])


def cold_accuracy(cold: Iterable[Cold]) -> Estimate:
    """Accuracy over the cold answers that have an expected answer."""
    return share([(c.image, c.match) for c in cold if c.match is not None])


def consistency(records: Sequence[SampleRecord], *, cold: bool = False) -> Estimate:
    """GQA's consistency (Hudson and Manning, GQA, CVPR 2019): do the answers contradict one another?

    For each question that was answered correctly: the share of the questions it entails that were answered correctly
    too. The mean of these shares over questions. As in GQA's own evaluation script, a question entails neither itself
    nor counts where it entails nothing; entailed questions that the run did not ask are left out.

    Args:
        records: those of a run.
        cold: of the cold answers instead.
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


def stands_for(record: SampleRecord) -> bool | None:
    """Whether a hit gave what the request would have got without it; None for a miss and where nothing tells.

    Compared with the cold answer where there is one, else with the expected answer. A dry-run hit compares the donor's
    answer with the request's own.
    """
    if not record.hit:
        return None
    if not record.applied:
        return None if record.donor_answer is None else answers_match(record.donor_answer, record.text)
    return answers_match(record.text, record.cold.text) if record.cold is not None else record.match


def wrong_hit(record: SampleRecord) -> bool | None:
    """Whether the cache spoiled this answer: a hit that is wrong where the cold answer was right. False for a miss,
    None for a hit that nothing judges.

    Without an expected answer a hit that differs from the cold one is wrong; without a cold answer, one that differs
    from the expected answer, so that the model's own mistakes count too. In dry-run mode the donor's answer is judged,
    and the request's own answer is the cold one.
    """
    if not record.hit:
        return False
    if not record.applied:
        if record.donor_answer is None:
            return None
        if record.answer is None:
            return not answers_match(record.donor_answer, record.text)
        return bool(record.match) and not answers_match(record.donor_answer, record.answer)
    if record.cold is None:
        return None if record.match is None else not record.match
    if record.match is None or record.cold.match is None:
        return not answers_match(record.text, record.cold.text)
    return not record.match and record.cold.match


def wrong_hit_share(records: Sequence[SampleRecord]) -> Estimate:
    """Wrong hits a request, over the requests that can be judged.

    A miss counts where a hit would have been judged: all the same a data set with few expected answers has as many
    hits among those counted as among all.
    """
    dry = any(r.hit and not r.applied for r in records)
    judged = [
        (r.image, wrong)
        for r in records
        if (wrong := wrong_hit(r)) is not None and (r.hit or dry or r.match is not None or r.cold is not None)
    ]
    return share(judged)


def chr_curve(records: Sequence[SampleRecord]) -> tuple[Floats, Floats]:
    """Precision against cache-hit ratio, as the threshold on the score falls.

    At a threshold t the cache-hit ratio is the share of all requests that hit with a score of at least t, and the
    precision is the share of these hits that give what the request would have got without (`stands_for`). Hits that
    nothing can judge are left out; requests that missed count in the ratio only. Exact hits have score 1.

    Returns:
        Ratios, ascending, and precisions: one point a distinct score, [n] each.
    """
    import numpy as np

    judged = [
        (r.score if r.score is not None else 1.0, bool(good)) for r in records if (good := stands_for(r)) is not None
    ]
    return _curve(np.array([s for s, _ in judged]), np.array([g for _, g in judged], dtype=np.float64), len(records))


def _curve(scores: Floats, good: Floats, requests: int) -> tuple[Floats, Floats]:
    import numpy as np

    if not len(scores):
        return np.array([]), np.array([])
    order = np.argsort(-scores, kind="stable")
    scores, good = scores[order], good[order]
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # all hits of one score come together
    return (last + 1) / requests, good.cumsum()[last] / (last + 1)


def _area(ratio: Floats, precision: Floats) -> float:
    """The mean of the precision over the ratios up to the largest, by trapezoids; level before the first point."""
    import numpy as np

    if not len(ratio):
        return float("nan")
    x, y = np.append(0.0, ratio), np.append(precision[0], precision)
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) / x[-1])


def chr_area(records: Sequence[SampleRecord]) -> ChrArea:
    """P-CHR AUC: the area under precision against cache-hit ratio.

    Introduced by Baral et al., Closing the Calibration Gap in Semantic Caching, 2026, arXiv:2606.19719.

    There every request has a score and the ratio runs to 1. Here a request whose best donor stayed under the threshold
    has none, so the curve ends at the run's hit rate: the area is divided by that ratio, which is given beside it. 1
    means that every hit was right at every threshold from the run's own upwards. For a whole curve run with a low
    threshold, ``--disable-guards`` and ``--cache-mode dry-run``. Only areas that reach a like ratio can be compared.
    """
    import numpy as np

    judged = [stands_for(r) for r in records]
    ratio, precision = chr_curve(records)
    if not len(ratio):
        return ChrArea(Estimate(0, None), 0.0)
    scores = np.array([1.0 if r.score is None else r.score for r in records])
    hits = np.array([g is not None for g in judged])
    good = np.array([bool(g) for g in judged], dtype=np.float64)

    def area(rows: npt.NDArray[np.int64]) -> float:
        there = rows[hits[rows]]
        return _area(*_curve(scores[there], good[there], len(rows)))

    found = statistic([r.image for r in records], area, _area(ratio, precision), draws=_CHR_DRAWS)
    return ChrArea(Estimate(int(hits.sum()), found.value, found.low, found.high), float(ratio[-1]))
