"""The commands that this package adds to ``semkv``. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from semkv.errors import ConfigError
from semkv_lab.flags import QualityFlags, RunFlags, SweepFlags, takes

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130

RUN_EXAMPLES = """\b
Examples:
  semkv run
      the bundled model on its own questions, on CPU or GPU
  semkv run --baseline --max-samples 128
      the same, compared with vLLM's prefix cache alone
  semkv run --preset qwen3-vl-2b --dataset-root /data/gqa --cache-mode dry-run
      look up and report, send every request unchanged
  semkv run --model facebook/opt-125m --dataset prompts.jsonl --chunk-source full
      prompts of your own
  semkv run --embedding-layer prompt:384:0.9 --embedding-hook prompt
      one layer of the embedding tier, with a threshold of its own
"""
SWEEP_EXAMPLES = """\b
Examples:
  semkv sweep --specs specs/ablation-minigqa.json --log-file runs/a/sweep.csv --samples-dir runs/a/samples
      every experiment of the file, each in a process of its own, a row each
  semkv sweep --specs my.toml --log-file runs/a/sweep.csv --samples-dir runs/a/samples --resume
      go on where it was stopped
  semkv sweep --specs my.json --log-file x.csv --samples-dir x --dry-run
      check the file and show what would run
  semkv sweep --specs specs/ablation.json --log-file b.csv --samples-dir b --executor ray --ray-address auto
      spread over the GPUs of a Ray cluster
"""
REPORT_EXAMPLES = """\b
Examples:
  semkv report runs/a/sweep.csv --out runs/a/report.html
      of one sweep; a page that needs nothing else
  semkv report runs/a/sweep.csv runs/b/sweep.csv --markdown both.md --title 'Two models'
      of two together, and the same as markdown
"""
CALIBRATE_EXAMPLES = """\b
Examples:
  semkv calibrate pairs.jsonl --out c.json --plot c.png
      from rows such as {"a": "Where is Rome?", "b": "In which country is Rome?", "same": 1}
"""
PAIRS_EXAMPLES = """\b
Examples:
  semkv eval-pairs pairs.jsonl --similarity-threshold 0.95
      the fixed policy at another threshold
  semkv eval-pairs pairs.jsonl --policy calibrated --calibration c.json
      what a calibration does, on pairs that it was not made from
"""
STREAM_EXAMPLES = """\b
Examples:
  semkv eval-stream requests.jsonl --policy bounded --max-error-rate 0.005 --plot s.png
      rows such as {"text": "Where is Rome?", "cluster": "rome"}: texts of one cluster have one answer
"""

_Pairs = Annotated[
    Path,
    typer.Argument(metavar="PAIRS", help="JSONL of a, b, same (0 or 1), and group where there is one; .gz too."),
]
_Requests = Annotated[
    Path,
    typer.Argument(
        metavar="REQUESTS", help="JSONL of text and cluster in the order of requests, group where there is one."
    ),
]
_Logs = Annotated[
    list[Path], typer.Argument(metavar="LOG", help="sweep.csv or sweep.jsonl, one or several sweeps together.")
]
_Out = Annotated[Path | None, typer.Option(help="Write the JSON here instead of printing it.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw a figure (.png, .svg, .pdf).")]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="vLLM's own log, too.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to an app."""
    app.command(epilog=RUN_EXAMPLES)(run)
    app.command()(demo)
    app.command(epilog=SWEEP_EXAMPLES)(sweep)
    app.command(epilog=REPORT_EXAMPLES)(report)
    app.command(epilog=CALIBRATE_EXAMPLES)(calibrate)
    app.command("eval-pairs", epilog=PAIRS_EXAMPLES)(eval_pairs)
    app.command("eval-stream", epilog=STREAM_EXAMPLES)(eval_stream)


