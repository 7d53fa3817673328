"""Traces for `scale.py`: who asks what and when, read from a file or drawn from a seed."""

from __future__ import annotations

import json
import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from common import ROOT

from semkv.encoders.text import SentenceEncoder
from semkv_guards import veto

TOKEN_BYTES = 4  # of a text's letters to a token
MOST_TEXTS = 20_000  # that are compared with one another
_AT_ONCE = 512  # rows of a comparison
_WORDS = "the of and to in is that for as with on this by are from at or an be which has".split()


class Asked(NamedTuple):
    """One request: when, in seconds; by whom; its messages as (role, text), the question last; how long an answer it
    gets, in tokens."""

    at: float
    tenant: str
    messages: tuple[tuple[str, str], ...]
    answer_tokens: int

    @property
    def text(self) -> str:
        return self.messages[-1][1]

    @property
    def partition(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """What a near-repeat must have in common with it."""
        return self.tenant, self.messages[:-1]

    def body(self) -> bytes:
        """As a client sends it, without the spaces that a gateway would leave out."""
        messages = [{"role": role, "content": text} for role, text in self.messages]
        body = {"model": "scripted", "messages": messages, "temperature": 0, "stream": True}
        return json.dumps(body | {"max_tokens": self.answer_tokens}, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Shape:
    """What a drawn trace looks like.

    Attributes:
        seconds: how long it is.
        rate: conversations that begin in a second.
        tenants: how many there are; their shares fall by Zipf's law.
        system_tokens: of the system prompt of each tenant.
        classes: questions that a conversation may begin with, each in two wordings.
        zipf: exponent of the law by which their shares fall.
        turns: of a conversation. The later ones ask about what came before, so only a repeat of all of it is a hit.
        think_s: between the turns.
        answer_tokens: of each answer.
    """

    seconds: float = 60.0
    rate: float = 2.0
    tenants: int = 4
    system_tokens: int = 1000
    classes: int = 40
    zipf: float = 1.0
    turns: int = 2
    think_s: float = 4.0
    answer_tokens: int = 20


def drawn(shape: Shape, seed: int) -> list[Asked]:
    """A trace in the order of its times."""
    chance = random.Random(seed)  # noqa: S311
    known = wordings()
    questions = _Zipf(shape.classes, shape.zipf, chance)
    tenants = _Zipf(shape.tenants, 1.0, chance)
    systems = [_system(number, shape.system_tokens) for number in range(shape.tenants)]
    found: list[Asked] = []
    at = 0.0
    while (at := at + chance.expovariate(shape.rate)) < shape.seconds:
        tenant = tenants.draw()
        messages = (("system", systems[tenant]),)
        later = at
        for _ in range(shape.turns):
            question = questions.draw()
            text = _question(known, question, chance.random() < 0.5)
            messages = (*messages, ("user", text))
            found.append(Asked(later, f"tenant-{tenant}", messages, shape.answer_tokens))
            messages = (*messages, ("assistant", f"This is the answer to question {question}."))
            later += shape.think_s * chance.uniform(0.5, 1.5)
    return sorted(found, key=lambda asked: asked.at)


def read(path: Path) -> list[Asked]:
    """A trace from lines of JSON with at, tenant, messages (role, content) and answer_tokens."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(map(_asked, rows), key=lambda asked: asked.at)


def _asked(row: dict[str, Any]) -> Asked:
    messages = tuple((str(one["role"]), str(one["content"])) for one in row["messages"])
    tokens = int(row.get("answer_tokens", 20))
    return Asked(float(row["at"]), str(row["tenant"]), messages, tokens)


class _Zipf:
    """Draws numbers below ``count``, the first ones most often."""

    def __init__(self, count: int, exponent: float, chance: random.Random) -> None:
        self._sums = list(accumulate((1 + n) ** -exponent for n in range(count)))
        self._chance = chance

    def draw(self) -> int:
        return bisect(self._sums, self._chance.random() * self._sums[-1])


def wordings() -> list[tuple[str, str]]:
    """Questions, each in two wordings."""
    lines = (ROOT / "bench/data/paraphrases.jsonl").read_text(encoding="utf-8").splitlines()
    rows = (json.loads(line) for line in lines)
    return [(row["a"], row["b"]) for row in rows if row["kind"] == "question"]


def _question(known: Sequence[tuple[str, str]], number: int, other: bool) -> str:
    """One of the two wordings of a question. Beyond the questions that there are, they are asked of another case, which
    no guard lets match."""
    case, place = divmod(number, len(known))
    text = known[place][other]
    return f"In case {case}: {text}" if case else text


def _system(number: int, tokens: int) -> str:
    """A text of about so many tokens."""
    chance = random.Random(number)  # noqa: S311
    words = [f"You answer the customers of shop {number}."]
    length = 0
    while length < tokens * TOKEN_BYTES:
        words.append(chance.choice(_WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)


# -- which texts are near-repeats -------------------------------------------------------------------------------------


class Judgement:
    """Which donors a text may have, as a gateway's encoder, threshold and guards say."""

    def __init__(self, trace: Sequence[Asked], threshold: float) -> None:
        known = {_plain(asked.text): None for asked in trace}
        if len(known) > MOST_TEXTS:
            raise SystemExit(f"{len(known)} questions: at most {MOST_TEXTS} are compared")
        texts = list(known)
        self._numbers = {text: number for number, text in enumerate(texts)}
        self._donors = list(_donors(texts, threshold))

    def donors(self, text: str) -> Iterator[str]:
        """Texts whose answers are given for this one, the nearest first."""
        case, plain = _case(text), _plain(text)
        for donor in self._donors[self._numbers[plain]]:
            yield f"{case}{donor}"

    def pairs(self) -> list[tuple[str, str]]:
        """Texts with the nearest donor that each has."""
        found = zip(self._numbers, self._donors, strict=True)
        return [(donors[0], text) for text, donors in found if donors]


def _case(text: str) -> str:
    return text[: len(text) - len(_plain(text))]


def _plain(text: str) -> str:
    """A question without the case that it is asked of."""
    return text.partition(": ")[2] if text.startswith("In case ") else text


def _donors(texts: Sequence[str], threshold: float) -> Iterator[list[str]]:
    vectors = SentenceEncoder().encode(texts)
    for begin in range(0, len(texts), _AT_ONCE):
        cosines = vectors[begin : begin + _AT_ONCE] @ vectors.T
        for row, text in enumerate(texts[begin : begin + _AT_ONCE]):
            near = np.flatnonzero(cosines[row] >= threshold)
            order = near[np.argsort(-cosines[row][near])]
            others = (texts[number] for number in order if number != begin + row)
            yield [other for other in others if veto(text, other) is None]


def chain(seed: str, text: bytes, block_tokens: int) -> list[bytes]:
    """Names of the KV blocks of a prompt, each of all that comes before it."""
    state = xxhash.xxh3_64(seed.encode())
    size = block_tokens * TOKEN_BYTES
    names = []
    for begin in range(0, len(text) - size + 1, size):
        state.update(text[begin : begin + size])
        names.append(state.digest())
    return names
