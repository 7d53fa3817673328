"""Data sets by name: `minigqa` (generated here), `gqa` (official files or the Hugging Face layout), `gqa-text` (its
questions with a model's answers, no images), `jsonl` (yours).

A loader is looked up by name and imported when it is used, so listing the names costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from semkv.errors import ConfigError, DatasetError
from semkv_lab.datasets.base import DatasetOptions, ImageRef, Loader, Sample

__all__ = ["DATASETS", "DatasetOptions", "ImageRef", "Sample", "load_samples", "locate_images"]

DATASETS: Mapping[str, str] = MappingProxyType(
    {
        "minigqa": "semkv_lab.datasets.minigqa:load",
        "gqa": "semkv_lab.datasets.gqa:load",
        "gqa-text": "semkv_lab.datasets.gqa_text:load",
        "jsonl": "semkv_lab.datasets.jsonl:load",
    }
)


def get_loader(name: str) -> Loader:
    """The loader of that name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in DATASETS:
        raise ConfigError("--dataset", name, DATASETS)
    module, function = DATASETS[name].split(":")
    loader: Loader = getattr(import_module(module), function)
    return loader


def load_samples(name: str, options: DatasetOptions) -> list[Sample]:
    """Load the samples that ``options`` select, in their order.

    A name that ends in ``.jsonl`` is that file.

    Raises:
        ConfigError: no such data set, or an option it cannot serve.
        DatasetError: a file cannot be read (the message names file and line), or nothing was selected.
    """
    if name.endswith(".jsonl"):
        name, options = "jsonl", replace(options, root=Path(name))
    samples = get_loader(name)(options)
    if not samples:
        raise DatasetError(f"data set {name!r} holds no samples for the options given")
    return samples


def locate_images(name: str, options: DatasetOptions, wanted: Collection[str]) -> dict[str, Path]:
    """Files of these images as far as they are there now; nothing is drawn, unpacked or fetched."""
    from semkv_lab.datasets import gqa, gqa_text, minigqa

    if name.endswith(".jsonl") or name == "jsonl":
        try:
            samples = load_samples(name, options)
        except (ConfigError, DatasetError):
            return {}
        return {i.name: i.path for s in samples for i in s.images if i.path is not None and i.name in wanted}
    folders = {
        "minigqa": minigqa.image_folders,
        "gqa": gqa.image_folders,
        "gqa-text": gqa_text.image_folders,
    }[name](options)
    found = {image: gqa.find_image(image, folders) for image in wanted}
    return {image: path for image, path in found.items() if path is not None}
