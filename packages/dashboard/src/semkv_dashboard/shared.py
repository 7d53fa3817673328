"""The latest hits and misses of all workers: each has its own in memory, and whichever is asked shows all of them.

While somebody looks at a page, the workers write theirs into a folder that only they read, which ends with them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from semkv.periodic import Every
from semkv_stores.errors import StoreError
from semkv_stores.files import read_bytes, replace_text

Rows = dict[str, list[dict[str, Any]]]
"""Rows by kind; each row has its time under ``at``."""

_WRITE_S = 1.0
_WANTED_S = 30.0  # for which the workers go on after somebody has looked
_WANTED = "recent.wanted"


class Shared:
    """Any thread may call any method.

    Args:
        read: this worker's rows.
        folder: that all workers have; None where there is one worker.
    """

    def __init__(
        self,
        read: Callable[[], Rows],
        folder: Path | None,
    ) -> None:
        self._read = read
        self._folder = folder
        if folder is not None:
            self._writer = Every(_WRITE_S, self.publish, "semkv-recent")

    def view(self) -> Rows:
        """The rows of all workers, the latest first. Blocks. The first look finds this worker's alone."""
        rows = self._read()
        for theirs in self._others():
            for kind, more in theirs.items():
                rows.setdefault(kind, []).extend(more)
        return {kind: sorted(them, key=lambda row: -row["at"]) for kind, them in rows.items()}

    def _others(self) -> Iterator[Rows]:
        if self._folder is None:
            return
        (self._folder / _WANTED).touch()
        for file in self._folder.glob("*.recent"):
            if file.name != f"{os.getpid()}.recent" and _is_young(file):
                with suppress(OSError, StoreError, ValueError):  # its worker has ended
                    yield json.loads(read_bytes(file))

    def publish(self) -> None:
        """Write this worker's rows while they are wanted."""
        assert self._folder is not None
        file = self._folder / f"{os.getpid()}.recent"
        if _is_young(self._folder / _WANTED):
            replace_text(
                file,
                json.dumps(self._read()),
                private=True,
            )
        else:
            file.unlink(missing_ok=True)


def _is_young(file: Path) -> bool:
    try:
        return time.time() - file.stat().st_mtime < _WANTED_S
    except OSError:
        return False
