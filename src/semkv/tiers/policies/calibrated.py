"""A curve from a score to the chance of a wrong answer, fitted from labelled pairs by ``semkv calibrate``."""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from semkv.errors import ConfigError
from semkv.tiers.policies.base import Decider, Decision, ServedTexts, Stateless
from semkv.types import Entry, Match, Request

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """The chance that two texts do not have the same answer, by cosine, as plain numbers.

    Between the points the chance is interpolated, beyond them it is that of the last point; below the first point
    nothing matches.

    Attributes:
        fingerprint: of the encoder whose cosines these are.
        scores: increasing cosines.
        risks: chances of a wrong answer at the scores, not increasing.
        threshold: least score that keeps the chosen precision on the pairs.
        vetoes: by a guard's reason, how many times the odds of a wrong answer are those without a veto, at least 1. A
            reason that is not named is final: the pairs did not show often enough that it errs.
    """

    fingerprint: str
    scores: tuple[float, ...]
    risks: tuple[float, ...]
    threshold: float
    vetoes: Mapping[str, float] = field(default_factory=dict)

    def risk(self, score: float, veto: str = "") -> float:
        """The chance of a wrong answer; 1.0 where nothing may match."""
        if score < self.scores[0] or (veto and veto not in self.vetoes):
            return 1.0
        place = bisect_right(self.scores, score)
        if place == len(self.scores):
            risk = self.risks[-1]
        else:
            left, right = self.scores[place - 1], self.scores[place]
            share = (score - left) / (right - left)
            risk = self.risks[place - 1] + share * (self.risks[place] - self.risks[place - 1])
        if not veto or risk >= 1.0:
            return risk
        odds = risk / (1.0 - risk) * self.vetoes[veto]
        return odds / (1.0 + odds)

    @property
    def limit(self) -> float:
        """The chance of a wrong answer at the threshold."""
        return self.risk(self.threshold)

    def save(self, path: Path) -> None:
        body = {
            "format": FORMAT,
            "kind": "semkv calibration",
            "fingerprint": self.fingerprint,
            "threshold": self.threshold,
            "scores": list(self.scores),
            "risks": list(self.risks),
            "vetoes": dict(self.vetoes),
        }
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path, *, key: str = "--calibration") -> Calibration:
        """Read what ``semkv calibrate`` wrote. Raises `ConfigError` for anything else."""
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(key, str(path), f"a file that can be read ({error.strerror})") from error
        except ValueError as error:
            raise ConfigError(key, str(path), "a JSON file that `semkv calibrate` wrote") from error
        try:
            return cls._checked(body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(key, str(path), f"a JSON file that `semkv calibrate` wrote ({error})") from error

    @classmethod
    def _checked(cls, body: Mapping[str, Any]) -> Calibration:
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']}, this version reads {FORMAT}")
        scores = tuple(float(s) for s in body["scores"])
        risks = tuple(float(r) for r in body["risks"])
        vetoes = {str(name): float(ratio) for name, ratio in body["vetoes"].items()}
        threshold = float(body["threshold"])
        if len(scores) != len(risks) or len(scores) < 2:
            raise ValueError("as many risks as scores, at least 2")
        if any(not a < b for a, b in pairwise(scores)):
            raise ValueError("increasing scores")
        if any(not 0.0 <= r <= 1.0 for r in risks) or any(a < b for a, b in pairwise(risks)):
            raise ValueError("risks from 0 to 1 that do not increase")
        if not all(1.0 <= ratio < float("inf") for ratio in vetoes.values()) or not -1.0 <= threshold <= 2.0:
            raise ValueError("odds of at least 1 and a threshold that is a cosine")
        return cls(str(body["fingerprint"]), scores, risks, threshold, vetoes)


class Calibrated(Stateless):
    """Accepts a match whose chance of a wrong answer is at most that of the calibration's threshold.

    Args:
        calibration: the curve.
        tiers: status keys whose scores are cosines of the calibrated encoder.
        otherwise: judges the other tiers, and matches of a leading part.
    """

    weighs_vetoes = True

    def __init__(self, calibration: Calibration, tiers: frozenset[str], otherwise: Decider) -> None:
        self._calibration, self._tiers, self._otherwise = calibration, tiers, otherwise
        self.floor: float | None = calibration.threshold
        self._limit = calibration.limit
        self._texts = ServedTexts()
        self._lock = threading.Lock()

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
        if match.tier not in self._tiers or not match.whole:
            if match.veto:
                return Decision(False, f"veto: {match.veto}")
            return self._otherwise.accept(request, donor, match)
        risk = self._calibration.risk(match.score, match.veto)
        reason = f"risk {risk:.4f} against {self._limit:.4f}"
        if risk > self._limit:
            return Decision(False, reason, risk)
        with self._lock:
            return Decision(True, reason, risk, 1.0 if self._texts.again(request) else 0.0)
