"""Image files to pixels, and pixels to vectors.

A file is read as vLLM (0.26 to 0.33) reads it by default: two files that it shows its model alike are alike here, and
two that it shows differently are not.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import math
import os
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from semkv.encoders.library import few_threads, load_sentence_transformer
from semkv.encoders.text import at_unit_length
from semkv.errors import ConfigError
from semkv_stores.digests import digest, weights_digest

if TYPE_CHECKING:
    from PIL.Image import Image

    from semkv.types import Vector

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]

logger = logging.getLogger("semkv")

READING = "upright, on white"
"""Names this way of reading, in the keys of all that is computed from it. To be changed with it."""

_ALL_PIXELS = 178_956_970  # vLLM's own bound, and Pillow's
# In vLLM's order: some formats have no sign of their own, and the first that reads a file decides. Left out are those
# that start other programs (EPS), ask for drivers, or are no pictures.
_FORMATS = (
    "AVIF BLP BMP CUR DCX DDS DIB FITS FLI FTEX GBR GIF ICNS ICO IM IMT IPTC JPEG JPEG2000 MCIDAS MSP PCD PCX PIXAR PNG"
    " PPM PSD QOI SGI SPIDER SUN TGA TIFF WEBP XBM XPM XVTHUMB"
).split()

JPEG = b"\xff\xd8\xff"
_END_OF_JPEG = b"\xff\xd9"
_ORIENTATION = 0x0112  # in EXIF data
_DRAFT = 256  # pixels a side that are read of a JPEG at first

CLIP = "clip-ViT-B-32"
SMALL = "small"
_KEY = "--vision-encoder"
MOST_PIXELS = 25_000_000
"""Of all pictures of a request together, which are 75 MB when unpacked, however small the files."""

_READ = (
    f"{READING}, squeezed"  # part of fingerprints: vectors of another reading are never compared
)
# cells a side of a tower's raster; the hidden state before the last
_GRID = 6
_LAYER = -2
_CELLS = 16  # of a small copy, a side
_THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))  # the engine needs the rest


def read_picture(
    data: bytes, *, most_pixels: int = _ALL_PIXELS, whole: bool = False, side: int = 0
) -> Image:
    """The picture in RGB: turned as its EXIF orientation says, what is transparent on white, the first of several
    frames. Colour profiles are not applied. With ``whole`` only a picture that this shows all of. With ``side`` a
    smaller copy will do, at least so many pixels wide and high: a JPEG is then read in less time.

    Raises:
        OSError: the bytes are no picture that can be read, or one of more than ``most_pixels``, whatever else is
            wrong with them: Pillow's readers raise nearly any exception. With ``whole`` also where there are more
            frames, or more than 8 bits a channel.
    """
    with _read_errors():
        return _loaded(_checked(data, most_pixels, whole=whole), side)


def read_pixels(
    data: bytes, *, most_pixels: int = _ALL_PIXELS, whole: bool = False, side: int = 0
) -> Pixels:
    """What `read_picture` reads as an array, [height, width, 3]. OpenCV decodes most JPEGs to the same numbers in less
    time."""
    with _read_errors():
        image = _checked(data, most_pixels, whole=whole)
        pixels = _by_opencv(image, data, side)
        return np.asarray(_loaded(image, side)) if pixels is None else pixels


@contextlib.contextmanager
def _read_errors() -> Iterator[None]:
    """Turn what Pillow's readers raise, which is nearly any exception, into `OSError`."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError:
        raise OSError("no picture in a format that is read") from None
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _checked(data: bytes, most_pixels: int, *, whole: bool) -> Any:
    """A picture of which the head was read."""
    image = _opened(data)
    if image.width * image.height > most_pixels:
        raise OSError(
            f"a picture of {image.width} x {image.height} pixels, of at most {most_pixels}"
        )
    if whole and (
        image.mode[0] in "IF" or (image.format != "MPO" and getattr(image, "is_animated", False))
    ):
        raise OSError("a picture of several frames, or of more than 8 bits a channel")
    return image


def _loaded(image: Any, side: int) -> Image:
    from PIL import ImageOps

    if side:
        image.draft(image.mode, (side, side))
    with contextlib.suppress(
        Exception
    ):  # damaged EXIF data: the picture stays as it lies in the file
        image = ImageOps.exif_transpose(image)
    image.load()
    return _rgb(image)


