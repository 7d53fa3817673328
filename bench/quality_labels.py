"""What a reader says of the wrong hits on the question pairs, where few of them decide.

The pairs are labelled by hand, and only where somebody looked. So the pairs behind the wrong hits of the static and the
calibrated sweep of ``bench/quality.py``, as far as `REACH`, were read once more by one reader, a language model, in
alphabetical order; it had seen a third of them, those that weigh most, with cosine and policy before.
``quality_labels.json`` keeps each verdict under a digest of the texts, since no row of any data is written. Only where
one answer serves both beyond doubt are they the same; what is less clear stays as it was labelled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from semkv.tiers.policies import Decider, Decision
from semkv.types import Entry, Match, Request
from semkv_lab.quality import Asked, Corpus, Replay

REACH = 0.003  # wrong answers per request; beyond it many pairs are unread
VERDICTS: dict[str, bool] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def digest(a: str, b: str) -> str:
    """Of two texts in either order."""
    return hashlib.sha256("\n".join(sorted((a, b))).encode()).hexdigest()[:16]


def corrected(streams: Sequence[Sequence[Asked]], corpus: Corpus) -> list[list[Asked]]:
    """The streams, with one answer for the clusters of every pair that says the same."""
    answer = {corpus.number[asked.group, asked.text]: asked.answer for stream in streams for asked in stream}
    joined: dict[str, str] = {}

    def root(name: str) -> str:
        while name in joined:
            name = joined[name]
        return name

    for number, own in answer.items():
        for other, _ in corpus.neighbours[number]:
            if other in answer and VERDICTS.get(digest(corpus.items[number][1], corpus.items[other][1])):
                left, right = root(own), root(answer[other])
                if left != right:
                    joined[left] = right
    return [[replace(asked, answer=root(asked.answer)) for asked in stream] for stream in streams]


class Listening:
    """A policy that notes which stored text it let answer which request, by their numbers in the corpus."""

    def __init__(self, policy: Decider) -> None:
        self._policy = policy
        self.served: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
        decision = self._policy.accept(request, donor, match)
        if decision.accept:
            self.served.append((int(request.request_id), int(match.entry_id)))
        return decision


def wrong_hits(
    streams: Sequence[Sequence[Asked]], corpus: Corpus, make: Callable[[], Decider]
) -> Iterator[tuple[str, str]]:
    """The two texts of every wrong hit, without checks. A text of a stream has one answer throughout."""
    for stream in streams:
        answer = {corpus.number[asked.group, asked.text]: asked.answer for asked in stream}
        policy: Any = Listening(make())
        Replay(stream, corpus).play(policy)
        for number, other in policy.served:
            if answer[number] != answer[other]:
                yield corpus.items[number][1], corpus.items[other][1]


def verdicts(pairs: Iterable[tuple[str, str]]) -> dict[str, int]:
    """How many wrong hits there are, of how many pairs in either order; and how many of the hits are of texts that
    differ in spaces alone, that say the same by the reader's word, or that were not read.
    """
    rows = [(a, b, digest(a, b)) for a, b in pairs]
    return {
        "wrong": len(rows),
        "pairs": len({name for _, _, name in rows}),
        "spaces alone": sum("".join(a.split()) == "".join(b.split()) for a, b, _ in rows),
        "the same": sum(VERDICTS.get(name) is True for _, _, name in rows),
        "unread": sum(name not in VERDICTS for _, _, name in rows),
    }
