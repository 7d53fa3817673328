"""Planes of pictures that were compared, for the next comparison."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TypeVar

from semkv_guards.pictures.planes import Planes, Small

MOST_BYTES = 256 * 2**20

_T = TypeVar("_T", Planes, Small)


class Remembered:
    """The latest values by name, bounded in bytes; the least recently used go first. Any thread may call any method.

    Attributes:
        nbytes: of all values.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._values: OrderedDict[tuple[type, str], Planes | Small] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def find(self, kind: type[_T], name: str) -> _T | None:
        with self._lock:
            found = self._values.get((kind, name))
            if not isinstance(found, kind):
                return None
            self._values.move_to_end((kind, name))
            return found

    def keep(self, name: str, value: Planes | Small) -> None:
        key = (type(value), name)
        with self._lock:
            self._drop(key)
            self._values[key] = value
            self.nbytes += value.nbytes
            while self.nbytes > self._most_bytes:
                self._drop(next(iter(self._values)))

    def _drop(self, key: tuple[type, str]) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self.nbytes -= value.nbytes
