"""Files that a command writes: never one that it reads, and tried before the work, not after it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from semkv.errors import ConfigError

SETTINGS = ".settings.json"  # added to the name of a file of samples


@contextmanager
def writing(key: str, path: Path) -> Iterator[None]:
    """Names the setting where the block cannot write its file.

    Raises:
        ConfigError: in place of an OSError.
    """
    try:
        yield
    except OSError as e:
        raise ConfigError(key, str(path), f"a file that can be written ({e.strerror or e})") from e


def try_to_write(key: str, path: Path) -> None:
    """Make the folder of a file, and find out whether the file can be written; what is in it stays.

    Raises:
        ConfigError: it cannot.
    """
    with writing(key, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink(missing_ok=True)


def keep_apart(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None]) -> None:
    """Refuse to write a file that is read, or two outputs to one file; paths by setting, None where there is none.

    Raises:
        ConfigError: names both settings.
    """
    for (key, path), (other, taken) in itertools.chain(
        itertools.combinations(outputs.items(), 2), itertools.product(outputs.items(), inputs.items())
    ):
        if path is not None and taken is not None and _same(path, taken):
            raise ConfigError(key, str(path), f"another file than that of {other}")


def _same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.is_file() and one.samefile(other)  # /dev/null and the like may be named twice
    return one.resolve() == other.resolve()


def to_json(value: object, indent: int | None = None) -> bytes:
    """JSON in UTF-8. What no UTF-8 can hold, as in the name of a file, becomes an escape."""
    return json.dumps(value, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
