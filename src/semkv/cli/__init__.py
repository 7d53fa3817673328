"""The command line. One module a group of commands, imported when one of them is called or shows its help, so that
``semkv --help`` answers at once.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Annotated, NoReturn

from cyclopts import Group, Parameter
from cyclopts.exceptions import CycloptsError

from semkv import __version__
from semkv.command_line import command_line, setting_error
from semkv.errors import SemkvError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
INSTALL = "from the repository, pip install ./packages/"

app = command_line(
    name="semkv",
    help="A hierarchical semantic cache on top of vLLM.",
    version=f"semkv {__version__}",
    version_flags="--version",
)

SERVING = Group("Serving", sort_key=0)
STORES = Group("Looking after a cache directory", sort_key=1)
LAB = Group("Measuring", sort_key=2)

app.command(
    "semkv.cli.store:stats",
    group=STORES,
    help="Show what a cache holds, by store, tenant and model.",
)
app.command(
    "semkv.cli.store:verify", group=STORES, help="Read everything and check every checksum."
)
app.command("semkv.cli.store:gc", group=STORES, help="Delete orphaned files, and anything too old.")
app.command(
    "semkv.cli.store:purge", group=STORES, help="Delete a cache, or the data of one tenant."
)
app.command("semkv.cli.store:export", group=STORES, help="Write a cache into one file.")
app.command(
    "semkv.cli.store:import_",
    name="import",
    group=STORES,
    help="Make a cache directory of an exported file.",
)

_GATEWAY = {
    "serve": (
        "Answer repeated requests in front of an OpenAI-compatible server.\n\n"
        "Secrets come from the environment: SEMKV_SECRET (keys of stored responses) and SEMKV_ADMIN_KEY (dashboard, "
        "admin routes). Any flag may be a variable too, such as SEMKV_UPSTREAM or SEMKV_TTL."
    ),
    "warm": (
        "Send the prompts of a file through a gateway.\n\nThe API key is read from OPENAI_API_KEY."
    ),
}
_LAB = {
    "run": "Answer a data set through the cache, and measure it.",
    "sweep": (
        "Run many experiments, and log a row for each.\n\n"
        "A failed experiment is a row with its error. After Ctrl-C, --resume continues the log."
    ),
    "report": "Make a page, HTML or Markdown, of the logs of sweeps.",
    "calibrate": "Fit the chance of a wrong answer from labeled pairs.",
    "eval-pairs": "Measure the precision of a policy on labeled pairs.",
    "eval-stream": "Count hits and wrong answers of a policy along a stream.",
    "bench": "Compare KV connectors of vLLM, or semantic caches.",
}
_DEMO = {"demo": "Ask vLLM with and without semkv in turns, and compare."}


def _missing(name: str, part: str) -> Callable[..., NoReturn]:
    def missing(*_: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> NoReturn:
        raise SemkvError(
            f"semkv {name} is part of semkv-{part}, which is not installed: {INSTALL}{part}"
        )

    return missing


def _add(
    part: str,
    commands: str,
    helps: dict[str, str],
    group: Group,
) -> None:
    """The commands of a distribution. Where it is not installed, each says how to install it."""
    installed = find_spec(commands.partition(".")[0]) is not None
    for name, text in helps.items():
        function = f"{commands}:{name.replace('-', '_')}"
        app.command(
            function if installed else _missing(name, part),
            name=name,
            group=group,
            help=text,
        )


_add("gateway", "semkv_gateway.commands", _GATEWAY, SERVING)
_add("demo", "semkv_demo.cli", _DEMO, LAB)
_add("lab", "semkv_lab.cli", _LAB, LAB)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command; by default the one that the process was started with.

    Raises:
        SemkvError: a flag or a value is wrong, or what semkv raises on purpose.
    """
    try:
        app(sys.argv[1:] if arguments is None else arguments)
    except CycloptsError as error:
        raise setting_error(error) from None


def main() -> NoReturn:
    """The ``semkv`` command: errors that semkv raises on purpose are one line on stderr and exit code 2."""
    try:
        run()
    except SemkvError as error:
        print(f"semkv: {error}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(0)
