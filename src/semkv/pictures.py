"""Whether two pictures show the same: the guard of matches in which another image stands in.

Embeddings place a receipt and the same one with another digit on one spot, and a picture moved by a pixel elsewhere.
Here the pixels decide. The second picture is laid over the first (Lucas and Kanade, 1981: shift and scale along both
axes, coarse to fine) and takes on its brightness and contrast. What then differs in some small window by more than
re-encoding explains is a change: of a character, a color, a place, a count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

Plane = np.ndarray[Any, np.dtype[np.float32]]
"""float32 [height, width], 0 to 255."""

LIMIT = 1.0
"""Least `difference` of two pictures that may not stand in for each other."""

MOST_PIXELS = 2_100_000
"""Larger pictures are not compared: they match only themselves."""

_SIDES = (32, 64, 128, 256)  # of the copies that are aligned, coarse to fine
_FARTHEST = 0.09  # share of half a side: a pixel near an edge is moved by 4.5% of the side at most
_STRETCH = 0.03  # between the scales of the two axes: a circle is no ellipse
_SIZES = 1.13  # between the two pictures' sides
# of the contrast; levels of 255 by which black or white may move
_GAINS = (0.75, 1.33)
_OFFSET = 60.0
_BURNT = 40.0  # levels that white or black may hide
_FLAT = 50.0  # variance that is taken for noise

# A change is at least so many levels of 255 in a window of 3 x 3, and such a share of the contrast there: both are more
# where contours differ more all over the picture, up to the second number. Chosen on docs/quality.md's tuned scenes.
_LEVELS = (5.0, 22.0)
_NOISY = 4.5
_SHARE = 0.8
# Of colors at 1/2, 1/4, 1/8 and 1/16 of the size: the larger a thing, the less re-encoding explains. 99% of the scenes'
# copies stay below 18, 8, 5 and 3.
_COLORS = (24.0, 14.0, 8.0, 5.0)
_STRIP = 48.0  # levels, at an edge that only one picture has


def difference(a: Image, b: Image) -> float:
    """How much two pictures in RGB differ: 0 for equal pixels; from `LIMIT` they may show something else, also where
    that cannot be told (too large, another shape, nothing to align by)."""
    (w, h), (v, g) = a.size, b.size
    if max(w * h, v * g) > MOST_PIXELS or min(w, h, v, g) < 16:
        return np.inf
    if max(w, v) > _SIZES * min(w, v) or max(h, g) > _SIZES * min(h, g):
        return np.inf
    if v * g < w * h:
        a, b = b, a  # the larger one loses detail
    moved = _align(a, b)
    if moved is None:
        return np.inf
    across, down = moved
    columns, rows = _shared(across, a.width), _shared(down, a.height)
    mine = np.asarray(a, np.float32)
    if _lost(mine @ _GRAY, columns, rows) or _lost(
        np.asarray(b, np.float32) @ _GRAY, *_other_way(across, down, b)
    ):
        return np.inf
    other = np.asarray(_laid(b, a.size, across, down), np.float32)
    mine, other = mine[rows, columns], other[rows, columns]
    gain, offset = _light(mine @ _GRAY, other @ _GRAY)
    if (
        not _GAINS[0] < gain < _GAINS[1]
        or max(abs(offset), abs(255 * gain + offset - 255)) > _OFFSET
    ):
        return np.inf
    laid = (gain * other + offset).clip(0, 255)
    burnt = (other > 253.5) & (laid < mine) | (other < 1.5) & (
        laid > mine
    )  # what was brighter, or darker, is lost
    return _changed(mine, np.where(burnt & (abs(mine - laid) < _BURNT), mine, laid))


_GRAY = np.array((0.299, 0.587, 0.114), np.float32)
_CHROMA = np.array(((-0.169, -0.331, 0.5), (0.5, -0.419, -0.081)), np.float32).T

Move = tuple[float, float]
"""Along one axis, where -1 and 1 are the picture's ends: x of the first is x * (1 + stretch) + shift of the second."""