def _by_opencv(image: Any, data: bytes, side: int) -> Pixels | None:
    """The pixels of a JPEG that both libraries read alike: in color, upright, and with its end. None for others."""
    alike = image.format == "JPEG" and image.mode == "RGB" and data.endswith(_END_OF_JPEG)
    if not alike or importlib.util.find_spec("cv2") is None:
        return None
    try:
        if image.getexif().get(_ORIENTATION, 1) != 1:
            return None
    except Exception:  # damaged EXIF data
        return None
    import cv2

    shorter = min(image.size)
    parts = [part for part in (8, 4, 2) if side and shorter // part >= side]
    how = cv2.IMREAD_COLOR_RGB
    if parts:
        how = getattr(cv2, f"IMREAD_REDUCED_COLOR_{parts[0]}")
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), how | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        return None
    if pixels is None or pixels.ndim != 3:
        return None
    found: Pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB) if parts else pixels
    return found


@lru_cache(maxsize=4)
def draft_of(data: bytes, *, most_pixels: int) -> Pixels:
    """A smaller copy of a JPEG. The latest are remembered: the index and the guard look at the same one."""
    return read_pixels(data, most_pixels=most_pixels, side=_DRAFT)


def pixels_of(data: bytes) -> int:
    """How many pixels a picture says that it has; 0 where there is none that can be read. Its head alone is read."""
    try:
        width, height = _opened(data).size
        return int(width * height)
    except Exception:
        return 0


def _opened(data: bytes) -> Any:
    from PIL import Image

    Image.init()
    return Image.open(io.BytesIO(data), formats=[name for name in _FORMATS if name in Image.OPEN])


def _rgb(image: Image) -> Image:
    if image.mode == "RGB":
        return image  # with a transparent colour, too
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    from PIL import Image

    colors = image.convert("RGBA")
    page = Image.new("RGB", colors.size, (255, 255, 255))
    page.paste(colors, mask=colors.getchannel("A"))
    return page


