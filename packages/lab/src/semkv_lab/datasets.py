"""Data sets by name: ``minigqa`` and ``minigqa-text`` (generated here), ``gqa`` (official files or the Hugging Face
layout), ``jsonl`` (yours), or a function of your own by its dotted path.
"""

import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from semkv import plug
from semkv.config import IMAGE_ROOT_VARIABLES
from semkv.errors import ConfigError, DatasetError
from semkv.user_files import read_json
from semkv_lab import minigqa
from semkv_lab.minigqa import VARIANTS, returning
from semkv_lab.samples import (
    DatasetOptions,
    ImageRef,
    NonEmpty,
    Sample,
    as_row,
    load_jsonl,
    select,
)
from semkv_stores.digests import digest
from semkv_stores.files import replacing


def load_samples(name: str, options: DatasetOptions) -> list[Sample]:
    """Load the samples that ``options`` select, in their order.

    A name that ends in ``.jsonl`` is that file. A function ``package.module:name`` is called with the options and
    returns all its samples.
    """
    if name.endswith(".jsonl"):
        name, options = "jsonl", replace(options, root=Path(name))
    if plug.is_path(name):
        found = plug.load("--dataset", name, options)
        own = list(found) if isinstance(found, Iterable) else [found]
        if not all(isinstance(sample, Sample) for sample in own):
            raise ConfigError(
                "--dataset", name, "a function that returns a list of semkv_lab.samples.Sample"
            )
        samples = select(own, options)
    elif name not in DATASETS:
        raise ConfigError("--dataset", name, list(DATASETS))
    else:
        samples = DATASETS[name](options)
    twice = [
        sample_id for sample_id, count in Counter(s.sample_id for s in samples).items() if count > 1
    ]
    if twice:
        raise DatasetError(
            f"data set {name!r}: {len(twice)} ids stand for two samples, such as {twice[0]!r}"
        )
    if not samples:
        raise DatasetError(f"data set {name!r} holds no samples for the options given")
    return samples


# -- GQA --------------------------------------------------------------------------------------------------------

ROOT_VARIABLE, IMAGE_ROOT = "GQA_ROOT", "GQA_IMAGE_ROOT"
_REPO = "lmms-lab/GQA"  # on the hub
_KIND = "_instructions"
TYPES = ("structural", "semantic", "detailed")
_SUFFIXES = (".jpg", ".jpeg", ".png")
_SAFE_NAME = re.compile(r"[\w.-]{1,128}")


def load_gqa(options: DatasetOptions) -> list[Sample]:
    """GQA (Hudson and Manning, 2019), from ``--dataset-root``, else the folder in ``GQA_ROOT``, else the hub.

    A folder has ``val_balanced_questions.json`` (also in ``questions/``; ``train_all_questions/`` is one of parts),
    images as ``<imageId>.jpg`` in ``images/`` or under one of the image roots (``GQA_IMAGE_ROOT`` ...), and, for
    validity and plausibility, ``val_choices.json`` (also in ``eval/``): the official download. Or it is a copy of
    ``lmms-lab/GQA``, with ``val_balanced_instructions/val-*.parquet`` and ``val_balanced_images/val-*.parquet``.
    """
    config, split = resolve_config(options)
    root = options.root or (
        Path(os.environ[ROOT_VARIABLE]) if os.environ.get(ROOT_VARIABLE) else None
    )
    if root is not None and not root.is_dir():
        raise DatasetError(f"{root}: no such folder")
    if root is None or any((root / config).glob(f"{split}-*.parquet")):
        return _load_tables(options, root, config, split)
    return load_official(root, options, config)


def resolve_config(options: DatasetOptions) -> tuple[str, str]:
    """Configuration and split, each filled in from the other: ``("val_balanced_instructions", "val")``."""
    config = options.config or f"{options.split or 'val'}_balanced{_KIND}"
    parts = config.removesuffix(_KIND).rsplit("_", 1)
    if not config.endswith(_KIND) or len(parts) != 2 or parts[1] not in ("balanced", "all"):
        raise ConfigError(
            "--dataset-config", config, "<split>_balanced_instructions or <split>_all_instructions"
        )
    return config, options.split or parts[0]


