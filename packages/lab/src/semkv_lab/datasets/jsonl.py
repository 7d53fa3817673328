"""Any prompts, one JSON object a line: ``system``, ``context``, ``images``, ``question``, ``answer``.

Only ``question`` is required. ``images`` is a path or a list of paths, relative to the file. ``id``, ``semantic`` and
``group`` are taken where they are given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semkv.errors import ConfigError, DatasetError
from semkv_lab.datasets.base import (
    DatasetOptions,
    ImageRef,
    Sample,
    check_unicode,
    read_jsonl,
    select,
    text_field,
)

_KNOWN = frozenset({"id", "system", "context", "images", "image", "question", "answer", "semantic", "group", "variant"})


def load(options: DatasetOptions) -> list[Sample]:
    """Read ``options.root``.

    Raises:
        ConfigError: no file was named.
        DatasetError: it cannot be read; names file and line.
    """
    if options.root is None:
        raise ConfigError("--dataset-root", None, "a .jsonl file when --dataset is jsonl")
    path = options.root
    samples: list[Sample] = []
    seen: dict[str, int] = {}
    for number, row in read_jsonl(path):
        sample = _sample(row, path, number)
        if sample.sample_id in seen:
            raise DatasetError(
                f"{path}, line {number}: id {sample.sample_id!r} was used in line {seen[sample.sample_id]}"
            )
        seen[sample.sample_id] = number
        samples.append(sample)
    return select(samples, options)


def _sample(row: Mapping[str, Any], path: Path, number: int) -> Sample:
    where = f"{path}, line {number}"
    if unknown := sorted(set(row) - _KNOWN):
        raise DatasetError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(_KNOWN))}")
    group = text_field(row, "group", where)
    return Sample(
        sample_id=text_field(row, "id", where) or f"{number:08d}",
        question=text_field(row, "question", where, required=True),
        answer=text_field(row, "answer", where) or None,
        images=_images(row, path, where),
        system=text_field(row, "system", where),
        context=text_field(row, "context", where),
        semantic_str=text_field(row, "semantic", where),
        groups=(group,) if group else (),
        variant=text_field(row, "variant", where),
    )


def _images(row: Mapping[str, Any], path: Path, where: str) -> tuple[ImageRef, ...]:
    value = row.get("images", row.get("image"))
    if value is None:
        return ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(n, str) and n and "\0" not in n for n in names):
        raise DatasetError(f"{where}: 'images' must be a path or a list of paths")
    images = []
    for name in names:
        file = path.parent / check_unicode(name, "images", where)
        if not file.is_file():
            raise DatasetError(f"{where}: no image {file}")
        images.append(ImageRef(os.path.normpath(name), file))  # not its last part: s1/frame.png is not s2/frame.png
    return tuple(images)
