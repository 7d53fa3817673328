"""Settings with checks: every field is read as its type, and compared with what is allowed.

pydantic reads every value, whether it comes from a flag, a variable, a file, a preset, a program, or a connector's
extra config. A wrong one is a `ConfigError` that names the key, the value and what is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_type_hints

from semkv_stores.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which values of a setting's type are allowed, as an annotation; None always is. ``each``: the test is for each
    item of a tuple."""

    text: str
    test: Callable[[Any], object]
    each: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """What the other settings must be where this one is given, as an annotation: else it would do nothing, and nobody
    would hear of it. The test is of all settings."""

    text: str
    test: Callable[[Any], object]


POSITIVE = Allowed("a positive number", lambda n: n > 0)
NOT_NEGATIVE = Allowed("0 or a positive number", lambda n: n >= 0)
COSINE = Allowed("a number from 0 to 1", lambda n: 0.0 <= n <= 1.0)
SOME_SHARE = Allowed("a share above 0 and below 1, such as 0.01", lambda n: 0.0 < n < 1.0)
EXISTS = Allowed("a file or folder that exists", Path.exists)
NO_FOLDER = Allowed("a file, not a folder", lambda path: not path.is_dir())


def default_cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """``SEMKV_CACHE_DIR``, else ``~/.cache/semkv``.

    Raises:
        ConfigError: it is no path.
    """
    found: Path = typed(
        "SEMKV_CACHE_DIR", environment.get("SEMKV_CACHE_DIR") or "~/.cache/semkv", Path
    )
    return found


def typed(key: str, value: Any, kind: Any) -> Any:
    """A value as the type that a setting is declared with; text is read as what it says, ``~`` as the home directory.

    Raises:
        ConfigError: it cannot be read as one.
    """
    from pydantic import ValidationError

    try:
        found = _reader(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        allowed = first["msg"].removeprefix("Input should be ").partition(", unable")[0]
        raise ConfigError(key, first["input"], allowed) from None
    if isinstance(found, Path):
        if not str(value).strip() or "\0" in str(value):
            raise ConfigError(key, value, "a path")
        try:
            return found.expanduser()
        except RuntimeError:
            raise ConfigError(key, value, "a path below a home directory that there is") from None
    return found


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    from pydantic import InstanceOf, TypeAdapter

    if is_dataclass(kind):  # it has checked itself
        return TypeAdapter(InstanceOf[kind])
    return TypeAdapter(kind, config={"allow_inf_nan": False})


class _Declared(NamedTuple):
    """What a class says of one of its fields."""

    flag: str
    kind: Any
    allowed: list[Allowed]
    needs: list[Needs]


@cache
def _declared(kind: Any) -> dict[str, _Declared]:
    """By the field's name."""
    hints = get_type_hints(kind)
    annotated = get_type_hints(kind, include_extras=True)
    found: dict[str, _Declared] = {}
    for item in fields(kind):
        extras = getattr(annotated[item.name], "__metadata__", ())
        # Of a command line's parameter.
        names = [name for extra in extras for name in getattr(extra, "name", None) or ()]
        found[item.name] = _Declared(
            flag=names[0] if names else "--" + item.name.replace("_", "-"),
            kind=hints[item.name],
            allowed=[extra for extra in extras if isinstance(extra, Allowed)],
            needs=[extra for extra in extras if isinstance(extra, Needs)],
        )
    return found


def check(settings: Any, *, flags: bool = True) -> None:
    """Read every field of a frozen dataclass as its type (`typed`), and hold it against its `Allowed` and `Needs`.

    Call it first in ``__post_init__``.

    Args:
        settings: the dataclass.
        flags: whether errors name the flag; else the field.

    Raises:
        ConfigError: a value does not fit.
    """
    declared = _declared(cast("Hashable", type(settings)))
    for name, field in declared.items():
        key = field.flag if flags else name
        value = typed(key, getattr(settings, name), field.kind)
        for limit in field.allowed:
            _hold(key, value, limit)
        object.__setattr__(settings, name, value)
    for item in fields(settings):
        field = declared[item.name]
        value = getattr(settings, item.name)
        if value == item.default:
            continue
        for need in field.needs:
            if not need.test(settings):
                key = field.flag if flags else item.name
                raise ConfigError(key, value, f"left out, or given together with {need.text}")


def _hold(key: str, value: Any, limit: Allowed) -> None:
    for item in value if limit.each else (value,):
        if item is not None and not limit.test(item):
            raise ConfigError(key, item, limit.text)
