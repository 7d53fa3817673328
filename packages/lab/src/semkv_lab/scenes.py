"""Images with known contents, near-duplicates of them, and look-alikes in which one thing has changed.

A scene is a ground and a list of elements: texts and shapes. A change edits one element, so what differs between two
images is known. The parts `TUNED` and `UNSEEN` share no kind of scene but MiniGQA's, no font and no seed.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from semkv_lab.minigqa.scenes import draw as draw_minigqa
from semkv_lab.minigqa.scenes import make_scene, recolor

FONTS = Path(mpl.get_data_path()) / "fonts" / "ttf"
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
    free: bool = True  # may be changed: moved, painted, taken away


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
    return ImageFont.truetype(os.fspath(FONTS / name), size)


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
Fonts = Sequence[str]


def _ink(rng: Random, light: bool) -> RGB:
    return _color(rng, *((0, 90) if light else (190, 255)))


def _color(rng: Random, low: int, high: int) -> RGB:
    return (rng.randint(low, high), rng.randint(low, high), rng.randint(low, high))


def _words(rng: Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) if rng.random() < 0.65 else str(rng.randint(10, 9999)) for _ in range(count))


def _scene(rng: Random, size: tuple[float, float], contrast: float, mean: RGB, elements: Sequence[Element]) -> Scene:
    return Scene((int(size[0]), int(size[1])), (rng.getrandbits(31), contrast, mean), tuple(elements))


def _scattered(rng: Random, size: tuple[int, int], count: int, reach: tuple[float, float]) -> list[Shape]:
    found: list[Shape] = []
    for _ in range(400):
        r = rng.uniform(*reach)
        x, y = rng.uniform(r + 4, size[0] - r - 4), rng.uniform(r + 4, size[1] - r - 4)
        if all(math.hypot(x - s.x, y - s.y) > r + s.reach[0] + 6 for s in found):
            form = rng.choice(FORMS)
            found.append(Shape(x, y, (r, r * rng.uniform(0.7, 1.0)), form, rng.choice(PAINTS)))
        if len(found) == count:
            break
    return found


def card(rng: Random, fonts: Fonts) -> Scene:
    """Lines of large or small text."""
    light, size, font = rng.random() < 0.7, rng.randint(10, 30), rng.choice(fonts)
    mean = _color(rng, *((215, 255) if light else (10, 60)))
    lines, width = rng.randint(2, 9), rng.randint(260, 520)
    rows = [_words(rng, max(1, int(width / size / 4))) for _ in range(lines)]
    labels = [Label(14, 14 + i * size * 1.4, row, font, size, _ink(rng, light)) for i, row in enumerate(rows)]
    seed = rng.getrandbits(31)
    return Scene((width, int(30 + lines * size * 1.4)), (seed, rng.choice((0, 0, 2)), mean), tuple(labels))


def faint(rng: Random, fonts: Fonts) -> Scene:
    """Gray text that hardly differs from its ground."""
    scene, level = card(rng, fonts), rng.randint(90, 220)
    ink = level - rng.choice((-40, 40, 60))
    labels = [replace(e, color=(ink, ink, ink)) for e in scene.elements if isinstance(e, Label)]
    return replace(scene, ground=(*scene.ground[:2], (level, level, level)), elements=tuple(labels))


def receipt(rng: Random, fonts: Fonts) -> Scene:
    """Items and prices on paper."""
    size, font, count = rng.randint(10, 15), rng.choice(fonts), rng.randint(6, 14)
    rows = [(rng.choice(WORDS), f"{rng.randint(1, 199)}.{rng.randint(0, 99):02}") for _ in range(count)]
    labels = [Label(14, 12, _words(rng, 2), font, size + 5, (20, 20, 20))]
    for i, row in enumerate(rows):
        labels += [
            Label(x, 44 + i * size * 1.5, t, font, size, (40, 40, 44)) for x, t in zip((14, 190), row, strict=True)
        ]
    return _scene(rng, (260, 60 + count * size * 1.5), 3, (236, 232, 222), labels)


def bars(rng: Random, fonts: Fonts) -> Scene:
    """A bar chart with a value above each bar."""
    font, size, count = rng.choice(fonts), rng.randint(10, 16), rng.randint(3, 8)
    elements: list[Element] = [Label(20, 8, _words(rng, 3), font, size + 4, (0, 0, 0))]
    for i in range(count):
        high, x = rng.uniform(20, 180), 50 + i * 48
        elements += [
            Shape(x, 250 - high / 2, (14, high / 2), "box", rng.choice(PAINTS)),
            Label(x - 12, 250 - high - size - 5, str(round(high)), font, size, (20, 20, 20)),
            Label(x - 16, 256, rng.choice(WORDS)[:5], font, size, (20, 20, 20)),
        ]
    return _scene(rng, (80 + count * 48, 290), 0, (255, 255, 255), elements)


def toys(rng: Random, fonts: Fonts) -> Scene:
    """Objects on an uneven ground."""
    size, mean = (rng.randint(200, 480), rng.randint(200, 400)), _color(rng, 60, 220)
    ground = (rng.getrandbits(31), rng.uniform(4, 25), mean)
    return Scene(size, ground, tuple(_scattered(rng, size, rng.randint(3, 7), (9, 34))))


def photo(rng: Random, fonts: Fonts) -> Scene:
    """Rough texture with few small things in it."""
    size, mean = (rng.randint(320, 800), rng.randint(320, 600)), _color(rng, 70, 190)
    ground = (rng.getrandbits(31), rng.uniform(30, 55), mean)
    return Scene(size, ground, tuple(_scattered(rng, size, rng.randint(3, 9), (7, 26))))


def table(rng: Random, fonts: Fonts) -> Scene:
    """A window of a program: a grid of small numbers."""
    font, size, rows, columns = rng.choice(fonts), rng.randint(10, 14), rng.randint(5, 16), rng.randint(3, 6)
    half = columns * 40 + 10
    elements: list[Element] = [Shape(half, 14, (half, 14), "box", (70, 100, 160), free=False)]
    elements.append(Label(8, 6, _words(rng, 3), font, 14, (255, 255, 255)))
    ink = rng.choice(((30, 30, 30), (30, 30, 30), (190, 190, 195)))
    for row in range(rows):
        cells = [rng.choice(WORDS), *(str(rng.randint(0, 99999)) for _ in range(columns - 1))]
        elements += [Label(10 + i * 80, 36 + row * size * 1.6, text, font, size, ink) for i, text in enumerate(cells)]
    for row in range(rng.randint(2, 4)):
        elements.append(Shape(columns * 80 + 8, 46 + row * 30, (5, 5), "disc", rng.choice(PAINTS)))
    return _scene(rng, (columns * 80 + 20, 50 + rows * size * 1.6), 0, (250, 250, 250), elements)


def sign(rng: Random, fonts: Fonts) -> Scene:
    """A board with a word and a number before a photograph-like ground."""
    size, r = (rng.randint(320, 640), rng.randint(240, 480)), rng.randint(60, 100)
    x, y, paint = rng.uniform(r + 20, size[0] - r - 20), rng.uniform(70, size[1] - 70), rng.choice(PAINTS)
    ink = (255, 255, 255) if sum(paint) < 420 else (10, 10, 10)
    points, font = rng.randint(14, 34), rng.choice(fonts)
    around = [s for s in _scattered(rng, size, 5, (10, 30)) if abs(s.x - x) > r + 34 or abs(s.y - y) > 84]
    word, distance = rng.choice(WORDS), f"{rng.randint(2, 980)} km"
    board = (
        Shape(x, y, (r, 46), "box", paint),
        Label(x - r + 6, y - 40, word, font, points, ink),
        Label(x - r + 6, y + 2, distance, font, points, ink),
    )
    mean, seed = _color(rng, 70, 190), rng.getrandbits(31)
    return Scene(size, (seed, rng.uniform(20, 40), mean), (*around, *board))


def plan(rng: Random, fonts: Fonts) -> Scene:
    """A map: many dots, some named."""
    size, font = (rng.randint(300, 600), rng.randint(300, 500)), rng.choice(fonts)
    dots = _scattered(rng, size, rng.randint(6, 20), (4, 8))
    names = [Label(s.x + 9, s.y - 7, rng.choice(WORDS), font, rng.randint(10, 13), (50, 40, 40)) for s in dots[::3]]
    return _scene(rng, size, 7, (222, 228, 205), (*dots, *names))


def meter(rng: Random, fonts: Fonts) -> Scene:
    """A display with large digits, lamps below."""
    font, count = rng.choice(fonts), rng.randint(3, 6)
    text = f"{rng.randint(0, 999)}.{rng.randint(0, 9)} {rng.choice(('kg', 'bar', 'mV', 'rpm'))}"
    elements: list[Element] = [
        Shape(150, 70, (130, 50), "box", (24, 40, 30), free=False),
        Label(34, 40, text, font, rng.randint(28, 46), (120, 240, 150)),
        Label(34, 24, _words(rng, 2), font, 11, (150, 180, 160)),
        *(Shape(40 + i * 42, 160, (11, 11), "disc", rng.choice(PAINTS)) for i in range(count)),
    ]
    seed = rng.getrandbits(31)
    return Scene((300, 200), (seed, rng.uniform(5, 20), (120, 120, 125)), tuple(elements))


class Part(NamedTuple):
    """What images are made of."""

    kinds: tuple[Callable[[Random, Fonts], Scene], ...]
    fonts: tuple[str, ...]
    seed: int


_SANS = ("DejaVuSans.ttf", "DejaVuSansMono.ttf", "cmss10.ttf", "STIXGeneral.ttf")
_SERIF = ("DejaVuSerif.ttf", "DejaVuSans-Bold.ttf", "cmr10.ttf", "cmtt10.ttf", "STIXGeneralBol.ttf", "")
TUNED = Part((card, faint, receipt, bars, toys), _SANS, 1)
UNSEEN = Part((table, sign, plan, meter, photo), _SERIF, 2)


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


def digit(scene: Scene, rng: Random) -> Scene | None:
    return _retyped(scene, rng, "0123456789")


def letter(scene: Scene, rng: Random) -> Scene | None:
    return _retyped(scene, rng, "abcdefghijklmnopqrstuvwxyz")


def _free(scene: Scene) -> list[Shape]:
    return [e for e in scene.elements if isinstance(e, Shape) and e.free]


def swap(scene: Scene, rng: Random) -> Scene | None:
    """Two things exchange their colors."""
    pairs = [(a, b) for a in _free(scene) for b in _free(scene) if math.dist(a.color, b.color) > 70]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
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


CHANGES: tuple[Callable[..., Scene | None], ...] = (digit, letter, color, swap, form, place, count)


def _changed(scene: Scene, change: Callable[..., Scene | None], rng: Random) -> Scene | None:
    if change in (digit, letter, swap):
        return change(scene, rng)
    return change(scene, rng.choice(shapes), rng) if (shapes := _free(scene)) else None


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


def pairs(part: Part, scenes: int, seed: int = 0) -> list[Pair]:
    """Of each of so many scenes of each kind, every copy, and every change (half of these also photographed anew)."""
    found = []
    for kind in part.kinds:
        for number in range(scenes):
            rng = Random(f"{part.seed} {seed} {kind.__name__} {number}")  # noqa: S311
            scene = kind(rng, part.fonts)
            wide = draw(scene)
            donor = first_photo(wide, rng)
            found += [Pair(kind.__name__, c.__name__, True, donor, c(wide, rng)) for c in COPIES]
            for change in CHANGES:
                other = _changed(scene, change, rng)
                if other is not None and _shows(frame(draw(other)), frame(wide)):
                    taken = first_photo if rng.random() < 0.5 else rng.choice(COPIES)
                    found.append(Pair(kind.__name__, change.__name__, False, donor, taken(draw(other), rng)))
    return found + list(_minigqa(part, scenes, seed))


def _shows(a: Image.Image, b: Image.Image) -> bool:
    """Whether a change is within the frame and not hidden."""
    return bool((np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)) > 32).any())


def _minigqa(part: Part, scenes: int, seed: int) -> list[Pair]:
    found = []
    for number in range(scenes):
        rng = Random(f"{part.seed} {seed} minigqa {number}")  # noqa: S311
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
