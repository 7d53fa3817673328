"""Keeps the share of requests that approximate hits answer wrongly under a bound, on traffic it was not fitted on.

Every approximate match that no guard objects to falls into a cell: the tiers it rests on, whether it brings the whole
prompt, and a band of the chance that it is wrong, by any of its scores, which the calibration or a cautious formula
estimates from each. A cell knows how often its matches turned out wrong. Two sources tell: checked hits, and refused
matches, whose own answer comes from the engine anyway and is compared with the donor's at no cost. The estimate itself
is a prior that is worth a few observations. So evidence is shared between entries, and the first hit needs no history
of its entry.

The bound is a budget: N requests at rate e allow e N wrong answers. What was spent is what checks found wrong, plus the
expected number among hits that were not checked, plus some standard deviations of that number: each cell's is beta-
binomial, so they cover chance as well as what is not known well. The risk of a cell is that of all its observations or
that of the recent ones, whichever is greater: traffic may shift, and an estimate that happens to be low is the one that
would be used. So a cell that turns out worse than it looked is charged for its past as well, and more checks buy more
hits. Cells are opened in the order of their risk until the spending they would bring meets what is left, sooner where a
calibration estimates, since the formula may be too hopeful; and no hit is served that the budget does not cover.

Hits are checked more often where a cell is new, and where the budget is a few wrong answers, which a thin sample would
not see: wrong answers come in bursts, and then no estimate from other traffic covers them. A text that is served a
second time is checked always: after that it has an answer of its own, and a wrong one is not served again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from semkv.keys import digest
from semkv.tiers.policies import Calibration, Decision, ServedTexts, chance
from semkv.types import Entry, Match, Request, Score

FLOOR = 0.6
BANDS = 20  # of estimated risks
_WORST, _BEST = 1.0, -7.0  # log odds of the first band and of the last

# Chosen on the streams of bench/quality.py, the ones that docs/quality.md gives figures of.
_PRIOR = 8.0  # observations that the prior is worth
_SPREAD = 2.5  # standard deviations of the number of wrong answers that are kept free
_SPREAD_FITTED = 3.0  # the same where a calibration estimates, which keeps them of less
_EARLY = 20.0  # about so many hits of a cell are checked early on
_FOUND = 3.0  # wrong answers that checks should find before as many as the budget allows have been given
_LEAST_RISK = 0.002
_MOST_RISK = 0.3  # no match more likely wrong than this is served, whatever the budget
_HORIZON = 0.3  # what is left is spent over so large a share of the requests so far
_WINDOW = 20_000.0  # requests after which the past counts half
_MEMORY = 4000.0  # observations of a band after which its past counts half
_RECENT = 100.0  # the same for its recent past
_RECENT_PRIOR = 25.0  # observations that the long past is worth beside the recent one
_REVIEW = 50  # requests between two reviews of what is open

ArmKey = tuple[str, bool]


def _zeros() -> list[float]:
    return [0.0] * BANDS


@dataclass(slots=True)
class Arm:
    """Counts by band of estimated risk, of the matches of one tier.

    Attributes:
        asked: requests whose first match fell here.
        unchecked: hits that were served and not checked.
        seen, wrong: comparisons, and how many of them came out wrong.
        lately, wrong_lately: the same, with a short memory.
        checks: comparisons of served hits.
    """

    asked: list[float] = field(default_factory=_zeros)
    unchecked: list[float] = field(default_factory=_zeros)
    seen: list[float] = field(default_factory=_zeros)
    wrong: list[float] = field(default_factory=_zeros)
    lately: list[float] = field(default_factory=_zeros)
    wrong_lately: list[float] = field(default_factory=_zeros)
    checks: list[float] = field(default_factory=_zeros)


@dataclass(slots=True)
class _View:
    """What follows from an arm's counts: the estimated risk of each band, and whether it is open."""

    risk: list[float]
    open: list[bool] = field(default_factory=lambda: [False] * BANDS)


def band(risk: float) -> int:
    """The band of an estimated risk; higher ones are safer."""
    odds = math.log(max(risk, 1e-9) / max(1.0 - risk, 1e-9))
    return max(0, min(BANDS - 1, int((_WORST - odds) / (_WORST - _BEST) * BANDS)))


def cautious(score: float) -> float:
    """The estimate without a calibration: even odds at cosine .85, one in fifty at .98."""
    return chance(30.0 * (0.85 - score))


