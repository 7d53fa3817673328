"""What tensor-parallel ranks exchange in a forward pass of ours: one that fails in it does not leave others waiting.

In every layer all ranks add up what each has computed, and each waits for the others. A rank that fails within a pass
would leave them waiting for ever. So it takes part in the rest of the exchanges with zeros. What the others compute
with these is of no use. All ranks agree afterwards whether a pass went well, and nothing of one that did not is used.

What a pass exchanges each rank learns by itself, from a rehearsal in which it exchanges nothing. A rank that fails in
that has left nobody waiting.
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


class LeftWaitingError(Exception):
    """A rank failed, and then failed to take part in what the others wait for. Nothing but the engine's end helps."""


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
    """Runs passes, and makes up for those that fail. The same in every rank.

    Args:
        communicator: vLLM's, of all ranks.
        ranks: how many there are.
    """

    def __init__(self, communicator: Any, ranks: int) -> None:
        self._communicator = communicator
        self._ranks = ranks
        self._usual: list[Exchange] = []  # of each pass
        self._seen: list[Exchange] = []  # of the pass that runs

    def rehearse(self, tokens: int, forward: Callable[[], object]) -> None:
        """Run a pass by this rank alone, as if all ranks computed the same, and learn what it exchanges.

        Raises:
            Exception: what the pass has raised.
            UnknownExchangeError: it exchanges something that cannot be made up for, or nothing that can be seen.
        """
        self._seen = []
        with self._replaced(partial(self._pretended, tokens)):
            forward()
        if not self._seen:
            raise UnknownExchangeError("its ranks exchange nothing that can be seen")
        self._usual = self._seen

    def run(self, tokens: Sequence[int], forward: Callable[[int], object]) -> None:
        """Run passes one after the other, after a rehearsal.

        Args:
            tokens: how many each pass has.
            forward: runs the pass of a number.

        Raises:
            Exception: what a pass has raised, after this rank has taken part in all exchanges.
            LeftWaitingError: it could not.
        """
        for number, count in enumerate(tokens):
            try:
                self._watch(count, partial(forward, number))
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # their tensors may take all memory
                self._make_up_for(tokens[number:])
                raise

    def _watch(self, tokens: int, forward: Callable[[], object]) -> None:
        self._seen = []
        with self._replaced(partial(self._noted, tokens)):
            forward()
        if self._seen != self._usual:
            raise RuntimeError("the ranks exchanged something else than in the rehearsal")

    @contextmanager
    def _replaced(self, instead: Callable[..., Any]) -> Iterator[None]:
        """Call ``instead`` with a method's name, the method and its arguments, for each exchange meanwhile."""
        names = [name for name in (*_KNOWN, *_OTHERS) if hasattr(self._communicator, name)]
        for name in names:
            method = getattr(self._communicator, name)
            setattr(self._communicator, name, partial(instead, name, method))
        try:
            yield
        finally:
            for name in names:
                delattr(self._communicator, name)  # the class has it

    def _noted(
        self,
        tokens: int,
        kind: str,
        method: Callable[..., Any],
        numbers: Any,
        *options: Any,
        **named: Any,
    ) -> Any:
        found = method(numbers, *options, **named)
        self._seen.append(_exchange(tokens, kind, numbers, options, named))
        return found

    def _pretended(
        self,
        tokens: int,
        kind: str,
        method: Callable[..., Any],
        numbers: Any,
        *options: Any,
        **named: Any,
    ) -> Any:
        exchange = _exchange(tokens, kind, numbers, options, named)
        if kind not in _KNOWN or not exchange.width:
            raise UnknownExchangeError(f"its ranks exchange something by {kind}")
        self._seen.append(exchange)
        if kind == "all_reduce":
            return numbers.clone()
        dimension = options[0] if options else -1
        return torch.cat([numbers] * self._ranks, dimension)

    def _make_up_for(self, tokens: Sequence[int]) -> None:
        """Take part in the rest of the first of some passes, and in the others."""
        try:
            self._make_up(self._usual[len(self._seen) :], tokens[0])
            for count in tokens[1:]:
                self._make_up(self._usual, count)
        except Exception as error:
            raise LeftWaitingError("other ranks wait for this one") from error

    def _make_up(self, exchanges: Sequence[Exchange], tokens: int) -> None:
        """Take part with zeros."""
        for exchange in exchanges:
            zeros = torch.zeros(
                (tokens, *exchange.width),
                dtype=exchange.dtype,
                device=exchange.device,
            )
            getattr(self._communicator, exchange.kind)(zeros, *exchange.options)


def _exchange(
    tokens: int,
    kind: str,
    numbers: Any,
    options: tuple[Any, ...],
    named: dict[str, Any],
) -> Exchange:
    """What is exchanged; without a width where that is not numbers by token."""
    is_plain = isinstance(numbers, torch.Tensor) and len(numbers) == tokens and not named
    return Exchange(
        kind=kind,
        width=tuple(numbers.shape[1:]) if is_plain else (),
        dtype=getattr(numbers, "dtype", torch.float32),
        device=getattr(numbers, "device", torch.device("cpu")),
        options=options,
    )
