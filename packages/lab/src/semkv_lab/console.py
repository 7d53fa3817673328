"""How a run looks: a progress bar, a line a sample, a summary, and the same as files.

A file that a command writes is never one that it reads, and is tried before the work, not after it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from semkv import __version__
from semkv.errors import ConfigError
from semkv_lab.metrics import Estimate, Figures, read_estimate
from semkv_lab.records import Cold, SampleRecord

if TYPE_CHECKING:
    from semkv_lab.samples import Sample
    from semkv_lab.settings import RunSettings

SAMPLES_OUT, SUMMARY_OUT = "--samples-out", "--summary-out"
_STAGES = {"start": "starting the engine", "cold": "without semkv", "cached": "with semkv"}


def sample_line(record: SampleRecord) -> str:
    """``[05515938] hit (embedding:prompt) | latency=0.032s | answer match=True | exact_text=miss, ...``."""
    outcome = f"hit ({record.provenance})" if record.hit else "miss"
    parts = [f"[{record.sample_id}] {outcome}", f"latency={record.latency_s:.3f}s"]
    if record.match is not None:
        parts.append(f"answer match={record.match}")
    parts.append(", ".join(f"{tier}={status}" for tier, status in record.statuses.items()))
    return " | ".join(parts)


def make_console() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 120))


class Listener:
    """Told how a run goes; a subclass draws progress, prints lines, writes files."""

    def stage(self, name: str, total: int) -> None:
        """A pass begins."""

    def cold(self, sample: Sample, cold: Cold) -> None:
        """A sample was answered without semkv."""

    def record(self, record: SampleRecord) -> None:
        """A sample was answered."""

    def failed(self, sample: Sample, error: Exception) -> None:
        """The engine failed on a sample."""


class ConsoleListener(Listener):
    """Draws progress on a console, and writes records to ``--samples-out`` as they come.

    The file has one JSON object a line; the settings go beside it, to ``FILE.settings.json``. What an earlier run left
    there stays until there is a record to put in its place, or the run has come to its end. With ``quiet`` there is no
    line a sample; a console that is no terminal gets lines without a bar.
    """

    def __init__(self, console: Console, settings: RunSettings, *, quiet: bool) -> None:
        self._console, self._settings, self._quiet = console, settings, quiet
        self._progress = progress_bar(console, transient=True, refresh_per_second=4, disable=not console.is_terminal)
        self._task: TaskID | None = None
        self._file: BinaryIO | None = None

    def stage(self, name: str, total: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, visible=False)
        self._task = self._progress.add_task(_STAGES.get(name, name), total=total or None)

    def cold(self, sample: Sample, cold: Cold) -> None:
        self._advance()

    def record(self, record: SampleRecord) -> None:
        self._write(record)
        self._advance("" if self._quiet else sample_line(record))

    def failed(self, sample: Sample, error: Exception) -> None:
        self._advance(f"[{sample.sample_id}] failed | {error}")

    def finish(self) -> None:
        """The run has come to its end, maybe without a record."""
        self._write()

    def _write(self, *records: SampleRecord) -> None:
        """Raises `ConfigError` where the file cannot be written."""
        path = self._settings.samples_out
        if path is None:
            return
        with writing(SAMPLES_OUT, path):
            if self._file is None:
                write_json(path.with_name(path.name + SETTINGS), run_header(self._settings))
                self._file = path.open("wb")
            self._file.writelines(to_json(record.to_json()) for record in records)
            self._file.flush()

    def _advance(self, line: str = "") -> None:
        if line:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._task is not None:
            self._progress.advance(self._task)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._file is not None:
            with writing(SAMPLES_OUT, Path(self._file.name)):
                self._file.close()


def progress_bar(console: Console, **options: Any) -> Progress:
    """A bar with counts and times; ``options`` are those of `rich.progress.Progress`."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console, **options)


def run_header(settings: RunSettings) -> dict[str, object]:
    """What a results file says of the run that made it."""
    return {"semkv": __version__, "settings": settings.to_json()}


