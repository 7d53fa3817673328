"""``semkv report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

REPORT_EXAMPLES = """\b
Examples:
  semkv report runs/a/sweep.csv --out runs/a/report.html
      of one sweep; a page that needs nothing else
  semkv report runs/a/sweep.csv runs/b/sweep.csv --markdown both.md --title 'Two models'
      of two together, and the same as markdown
"""


def report(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG", help="sweep.csv or sweep.jsonl, one or several sweeps together.")
    ],
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
    from semkv_lab.html.write import write_report

    for path in write_report(logs, out, figures=figures, markdown=markdown, title=title):
        typer.echo(path)
