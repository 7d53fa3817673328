"""Faults of the machine that the KV tier must stand, and hooks that fail: host memory, a disk that hangs, the pace."""

from __future__ import annotations

import fcntl
import inspect
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from msgspec import MsgspecError, msgpack

from kv_engines import NOTHING, Engine, connector, differs, in_child, prompt, token_ids
from semkv_stores.blocks import BlockStore
from semkv_vllm import disk_process, private
from semkv_vllm.host_memory import OURS, Need, agreed_host_bytes, let_go, region_of
from semkv_vllm.shared import KVShared, Pace
from tiny_models import Checkpoint

# ---------------------------------------------------------------------- host memory


_HOLDS = """
import sys, time
from pathlib import Path
from semkv_vllm.host_memory import agreed_host_bytes
agreed_host_bytes(sys.argv[1], 1 << 20, Path(sys.argv[2]))
print("held", flush=True)
time.sleep(3600)
"""


def holder(engine: str, shm: Path) -> subprocess.Popen[str]:
    """Another process of an engine, which has its host memory."""
    command = [sys.executable, "-c", _HOLDS, engine, str(shm)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_only_the_memory_of_dead_engines_is_deleted(tmp_path: Path) -> None:
    """Also where one of an engine's processes has died and another lives."""
    dead, alive, beside = OURS + "dead", OURS + "alive", OURS + "beside"
    processes = [holder(dead, tmp_path), holder(alive, tmp_path), holder(alive, tmp_path)]
    others = [
        tmp_path / name
        for name in ("vllm_offload_theirs.mmap", "semkv-notes", f"vllm_offload_{OURS}x.txt")
    ]
    for other in others:
        other.write_bytes(b"mine")
    link = region_of(OURS + "link", tmp_path)
    link.symlink_to(others[0])
    try:
        for process in processes[:2]:
            process.kill()
            process.wait()
        agreed_host_bytes(beside, 1 << 20, tmp_path)
        assert not region_of(dead, tmp_path).exists()
        assert region_of(alive, tmp_path).exists()
        assert region_of(beside, tmp_path).exists()
        assert all(other.read_bytes() == b"mine" for other in others)
        assert link.is_symlink()
        processes[2].send_signal(signal.SIGSTOP)  # a process that stands still lives
        agreed_host_bytes(OURS + "next", 1 << 20, tmp_path)
        assert region_of(alive, tmp_path).exists()
        processes[2].kill()
        processes[2].wait()
        let_go(beside)
        agreed_host_bytes(OURS + "last", 1 << 20, tmp_path)
        assert not region_of(alive, tmp_path).exists()
        assert not region_of(beside, tmp_path).exists()
    finally:
        for process in processes:
            process.kill()
        for name in ("next", "last", "beside"):
            let_go(OURS + name)


def test_a_file_that_is_being_made_is_nobodys_leftover(tmp_path: Path) -> None:
    """Between the making of a file and its lock the folder is locked."""
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    region_of(OURS + "starts", tmp_path).touch()
    thread = threading.Thread(target=agreed_host_bytes, args=(OURS + "other", 1 << 20, tmp_path))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert region_of(OURS + "starts", tmp_path).exists()
    os.close(folder)
    thread.join()
    let_go(OURS + "other")


def need(
    *,
    tokens_per_block: tuple[int, ...] = (16,),
    batch: int = 1024,
    sealed: bool = False,
    **fields: Any,
) -> Need:
    groups = [SimpleNamespace(tokens_per_block=tokens) for tokens in tokens_per_block]
    parallel = SimpleNamespace(world_size=fields.get("ranks", 1))
    offloading = SimpleNamespace(
        groups=groups,
        parallel=parallel,
        worker_kv_bytes_per_block=fields.get("block_bytes", 1 << 16),
        replicated_layout=fields.get("replicated", False),
    )
    scheduler = SimpleNamespace(
        max_num_batched_tokens=batch, max_num_seqs=fields.get("sequences", 256)
    )
    model = SimpleNamespace(max_model_len=fields.get("length", 8192))
    config = SimpleNamespace(scheduler_config=scheduler, model_config=model)
    return Need(offloading, config, sealed=sealed)


def test_an_engine_needs_room_for_what_one_step_computes() -> None:
    assert need().host_bytes == 64 * (1 << 16)
    assert need(batch=1025).host_bytes == 65 * (1 << 16)
    assert need(tokens_per_block=(16, 64)).host_bytes == 80 * (1 << 16)
    assert need(ranks=2).host_bytes == 2 * 64 * (1 << 16)
    assert need(ranks=2, replicated=True).host_bytes == 64 * (1 << 16)
    assert need(block_bytes=100, sealed=True).row_bytes == 2 * 4096
    assert need(length=100, sequences=2).host_bytes == 13 * (1 << 16), (
        "no step has more tokens than its requests"
    )
    enough = need().host_bytes
    assert need().unmet(enough, enough) is None
    assert need().tokens(enough) == 1024
    shm, setting = need().unmet(1 << 32, enough - 1), need().unmet(enough - 1, enough - 1)
    for word in ("/dev/shm", str(1 << 32), "1008 tokens", "--shm-size"):
        assert word in str(shm)
    assert "host_bytes" in str(setting)
    assert "/dev/shm" not in str(setting)
    assert need(tokens_per_block=()).tokens(1 << 30) == 0


# ---------------------------------------------------------------------- a disk that hangs


class Fake:
    """A process that answers every job but some, and can be killed."""

    def __init__(self, store: BlockStore, monkeypatch: pytest.MonkeyPatch, never: set[int]) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(theirs.detach())
        self.killed = False
        self.never = never

        def start(disk: Any) -> None:
            disk._started = time.monotonic()
            disk._connection = Connection(ours.detach())
            disk._process = self

        monkeypatch.setattr(disk_process.DiskProcess, "_start", start)
        shape = disk_process.HostShape(rows=1, stride=1, row_bytes=1)
        self.disk = disk_process.DiskProcess(0, shape, store)
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self) -> None:
        try:
            while True:
                job = msgpack.decode(self.connection.recv_bytes(), type=disk_process.FileJob)
                if job.number not in self.never:
                    self.connection.send_bytes(
                        msgpack.encode(disk_process.FileDone(job.number, b"\1", {}))
                    )
        except (EOFError, OSError, MsgspecError):
            return

    def kill(self) -> None:
        self.killed = True

    def wait(self, limit: float) -> int:
        return 0


