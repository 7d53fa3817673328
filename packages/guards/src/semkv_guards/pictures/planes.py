"""What is computed of one picture before it is compared with any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

Plane = np.ndarray[Any, np.dtype[Any]]
"""[height, width], levels from 0 to 255."""

MOST_PIXELS = 25_000_000
"""Larger pictures are not compared: they match only themselves."""

# pixels a side; OpenCV lays no longer ones over one another
_LEAST_SIDE = 16
_LONGEST_SIDE = 32_000
SIDES = (32, 64, 128)  # of the copies that are aligned as a whole, coarse to fine
_LEAST = 24  # pixels of a copy's shorter side
_MIDDLE = 512  # side of the copy between the last of them and a large picture


@dataclass(frozen=True, eq=False)
class Small:
    """A picture at a glance.

    Attributes:
        levels: luma by `SIDES`.
    """

    levels: tuple[Plane, ...]

    @property
    def nbytes(self) -> int:
        return sum(level.nbytes for level in self.levels)


@dataclass(frozen=True, eq=False)
class Look:
    """What is compared of two pictures: luma of every pixel, and two planes of chroma of half the width and height."""

    luma: Plane
    chroma: tuple[Plane, Plane]


@dataclass(frozen=True, eq=False)
class Planes:
    """A picture at full size.

    Attributes:
        pixels: RGB.
        middle: luma of a large picture at about 512 pixels; of a smaller one all of it.
    """

    pixels: Plane
    look: Look
    middle: Plane
    small: Small

    @property
    def luma(self) -> Plane:
        return self.look.luma

    @property
    def width(self) -> int:
        return int(self.luma.shape[1])

    @property
    def height(self) -> int:
        return int(self.luma.shape[0])

    @property
    def nbytes(self) -> int:
        planes = (self.pixels, self.luma, *self.look.chroma, self.middle, self.small)
        return sum(plane.nbytes for plane in planes)


def planes_of(picture: Image | Plane) -> Planes:
    """The planes of a picture in RGB, or of its pixels.

    Raises:
        OSError: it has too few pixels to be compared, or too many in a row.
    """
    pixels = np.asarray(picture)
    sides = pixels.shape[:2]
    if min(sides) < _LEAST_SIDE or max(sides) > _LONGEST_SIDE:
        raise OSError(
            f"a picture of less than {_LEAST_SIDE} or more than {_LONGEST_SIDE} pixels a side"
        )
    look = look_of(pixels)
    middle = look.luma
    if max(middle.shape) > 2.2 * _MIDDLE:
        middle = shrunk(middle, _MIDDLE)
    return Planes(
        pixels=pixels,
        look=look,
        middle=middle,
        small=_small(middle),
    )


def look_of(pixels: Plane) -> Look:
    """The look of pixels in RGB."""
    import cv2

    chroma = cv2.cvtColor(halved(pixels), cv2.COLOR_RGB2YCrCb)
    reds, blues = (cv2.extractChannel(chroma, channel) for channel in (1, 2))
    return Look(luma=luma_of(pixels), chroma=(reds, blues))


def small_of(picture: Image | Plane) -> Small:
    """A picture in RGB, or its pixels, at a glance; a draft of it will do."""
    return _small(luma_of(np.asarray(picture)))


def _small(luma: Plane) -> Small:
    levels = []
    for side in reversed(SIDES):
        luma = shrunk(luma, side)
        levels.append(luma)
    return Small(levels=tuple(reversed(levels)))


def luma_of(pixels: Plane) -> Plane:
    """The luma of pixels in RGB."""
    import cv2

    found: Plane = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    return found


def shrunk(plane: Plane, side: int) -> Plane:
    """A plane whose longer side is ``side``, where it is longer."""
    height, width = plane.shape[:2]
    part = min(1.0, side / max(height, width))
    columns = max(min(width, _LEAST), round(width * part))
    rows = max(min(height, _LEAST), round(height * part))
    return _resized(plane, columns, rows)


def halved(plane: Plane) -> Plane:
    """The means of 2 x 2 pixels; an odd last row or column is left out."""
    height, width = (length // 2 for length in plane.shape[:2])
    return _resized(plane[: 2 * height, : 2 * width], width, height)


def _resized(plane: Plane, width: int, height: int) -> Plane:
    import cv2

    if plane.shape[:2] == (height, width):
        return plane
    smaller = width < plane.shape[1]
    how = cv2.INTER_AREA if smaller else cv2.INTER_CUBIC
    found: Plane = cv2.resize(plane, (width, height), interpolation=how)
    return found


def smoothed(planes: Any) -> Any:
    """Binomial, over 3 x 3, of [count, height, width]; a pixel less at each end."""
    planes = _binomial(planes[:, :-2], planes[:, 1:-1], planes[:, 2:])
    return _binomial(planes[:, :, :-2], planes[:, :, 1:-1], planes[:, :, 2:])


def _binomial(before: Any, middle: Any, after: Any) -> Any:
    return (before + 2 * middle + after) / 4