class VisionEncoder(Protocol):
    """What the vision hook needs: the bytes of an image file to one unit vector, float32 [dim]."""

    @property
    def dim(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def encode(self, data: bytes) -> Vector: ...


def open_picture(data: bytes) -> Any:
    """A square PIL image in RGB.

    As `read_picture`, and the whole of a wide picture is squeezed into a square of as many pixels: image processors
    cut out the middle of it, and pictures that differ at the ends would be the same.

    Raises:
        OSError: the bytes are not an image that can be read, or one of too many pixels.
    """
    image = read_picture(data, most_pixels=MOST_PIXELS)
    side = math.isqrt(image.width * image.height)
    return image if image.width == image.height else image.resize((side, side))


class SmallCopy:
    """A picture's small copy as its vector, 512 numbers: luma at 16 x 16, two planes of chroma at 8 x 16. It needs no
    weights, and finds copies of a picture, not other pictures of the same things."""

    dim = 512
    fingerprint = digest("small copy", READING, str(_DRAFT))[:16]

    def encode(self, data: bytes) -> Vector:
        from PIL.Image import Resampling, fromarray

        read = draft_of if data.startswith(JPEG) else read_pixels
        image = fromarray(read(data, most_pixels=MOST_PIXELS))
        copy = image.resize((_CELLS, _CELLS), Resampling.BOX).convert("YCbCr")
        levels = np.asarray(copy, np.float32) - 128
        luma = levels[:, :, 0]
        chroma = levels[:, :, 1:].reshape(-1, 2, 2).mean(axis=1)
        numbers = np.concatenate([(luma - luma.mean()).ravel(), chroma.ravel()])
        numbers += 1  # no vector of a gray picture is zero
        unit: Vector = at_unit_length(numbers[None])[0]
        return unit


class ClipEncoder:
    """The image half of a CLIP model packed for sentence-transformers, such as ``clip-ViT-B-32`` (512 numbers), by
    directory or hub id."""

    def __init__(self, model: str) -> None:
        from PIL import Image

        self._model = load_sentence_transformer(_KEY, model)
        self._lock = threading.Lock()
        self.fingerprint = digest("clip", _READ, weights_digest(model))[:16]
        self.dim = len(self._run(Image.new("RGB", (32, 32))))

    def _run(self, image: Image) -> Vector:
        with self._lock, few_threads(_THREADS):
            return np.asarray(
                self._model.encode([image], show_progress_bar=False)[0], dtype=np.float32
            )

    def encode(self, data: bytes) -> Vector:
        unit: Vector = at_unit_length(self._run(open_picture(data))[None])[0]
        return unit


class TowerEncoder:
    """The vision tower of a local LLaVA checkpoint, read without its language model.

    The patch features of one layer are averaged over the cells of a raster, the raster's mean is taken off, and the
    cells are joined: what is where stays visible, so that two scenes which differ in one object's color lie further
    apart than two encodings of one scene.

    Raises:
        ConfigError: the directory lacks a ``config.json`` with a ``vision_config`` of type ``clip_vision_model``,
            safetensors weights under ``vision_tower.``, or an image processor.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoImageProcessor, CLIPVisionConfig, CLIPVisionModel

        config = _vision_config(directory)
        self._side = int(config["image_size"]) // int(config["patch_size"])
        try:
            self._processor = AutoImageProcessor.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                _KEY, str(directory), "a directory with an image processor"
            ) from error
        weights, found = _tower_weights(directory)
        model = CLIPVisionModel(CLIPVisionConfig(**config)).eval()
        wanted = {name.removeprefix("vision_model."): name for name in model.state_dict()}
        missing = [
            name for name in wanted if name not in weights and not name.endswith("position_ids")
        ]
        if missing:
            raise ConfigError(
                _KEY,
                str(directory),
                f"a checkpoint with the whole vision tower ({missing[0]} is missing)",
            )
        model.load_state_dict(
            {wanted[k]: v.float() for k, v in weights.items() if k in wanted}, strict=False
        )
        self._model = model
        self._lock = threading.Lock()
        self.dim = _GRID * _GRID * int(config["hidden_size"])
        settings = json.dumps(
            [config, self._processor.to_dict(), _GRID, _LAYER], sort_keys=True, default=str
        )
        self.fingerprint = digest("tower", _READ, found, settings)[:16]

    def encode(self, data: bytes) -> Vector:
        import torch

        pixels = self._processor(images=open_picture(data), return_tensors="pt")["pixel_values"]
        with self._lock, torch.inference_mode(), few_threads(_THREADS):
            states = self._model(pixel_values=pixels, output_hidden_states=True).hidden_states[
                _LAYER
            ]
        patches = states[0, 1:].reshape(self._side, self._side, -1).permute(2, 0, 1)[None]
        cells = (
            torch.nn.functional.adaptive_avg_pool2d(patches, _GRID)[0].flatten(1).T
        )  # [cells, hidden]
        unit: Vector = at_unit_length(
            (cells - cells.mean(dim=0, keepdim=True)).flatten()[None].numpy()
        )[0]
        return unit


def _vision_config(directory: Path) -> dict[str, Any]:
    allowed = "a directory with a config.json whose vision_config is of type clip_vision_model"
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))[
            "vision_config"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(_KEY, str(directory), allowed) from error
    if not isinstance(config, dict) or config.get("model_type") != "clip_vision_model":
        raise ConfigError(_KEY, str(directory), allowed)
    return {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}


def _tower_weights(directory: Path) -> tuple[dict[str, Any], str]:
    """The tower's tensors by their bare names, and a digest of them. Other tensors are not read."""
    from safetensors import safe_open

    weights: dict[str, Any] = {}
    found = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                bare = name.removeprefix("model.")
                if bare.startswith("vision_tower."):
                    bare = bare.removeprefix("vision_tower.").removeprefix("vision_model.")
                    weights[bare] = tensors.get_tensor(name)
                    found.update(bare.encode() + b"\0" + weights[bare].float().numpy().tobytes())
    if not weights:
        raise ConfigError(
            _KEY, str(directory), "a directory with safetensors weights under vision_tower."
        )
    return weights, found.hexdigest()


def build_vision_encoder(name: str) -> VisionEncoder:
    """The encoder behind the ``vision`` hook: of a directory (a LLaVA checkpoint, or a model in sentence-transformers'
    form) or a hub id; ``small`` is `SmallCopy`. Empty means ``clip-ViT-B-32`` where its weights are on this machine,
    else ``small``.

    Raises:
        ConfigError: there is no such model, or it would have to be downloaded and may not be.
    """
    if name == SMALL:
        return SmallCopy()
    directory = Path(name)
    if name and directory.is_dir():
        if (directory / "modules.json").is_file():
            return ClipEncoder(name)
        return TowerEncoder(directory)
    wanted = name or CLIP
    local = _local_snapshot(wanted if "/" in wanted else f"sentence-transformers/{wanted}")
    if local is not None:
        return ClipEncoder(local)
    offline = (
        os.environ.get(variable, "").upper()
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    if not name:
        logger.info("Images are compared by small copies of them, since %s is not here.", CLIP)
        return SmallCopy()
    if any(value in ("1", "ON", "YES", "TRUE") for value in offline):
        raise ConfigError(
            _KEY,
            name,
            f"{SMALL}, a directory with a vision tower, or a model that is on this machine ({wanted} is not: "
            f"hf download sentence-transformers/{CLIP} fetches CLIP)",
        )
    return ClipEncoder(name)


def _local_snapshot(repository: str) -> str | None:
    """The folder of a whole snapshot in the Hugging Face cache, or None; nothing is downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    return str(folder) if (folder / "modules.json").is_file() else None