def load_official(root: Path, options: DatasetOptions, config: str) -> list[Sample]:
    """Read ``<split>_<balanced|all>_questions.json`` below ``root``; MiniGQA uses the same form."""
    name = f"{config.removesuffix(_KIND)}_questions.json"
    places = [root / name, root / "questions" / name, root / "questions1.2" / name]
    files = next(
        (found for p in places if (found := [p] if p.is_file() else _parts(p.with_suffix("")))),
        None,
    )
    if files is None:
        raise DatasetError(
            f"{root}: neither {name} (also in questions/) nor {config}/*.parquet was found there"
        )
    rows = [(str(key), row, file) for file in files for key, row in _objects(file).items()]
    beside = f"{config.removesuffix(_KIND).rsplit('_', 1)[0]}_choices.json"
    folders = (root, root / "questions", root / "eval", root / "choices")
    choices = next(
        (_objects(folder / beside) for folder in folders if (folder / beside).is_file()), {}
    )
    roots = [root / "images", root / "allImages" / "images", root]
    roots += [Path(os.environ[name]) for name in IMAGE_ROOT_VARIABLES if os.environ.get(name)]
    return [
        _sample(
            key,
            row,
            f"{file}, question {key}",
            lambda name: _in_folders(name, roots),
            choices.get(key),
        )
        for key, row, file in select(rows, options)
    ]


def _parts(folder: Path) -> list[Path]:
    """The official archive has train_all in ten files: in the order of their numbers."""
    return sorted(
        folder.glob(f"{folder.name}_*.json"), key=lambda part: (len(part.name), part.name)
    )


def _objects(file: Path) -> dict[str, Any]:
    data = read_json(file, nan_is_null=True)
    if not isinstance(data, dict):
        raise DatasetError(
            f"{file}: expected an object of questions by id, found {type(data).__name__}"
        )
    return data


@dataclass(frozen=True)
class _Question:
    """A row of GQA's, of the official files or the Hugging Face layout."""

    __pydantic_config__ = ConfigDict(coerce_numbers_to_str=True)

    question: NonEmpty
    imageId: str | None = None  # noqa: N815
    answer: str | None = None
    semanticStr: str | None = None  # noqa: N815
    groups: dict[str, str | None] | None = None
    types: dict[str, str | None] | None = None
    entailed: list[str] | str | None = None  # the Hugging Face layout writes a list as text
    variant: str | None = None


@dataclass(frozen=True)
class _Choices:
    """A question's answers of its kind, and those that occur with its objects."""

    __pydantic_config__ = ConfigDict(coerce_numbers_to_str=True)

    valid: tuple[str, ...] = ()
    plausible: tuple[str, ...] = ()


def _sample(
    key: str,
    row: Any,
    where: str,
    image: Callable[[str], ImageRef],
    choices: Any = None,
) -> Sample:
    asked = as_row(row, _Question, where)
    allowed = as_row(choices or {}, _Choices, f"{where}, its choices")
    groups = asked.groups or {}
    return Sample(
        sample_id=key,
        question=asked.question,
        answer=asked.answer or None,
        images=(image(asked.imageId),) if asked.imageId else (),
        semantic_str=asked.semanticStr or "",
        groups=tuple(text for name in ("global", "local") if (text := groups.get(name))),
        group=groups.get("global") or "",
        types=tuple(asked.types.get(name) or "" for name in TYPES) if asked.types else (),
        valid=allowed.valid,
        plausible=allowed.plausible,
        entailed=tuple(name for name in _names(asked.entailed) if name != key),
        variant=asked.variant or "",
    )


def _names(entailed: Sequence[str] | None) -> Sequence[str]:
    """Ids in a list, or in the text that the Hugging Face layout writes for one."""
    if isinstance(entailed, str):
        return re.findall(r"[\w-]+", entailed)
    return entailed or ()


def _in_folders(name: str, roots: Sequence[Path]) -> ImageRef:
    """A picture of the official layout."""
    if (found := find_image(name, roots)) is not None:
        return ImageRef(name, found)
    if not is_safe_name(name):
        return ImageRef(name, None, "this is no plain name of a file")
    places = ", ".join(map(str, dict.fromkeys(roots)))
    files = " or ".join(f"{name}{suffix}" for suffix in _SUFFIXES)
    return ImageRef(
        name, None, f"there is no {files} in {places}; {IMAGE_ROOT} names another folder"
    )


def find_image(name: str, roots: Iterable[Path]) -> Path | None:
    """``<name>.jpg`` or ``.png`` below the first root that has it; names that are no plain file names find nothing."""
    files = (
        (root / f"{name}{suffix}" for root in roots for suffix in _SUFFIXES)
        if is_safe_name(name)
        else ()
    )
    return next((file for file in files if file.is_file()), None)


def is_safe_name(name: str) -> bool:
    """Whether an image's name is a plain file name: no separators, no leading dot."""
    return _SAFE_NAME.fullmatch(name) is not None and not name.startswith(".")


def _load_tables(
    options: DatasetOptions, root: Path | None, config: str, split: str
) -> list[Sample]:
    """GQA in the Hugging Face layout: below a folder, or from the hub."""
    where = str(root or _REPO)
    images = config.removesuffix(_KIND) + "_images"
    rows = list(_read_table(root, config, split))
    for number, row in enumerate(rows, 1):
        if not row.get("id"):
            raise DatasetError(f"{where} ({config}, {split}), row {number}: no id")
    chosen = select(rows, options)
    wanted = {str(row["imageId"]) for row in chosen if row.get("imageId")}
    found = _unpack_images(
        _read_table(root, images, split), wanted, options.data_dir / "gqa" / images
    )

    def image(name: str) -> ImageRef:
        return ImageRef(
            name, found.get(name), f"{where} ({images}, {split}) has no picture of this id"
        )

    return [_sample(str(row["id"]), row, f"{where}, question {row['id']}", image) for row in chosen]


