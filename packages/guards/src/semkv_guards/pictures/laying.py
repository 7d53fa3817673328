"""The second picture resampled to the first one's pixels, where both have them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from semkv_guards.pictures.aligning import Move
from semkv_guards.pictures.planes import Plane

_NEAR = 0.12  # of a pixel: as good as none
_MARGIN = 2  # pixels at the ends of what both have


@dataclass(frozen=True)
class Axis:
    """Along one axis: the pixel u of the first lies at ``scale * (u + 1/2) + offset - 1/2`` of the second.

    ``start`` and ``stop`` are even numbers of the first's pixels which the second has too.
    """

    scale: float
    offset: float
    start: int
    stop: int

    def halved(self) -> Axis:
        """The same for pictures of half the size."""
        return Axis(
            scale=self.scale,
            offset=self.offset / 2,
            start=self.start // 2,
            stop=self.stop // 2,
        )

    @property
    def shared(self) -> slice:
        """The pixels of the first that are compared."""
        return slice(self.start, self.stop)

    def only(self, mine: int, theirs: int) -> tuple[slice, slice]:
        """The pixels of the first that the second has, and of the second that the first has."""
        begin = -self.offset / self.scale
        end = (theirs - self.offset) / self.scale
        own = _inner(begin, end, mine)
        other = _inner(self.offset, self.offset + self.scale * mine, theirs)
        return own, other


def _inner(begin: float, end: float, length: int) -> slice:
    start = max(0, math.ceil(begin - _NEAR))
    stop = min(length, math.floor(end + _NEAR))
    return slice(start, stop)


def axis(move: Move, mine: int, theirs: int) -> Axis:
    """The axis of a move between pictures of so many pixels. A move that is nearly one by whole pixels is one."""
    stretch, shift = move
    scale = theirs / mine * (1 + stretch)
    offset = (shift - stretch) * theirs / 2
    scale, offset = _whole_pixels(scale, offset, mine, theirs)
    begin = -offset / scale
    end = (theirs - offset) / scale
    is_exact = scale == 1 and offset == round(offset)
    margin = 0 if is_exact else _MARGIN
    start = max(0, math.ceil(begin + margin))
    stop = min(mine, math.floor(end - margin))
    return Axis(
        scale=scale,
        offset=offset,
        start=start + start % 2,
        stop=stop - stop % 2,
    )


def _whole_pixels(scale: float, offset: float, mine: int, theirs: int) -> tuple[float, float]:
    """The second picture or the first is a part of the other, cut out by whole pixels and resized; where it is not,
    scale and offset stay."""
    last = scale * mine + offset
    if _near(offset) and _near(last):
        return (round(last) - round(offset)) / mine, float(round(offset))
    begin = -offset / scale
    end = (theirs - offset) / scale
    if _near(begin) and _near(end):
        scale = theirs / (round(end) - round(begin))
        return scale, -round(begin) * scale
    return scale, offset


def _near(place: float) -> bool:
    return abs(place - round(place)) < _NEAR


def laid(plane: Plane, across: Axis, down: Axis) -> Plane:
    """The second picture's plane over what is compared of the first, with cubic weights."""
    import cv2

    x = _reading(across)
    y = _reading(down)
    cut = _cut(plane, y.start, y.start + y.length, dim=0)
    cut = _cut(cut, x.start, x.start + x.length, dim=1)
    if x.resizes or y.resizes:
        by = {"fx": 1 / x.scale, "fy": 1 / y.scale}
        cut = cv2.resize(cut, None, interpolation=cv2.INTER_CUBIC, **by)
        cut = _cut(cut, 0, y.count, dim=0)
        cut = _cut(cut, 0, x.count, dim=1)
    cut = _shifted(cut, y.part, dim=0)
    cut = _shifted(cut, x.part, dim=1)
    rows = slice(y.lead, y.count - y.lead)
    columns = slice(x.lead, x.count - x.lead)
    return cut[rows, columns]


@dataclass(frozen=True)
class _Reading:
    """What is read of the second picture along an axis: ``length`` pixels from ``start`` become ``count``, the outer
    ``lead`` of which are left out, moved by a ``part`` of a pixel."""

    start: int
    length: int
    count: int
    lead: int
    part: float
    scale: float

    @property
    def resizes(self) -> bool:
        return self.scale != 1


def _reading(axis: Axis) -> _Reading:
    count = axis.stop - axis.start
    resizes = abs(axis.scale - 1) * count > _NEAR
    scale = axis.scale if resizes else 1.0
    # where OpenCV reads the first pixel of what it resizes
    head = scale / 2 - 0.5
    middle = axis.start + count / 2
    begin = axis.scale * middle + axis.offset - scale * count / 2 + scale / 2 - 0.5 - head
    part = (begin - round(begin)) / scale
    lead = 2 if resizes or abs(part) > _NEAR else 0
    begin -= lead * scale
    part = (begin - round(begin)) / scale
    count += 2 * lead
    return _Reading(
        start=round(begin),
        length=math.ceil(count * scale) + 1 if resizes else count,
        count=count,
        lead=lead,
        part=part,
        scale=scale,
    )


def _cut(plane: Plane, start: int, stop: int, *, dim: int) -> Plane:
    """A part of a plane, which may go beyond its ends: there the last pixels come again."""
    import cv2

    length = plane.shape[dim]
    inside = slice(max(0, start), min(length, stop))
    cut = plane[inside] if dim == 0 else plane[:, inside]
    before = max(0, -start)
    after = max(0, stop - length)
    if before or after:
        top, bottom = (before, after) if dim == 0 else (0, 0)
        left, right = (0, 0) if dim == 0 else (before, after)
        cut = cv2.copyMakeBorder(cut, top, bottom, left, right, cv2.BORDER_REPLICATE)
    return cut


def _shifted(plane: Plane, part: float, *, dim: int) -> Plane:
    """A plane moved by a part of a pixel."""
    import cv2

    if abs(part) <= _NEAR:
        return plane
    taps = range(-2, 3)
    weights = np.array([_cubic(abs(tap - part)) for tap in taps], np.float32)
    kernel = weights[:, None] if dim == 0 else weights[None, :]
    found: Plane = cv2.filter2D(plane, -1, kernel, borderType=cv2.BORDER_REPLICATE)
    return found


def _cubic(far: float) -> float:
    """Keys' weight of a pixel so far away."""
    if far < 1:
        return 1.5 * far**3 - 2.5 * far**2 + 1
    if far < 2:
        return -0.5 * far**3 + 2.5 * far**2 - 4 * far + 2
    return 0.0
