"""A user's own parts: loads what a setting names as ``package.module:Factory``, and checks it against a protocol.

A module is found where Python finds any; ``PYTHONPATH=.`` adds the working directory.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from semkv.errors import ConfigError, SemkvError

FORM = "package.module:Factory"
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_path(text: str) -> bool:
    """Whether a text has the form ``package.module:Factory``."""
    return _PATH.fullmatch(text) is not None


def load(key: str, path: str, *arguments: Any) -> Any:
    """What the class or function ``package.module:Factory`` returns for these arguments.

    Args:
        key: the setting, for messages.
        path: its value.
        arguments: what this kind of part is made from.

    Raises:
        ConfigError: it cannot be imported, or raises when it is called.
    """
    module = path.partition(":")[0]
    name = path.partition(":")[2]
    try:
        factory = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # the user's own code is run
        allowed = f"{FORM} that can be imported ({module}: {error}); PYTHONPATH=. finds modules of this folder"
        raise ConfigError(key, path, allowed) from error
    try:
        return factory(*arguments)
    except SemkvError:
        raise
    except (Exception, SystemExit) as error:
        given = ", ".join(type(argument).__name__ for argument in arguments)
        raise ConfigError(key, path, f"a factory that takes the {given} ({error!r})") from error


def require(key: str, value: Any, kind: type, path: str = "") -> Any:
    """The value, which has everything that a protocol declares.

    Args:
        key: the setting or argument, for messages.
        value: what was plugged in.
        kind: the protocol.
        path: what made it; by default its type stands for it.

    Raises:
        ConfigError: names what is missing.
    """
    package = kind.__module__.partition(".")[0]
    if missing := [
        name for name in vars(kind) if not name.startswith("_") and not hasattr(value, name)
    ]:
        raise ConfigError(
            key,
            path or type(value).__name__,
            f"a {package}.{kind.__name__} with {', '.join(missing)}",
        )
    return value
