"""GQA's questions with a model's answers as labels, without the images: what reuse of text alone is worth.

The file (``--dataset-root``) is ``.jsonl`` or ``.jsonl.gz``, an object a line: ``questionId``, ``imageId``,
``question``, and one more field, whatever its name, with the answer of the model that the labels are from. Each image
is stood in for by a small drawn card with its name on it, so that the tiers, the stores and ``--scope`` treat it as an
image of its own. Only the text tiers mean something here; `requests.label_answers` makes an engine of the labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semkv.errors import ConfigError, DatasetError
from semkv.stores.files import replacing
from semkv_lab.datasets.base import DatasetOptions, ImageRef, Sample, read_jsonl, select, text_field
from semkv_lab.datasets.gqa import is_safe_name

_FIELDS = ("questionId", "imageId", "question")
_CARD = (160, 120)


def load(options: DatasetOptions) -> list[Sample]:
    """Read ``options.root`` and draw the cards of the images that are used, where they are not there yet.

    Raises:
        ConfigError: no file was named.
        DatasetError: it cannot be read (names file and line), or the cards cannot be written.
    """
    if options.root is None:
        raise ConfigError("--dataset-root", None, "a .jsonl or .jsonl.gz file when --dataset is gqa-text")
    rows = [_row(row, f"{options.root}, line {number}") for number, row in read_jsonl(options.root)]
    (folder,) = image_folders(options)
    return [
        Sample(name, question, answer, (ImageRef(image, _card(folder, image)),))
        for name, image, question, answer in select(rows, options)
    ]


def image_folders(options: DatasetOptions) -> list[Path]:
    """Where the cards are."""
    return [options.data_dir / "gqa-text"]


def _row(row: Mapping[str, Any], where: str) -> tuple[str, str, str, str]:
    name, image, question = (text_field(row, key, where, required=True) for key in _FIELDS)
    labels = sorted(set(row) - set(_FIELDS))
    if len(labels) != 1:
        raise DatasetError(
            f"{where}: expected one field beside {', '.join(_FIELDS)}, found {', '.join(labels) or 'none'}"
        )
    if not is_safe_name(image):
        raise DatasetError(f"{where}: 'imageId' must be a plain file name, found {image[:80]!r}")
    return name, image, question, text_field(row, labels[0], where)


def _card(folder: Path, name: str) -> Path:
    """A card with the name on it; the same name gives the same bytes."""
    file = folder / f"{name}.png"
    if file.is_file():
        return file
    from PIL import Image, ImageDraw

    card = Image.new("RGB", _CARD, (226, 226, 222))
    ImageDraw.Draw(card).text((_CARD[0] / 2, _CARD[1] / 2), name, fill=(70, 70, 70), anchor="mm")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file) as part:
            card.save(part, "PNG")
    except OSError as e:
        raise DatasetError(f"{file}: cannot be written ({e.strerror or e})") from e
    return file
