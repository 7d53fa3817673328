"""Scenes of a few drawn objects, the spatial relations that a picture of them clearly shows, and the pictures.

A scene is a value: everything the drawing needs stands in it, so equal scenes give equal pixels. Lengths are in
pixels of the square picture, x to the right and y downwards, and ``x``, ``y`` of an object are its centre.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

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
OPPOSITE = dict(
    zip(RELATIONS, ("to the right of", "to the left of", "below", "above"), strict=True)
)
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
            return Scene(
                things=things,
                ground=rng.choice(GROUNDS),
                light=rng.uniform(-1, 1),
                grain=rng.getrandbits(31),
            )


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
                thing = Thing(
                    shape=shape,
                    color=color,
                    size=size,
                    x=x,
                    y=y,
                    radius=radius,
                    shade=rng.uniform(-1, 1),
                )
                things.append(thing)
                break
        else:
            return None
    return tuple(things)


def relation_holds(
    scene: Scene,
    subject: int,
    relation: str,
    target: int,
) -> bool | None:
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


RGB = tuple[int, int, int]

_SCALE = 3
_PAINTS: dict[str, RGB] = {
    "red": (212, 34, 38), "orange": (244, 134, 20), "yellow": (248, 222, 40), "green": (34, 148, 62),
    "blue": (32, 84, 208), "purple": (128, 44, 168), "pink": (250, 142, 190), "black": (28, 28, 32),
}  # fmt: skip
_GROUNDS: dict[str, RGB] = {
    "sand": (226, 208, 172),
    "snow": (228, 234, 242),
    "grass": (186, 216, 178),
}
_OUTLINE = 0.62


def draw(scene: Scene) -> Image:
    """The picture of a scene, 96 x 96 RGB; the same scene gives the same pixels."""
    from PIL import Image, ImageDraw

    big = _background(scene).resize((WIDTH * _SCALE, WIDTH * _SCALE), Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(big)
    for thing in scene.things:
        _draw_thing(pen, thing)
    return big.reduce(_SCALE)


def jpeg(image: Image, quality: int = 90) -> bytes:
    """The picture as the bytes of a JPEG file."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _background(scene: Scene) -> Image:
    """A soft, slightly uneven ground: 12 x 12 noise of the scene's own seed, enlarged."""
    import numpy as np
    from PIL import Image

    grain = np.random.default_rng(scene.grain)
    noise = grain.normal(0.0, 5.0, (12, 12, 1)) + grain.normal(0.0, 1.5, (12, 12, 3))
    slope = np.linspace(-6, 6, 12)[:, None, None] * (1 if scene.grain % 2 else -1)
    pixels = np.array(_GROUNDS[scene.ground], dtype=np.float64) + 8 * scene.light + noise + slope
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8), "RGB")


_FILLED = {"fill": "fill"}
_LIT = {"fill": "light"}
_EDGED = {"fill": "fill", "outline": "edge"}
_THICK_EDGED = {**_EDGED, "width": 2}
_LINE = {"fill": "edge", "width": 2}


def _star() -> list[tuple[float, float]]:
    """Ten points, each second one near the center."""
    points = []
    for tenth in range(10):
        angle = math.pi * (tenth / 5 - 0.5)
        radius = 1.08 * (0.42 if tenth % 2 else 1)
        points.append((radius * math.cos(angle), 0.08 + radius * math.sin(angle)))
    return points


def _heart() -> list[tuple[float, float]]:
    """28 points of the curve x = sin³ a, y = (13 cos a - 5 cos 2a - 2 cos 3a - cos 4a) / 16."""
    points = []
    for part in range(28):
        a = 2 * math.pi * part / 28
        up = 13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)
        points.append((math.sin(a) ** 3, 0.92 * -up / 16 - 0.08))
    return points


_STROKES: dict[str, list[tuple[str, list[tuple[float, float]], dict[str, Any]]]] = {
    "cube": [
        ("polygon", [(-1, -0.5), (-0.5, -1), (1, -1), (0.5, -0.5)], {**_LIT, "outline": "edge"}),
        (
            "polygon",
            [(0.5, -0.5), (1, -1), (1, 0.5), (0.5, 1)],
            {"fill": "edge", "outline": "edge"},
        ),
        ("rectangle", [(-1, -0.5), (0.5, 1)], _THICK_EDGED),
    ],
    "ball": [
        ("ellipse", [(-1, -1), (1, 1)], _THICK_EDGED),
        ("ellipse", [(-0.55, -0.6), (-0.1, -0.2)], _LIT),
    ],
    "cone": [
        ("ellipse", [(-1, 0.4), (1, 1)], _THICK_EDGED),
        ("polygon", [(0, -1), (-1, 0.7), (1, 0.7)], _FILLED),
        ("line", [(-1, 0.7), (0, -1), (1, 0.7)], _LINE),
    ],
    "cylinder": [
        ("ellipse", [(-0.66, 0.5), (0.66, 1)], _THICK_EDGED),
        ("rectangle", [(-0.66, -0.72), (0.66, 0.75)], _FILLED),
        ("line", [(-0.66, -0.72), (-0.66, 0.75)], _LINE),
        ("line", [(0.66, -0.72), (0.66, 0.75)], _LINE),
        ("ellipse", [(-0.66, -1), (0.66, -0.45)], {**_THICK_EDGED, "fill": "light"}),
    ],
    "star": [("polygon", _star(), _EDGED)],
    "ring": [("ellipse", [(-1, -1), (1, 1)], {"outline": "fill", "width": "thick"})],
    "cross": [
        ("rectangle", [(-0.34, -1), (0.34, 1)], _FILLED),
        ("rectangle", [(-1, -0.34), (1, 0.34)], _FILLED),
    ],
    "heart": [("polygon", _heart(), _EDGED)],
}
"""How a shape is drawn: strokes of the pen, each with its points in half sides from the center, and its style."""


def _draw_thing(pen: ImageDraw, thing: Thing) -> None:
    x, y = thing.x * _SCALE, thing.y * _SCALE
    r = thing.radius * _SCALE
    fill = _shaded(_PAINTS[thing.color], 1 + 0.07 * thing.shade)
    light = tuple(part + (255 - part) // 2 for part in fill)
    values: dict[Any, Any] = {
        "fill": fill,
        "edge": _shaded(fill, _OUTLINE),
        "light": light,
        "thick": round(0.42 * r),
    }
    for form, points, style in _STROKES[thing.shape]:
        at = [(x + across * r, y + down * r) for across, down in points]
        getattr(pen, form)(at, **{name: values.get(value, value) for name, value in style.items()})


def _shaded(color: RGB, factor: float) -> RGB:
    shaded = [min(255, round(part * factor)) for part in color]
    return (shaded[0], shaded[1], shaded[2])
