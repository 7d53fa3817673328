"""Pairs of generated images: an image and a copy of it, or an image and one with a change that a question may be about.

Scenes are shapes and text on a ground like a photograph's, and MiniGQA's. A change alters one element, so what differs
between two images is known.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from semkv_lab.minigqa.scenes import draw as draw_minigqa
from semkv_lab.minigqa.scenes import make_scene, recolor

EDGE = 12  # pixels around the frame that a camera may move by
RGB = tuple[int, int, int]
Span = tuple[int, int]
PAINTS = (
    (200, 40, 40), (240, 140, 30), (235, 210, 50), (40, 150, 70), (40, 90, 200), (130, 50, 170), (240, 140, 190),
    (30, 30, 35), (120, 80, 50), (90, 190, 200),
)  # fmt: skip
FORMS = ("box", "disc", "ring", "peak")
WORDS = "total ticket gate street lemon river model price window garden market train hotel doctor seat room".split()
LETTERS = {"digit": "0123456789", "letter": "abcdefghijklmnopqrstuvwxyz"}


class Kind(NamedTuple):
    """A kind of scene; each span is what is drawn from: levels, half widths and sizes in pixels."""

    contrast: Span  # of the ground
    tone: Span  # of each color of the ground
    shapes: Span = (0, 0)
    reach: Span = (8, 30)
    lines: Span = (0, 0)  # of words and numbers
    columns: Span = (1, 1)
    size: Span = (10, 16)  # of letters


KINDS = {
    "card": Kind(
        (0, 2),
        (215, 255),
        lines=(2, 9),
        size=(10, 30),
    ),
    "table": Kind(
        (0, 0),
        (250, 250),
        shapes=(2, 4),
        reach=(4, 6),
        lines=(5, 14),
        columns=(3, 5),
        size=(10, 14),
    ),
    "toys": Kind(
        (4, 25),
        (60, 220),
        shapes=(3, 7),
        reach=(9, 34),
    ),
    "map": Kind(
        (7, 7),
        (205, 228),
        shapes=(8, 18),
        reach=(4, 8),
        lines=(3, 5),
        columns=(1, 3),
        size=(10, 13),
    ),
    "sign": Kind(
        (20, 40),
        (70, 190),
        shapes=(3, 6),
        reach=(10, 40),
        lines=(1, 2),
        size=(20, 40),
    ),
    "texture": Kind(
        (30, 55),
        (70, 190),
        shapes=(3, 9),
        reach=(7, 26),
    ),
}


class Element(NamedTuple):
    """A shape around its center, ``reach`` being half its width; or a text from its upper left corner, ``reach`` being
    its size. In pixels."""

    x: float
    y: float
    reach: float
    form: str
    color: RGB
    text: str = ""


class Scene(NamedTuple):
    """``ground`` has the texture's pixels, with `EDGE` more on each side."""

    ground: Image.Image
    elements: tuple[Element, ...]

    def edited(self, old: Element, *new: Element) -> Scene:
        at = self.elements.index(old)
        return self._replace(elements=(*self.elements[:at], *new, *self.elements[at + 1 :]))


def make(kind: Kind, rng: Random) -> Scene:
    """A scene: shapes apart from one another, text in a grid above them."""
    width = rng.randint(260, 600)
    height = rng.randint(220, 440)
    tone = [rng.randint(*kind.tone) for _ in range(3)]
    elements: list[Element] = []
    for _ in range(400):
        reach = rng.uniform(*kind.reach)
        x = rng.uniform(reach + 4, width - reach - 4)
        y = rng.uniform(reach + 4, height - reach - 4)
        if all(math.hypot(x - e.x, y - e.y) > 1.5 * reach + 20 for e in elements):
            elements.append(
                Element(
                    x=x,
                    y=y,
                    reach=reach,
                    form=rng.choice(FORMS),
                    color=_paint(rng, tone),
                )
            )
    elements = elements[: rng.randint(*kind.shapes)]
    size = rng.randint(*kind.size)
    columns = rng.randint(*kind.columns)
    ink = 20 if sum(tone) > 380 else 250
    for row, column in product(range(rng.randint(*kind.lines)), range(columns)):
        word = rng.choice(WORDS) if rng.random() < 0.5 else str(rng.randint(10, 99999))
        label = Element(
            x=14 + column * width / columns,
            y=12 + row * 1.6 * size,
            reach=size,
            form="text",
            color=(ink, ink, ink),
            text=word,
        )
        elements.append(label)
    ground = _ground((width + 2 * EDGE, height + 2 * EDGE), tone, rng.uniform(*kind.contrast), rng)
    return Scene(ground=ground, elements=tuple(elements))


