"""GQA (Hudson and Manning, 2019): the official JSON question files with an image folder, or the Hugging Face layout.

Where the data is looked for, in this order: ``--dataset-root``, the environment variable ``GQA_ROOT``, the hub.
A folder may hold

- ``val_balanced_questions.json`` (or ``questions/...``), images as ``<imageId>.jpg`` in ``images/`` or under one of the
  image roots (``GQA_IMAGE_ROOT`` ...): the official download;
- ``val_balanced_instructions/val-*.parquet`` and ``val_balanced_images/val-*.parquet``: a copy of ``lmms-lab/GQA``.

Without a folder, ``datasets`` reads ``--dataset-repo`` from the hub or from its local cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from semkv.config import IMAGE_ROOT_VARIABLES
from semkv.errors import ConfigError, DatasetError
from semkv.stores.files import replacing
from semkv_lab.datasets.base import (
    DatasetOptions,
    ImageRef,
    Sample,
    check_unicode,
    read_json,
    select,
    text_field,
)

ROOT_VARIABLE = "GQA_ROOT"
_KIND = "_instructions"
_SUFFIXES = (".jpg", ".jpeg", ".png")
_SAFE_NAME = re.compile(r"[\w.-]{1,128}")


def load(options: DatasetOptions) -> list[Sample]:
    """Load GQA from a folder or the hub.

    Raises:
        ConfigError: ``config`` is no name of GQA's form.
        DatasetError: nothing was found, or a file cannot be read.
    """
    config, split = resolve_config(options)
    root = options.root or (Path(os.environ[ROOT_VARIABLE]) if os.environ.get(ROOT_VARIABLE) else None)
    if root is None:
        return _load_hub(options, config, split)
    if not root.is_dir():
        raise DatasetError(f"{root}: no such folder")
    if any((root / config).glob(f"{split}-*.parquet")):
        return _load_parquet(root, options, config, split)
    return load_official(root, options, config)


def resolve_config(options: DatasetOptions) -> tuple[str, str]:
    """Configuration and split, each filled in from the other: ``("val_balanced_instructions", "val")``."""
    config = options.config or f"{options.split or 'val'}_balanced{_KIND}"
    parts = config.removesuffix(_KIND).rsplit("_", 1)
    if not config.endswith(_KIND) or len(parts) != 2 or parts[1] not in ("balanced", "all"):
        raise ConfigError("--dataset-config", config, "<split>_balanced_instructions or <split>_all_instructions")
    return config, options.split or parts[0]


def load_official(root: Path, options: DatasetOptions, config: str) -> list[Sample]:
    """Read ``<split>_<balanced|all>_questions.json`` below ``root``; MiniGQA uses the same form."""
    name = f"{config.removesuffix(_KIND)}_questions.json"
    places = [root / name, root / "questions" / name, root / "questions1.2" / name]
    file = next((p for p in places if p.is_file()), None)
    if file is None:
        raise DatasetError(f"{root}: neither {name} (also in questions/) nor {config}/*.parquet was found there")
    data = read_json(file)
    if not isinstance(data, dict):
        raise DatasetError(f"{file}: expected an object of questions by id, found {type(data).__name__}")
    roots = [*_below(root), *_image_roots()]
    return [
        to_sample(str(key), row, f"{file}, question {key}", lambda name: find_image(name, roots))
        for key, row in select(list(data.items()), options)
    ]


def to_sample(key: str, row: Any, where: str, find: Any) -> Sample:
    """One GQA row, official or Hugging Face, as a `Sample`.

    Args:
        key: the question's id.
        row: its fields.
        where: for messages: file and question.
        find: image name to file, or None where there is none.
    """
    if not isinstance(row, Mapping):
        raise DatasetError(f"{where}: expected an object, found {type(row).__name__}")
    image = text_field(row, "imageId", where)
    groups = row.get("groups") or {}
    if not isinstance(groups, Mapping):
        raise DatasetError(f"{where}: 'groups' must be an object")
    return Sample(
        sample_id=check_unicode(key, "id", where),
        question=text_field(row, "question", where, required=True),
        answer=text_field(row, "answer", where) or None,
        images=(ImageRef(image, find(image)),) if image else (),
        semantic_str=text_field(row, "semanticStr", where),
        groups=tuple(text for k in ("global", "local") if (text := text_field(groups, k, f"{where}, groups"))),
        equivalent=_ids(row, "equivalent", where),
        entailed=tuple(name for name in _ids(row, "entailed", where) if name != key),
        variant=text_field(row, "variant", where),
    )


def find_image(name: str, roots: Iterable[Path]) -> Path | None:
    """``<name>.jpg`` or ``.png`` below the first root that has it; names that are no plain file names find nothing."""
    if not is_safe_name(name):
        return None
    for root in roots:
        for suffix in _SUFFIXES:
            file = root / f"{name}{suffix}"
            if file.is_file():
                return file
    return None


def is_safe_name(name: str) -> bool:
    """Whether an image's name is a plain file name: no separators, no leading dot."""
    return _SAFE_NAME.fullmatch(name) is not None and not name.startswith(".")


