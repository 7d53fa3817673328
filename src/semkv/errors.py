"""Every exception semkv raises on purpose.

    SemkvError
    ├── ConfigError      a setting is wrong: raised at load, names key, value and what is allowed
    ├── DatasetError     an input file cannot be read: names file and line
    ├── EngineError      the inference engine cannot be started or failed on a request
    └── StoreError       a store cannot be opened (other version, not a directory, not writable)
        └── CorruptValue a stored value failed its checksum, shape, dtype or version test

`CorruptValue` never leaves the stores: it is counted and becomes a miss.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath


class SemkvError(Exception):
    """Base of all errors raised by semkv."""


class ConfigError(SemkvError):
    """A setting is wrong.

    Args:
        key: the setting's name as the user typed it, such as ``--preset``.
        value: what was given.
        allowed: what would have been accepted, as a list of names or a sentence.
    """

    def __init__(self, key: str, value: object, allowed: str | Iterable[str]) -> None:
        self.key, self.value = key, str(value) if isinstance(value, PurePath) else value
        self.allowed = allowed if isinstance(allowed, str) else "one of " + ", ".join(sorted(allowed))
        shown = re.sub("//.*@", "//", repr(self.value))  # without the name and password of a URL
        super().__init__(f"{key}: {shown} is not allowed; expected {self.allowed}")


class DatasetError(SemkvError):
    """A data file cannot be read. The message names the file and, where there is one, the line."""


class EngineError(SemkvError):
    """The inference engine could not be started, or failed on a request."""


class StoreError(SemkvError):
    """A store cannot be opened."""


class CorruptValue(StoreError):  # noqa: N818
    """A stored value failed its checksum, shape, dtype or version test."""