def falling(values: list[float], weights: list[float]) -> list[float]:
    """The closest values that do not increase, by pooling adjacent violators."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        total, size, count = value * weight, weight, 1
        while blocks and blocks[-1][0] / blocks[-1][1] < total / size:
            before = blocks.pop()
            total, size, count = total + before[0], size + before[1], count + before[2]
        blocks.append((total, size, count))
    return [total / size for total, size, count in blocks for _ in range(count)]


# The chance of a wrong answer in each band before any observation.
_PRIORS = [max(_LEAST_RISK, chance(_WORST + (place + 0.5) * (_BEST - _WORST) / BANDS)) for place in range(BANDS)]


class Bounded:
    """Accepts what the budget covers. Any thread may call any method.

    Args:
        max_error_rate: bound on wrong approximate answers per request.
        calibration: estimates the risk in the tiers in ``tiers``; None takes `cautious`.
        tiers: status keys whose scores are cosines of the calibrated encoder.
    """

    learns = True
    floor: float | None = FLOOR

    def __init__(
        self, max_error_rate: float, calibration: Calibration | None = None, tiers: frozenset[str] = frozenset()
    ) -> None:
        self._rate, self._calibration, self._tiers = max_error_rate, calibration, tiers
        self._arms: dict[ArmKey, Arm] = {}
        self._views: dict[ArmKey, _View] = {}
        self._scale = digest("bands", repr(calibration), str(BANDS))
        self._requests = 0.0
        self._known = 0.0  # wrong answers that checks found
        self._guessed = 0.0  # expected wrong answers among unchecked hits
        self._variance = 0.0  # of their number: by chance, and because the risks are estimates
        self._until_review = 0
        self._latest: Request | None = None  # whose first match was counted; with several threads some count twice
        self._texts = ServedTexts()
        self._lock = threading.Lock()

    def arrived(self) -> None:
        with self._lock:
            self._requests += 1
            self._latest = None
            if self._requests > _WINDOW:
                self._halve()
            self._until_review -= 1
            if self._until_review <= 0:
                self._review()

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
        with self._lock:
            key, place = self._cell(match)
            arm = self._arms[key]
            if request is not self._latest:
                arm.asked[place] += 1
                self._latest = request
            risk = self._views[key].risk[place]
            if not self._views[key].open[place] or match.score < FLOOR:
                return Decision(False, f"risk {risk:.4f}: not open", risk)
            if self._spent(key, risk, risk) > self._rate * self._requests:
                return Decision(False, f"risk {risk:.4f}: beyond the budget", risk)
            arm.unchecked[place] += 1
            self._guessed += risk
            self._variance += risk
            again = self._texts.again(request)
            check = max(_EARLY / (_EARLY + arm.checks[place]), _FOUND / (self._rate * self._requests))
            check = 1.0 if again else min(1.0, check)
            return Decision(True, f"risk {risk:.4f}", risk, check)

    def observe(self, match: Match, *, correct: bool, served: bool) -> None:
        with self._lock:
            key, place = self._cell(match)
            arm = self._arms[key]
            _count_in(arm.seen, arm.wrong, place, correct, _MEMORY)
            _count_in(arm.lately, arm.wrong_lately, place, correct, _RECENT)
            if served:
                arm.checks[place] += 1
                counted = min(1.0, arm.unchecked[place])
                arm.unchecked[place] -= counted
                self._guessed -= counted * self._views[key].risk[place]
                self._known += not correct
            if not correct and served:
                self._review()

    # -- what the counts say ------------------------------------------------------------------------------------

    def _cell(self, match: Match) -> tuple[ArmKey, int]:
        """Arm and band of a match; the arm is made where it is new."""
        key = ("+".join(sorted(score.tier for score in match.scores)), match.whole)
        if key not in self._arms:
            self._arms[key] = Arm()
            self._review()
        right = math.prod(1.0 - self._estimate(score, match) for score in match.scores)
        return key, band(1.0 - right)

    def _estimate(self, score: Score, match: Match) -> float:
        """The chance of a wrong answer by one of a match's scores."""
        calibration = self._fitted((score.tier, match.whole))
        return cautious(score.cosine) if calibration is None else calibration.risk(score.cosine, match.wording)

    def _fitted(self, key: ArmKey) -> Calibration | None:
        """The calibration that estimates an arm's risks; None where `cautious` does, for a part of a match too."""
        tier, whole = key
        return self._calibration if tier in self._tiers and whole else None

    def _spent(self, key: ArmKey, more: float, allowed: float) -> float:
        """The wrong answers so far and ``more`` expected ones, with room for chance and for what is not known well.

        Where a calibration estimates, the room is for those; `cautious` may be too hopeful, and keeps it for all that
        are ``allowed``.
        """
        spread, doubtful = (_SPREAD_FITTED, more) if self._fitted(key) else (_SPREAD, allowed)
        return self._known + self._guessed + more + spread * math.sqrt(self._variance + doubtful)

    def _review(self) -> None:
        """Estimate every band anew, charge the past by it, and open the bands that the budget covers."""
        self._until_review = _REVIEW
        self._guessed = self._variance = 0.0
        for key, arm in self._arms.items():
            weights = [_PRIOR + seen for seen in arm.seen]
            values = [(r * _PRIOR + bad) / n for r, bad, n in zip(_PRIORS, arm.wrong, weights, strict=True)]
            long = falling(values, weights)
            weights_lately = [_RECENT_PRIOR + seen for seen in arm.lately]
            lately = [
                (r * _RECENT_PRIOR + bad) / n for r, bad, n in zip(long, arm.wrong_lately, weights_lately, strict=True)
            ]
            risks = [max(pair) for pair in zip(long, falling(lately, weights_lately), strict=True)]
            self._views[key] = _View(risks)
            self._charge(risks, weights, arm.unchecked)
        horizon = max(_HORIZON * self._requests, 500.0)
        budget, more = self._rate * (self._requests + horizon), 0.0
        for risk, place, key in sorted(self._bands(), key=lambda b: (b[0], -b[1])):
            if risk <= _MOST_RISK and self._spent(key, more, self._rate * horizon) <= budget:
                self._views[key].open[place] = True
                more += risk * self._arms[key].asked[place] / max(self._requests, 200.0) * horizon

    def _charge(self, risks: list[float], weights: list[float], unchecked: list[float]) -> None:
        """Add what an arm's unchecked hits cost; bands that were pooled share one estimate, and its error."""
        for risk, places in groupby(range(BANDS), key=lambda place: risks[place]):
            pooled = list(places)
            hits, known = sum(unchecked[p] for p in pooled), sum(weights[p] for p in pooled)
            self._guessed += hits * risk
            self._variance += hits * risk + hits * hits * risk * (1.0 - risk) / (known + 1.0)

    def _bands(self) -> Iterator[tuple[float, int, ArmKey]]:
        for key, view in self._views.items():
            for place, risk in enumerate(view.risk):
                yield risk, place, key

    def _halve(self) -> None:
        self._requests /= 2
        self._known /= 2
        for arm in self._arms.values():
            arm.asked = [n / 2 for n in arm.asked]
            arm.unchecked = [n / 2 for n in arm.unchecked]

    # -- across restarts ----------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Any]:
        with self._lock:
            arms = [{"key": list(key), **asdict(arm)} for key, arm in self._arms.items()]
            return {"requests": self._requests, "known": self._known, "bands": self._scale, "arms": arms}

    def restore(self, state: Mapping[str, Any]) -> None:
        try:
            if state["bands"] != self._scale:
                raise ValueError("learned under another calibration")
            requests, known = _count(state["requests"]), _count(state["known"])
            arms = {
                _read_key(row["key"]): Arm(*(_counts(row[name]) for name in Arm.__slots__)) for row in state["arms"]
            }
        except (KeyError, TypeError) as error:
            raise ValueError(f"state of the bounded policy: {error!r}") from error
        with self._lock:
            self._requests, self._known, self._arms, self._views = requests, known, arms, {}
            self._review()


def _read_key(value: list[Any]) -> ArmKey:
    tier, whole = value
    return str(tier), bool(whole)


def _count_in(seen: list[float], wrong: list[float], place: int, correct: bool, memory: float) -> None:
    """One more comparison; beyond ``memory`` of them the past counts half."""
    seen[place] += 1
    wrong[place] += not correct
    if seen[place] > memory:
        seen[place] /= 2
        wrong[place] /= 2


def _count(value: Any) -> float:
    number = float(value)
    if not 0.0 <= number < math.inf:
        raise ValueError(f"a count cannot be {number}")
    return number


def _counts(values: list[Any]) -> list[float]:
    if len(values) != BANDS:
        raise ValueError(f"{BANDS} bands expected")
    return [_count(value) for value in values]
