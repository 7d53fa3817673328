"""How one picture lies over another: shift and scale along both axes, coarse to fine (Lucas and Kanade, 1981).

Small copies are aligned as a whole. Large ones are aligned by patches at contours, since the rest of their pixels says
nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from semkv_guards.pictures.planes import SIDES, Plane, Planes, Small, smoothed

_FARTHEST = 0.09  # share of half a side: a pixel near an edge is moved by 4.5% of the side at most
_STRETCH = 0.03  # between the scales of the two axes: a circle is no ellipse
GAINS = (0.75, 1.33)  # of the contrast
_STEPS = 10
_FEW_STEPS = 3
_CLOSE = 8.0  # levels, at the mean
_STILL = 0.03  # pixels: no further step

# patches: so many cells a side, and pixels of the patch in each
_CELLS = 3
_PATCH = 24
_WHOLE = 256  # a plane of at most so many pixels a side is aligned as a whole

Move = tuple[float, float]
"""Along one axis, where -1 and 1 are the picture's ends: x of the first is x * (1 + stretch) + shift of the second."""

_Numbers = Any  # an array of floats, mostly: NumPy's stubs do not follow their width


@dataclass(frozen=True)
class _Sample:
    """Patches of the first picture: luma [count, height, width], and where their pixels lie, from -1 to 1."""

    luma: _Numbers
    x: _Numbers  # [count, 1, width]
    y: _Numbers  # [count, height, 1]


def align_small(a: Small, b: Small, sides: int = len(SIDES)) -> _Numbers | None:
    """The move of two pictures at a glance, by so many of the `SIDES`; None where there is none."""
    move = np.zeros(4)
    levels = zip(SIDES[:sides], a.levels, b.levels, strict=False)
    for side, first, second in levels:
        found = _refined(move, _whole(first), first.shape, second, robust=side == SIDES[-1])
        if found is None:
            return None
        move = found
    return move


def align(a: Planes, b: Planes) -> tuple[Move, Move] | None:
    """How the second picture lies over the first, across and down; None where it does not."""
    sample = _sample(a.luma, a.small)
    move = _in_place(sample, a.luma, b.luma)
    if move is None:
        move = align_small(a.small, b.small, sides=2)
        if a.middle is not a.luma and move is not None:
            middle = _sample(a.middle, a.small)
            move = _refined(move, middle, a.middle.shape, b.middle, robust=True)
        if move is not None:
            move = _refined(move, sample, a.luma.shape, b.luma, robust=True)
    return None if move is None else _plausible(move, a, b)


def _in_place(sample: _Sample, first: Plane, second: Plane) -> _Numbers | None:
    """The move of pictures that lie over one another as they are, as most copies do."""
    if first.shape != second.shape:
        return None
    near = _refined(np.zeros(4), sample, first.shape, second, robust=True, steps=_FEW_STEPS)
    if near is None or abs(near).max() * max(first.shape) > 1:
        return None
    over, inside = _laid(sample, near, second)
    mine = smoothed(sample.luma)
    apart = _within(abs(mine - over)) * inside
    most = min(_CLOSE, float(mine.std()) / 8)
    return near if float(apart.mean()) < most else None


def _sample(plane: Plane, small: Small) -> _Sample:
    return _patches(plane, small) if max(plane.shape) > _WHOLE else _whole(plane)


def _plausible(move: _Numbers, a: Planes, b: Planes) -> tuple[Move, Move] | None:
    numbers = [float(number) for number in move]
    across = (numbers[0], numbers[1])
    down = (numbers[2], numbers[3])
    farthest = max(abs(stretch) + abs(shift) for stretch, shift in (across, down))
    scale_across = b.width / a.width * (1 + across[0])
    scale_down = b.height / a.height * (1 + down[0])
    stretched = abs(scale_across / scale_down - 1)
    if farthest > _FARTHEST or stretched > _STRETCH:
        return None
    return across, down


def _whole(plane: Plane) -> _Sample:
    height, width = plane.shape
    return _Sample(
        luma=np.asarray(plane, np.float32)[None],
        x=_places(np.arange(width), width)[None, None, :],
        y=_places(np.arange(height), height)[None, :, None],
    )


def _places(pixels: _Numbers, length: int) -> _Numbers:
    """From -1 to 1, of pixels by number."""
    return ((2 * pixels + 1) / length - 1).astype(np.float32)


def _patches(plane: Plane, small: Small) -> _Sample:
    """A patch in each cell, where the small copy has its strongest contour across or down."""
    height, width = plane.shape
    rows, columns = _contours(small.levels[-1])
    top = (rows * height - _PATCH / 2).astype(int).clip(0, height - _PATCH)
    left = (columns * width - _PATCH / 2).astype(int).clip(0, width - _PATCH)
    down = top[:, None] + np.arange(_PATCH)
    across = left[:, None] + np.arange(_PATCH)
    return _Sample(
        luma=plane[down[:, :, None], across[:, None, :]].astype(np.float32),
        x=_places(across, width)[:, None, :],
        y=_places(down, height)[:, :, None],
    )


