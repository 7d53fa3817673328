"""After how many seconds a purge of a bucket has reached everybody.

    python bench/bucket_purge.py --out bench/results/cpu/bucket-purge.json

Two directories follow one bucket, as those of two machines do, with a poll every two seconds. One has stored a tenant's
blocks, the other one has brought them to its own disk. Then `semkv purge --bucket` is called from a third place, as a
command. Seconds are from its start (``from_start_s``), from the moment at which its record is in the log
(``from_record_s``) and from its end (``from_end_s``, below 0 where it was over before) until neither directory finds a
block of the tenant. An engine's host memory follows with its next request, which is not in here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT, machine, write_json

sys.path.insert(0, str(ROOT / "tests"))
from block_helpers import found, keys
from bucket_helpers import Replica
from semkv_stores.block_file import tenant_tag
from semkv_vllm.bucket_log import POLL_S

BLOCKS = 4  # of each round


def records(url: str) -> int:
    """How many records the log has."""
    return len(list(Path(url.removeprefix("file://")).glob("kv/*/log/*")))


@dataclass
class Moments:
    """When things happened, by the monotonic clock."""

    recorded: float = 0.0
    gone: dict[int, float] = field(default_factory=dict)


def watched(url: str, replicas: list[Replica], first: int) -> Moments:
    """Look until no directory finds anything any more."""
    before = records(url)
    moments = Moments()
    while len(moments.gone) < len(replicas):
        time.sleep(0.005)
        if not moments.recorded and records(url) > before:
            moments.recorded = time.monotonic()
        for number, replica in enumerate(replicas):
            if number not in moments.gone and found(replica.store, first, BLOCKS) == 0:
                moments.gone[number] = time.monotonic()
    return moments


def one_round(url: str, replicas: list[Replica], first: int) -> dict[str, float]:
    one, other = replicas
    one.save(first, BLOCKS, owner=tenant_tag("alice"))
    while found(other.store, first, BLOCKS) < BLOCKS:
        time.sleep(0.01)
    wanted = keys(first, BLOCKS)
    refs = [ref for ref in other.store.find("ns", wanted) if ref is not None]
    assert all(other.store.bring("ns", wanted, refs, other.store.last_purge()))
    command = [sys.executable, "-m", "semkv", "purge", "--tenant", "alice", "--bucket", url]
    started = time.monotonic()
    ended: list[float] = []

    def call() -> None:
        subprocess.run(command, check=True, capture_output=True)
        ended.append(time.monotonic())

    thread = threading.Thread(target=call)
    thread.start()
    moments = watched(url, replicas, first)
    thread.join()
    last = max(moments.gone.values())
    return {
        "command_s": round(ended[0] - started, 3),
        "from_start_s": round(last - started, 3),
        "from_record_s": round(last - moments.recorded, 3),
        "from_end_s": round(last - ended[0], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "bucket").mkdir()
        url = f"file://{folder}/bucket"
        replicas = [Replica(Path(folder, name, "kv"), url) for name in ("one", "other")]
        for replica in replicas:
            replica.follower.start()
        rounds = [one_round(url, replicas, number * BLOCKS) for number in range(options.rounds)]
        for replica in replicas:
            replica.follower.close()
    for name in rounds[0]:
        values = sorted(each[name] for each in rounds)
        print(name, "median", values[len(values) // 2], "most", values[-1], file=sys.stderr)
    result = {
        "machine": machine("obstore"),
        "poll_s": POLL_S,
        "bucket": "a folder",
        "rounds": rounds,
    }
    write_json(options.out, result)


if __name__ == "__main__":
    main()
