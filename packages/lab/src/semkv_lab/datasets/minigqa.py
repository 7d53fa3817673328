"""MiniGQA, our own visual question set in GQA's schema: drawn when it is not there yet, the same for the same seed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from semkv import keys
from semkv.errors import DatasetError
from semkv_lab import minigqa
from semkv_lab.datasets.base import DatasetOptions, Sample, read_json
from semkv_lab.datasets.gqa import load_official, resolve_config
from semkv_lab.minigqa.generate import generate
from semkv_lab.minigqa.knobs import Knobs

SEED = 0
_QUESTIONS_PER_IMAGE = 30  # at least, derived pictures included


def load(options: DatasetOptions) -> list[Sample]:
    """Load MiniGQA from ``options.root``, or draw it under ``options.data_dir`` first.

    The default size is `Knobs`' own; asking for more samples than that draws more pictures.

    Raises:
        ConfigError: ``config`` is no name of GQA's form, or names a split that MiniGQA does not have.
        DatasetError: a file cannot be read, or the folder cannot be written.
    """
    config, split = resolve_config(options)
    root = options.root or ensure(options.data_dir, split, _knobs(options))
    samples = load_official(root, options, config)
    variants = _variants(root / "provenance.json", split)
    return [replace(s, variant=variants(s)) for s in samples] if variants else samples


def image_folders(options: DatasetOptions) -> list[Path]:
    """The folder where `load` would find or draw the images of these options; it need not exist."""
    _, split = resolve_config(options)
    return [(options.root or _folder(options.data_dir, split, _knobs(options))) / "images"]


def _folder(data_dir: Path, split: str, knobs: Knobs) -> Path:
    return data_dir / f"minigqa-{split}-{keys.digest(repr(knobs), str(SEED), _generator())[:12]}"


def ensure(data_dir: Path, split: str, knobs: Knobs) -> Path:
    """The folder of a split drawn with ``knobs``; drawn into a temporary folder and renamed when complete."""
    folder = _folder(data_dir, split, knobs)
    if folder.is_dir():
        return folder
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".minigqa-", dir=data_dir))
        try:
            drawn = generate(part / "data", knobs, seed=SEED, split=split)
            if not folder.is_dir():
                drawn.replace(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as e:
        raise DatasetError(f"{data_dir}: MiniGQA cannot be written there ({e.strerror or e})") from e
    return folder


def _generator() -> str:
    """Digest of the generator's source: data drawn by another version is drawn again."""
    files = sorted(Path(minigqa.__file__).parent.glob("*.py"))
    return keys.digest(*(file.read_bytes() for file in files))


def _knobs(options: DatasetOptions) -> Knobs:
    return Knobs(images=max(Knobs().images, -(-(options.max_samples or 0) // _QUESTIONS_PER_IMAGE)))


class _Variants:
    """What each sample was made from another by, read from ``provenance.json``."""

    def __init__(self, images: Mapping[str, Any], questions: Mapping[str, Any]) -> None:
        self._images, self._questions = images, questions

    def __call__(self, sample: Sample) -> str:
        """``repeat``, ``paraphrase`` ...; ``image:shifted`` ... for a question asked again of a derived picture."""
        question = self._questions.get(sample.sample_id, {}).get("variant", "original")
        image = self._images.get(sample.image_name, {}).get("variant", "original")
        if question != "original":
            return str(question)
        return "" if image == "original" else f"image:{image}"


def _variants(path: Path, split: str) -> _Variants | None:
    if not path.is_file():
        return None
    data = read_json(path)
    part = data.get(split) if isinstance(data, dict) else None
    if not isinstance(part, dict):
        return None
    return _Variants(part.get("images", {}), part.get("questions", {}))