def _align(a: Image, b: Image) -> tuple[Move, Move] | None:
    """How the second picture lies over the first, across and down; None where it does not."""
    a, b = a.convert("L"), b.convert("L")
    p = np.zeros(4)
    for side in _SIDES:
        w, h = (max(min(n, 24), round(n * min(1.0, side / max(a.size)))) for n in a.size)
        first = _smooth(np.asarray(_resized(a, w, h), np.float32))
        second = _resized(b, w, h).convert("F")
        x, y = (np.linspace(1 / n - 1, 1 - 1 / n, n, dtype=np.float32)[1:-1] for n in (w, h))
        for _ in range(10):
            over = _smooth(
                np.asarray(_laid(second, (w, h), (p[0], p[1]), (p[2], p[3])), np.float32)
            )
            inside = tuple(
                _within(_shared(m, n)) for m, n in (((p[2], p[3]), h - 2), ((p[0], p[1]), w - 2))
            )
            slope_y, slope_x = (g[inside] for g in np.gradient(over))
            mine, theirs = first[inside], over[inside]
            if min(mine.shape) < 4:
                return None
            gain = np.clip((mine.std() + 1) / (theirs.std() + 1), *_GAINS)
            rest = mine - mine.mean() - gain * (theirs - theirs.mean())
            dx = slope_x * np.float32(gain * w / 2)
            dy = slope_y * np.float32(gain * h / 2)
            jacobian = np.stack((dx * x[inside[1]], dx, dy * y[inside[0], None], dy), -1).reshape(
                -1, 4
            )
            # where there is little to align by
            weighted = jacobian
            damping = 0.02
            if side > _SIDES[1]:  # a thing that has changed does not pull
                damping = 0.002
                far = max(8.0, 2 * float(np.sqrt((rest * rest).mean())))
                weighted = jacobian / (1 + (rest.reshape(-1, 1) / far) ** 2)
            normal = (weighted.T @ jacobian).astype(np.float64)
            normal += np.eye(4) * damping * (np.trace(normal) + rest.size)
            step = np.linalg.solve(normal, (weighted.T @ rest.ravel()).astype(np.float64))
            p += step
            if not np.isfinite(p).all() or abs(p).max() > 2 * _FARTHEST:
                return None
            if abs(step).max() * max(w, h) < 0.03:
                break
    across = (float(p[0]), float(p[1]))
    down = (float(p[2]), float(p[3]))
    far = max(abs(stretch) + abs(shift) for stretch, shift in (across, down))
    pixels = (b.width / a.width * (1 + across[0])) / (b.height / a.height * (1 + down[0]))
    return None if far > _FARTHEST or abs(pixels - 1) > _STRETCH else (across, down)


def _resized(image: Image, width: int, height: int) -> Image:
    from PIL.Image import Resampling

    smaller = width * 3 < image.width * 2
    return image.resize((width, height), Resampling.BOX if smaller else Resampling.BICUBIC)


def _laid(image: Image, size: tuple[int, int], across: Move, down: Move) -> Image:
    """An image as it lies over one of ``size``."""
    from PIL.Image import Resampling, Transform

    (w, h) = size
    (sx, dx) = across
    (sy, dy) = down
    x, y = image.width / w * (1 + sx), image.height / h * (1 + sy)
    where = (x, 0, (dx - sx) * image.width / 2, 0, y, (dy - sy) * image.height / 2)
    return image.transform(size, Transform.AFFINE, where, Resampling.BICUBIC)


def _shared(move: Move, length: int) -> slice:
    """The pixels of the first picture that the second has, too, but for two at its ends."""
    stretch, shift = move
    ends = [((end - shift) / (1 + stretch) + 1) / 2 * length for end in (-1, 1)]
    return slice(int(max(0.0, np.ceil(ends[0] + 1.5))), int(min(length, np.floor(ends[1] - 1.5))))


def _within(pixels: slice) -> slice:
    return slice(pixels.start + 1, max(pixels.start + 1, pixels.stop - 1))


