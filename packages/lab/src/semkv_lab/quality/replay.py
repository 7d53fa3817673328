"""Plays a stream of requests through a policy, without an engine: what would have been a hit, and was it right?

As in the cache: the exact text first; else the nearest stored texts, the guard and the policy; a miss is stored; a hit
is not, unless it was checked. An answer is wrong when the stored text that gave it belongs to another cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from semkv.tiers.policies import Decider
from semkv.types import Entry, Exactness, Match, Namespace, Request, TextSegment
from semkv_lab.quality.corpus import Corpus, Item
from semkv_lab.quality.rows import Asked

TIER = "semantic_text"
_NEIGHBOURS = 4  # the tier asks about so many
_POINTS = 100
_SETTLED = 500  # requests before which a rate says little


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a stream.

    Attributes:
        requests, exact, approximate, wrong, checks: counts; ``wrong`` are hits of both kinds.
        wrong_exact: of them the exact ones: the same text, with another answer in this place of the stream.
        overruled: approximate hits to which a guard objected.
        worst: highest share of wrong answers at any time after the first 500 requests; None for a shorter stream.
        curve: (requests, hits, wrong) along the stream.
    """

    requests: int
    exact: int
    approximate: int
    wrong: int
    wrong_exact: int
    checks: int
    overruled: int
    worst: float | None
    curve: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)

    @property
    def hits(self) -> int:
        return self.exact + self.approximate

    @property
    def hit_rate(self) -> float:
        return self.hits / self.requests

    @property
    def wrong_rate(self) -> float:
        """Wrong answers per request."""
        return self.wrong / self.requests

    @property
    def wrong_per_approximate(self) -> float | None:
        """The share of approximate hits that are wrong; None without any."""
        return (self.wrong - self.wrong_exact) / self.approximate if self.approximate else None


class Replay:
    """A stream against a corpus, ready to be played many times.

    Args:
        stream: the requests.
        corpus: holds every (group, text) of the stream.
    """

    def __init__(self, stream: Sequence[Asked], corpus: Corpus) -> None:
        items: list[Item] = [(asked.group, asked.text) for asked in stream]
        self._numbers = [corpus.number[item] for item in items]
        self._answers = [asked.answer for asked in stream]
        self._corpus = corpus

    def play(
        self, policy: Decider, *, verify_rate: float = 0.0, seed: int = 0, tick: Callable[[int], None] = lambda _: None
    ) -> Outcome:
        """Send every request.

        Args:
            policy: judges; a new one for each play.
            verify_rate: share of approximate hits to check; with 0 nothing is checked, whatever the policy asks.
            seed: of the sample.
            tick: hears of each request.
        """
        random = Random(seed)  # noqa: S311
        requests = _Requests(self._corpus)
        stored: dict[int, str] = {}
        exact = approximate = wrong = wrong_exact = checks = overruled = 0
        worst: float | None = None
        curve: list[tuple[int, int, int]] = []
        every = max(1, len(self._numbers) // _POINTS)
        for count, (number, answer) in enumerate(zip(self._numbers, self._answers, strict=True), 1):
            policy.arrived()
            if number in stored:
                exact += 1
                wrong += stored[number] != answer
                wrong_exact += stored[number] != answer
            else:
                judged = self._judge(policy, requests, number, stored)
                if judged.accepted is None:
                    if judged.near is not None:
                        policy.observe(judged.near, correct=stored[judged.nearest] == answer, served=False)
                    stored[number] = answer
                else:
                    correct = stored[judged.nearest] == answer
                    approximate += 1
                    wrong += not correct
                    overruled += bool(judged.accepted.veto)
                    lot = random.random()
                    if verify_rate > 0.0 and lot < max(verify_rate, judged.check):
                        checks += 1
                        policy.observe(judged.accepted, correct=correct, served=True)
                        stored[number] = answer
            if count >= _SETTLED:
                worst = max(worst or 0.0, wrong / count)
            if count % every == 0:
                curve.append((count, exact + approximate, wrong))
            tick(1)
        return Outcome(
            requests=len(self._numbers),
            exact=exact,
            approximate=approximate,
            wrong=wrong,
            wrong_exact=wrong_exact,
            checks=checks,
            overruled=overruled,
            worst=worst,
            curve=tuple(curve),
        )

    def _judge(self, policy: Decider, requests: _Requests, number: int, stored: dict[int, str]) -> _Judged:
        near: Match | None = None
        nearest = -1
        asked = 0
        for other, score in self._corpus.neighbours[number]:
            if other not in stored:
                continue
            asked += 1
            if asked > _NEIGHBOURS or (policy.floor is not None and score < policy.floor):
                break
            veto = self._corpus.veto(number, other)
            if veto and not policy.weighs_vetoes:
                continue
            wording = self._corpus.wording(number, other) if policy.weighs_vetoes else None
            match = Match(TIER, str(other), score, Exactness.APPROXIMATE, veto, wording=wording)
            decision = policy.accept(requests[number], requests.donor, match)
            if decision.accept:
                return _Judged(match, None, other, decision.check)
            if near is None:
                near, nearest = match, other
        return _Judged(None, near, nearest, 0.0)


@dataclass(frozen=True, slots=True)
class _Judged:
    accepted: Match | None
    near: Match | None
    nearest: int
    check: float


class _Requests:
    """Requests by number, made when first asked for."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._made: dict[int, Request] = {}
        self.donor = Entry("", Namespace(), (), "", "")

    def __getitem__(self, number: int) -> Request:
        if number not in self._made:
            group, text = self._corpus.items[number]
            self._made[number] = Request(str(number), Namespace(group), (TextSegment(text),))
        return self._made[number]
