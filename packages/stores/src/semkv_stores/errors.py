"""The errors that all parts of semkv share; `semkv.errors` has the whole tree."""

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
        self.key = key
        self.value = str(value) if isinstance(value, PurePath) else value
        self.allowed = (
            allowed if isinstance(allowed, str) else "one of " + ", ".join(sorted(allowed))
        )
        shown = re.sub("//.*@", "//", repr(self.value))  # without the name and password of a URL
        super().__init__(f"{key}: {shown} is not allowed; expected {self.allowed}")


class EngineError(SemkvError):
    """The inference engine could not be started, or failed on a request."""


class StoreError(SemkvError):
    """A store cannot be opened, or does not do what it is asked for.

    Attributes:
        reason: why, in a word for counters: ``full``, ``read-only``, ``busy``, ``disk``, ``away``, ``missing``; else
            ``failed``.
    """

    reason = "failed"


class CorruptValue(StoreError):  # noqa: N818
    """A stored value failed its checksum, shape, dtype or version test."""
