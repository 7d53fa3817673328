"""How large the project is: files and lines of each part, settings, flags, words of the pages.

python bench/size.py          prints the table of docs/architecture.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from semkv.cli import app
from semkv.config import CacheConfig
from semkv.connectors import ECSettings, KVSettings
from semkv.server.settings import ServerSettings
from semkv_lab.settings import QualityFlags, RunSettings, SweepFlags

ROOT = Path(__file__).parents[1]
SETTINGS = (CacheConfig, ServerSettings, KVSettings, ECSettings, RunSettings, QualityFlags, SweepFlags)


def lines(files: Iterable[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in files)


def main() -> None:
    parts = {
        "product": sorted((ROOT / "src").rglob("*.py")),
        "experiments": sorted((ROOT / "packages").rglob("*.py")),
        "tests": sorted((ROOT / "tests").glob("*.py")),
        "bench": sorted((ROOT / "bench").glob("*.py")),
    }
    print("| | files | lines |\n|---|---|---|")
    for name, files in parts.items():
        print(f"| {name} | {len(files)} | {lines(files):,} |")
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    words = sum(len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8"))) for page in pages)
    print(f"| pages | {len(pages)} | {words:,} words |")
    stated = {(item.name, str(item.type)) for kind in SETTINGS for item in fields(kind)}
    groups = [app[name] for name in app if not name.startswith("-")]
    commands = [
        command
        for group in groups
        for command in ([group] if group.default_command else [group[name] for name in group if name[0] != "-"])
    ]
    flags = {a.name for command in commands for a in command.assemble_argument_collection() if not a.children}
    threads = [
        path
        for path in parts["product"]
        if re.search(r"threading\.Thread[()]|ThreadPoolExecutor\(", path.read_text(encoding="utf-8"))
    ]
    print(
        f"\n{len(stated)} settings, {len(flags)} flags of {len(commands)} commands; {len(threads)} files start threads"
    )


if __name__ == "__main__":
    main()
