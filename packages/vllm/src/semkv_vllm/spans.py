"""Documents in a prompt: which of their tokens are reused at another position, and which are computed again.

A document was computed once, alone, from position 0. Its KV lies in the store under the exact block hashes of a request
that is the document alone. Where the document stands later in a prompt, its whole blocks are loaded, its keys are
rotated to their new positions, and these tokens are computed again: the first ones of the document, the last ones (by
which each request is checked), and all that is not part of a document.

Positions are tokens of the prompt unless something else is said. Nothing here needs vLLM or torch.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MOST_SPANS = 1024
WATCHED = 2
"""The last tokens of each reused run, which are computed again: their first layer's KV depends on nothing but token and
position, so it must be what was rotated."""

SEPARATED = "separated"
"""What a request says in place of positions where the operator's separator stands between its documents."""


class Span(NamedTuple):
    """A document's place in a prompt."""

    begin: int
    end: int


@dataclass(
    frozen=True,
    slots=True,
)
class Asked:
    """What a request wants reused; ``repair``: how many first tokens of each document are computed again."""

    spans: tuple[Span, ...]
    repair: int


@dataclass(
    frozen=True,
    slots=True,
)
class Piece:
    """What of a document is reused: whole blocks of it.

    Attributes:
        begin: where the document begins.
        skip: its first tokens that are not reused.
        size: the document's tokens up to the last one that is reused.
    """

    begin: int
    skip: int
    size: int

    @property
    def first(self) -> int:
        """The first reused token."""
        return self.begin + self.skip

    @property
    def last(self) -> int:
        """The token after the last reused one."""
        return self.begin + self.size


@dataclass(frozen=True)
class Load:
    """What a worker must do before a request runs: its blocks hold pieces as they were stored.

    Attributes:
        request: its name.
        tokens: of the prompt, up to ``end``, or to the end of a picture that begins before it.
        blocks: the request's blocks, from the first one on.
        pieces: in the order of the prompt.
        begin: the first token whose KV is not exact yet.
        end: the token after the last one that counts as loaded.
        pictures: of the request, with what an encoder is given (vLLM's ``MultiModalFeatureSpec``).
    """

    request: str
    tokens: list[int]
    blocks: np.ndarray
    pieces: tuple[Piece, ...]
    begin: int
    end: int
    pictures: Sequence[Any] = ()

    def gaps(self) -> Iterator[Span]:
        """What is computed again, in order."""
        at = self.begin
        for piece in self.pieces:
            if piece.first > at:
                yield Span(at, piece.first)
            at = min(piece.last, self.end) - WATCHED
        if at < self.end:
            yield Span(at, self.end)

    def watched(self) -> Iterator[Span]:
        """What is computed again although it was loaded."""
        for piece in self.pieces:
            last = min(piece.last, self.end)
            yield Span(last - WATCHED, last)

    @property
    def rows(self) -> int:
        """How many tokens are computed again."""
        return sum(end - begin for begin, end in self.gaps())

    @property
    def reused(self) -> int:
        """How many tokens are not computed."""
        return self.end - self.begin - self.rows


def asked(
    params: object,
    tokens: Sequence[int],
    *,
    repair: int,
    separator: Sequence[int] = (),
) -> Asked | None:
    """What a client says in ``kv_transfer_params.semkv``, or None where that is nothing, or wrong in any way.

    Args:
        params: the value under ``semkv``.
        tokens: of the prompt.
        repair: the operator's choice, where the client has none.
        separator: the operator's tokens between documents; empty for none.
    """
    if not isinstance(params, Mapping) or params.get("skip") is True:
        return None
    given = params.get("spans")
    chosen = params.get("repair", repair)
    if type(chosen) is not int or not 0 <= chosen <= len(tokens):
        return None
    by_mark = given == SEPARATED and separator
    spans = separated(tokens, separator) if by_mark else _checked(given, len(tokens))
    return (
        Asked(
            spans=spans,
            repair=chosen,
        )
        if spans
        else None
    )


def _checked(given: Any, count: int) -> tuple[Span, ...]:
    """Pairs of positions that rise and do not overlap; empty where one thing is wrong."""
    if not isinstance(given, list) or len(given) > MOST_SPANS:
        return ()
    spans = []
    at = 0
    for pair in given:
        if not isinstance(pair, list) or [type(part) for part in pair] != [int, int]:
            return ()
        span = Span(*pair)
        if not at <= span.begin < span.end <= count:
            return ()
        at = span.end
        spans.append(span)
    return tuple(spans)


def separated(tokens: Sequence[int], separator: Sequence[int]) -> tuple[Span, ...]:
    """What lies between two separators that follow each other; empty where there are too many."""
    size = len(separator)
    mark = list(separator)
    spans = []
    before = None
    at = 0
    while at <= len(tokens) - size:
        if list(tokens[at : at + size]) != mark:
            at += 1
            continue
        if before is not None and before < at:
            spans.append(Span(before, at))
        at += size
        before = at
    return tuple(spans) if len(spans) <= MOST_SPANS else ()


def piece_of(
    span: Span,
    *,
    block: int,
    skip: int,
    exact_end: int,
) -> Piece | None:
    """What of a document can be reused, or None.

    Args:
        span: of the document.
        block: tokens of a block.
        skip: tokens at its beginning that are computed again, at least.
        exact_end: what lies before is exact already.
    """
    at_least = max(skip, exact_end - span.begin, 0)
    skip = -(-at_least // block) * block
    size = (span.end - span.begin) // block * block
    return (
        Piece(
            begin=span.begin,
            skip=skip,
            size=size,
        )
        if skip < size
        else None
    )


def staged(piece: Piece, block: int) -> Span:
    """Where the blocks of a piece are loaded, before its tokens are moved on by less than a block.

    The blocks of a document lie one after the other from the block on that holds the document's first token. So no two
    documents get one block, and none a block that lies before the first one with a name of the request's own.
    """
    floor = piece.begin // block * block
    return Span(floor + piece.skip, floor + piece.size)


def renamed(hashes: Sequence[bytes], first: int) -> list[bytes]:
    """A request's block hashes, with random ones of the same length, which nobody else has, from block ``first`` on.

    The blocks that follow later chain on these. So a block that holds anything that was not computed from its own
    beginning is never found under an exact hash, and neither is one that rests on it.
    """
    kept = list(hashes[:first])
    sizes = [len(hashed) for hashed in hashes[first:]]
    drawn = io.BytesIO(secrets.token_bytes(sum(sizes)))
    return kept + [drawn.read(size) for size in sizes]
