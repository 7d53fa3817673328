"""The command line. One module a group of commands; nothing heavy is imported before a command needs it, so that
``semkv --help`` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from semkv import __version__
from semkv.cli.quality import (
    CALIBRATE_EXAMPLES,
    PAIRS_EXAMPLES,
    STREAM_EXAMPLES,
    calibrate,
    eval_pairs,
    eval_stream,
)
from semkv.cli.report import REPORT_EXAMPLES, report
from semkv.cli.run import EXIT_INTERRUPTED, RUN_EXAMPLES, demo, run
from semkv.cli.serve import SERVE_EXAMPLES, serve, warm
from semkv.cli.store import GC_EXAMPLES, PURGE_EXAMPLES, STATS_EXAMPLES, VERIFY_EXAMPLES, gc, purge, stats, verify
from semkv.cli.sweep import SWEEP_EXAMPLES, sweep
from semkv.errors import SemkvError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # rich help costs 0.6 s of imports
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A hierarchical semantic cache on top of vLLM.",
)

EXIT_ERROR = 2


def _version(value: bool) -> None:
    if value:
        typer.echo(f"semkv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command(epilog=RUN_EXAMPLES)(run)
app.command()(demo)
app.command(epilog=CALIBRATE_EXAMPLES)(calibrate)
app.command("eval-pairs", epilog=PAIRS_EXAMPLES)(eval_pairs)
app.command("eval-stream", epilog=STREAM_EXAMPLES)(eval_stream)
app.command(epilog=SWEEP_EXAMPLES)(sweep)
app.command(epilog=STATS_EXAMPLES)(stats)
app.command(epilog=VERIFY_EXAMPLES)(verify)
app.command(epilog=GC_EXAMPLES)(gc)
app.command(epilog=PURGE_EXAMPLES)(purge)
app.command(epilog=REPORT_EXAMPLES)(report)
app.command(epilog=SERVE_EXAMPLES)(serve)
app.command()(warm)


def main() -> NoReturn:
    """The ``semkv`` command: errors that semkv raises on purpose are one line on stderr and exit code 2."""
    try:
        app(prog_name="semkv", standalone_mode=True)
    except SemkvError as e:
        typer.echo(f"semkv: {e}", err=True)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(0)
