"""What a run is made from, named by its content: so that a sweep never goes on over data that has changed.

Two runs with one `Source` and other digests had other data under one name. A file's place and its time say nothing.
"""

import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from semkv import keys, plug
from semkv.errors import DatasetError
from semkv_lab.samples import DatasetOptions, Sample
from semkv_lab.settings import RunSettings
from semkv_stores.digests import digest, weights_digest

_DATASET = "--dataset"
_CALIBRATION = "--calibration"
_MODEL = "--model"
# Options that change where the samples lie, or their order.
_ASKED_ALIKE = (
    "data_dir",
    "trace",
    "trace_requests",
)


@dataclass(frozen=True, order=True)
class Source:
    """Where something comes from: the flag, and what the settings say of it."""

    flag: str
    value: str


@dataclass(frozen=True)
class Input:
    """A source and the digest of what it held, as a row of a log has it."""

    source: Source
    digest: str


def sources(settings: RunSettings) -> list[Source]:
    """Everything with a content of its own that a run reads."""
    found = [Source(_DATASET, _dataset(settings.dataset, settings.data))]
    if settings.cache.calibration is not None:
        found.append(Source(_CALIBRATION, str(settings.cache.calibration)))
    if settings.engine in ("vllm", "transformers"):
        found.append(Source(_MODEL, f"{settings.model} {settings.revision or ''}".strip()))
    own = {
        "--engine": settings.engine,
        "--policy": settings.cache.policy,
        "--embedding-hook": settings.cache.embedding_hook,
    }
    found += [Source(flag, path) for flag, path in own.items() if plug.is_path(path)]
    return found


def inputs(settings: RunSettings, samples: Iterable[Sample]) -> list[Input]:
    """The sources with their digests.

    Args:
        settings: of the run.
        samples: what the data set gave.

    Raises:
        DatasetError: a file cannot be read.
    """
    found = []
    for source in sources(settings):
        try:
            if source.flag == _DATASET:
                content = data_digest(samples)
            elif source.flag == _MODEL:
                content = weights_digest(settings.model)
            elif source.flag == _CALIBRATION:
                content = digest("file", Path(source.value).read_bytes())
            else:
                content = _code_digest(source.value)
        except OSError as error:
            raise DatasetError(
                f"{source.flag} {source.value}: {error.strerror or error}"
            ) from error
        found.append(Input(source, content))
    return found


def _code_digest(path: str) -> str:
    """Names the file of the user's own ``package.module:Factory``; not what that file imports."""
    try:
        module = importlib.util.find_spec(path.partition(":")[0])
    except Exception as error:  # the packages around it are run
        raise DatasetError(f"{path}: {error}") from error
    if module is None or module.origin is None:
        return ""
    return digest("file", Path(module.origin).read_bytes())


def _dataset(name: str, options: DatasetOptions) -> str:
    """A data set with the options that choose its samples: ``gqa root=/data/gqa max_samples=128``."""
    given = {key: value for key, value in asdict(options).items() if key not in _ASKED_ALIKE}
    return " ".join(
        [name, *(f"{key}={value}" for key, value in given.items() if value not in (None, ""))]
    )


def data_digest(samples: Iterable[Sample]) -> str:
    """Names all that samples say, and the bytes of their pictures; where the pictures lie makes no difference."""
    return digest("data", *_parts(samples))


def _parts(samples: Iterable[Sample]) -> Iterator[str]:
    contents: dict[Path | None, str] = {None: "no file"}
    for sample in samples:
        plain = asdict(sample)
        for image, given in zip(plain["images"], sample.images, strict=True):
            if given.path is not None and given.path not in contents:
                contents[given.path] = _content(given.path)
            del image["path"], image["sought"]
            image["content"] = contents[given.path]
        yield json.dumps(plain, sort_keys=True, default=repr)


def _content(path: Path) -> str:
    """Names the bytes of a picture."""
    try:
        return keys.media_id(path.read_bytes())
    except OSError:
        return "cannot be read"