def _contours(level: Plane) -> tuple[_Numbers, _Numbers]:
    """Where patches lie, from 0 to 1: rows and columns. In every other cell the contour goes across, else down."""
    high, wide = (length // _CELLS for length in level.shape)
    kept = level[: high * _CELLS, : wide * _CELLS].astype(np.float32)
    steepest = []
    for slope in np.gradient(kept):
        cells = abs(slope).reshape(_CELLS, high, _CELLS, wide)
        pixels = cells.swapaxes(1, 2).reshape(_CELLS**2, -1)
        steepest.append(pixels.argmax(axis=1))
    number = np.arange(_CELLS**2)
    row, column = np.divmod(number, _CELLS)
    strongest = np.where(number % 2, *steepest)
    down, across = np.divmod(strongest, wide)
    rows = row * high + down
    columns = column * wide + across
    height, width = level.shape
    return (rows + 0.5) / height, (columns + 0.5) / width


def _refined(
    start: _Numbers,
    sample: _Sample,
    size: tuple[int, ...],
    second: Plane,
    *,
    robust: bool,
    steps: int = _STEPS,
) -> _Numbers | None:
    """The move that lays the second picture over the sample best, by Gauss and Newton's steps from ``start``.

    Where it is ``robust``, a thing that has changed does not pull.
    """
    height, width = size
    move = start
    first = smoothed(sample.luma)
    x = sample.x[:, :, 2:-2]
    y = sample.y[:, 2:-2, :]
    for _ in range(steps):
        over, inside = _laid(sample, move, second)
        count = float(inside.sum())
        if count < 16:
            return None
        gain, rest = _in_one_light(_within(first), _within(over), inside, count)
        slope_y, slope_x = _slopes(over)
        dx = slope_x * (gain * np.float32(width / 2)) * inside
        dy = slope_y * (gain * np.float32(height / 2)) * inside
        derivatives = (dx * x, dx, dy * y, dy)
        jacobian = np.stack([derivative.ravel() for derivative in derivatives])
        step = _step(jacobian, rest.ravel(), count, robust=robust)
        move = move + step
        if not np.isfinite(move).all() or abs(move).max() > 2 * _FARTHEST:
            return None
        if abs(step).max() * max(width, height) < _STILL:
            break
    return move


def _in_one_light(
    mine: _Numbers, theirs: _Numbers, inside: _Numbers, count: float
) -> tuple[np.float32, _Numbers]:
    """The contrast that the second picture takes on, and what differs then."""
    middle, spread = _moments(mine, inside, count)
    other_middle, other_spread = _moments(theirs, inside, count)
    gain = np.float32(np.clip((spread + 1) / (other_spread + 1), *GAINS))
    rest = mine - middle - gain * (theirs - other_middle)
    return gain, rest * inside


def _step(jacobian: _Numbers, rest: _Numbers, count: float, *, robust: bool) -> _Numbers:
    """A damped step of Gauss and Newton."""
    weighted = jacobian
    damping = 0.02
    if robust:
        damping = 0.002
        far = max(8.0, 2 * float(np.sqrt(rest @ rest / count)))
        weighted = jacobian / (1 + (rest / np.float32(far)) ** 2)
    normal = (weighted @ jacobian.T).astype(np.float64)
    normal += np.eye(4) * damping * (np.trace(normal) + count)
    slope = (weighted @ rest).astype(np.float64)
    return np.linalg.solve(normal, slope)


def _laid(sample: _Sample, move: _Numbers, second: Plane) -> tuple[_Numbers, _Numbers]:
    """The second picture's luma where the sample's pixels lie, smoothed; and 1 where it has them, else 0."""
    import cv2

    height, width = second.shape
    columns, has_column = _read_at(sample.x, move[:2], width)
    rows, has_row = _read_at(sample.y, move[2:], height)
    shape = sample.luma.shape
    flat = (shape[0] * shape[1], shape[2])
    over = cv2.remap(
        second,
        np.broadcast_to(columns, shape).reshape(flat),
        np.broadcast_to(rows, shape).reshape(flat),
        cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )
    there = has_column & has_row
    inside = there[:, 2:-2, 2:-2].astype(np.float32)
    luma = over.reshape(shape).astype(np.float32)
    return smoothed(luma), inside


def _read_at(places: _Numbers, move: _Numbers, length: int) -> tuple[_Numbers, _Numbers]:
    """Along one axis: the second picture's pixels at places of the first, and whether it has them."""
    stretch, shift = move
    moved = places * np.float32(1 + stretch) + np.float32(shift)
    pixels = (moved + 1) * np.float32(length / 2) - np.float32(0.5)
    return pixels, abs(moved) < 1 - 3 / length


def _within(planes: _Numbers) -> _Numbers:
    """A pixel less at each end."""
    return planes[:, 1:-1, 1:-1]


def _slopes(plane: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Down and across; a pixel less at each end."""
    down = (plane[:, 2:, 1:-1] - plane[:, :-2, 1:-1]) / 2
    across = (plane[:, 1:-1, 2:] - plane[:, 1:-1, :-2]) / 2
    return down, across


def _moments(values: _Numbers, inside: _Numbers, count: float) -> tuple[np.float32, np.float32]:
    """Mean and standard deviation of what is inside."""
    middle = float((values * inside).sum()) / count
    apart = (values - np.float32(middle)) * inside
    flat = apart.ravel()
    variance = float(flat @ flat) / count
    return np.float32(middle), np.float32(variance**0.5)
