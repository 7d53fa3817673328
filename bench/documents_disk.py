"""Documents at another position that lie on disk only: time to the first token, and whether the disk's rate is used.

    python bench/documents_disk.py --out bench/results/h200/documents-disk.json
    python bench/documents_disk.py --tiny --block 32 --kv-gib 1 --host-gib 1 --turns 1          (on a CPU)

The engine of bench/positions.py, one request at a time. A request that asks for documents on disk waits until they have
been read into host memory, and then loads them as if they had been there. By turns a prompt is computed; its documents
are reused from host memory; from the disk, host memory emptied, with their files in the page cache, or dropped from it
(semkv reads with O_DIRECT where the file system can, so this may be the same). ``read_ms`` is from the first order to
read to the end of the last. In the same turn the same files are read by plain reads: with O_DIRECT by eight threads,
as many as semkv has, and by one; and through the page cache by one. ``share`` is of the first of these rates.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from common import drop_pages, wait_until_written, write_json
from positions import DOCUMENT, NO_REUSE, Engine, engine_options, reuse

REPAIR = 32
THREADS = 8
QUIET_S = 1.0  # files that have not grown for so long are complete


@dataclass
class Reads:
    """What the engine has read in a request; times of `time.perf_counter`."""

    files: set[str] = field(default_factory=set)
    nbytes: int = 0
    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max(self.ended) - min(self.begun)


@contextmanager
def noted_reads() -> Iterator[Reads]:
    from semkv_vllm.tier import SemKVTier

    found = Reads()
    hand_over = SemKVTier._hand_over
    end = SemKVTier._end

    def noted_order(self: Any, transfer: Any, keys: Any, **job: Any) -> None:
        if job.get("file"):
            found.files.add(job["file"])
        hand_over(self, transfer, keys, **job)

    def noted_end(self: Any, transfer: Any) -> None:
        if transfer.job.is_promotion:
            found.begun.append(transfer.started)
            found.ended.append(time.perf_counter())
            found.nbytes += len(transfer.good) * self._row_bytes
        end(self, transfer)

    hooks = {"_hand_over": noted_order, "_end": noted_end}
    with mock.patch.multiple(SemKVTier, **hooks):
        yield found


class Disk:
    """An engine, its folder, and the arms."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.folder = scratch / "cache"
        self.engine = Engine(options, scratch)
        assert not self.engine.told["refused"], self.engine.told
        wait_until_written(self.folder, QUIET_S)
        os.sync()

    def forget(self) -> None:
        """Leave the documents on disk only."""
        self.engine.forget()
        self.engine.core.scheduler.connector.connector_scheduler.reset_cache()
        self.engine.settle()

    def turn(self, prompt: list[int], asked: dict[str, Any]) -> dict[str, dict[str, float]]:
        """Each arm once."""
        engine = self.engine
        found: dict[str, dict[str, float]] = {}
        engine.forget()
        found["computed"] = told(engine.ask(prompt, NO_REUSE))
        for name, drop in (("disk", False), ("disk, files dropped from the page cache", True)):
            self.forget()
            if drop:
                drop_pages(self.folder)
            with noted_reads() as reads:
                answer = engine.ask(prompt, asked)
            found[name] = told(answer) | {
                "bytes": reads.nbytes,
                "files": len(reads.files),
                "read_ms": 1e3 * reads.seconds,
                "gb_s": reads.nbytes / reads.seconds / 1e9,
                "gb_s_to_first_token": reads.nbytes / answer["ms"] / 1e6,
            }
        engine.forget()
        found["host memory"] = told(engine.ask(prompt, asked))
        return found | self.raw(reads.files)

    def raw(self, names: Iterable[str]) -> dict[str, dict[str, float]]:
        """The rates of plain reads of some files."""
        files = [self.file(name) for name in sorted(names)]
        found = {}
        for threads in (THREADS, 1):
            drop_pages(self.folder)
            rate = plain_reads(files, threads, os.O_DIRECT)
            found[f"plain reads, {threads} at once, O_DIRECT"] = {"gb_s": rate}
        drop_pages(self.folder)
        plain_reads(files, 1)  # into the page cache
        found["plain reads, 1 at once, the page cache"] = {"gb_s": plain_reads(files, 1)}
        return found

    def file(self, name: str) -> Path:
        (path,) = self.folder.glob(f"kv/**/{Path(name).name}*")
        return path


def told(answer: dict[str, Any]) -> dict[str, float]:
    return {
        "ms": answer["ms"],
        "reused_tokens": answer.get("approximate_tokens", 0),
    }


def plain_reads(files: Sequence[Path], threads: int, flags: int = 0) -> float:
    """GB/s of reading whole files, each by one thread; 0 where the file system has no O_DIRECT."""
    sizes = [path.stat().st_size for path in files]
    memory = [mmap.mmap(-1, size) for size in sizes]
    for buffer in memory:
        buffer.write(bytes(len(buffer)))  # so that its pages are there

    def read(path: Path, buffer: mmap.mmap) -> int:
        fd = os.open(path, os.O_RDONLY | flags)
        view = memoryview(buffer)
        at = 0
        while at < len(view):
            count = os.preadv(fd, [view[at:]], at)
            if not count:
                break
            at += count
        os.close(fd)
        return at

    begun = time.perf_counter()
    try:
        with ThreadPoolExecutor(threads) as pool:
            total = sum(pool.map(read, files, memory))
    except OSError as error:
        print(f"no plain reads: {error}", flush=True)
        return 0.0
    return total / (time.perf_counter() - begun) / 1e9


def measured(disk: Disk, count: int, turns: int) -> dict[str, Any]:
    """One number of documents: the medians of all turns."""
    prompt = disk.engine.prompt(count, disk.engine.system)
    asked = reuse(count, REPAIR)
    values: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(turns + 1):
        found = disk.turn(prompt, asked)
        if turn:  # the first compiles
            for name, figures in found.items():
                for figure, value in figures.items():
                    values[name][figure].append(value)
    arms: dict[str, Any] = {}
    for name, figures in values.items():
        arms[name] = {figure: round(statistics.median(all_), 2) for figure, all_ in figures.items()}
        if "ms" in figures:
            arms[name]["all_ms"] = [round(value, 2) for value in figures["ms"]]
    raw = arms[f"plain reads, {THREADS} at once, O_DIRECT"]["gb_s"]
    for arm in arms.values():
        if "read_ms" in arm and raw:
            arm["share"] = round(arm["gb_s"] / raw, 2)
    return {"documents": count, "tokens": count * DOCUMENT, "arms": arms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[8, 30])
    parser.add_argument("--turns", type=int, default=5)
    engine_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        disk = Disk(options, Path(scratch))
        rows = []
        for count in options.documents:
            row = measured(disk, count, options.turns)
            rows.append(row)
            for name, arm in row["arms"].items():
                print(f"{row['tokens']} tokens, {name}: {arm}", flush=True)
            result = {
                **disk.engine.described(),
                "turns": options.turns,
                "measured": rows,
            }
            write_json(options.out, result)


if __name__ == "__main__":
    main()