def job(file: str) -> dict[str, Any]:
    return {
        "namespace": "n",
        "layout": None,
        "keys": [b"k"],
        "chunks": [0],
        "file": file,
        "places": [0],
    }


@pytest.mark.parametrize("file", ["f", ""])
def test_a_job_that_hangs_is_given_up_while_others_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    fake = Fake(BlockStore(tmp_path, "kv"), monkeypatch, {1})
    monkeypatch.setattr(disk_process, "_SILENT_S", 60.0)  # engines of other tests are patient
    now = [100.0]
    monkeypatch.setattr(disk_process, "time", SimpleNamespace(monotonic=lambda: now[0]))
    hangs = fake.disk.submit(**job(file))
    answered = set[int]()
    while not fake.killed:
        asked = fake.disk.submit(**job("f"))
        for done in fake.disk.finished(0.1 if len(answered) < asked - 1 else 0.0):
            answered.add(done.number)
            assert done.hung == (done.number == hangs)
        now[0] += 10.0
        assert now[0] < 200.0, "never given up"
    assert hangs in answered
    assert now[0] > 160.0


def test_a_job_that_waits_behind_others_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_process, "_SILENT_S", 60.0)  # engines of other tests are patient
    waiting = disk_process._UnderWay(threads=2)
    for number in range(6):
        waiting.add(number)
    for now in range(0, 600, 50):
        assert waiting.hanging(float(now)) == []
        if now % 100:
            waiting.discard(now // 100 * 2)
            waiting.discard(now // 100 * 2 + 1)
    waiting.add(7)
    assert waiting.hanging(1000.0) == []
    assert waiting.hanging(1061.0) == [7]


# ---------------------------------------------------------------------- the pace


def test_one_fast_read_does_not_make_the_disk_look_fast() -> None:
    """Nine reads at 1 unit a second and one at 1,000: the mean of the rates would say 0.2 s for 20 units or so."""
    pace = Pace()
    for seconds in (1.0, 1.0, 1.0, 0.001, 1.0, 1.0, 1.0, 1.0, 1.0):
        pace.measured(1, seconds)
    expected = pace.seconds(20)
    assert expected is not None
    assert expected > 15


# ---------------------------------------------------------------------- hooks that fail


class Broken(KVShared):
    """What the parts of a connector share; nothing of it can be read but what a fault needs."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("fault", "counters", "_quiet", "__class__", "__dict__"):
            return super().__getattribute__(name)
        raise RuntimeError(f"{name} is broken")


def broken(model: str, cache: str) -> dict[str, Any]:
    """Whatever of ours fails, in any hook, the engine answers; and all is well again afterwards."""
    rng = random.Random(3)
    prompts = [prompt(token_ids(rng, size)) for size in (110, 300)]
    more = [prompt(token_ids(rng, size)) for size in (90, 250)]
    with Engine(model, connector(cache)) as engine:
        references = engine.ask(prompts)
        engine.forget(keep_host=True)
        found: dict[str, Any] = {"wrong": []}
        for keep_host in (True, False):
            own = engine.connectors()[0]
            whole = own.shared
            whole.__class__ = Broken
            before = whole.counters["errors"]
            answers = engine.ask(prompts)
            engine.ask(more)
            found["wrong"] += [
                why for a, b in zip(answers, references, strict=True) if (why := differs(a, b))
            ]
            found["reset"] = engine.llm.reset_prefix_cache(reset_connector=True)
            whole.__class__ = KVShared
            found["errors"] = whole.counters["errors"] - before
            assert engine.llm.reset_prefix_cache(reset_connector=True)
            answers = engine.ask(prompts)
            engine.forget(keep_host=keep_host)
            again = engine.ask(prompts)
            found["wrong"] += [
                why for a, b in zip(again, references, strict=True) if (why := differs(a, b))
            ]
            found["loaded"] = [answer["loaded"] for answer in again]
        return found | {"left": engine.left()}


@pytest.mark.engine
def test_a_fault_in_any_hook_is_a_miss(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = in_child(broken, checkpoint("llama"), tmp_path)
    assert found["wrong"] == []
    assert found["errors"] > 10
    assert found["loaded"] == [96, 288]
    assert found["left"] == NOTHING


def test_vllm_has_all_that_is_used_of_it_and_is_not_its_api() -> None:
    assert private.missing() == []


def test_each_name_that_vllm_may_lose_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = inspect.getsource

    def renamed(module: ModuleType) -> str:
        names = "|".join(private.NAMES[module])
        return re.sub(rf"\b({names})\b", r"\1_", read(module))

    monkeypatch.setattr(inspect, "getsource", renamed)
    assert private.missing() == [
        f"{module.__name__}: {name}" for module, names in private.NAMES.items() for name in names
    ]
