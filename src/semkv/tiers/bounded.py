"""Keeps the share of requests that approximate hits answer wrongly under a bound, whatever the traffic.

The bound is a budget: each request adds its rate, and a wrong answer that a check finds is paid from it. While every
hit is checked, that is exact. Once more is left than twice the reserve, a share of the hits is drawn for a check, and
one wrong answer that is found stands for those that are not. How many it stands for, and the reserve, follow from a
supermartingale: let a hit be wrong (w = 1) or right (w = 0), however it was chosen, and be checked (c = 1) with chance
q, drawn anew. With the stake k that solves ``(1 - q) exp(s) + q exp(s (1 - k)) = 1``, the product over all hits of
``exp(s (w - c k w))`` has no greater mean than 1. So with a chance of 95% the wrong answers are at every moment at most
the stakes that were lost and ``log(20) / s``, the reserve (Ville, 1939; Howard, Ramdas, McAuliffe and Sekhon,
Time-uniform Chernoff bounds via nonnegative supermartingales, 2020). Nothing is assumed of the traffic: wrong answers
may come in clusters. The stake is taken when a hit is served and given back when its check finds it right: a check that
is late, or fails, counts as one that found a wrong answer.

Which hits the budget is spent on is estimated. Every approximate match that no guard objects to falls into a cell: the
tiers it rests on, how its words differ, whether it brings the whole prompt, and a band of the chance that it is wrong,
which the calibration or a cautious formula estimates from its scores. A cell knows how often its matches turned out
wrong: checked hits tell, and refused matches, whose own answer the engine gives anyway. The estimate itself is a prior
that is worth a few observations. The risk of a cell is that of all its observations or that of the recent ones,
whichever is greater: traffic may shift. Cells are opened in the order of their risk until the wrong answers they would
bring meet what is left.

A judge's yes makes a wrong answer less likely: such a match falls into a cell of its own, where the checks count how
often the judge errs. Its no is a refusal. Where a match is refused and no judge has seen it, a judge may be asked, as
long as it has not turned out to err too often.

A text that is served a second time is checked always: after that it has an answer of its own, and a wrong one is not
served again.

What was learned outlives a restart; the budget starts empty. So a crash, a copy, or a second process on one directory
spends nothing twice.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import SystemRandom
from typing import Any

from semkv.latest import Latest
from semkv.tiers.policies import Calibration, Decider, Decision, chance
from semkv.types import Entry, Match, Request, Score
from semkv_stores.digests import digest

FLOOR = 0.6
BANDS = 20  # of estimated risks
# log odds of the first band and of the last
_WORST = 1.0
_BEST = -7.0

# The bound holds with any values; these were chosen for hits on streams of labeled pairs.
_PRIOR = 8.0  # observations that the prior is worth
_DOUBT = 0.05  # chance with which the bound may fail
_RESERVE = 2500.0  # requests whose budget is kept free, for wrong answers that no check has found
_SAVED = 4 * _RESERVE  # requests whose unused budget is kept at most
_LEAST_RISK = 0.002
_YES = 20.0  # odds of a right answer are so many times those before a judge said yes, until checks tell
_MOST_RISK = 0.3  # no match more likely wrong than this is served, whatever the budget
# The budget that is left is planned for as many further requests as this share of all so far.
_HORIZON = 0.3
_EASE = 0.5  # the open cells should need this share of it, so that what is safe is served longer
_WINDOW = 20_000.0  # requests after which those of the past count half
_MEMORY = 4000.0  # observations of a band after which its past counts half
_RECENT = 100.0  # the same for its recent past
_RECENT_PRIOR = 25.0  # observations that the long past is worth beside the recent one
_TEXTS = 65_536  # the latest ones that a hit has answered
_MOST_ARMS = 1024  # that are restored; tiers, kinds and two forms of a match make some dozens
_REVIEW = 50  # requests between two reviews of what is open

ArmKey = tuple[str, str, bool]


def _zeros() -> list[float]:
    return [0.0] * BANDS


@dataclass(slots=True)
class Arm:
    """Counts by band of estimated risk, of the matches of one tier and kind, and what follows from them."""

    asked: list[float] = field(default_factory=_zeros)  # requests whose first match fell here
    seen: list[float] = field(default_factory=_zeros)  # comparisons
    wrong: list[float] = field(default_factory=_zeros)  # those that came out wrong
    lately: list[float] = field(default_factory=_zeros)  # comparisons, with a short memory
    wrong_lately: list[float] = field(default_factory=_zeros)
    risk: list[float] = field(default_factory=_zeros, init=False)
    # Whether a band is served.
    open: list[bool] = field(default_factory=lambda: [False] * BANDS, init=False)


# Of an arm, which are kept across restarts.
_COUNTS = (
    "asked",
    "seen",
    "wrong",
    "lately",
    "wrong_lately",
)

# Kinds of doubt, in the order of a `Match.wording`.
_WORDINGS = ("other words", "other forms", "order")


def _kind(match: Match) -> str:
    """What there is to doubt in a match that no guard objects to: traps come in clusters of one kind."""
    if match.judged:
        return "judged"
    differing = dict(zip(_WORDINGS, match.wording or (), strict=False))
    if differing.get("order"):
        return "order"
    return next((kind for kind in _WORDINGS if differing.get(kind)), "same words")


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
        total = value * weight
        size = weight
        count = 1
        while blocks and blocks[-1][0] / blocks[-1][1] < total / size:
            before = blocks.pop()
            total = total + before[0]
            size = size + before[1]
            count = count + before[2]
        blocks.append((total, size, count))
    return [total / size for total, size, count in blocks for _ in range(count)]


def estimated(
    prior: Sequence[float], worth: float, seen: Sequence[float], wrong: Sequence[float]
) -> list[float]:
    """The risk of each band after some comparisons, where a prior is worth so many of them."""
    weights = [worth + count for count in seen]
    values = [
        (risk * worth + bad) / weight
        for risk, bad, weight in zip(prior, wrong, weights, strict=True)
    ]
    return falling(values, weights)


# The chance of a wrong answer in each band before any observation.
_PRIORS = [
    max(_LEAST_RISK, chance(_WORST + (place + 0.5) * (_BEST - _WORST) / BANDS))
    for place in range(BANDS)
]


class Bounded(Decider):
    """Accepts what the budget covers. Any thread may call any method.

    Args:
        max_error_rate: bound on wrong approximate answers per request.
        calibration: estimates the risk in the tiers in ``tiers``; None takes `cautious`.
        tiers: status keys whose scores are cosines of the calibrated encoder.
        judged_from: least score of a match that a judge may be asked about; None where there is no judge.
        texts: of which it is remembered that a hit has answered them, the latest ones.
    """

    learns = True
    floor = FLOOR

    def __init__(
        self,
        max_error_rate: float,
        calibration: Calibration | None = None,
        tiers: frozenset[str] = frozenset(),
        judged_from: float | None = None,
        texts: int = _TEXTS,
    ) -> None:
        self._rate = max_error_rate
        self._judged_from = judged_from
        self._calibration = calibration
        self._tiers = tiers
        self._arms: dict[ArmKey, Arm] = {}
        self._scale = digest("bands", repr(calibration), str(BANDS))
        self._requests = 0.0
        self._left = 0.0  # wrong answers that the budget still covers, before the reserve
        self._sampling = (
            False  # whether some hits were served without a check, so that the reserve is needed
        )
        self._steepness = -math.log(_DOUBT) / (max_error_rate * _RESERVE)
        self._share = min(1.0, 2.0 * -math.expm1(-self._steepness))  # of hits that are checked then
        self._until_review = 0
        # Its first match was counted. With several threads some requests count twice.
        self._latest: Request | None = None
        self._texts: Latest[str, None] = Latest(texts)
        self._random = SystemRandom()  # of no fixed seed: after a restart, too, each draw is new
        self._lock = threading.Lock()

    def arrived(self) -> None:
        with self._lock:
            self._requests += 1
            self._left = min(self._left + self._rate, self._rate * _SAVED)
            self._latest = None
            if self._requests > _WINDOW:
                self._halve()
            self._until_review -= 1
            if self._until_review <= 0:
                self._review()

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
        with self._lock:
            arm, place = self._cell(match)
            if request is not self._latest or match.judged:
                arm.asked[place] += 1
                self._latest = request
            risk = arm.risk[place]
            if match.judged is False:
                return Decision(False, "judged", risk)
            if not arm.open[place] or match.score < FLOOR:
                doubt = self._may_judge(match)
                return Decision(False, f"risk {risk:.4f}: not open", risk, doubt=doubt)
            if self._free() < 1.0:
                return Decision(False, f"risk {risk:.4f}: beyond the budget", risk)
            share = 1.0
            if not self._served_before(request) and self._left >= 2.0 * self._rate * _RESERVE:
                share = self._share
                self._sampling = True
            if self._random.random() >= share:
                return Decision(True, f"risk {risk:.4f}", risk)
            stake = self._stake(share)
            self._left -= stake
            return Decision(True, f"risk {risk:.4f}", risk, 1.0, stake)

    def _may_judge(self, match: Match) -> bool:
        """Whether a judge's yes may help: its answers to such matches have not been wrong too often."""
        asks = self._judged_from is not None and match.score >= self._judged_from
        if not asks or match.judged is not None:
            return False
        arm, place = self._cell(replace(match, judged=True))
        return arm.risk[place] <= _MOST_RISK

    def _served_before(self, request: Request) -> bool:
        """Whether a text was served before; remembers that it is now."""
        media = (segment.media_id for segment in request.media)
        text = digest(
            "text", request.namespace.tenant, request.namespace.model, request.chunk_text, *media
        )
        before = text in self._texts
        self._texts[text] = None
        return before

    def _free(self) -> float:
        """Wrong answers that may still be given."""
        return self._left - self._rate * _RESERVE * self._sampling

    def _stake(self, share: float) -> float:
        """The wrong answers that one stands for which a check finds, where a share of hits is checked."""
        return (
            -math.log1p(math.expm1(-self._steepness) / share) / self._steepness
            if share < 1.0
            else 1.0
        )

    def observe(self, match: Match, *, correct: bool, served: Decision | None) -> None:
        with self._lock:
            arm, place = self._cell(match)
            _count_in(arm.seen, arm.wrong, place, correct, _MEMORY)
            _count_in(arm.lately, arm.wrong_lately, place, correct, _RECENT)
            if served and correct:
                self._left += served.stake
            elif served:
                self._review()

    def give_back(self, served: Decision) -> None:
        """Of a hit that was none after all: no wrong answer was given."""
        with self._lock:
            self._left += served.stake

    # -- what the counts say ------------------------------------------------------------------------------------

    def _cell(self, match: Match) -> tuple[Arm, int]:
        """Arm and band of a match; the arm is made where it is new."""
        key = ("+".join(sorted(score.tier for score in match.scores)), _kind(match), match.whole)
        if key not in self._arms:
            self._arms[key] = Arm()
            self._review()
        right = math.prod(1.0 - self._estimate(score, match) for score in match.scores)
        wrong = 1.0 - right
        if match.judged:
            wrong = wrong / (wrong + _YES * right) if wrong else 0.0
        return self._arms[key], band(wrong)

    def _estimate(self, score: Score, match: Match) -> float:
        """The chance of a wrong answer by one of a match's scores."""
        # A calibration that was fitted on whole matches does not hold for a part of a prompt.
        calibration = self._calibration if score.tier in self._tiers and match.whole else None
        if calibration is None:
            return cautious(score.cosine)
        return calibration.risk(score.cosine, match.wording)

    def _review(self) -> None:
        """Estimate every band anew, and open those that the budget covers."""
        self._until_review = _REVIEW
        for arm in self._arms.values():
            long = estimated(_PRIORS, _PRIOR, arm.seen, arm.wrong)
            lately = estimated(long, _RECENT_PRIOR, arm.lately, arm.wrong_lately)
            arm.risk = [max(pair) for pair in zip(long, lately, strict=True)]
            arm.open = [False] * BANDS
        horizon = max(_HORIZON * self._requests, 500.0)
        budget = self._free() + self._rate * horizon
        more = 0.0  # wrong answers that the open cells would bring
        cells: list[tuple[float, int, Arm]] = []
        for arm in self._arms.values():
            cells += [(arm.risk[place], place, arm) for place in range(BANDS)]
        cells.sort(key=lambda cell: (cell[0], -cell[1]))
        for risk, place, arm in cells:
            if risk <= _MOST_RISK and more <= _EASE * budget:
                arm.open[place] = True
                more += risk * arm.asked[place] / max(self._requests, 200.0) * horizon

    def _halve(self) -> None:
        self._requests /= 2
        for arm in self._arms.values():
            arm.asked = [n / 2 for n in arm.asked]

    # -- across restarts ----------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Any]:
        with self._lock:
            arms = [
                {"key": list(key), **{name: getattr(arm, name) for name in _COUNTS}}
                for key, arm in self._arms.items()
            ]
            return {
                "requests": self._requests,
                "bands": self._scale,
                "arms": arms,
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        try:
            if state["bands"] != self._scale:
                raise ValueError("learned under another calibration")
            (requests,) = _counts([state["requests"]], 1)
            arms: dict[ArmKey, Arm] = {}
            if len(state["arms"]) > _MOST_ARMS:
                raise ValueError(f"{len(state['arms'])} arms")
            for row in state["arms"]:
                key = row["key"]
                if len(key) != 3:
                    raise ValueError(f"the key {key!r} of an arm")
                arms[str(key[0]), str(key[1]), bool(key[2])] = Arm(
                    *(_counts(row[name], BANDS) for name in _COUNTS)
                )
        except (KeyError, TypeError) as error:
            raise ValueError(f"state of the bounded policy: {error!r}") from error
        with self._lock:
            self._requests = requests
            self._arms = arms
            self._review()


def _count_in(
    seen: list[float], wrong: list[float], place: int, correct: bool, memory: float
) -> None:
    """One more comparison; beyond ``memory`` of them the past counts half."""
    seen[place] += 1
    wrong[place] += not correct
    if seen[place] > memory:
        seen[place] /= 2
        wrong[place] /= 2


def _counts(values: Sequence[Any], count: int) -> list[float]:
    numbers = [float(value) for value in values]
    if len(numbers) != count or not all(0.0 <= number < math.inf for number in numbers):
        raise ValueError(f"{values} are not {count} counts")
    return numbers
