"""The command that this package adds to ``semkv``."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from semkv.command_line import command_line

EXIT_FAILED = 1
demo = command_line()


@demo.default
def _demo(
    *,
    directory: Annotated[Path, Parameter(name="--dir")] = Path("runs/demo"),
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative="")] = False,
) -> None:
    """Ask vLLM with and without semkv in turns: repeats and traps, a document and a picture after a restart.

    The exit status is 1 where a trap hit, or two answers differ.

    Args:
        directory: Where requests and logs go.
        verbose: More in vLLM's logs.
    """
    from semkv_demo.run import run_demo

    if not run_demo(directory, verbose=verbose):
        sys.exit(EXIT_FAILED)
