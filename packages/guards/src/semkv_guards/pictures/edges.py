"""Whether an edge that only one of two pictures has shows a thing that the other does not.

A strip at the edge may hold what goes on inside: a contour that leaves the picture, a texture, a crop's share of a sky.
It may not hold a thing of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from semkv_guards.pictures.planes import Look, Plane

_BLOCK = 8  # pixels along a strip that are judged together
_STRIP = 48.0  # levels, in a block
_MORE = 1.5  # times the contrast inside
_MARGIN = 2  # pixels that a strip has in common with the inside: what is left of a letter explains nothing
_THIN = 3 + _MARGIN  # pixels: no thing that can be recognized is smaller
_WIDE = 32  # pixels inside, and along the strip, where a thin strip's contrast or a texture may be found again
_COLOR = 30.0  # levels of chroma
_FLAT = 12  # levels: the ground of what is drawn or written
_FLAT_SHARE = 0.15  # of a texture's pixels, at most

_Numbers = Any  # an array of floats, mostly: NumPy's stubs do not follow their width


def lost(look: Look, columns: slice, rows: slice) -> bool:
    """Whether a strip outside of these rows and columns shows a thing that does not go on inside of them."""
    if any(_shows_more(*ends) for ends in _strips(look.luma, columns, rows)):
        return True
    small = _half(columns), _half(rows)
    return any(_has_more_color(*ends) for plane in look.chroma for ends in _strips(plane, *small))


def _half(pixels: slice) -> slice:
    return slice((pixels.start + 1) // 2, pixels.stop // 2)


def _strips(luma: Plane, columns: slice, rows: slice) -> Iterator[tuple[Plane, Plane]]:
    """Each strip and what is inside of it, as rows from their common border on."""
    for plane, kept in ((luma, rows), (luma.T, columns)):
        start = kept.start + _MARGIN if kept.start else 0
        stop = kept.stop - _MARGIN if kept.stop < len(plane) else len(plane)
        yield plane[:start][::-1], plane[start:stop]
        yield plane[stop:], plane[start:stop][::-1]


def _shows_more(strip: Plane, inside: Plane) -> bool:
    if not _can_be_judged(strip, inside):
        return False
    depth = len(strip)
    there = _contrast(strip)
    beside = _around(_contrast(inside[: depth + _BLOCK]), 1)
    more = there > _STRIP + _MORE * beside
    if not more.any():
        return False
    near = inside[: max(_WIDE, depth + _BLOCK)]
    most_near = _around(_contrast(near), _WIDE // _BLOCK)
    stands_out = there > _STRIP + most_near
    if depth <= _THIN:
        return bool((more & stands_out).any())
    more &= _largest(_alone(strip, inside)) > _STRIP
    more &= stands_out | (_flat(strip) > _FLAT_SHARE)
    return bool(more.any())


def _has_more_color(strip: Plane, inside: Plane) -> bool:
    if not _can_be_judged(strip, inside):
        return False
    near = inside[: max(_WIDE, 2 * len(strip))]
    return _is_higher(strip, near) or _is_higher(255 - strip, 255 - near)


def _can_be_judged(strip: Plane, inside: Plane) -> bool:
    return len(strip) > 0 and len(inside) > 0 and strip.shape[1] >= _BLOCK


def _is_higher(strip: Plane, near: Plane) -> bool:
    """Whether a block of a strip has a color that no block near it comes close to."""
    most_near = _around(_largest(near), _WIDE // _BLOCK)
    return bool((_largest(strip) > most_near + _COLOR).any())


def _largest(strip: Plane) -> _Numbers:
    """Largest value in every block along a strip."""
    return _blocks(strip).max(axis=(0, 2))


def _contrast(strip: Plane) -> _Numbers:
    """Largest less smallest value in every block along a strip."""
    return np.ptp(_blocks(strip), axis=(0, 2)).astype(np.float32)


def _blocks(strip: Plane) -> Plane:
    """[depth, blocks, pixels along the strip]; the last pixels along it belong to the last block."""
    count = strip.shape[1] // _BLOCK
    blocks: Plane = strip[:, : count * _BLOCK].reshape(len(strip), count, _BLOCK)
    return blocks


def _around(values: _Numbers, far: int) -> _Numbers:
    """The largest of each block and so many on both sides of it."""
    padded = np.pad(values, far, mode="edge")
    return np.lib.stride_tricks.sliding_window_view(padded, 2 * far + 1).max(axis=1)


def _alone(strip: Plane, inside: Plane) -> Plane:
    """By how many levels a pixel is darker, or brighter, than anything between it and a line inside, as far from the
    border as the strip is deep: what is connected with that line by pixels like it is not alone."""
    near = inside[: len(strip) + 2][::-1]
    whole = np.concatenate((near, strip))
    dark = _filled(whole) - whole
    bright = _filled(255 - whole) - (255 - whole)
    alone: Plane = np.maximum(dark, bright)[len(near) :]
    return alone


def _filled(plane: Plane) -> Plane:
    """Dark places that no path of dark pixels leads to from the first two rows are filled up to the lowest such
    path (reconstruction by erosion)."""
    import cv2

    plane = np.ascontiguousarray(plane)
    filled = np.full_like(plane, 255)
    filled[:2] = plane[:2]
    around = np.ones((3, 3), np.uint8)
    for _ in range(4 * len(plane) + 2 * _WIDE):
        lower = cv2.max(plane, cv2.erode(filled, around))
        if np.array_equal(lower, filled):
            break
        filled = lower
    return filled


def _flat(strip: Plane) -> _Numbers:
    """The share of pixels in every block, and the ones beside it, that differ little from those around them."""
    import cv2

    around = np.ones((3, 3), np.uint8)
    strip = np.ascontiguousarray(strip)
    spread = cv2.dilate(strip, around) - cv2.erode(strip, around)
    return _around((_blocks(spread) <= _FLAT).mean(axis=(0, 2)), 1)
