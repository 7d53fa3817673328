"""``semkv sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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

EXIT_FAILED = 1


def sweep(
    specs: Annotated[Path, typer.Option(help="Experiments in JSON or TOML: defaults, and a list with a name each.")],
    log_file: Annotated[Path, typer.Option(help="CSV with a row an experiment; JSON lines are written beside it.")],
    samples_dir: Annotated[Path, typer.Option(help="For a samples file and the output of each experiment.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with this log; skip what it has.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="With --resume: run again what failed.")] = False,
    purge_cache_between_runs: Annotated[
        bool,
        typer.Option("--purge-cache-between-runs", help="Empty the cache even where the spec names one."),
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run this experiment alone; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and show what would run.")] = False,
    executor: Annotated[str, typer.Option(help="local: one after the other. ray: over a cluster.")] = "local",
    ray_address: Annotated[str | None, typer.Option(help="Of a running Ray cluster, such as auto.")] = None,
) -> None:
    """Run many experiments, and log a row for each.

    Each has a process of its own. A failed experiment is a row with its error, and the sweep goes on. Ctrl-C leaves a
    log that --resume goes on with.
    """
    from semkv_lab.report import make_console
    from semkv_lab.sweep.command import SweepOptions, show
    from semkv_lab.sweep.command import sweep as run

    options = SweepOptions(
        specs=specs,
        log_file=log_file,
        samples_dir=samples_dir,
        resume=resume,
        retry_failed=retry_failed,
        purge=purge_cache_between_runs,
        only=tuple(only or ()),
        executor=executor,
        ray_address=ray_address,
    )
    console = make_console()
    if dry_run:
        show(options, console)
    elif run(options, console):
        raise typer.Exit(EXIT_FAILED)
