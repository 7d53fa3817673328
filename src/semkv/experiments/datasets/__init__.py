"""Data sets by name: `minigqa` (generated here), `gqa` (official files or the Hugging Face layout), `jsonl` (yours).

A loader is looked up by name and imported when it is used, so listing the names costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from semkv.errors import ConfigError, DatasetError
from semkv.experiments.datasets.base import DatasetOptions, ImageRef, Loader, Sample

__all__ = ["DATASETS", "DatasetOptions", "ImageRef", "Sample", "load_samples"]

DATASETS: Mapping[str, str] = MappingProxyType(
    {
        "minigqa": "semkv.experiments.datasets.minigqa:load",
        "gqa": "semkv.experiments.datasets.gqa:load",
        "jsonl": "semkv.experiments.datasets.jsonl:load",
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
