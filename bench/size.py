"""How large the project is. Prints the table of docs/architecture.md.

python bench/size.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from semkv.cli import app
from semkv.config import CacheConfig
from semkv_gateway.settings import ServerSettings
from semkv_lab.settings import RunSettings, SweepFlags
from semkv_vllm import ECSettings, KVSettings

ROOT = Path(__file__).parents[1]
SETTINGS = (CacheConfig, ServerSettings, KVSettings, ECSettings, RunSettings, SweepFlags)
WORD = re.compile(r"\S*\w\S*")
THREADS = re.compile(r"threading\.Thread[()]|ThreadPoolExecutor\(")


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def lines(files: Iterable[Path]) -> str:
    return f"{sum(text(path).count(chr(10)) for path in files):,}"


def files_and_lines(files: list[Path]) -> str:
    return f"{len(files)}, {lines(files)}"


def words() -> str:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    return f"{sum(len(WORD.findall(text(page))) for page in pages):,}"


def settings_and_flags() -> str:
    stated = {(item.name, str(item.type)) for kind in SETTINGS for item in fields(kind)}
    groups = [app[name] for name in app if not name.startswith("-")]
    commands = [
        command
        for group in groups
        for command in ([group] if group.default_command else [group[name] for name in group if name[0] != "-"])
    ]
    flags = {a.name for command in commands for a in command.assemble_argument_collection() if not a.children}
    return f"{len(stated)}, {len(flags)}"


def main() -> None:
    product = sorted((ROOT / "src").rglob("*.py"))
    threads = sum(bool(THREADS.search(text(path))) for path in product)
    rows = (
        ("product: files, lines", "142, 24,700", files_and_lines(product), "70, 16,000"),
        ("experiments: files, lines", "62, 9,300", files_and_lines([*(ROOT / "packages").rglob("*.py")]), "15, 5,000"),
        ("tests: lines", "24,100", lines((ROOT / "tests").glob("*.py")), "11,000"),
        ("bench: files, lines", "33, 6,200", files_and_lines([*(ROOT / "bench").glob("*.py")]), "8, 1,500"),
        ("pages: words", "24,500", words(), "9,000"),
        ("settings, flags", "135, 162", settings_and_flags(), "60, 70"),
        ("files that start threads", "16", str(threads), "5"),
    )
    print("| | 2026-11-21 | now | aim |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
