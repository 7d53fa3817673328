"""The command line in this process: what it prints, and its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from semkv.cli import main


@dataclass(frozen=True)
class Result:
    """What a command printed. ``output`` is both streams, one after the other."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(arguments: Sequence[str], *, columns: int = 200) -> Result:
    """Run ``semkv`` with these arguments. What it does not raise on purpose is raised here."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.argv", ["semkv", *arguments]),
        mock.patch.dict(os.environ, {"COLUMNS": str(columns)}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Result(code, out.getvalue(), err.getvalue())


def write_questions(path: Path, *questions: str) -> Path:
    """A data set for ``semkv run``."""
    rows = (
        {"id": f"{i}", "question": question, "answer": "x"} for i, question in enumerate(questions)
    )
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[Any]:
    """The values of a file with JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def allow_ctrl_c() -> None:
    """For ``preexec_fn``: what a shell starts in the background ignores SIGINT, and so do these tests then."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
