"""When the parts of an engine's steps begin and how long they take, with an OffloadingConnector of vLLM's or ours.

    SEMKV_STAMPS=/tmp/stamps python bench/kv_hits.py ...     (the bench makes it known to vLLM)

vLLM loads its plugins in every process of an engine. This one wraps functions of the engine's core, of the scheduler,
of the connector's halves and of our stores. Each call is 24 bytes in a file that is mapped into memory, so what was
noted survives however the process ends. `read` gives them back.
"""

from __future__ import annotations

import functools
import importlib
import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOM = 4_000_000  # calls
RECORD = struct.Struct("<ddi4x")  # begin and seconds, of `time.perf_counter`; number of the function
CORE, SCHEDULER = "vllm.v1.engine.core", "vllm.v1.core.sched.scheduler"
OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
PLACES = [
    (CORE, "EngineCore", "add_request step step_with_batch_queue reset_prefix_cache"),
    (SCHEDULER, "Scheduler", "schedule update_from_output make_stats _update_from_kv_xfer_finished"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "get_computed_blocks allocate_slots"),
    (
        f"{OFFLOADING}.scheduler", "OffloadingConnectorScheduler",
        "on_new_request get_num_new_matched_tokens update_state_after_alloc build_connector_meta _build_store_jobs "
        "update_connector_output request_finished get_stats get_external_cache_hit_sources",
    ),
    ("vllm.v1.kv_offload.tiering.manager", "TieringOffloadingManager", "complete_store prepare_store on_schedule_end"),
    (
        "vllm.v1.kv_offload.cpu.manager", "CPUOffloadingManager",
        "prepare_load complete_load prepare_store complete_store on_request_finished",
    ),
    (f"{OFFLOADING}.worker", "OffloadingConnectorWorker", "handle_preemptions start_kv_transfers get_finished"),
    ("vllm.v1.kv_offload.cpu.gpu_worker", "CPUOffloadingWorker", "submit_store submit_load wait"),
    ("vllm.v1.worker.gpu_worker", "Worker", "execute_model sample_tokens"),
    ("semkv.connectors.tier", "SemKVTier", "submit_store submit_load get_finished_jobs"),
    ("semkv.connectors.kv", "SemKVConnector", "on_new_request build_connector_meta update_connector_output"),
    ("semkv.stores.blocks", "BlockStore", "last_purge find"),
]  # fmt: skip


class Notes:
    """The file of the process that calls the wrapped functions: an engine's core, which may be a fork of this one."""

    def __init__(self, path: Path) -> None:
        self._names, self._path, self._at = list[str](), path, 0
        self._map: mmap.mmap | None = None

    def _open(self) -> mmap.mmap:
        with self._path.open("wb+") as file:
            file.truncate(ROOM * RECORD.size)
            self._map = mmap.mmap(file.fileno(), 0)
        self._path.with_suffix(".json").write_text(json.dumps(self._names))
        return self._map

    def wrap(self, owner: Any, name: str) -> None:
        self._names.append(f"{owner.__name__}.{name}")
        inner: Callable[..., Any] = getattr(owner, name)
        number, put, end, clock = len(self._names), RECORD.pack_into, ROOM * RECORD.size, time.perf_counter

        @functools.wraps(inner)
        def outer(*args: Any, **fields: Any) -> Any:
            begin = clock()
            try:
                return inner(*args, **fields)
            finally:
                if self._at < end:
                    put(self._map or self._open(), self._at, begin, clock() - begin, number)
                    self._at += RECORD.size

        setattr(owner, name, outer)


def register() -> None:
    """Wrap everything. A process that calls nothing of it writes nothing."""
    if not (folder := os.environ.get("SEMKV_STAMPS")):
        return
    Path(folder).mkdir(exist_ok=True)
    notes = Notes(Path(folder) / f"{os.environ.get('SEMKV_STAMPS_NAME', 'engine')}.stamps")
    for module, owner, names in PLACES:
        try:
            found = getattr(importlib.import_module(module), owner)
        except (ImportError, AttributeError):
            continue
        for name in names.split():
            if name in vars(found):
                notes.wrap(found, name)


def plugin(folder: Path) -> None:
    """Make `register` known to vLLM in every process that has ``folder`` on its path."""
    about = folder / "stamps-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stamps\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nstamps = stamps:register\n")


def read(path: Path) -> Iterator[tuple[str, float, float]]:
    """Function, begin and seconds of every call, in the order in which they ended."""
    names = json.loads(path.with_suffix(".json").read_text())
    for begin, seconds, number in RECORD.iter_unpack(path.read_bytes()):
        if not number:
            return
        yield names[number - 1], begin, seconds


def totals(path: Path, windows: list[tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Calls and milliseconds of each function within windows of time."""
    found: dict[str, dict[str, float]] = {}
    for name, begin, seconds in read(path):
        if any(start <= begin <= end for start, end in windows):
            row = found.setdefault(name, {"calls": 0, "ms": 0.0, "most_ms": 0.0})
            row["calls"] += 1
            row["ms"] = round(row["ms"] + seconds * 1e3, 3)
            row["most_ms"] = round(max(row["most_ms"], seconds * 1e3), 3)
    return found


def timeline(path: Path, start: float, end: float, least_ms: float = 0.02) -> list[tuple[float, str, float]]:
    """What began within one window: milliseconds since its start, function, milliseconds."""
    rows = [
        (round((begin - start) * 1e3, 3), name, round(seconds * 1e3, 3))
        for name, begin, seconds in read(path)
        if start - 1e-3 <= begin <= end and seconds * 1e3 >= least_ms
    ]
    return sorted(rows)
