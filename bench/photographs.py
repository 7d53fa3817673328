"""Photographs that Python libraries ship: which copies are taken for the same, which visible changes for another, and
what that costs by size.

    .venv/bin/python -m pip install --no-deps --target /tmp/photographs scikit-image==0.25.2
    git show REVISION:src/semkv/pictures.py > /tmp/pictures_before.py     # of before it was a folder
    OPENBLAS_NUM_THREADS=1 python bench/photographs.py /tmp/photographs --before /tmp/pictures_before.py --out FILE

Copies are those of docs/quality.md. A change draws over one place of the photograph that lies in both frames, and is
compared as it is and as a copy. Times are of the calling thread's processor, the least of some runs, so that a loaded
machine matters little.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import cv2
import numpy as np
from common import machine, write_json
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from semkv.encoders.vision import read_picture, read_pixels
from semkv_guards import pictures

EDGE = 4  # pixels around the frame that a camera may move by
NAMES = (
    "astronaut.png camera.png chelsea.png coffee.png coins.png rocket.jpg motorcycle_left.png moon.png brick.png"
    " grass.png gravel.png retina.jpg hubble_deep_field.jpg clock_motion.png"
).split()
SIZES = {"0.25": 512, "1": 1024, "4": 2048, "12": 3464, "25": 5000}  # megapixels: side of a square
REPEATS = 7

Picture = Image.Image
Copy = Callable[[Picture, Random], Picture]


# -- photographs ------------------------------------------------------------


def photographs(folder: Path) -> dict[str, Picture]:
    """By name: scikit-image's from a folder, scikit-learn's from where it is installed."""
    found = {name: Image.open(folder / "skimage" / "data" / name) for name in NAMES}
    origin = importlib.util.find_spec("sklearn")
    if origin is not None and origin.origin is not None:
        images = Path(origin.origin).parent / "datasets" / "images"
        found |= {name: Image.open(images / name) for name in ("china.jpg", "flower.jpg")}
    return {name: image.convert("RGB") for name, image in found.items()}


def frame(image: Picture, dx: int = 0, dy: int = 0) -> Picture:
    right = image.width - EDGE + dx
    bottom = image.height - EDGE + dy
    return image.crop((EDGE + dx, EDGE + dy, right, bottom))


def encoded(image: Picture, form: str = "PNG", **options: int) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def jpeg(image: Picture, quality: int) -> Picture:
    return Image.open(io.BytesIO(encoded(image, "JPEG", quality=quality))).convert("RGB")


# -- copies ------------------------------------------------------------


def shifted(far: int) -> Copy:
    def copy(image: Picture, rng: Random) -> Picture:
        dx, dy = rng.choice(((far, 0), (-far, 0), (0, far), (0, -far), (far, -far), (-far, far)))
        return frame(image, dx, dy)

    return copy


def cropped(image: Picture, rng: Random) -> Picture:
    """2% of width and height are cut off."""
    inner = frame(image)
    width = inner.width - round(0.02 * inner.width)
    height = inner.height - round(0.02 * inner.height)
    left = rng.choice((0, (inner.width - width) // 2, inner.width - width))
    top = rng.choice((0, (inner.height - height) // 2, inner.height - height))
    return inner.crop((left, top, left + width, top + height))


def enlarged(image: Picture, rng: Random) -> Picture:
    inner = frame(image)
    return cropped(image, rng).resize(inner.size, Image.Resampling.BICUBIC)


def lit(by: float) -> Copy:
    return lambda image, rng: ImageEnhance.Brightness(frame(image)).enhance(by)


def smaller(image: Picture, rng: Random) -> Picture:
    inner = frame(image)
    size = round(0.9 * inner.width), round(0.9 * inner.height)
    return inner.resize(size, Image.Resampling.LANCZOS)


COPIES: dict[str, Copy] = {
    "moved by 1 pixel": shifted(1),
    "moved by 2 pixels": shifted(2),
    "moved by 3 pixels": shifted(3),
    "cropped by 2%": cropped,
    "cropped by 2% and enlarged": enlarged,
    "JPEG, quality 50": lambda image, rng: jpeg(frame(image), 50),
    "10% brighter": lit(1.1),
    "10% darker": lit(0.9),
    "resized to 90%": smaller,
}
_PLAIN: dict[str, Copy] = {"as it is": lambda image, rng: frame(image)}


# -- visible changes ------------------------------------------------------------


def changes(image: Picture, rng: Random) -> Iterator[tuple[str, Picture, Picture]]:
    """What is changed, before and after."""
    width, height = image.size
    side = max(8, min(width, height) // 16)

    def place() -> tuple[int, int]:
        margin = side + width // 16
        return rng.randrange(margin, width - margin), rng.randrange(margin, height - margin)

    yield "a thing more", image, _disc(image, place(), side // 2, (200, 40, 40))
    at = place()
    yield (
        "another color",
        _disc(image, at, side, (40, 150, 70)),
        _disc(image, at, side, (40, 90, 200)),
    )
    at = place()
    far = at[0] + side, at[1]
    yield (
        "moved",
        _disc(image, at, side // 2, (235, 210, 50)),
        _disc(image, far, side // 2, (235, 210, 50)),
    )
    at = place()
    yield "another digit", _sign(image, at, "37", side), _sign(image, at, "31", side)
    at = place()
    yield "another word", _sign(image, at, "open", side), _sign(image, at, "shut", side)
    x, y = place()
    patch = image.crop((x, y, x + side, y + side))
    other = image.copy()
    other.paste(patch.transpose(Image.Transpose.ROTATE_180), (x, y))
    if _apart(image, other):
        yield "a part turned", image, other
    x, y = place()
    pixels = np.asarray(image)
    hole = np.zeros(pixels.shape[:2], np.uint8)
    hole[y : y + side, x : x + side] = 255
    filled = Image.fromarray(cv2.inpaint(pixels, hole, 3, cv2.INPAINT_TELEA))
    if _apart(image, filled):
        yield "a part painted over", image, filled


def _apart(a: Picture, b: Picture) -> bool:
    """Whether a change can be seen: more than 40 levels in a tenth of the pixels that differ at all, 16 or more."""
    levels = abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).max(axis=2)
    clear = int((levels > 40).sum())
    return clear >= 16 and clear > 0.1 * int((levels > 0).sum())


def _disc(image: Picture, at: tuple[int, int], reach: int, color: tuple[int, int, int]) -> Picture:
    drawn = image.copy()
    box = (at[0] - reach, at[1] - reach, at[0] + reach, at[1] + reach)
    ImageDraw.Draw(drawn).ellipse(box, color)
    return drawn


def _sign(image: Picture, at: tuple[int, int], text: str, side: int) -> Picture:
    drawn = image.copy()
    font = ImageFont.load_default(max(9, side // 2))
    pen = ImageDraw.Draw(drawn)
    left, top, right, bottom = pen.textbbox(at, text, font)
    pen.rectangle((left - 3, top - 3, right + 3, bottom + 3), (245, 245, 245))
    pen.text(at, text, (20, 20, 20), font)
    return drawn


# -- verdicts ------------------------------------------------------------


def same_now(a: Picture, b: Picture) -> bool:
    first, second = pictures.planes_of(a), pictures.planes_of(b)
    if not pictures.may_show_the_same(first.small, second.small):
        return False
    return pictures.difference(first, second) < pictures.LIMIT


def verdicts(images: dict[str, Picture], judges: dict[str, Any]) -> dict[str, Any]:
    copies: dict[str, dict[str, list[str]]] = {}
    visible: dict[str, dict[str, list[str]]] = {}
    for name, image in images.items():
        rng = Random(name)  # noqa: S311
        for what, copy in COPIES.items():
            _ask(copies, judges, what, name, frame(image), copy(image, rng))
        for what, before, after in changes(image, rng):
            how, copy = rng.choice(list((_PLAIN | COPIES).items()))
            _ask(visible, judges, what, name, frame(before), frame(after))
            _ask(visible, judges, what, f"{name}, {how}", frame(before), copy(after, rng))
    return {"copies": copies, "changes": visible}


def _ask(
    found: dict[str, dict[str, list[str]]],
    judges: dict[str, Any],
    what: str,
    name: str,
    a: Picture,
    b: Picture,
) -> None:
    rows = found.setdefault(what, {})
    rows.setdefault("all", []).append(name)
    for judge, same in judges.items():
        rows.setdefault(judge, [])
        if same(a, b):
            rows[judge].append(name)


def show(found: dict[str, Any], judges: Sequence[str]) -> None:
    for group in ("copies", "changes"):
        print(f"{group} that are taken for the same")
        sums = dict.fromkeys(("all", *judges), 0)
        for what, rows in found[group].items():
            print(
                f"  {what:30s}",
                *(f"{judge} {len(rows[judge])}" for judge in judges),
                f"of {len(rows['all'])}",
            )
            for key in sums:
                sums[key] += len(rows[key])
        print(
            f"  {'sum':30s}", *(f"{judge} {sums[judge]}" for judge in judges), f"of {sums['all']}"
        )


# -- times ------------------------------------------------------------


def times(image: Picture, before: Any, sizes: Sequence[str]) -> dict[str, Any]:
    """Milliseconds of processor time by size."""
    found = {}
    for name in sizes:
        side = SIZES[name]
        large = _large(image, side + 2 * EDGE)
        first = encoded(frame(large), "JPEG", quality=85)
        pairs = {
            "encoded anew": encoded(frame(large), "JPEG", quality=60),
            "moved by 3 pixels": encoded(frame(large, 3, 0), "JPEG", quality=85),
            "10% brighter": encoded(
                ImageEnhance.Brightness(frame(large)).enhance(1.1), "JPEG", quality=85
            ),
            "resized to 90%": encoded(
                frame(large).resize((round(0.9 * side),) * 2), "JPEG", quality=85
            ),
            "a word changed": encoded(
                frame(_sign(large, (side // 3, side // 3), "open", 32)), "JPEG", quality=85
            ),
        }
        found[name] = _times_of(first, pairs, before)
        print(f"{name:>5s} MP", json.dumps(found[name]), flush=True)
    return found


def _times_of(first: bytes, pairs: dict[str, bytes], before: Any) -> dict[str, Any]:
    donor = pictures.planes_of(read_pixels(first))
    row: dict[str, Any] = {
        "read": _ms(lambda: read_pixels(first)),
        "read at a glance": _ms(lambda: pictures.small_of(read_pixels(first, side=256))),
        "read, with planes": _ms(lambda: pictures.planes_of(read_pixels(first))),
    }
    for name, data in pairs.items():
        image = read_picture(data)
        own = pictures.planes_of(image)
        told = pictures.difference(own, donor) < pictures.LIMIT
        row[name] = {
            "same": told,
            "at a glance": _ms(lambda own=own: pictures.may_show_the_same(own.small, donor.small)),
            "compare": _ms(lambda own=own: pictures.difference(own, donor)),
        }
        if before is not None and image.width * image.height <= before.MOST_PIXELS:
            old = read_picture(first)
            row[name]["before"] = _ms(lambda image=image, old=old: before.difference(old, image), 2)
    return row


def _large(image: Picture, side: int) -> Picture:
    """A photograph at another size, with fine grain as a sensor's."""
    big = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC), np.int16)
    grain = np.random.default_rng(0).integers(-3, 4, big.shape, dtype=np.int16)
    return Image.fromarray((big + grain).clip(0, 255).astype(np.uint8))


def _ms(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    found = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        found.append(time.thread_time() - start)
    return round(1000 * min(found), 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--parts", nargs="+", default=["verdicts", "times"])
    args = parser.parse_args()
    cv2.setNumThreads(1)
    images = photographs(args.folder)
    judges: dict[str, Any] = {"now": same_now}
    before = None
    if args.before is not None:
        spec = importlib.util.spec_from_file_location("pictures_before", args.before)
        assert spec is not None
        assert spec.loader is not None
        before = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(before)
        judges["before"] = lambda a, b: before.difference(a, b) < before.LIMIT
    found: dict[str, Any] = {}
    if args.out is not None and args.out.is_file():  # the other part
        found = json.loads(args.out.read_text(encoding="utf-8"))
    found["machine"] = machine("numpy", "opencv-python-headless", "pillow", "scikit-learn")
    if "verdicts" in args.parts:
        found["verdicts"] = verdicts(images, judges)
        show(found["verdicts"], list(judges))
    if "times" in args.parts:
        measured = times(images["coffee.png"], before, args.sizes)
        found["times"] = found.get("times", {}) | measured
    write_json(args.out, found)


if __name__ == "__main__":
    main()