def _paint(rng: Random, other: Sequence[int]) -> RGB:
    """A color that is clearly another one."""
    return rng.choice([paint for paint in PAINTS if math.dist(paint, other) > 70])


def _ground(
    size: tuple[int, int],
    mean: Sequence[int],
    contrast: float,
    rng: Random,
) -> Image.Image:
    """Noise of several grains, as in photographs."""
    width, height = size
    noise = np.zeros((height, width, 3))
    random = np.random.default_rng(rng.getrandbits(31))
    for grain in (1, 4, 16, 64):
        rows = height // grain + 2
        columns = width // grain + 2
        colored = random.normal(size=(rows, columns, 3))
        gray = random.normal(size=(rows, columns, 1))
        coarse = colored + 2 * gray
        fine = coarse.repeat(grain, axis=0).repeat(grain, axis=1)
        noise += fine[:height, :width]
    pixels = np.array(mean) + contrast * noise / noise.std()
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def draw(scene: Scene) -> Image.Image:
    """The image with `EDGE` pixels more on each side."""
    image = scene.ground.copy()
    pen = ImageDraw.Draw(image)
    for e in scene.elements:
        x, y = e.x + EDGE, e.y + EDGE
        r = e.reach
        box = (x - r, y - r, x + r, y + r)
        if e.text:
            pen.text((x, y), e.text, e.color, ImageFont.load_default(r))
        elif e.form == "box":
            pen.rectangle(box, e.color)
        elif e.form == "disc":
            pen.ellipse(box, e.color)
        elif e.form == "ring":
            pen.ellipse(box, outline=e.color, width=max(2, int(0.4 * r)))
        else:
            pen.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], e.color)
    return image


# -- changes ------------------------------------------------------------


def changes(scene: Scene, rng: Random) -> Iterator[tuple[str, Scene]]:
    """Every change that the scene has something for, by name: a character, a color, a form, a place, a count."""
    for name, letters in LETTERS.items():
        labels = [e for e in scene.elements if set(e.text) & set(letters)]
        if labels:
            yield name, _respelled(scene, rng, labels, letters)
    shapes = [e for e in scene.elements if not e.text]
    if not shapes:
        return
    one = rng.choice(shapes)
    recolored = one._replace(color=_paint(rng, one.color))
    yield "color", scene.edited(one, recolored)
    other_forms = [form for form in FORMS if form != one.form]
    yield "form", scene.edited(one, one._replace(form=rng.choice(other_forms)))
    far = max(8.0, one.reach) * rng.uniform(1, 3)
    turn = rng.uniform(0, 2 * math.pi)
    moved = one._replace(
        x=one.x + far * math.cos(turn),
        y=one.y + far * math.sin(turn),
    )
    yield "place", scene.edited(one, moved)
    yield "count", scene.edited(one)
    if others := [e for e in shapes if math.dist(one.color, e.color) > 70]:
        other = rng.choice(others)
        half = scene.edited(one, one._replace(color=other.color))
        yield "swap", half.edited(other, other._replace(color=one.color))


def _respelled(
    scene: Scene,
    rng: Random,
    labels: Sequence[Element],
    letters: str,
) -> Scene:
    """One letter of one label becomes another of the same kind."""
    old = rng.choice(labels)
    at = rng.choice([i for i, letter in enumerate(old.text) if letter in letters])
    new = rng.choice([letter for letter in letters if letter != old.text[at]])
    return scene.edited(old, old._replace(text=old.text[:at] + new + old.text[at + 1 :]))


def _shows(a: Image.Image, b: Image.Image) -> bool:
    """Whether a change is within the frame and not hidden."""
    difference = np.asarray(a, np.int16) - np.asarray(b, np.int16)
    return bool((np.abs(difference) > 32).any())


# -- photographs and files ------------------------------------------------------------


def frame(
    image: Image.Image,
    dx: int = 0,
    dy: int = 0,
) -> Image.Image:
    """What the camera sees, moved by some pixels."""
    return image.crop((EDGE + dx, EDGE + dy, image.width - EDGE + dx, image.height - EDGE + dy))


def encoded(
    image: Image.Image,
    form: str = "PNG",
    **options: int,
) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def first_photo(wide: Image.Image, rng: Random) -> bytes:
    if rng.random() < 0.5:
        return encoded(frame(wide))
    return encoded(frame(wide), "JPEG", quality=rng.randint(75, 95))