@takes(RunFlags)
def run(
    flags: RunFlags,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line a sample.")] = False,
    verbose: _Verbose = False,
) -> None:
    """Answer a data set through the cache, and measure it.

    Prints a line a sample, then what was saved and at what accuracy.
    """
    from semkv_lab.run import execute
    from semkv_lab.settings import resolve

    if execute(resolve(flags), quiet=quiet, verbose=verbose).interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where everything goes.")] = Path("runs/demo"),
    samples: Annotated[int, typer.Option(min=1, help="How many questions.")] = 256,
    verbose: _Verbose = False,
) -> None:
    """Answer drawn visual questions three times, and compare.

    With vLLM alone; with an empty cache; and in a new process, which finds on disk what the one before left.
    """
    from semkv_lab.demo import run_demo

    run_demo(directory, samples=samples, verbose=verbose)


@takes(SweepFlags)
def sweep(
    flags: SweepFlags,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and show what would run.")] = False,
) -> None:
    """Run many experiments, and log a row for each.

    Each has a process of its own. A failed experiment is a row with its error, and the sweep goes on. Ctrl-C leaves a
    log that --resume goes on with.
    """
    from semkv_lab.console import make_console
    from semkv_lab.sweep import run_sweep, show

    if dry_run:
        show(flags, make_console())
    elif run_sweep(flags, make_console()):
        raise typer.Exit(EXIT_FAILED)


def report(
    logs: _Logs,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="Folder for the figures as PNG (<page>_files beside the page).")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the same as markdown to this file.")] = None,
    title: Annotated[str, typer.Option(help="Heading of page and markdown.")] = "",
) -> None:
    """Make one HTML page of the logs of sweeps.

    It has figures, all experiments and the worst wrong hits.
    """
    from semkv_lab.report import write_report

    for path in write_report(logs, out, figures=figures, markdown=markdown, title=title):
        typer.echo(path)


def calibrate(
    pairs: _Pairs,
    out: Annotated[Path, typer.Option(help="The calibration, for --calibration.")],
    precision: Annotated[float, typer.Option(help="Least chance of a right answer for a match.")] = 0.95,
    index_encoder: Annotated[str, typer.Option(help="Sentence encoder: id or directory.")] = "all-MiniLM-L6-v2",
    plot: _Plot = None,
) -> None:
    """Fit the chance of a wrong answer from labelled pairs.

    It goes by cosine, wording and veto.
    """
    from semkv_lab.evaluate import calibrate_file, plot_fit

    _check_outputs(out, plot, {"PAIRS": pairs})
    fitted, summary = calibrate_file(pairs, index_encoder, precision)
    fitted.calibration.save(out)
    if plot is not None:
        plot_fit(fitted, plot)
    typer.echo(json.dumps(summary, indent=1))


@takes(QualityFlags)
def eval_pairs(file: _Pairs, flags: QualityFlags, out: _Out = None, plot: _Plot = None) -> None:
    """Precision and recall of a policy on labelled pairs."""
    from semkv_lab import evaluate
    from semkv_lab.evaluate import plot_pairs

    _check_outputs(out, plot, {"PAIRS": file, "--calibration": flags.calibration})
    judged, summary = evaluate.eval_pairs(file, flags)
    if plot is not None:
        plot_pairs(judged, plot)
    _write(summary, out)


@takes(QualityFlags)
def eval_stream(file: _Requests, flags: QualityFlags, out: _Out = None, plot: _Plot = None) -> None:
    """Hits and wrong answers of a policy along a stream.

    No engine is needed: the stream says which requests have the same answer.
    """
    from semkv_lab import evaluate
    from semkv_lab.evaluate import plot_stream

    _check_outputs(out, plot, {"REQUESTS": file, "--calibration": flags.calibration})
    outcome, summary = evaluate.eval_stream(file, flags)
    if plot is not None:
        plot_stream(outcome, flags.max_error_rate if flags.policy == "bounded" else None, plot)
    _write(summary, out)


def _check_outputs(out: Path | None, plot: Path | None, inputs: dict[str, Path | None]) -> None:
    """Fail before the work, not after it."""
    from semkv_lab.console import keep_apart

    if plot is not None and (plot.suffix not in (".png", ".svg", ".pdf") or not plot.parent.is_dir()):
        raise ConfigError("--plot", str(plot), "a .png, .svg or .pdf file in a folder that exists")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError("--out", str(out), "a file in a folder that exists")
    keep_apart({"--out": out, "--plot": plot}, inputs)


def _write(summary: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(summary, indent=1)
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")