def write_json(path: Path, value: object) -> None:
    """Write indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_json(value, indent=2))


def print_summary(console: Console, summary: Figures, settings: RunSettings) -> None:
    """The tables at the end of a run."""
    if summary["interrupted"]:
        said = f"the figures cover the {summary['samples']} samples answered so far"
        console.print(f"[yellow]interrupted[/yellow]: {said}")
    if summary["samples"]:
        names = ("tier", "samples", "rate", "latency p50", "p95", "TTFT p50", "accuracy [95%]")
        rows = [
            (
                row["tier"], str(row["n"]), f"{row['rate']:.1%}", seconds(row["latency"]["p50_s"]),
                seconds(row["latency"]["p95_s"]), seconds(row["ttft"]["p50_s"]),
                percent(read_estimate(row, "accuracy")),
            )
            for row in summary["tiers"]
        ]  # fmt: skip
        console.print(table("by tier", names, rows))
    console.print(table("figures", (), figures(summary, settings)))


def table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for the console: the first column to the left, figures to the right. No names make no header."""
    made = Table(title=title, title_justify="left", title_style="bold", show_header=bool(names))
    for number, name in enumerate(names):
        made.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


_SHOWN = 10  # names of samples in a line
_UNJUDGED = "unknown without --baseline: hits that are not the label may be the model's own mistakes"


def figures(summary: Figures, settings: RunSettings) -> list[tuple[str, str]]:
    """Everything that is one figure: name and value."""

    def of(*path: str) -> str:
        return percent(read_estimate(summary, *path))

    def row(name: str, *path: str, more: str = "") -> list[tuple[str, str]]:
        """A share that the run may not have."""
        return [(name, of(*path) + more)] if read_estimate(summary, *path).n else []

    area, skipped = summary["chr_area"]["reached"], summary["skipped"]
    rows = [
        ("hits", f"{summary['hits']} of {summary['samples']}: {of('hit_share')}"),
        ("similar, but refused", str(summary["refused"])),
        ("lookup p50 / p95", times(summary["lookup"])),
        ("after the answer p50 / p95", times(summary["after"])),
        *_token_rows(summary["tokens"]),
        ("accuracy", of("accuracy")),
        ("accuracy on hits", of("accuracy_on_hits")),
        ("accuracy on misses", of("accuracy_on_misses")),
        *(row("wrong hits a request", "wrong_hit_share") or [("wrong hits a request", _UNJUDGED)]),
        *row("consistency (entailed)", "consistency"),
        *row("validity", "gqa", "validity"),
        *row("plausibility", "gqa", "plausibility"),
    ]
    if (distribution := summary["gqa"]["distribution"]) is not None:
        rows.append(("distribution (chi-square)", f"{distribution:.2f}"))
    rows += [found for kind in ("binary", "open") for found in row(f"accuracy, {kind}", "gqa", "by_type", kind)]
    rows += row("P-CHR AUC", "chr_area", "area", more=f" up to a hit rate of {area:.1%}")
    if summary["baseline_accuracy"]:
        rows.append(("cold: accuracy", of("baseline_accuracy")))
        rows.append(("cold: latency p50 / p95", times(summary["baseline_latency"])))
    if cold := summary["against_cold"]:
        if cold["n"]:
            rows += [
                ("hits run cold: accuracy", of("against_cold", "cold_accuracy_on_hits")),
                ("hits: same answer as cold", of("against_cold", "agreement")),
                ("hits: same tokens as cold", of("against_cold", "same_tokens")),
                ("hits: tokens saved", interval(read_estimate(cold, "saved_tokens"))),
                ("hits: cold TTFT / cached, without lookup", interval(read_estimate(cold, "first_token"), 2, "x")),
                ("wrong hits / gained", f"{cold['wrong_hits']} / {cold['gained_hits']}"),
                ("hits: cold latency / cached", interval(read_estimate(cold, "speedup"), 2, "x")),
            ]
        rows.append(("all: same answer as cold", of("against_cold", "agreement_all")))
        rows += row("cold: consistency (entailed)", "against_cold", "consistency")
        exact = f" of {cold['identical_tokens']['n']}"
        rows += row("exact prompts: tokens equal cold", "against_cold", "identical_tokens", more=exact)
    if summary["saved"]:
        rows.append(("saved a request: tokens", interval(read_estimate(summary, "saved", "tokens"))))
        for name, key in (
            ("latency, mean", "latency_s"),
            ("latency, median", "latency_p50_s"),
            ("TTFT, mean", "ttft_s"),
        ):
            rows.append((f"  {name}", milliseconds(read_estimate(summary, "saved", key))))
    if noise := summary["noise_floor"]:
        answers = f"{of('noise_floor', 'answers')} of {noise['answers']['n']} asked twice"
        rows.append(("noise floor: answers differ", answers))
        rows.append(("noise floor: tokens differ", of("noise_floor", "tokens")))
    rows += row("answer equals the donor's", "donor_agreement", more=" of full hits")
    for tier in ("kv_cache", "fusion"):
        if found := summary["statuses"].get(tier):
            rows.append((tier, ", ".join(f"{n} {status}" for status, n in found.items())))
    if skipped:
        shown = ", ".join(skipped[:_SHOWN]) + " ..." * (len(skipped) > _SHOWN)
        rows.append(("left out, no image file", f"{len(skipped)}: {shown}"))
    rows.append(("on disk", f"{size(summary['bytes_on_disk'])} in {settings.cache.cache_dir}"))
    return rows + [(name, str(count)) for name, count in summary["faults"].items()]