def shift(wide: Image.Image, rng: Random) -> bytes:
    """The camera moves by one to four pixels."""
    far = rng.randint(1, 4)
    aslant = (far, rng.randint(-far, far))
    dx, dy = rng.choice(((far, 0), (-far, 0), (0, far), (0, -far), aslant))
    return encoded(frame(wide, dx, dy))


def crop(wide: Image.Image, rng: Random) -> bytes:
    """2% of width and height are cut off at one side, or 1% at both; the rest may be enlarged again."""
    image = frame(wide)
    width, height = image.size
    part = rng.choice((0.0, 0.5, 1.0))
    left = round(0.02 * width * part)
    top = round(0.02 * height * part)
    right = left + width - round(0.02 * width)
    bottom = top + height - round(0.02 * height)
    cut = image.crop((left, top, right, bottom))
    if rng.random() < 0.5:
        cut = cut.resize(image.size, Image.Resampling.BICUBIC)
    return encoded(cut)


def reencoded(wide: Image.Image, rng: Random) -> bytes:
    return encoded(frame(wide), rng.choice(("JPEG", "WEBP")), quality=rng.randint(30, 95))


def light(wide: Image.Image, rng: Random) -> bytes:
    """Brightness or contrast changes by up to 15%."""
    change = rng.choice((ImageEnhance.Brightness, ImageEnhance.Contrast))
    return encoded(change(frame(wide)).enhance(rng.uniform(0.85, 1.15)))


def scale(wide: Image.Image, rng: Random) -> bytes:
    """5% larger or smaller, at most."""
    image = frame(wide)
    by = rng.uniform(0.95, 1.05)
    size = (round(image.width * by), round(image.height * by))
    return encoded(image.resize(size, Image.Resampling.BICUBIC))


def second(wide: Image.Image, rng: Random) -> bytes:
    """A second photograph: moved by parts of a pixel, another light, other noise, and JPEG."""
    dx = rng.uniform(-3, 3)
    dy = rng.uniform(-3, 3)
    by = rng.uniform(0.99, 1.01)
    moved = wide.transform(
        wide.size,
        Image.Transform.AFFINE,
        (by, 0, dx, 0, by, dy),
        Image.Resampling.BICUBIC,
    )
    lit = ImageEnhance.Brightness(frame(moved)).enhance(rng.uniform(0.93, 1.07))
    pixels = np.asarray(lit, dtype=np.float32)
    random = np.random.default_rng(rng.getrandbits(31))
    noisy = pixels + random.normal(0, 2, pixels.shape)
    taken = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    return encoded(taken, "JPEG", quality=rng.randint(70, 92))


COPIES: tuple[Callable[[Image.Image, Random], bytes], ...] = (
    shift,
    crop,
    reencoded,
    light,
    scale,
    second,
)


class Pair(NamedTuple):
    """Two images as files; ``what`` names the copy or the change."""

    kind: str
    what: str
    same: bool
    donor: bytes
    request: bytes


def pairs(scenes: int) -> list[Pair]:
    """Of each of so many scenes of each kind, every copy, and every change (half of these also photographed anew)."""
    found = []
    for name, number in product([*KINDS, "minigqa"], range(scenes)):
        rng = Random(f"0 {name} {number}")  # noqa: S311
        if name == "minigqa":
            scene = make_scene(rng)
            by = rng.choice((1, 3))
            wide = _enlarged(draw_minigqa(scene), by)
            changed = [("color", _enlarged(draw_minigqa(recolor(scene, rng)), by))]
        else:
            drawn = make(KINDS[name], rng)
            wide = draw(drawn)
            changed = [(what, draw(other)) for what, other in changes(drawn, rng)]
        donor = first_photo(wide, rng)
        found += [
            Pair(
                kind=name,
                what=copy.__name__,
                same=True,
                donor=donor,
                request=copy(wide, rng),
            )
            for copy in COPIES
        ]
        for what, other in changed:
            if _shows(frame(other), frame(wide)):
                taken = first_photo if rng.random() < 0.5 else rng.choice(COPIES)
                found.append(
                    Pair(
                        kind=name,
                        what=what,
                        same=False,
                        donor=donor,
                        request=taken(other, rng),
                    )
                )
    return found


def _enlarged(small: Image.Image, by: int) -> Image.Image:
    size = (small.width * by, small.height * by)
    inner = np.asarray(small.resize(size, Image.Resampling.BICUBIC))
    edges = ((EDGE, EDGE), (EDGE, EDGE), (0, 0))
    return Image.fromarray(np.pad(inner, edges, mode="edge"))
