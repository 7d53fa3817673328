"""The commands that this package adds to ``semkv``; nothing heavy is imported before a command needs it."""

from __future__ import annotations

import typer

from semkv_lab.cli.quality import (
    CALIBRATE_EXAMPLES,
    PAIRS_EXAMPLES,
    STREAM_EXAMPLES,
    calibrate,
    eval_pairs,
    eval_stream,
)
from semkv_lab.cli.report import REPORT_EXAMPLES, report
from semkv_lab.cli.run import RUN_EXAMPLES, demo, run
from semkv_lab.cli.sweep import SWEEP_EXAMPLES, sweep


def add_commands(app: typer.Typer) -> None:
    """Add the commands to an app."""
    app.command(epilog=RUN_EXAMPLES)(run)
    app.command()(demo)
    app.command(epilog=SWEEP_EXAMPLES)(sweep)
    app.command(epilog=REPORT_EXAMPLES)(report)
    app.command(epilog=CALIBRATE_EXAMPLES)(calibrate)
    app.command("eval-pairs", epilog=PAIRS_EXAMPLES)(eval_pairs)
    app.command("eval-stream", epilog=STREAM_EXAMPLES)(eval_stream)
