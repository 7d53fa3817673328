"""vCache's published rule on the streams of question pairs of ``bench/quality.py``; writes JSON.

This is our reading of the paper (Schroeder et al., vCache: Verified Semantic Prompt Caching, arXiv:2502.03771), not its
authors' code, which is not on the package index. Every stored text keeps the cosines at which it was a nearest
neighbour, each with whether its answer was right. A logistic curve with threshold t and steepness g is fitted to them;
t is moved up to the end of a confidence interval; and the engine is asked with the chance tau that keeps the chance of
a wrong answer under the bound, over the best choice of the confidence:

    tau = min over e of 1 - bound / (1 - (1 - e) L(s; t'(e), g))

Whatever the engine answers is compared with the neighbour's answer, and is one more observation. As for the other rows
of the table, the nearest text alone is asked about, no guard objects, a text that the engine answered is stored, and
its repeats are exact hits. The interval of t is normal. How many observations a text needs before it is used at all is
left open here: 6, and 1 as the most that the rule could bring.

    python bench/vcache_rule.py --pairs ../shared/data/question_pairs_dev.jsonl.gz
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from itertools import product
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any

from quality import BOUNDS, ROOT, Remembering, mean, row
from quality_streams import draw_stream, halves

from semkv.encoders.text import DEFAULT_MODEL
from semkv.guards import no_veto
from semkv.tiers.policies import Decision, Stateless, chance
from semkv.types import Entry, Match, Request
from semkv_lab.quality import Replay, build_corpus, clusters, read_pairs

_LEAST = (6, 1)
_STEPS = 40  # of Newton's method
_RIDGE = 0.01
_EPSILONS = tuple((NormalDist().inv_cdf(1.0 - e), e) for e in (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5))
_FIRST = ((0.0, False), (1.0, True))  # what is believed of a text before any observation


class PerEntry(Stateless):
    """The rule; a new one for each stream."""

    learns = True

    def __init__(self, bound: float, least: int, seed: int) -> None:
        self._bound, self._least, self._random = bound, least, Random(seed)  # noqa: S311
        self._seen: dict[str, list[tuple[float, bool]]] = defaultdict(list)
        self._fits: dict[str, tuple[float, float, float]] = {}
        self._asked = False

    def arrived(self) -> None:
        self._asked = False

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
        if self._asked:
            return Decision(False, "not the nearest")
        self._asked = True
        return Decision(self._random.random() > self.tau(match.entry_id, match.score), "tau")

    def observe(self, match: Match, *, correct: bool, served: bool) -> None:
        self._seen[match.entry_id].append((match.score, correct))
        self._fits.pop(match.entry_id, None)

    def tau(self, entry: str, score: float) -> float:
        """The chance with which the engine is asked."""
        if len(self._seen[entry]) < self._least:
            return 1.0
        if entry not in self._fits:
            self._fits[entry] = fitted([*_FIRST, *self._seen[entry]])
        threshold, steepness, deviation = self._fits[entry]
        found = 1.0
        for z, epsilon in _EPSILONS:
            right = (1.0 - epsilon) * chance(steepness * (score - threshold - z * deviation))
            found = min(found, 1.0 - self._bound / max(1e-9, 1.0 - right))
        return max(0.0, found)


def fitted(seen: list[tuple[float, bool]]) -> tuple[float, float, float]:
    """Threshold, steepness and the standard deviation of the threshold, by penalised likelihood."""
    a, g = -5.0, 10.0  # log odds a + g s; the threshold is -a / g
    for _ in range(_STEPS):
        p = [chance(a + g * s) for s, _ in seen]
        w = [q * (1.0 - q) for q in p]
        off = [float(c) - q for q, (_, c) in zip(p, seen, strict=True)]
        grad_a = sum(off) - _RIDGE * a
        grad_g = sum(o * s for o, (s, _) in zip(off, seen, strict=True)) - _RIDGE * g
        haa = sum(w) + _RIDGE
        hag = sum(v * s for v, (s, _) in zip(w, seen, strict=True))
        hgg = sum(v * s * s for v, (s, _) in zip(w, seen, strict=True)) + _RIDGE
        det = haa * hgg - hag * hag
        step_a, step_g = (hgg * grad_a - hag * grad_g) / det, (haa * grad_g - hag * grad_a) / det
        a, g = a + max(-5.0, min(5.0, step_a)), max(0.1, g + max(-5.0, min(5.0, step_g)))
        if abs(step_a) + abs(step_g) < 1e-6:
            break
    variance = (hgg + 2.0 * hag * (a / g) + haa * (a / g) ** 2) / det / (g * g)  # the delta method
    return -a / g, g, math.sqrt(max(0.0, variance))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=Path, default=ROOT.parent / "shared" / "data" / "question_pairs_dev.jsonl.gz")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--vectors", type=Path, help="keep the vectors in this .npz for the next time")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "vcache_rule.json")
    options = parser.parse_args()
    encoder = Remembering(options.vectors)
    _, second = halves(read_pairs(options.pairs), 0)
    corpus = build_corpus(list(clusters(second)), encoder, no_veto)
    replays = [Replay(draw_stream(second, seed), corpus) for seed in range(options.seeds)]
    result: dict[str, Any] = {"encoder": DEFAULT_MODEL, "rule": "our reading of arXiv:2502.03771", "bounds": []}
    for bound, least in product(BOUNDS, _LEAST):
        outcomes = [replay.play(PerEntry(bound, least, n)) for n, replay in enumerate(replays)]
        result["bounds"].append(
            {
                "bound": bound,
                "least_observations": least,
                **mean(outcomes),
                "held": sum(o.wrong_rate <= bound for o in outcomes),
                "streams": [row(o) for o in outcomes],
            }
        )
        print({key: value for key, value in result["bounds"][-1].items() if key != "streams"}, flush=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    encoder.keep()


if __name__ == "__main__":
    main()
