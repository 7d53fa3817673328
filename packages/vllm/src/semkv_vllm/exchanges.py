"""What tensor-parallel ranks exchange in a forward pass of ours: one that fails in it does not leave others waiting.

In every layer all ranks add up what each has computed, and each waits for the others. A rank that fails within a pass
would leave them waiting for ever. So it takes part in the rest of the exchanges with zeros. What the others compute
with these is of no use. All ranks agree afterwards whether a pass went well, and nothing of one that did not is used.

What a pass exchanges is learned from the first one that a rank has run to its end. A rank that fails before that makes
up for nothing, and leaves the others waiting. Such a pass is the first of the check at the start (`semkv_vllm.gate`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

_KNOWN = ("all_reduce", "all_gather")
_OTHERS = (
    "all_gatherv",
    "reduce_scatter",
    "reduce_scatterv",
    "gather",
    "send",
    "recv",
    "dispatch",
    "combine",
)


class UnknownExchangeError(Exception):
    """What the ranks exchange cannot be made up for; the text says what it is."""


@dataclass(frozen=True)
class Exchange:
    """One exchange of a pass.

    Attributes:
        kind: the method of vLLM's communicator.
        width: the shape behind the tokens, which come first.
        options: what the method is given beside the numbers.
    """

    kind: str
    width: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    options: tuple[Any, ...] = ()


class Exchanges:
    """Runs passes, and makes up for those that fail after a whole one. The same in every rank.

    Args:
        communicator: vLLM's, of all ranks.
    """

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self._usual: list[Exchange] = []  # of each pass; empty until one was seen
        self._seen: list[Exchange] = []  # of the pass that runs

    def run(self, tokens: Sequence[int], forward: Callable[[int], object]) -> None:
        """Run passes one after the other.

        Args:
            tokens: how many each pass has.
            forward: runs the pass of a number.

        Raises:
            Exception: what a pass has raised, after this rank has taken part in all exchanges. Before a whole pass was
                seen it takes part in none of the rest.
            UnknownExchangeError: the first pass was not like those that can be made up for.
        """
        for number, count in enumerate(tokens):
            try:
                self._watch(count, partial(forward, number))
            except UnknownExchangeError:
                raise
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # their tensors may take all memory
                self._make_up(self._usual[len(self._seen) :], count)
                for later in tokens[number + 1 :]:
                    self._make_up(self._usual, later)
                raise

    def _watch(self, tokens: int, forward: Callable[[], object]) -> None:
        self._seen = []
        with self._watched(tokens):
            forward()
        if not self._usual:
            self._learn()
        elif self._seen != self._usual:
            raise RuntimeError("the ranks exchanged something else than in the first pass")

    def _learn(self) -> None:
        if not self._seen:
            raise UnknownExchangeError("its ranks exchange nothing that can be seen")
        for exchange in self._seen:
            if exchange.kind not in _KNOWN or not exchange.width:
                raise UnknownExchangeError(f"its ranks exchange something by {exchange.kind}")
        self._usual = self._seen

    @contextmanager
    def _watched(self, tokens: int) -> Iterator[None]:
        """Note what is exchanged meanwhile."""
        names = [name for name in (*_KNOWN, *_OTHERS) if hasattr(self._communicator, name)]
        for name in names:
            method = getattr(self._communicator, name)
            setattr(self._communicator, name, partial(self._noted, name, method, tokens))
        try:
            yield
        finally:
            for name in names:
                delattr(self._communicator, name)  # the class has it

    def _noted(
        self,
        kind: str,
        method: Callable[..., Any],
        tokens: int,
        numbers: Any,
        *options: Any,
        **named: Any,
    ) -> Any:
        found = method(numbers, *options, **named)
        is_plain = isinstance(numbers, torch.Tensor) and len(numbers) == tokens and not named
        self._seen.append(
            Exchange(
                kind=kind,
                width=tuple(numbers.shape[1:]) if is_plain else (),
                dtype=getattr(numbers, "dtype", torch.float32),
                device=getattr(numbers, "device", torch.device("cpu")),
                options=options,
            )
        )
        return found

    def _make_up(self, exchanges: Sequence[Exchange], tokens: int) -> None:
        """Take part with zeros."""
        for exchange in exchanges:
            zeros = torch.zeros(
                (tokens, *exchange.width),
                dtype=exchange.dtype,
                device=exchange.device,
            )
            getattr(self._communicator, exchange.kind)(zeros, *exchange.options)
