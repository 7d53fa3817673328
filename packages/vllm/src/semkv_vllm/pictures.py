"""What a prompt with pictures is to a model: the positions of its tokens, and what stands in place of some of them.

Models with M-RoPE give a token a position on each of several axes (time, height, width). These differ within a picture
only. Behind a picture the positions go on from the largest one, so what stands later, a picture too, is farther on by
the same number on all axes. That is asked of the model for each request, not believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from semkv_vllm.spans import Load, Piece

PICTURE = "image"
"""The modality that is handled; videos and sounds are not."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as a model is told of it.

    Attributes:
        positions: ``[axes, tokens]``; one axis without M-RoPE.
        pictures: vLLM's descriptions of the pictures (``MultiModalFeatureSpec``), in the order of the prompt.
    """

    positions: np.ndarray
    pictures: Sequence[Any] = ()


def straight(axes: int, count: int, shift: int = 0) -> np.ndarray:
    """The positions of a text, ``[axes, count]``."""
    return np.tile(np.arange(shift, shift + count), (axes, 1))


def prompt_of(
    model: Any,
    axes: int,
    tokens: list[int],
    pictures: Sequence[Any],
) -> Prompt:
    """A prompt whose pictures all begin and end in these tokens."""
    if axes == 1 or not pictures:
        positions = straight(axes, len(tokens))
    else:
        found, _ = model.get_mrope_input_positions(tokens, list(pictures))
        positions = found.cpu().numpy()
    return Prompt(
        positions=positions,
        pictures=pictures,
    )


def within(pictures: Iterable[Any], begin: int, end: int) -> list[Any]:
    """The pictures that begin between two tokens, as they stand in what begins at the first one."""
    found = []
    for picture in pictures:
        place = picture.mm_position
        if begin <= place.offset < end:
            moved = replace(place, offset=place.offset - begin)
            found.append(replace(picture, mm_position=moved))
    return found


def end_of(pictures: Iterable[Any], end: int) -> int:
    """The token after the last picture that begins before ``end``, or ``end`` where that is later."""
    places = [picture.mm_position for picture in pictures]
    ends = [place.offset + place.length for place in places if place.offset < end]
    last: int = max([end, *ends])
    return last


def is_cut(pictures: Iterable[Any], begin: int, end: int) -> bool:
    """Whether a part of a prompt begins or ends within a picture."""
    places = [picture.mm_position for picture in pictures]
    return any(
        place.offset < edge < place.offset + place.length
        for place in places
        for edge in (begin, end)
    )


def source_of(
    model: Any,
    load: Load,
    piece: Piece,
    prompt: Prompt,
) -> np.ndarray:
    """The positions of a document's tokens up to a piece's last one, where it was alone."""
    own = within(prompt.pictures, piece.begin, piece.last)
    end = piece.begin + end_of(own, piece.size)
    axes = len(prompt.positions)
    alone = prompt_of(model, axes, load.tokens[piece.begin : end], own)
    return alone.positions[:, : piece.size]


def encoded(model: Any, picture: Any, device: Any) -> torch.Tensor:
    """What the model's encoder makes of a picture, a row for each token in whose place it stands.

    Raises:
        ValueError: what it would be given is not here.
    """
    if picture.data is None:
        raise ValueError("a picture is not here")
    ((_, _, given),) = group_and_batch_mm_kwargs([(PICTURE, picture.data)], device=device)
    outputs = model.embed_multimodal(**given)
    if not outputs:
        raise ValueError("a picture is not here as the encoder needs it")
    rows: torch.Tensor = outputs[0]
    return rows


def overlap(picture: Any, begin: int, end: int) -> tuple[int, int]:
    """The tokens of a picture between two tokens, counted from its first one; an empty range where there are none."""
    place = picture.mm_position
    first = max(begin - place.offset, 0)
    last = min(end - place.offset, place.length)
    return first, max(first, last)