def image_folders(options: DatasetOptions) -> list[Path]:
    """Folders where `load` would find or unpack the images of these options; they need not exist."""
    config, _ = resolve_config(options)
    root = options.root or (Path(os.environ[ROOT_VARIABLE]) if os.environ.get(ROOT_VARIABLE) else None)
    unpacked = options.data_dir / "gqa" / (config.removesuffix(_KIND) + "_images")
    return [*(_below(root) if root else []), *_image_roots(), unpacked]


def _below(root: Path) -> list[Path]:
    return [root / "images", root / "allImages" / "images", root]


def _image_roots() -> list[Path]:
    return [Path(os.environ[name]) for name in IMAGE_ROOT_VARIABLES if os.environ.get(name)]


def _ids(row: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Ids as a list, or as the Hugging Face layout writes a list: one string."""
    value = row.get(key)
    if value is not None and not isinstance(value, str | list):
        raise DatasetError(f"{where}: {key!r} must be a list of ids, found {type(value).__name__}")
    return tuple(re.findall(r"[\w-]+", value)) if isinstance(value, str) else tuple(str(v) for v in value or ())


def _load_parquet(root: Path, options: DatasetOptions, config: str, split: str) -> list[Sample]:
    rows = list(_read_parquet(sorted((root / config).glob(f"{split}-*.parquet")), None))
    chosen = select(rows, options)
    images = config.removesuffix(_KIND) + "_images"
    wanted = {str(r.get("imageId")) for r in chosen}
    files = sorted((root / images).glob(f"{split}-*.parquet"))
    found = _unpack_images(_read_parquet(files, wanted), wanted, options.data_dir / "gqa" / images)
    return _from_rows(chosen, found, f"{root / config}")


def _load_hub(options: DatasetOptions, config: str, split: str) -> list[Sample]:
    try:
        from datasets import Image, load_dataset
    except ImportError as e:
        raise DatasetError(
            f"no GQA folder was given (--dataset-root or {ROOT_VARIABLE}) and the package 'datasets' that reads "
            f"{options.repo} from the hub is not installed: install semkv[datasets]"
        ) from e
    images = config.removesuffix(_KIND) + "_images"
    try:
        rows = [dict(row) for row in load_dataset(options.repo, config, split=split)]
        chosen = select(rows, options)
        wanted = {str(r.get("imageId")) for r in chosen}
        pictures = load_dataset(options.repo, images, split=split).cast_column("image", Image(decode=False))
    except (OSError, ValueError, RuntimeError) as e:
        raise DatasetError(
            f"{options.repo} ({config}, {split}) cannot be read from the hub: {str(e).splitlines()[0][:200]}; where "
            f"there is no network give a folder with --dataset-root or {ROOT_VARIABLE}, or take --dataset minigqa, "
            "which needs no download"
        ) from e
    found = _unpack_images((dict(row) for row in pictures), wanted, options.data_dir / "gqa" / images)
    return _from_rows(chosen, found, options.repo)


def _from_rows(rows: list[dict[str, Any]], images: Mapping[str, Path], where: str) -> list[Sample]:
    samples = []
    for number, row in enumerate(rows, start=1):
        key = text_field(row, "id", f"{where}, row {number}", required=True)
        samples.append(to_sample(key, row, f"{where}, question {key}", images.get))
    return samples


def _read_parquet(files: list[Path], wanted: set[str] | None) -> Iterable[dict[str, Any]]:
    """Rows of parquet files; with ``wanted``, only those whose ``id`` is in it."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise DatasetError("reading parquet files needs the package 'pyarrow': install semkv[datasets]") from e
    for file in files:
        try:
            with pq.ParquetFile(file) as table:
                for batch in table.iter_batches(batch_size=256):
                    rows: list[dict[str, Any]] = batch.to_pylist()
                    yield from (r for r in rows if wanted is None or str(r.get("id")) in wanted)
        except (OSError, pa.ArrowException) as e:
            raise DatasetError(f"{file}: not a readable parquet file ({str(e).splitlines()[0][:200]})") from e


def _unpack_images(rows: Iterable[Mapping[str, Any]], wanted: set[str], folder: Path) -> dict[str, Path]:
    """Write each wanted image's own bytes to ``folder``; a file that is there already is kept."""
    found: dict[str, Path] = {}
    for row in rows:
        name, image = str(row.get("id")), row.get("image")
        if name not in wanted or not is_safe_name(name):
            continue
        data = image.get("bytes") if isinstance(image, Mapping) else None
        if not data:
            continue
        file = folder / (name + (".png" if data.startswith(b"\x89PNG") else ".jpg"))
        if not file.is_file() or file.stat().st_size != len(data):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with replacing(file) as part:
                    part.write(data)
            except OSError as e:
                raise DatasetError(f"{file}: cannot be written ({e.strerror or e})") from e
        found[name] = file
        if len(found) == len(wanted):
            break
    return found
