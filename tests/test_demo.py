"""The demo, as `make demo` runs it: real vLLM, encoder and gateway, with fewer requests."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from semkv_demo.asked import questions
from semkv_demo.names import ALONE, DOCUMENT, PICTURE, REPEAT, REWORDED, SEMKV, TRAP
from semkv_demo.screen import Row, is_right, notes, show, summed_up
from semkv_demo.turns import Reply
from semkv_guards import veto
from vllm_forks import prepare

PROGRAM = """
import sys
from pathlib import Path
from semkv_demo.asked import Sizes
from semkv_demo.run import run_demo
sizes = Sizes(pictures=3, documents=1, large_pictures=2)
sys.exit(not run_demo(Path(sys.argv[1]), sizes=sizes))
"""


def replies(row: str, number: int, times: tuple[float, float], answers: str = "xx") -> list[Reply]:
    sides = zip((ALONE, SEMKV), times, answers, strict=True)
    return [
        Reply(
            row=row,
            number=number,
            side=side,
            ms=ms,
            answer=answer,
            hit=side == SEMKV and ms < 10,
        )
        for side, ms, answer in sides
    ]


def test_a_row_counts_hits_and_equal_answers() -> None:
    asked = [
        *replies("a", 1, (40.0, 4.0)),
        *replies("a", 2, (60.0, 20.0), "xy"),
        *replies("a", 5, (50.0, 5.0)),
        *replies("b", 1, (50.0, 100.0)),
    ]
    one, other = summed_up(asked)
    assert (one.name, one.asked, one.hits, one.equal) == ("a", 3, 2, 2)
    assert (one.alone_ms, one.semkv_ms, one.times_faster) == (50.0, 5.0, 10.0)
    assert (other.name, other.hits, other.times_faster) == ("b", 0, 0.5)


def test_a_slower_row_is_shown_as_one() -> None:
    file = io.StringIO()
    show(Console(file=file, width=80), summed_up(replies("a", 1, (50.0, 100.0))), "")
    (line,) = (line for line in file.getvalue().splitlines() if line.strip().startswith("a "))
    assert line.split() == ["a", "50.0", "100", "0.5", "x", "0", "of", "1", "1", "of", "1"]


@pytest.mark.parametrize(
    ("name", "hits", "equal", "right"),
    [(REPEAT, 2, 2, True), (REPEAT, 2, 1, False), (TRAP, 0, 2, True), (TRAP, 1, 2, False)],
)
def test_a_trap_that_hits_and_another_answer_are_wrong(
    name: str, hits: int, equal: int, right: bool
) -> None:
    row = Row(name=name, asked=2, alone_ms=1.0, semkv_ms=2.0, hits=hits, equal=equal)
    assert is_right([row]) is right


def test_all_of_the_table_fits_into_80_columns() -> None:
    file = io.StringIO()
    rows = [
        Row(name=name, asked=16, alone_ms=12345.6, semkv_ms=123.4, hits=16, equal=16)
        for name in (REPEAT, REWORDED, TRAP, DOCUMENT, PICTURE)
    ]
    show(Console(file=file, width=80), rows, notes(questions(1)[0], {"direction": 16}))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in file.getvalue()
    assert all(any(name in line for line in lines) for name in (TRAP, DOCUMENT, PICTURE))


def test_traps_ask_for_something_else() -> None:
    asked = questions(16)
    assert len({one.picture for one in asked}) == 16
    assert {veto(one.question, one.trap) for one in asked} == {"direction"}
    assert not any(veto(one.question, one.reworded) for one in asked)


@pytest.mark.engine
def test_the_demo_shows_what_comes_again(tmp_path: Path) -> None:
    command = [prepare() / "python", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    logs = "".join(file.read_text(errors="replace")[-1500:] for file in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout + logs
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) <= 24, "more than one screen"
    assert max(map(len, lines[:-1])) <= 80  # the last one is a path
    assert "\x1b" not in done.stdout

    found = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    repeat, reworded, trap, document, picture = found["rows"]
    assert [row["asked"] for row in found["rows"]] == [3, 3, 3, 1, 2]
    assert all(row["equal"] == row["asked"] for row in found["rows"])
    assert all(row["hits"] == row["asked"] for row in (repeat, document, picture))
    assert reworded["hits"] > 0
    assert trap["hits"] == 0

    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").open(encoding="utf-8")]
    assert len(rows) == 2 * sum(row["asked"] for row in found["rows"])
    drawn = [tuple(row["answer"]) for row in rows if row["row"] == picture["name"]]
    assert len({*drawn}) == 2, (
        "drawn weights answer every picture alike, so equal tokens say nothing"
    )
    assert {file.name for file in tmp_path.iterdir() if file.is_dir()} == set()
