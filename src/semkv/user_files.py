"""Files that users write: JSON, JSON lines and TOML, which every command reads here.

A file is UTF-8 text with or without a byte order mark, plain or packed (``.gz``). What two readers could take in two
ways is an error that names the file and the place: a name that comes twice in one object, half of a character, text in
another encoding. JSON has neither NaN nor infinity: they are an error, or null where a caller asks for that.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import select
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, cast

from semkv.errors import DatasetError

_PIPE_S = 5.0  # how long a pipe may be silent at first
_MARK = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
# Escapes; most are halves of one whole character.
_PART_OF_A_PAIR = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


def read_json(path: Path, *, nan_is_null: bool = False) -> Any:
    """The value of a JSON file.

    Raises:
        DatasetError: it cannot be read, or is no JSON; names the file and the place.
    """
    return parse_json(_read_text(path), str(path), nan_is_null=nan_is_null)


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file.

    Raises:
        DatasetError: it cannot be read, or is no TOML; names the file and the place.
    """
    try:
        return tomllib.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: not valid TOML ({error})") from error


def read_json_lines(
    path: Path, *, nan_is_null: bool = False, cut_off: bool = False
) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) for every line that is not blank.

    Args:
        path: the file.
        nan_is_null: whether NaN and infinity are read as null.
        cut_off: whether a last line that was cut short, as by a kill, is left out: for files that semkv writes.

    Raises:
        DatasetError: the file cannot be read, or a line is no JSON; names file and line.
    """
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                text = _decoded(line, where)
                if not text.strip():
                    continue
                value = parse_json(text, where, nan_is_null=nan_is_null)
            except DatasetError:
                if cut_off and not line.endswith(b"\n"):
                    return
                raise
            yield number, value


def parse_json(text: str, where: str, *, nan_is_null: bool = False) -> Any:
    """The value of a JSON text. ``where`` stands before the message of an error.

    Raises:
        DatasetError: it is no JSON; names the place.
    """
    odd = False

    def of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal odd
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        odd = True
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        return {twice: _Odd(f"the name {twice!r} comes twice in one object")}

    def no_number(written: str) -> _Odd | None:
        nonlocal odd
        if nan_is_null:
            return None
        odd = True
        return _Odd(f"{written} is no number in JSON")

    def number(written: str) -> float | _Odd | None:
        value = float(written)
        return value if math.isfinite(value) else no_number(written)

    try:
        found = json.loads(
            text, object_pairs_hook=of_pairs, parse_constant=no_number, parse_float=number
        )
    except json.JSONDecodeError as error:
        place = (
            f"column {error.colno}"
            if error.lineno == 1
            else f"line {error.lineno}, column {error.colno}"
        )
        raise DatasetError(f"{where}: not valid JSON ({error.msg}: {place})") from error
    except RecursionError as error:
        raise DatasetError(f"{where}: not valid JSON (nested too deeply)") from error
    except ValueError as error:  # a whole number of thousands of digits
        raise DatasetError(f"{where}: not valid JSON ({error})") from error
    if odd or _PART_OF_A_PAIR.search(text):
        _check_leaves(found, where)
    return found


class _Odd(str):
    """Stands in a parsed value for what is wrong there, and says it."""

    __slots__ = ()


def _check_leaves(value: Any, where: str) -> None:
    """Raise for the first text that says what is wrong with it, or that no file can hold."""
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        path, inner = left.pop()
        message = ""
        if isinstance(inner, _Odd):
            message = str(inner)
        elif isinstance(inner, str):
            message = _half_character(inner)
        elif isinstance(inner, dict):
            message = next(filter(None, map(_half_character, inner)), "")
            left += [(f"{path}.{name}", each) for name, each in reversed(inner.items())]
        elif isinstance(inner, list):
            left += [(f"{path}.{place}", each) for place, each in reversed([*enumerate(inner)])]
        if message:
            place = f", at {path[1:]}" if path else ""
            raise DatasetError(f"{where}{place}: {message}")


def _half_character(text: str) -> str:
    """What is wrong with a text that UTF-8 cannot hold; empty for any other."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text[error.start : error.end]!a} is half of a character"
    return ""


# -- bytes to text ------------------------------------------------------------


def _read_text(path: Path) -> str:
    with _opened(path) as file:
        return _decoded(file.read(), str(path))


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file for reading; one that ends in ``.gz`` is unpacked on the way. A pipe may be one, if somebody writes."""
    try:
        with open(path, "rb", opener=_open_at_once) as plain:
            if not select.select([plain], [], [], _PIPE_S)[0]:
                raise DatasetError(f"{path}: nobody wrote into it within {_PIPE_S:g} s")
            os.set_blocking(plain.fileno(), True)
            with gzip.open(plain) if path.suffix == ".gz" else nullcontext(plain) as file:
                yield cast("IO[bytes]", file)
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; of a pipe nobody waits for the other end."""
    return os.open(path, flags | os.O_NONBLOCK)


def _decoded(data: bytes, where: str) -> str:
    """UTF-8 as text, without a byte order mark."""
    try:
        return data.removeprefix(_MARK).decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        place = f", line {line}" if line > 1 else ""
        found = "UTF-16" if data.startswith(_UTF_16) else f"byte 0x{data[error.start]:02x}"
        raise DatasetError(
            f"{where}{place}: not UTF-8 text ({found}); save the file as UTF-8"
        ) from None
