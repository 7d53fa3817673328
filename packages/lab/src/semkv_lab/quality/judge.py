"""Labelled pairs through a policy: precision, recall, false positives, and precision against hit ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from semkv.tiers.policies import Decider
from semkv.types import Entry, Exactness, Match, Namespace, Request, TextSegment
from semkv_lab.quality.corpus import Corpus
from semkv_lab.quality.replay import TIER
from semkv_lab.quality.rows import Pair


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a policy made of labelled pairs.

    Attributes:
        pairs, same: counts.
        accepted, right: pairs it accepted, and how many of those are same.
        vetoed: pairs a guard objected to.
        curve: (hit ratio, precision) of the most confident pairs first; a final veto is the least confidence.
        area: under the curve (P-CHR AUC).
    """

    pairs: int
    same: int
    accepted: int
    right: int
    vetoed: int
    curve: tuple[tuple[float, float], ...]
    area: float

    @property
    def precision(self) -> float | None:
        return self.right / self.accepted if self.accepted else None

    @property
    def recall(self) -> float | None:
        return self.right / self.same if self.same else None

    @property
    def false_positive_rate(self) -> float | None:
        different = self.pairs - self.same
        return (self.accepted - self.right) / different if different else None


def judge(
    pairs: Sequence[Pair],
    corpus: Corpus,
    policy: Decider,
    *,
    verify_rate: float = 0.0,
    seed: int = 0,
    tick: Callable[[int], None] = lambda _: None,
) -> Judgement:
    """Ask the policy about every pair, in order; one that learns is told of refused and of checked pairs."""
    random = Random(seed)  # noqa: S311
    donor = Entry("", Namespace(), (), "", "")
    ranked: list[tuple[float, bool]] = []
    accepted = right = vetoed = 0
    for pair in pairs:
        a, b = corpus.number[pair.group, pair.a], corpus.number[pair.group, pair.b]
        policy.arrived()
        score = 1.0 if a == b else dict(corpus.neighbours[a]).get(b, 0.0)
        veto = corpus.veto(a, b)
        vetoed += bool(veto)
        wording = corpus.wording(a, b) if policy.weighs_vetoes else None
        match = Match(TIER, str(b), score, Exactness.APPROXIMATE, veto, wording=wording)
        yes, risk, check = False, None, 0.0
        if score and (not veto or policy.weighs_vetoes) and (policy.floor is None or score >= policy.floor):
            decision = policy.accept(Request(str(a), Namespace(pair.group), (TextSegment(pair.a),)), donor, match)
            yes, risk, check = decision.accept, decision.risk, decision.check
            if not yes or (verify_rate > 0.0 and random.random() < max(verify_rate, check)):
                policy.observe(match, correct=pair.same, served=yes)
        final = veto and not policy.weighs_vetoes
        ranked.append((2.0 if final else 1.0 - score if risk is None else risk, pair.same))
        accepted += yes
        right += yes and pair.same
        tick(1)
    curve, area = _curve(ranked)
    return Judgement(len(pairs), sum(p.same for p in pairs), accepted, right, vetoed, curve, area)


def _curve(ranked: list[tuple[float, bool]]) -> tuple[tuple[tuple[float, float], ...], float]:
    """Precision by hit ratio, and its mean; pairs of equal confidence count alike."""
    ranked = sorted(ranked, key=lambda pair: pair[0])
    right, area, points = 0.0, 0.0, []
    start = 0
    while start < len(ranked):
        end = start
        while end < len(ranked) and ranked[end][0] == ranked[start][0]:
            end += 1
        share = sum(same for _, same in ranked[start:end]) / (end - start)
        for count in range(start + 1, end + 1):
            right += share
            area += right / count
        points.append((end / len(ranked), right / end))
        start = end
    return tuple(points), area / len(ranked)
