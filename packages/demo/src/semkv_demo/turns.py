"""Both sides are asked the same, in turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

WIDTH = 80
Answer = tuple[int, ...] | str


class Found(NamedTuple):
    """What one request found. ``hit``: semkv had the answer, the KV or the encoder output."""

    seconds: float
    answer: Answer
    hit: bool


Ask = Callable[[Any], Found]
"""Sends a request."""


@dataclass(frozen=True)
class Reply:
    """What came for one request, from one of the two sides.

    Attributes:
        ms: To the answer of a gateway, to the first token of an engine.
        hit: As of `Found`.
    """

    row: str
    number: int
    side: str
    ms: float
    answer: Answer
    hit: bool


def in_turns(
    name: str,
    asked: Sequence[Any],
    ask: Mapping[str, Ask],
) -> list[Reply]:
    """Ask both sides the same; who is first changes from one to the next."""
    replies = []
    sides = list(ask)
    for number, one in enumerate(asked):
        say(f"{name}, {number + 1} of {len(asked)}")
        for side in sides if number % 2 else reversed(sides):
            found = ask[side](one)
            replies.append(
                Reply(
                    row=name,
                    number=number,
                    side=side,
                    ms=round(1000 * found.seconds, 2),
                    answer=found.answer,
                    hit=found.hit,
                )
            )
    return replies


def say(text: str) -> None:
    """Progress, on one line, where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r{text[: WIDTH - 1]:<{WIDTH - 1}}\r", end="", file=sys.stderr, flush=True)
