"""What every data set yields, and how its files are read."""

# The command line reads the annotations of fields: they must be values, not texts.

import gzip
import json
import os
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter

from semkv.config import POSITIVE, check
from semkv.errors import ConfigError, DatasetError

GQA_REPO = "lmms-lab/GQA"
NO_JSON = (ValueError, RecursionError)
"""What `json.loads` raises: the second where values are nested too deep, the first for numbers of 5,000 digits, too."""

_T = TypeVar("_T")
_FIELDS = frozenset(
    {"id", "system", "context", "images", "image", "question", "answer", "semantic", "group", "variant"}
)


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image of a sample: its name in the data set and its file, or None where the file was not found."""

    name: str
    path: Path | None


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with its expected answer.

    Attributes:
        sample_id: unique within the data set.
        question: the user's question.
        answer: the expected answer, or None where there is none to check.
        images: in prompt order.
        system: system text; empty for none.
        context: text before the question, such as a retrieved document; empty for none.
        semantic_str: GQA's functional program of the question, ``select: car [..]->query: color [..]``.
        groups: GQA's group names, global and local.
        equivalent: ids of questions that ask the same.
        entailed: ids of questions whose answer follows from this one's.
        repeats: the id of the sample that a trace asks again under this one's; empty for the first time.
        variant: how MiniGQA made this question from another (``repeat``, ``paraphrase`` ...); empty for an original.
    """

    sample_id: str
    question: str
    answer: str | None = None
    images: tuple[ImageRef, ...] = ()
    system: str = ""
    context: str = ""
    semantic_str: str = ""
    groups: tuple[str, ...] = ()
    equivalent: tuple[str, ...] = ()
    entailed: tuple[str, ...] = ()
    variant: str = ""
    repeats: str = ""

    @property
    def image_name(self) -> str:
        """The first image's name, or the sample's id, the same for its repeats: what results are clustered by."""
        return self.images[0].name if self.images else self.repeats or self.sample_id


def default_data_dir() -> Path:
    """Where drawn and unpacked data goes: beside the default cache directory."""
    return Path("~/.cache/semkv-data").expanduser()


DATA = Parameter(group="Data")


@dataclass(frozen=True)
class DatasetOptions:
    """Which part of a data set to load.

    Attributes:
        data_dir: Where drawn and unpacked data goes.
        root: Folder (or .jsonl file) with the data; for GQA also GQA_ROOT.
        config: Such as val_balanced_instructions; by default SPLIT_balanced_instructions.
        split: train, val or testdev; by default the one that the config names, else val.
        max_samples: At most so many samples.
        shuffle_seed: Shuffle with this seed before cutting; by default the order of the files.
        repo: Hub id of GQA.
    """

    data_dir: Annotated[Path, DATA] = field(default_factory=default_data_dir)
    root: Annotated[Path | None, Parameter(name="--dataset-root"), DATA] = None
    config: Annotated[str, Parameter(name="--dataset-config"), DATA] = ""
    split: Annotated[str, DATA] = ""
    max_samples: Annotated[int | None, POSITIVE, DATA] = None
    shuffle_seed: Annotated[int | None, DATA] = None
    repo: Annotated[str, Parameter(name="--dataset-repo"), DATA] = GQA_REPO

    def __post_init__(self) -> None:
        check(self)


def select(rows: list[_T], options: DatasetOptions) -> list[_T]:
    """Shuffle by ``shuffle_seed`` and cut to ``max_samples``.

    Loaders call it on raw rows, so that only what is used gets its images unpacked.
    """
    rows = list(rows)
    if options.shuffle_seed is not None:
        random.Random(options.shuffle_seed).shuffle(rows)  # noqa: S311 (an order, no secret)
    return rows if options.max_samples is None else rows[: options.max_samples]


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        DatasetError: it cannot be read or parsed; the message names file and line.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise DatasetError(f"{path}, line {e.lineno}: {e.msg}") from e
    except (OSError, *NO_JSON) as e:
        raise DatasetError(f"{path}: {getattr(e, 'strerror', None) or e}") from e


def read_jsonl(path: Path, *, cut_off: bool = False) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (line number, object) for every non-empty line; a file that ends in ``.gz`` is unpacked on the way.

    With ``cut_off`` a last line that was cut short, as by a kill, is left out.

    Raises:
        DatasetError: the file cannot be read, or a line is not a JSON object; the message names file and line.
    """
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8", errors="replace" if cut_off else "strict", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except NO_JSON as e:
                    if cut_off and not line.endswith("\n"):
                        return
                    reason = e.msg if isinstance(e, json.JSONDecodeError) else str(e)
                    raise DatasetError(f"{path}, line {number}: not valid JSON ({reason})") from e
                if not isinstance(row, dict):
                    raise DatasetError(f"{path}, line {number}: expected an object, found {type(row).__name__}")
                yield number, row
    except UnicodeDecodeError as e:
        raise DatasetError(f"{path}: not UTF-8 text ({e.reason} at byte {e.start})") from e
    except (EOFError, zlib.error) as e:
        raise DatasetError(f"{path}: not a whole gzip file ({e})") from e
    except OSError as e:
        raise DatasetError(f"{path}: {e.strerror or e}") from e


def text_field(row: Mapping[str, Any], key: str, where: str, *, required: bool = False) -> str:
    """A string field, numbers taken as text; empty where it is absent.

    Raises:
        DatasetError: it is required and absent or empty, or it is neither text nor a number, or no valid Unicode.
    """
    value = row.get(key)
    if value is None or value == "":
        if required:
            raise DatasetError(f"{where}: no {key!r}")
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DatasetError(f"{where}: {key!r} must be text, found {type(value).__name__}")
    return check_unicode(str(value), key, where)


def check_unicode(text: str, key: str, where: str) -> str:
    """The text.

    Raises:
        DatasetError: it has half of a surrogate pair, which no UTF-8 and so no digest and no file can hold.
    """
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise DatasetError(
            f"{where}: {key!r} must be valid Unicode, found {text[e.start]!a} alone at character {e.start}"
        ) from e
    return text


def load_jsonl(options: DatasetOptions) -> list[Sample]:
    """Any prompts, one JSON object a line: ``system``, ``context``, ``images``, ``question``, ``answer``.

    Only ``question`` is required. ``images`` is a path or a list of paths, relative to the file. ``id``, ``semantic``
    and ``group`` are taken where they are given.

    Raises:
        ConfigError: ``options.root`` names no file.
        DatasetError: it cannot be read; names file and line.
    """
    if options.root is None:
        raise ConfigError("--dataset-root", None, "a .jsonl file when --dataset is jsonl")
    path = options.root
    samples: list[Sample] = []
    seen: dict[str, int] = {}
    for number, row in read_jsonl(path):
        sample = _jsonl_sample(row, path, number)
        if sample.sample_id in seen:
            raise DatasetError(
                f"{path}, line {number}: id {sample.sample_id!r} was used in line {seen[sample.sample_id]}"
            )
        seen[sample.sample_id] = number
        samples.append(sample)
    return select(samples, options)


def _jsonl_sample(row: Mapping[str, Any], path: Path, number: int) -> Sample:
    where = f"{path}, line {number}"
    if unknown := sorted(set(row) - _FIELDS):
        raise DatasetError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}")
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
