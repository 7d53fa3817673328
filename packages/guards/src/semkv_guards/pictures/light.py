"""Brightness and contrast that the second picture takes on, and what they have burnt out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from semkv_guards.pictures.aligning import GAINS
from semkv_guards.pictures.planes import Plane

_OFFSET = 60.0  # levels of 255 by which black or white may move
_BURNT = 40.0  # levels that white or black may hide
_ROUNDING = 1.5  # levels
_PIXELS = 16_000  # from which brightness and contrast are found
_STRIP = 65_536  # pixels that are lit together: they fit into a core's cache


@dataclass(frozen=True)
class Light:
    """The first picture's levels are ``gain`` times the second's and ``offset``."""

    gain: float
    offset: float

    @property
    def plausible(self) -> bool:
        white = 255 * self.gain + self.offset - 255
        inside = GAINS[0] < self.gain < GAINS[1]
        return inside and max(abs(self.offset), abs(white)) <= _OFFSET

    @property
    def same(self) -> bool:
        """Whether it changes no level by more than rounding explains."""
        return max(abs(self.offset), abs(255 * (self.gain - 1) + self.offset)) < _ROUNDING


def light(mine: Plane, other: Plane) -> Light:
    """From the pixels where two pictures that lie over one another agree best."""
    step = max(1, int((mine.size / _PIXELS) ** 0.5))
    a = mine[step // 2 :: step, step // 2 :: step].astype(np.float32).ravel()
    b = other[step // 2 :: step, step // 2 :: step].astype(np.float32).ravel()
    known = (np.minimum(a, b) > 1) & (np.maximum(a, b) < 254)
    if known.sum() < 64:
        return Light(1.0, float(np.median(a) - np.median(b)))
    a, b = a[known], b[known]
    gain, offset = 1.0, float(np.median(a) - np.median(b))
    for _ in range(5):
        weight = 1 / (1 + ((a - gain * b - offset) / 8) ** 2)
        weight /= weight.sum()
        middle_a, middle_b = float(weight @ a), float(weight @ b)
        spread_a = float(weight @ (a - middle_a) ** 2)
        spread_b = float(weight @ (b - middle_b) ** 2)
        gain = ((spread_a + 25) / (spread_b + 25)) ** 0.5
        offset = middle_a - gain * middle_b
    return Light(gain, offset)


def lit(found: Light, mine: Plane, other: Plane) -> Plane:
    """The second picture's pixels in the first one's light. What was brighter than white, or darker than black, is
    lost: there the first picture's levels count."""
    import cv2

    step = max(16, _STRIP // other.shape[1])
    if len(other) <= step:
        return _lit(found, mine, other)
    strips = [slice(start, start + step) for start in range(0, len(other), step)]
    levels: Plane = cv2.vconcat([_lit(found, mine[strip], other[strip]) for strip in strips])
    return levels


def _lit(found: Light, mine: Plane, other: Plane) -> Plane:
    import cv2

    levels: Plane = cv2.addWeighted(other, found.gain, other, 0.0, found.offset)
    if 255 * found.gain + found.offset < 255:
        white = cv2.threshold(other, 253, 255, cv2.THRESH_BINARY)[1]
        levels = cv2.add(levels, _hidden(cv2.subtract(mine, levels), white))
    if found.offset > 0:
        black = cv2.threshold(other, 1, 255, cv2.THRESH_BINARY_INV)[1]
        levels = cv2.subtract(levels, _hidden(cv2.subtract(levels, mine), black))
    return levels


def _hidden(apart: Plane, burnt: Plane) -> Plane:
    """By how much the levels are apart where that is burnt out, and not too much for it."""
    import cv2

    few: Plane = cv2.threshold(apart, _BURNT - 1, 0, cv2.THRESH_TOZERO_INV)[1]
    hidden: Plane = cv2.bitwise_and(few, burnt)
    return hidden
