"""Scenes of a few drawn objects, and the spatial relations that a picture of them clearly shows.

A scene is a value: everything the drawing needs stands in it, so equal scenes give equal pixels. Lengths are in
pixels of the square picture, x to the right and y downwards, and ``x``, ``y`` of an object are its centre.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

WIDTH = 96
"""Side of a picture in pixels."""

SHAPES = ("cube", "ball", "cone", "cylinder", "star", "ring", "cross", "heart")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black")
SIZES = ("small", "large")
GROUNDS = ("sand", "snow", "grass")

RADIUS = {"small": 7.0, "large": 12.5}
"""Half the side of an object's square, before a jitter of 6%."""

MARGIN = 14.0
"""Two centres nearer than this along an axis have no relation along it: a question about it would be unfair."""

RELATIONS = ("to the left of", "to the right of", "above", "below")
OPPOSITE = {
    "to the left of": "to the right of",
    "to the right of": "to the left of",
    "above": "below",
    "below": "above",
}
_GAP = 2.0


@dataclass(frozen=True, slots=True)
class Thing:
    """One object: its shape, colour and size by name, its centre and half side in pixels, its shade in [-1, 1]."""

    shape: str
    color: str
    size: str
    x: float
    y: float
    radius: float
    shade: float = 0.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What one picture shows. ``grain`` seeds the background's texture, ``light`` in [-1, 1] shifts its brightness."""

    things: tuple[Thing, ...]
    ground: str
    light: float
    grain: int


def make_scene(rng: Random) -> Scene:
    """A scene of 3 to 5 objects that do not overlap; no two share both shape and colour.

    Half of the scenes hold two objects of one shape and half two of one colour, so that a phrase often needs an
    attribute to be unique and "the same colour" is often true.
    """
    kinds = _choose_kinds(rng, rng.choice((3, 3, 4, 4, 5)))
    while True:
        things = _place(rng, kinds)
        if things is not None:
            return Scene(things, rng.choice(GROUNDS), rng.uniform(-1, 1), rng.getrandbits(31))


def _choose_kinds(rng: Random, count: int) -> list[tuple[str, str]]:
    shapes = rng.sample(SHAPES, count)
    colors = rng.sample(COLORS, count)
    if rng.random() < 0.5:
        shapes[1] = shapes[0]
    if rng.random() < 0.5:
        colors[-1] = colors[0]
    kinds = list(zip(shapes, colors, strict=True))
    rng.shuffle(kinds)
    return kinds


def _place(rng: Random, kinds: list[tuple[str, str]]) -> tuple[Thing, ...] | None:
    things: list[Thing] = []
    for shape, color in kinds:
        size = rng.choice(SIZES)
        radius = RADIUS[size] * rng.uniform(0.94, 1.06)
        low, high = radius + 2, WIDTH - radius - 2
        for _ in range(24):
            x, y = rng.uniform(low, high), rng.uniform(low, high)
            if all(max(abs(x - t.x), abs(y - t.y)) > radius + t.radius + _GAP for t in things):
                things.append(Thing(shape, color, size, x, y, radius, rng.uniform(-1, 1)))
                break
        else:
            return None
    return tuple(things)


def relation_holds(scene: Scene, subject: int, relation: str, target: int) -> bool | None:
    """Whether object ``subject`` clearly stands in ``relation`` to ``target``; None where the picture is not clear."""
    a, b = scene.things[subject], scene.things[target]
    delta = b.x - a.x if relation in ("to the left of", "to the right of") else b.y - a.y
    if abs(delta) < MARGIN:
        return None
    return (delta > 0) == (relation in ("to the left of", "above"))


def side_of(scene: Scene, index: int, axis: str) -> str | None:
    """``left``/``right`` for the axis ``hposition``, ``top``/``bottom`` for ``vposition``; None near the middle."""
    thing = scene.things[index]
    offset = (thing.x if axis == "hposition" else thing.y) - WIDTH / 2
    if abs(offset) < MARGIN / 2:
        return None
    names = ("left", "right") if axis == "hposition" else ("top", "bottom")
    return names[offset > 0]


def recolor(scene: Scene, rng: Random) -> Scene:
    """A look-alike: the same scene with one object in another colour; no two objects come to share shape and colour."""
    index = rng.randrange(len(scene.things))
    thing = scene.things[index]
    taken = {t.color for t in scene.things if t.shape == thing.shape}
    color = rng.choice([c for c in COLORS if c not in taken])
    things = (*scene.things[:index], replace(thing, color=color), *scene.things[index + 1 :])
    return replace(scene, things=things)