def _token_rows(t: Figures) -> list[tuple[str, str]]:
    rows = [
        ("prompt tokens", f"{t['prompt']:,}"),
        ("not computed", f"{t['not_computed']:,} ({part(t['not_computed'], t['prompt'])})"),
        ("  loaded from the KV store", f"{t['from_store']:,}"),
        ("  vLLM's own prefix cache", f"{t['from_prefix_cache']:,}"),
    ]
    if t["beyond"] is not None:
        alone, left = part(t["baseline_not_computed"], t["baseline_prompt"]), part(t["beyond"], t["baseline_computed"])
        rows.append(("vLLM's prefix cache alone", f"{t['baseline_not_computed']:,} ({alone}) not computed"))
        rows.append(("saved beyond it", f"{t['beyond']:,} tokens ({left} of what it left to compute)"))
    return rows


def interval(value: Estimate, digits: int = 1, unit: str = "", *, factor: float = 1.0) -> str:
    """``12.3 ms [11.0, 14.1]``, a dash for no figure, no interval from one image."""
    if value.value is None:
        return "-"
    text = f"{factor * value.value:.{digits}f}{unit}"
    if value.low is None or value.high is None:
        return text
    return f"{text} [{factor * value.low:.{digits}f}, {factor * value.high:.{digits}f}]"


def percent(value: Estimate) -> str:
    """``93.1% [91.0, 95.0]``."""
    return interval(value, unit="%", factor=100)


def milliseconds(value: Estimate) -> str:
    """``12.3 ms [11.0, 14.1]``, of seconds."""
    return interval(value, unit=" ms", factor=1000)


def times(value: Figures) -> str:
    """``12 ms / 30 ms``."""
    return f"{seconds(value['p50_s'])} / {seconds(value['p95_s'])}"


def size(count: int) -> str:
    """Bytes in binary units: ``1.5 MiB``."""
    power = min(4, max(0, count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB" if power else f"{count} B"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def part(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else "-"


# -- files ------------------------------------------------------------

SETTINGS = ".settings.json"  # added to the name of a file of samples


@contextmanager
def writing(key: str, path: Path) -> Iterator[None]:
    """Names the setting where the block cannot write its file."""
    try:
        yield
    except OSError as e:
        raise ConfigError(key, str(path), f"a file that can be written ({e.strerror or e})") from e


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
    for (key, path), (other, taken) in itertools.chain(
        itertools.combinations(outputs.items(), 2), itertools.product(outputs.items(), inputs.items())
    ):
        if path is not None and taken is not None and _same(path, taken):
            raise ConfigError(key, str(path), f"another file than that of {other}")


def _same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.is_file() and one.samefile(other)  # /dev/null and the like may be named twice
    return one.resolve() == other.resolve()


def to_json(value: object, indent: int | None = None) -> bytes:
    """JSON in UTF-8. What no UTF-8 can hold, as in the name of a file, becomes an escape."""
    return json.dumps(value, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
