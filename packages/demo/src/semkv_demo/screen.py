"""The one screen that the demo prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from semkv_demo.asked import Asked
from semkv_demo.model import TOKENS
from semkv_demo.names import ALONE, DOCUMENT, REPEAT, SEMKV, TRAP
from semkv_demo.turns import WIDTH, Reply


@dataclass(frozen=True)
class Row:
    """A row of the table: medians in ms, and counts of requests."""

    name: str
    asked: int
    alone_ms: float
    semkv_ms: float
    hits: int
    equal: int

    @property
    def times_faster(self) -> float:
        return self.alone_ms / self.semkv_ms


def summed_up(replies: Sequence[Reply]) -> list[Row]:
    """The rows of the table, in the order in which they were asked."""
    return [_row(name, replies) for name in dict.fromkeys(reply.row for reply in replies)]


def _row(name: str, replies: Sequence[Reply]) -> Row:
    sides = {
        side: {one.number: one for one in replies if (one.row, one.side) == (name, side)}
        for side in (ALONE, SEMKV)
    }
    alone, semkv = sides.values()
    return Row(
        name=name,
        asked=len(semkv),
        alone_ms=median(one.ms for one in alone.values()),
        semkv_ms=median(one.ms for one in semkv.values()),
        hits=sum(one.hit for one in semkv.values()),
        equal=sum(one.answer == alone[number].answer for number, one in semkv.items()),
    )


def is_right(rows: Sequence[Row]) -> bool:
    """Whether no trap hit and all answers were equal. A slow row is none the less right."""
    return all(row.equal == row.asked and not (row.name == TRAP and row.hits) for row in rows)


def make_console() -> Console:
    """Standard output: colors on a terminal only, and never more than 80 columns elsewhere."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=WIDTH, highlight=False)


def show(console: Console, rows: Sequence[Row], said: str) -> None:
    """Print the table, and what has to be said of it."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
    table.add_column("median ms", no_wrap=True)
    for name in ("vLLM", "+ semkv", "faster", "hits", "equal"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.name in _PART:
            table.add_row(_PART[row.name], style="bold")
        table.add_row(
            f"  {row.name}",
            _milliseconds(row.alone_ms),
            _milliseconds(row.semkv_ms),
            f"{row.times_faster:.1f} x",
            f"{row.hits} of {row.asked}",
            f"{row.equal} of {row.asked}",
            style=_style(row),
        )
    console.print(table)
    console.print(said, soft_wrap=True)


_PART = {
    REPEAT: "gateway: to answer",
    DOCUMENT: "restart: to first token",
}
_NOTES = """\
Each request went to both sides in turns; vLLM's own caches were on. "equal" is
how many answers were the same on both sides.
Gateway: in front of vLLM's server with the bundled model. The trap asks for the
other side, so a hit would be wrong:
  {question}
  {trap}
Matches that the guards refused, by reason: {refused}.
After a restart: KV and encoder outputs come from the disk (not from its cache).
The bundled model reads a picture in milliseconds; to show what is saved, this
one is larger ({tokens} tokens a picture). Its weights are drawn: its answers mean
nothing and are compared token by token."""


def notes(asked: Asked, reasons: Mapping[str, int]) -> str:
    """What has to be said of the rows; ``asked`` is an example."""
    refused = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
    return _NOTES.format(
        question=asked.question,
        trap=asked.trap,
        refused=refused or "none",
        tokens=TOKENS,
    )


def _style(row: Row) -> str:
    if row.name == TRAP:
        return "red" if row.hits else "dim"
    return "green" if row.times_faster > 1 and row.equal == row.asked else "red"


def _milliseconds(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
