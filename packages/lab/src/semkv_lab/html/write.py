"""What ``semkv report`` does: read the logs, draw, write the files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from semkv_lab.html.figures import draw_all
from semkv_lab.html.log import read_logs
from semkv_lab.html.markdown import render_markdown
from semkv_lab.html.page import render_page
from semkv_lab.outputs import keep_apart, writing


def write_report(
    logs: Sequence[Path], out: Path, *, figures: Path | None = None, markdown: Path | None = None, title: str = ""
) -> list[Path]:
    """Write the page, its figures as PNG, and the markdown file where one is asked for.

    Args:
        logs: ``.csv`` or ``.jsonl`` files of sweeps.
        out: the page.
        figures: folder of the PNG files; ``<page>_files`` beside the page when not given.
        markdown: the markdown file.
        title: of page and markdown.

    Returns:
        What was written.

    Raises:
        DatasetError: a log cannot be read; names file and line.
        ConfigError: a file cannot be written, or is one that is read, or the extra ``report`` is not installed.
    """
    read = {f"LOG {log.name}": log for log in logs} | {
        f"the JSON lines of {log.name}": log.with_suffix(".jsonl") for log in logs
    }
    keep_apart({"--out": out, "--markdown": markdown}, read)
    experiments = read_logs(logs)
    title = title or "What each tier is worth"
    names = [log.name for log in logs]
    drawings = draw_all(experiments)
    folder = figures or out.with_name(f"{out.stem}_files")
    files: dict[Path, bytes] = {out: render_page(experiments, drawings, title, names).encode()}
    files |= {folder / f"{d.name}.png": d.png for d in drawings}
    if markdown is not None:
        place = Path(os.path.relpath(folder, markdown.parent)).as_posix()
        files[markdown] = render_markdown(experiments, drawings, title, names, place).encode()
    for path, data in files.items():
        with writing("semkv report", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return list(files)
