"""The command line. One module a group of commands; nothing heavy is imported before a command needs it, so that
``semkv --help`` answers at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Annotated, NoReturn

import typer

from semkv import __version__
from semkv.cli.serve import SERVE_EXAMPLES, serve, warm
from semkv.cli.store import GC_EXAMPLES, PURGE_EXAMPLES, STATS_EXAMPLES, VERIFY_EXAMPLES, gc, purge, stats, verify
from semkv.errors import SemkvError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # rich help costs 0.6 s of imports
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A hierarchical semantic cache on top of vLLM.",
)

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
LAB_COMMANDS = ("run", "demo", "sweep", "report", "calibrate", "eval-pairs", "eval-stream")
INSTALL_LAB = "from the repository, pip install ./packages/lab"


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


app.command(epilog=SERVE_EXAMPLES)(serve)
app.command()(warm)
app.command(epilog=STATS_EXAMPLES)(stats)
app.command(epilog=VERIFY_EXAMPLES)(verify)
app.command(epilog=GC_EXAMPLES)(gc)
app.command(epilog=PURGE_EXAMPLES)(purge)


def _add_lab_commands() -> None:
    """The commands of ``semkv_lab`` where it is installed; else commands of the same names that say how to get it."""
    if importlib.util.find_spec("semkv_lab") is not None:
        importlib.import_module("semkv_lab.cli").add_commands(app)
        return
    for name in LAB_COMMANDS:
        anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
        app.command(name, help="Part of semkv-lab, which is not installed.", context_settings=anything)(_lab_is_missing)


def _lab_is_missing(context: typer.Context) -> None:
    raise SemkvError(f"semkv {context.info_name} is part of semkv-lab, which is not installed: {INSTALL_LAB}")


_add_lab_commands()


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