def _other_way(across: Move, down: Move, b: Image) -> tuple[slice, slice]:
    """The pixels of the second picture that the first has: columns and rows."""
    columns, rows = (
        _shared((1 / (1 + stretch) - 1, -shift / (1 + stretch)), length)
        for (stretch, shift), length in ((across, b.width), (down, b.height))
    )
    return columns, rows


def _lost(gray: Plane, columns: slice, rows: slice) -> bool:
    """Whether an edge that only this picture has shows what does not go on inside."""
    for plane, kept in ((gray, rows), (gray.T, columns)):
        for strip, inner in (
            (plane[: kept.start], plane[kept.start : 2 * kept.start + 8]),
            (plane[kept.stop :][::-1], plane[2 * kept.stop - len(plane) - 8 : kept.stop][::-1]),
        ):
            if len(strip) > 2 and len(inner):
                there, beside = _contrast(strip), _contrast(inner)
                beside = np.maximum(beside, np.maximum(np.roll(beside, 1), np.roll(beside, -1)))
                if (there > _STRIP + 1.5 * beside).any():
                    return True
    return False


def _contrast(strip: Plane) -> Any:
    """Largest less smallest value in every 8 pixels along a strip."""
    blocks = strip[:, : strip.shape[1] // 8 * 8].reshape(len(strip), -1, 8)
    return np.ptp(blocks, axis=(0, 2)) if blocks.size else np.zeros(1)


def _light(mine: Plane, other: Plane) -> tuple[float, float]:
    """Contrast and brightness that the second picture takes on, from the pixels where the two agree best."""
    known = (mine > 1) & (mine < 254) & (other > 1) & (other < 254)
    if known.sum() < 64:
        return 1.0, float(np.median(mine) - np.median(other))
    a, b = mine[known], other[known]
    gain, offset = 1.0, float(np.median(a) - np.median(b))
    for _ in range(5):
        weight = 1 / (1 + ((a - gain * b - offset) / 8) ** 2)
        weight /= weight.sum()
        middle_a, middle_b = float(weight @ a), float(weight @ b)
        spread_a, spread_b = (
            float(weight @ (x - m) ** 2) for x, m in ((a, middle_a), (b, middle_b))
        )
        gain = ((spread_a + 25) / (spread_b + 25)) ** 0.5
        offset = middle_a - gain * middle_b
    return gain, offset


def _changed(a: Any, b: Any) -> float:
    """The largest change in any window, in units of what is one: of light at full and half size, of color below."""
    most = 0.0
    for x, y in ((a, b), (_half(a), _half(b))):
        first = _smooth(x @ _GRAY - 128)
        second = _smooth(y @ _GRAY - 128)
        rest = first - second
        contrast = np.maximum(*(_mean3(z * z) - _mean3(z) ** 2 for z in (first, second)))
        power = _mean3(rest * rest)
        noise = float(np.sqrt(max(0.0, (power * contrast).sum() / (contrast.sum() + 1))))
        levels = np.clip(_NOISY * noise, *_LEVELS)
        share = power / (contrast + _FLAT)
        most = max(
            most,
            float(
                np.minimum(abs(_mean3(rest)) / levels, share / (_SHARE * levels / _LEVELS[1])).max(
                    initial=0.0
                )
            ),
        )
    colors = (a - b) @ _CHROMA
    for limit in _COLORS:
        colors = _half(colors)
        most = max(most, float(abs(_mean3(colors)).max(initial=0.0)) / limit)
    return most


def _half(x: Any) -> Any:
    x = x[: len(x) // 2 * 2, : x.shape[1] // 2 * 2]
    return (x[::2, ::2] + x[1::2, ::2] + x[::2, 1::2] + x[1::2, 1::2]) / 4


def _smooth(x: Any) -> Any:
    """Binomial, over 3 x 3; a pixel less at each end."""
    x = (x[:-2] + 2 * x[1:-1] + x[2:]) / 4
    return (x[:, :-2] + 2 * x[:, 1:-1] + x[:, 2:]) / 4


def _mean3(x: Any) -> Any:
    x = x[:-2] + x[1:-1] + x[2:]
    return (x[:, :-2] + x[:, 1:-1] + x[:, 2:]) / 9
