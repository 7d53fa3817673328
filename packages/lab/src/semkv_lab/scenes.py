"""Images with known contents, near-duplicates of them, and look-alikes in which one thing has changed.

A scene is a ground and a list of elements: texts and shapes. A change edits one element, so what differs between two
images is known.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from semkv_lab.minigqa.scenes import draw as draw_minigqa
from semkv_lab.minigqa.scenes import make_scene, recolor

FONT_FOLDER = Path(mpl.get_data_path()) / "fonts" / "ttf"
FORMS = ("box", "disc", "ring", "peak")
EDGE = 12  # pixels around the frame that a camera may move by
PAINTS = (
    (200, 40, 40), (240, 140, 30), (235, 210, 50), (40, 150, 70), (40, 90, 200), (130, 50, 170), (240, 140, 190),
    (30, 30, 35), (120, 80, 50), (90, 190, 200),
)  # fmt: skip
WORDS = (
    "total ticket gate street lemon river model price window garden market train hotel doctor seat room table north "
    "paper bridge coffee valve motor filter island harbor planet letter invoice tablet summer winter signal"
).split()
RGB = tuple[int, int, int]


@dataclass(frozen=True)
class Label:
    """A text; its upper left corner in pixels."""

    x: float
    y: float
    text: str
    font: str
    size: int
    color: RGB


@dataclass(frozen=True)
class Shape:
    """A filled shape around a center; ``reach`` is its half width and half height in pixels."""

    x: float
    y: float
    reach: tuple[float, float]
    form: str
    color: RGB


@dataclass(frozen=True)
class Scene:
    size: tuple[int, int]
    ground: tuple[int, float, RGB]  # seed, contrast (levels), mean color
    elements: tuple[Label | Shape, ...]


def _ground(size: tuple[int, int], seed: int, contrast: float, mean: RGB) -> np.ndarray:
    """Noise with the spectrum of photographs (amplitude falls as 1/frequency)."""
    rng, (width, height) = np.random.default_rng(seed), size
    fx, fy = np.fft.rfftfreq(width), np.fft.fftfreq(height)
    fall = 1.0 / np.maximum(np.hypot(fx[None], fy[:, None]), 1.0 / max(size))
    planes = []
    for level in mean:
        noise = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(height, width))) * fall, s=(height, width))
        planes.append(level + contrast * noise / noise.std())
    gray = np.mean(planes, axis=0, keepdims=True)
    pixels = np.stack([0.6 * (gray[0] - gray.mean()) + 0.6 * (p - p.mean()) + p.mean() for p in planes], axis=-1)
    return pixels.clip(0, 255).astype(np.uint8)


@lru_cache(maxsize=256)
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    if not name:
        return ImageFont.load_default(size)
    return ImageFont.truetype(os.fspath(FONT_FOLDER / name), size)


def draw(scene: Scene) -> Image.Image:
    """The image with `EDGE` pixels more on each side."""
    width, height = (side + 2 * EDGE for side in scene.size)
    image = Image.fromarray(_ground((width, height), *scene.ground))
    for element in scene.elements:
        if isinstance(element, Label):
            where = (element.x + EDGE, element.y + EDGE)
            ImageDraw.Draw(image).text(where, element.text, element.color, _font(element.font, element.size))
        else:
            _paint(image, element)
    return image


def _paint(image: Image.Image, shape: Shape) -> None:
    """Edges are smoothed by drawing at three times the size."""
    x, y, (across, down) = shape.x + EDGE, shape.y + EDGE, shape.reach
    left, top = math.floor(x - across) - 2, math.floor(y - down) - 2
    size = (math.ceil(2 * across) + 5, math.ceil(2 * down) + 5)
    mask = Image.new("L", (3 * size[0], 3 * size[1]))
    pen = ImageDraw.Draw(mask)
    box = [3 * v for v in (x - across - left, y - down - top, x + across - left, y + down - top)]
    if shape.form == "box":
        pen.rectangle(box, 255)
    elif shape.form == "disc":
        pen.ellipse(box, 255)
    elif shape.form == "ring":
        pen.ellipse(box, outline=255, width=max(5, int(1.2 * min(shape.reach))))
    else:
        pen.polygon([((box[0] + box[2]) / 2, box[1]), (box[2], box[3]), (box[0], box[3])], 255)
    image.paste(shape.color, (left, top), mask.reduce(3))


# -- kinds of scenes ------------------------------------------------------------

Element = Label | Shape
Span = tuple[float, float]


@dataclass(frozen=True)
class Kind:
    """A kind of scene; what is a span is drawn from it."""

    contrast: Span  # of the ground, in levels
    tone: Span  # of each color of the ground
    shapes: Span = (0, 0)
    reach: Span = (8, 30)  # half widths of shapes, in pixels
    lines: Span = (0, 0)  # of words and numbers
    columns: Span = (1, 1)
    points: Span = (10, 16)


KINDS = {
    "card": Kind((0, 2), (215, 255), lines=(2, 9), points=(10, 30)),
    "table": Kind((0, 0), (250, 250), shapes=(2, 4), reach=(4, 6), lines=(5, 14), columns=(3, 5), points=(10, 14)),
    "toys": Kind((4, 25), (60, 220), shapes=(3, 7), reach=(9, 34)),
    "map": Kind((7, 7), (205, 228), shapes=(8, 18), reach=(4, 8), lines=(3, 5), columns=(1, 3), points=(10, 13)),
    "sign": Kind((20, 40), (70, 190), shapes=(3, 6), reach=(10, 40), lines=(1, 2), points=(20, 40)),
    "texture": Kind((30, 55), (70, 190), shapes=(3, 9), reach=(7, 26)),
}
FONTS = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSans-Bold.ttf", "cmr10.ttf", "cmtt10.ttf", "STIXGeneral.ttf", "")


def make(kind: Kind, rng: Random) -> Scene:
    """A scene: shapes apart from one another, text in a grid above them."""

    def whole(span: Span) -> int:
        return rng.randint(int(span[0]), int(span[1]))

    size = (rng.randint(260, 600), rng.randint(220, 440))
    mean = (whole(kind.tone), whole(kind.tone), whole(kind.tone))
    elements: list[Element] = []
    for _ in range(400):
        r = rng.uniform(*kind.reach)
        x, y = rng.uniform(r + 4, size[0] - r - 4), rng.uniform(r + 4, size[1] - r - 4)
        if all(math.hypot(x - e.x, y - e.y) > 1.5 * r + 20 for e in elements):
            paint = rng.choice([p for p in PAINTS if math.dist(p, mean) > 70])
            elements.append(Shape(x, y, (r, r * rng.uniform(0.7, 1.0)), rng.choice(FORMS), paint))
    elements = elements[: whole(kind.shapes)]
    font, points, lines, columns = rng.choice(FONTS), whole(kind.points), whole(kind.lines), whole(kind.columns)
    ink = (20, 20, 20) if sum(mean) > 380 else (250, 250, 250)
    for row, column in product(range(lines), range(columns)):
        word = rng.choice(WORDS) if rng.random() < 0.5 else str(rng.randint(10, 99999))
        place = (14 + column * size[0] / columns, 12 + row * 1.6 * points)
        elements.append(Label(*place, word, font, points, ink))
    return Scene(size, (rng.getrandbits(31), rng.uniform(*kind.contrast), mean), tuple(elements))


# -- changes ------------------------------------------------------------


def _edited(scene: Scene, old: Element, *new: Element) -> Scene:
    at = scene.elements.index(old)
    return replace(scene, elements=(*scene.elements[:at], *new, *scene.elements[at + 1 :]))


def _retyped(scene: Scene, rng: Random, letters: str) -> Scene | None:
    """One character of a text is another one of ``letters``."""
    labels = [e for e in scene.elements if isinstance(e, Label) and set(e.text) & set(letters)]
    if not labels:
        return None
    old = rng.choice(labels)
    at = rng.choice([i for i, c in enumerate(old.text) if c in letters])
    new = rng.choice([c for c in letters if c != old.text[at]])
    return _edited(scene, old, replace(old, text=old.text[:at] + new + old.text[at + 1 :]))


def swap(scene: Scene, a: Shape, rng: Random) -> Scene | None:
    """Two things exchange their colors."""
    others = [e for e in scene.elements if isinstance(e, Shape) and math.dist(a.color, e.color) > 70]
    if not others:
        return None
    b = rng.choice(others)
    return _edited(_edited(scene, a, replace(a, color=b.color)), b, replace(b, color=a.color))


def color(scene: Scene, old: Shape, rng: Random) -> Scene:
    return _edited(scene, old, replace(old, color=rng.choice([p for p in PAINTS if math.dist(p, old.color) > 70])))


def form(scene: Scene, old: Shape, rng: Random) -> Scene:
    return _edited(scene, old, replace(old, form=rng.choice([f for f in FORMS if f != old.form])))


def place(scene: Scene, old: Shape, rng: Random) -> Scene | None:
    """A thing stands elsewhere, by at least its half width and 8 pixels."""
    far, turn = max(8.0, old.reach[0]) * rng.uniform(1, 3), rng.uniform(0, 2 * math.pi)
    x, y = old.x + far * math.cos(turn), old.y + far * math.sin(turn)
    x, y = (min(max(v, r + 2), side - r - 2) for v, r, side in zip((x, y), old.reach, scene.size, strict=True))
    return _edited(scene, old, replace(old, x=x, y=y)) if math.hypot(x - old.x, y - old.y) > 7 else None


def count(scene: Scene, old: Shape, rng: Random) -> Scene:
    """One thing more or less."""
    if rng.random() < 0.5:
        return _edited(scene, old)
    for _ in range(200):
        x, y = (rng.uniform(r + 2, side - r - 2) for r, side in zip(old.reach, scene.size, strict=True))
        if all(math.hypot(x - e.x, y - e.y) > 2 * old.reach[0] + 8 for e in scene.elements):
            return _edited(scene, old, old, replace(old, x=x, y=y))
    return _edited(scene, old)


CHANGES = (swap, color, form, place, count)
LETTERS = {"digit": "0123456789", "letter": "abcdefghijklmnopqrstuvwxyz"}


def _changed(scene: Scene, rng: Random) -> Iterator[tuple[str, Scene | None]]:
    """Every change by its name; None where the scene has nothing to change."""
    for name, letters in LETTERS.items():
        yield name, _retyped(scene, rng, letters)
    if shapes := [e for e in scene.elements if isinstance(e, Shape)]:
        for change in CHANGES:
            yield change.__name__, change(scene, rng.choice(shapes), rng)


# -- photographs and files ------------------------------------------------------------


def frame(image: Image.Image, dx: int = 0, dy: int = 0) -> Image.Image:
    """What the camera sees, moved by some pixels."""
    return image.crop((EDGE + dx, EDGE + dy, image.width - EDGE + dx, image.height - EDGE + dy))


def encoded(image: Image.Image, form: str = "PNG", **options: int) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def shift(wide: Image.Image, rng: Random) -> bytes:
    """The camera moves by one to four pixels."""
    far = rng.randint(1, 4)
    dx, dy = rng.choice(((far, 0), (-far, 0), (0, far), (0, -far), (far, rng.randint(-far, far))))
    return encoded(frame(wide, dx, dy))


def crop(wide: Image.Image, rng: Random) -> bytes:
    """2% of width and height are cut off at one side, or 1% at both; the rest may be enlarged again."""
    image = frame(wide)
    w, h = image.size
    share = rng.choice((0.0, 0.5, 1.0))
    left, top = round(0.02 * w * share), round(0.02 * h * share)
    cut = image.crop((left, top, left + w - round(0.02 * w), top + h - round(0.02 * h)))
    return encoded(cut.resize((w, h), Image.Resampling.BICUBIC) if rng.random() < 0.5 else cut)


def jpeg30(wide: Image.Image, rng: Random) -> bytes:
    return encoded(frame(wide), "JPEG", quality=30)


def reencoded(wide: Image.Image, rng: Random) -> bytes:
    return encoded(frame(wide), rng.choice(("JPEG", "JPEG", "WEBP")), quality=rng.randint(45, 95))


def light(wide: Image.Image, rng: Random) -> bytes:
    """Brightness or contrast changes by up to 15%."""
    change = rng.choice((ImageEnhance.Brightness, ImageEnhance.Contrast))
    return encoded(change(frame(wide)).enhance(rng.uniform(0.85, 1.15)))


def scale(wide: Image.Image, rng: Random) -> bytes:
    """5% larger or smaller, at most."""
    image, by = frame(wide), rng.uniform(0.95, 1.05)
    way = rng.choice((Image.Resampling.BICUBIC, Image.Resampling.LANCZOS, Image.Resampling.BILINEAR))
    return encoded(image.resize((round(image.width * by), round(image.height * by)), way))


def second(wide: Image.Image, rng: Random) -> bytes:
    """A second photograph: moved by parts of a pixel, another light, other noise, and JPEG."""
    dx, dy, by = rng.uniform(-3, 3), rng.uniform(-3, 3), rng.uniform(0.99, 1.01)
    moved = wide.transform(wide.size, Image.Transform.AFFINE, (by, 0, dx, 0, by, dy), Image.Resampling.BICUBIC)
    pixels = np.asarray(ImageEnhance.Brightness(frame(moved)).enhance(rng.uniform(0.93, 1.07)), dtype=np.float32)
    grain = np.random.default_rng(rng.getrandbits(31)).normal(0, 2, pixels.shape)
    return encoded(Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8)), "JPEG", quality=rng.randint(70, 92))


COPIES = (shift, crop, jpeg30, reencoded, light, scale, second)


class Pair(NamedTuple):
    """Two images as files; ``what`` names the copy or the change."""

    kind: str
    what: str
    same: bool
    donor: bytes
    request: bytes


def first_photo(wide: Image.Image, rng: Random) -> bytes:
    return encoded(frame(wide)) if rng.random() < 0.5 else encoded(frame(wide), "JPEG", quality=rng.randint(75, 95))


def pairs(scenes: int, seed: int = 0) -> list[Pair]:
    """Of each of so many scenes of each kind, every copy, and every change (half of these also photographed anew)."""
    found = []
    for (name, kind), number in product(KINDS.items(), range(scenes)):
        rng = Random(f"{seed} {name} {number}")  # noqa: S311
        scene = make(kind, rng)
        wide = draw(scene)
        donor = first_photo(wide, rng)
        found += [Pair(name, c.__name__, True, donor, c(wide, rng)) for c in COPIES]
        for what, other in _changed(scene, rng):
            if other is not None and _shows(frame(draw(other)), frame(wide)):
                taken = first_photo if rng.random() < 0.5 else rng.choice(COPIES)
                found.append(Pair(name, what, False, donor, taken(draw(other), rng)))
    return found + _minigqa(scenes, seed)


def _shows(a: Image.Image, b: Image.Image) -> bool:
    """Whether a change is within the frame and not hidden."""
    return bool((np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)) > 32).any())


def _minigqa(scenes: int, seed: int) -> list[Pair]:
    found = []
    for number in range(scenes):
        rng = Random(f"{seed} minigqa {number}")  # noqa: S311
        scene = make_scene(rng)
        wide = _enlarged(draw_minigqa(scene), by := rng.choice((1, 3)))
        donor = first_photo(wide, rng)
        found += [Pair("minigqa", c.__name__, True, donor, c(wide, rng)) for c in COPIES]
        taken = first_photo if rng.random() < 0.5 else rng.choice(COPIES)
        other = _enlarged(draw_minigqa(recolor(scene, rng)), by)
        found.append(Pair("minigqa", "color", False, donor, taken(other, rng)))
    return found


def _enlarged(small: Image.Image, by: int) -> Image.Image:
    inner = small.resize((small.width * by, small.height * by), Image.Resampling.BICUBIC)
    return Image.fromarray(np.pad(np.asarray(inner), ((EDGE, EDGE), (EDGE, EDGE), (0, 0)), mode="edge"))
