"""Whether an approximate match may be used: the last check before a donor is substituted.

fixed       the threshold of the flags, or `CLOSE` less where two texts ask for the same in the same words
calibrated  the chance of a wrong answer at this score and wording, fitted from labeled pairs
bounded     keeps the share of requests answered wrongly under what the user set; learns from checked answers
            (`semkv.tiers.bounded`)
judge       the same, and below it what a judge has said yes to (`SemanticCache.keep_verdict`)

A guard's veto comes before all of them, and is final: what a guard sees, such as another dose, is too rare in labeled
pairs and in traffic for its cost to be learned there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from semkv import plug
from semkv.config import CacheConfig
from semkv.errors import ConfigError, DatasetError
from semkv.tiers.tier import SEMANTIC
from semkv.types import Entry, Match, PolicyName, Request
from semkv.user_files import read_json
from semkv_guards import MOST_UNMATCHED, Wording

FORMAT = 3  # of calibrations
FLOOR = 0.5  # cosines below match nothing
CLOSE = 0.04
"""How far below the threshold a cosine may be where two texts ask for the same in the same words.

Of the pairs of `bench/data` in between, 68 need one answer and 1 needs two; of a public set of labeled question pairs,
154 and 2."""
FEATURES = ("cosine", "closeness", *Wording._fields)
_GAP = 0.005  # keeps the closeness of a cosine of 1 finite
_STEPS = 30  # of a bisection
_PROMPT_HOOKS = ("prompt", "prompt_vision")  # whose prompt layer is the text encoder's


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a donor may be used, and why.

    Attributes:
        accept: whether the donor may be used.
        reason: why, in a few words.
        risk: the chance of a wrong answer, where the policy knows one.
        check: check this hit at least with this chance.
        stake: the part of the budget that comes back when a check finds the answer right.
        doubt: a judge has not been asked, and its yes may change the decision.
    """

    accept: bool
    reason: str = ""
    risk: float | None = None
    check: float = 0.0
    stake: float = 0.0
    doubt: bool = False


