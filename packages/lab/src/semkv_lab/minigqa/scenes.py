"""Scenes of a few drawn objects, the relations that a picture of them clearly shows, the pictures, and pairs of them.

A scene is a value: everything the drawing needs stands in it, so equal scenes give equal pixels. Lengths are in
pixels of the square picture, x to the right and y downwards, and ``x``, ``y`` of an object are its centre.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

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
OPPOSITE = dict(zip(RELATIONS, ("to the right of", "to the left of", "below", "above"), strict=True))
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


RGB = tuple[int, int, int]

_SCALE = 3
_PAINTS: dict[str, RGB] = {
    "red": (212, 34, 38), "orange": (244, 134, 20), "yellow": (248, 222, 40), "green": (34, 148, 62),
    "blue": (32, 84, 208), "purple": (128, 44, 168), "pink": (250, 142, 190), "black": (28, 28, 32),
}  # fmt: skip
_GROUNDS: dict[str, RGB] = {"sand": (226, 208, 172), "snow": (228, 234, 242), "grass": (186, 216, 178)}
_OUTLINE = 0.62


def draw(scene: Scene) -> Image.Image:
    """The picture of a scene, 96 x 96 RGB; the same scene gives the same pixels."""
    big = _background(scene).resize((WIDTH * _SCALE, WIDTH * _SCALE), Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(big)
    for thing in scene.things:
        _draw_thing(pen, thing)
    return big.reduce(_SCALE)


def jpeg(image: Image.Image, quality: int = 90) -> bytes:
    """The picture as the bytes of a JPEG file."""
    return encoded(image, "JPEG", quality=quality)


def encoded(image: Image.Image, form: str = "PNG", **options: int) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def _background(scene: Scene) -> Image.Image:
    """A soft, slightly uneven ground: 12 x 12 noise of the scene's own seed, enlarged."""
    grain = np.random.default_rng(scene.grain)
    noise = grain.normal(0.0, 5.0, (12, 12, 1)) + grain.normal(0.0, 1.5, (12, 12, 3))
    slope = np.linspace(-6, 6, 12)[:, None, None] * (1 if scene.grain % 2 else -1)
    pixels = np.array(_GROUNDS[scene.ground], dtype=np.float64) + 8 * scene.light + noise + slope
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8), "RGB")


_EDGED = {"fill": "fill", "outline": "edge"}
_STAR = [(1.08 * (0.42 if i % 2 else 1), math.pi * (i / 5 - 0.5)) for i in range(10)]  # radius and angle
_HEART = [
    (math.sin(a) ** 3, -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 16)
    for a in (2 * math.pi * i / 28 for i in range(28))
]
# How a shape is drawn: strokes of the pen, each with its points in half sides from the center, and its style.
_STROKES: dict[str, list[tuple[str, list[tuple[float, float]], dict[str, Any]]]] = {
    "cube": [
        ("polygon", [(-1, -0.5), (-0.5, -1), (1, -1), (0.5, -0.5)], {"fill": "light", "outline": "edge"}),
        ("polygon", [(0.5, -0.5), (1, -1), (1, 0.5), (0.5, 1)], {"fill": "edge", "outline": "edge"}),
        ("rectangle", [(-1, -0.5), (0.5, 1)], {**_EDGED, "width": 2}),
    ],
    "ball": [
        ("ellipse", [(-1, -1), (1, 1)], {**_EDGED, "width": 2}),
        ("ellipse", [(-0.55, -0.6), (-0.1, -0.2)], {"fill": "light"}),
    ],
    "cone": [
        ("ellipse", [(-1, 0.4), (1, 1)], {**_EDGED, "width": 2}),
        ("polygon", [(0, -1), (-1, 0.7), (1, 0.7)], {"fill": "fill"}),
        ("line", [(-1, 0.7), (0, -1), (1, 0.7)], {"fill": "edge", "width": 2}),
    ],
    "cylinder": [
        ("ellipse", [(-0.66, 0.5), (0.66, 1)], {**_EDGED, "width": 2}),
        ("rectangle", [(-0.66, -0.72), (0.66, 0.75)], {"fill": "fill"}),
        ("line", [(-0.66, -0.72), (-0.66, 0.75)], {"fill": "edge", "width": 2}),
        ("line", [(0.66, -0.72), (0.66, 0.75)], {"fill": "edge", "width": 2}),
        ("ellipse", [(-0.66, -1), (0.66, -0.45)], {"fill": "light", "outline": "edge", "width": 2}),
    ],
    "star": [("polygon", [(r * math.cos(a), 0.08 + r * math.sin(a)) for r, a in _STAR], _EDGED)],
    "ring": [("ellipse", [(-1, -1), (1, 1)], {"outline": "fill", "width": "thick"})],
    "cross": [
        ("rectangle", [(-0.34, -1), (0.34, 1)], {"fill": "fill"}),
        ("rectangle", [(-1, -0.34), (1, 0.34)], {"fill": "fill"}),
    ],
    "heart": [("polygon", [(across, 0.92 * down - 0.08) for across, down in _HEART], _EDGED)],
}


