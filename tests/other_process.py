"""A process beside the test's, which does what it is told."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SPAWN = multiprocessing.get_context("spawn")


def obey(pipe: Connection, does: Mapping[str, Callable[..., object]]) -> None:
    """In the process: answer orders until there are no more."""
    while (order := pipe.recv()) is not None:
        pipe.send(does[order[0]](*order[1:]))


class Other:
    """The process as its owner sees it. ``serve`` gets a folder and a pipe to `obey` from."""

    def __init__(self, serve: Callable[[Path, Connection], None], folder: Path) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=serve, args=(folder, theirs))
        self._process.start()

    def __call__(self, *order: object) -> Any:
        self._pipe.send(order)
        return self._pipe.recv()

    def end(self) -> None:
        self._pipe.send(None)
        self._process.join(120)
        assert self._process.exitcode == 0
