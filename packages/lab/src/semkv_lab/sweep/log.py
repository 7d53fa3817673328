"""The log of a sweep: ``<name>.jsonl``, a row an experiment, and ``<name>.csv``, the same flattened.

The JSON lines are the log: each is written in one piece and synced, and a line that a crash cut short is dropped at the
next start, so that its experiment runs again. The CSV is made from them after every row.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from semkv.errors import ConfigError
from semkv.stores.files import replace_text
from semkv_lab.outputs import writing

OK, FAILED = "ok", "failed"
_LOG_FILE = "--log-file"
_FIRST = ("name", "status", "error", "notes", "started", "seconds")


@contextmanager
def open_log(path: Path, *, resume: bool) -> Iterator[SweepLog]:
    """The log of this path, mended, with other sweeps kept off it; see `SweepLog`.

    Raises:
        ConfigError: as `SweepLog`, or another sweep is writing it, or its folder cannot be written.
    """
    SweepLog(path, resume=resume)
    with writing(_LOG_FILE, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("wb")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given up with the process, however it ends
        except BlockingIOError:
            raise ConfigError(_LOG_FILE, str(path), "a log that no other sweep is writing") from None
        log = SweepLog(path, resume=resume)
        log.mend()
        yield log


class SweepLog:
    """The rows so far, in the order in which they ended.

    Args:
        path: the ``.csv`` file; the JSON lines lie beside it.
        resume: go on with a log that is there.

    Raises:
        ConfigError: the name does not end in ``.csv``, there is a log and ``resume`` is False, or it cannot be read.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        if path.suffix != ".csv":
            raise ConfigError(_LOG_FILE, str(path), "a name that ends in .csv")
        self.path, self.lines = path, path.with_suffix(".jsonl")
        self.rows: list[dict[str, Any]] = []
        self._whole = 0
        if self.lines.exists() or path.exists():
            if not resume:
                raise ConfigError(_LOG_FILE, str(path), "a new file, or --resume to go on with this one")
            self.rows = self._read()

    def _read(self) -> list[dict[str, Any]]:
        data = self.lines.read_bytes() if self.lines.exists() else b""
        whole, _, torn = data.rpartition(b"\n")
        rows = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                row["name"], row["status"]
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                where = f"{self.lines}, line {number}"
                raise ConfigError("--resume", where, "a row of a sweep; remove the line to run it again") from error
            rows.append(row)
        self._whole = len(data) - len(torn)
        return rows

    def mend(self) -> None:
        """Undo what a kill left: a line cut short is dropped, and a table that lacks the last row is written again."""
        if self.lines.exists():
            os.truncate(self.lines, self._whole)
        if self.rows:
            self._write_csv()

    def named(self, name: str) -> dict[str, Any] | None:
        """The row of an experiment, None where it has none yet."""
        return next((row for row in self.rows if row["name"] == name), None)

    def forget(self, names: Collection[str]) -> None:
        """Drop the rows of these experiments, so that they run again. Raises `ConfigError` as `append`."""
        self.rows = [row for row in self.rows if row["name"] not in names]
        with writing(_LOG_FILE, self.lines):
            replace_text(self.lines, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._write_csv()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row for good.

        Raises:
            ValueError: there is one of that name.
            ConfigError: the file cannot be written, as on a full disk; a row cut short is dropped at the next start.
        """
        if self.named(str(row["name"])) is not None:
            raise ValueError(f"experiment {row['name']!r} is in the log already")
        line = json.dumps(row) + "\n"
        with writing(_LOG_FILE, self.lines), self.lines.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(dict(row))
        self._write_csv()

    def _write_csv(self) -> None:
        flat = [dict(_flatten(row)) for row in self.rows]
        columns = [*_FIRST, *sorted({key for row in flat for key in row} - set(_FIRST))]
        out = io.StringIO()
        writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        with writing(_LOG_FILE, self.path):
            replace_text(self.path, out.getvalue())


def _flatten(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, list):
            yield name, json.dumps(value)
        else:
            yield name, value