def _draw_thing(pen: ImageDraw.ImageDraw, thing: Thing) -> None:
    x, y, r = thing.x * _SCALE, thing.y * _SCALE, thing.radius * _SCALE
    fill = _shaded(_PAINTS[thing.color], 1 + 0.07 * thing.shade)
    light = tuple(part + (255 - part) // 2 for part in fill)
    values: dict[Any, Any] = {"fill": fill, "edge": _shaded(fill, _OUTLINE), "light": light, "thick": round(0.42 * r)}
    for form, points, style in _STROKES[thing.shape]:
        at = [(x + across * r, y + down * r) for across, down in points]
        getattr(pen, form)(at, **{name: values.get(value, value) for name, value in style.items()})


def _shaded(color: RGB, factor: float) -> RGB:
    red, green, blue = (min(255, round(part * factor)) for part in color)
    return (red, green, blue)


# -- pairs of pictures: a copy, or a change that a question may be about ------------------------------------------
# A picture is enlarged and has a number on it. A change alters one element, so what differs is known.

EDGE = 12  # pixels around the frame that a camera may move by


def _picture(scene: Scene, number: str, width: int) -> Image.Image:
    """The scene with the number on it, with `EDGE` pixels more on each side."""
    inner = draw(scene).resize((width, width), Image.Resampling.BICUBIC)
    wide = Image.fromarray(np.pad(np.asarray(inner), ((EDGE, EDGE), (EDGE, EDGE), (0, 0)), mode="edge"))
    ImageDraw.Draw(wide).text((EDGE + 8, EDGE + 6), number, (20, 20, 20), ImageFont.load_default(width / 16))
    return wide


def changes(scene: Scene, number: str, rng: Random) -> Iterator[tuple[str, Scene, str]]:
    """Changed scenes and numbers by what is changed: a digit, a color, a form, a place, a count, two colors."""
    at = rng.randrange(len(number))
    digit = rng.choice([digit for digit in "0123456789" if digit != number[at]])
    yield "digit", scene, number[:at] + digit + number[at + 1 :]
    yield "color", recolor(scene, rng), number
    index = rng.randrange(len(scene.things))
    one = scene.things[index]
    others = (*scene.things[:index], *scene.things[index + 1 :])
    form = rng.choice([shape for shape in SHAPES if shape != one.shape])
    yield "form", replace(scene, things=(*others, replace(one, shape=form))), number
    far, turn = one.radius * rng.uniform(1, 3), rng.uniform(0, 2 * math.pi)
    low, high = one.radius + 2, WIDTH - one.radius - 2
    x, y = one.x + far * math.cos(turn), one.y + far * math.sin(turn)
    moved = replace(one, x=min(max(x, low), high), y=min(max(y, low), high))
    yield "place", replace(scene, things=(*others, moved)), number
    yield "count", replace(scene, things=others), number
    if swapped := [other for other in others if other.color != one.color]:
        other = swapped[0]
        things = (*(t for t in others if t != other), replace(one, color=other.color), replace(other, color=one.color))
        yield "swap", replace(scene, things=things), number


def frame(image: Image.Image, dx: int = 0, dy: int = 0) -> Image.Image:
    """What the camera sees, moved by some pixels."""
    return image.crop((EDGE + dx, EDGE + dy, image.width - EDGE + dx, image.height - EDGE + dy))


def first_photo(wide: Image.Image, rng: Random) -> bytes:
    return encoded(frame(wide)) if rng.random() < 0.5 else encoded(frame(wide), "JPEG", quality=rng.randint(75, 95))


def shift(wide: Image.Image, rng: Random) -> bytes:
    """The camera moves by one to four pixels."""
    far = rng.randint(1, 4)
    return encoded(frame(wide, *rng.choice(((far, 0), (-far, 0), (0, far), (0, -far), (far, rng.randint(-far, far))))))


def crop(wide: Image.Image, rng: Random) -> bytes:
    """2% of width and height are cut off at one side, or 1% at both; the rest may be enlarged again."""
    image = frame(wide)
    (w, h), part = image.size, rng.choice((0.0, 0.5, 1.0))
    left, top = round(0.02 * w * part), round(0.02 * h * part)
    cut = image.crop((left, top, left + w - round(0.02 * w), top + h - round(0.02 * h)))
    return encoded(cut.resize((w, h), Image.Resampling.BICUBIC) if rng.random() < 0.5 else cut)


def reencoded(wide: Image.Image, rng: Random) -> bytes:
    return encoded(frame(wide), rng.choice(("JPEG", "WEBP")), quality=rng.randint(30, 95))


def light(wide: Image.Image, rng: Random) -> bytes:
    """Brightness or contrast changes by up to 15%."""
    change = rng.choice((ImageEnhance.Brightness, ImageEnhance.Contrast))
    return encoded(change(frame(wide)).enhance(rng.uniform(0.85, 1.15)))


def scale(wide: Image.Image, rng: Random) -> bytes:
    """5% larger or smaller, at most."""
    image, by = frame(wide), rng.uniform(0.95, 1.05)
    return encoded(image.resize((round(image.width * by), round(image.height * by)), Image.Resampling.BICUBIC))


def second(wide: Image.Image, rng: Random) -> bytes:
    """A second photograph: moved by parts of a pixel, another light, other noise, and JPEG."""
    dx, dy, by = rng.uniform(-3, 3), rng.uniform(-3, 3), rng.uniform(0.99, 1.01)
    moved = wide.transform(wide.size, Image.Transform.AFFINE, (by, 0, dx, 0, by, dy), Image.Resampling.BICUBIC)
    pixels = np.asarray(ImageEnhance.Brightness(frame(moved)).enhance(rng.uniform(0.93, 1.07)), dtype=np.float32)
    grain = np.random.default_rng(rng.getrandbits(31)).normal(0, 2, pixels.shape)
    return encoded(Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8)), "JPEG", quality=rng.randint(70, 92))


COPIES: tuple[Callable[[Image.Image, Random], bytes], ...] = (shift, crop, reencoded, light, scale, second)


class ImagePair(NamedTuple):
    """Two images as files; ``what`` names the copy or the change."""

    what: str
    same: bool
    donor: bytes
    request: bytes


def image_pairs(scenes: int, seed: int = 0) -> list[ImagePair]:
    """Of each scene every copy, and every change (half of these also photographed anew)."""
    found = []
    for number in range(scenes):
        rng = Random(f"{seed} {number}")  # noqa: S311
        scene, text, width = make_scene(rng), str(rng.randint(10, 99999)), WIDTH * rng.randint(3, 5)
        wide = _picture(scene, text, width)
        donor = first_photo(wide, rng)
        found += [ImagePair(copy.__name__, True, donor, copy(wide, rng)) for copy in COPIES]
        for what, other, other_text in changes(scene, text, rng):
            taken = first_photo if rng.random() < 0.5 else rng.choice(COPIES)
            found.append(ImagePair(what, False, donor, taken(_picture(other, other_text, width), rng)))
    return found