class Decider(Protocol):
    """Judges approximate matches, not exact or normalised ones. Called from any thread.

    ``--policy`` calls a dotted path with the `CacheConfig`.

    A class that derives from this and has no `observe` learns nothing.

    Attributes:
        learns: whether `observe` has any effect, so that comparisons are worth making.
        floor: matches of a lower score are not judged; None leaves it to the tiers' thresholds.
    """

    learns: bool = False
    floor: float | None = None

    def arrived(self) -> None:
        """A request came in."""
        return

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
        """Whether the donor may be used: a match is no better than the worst of `Match.scores`."""
        ...

    def observe(self, match: Match, *, correct: bool, served: Decision | None) -> None:
        """The outcome of a comparison: of a hit, with the decision that served it, or of a match that was refused."""
        return

    def state(self) -> Mapping[str, Any] | None:
        """What to keep across restarts, as JSON values; None where there is nothing to keep."""
        return None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a kept state. Raises `ValueError` for one that is damaged."""
        return


class FixedThreshold(Decider):
    """Accepts every match of the threshold or more, and those closely below it whose texts have the same words.

    Args:
        certain: cosine of the semantic text tier from which words do not count; other tiers have their own threshold.
            None accepts every match.
    """

    def __init__(self, certain: float | None = None) -> None:
        self._certain = certain
        self.floor = None if certain is None else certain - CLOSE

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
        if self._certain is None or _is_certain(match, self._certain):
            return Decision(True)
        return Decision(False, "other words")


class Judged(Decider):
    """Accepts what `FixedThreshold` accepts, and from ``least`` on what a judge has said yes to.

    Args:
        certain: cosine of the semantic text tier from which no judge is asked; other tiers have their own threshold.
        least: cosine below which none is asked either.
    """

    def __init__(self, certain: float, least: float) -> None:
        self._certain = certain
        self.floor = min(certain, least)

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
        if match.judged is not None:
            return Decision(match.judged, "judged")
        if _is_certain(match, self._certain):
            return Decision(True)
        return Decision(False, "in doubt", doubt=True)


def _is_certain(match: Match, certain: float) -> bool:
    """Whether neither words nor a judge need to be asked, or the words say the same."""
    own = (score.cosine for score in match.scores if score.tier == SEMANTIC)
    return match.same_words or min(own, default=1.0) >= certain


def features(score: float, wording: tuple[float, float, float] | None) -> tuple[float, ...]:
    """The values of `FEATURES`. Closeness is -log(1.005 - cosine), which tells .97 from .99 as .7 from .9."""
    return (score, -math.log(1.0 + _GAP - min(1.0, score)), *(wording or (0.0, 0.0, 0.0)))


def chance(log_odds: float) -> float:
    """The logistic function."""
    return 1.0 / (1.0 + math.exp(-max(-40.0, min(40.0, log_odds))))


@dataclass(frozen=True, slots=True)
class Calibration:
    """The chance that two texts do not have the same answer, where no guard objects: a logistic function of `FEATURES`.

    Attributes:
        fingerprint: of the encoder whose cosines these are.
        bias: log odds where every feature is 0.
        weights: log odds by unit of each feature; those of the cosine and the closeness are not positive, so a higher
            cosine never means a higher chance.
        limit: greatest chance of a wrong answer with which a donor may be used.
    """

    fingerprint: str
    bias: float
    weights: Mapping[str, float]
    limit: float

    def risk(self, score: float, wording: tuple[float, float, float] | None = None) -> float:
        """The chance of a wrong answer; 1.0 where nothing may match."""
        if score < FLOOR:
            return 1.0
        values = zip(FEATURES, features(score, wording), strict=True)
        return chance(self.bias + sum(self.weights[name] * value for name, value in values))

    @property
    def least(self) -> float:
        """The least cosine at which some wording may match; 1.0 where even that does not."""
        most = Wording(MOST_UNMATCHED, 1.0, 1.0)
        helping = {name: m for name, m in most._asdict().items() if self.weights[name] < 0.0}
        best = Wording(0.0, 0.0, 0.0)._replace(**helping)
        low = FLOOR
        high = 1.0
        if self.risk(low, best) <= self.limit:
            return low
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if self.risk(middle, best) <= self.limit:
                high = middle
            else:
                low = middle
        return high

    def save(self, path: Path) -> None:
        body = {
            "format": FORMAT,
            "kind": "semkv calibration",
            **asdict(self),
        }
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path, *, key: str = "--calibration") -> Calibration:
        """Read what ``semkv calibrate`` wrote. Raises `ConfigError` for anything else."""
        try:
            return cls._checked(read_json(path))
        except DatasetError as error:
            raise ConfigError(key, str(path), f"a JSON file that can be read ({error})") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                key, str(path), f"a JSON file that `semkv calibrate` wrote ({error})"
            ) from error

    @classmethod
    def _checked(cls, body: Mapping[str, Any]) -> Calibration:
        if body["format"] != FORMAT:
            raise ValueError(
                f"format {body['format']}, this version reads {FORMAT}: calibrate again"
            )
        bias, limit = float(body["bias"]), float(body["limit"])
        weights = {str(name): float(value) for name, value in body["weights"].items()}
        if set(weights) != set(FEATURES):
            raise ValueError(f"weights of {', '.join(FEATURES)}")
        if not all(math.isfinite(value) for value in (bias, *weights.values())):
            raise ValueError("weights that are finite")
        if weights["cosine"] > 0.0 or weights["closeness"] > 0.0:
            raise ValueError("a risk that does not rise with the cosine")
        if not 0.0 < limit < 1.0:
            raise ValueError("a limit between 0 and 1")
        return cls(str(body["fingerprint"]), bias, weights, limit)


class Calibrated(Decider):
    """Accepts a match whose chance of a wrong answer is at most the calibration's limit.

    ``tiers`` are the status keys whose scores are cosines of the calibrated encoder. Of other tiers, and of matches of
    a leading part, their own threshold is enough.
    """

    def __init__(self, calibration: Calibration, tiers: frozenset[str]) -> None:
        self._calibration = calibration
        self._tiers = tiers
        self.floor = calibration.least

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
        own = [score.cosine for score in match.scores if match.whole and score.tier in self._tiers]
        if not own:
            return Decision(True)
        risk = self._calibration.risk(min(own), match.wording)
        reason = f"risk {risk:.4f} against {self._calibration.limit:.4f}"
        return Decision(risk <= self._calibration.limit, reason, risk)


def build_policy(config: CacheConfig, fingerprint: str) -> Decider:
    """The policy that the configuration names, for the text encoder with this ``fingerprint``.

    Raises:
        ConfigError: there is no such policy, or the calibration cannot be read or was fitted for another encoder.
    """
    if plug.is_path(config.policy):
        own: Decider = plug.require(
            "--policy", plug.load("--policy", config.policy, config), Decider, config.policy
        )
        return own
    if config.policy is PolicyName.FIXED:
        return FixedThreshold(config.similarity_threshold if config.guards else None)
    if config.policy is PolicyName.JUDGE:
        return Judged(config.similarity_threshold, config.judge_threshold)
    prompt = ["embedding:prompt"] if config.embedding_hook in _PROMPT_HOOKS else []
    tiers = frozenset([SEMANTIC, *prompt])
    calibration = None if config.calibration is None else Calibration.load(config.calibration)
    if calibration is not None and calibration.fingerprint != fingerprint:
        raise ConfigError(
            "--calibration",
            str(config.calibration),
            f"a calibration of the encoder {config.index_encoder} ({fingerprint}); this one is for "
            f"{calibration.fingerprint}",
        )
    if config.policy is PolicyName.BOUNDED:
        from semkv.tiers.bounded import Bounded  # which stands on this module

        judged_from = config.judge_threshold if config.judge else None
        return Bounded(config.max_error_rate, calibration, tiers, judged_from=judged_from)
    assert calibration is not None  # CacheConfig holds it
    return Calibrated(calibration, tiers)
