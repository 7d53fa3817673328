"""``semkv report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="sweep.csv or sweep.jsonl, one or several sweeps together.")
    ],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="Folder for the figures as PNG (<page>_files beside the page).")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the same as markdown to this file.")] = None,
    title: Annotated[str, typer.Option(help="Heading of page and markdown.")] = "",
) -> None:
    """Make one HTML page of the logs of sweeps: figures, all experiments, the worst wrong hits."""
    from semkv.experiments.html.write import write_report

    for path in write_report(logs, out, figures=figures, markdown=markdown, title=title):
        typer.echo(path)