def _read_table(
    root: Path | None,
    config: str,
    split: str,
) -> Iterator[dict[str, Any]]:
    """The rows of a configuration; pictures stay encoded."""
    from datasets import Image, load_dataset

    try:
        if root is None:
            table = load_dataset(_REPO, config, split=split)
        else:  # streamed: nothing is copied to the hub's cache
            files = str(root / config / f"{split}-*.parquet")
            table = load_dataset("parquet", data_files=files, split="train", streaming=True)
        if "image" in (table.column_names or ()):
            table = table.cast_column("image", Image(decode=False))
        yield from map(_without_nan, table)
    except (OSError, ValueError, RuntimeError) as e:
        advice = f"give a folder with --dataset-root or {ROOT_VARIABLE}, or take --dataset minigqa, which needs none"
        raise DatasetError(
            f"{root or _REPO} ({config}, {split}) cannot be read: {str(e).splitlines()[0]}; {advice}"
        ) from e


def _without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table, in which a number that is none stands for a missing value."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _unpack_images(
    rows: Iterable[Mapping[str, Any]],
    wanted: set[str],
    folder: Path,
) -> dict[str, Path]:
    """Write each wanted image's own bytes to ``folder``; a file that is there already is kept."""
    found: dict[str, Path] = {}
    for row in rows:
        name, image = str(row.get("id")), row.get("image")
        data = image.get("bytes") if isinstance(image, Mapping) else None
        if not data or name not in wanted or not is_safe_name(name):
            continue
        found[name] = file = folder / (name + (".png" if data.startswith(b"\x89PNG") else ".jpg"))
        if not file.is_file() or file.stat().st_size != len(data):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                # What a power cut spoils can be made again.
                with replacing(file, durable=False) as part:
                    part.write(data)
            except OSError as e:
                raise DatasetError(f"{file}: cannot be written ({e.strerror or e})") from e
        if len(found) == len(wanted):
            break
    return found


# -- MiniGQA ------------------------------------------------------------

_QUESTIONS_PER_IMAGE = 30  # at least, derived pictures included


def load_minigqa(options: DatasetOptions) -> list[Sample]:
    """MiniGQA, our own visual question set in GQA's schema, from ``options.root``; without one it is drawn first, under
    ``options.data_dir``, with more pictures where more samples are asked for than the default has.
    """
    config, split = resolve_config(options)
    return load_official(options.root or _drawn(options, split), options, config)


def _drawn(options: DatasetOptions, split: str) -> Path:
    """The folder of the data, drawn where it is not there yet; another version of the generator draws it again."""
    images = max(12, -(-(options.max_samples or 0) // _QUESTIONS_PER_IMAGE))
    source = Path(minigqa.__file__).parent
    generator = digest(
        *(f.read_bytes() for f in sorted([*source.glob("*.py"), *source.glob("*.toml")]))
    )
    folder = options.data_dir / f"minigqa-{split}-{digest(str(images), generator)[:12]}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".minigqa-", dir=folder.parent) as part:
            drawn = minigqa.generate(Path(part) / "data", images, split=split)
            drawn.replace(folder)  # whole, or not at all
    except OSError as e:
        if not folder.is_dir():  # else another process was first
            raise DatasetError(
                f"{folder.parent}: MiniGQA cannot be written there ({e.strerror or e})"
            ) from e
    return folder


def load_minigqa_text(options: DatasetOptions) -> list[Sample]:
    """Questions about drawn documents of 1,300 words that return as they are or changed, see
    `semkv_lab.minigqa.returning`: 120, or as many as ``max_samples`` says.
    """
    _, split = resolve_config(options)
    if split not in minigqa.SPLITS:
        raise ConfigError("split", split, minigqa.SPLITS)
    rows = returning(
        -(-(options.max_samples or 120) // len(VARIANTS)), seed=minigqa.SPLITS.index(split)
    )
    samples = [
        Sample(
            f"{split}-{number}",
            row["question"],
            row["answer"],
            context=row["context"],
            group=row["document"],
            variant="" if row["variant"] == "original" else f"document:{row['variant']}",
        )
        for number, row in enumerate(rows)
    ]
    return select(samples, options)


DATASETS: Mapping[str, Callable[[DatasetOptions], list[Sample]]] = {
    "minigqa": load_minigqa,
    "minigqa-text": load_minigqa_text,
    "gqa": load_gqa,
    "jsonl": load_jsonl,
}
