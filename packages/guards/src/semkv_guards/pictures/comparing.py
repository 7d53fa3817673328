"""The verdict on two pictures."""

from __future__ import annotations

from math import inf

from semkv_guards.pictures.aligning import align, align_small
from semkv_guards.pictures.changes import change_of_luma, changed
from semkv_guards.pictures.edges import lost
from semkv_guards.pictures.laying import Axis, axis, laid
from semkv_guards.pictures.light import light, lit
from semkv_guards.pictures.planes import Look, Plane, Planes, Small, look_of

LIMIT = 1.0
"""Least `difference` of two pictures that may not stand in for each other."""

_SIZES = 1.13  # between the two pictures' sides
_LEAST = 12  # pixels that both have, across and down
_CLEAR = 2.0  # times what is a change, at a glance
_LITTLE = 5  # levels at a glance, half of what may be clear


def may_show_the_same(a: Small, b: Small) -> bool:
    """False where two pictures differ at a glance. True says nothing."""
    if _agree(a.levels[-1], b.levels[-1]):
        return True
    moved = align_small(a, b)
    if moved is None:
        return False
    first, second = a.levels[-1], b.levels[-1]
    across = axis((moved[0], moved[1]), first.shape[1], second.shape[1])
    down = axis((moved[2], moved[3]), first.shape[0], second.shape[0])
    first = first[down.shared, across.shared]
    second = laid(second, across, down)
    return change_of_luma(first, lit(light(first, second), first, second)) < _CLEAR


def _agree(first: Plane, second: Plane) -> bool:
    """Whether two small pictures that lie over one another as they are differ by little everywhere."""
    import cv2

    if first.shape != second.shape:
        return False
    apart = cv2.absdiff(cv2.blur(first, (3, 3)), cv2.blur(second, (3, 3)))
    return bool(cv2.minMaxLoc(apart)[1] <= _LITTLE)


def difference(a: Planes, b: Planes) -> float:
    """How much two pictures differ: 0 for equal pixels; from `LIMIT` they may show something else, also where
    nothing can be compared (another shape, nothing to align by)."""
    if not _comparable(a, b):
        return inf
    if b.luma.size < a.luma.size:
        a, b = b, a  # the larger one loses detail
    moved = align(a, b)
    if moved is None:
        return inf
    across = axis(moved[0], a.width, b.width)
    down = axis(moved[1], a.height, b.height)
    if min(one.stop - one.start for one in (across, down)) < _LEAST:
        return inf
    own_columns, columns = across.only(a.width, b.width)
    own_rows, rows = down.only(a.height, b.height)
    if lost(a.look, own_columns, own_rows) or lost(b.look, columns, rows):
        return inf
    return _change(a, b, across, down)


def _change(a: Planes, b: Planes, across: Axis, down: Axis) -> float:
    luma = laid(b.luma, across, down)
    found = light(a.luma[down.shared, across.shared], luma)
    if not found.plausible:
        return inf
    if found.same:
        return changed(_cut(a.look, across, down), _laid(b.look, luma, across, down))
    mine = a.pixels[down.shared, across.shared]
    pixels = lit(found, mine, laid(b.pixels, across, down))
    return changed(_cut(a.look, across, down), look_of(pixels))


def _cut(look: Look, across: Axis, down: Axis) -> Look:
    small = down.halved().shared, across.halved().shared
    reds, blues = look.chroma
    luma = look.luma[down.shared, across.shared]
    return Look(luma=luma, chroma=(reds[small], blues[small]))


def _laid(look: Look, luma: Plane, across: Axis, down: Axis) -> Look:
    small = across.halved(), down.halved()
    reds, blues = (laid(plane, *small) for plane in look.chroma)
    return Look(luma=luma, chroma=(reds, blues))


def _comparable(a: Planes, b: Planes) -> bool:
    widths = sorted((a.width, b.width))
    heights = sorted((a.height, b.height))
    return widths[1] <= _SIZES * widths[0] and heights[1] <= _SIZES * heights[0]
