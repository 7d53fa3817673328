"""How soon does a near-repeat of one gateway hit at another, and what do the donors elsewhere cost a gateway?

    python bench/shared_donors.py --donors 1000 200000 --out bench/results/cpu/shared_donors.json

Redis is filled with donors of other tenants, 50 to a partition, in the form in which a gateway writes them. Two
gateways on it, each with a directory of its own, are then asked by new tenants: one a question, the other the same
question in other words, again and again until that is a hit. `seconds` is the time from the first gateway's answer to
the second one's hit, the request itself included. ``--cluster`` takes three nodes in place of one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import redis
from common import ROOT, machine, write_json
from gateway_faults import Upstream, serving

sys.path.insert(0, str(ROOT / "tests"))
from redis_server import RedisCluster, RedisServer
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.keys import Keyed, entry_of
from semkv.stores.catalog import Record
from semkv.tiers.sharing import MOST, Place, dump, tenant_name
from semkv.types import Namespace, Request, Role, TextSegment
from semkv_gateway.donors import RedisDonors, open_donors

SECRET = b"x" * 16
PER_PARTITION = 50
TRIALS = 20
QUESTION = "How do I bake sourdough bread at home?"
REWORDED = "How can I bake sourdough bread at home?"
DIM = 384


def question_of(group: int, number: int) -> Request:
    history = TextSegment(f"You answer questions of shop number {group}.", Role.SYSTEM)
    segments = (history, TextSegment(f"Is article {number} of this shop there again?"))
    return Request("", Namespace(f"{group:032x}", "model"), segments)


def donors(count: int, in_each: int = PER_PARTITION) -> Iterator[tuple[str, bytes]]:
    """Rows of entries as a gateway writes them, each with the name of its partition."""
    random = np.random.default_rng(0)
    for number in range(count):
        request = question_of(number // in_each, number)
        tenant = request.namespace.tenant
        keyed = Keyed(request.namespace, request.segments)
        vector = random.normal(size=DIM).astype(np.float32)
        vectors = {"semantic_text@bench": vector / np.linalg.norm(vector)}
        record = Record(entry_of(request, keyed), keyed.entry_keys(), vectors=vectors)
        yield f"{tenant_name(tenant)}:{keyed.question_slot()}", dump(record)


def fill(store: RedisDonors, count: int) -> int:
    """Add rows; to how many partitions. Nobody asks for these, so the rows of one are alike."""
    since = str(store.removals(Place()).end)
    firsts = itertools.islice(donors(count, 1), count // PER_PARTITION)
    filled = 0
    for partition, data in firsts:
        pipe = store._db.pipeline(transaction=False)
        for _ in range(PER_PARTITION - 1):
            pipe.xadd(store._key(partition), {"row": data, "since": since})
        pipe.execute()
        store.add(partition, data, since)
        filled += 1
    return filled


def resident_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if "VmRSS" in line) / 1024


def redis_mib(server: Any) -> float:
    nodes = getattr(server, "nodes", [server])
    used = 0
    for node in nodes:
        with redis.Redis(port=node.port, socket_timeout=60.0) as client:
            used += client.info("memory")["used_memory"]
    return used / (1 << 20)


def ask(url: str, text: str, tenant: str, **headers: str) -> httpx.Response:
    body = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {tenant}", **headers}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def until_hit(one: str, other: str, tenant: str) -> float:
    ask(one, QUESTION, tenant)
    start = time.perf_counter()
    while (
        "hit"
        not in ask(other, REWORDED, tenant, **{"Cache-Control": "only-if-cached"}).headers[
            "x-semkv"
        ]
    ):
        if time.perf_counter() - start > 30:
            return float("inf")
        time.sleep(0.02)
    return time.perf_counter() - start


def measured(folder: Path, *, count: int, cluster: bool) -> dict[str, Any]:
    with ExitStack() as stack:
        server: Any = RedisCluster(folder) if cluster else RedisServer(folder)
        stack.enter_context(server)
        up = Upstream()
        stack.enter_context(up())
        flags = ("--encoder-timeout", "5", "--similarity-threshold", "0.8", "--store", server.url)
        (one, _), (other, running) = (
            stack.enter_context(serving(folder / name, up, *flags)) for name in ("one", "other")
        )
        until_hit(one, other, "warm up")
        before = resident_mib(running.pid)
        store = open_donors(server.url, 10.0, SECRET, store_bytes=16 << 30)
        assert store is not None
        partitions = fill(store, count)
        seconds = sorted(until_hit(one, other, f"tenant {number}") for number in range(TRIALS))
        return {
            "part": "two gateways",
            "cluster": cluster,
            "donors": count,
            "partitions": partitions,
            "redis_mib": round(redis_mib(server), 1),
            "seconds": [round(one, 3) for one in seconds],
            "mib_before": round(before, 1),
            "mib_after": round(resident_mib(running.pid), 1),
        }


class Unread:
    """A text encoder that knows one text."""

    dim = DIM
    fingerprint = "bench"

    def fits(self, text: str) -> bool:
        return bool(text)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        return np.tile(np.eye(1, DIM, dtype=np.float32), (len(texts), 1))


def whole_partition(folder: Path) -> dict[str, Any]:
    """What it costs to bring the largest partition that there is."""
    with RedisServer(folder) as server:
        store = RedisDonors(server.url, timeout_s=60.0)
        with SemanticCache(
            CacheConfig(folder / "cache"), text_encoder=Unread(), shared=store
        ) as cache:
            while not (since := str(store.removals(Place()).end)):
                pass
            for partition, data in donors(MOST, MOST):
                store.add(partition, data, since)
            start, cpu = time.perf_counter(), time.process_time()
            looks = 0
            while (entries := cache.stats().entries) < MOST and looks < 1000:
                cache.try_reuse(question_of(0, looks))
                time.sleep(0.05)
                looks += 1
            return {
                "part": "a whole partition",
                "donors": entries,
                "seconds": round(time.perf_counter() - start, 2),
                "cpu_seconds": round(time.process_time() - cpu, 2),
                "redis_mib": round(redis_mib(server), 1),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--donors", type=int, nargs="+", default=[1000])
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    parts = [whole_partition] + [
        partial(measured, count=n, cluster=args.cluster) for n in args.donors
    ]
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(part(Path(folder)))
        print(rows[-1], flush=True)
        if args.out:
            write_json(args.out, {"machine": machine("redis", "numpy"), "rows": rows})


if __name__ == "__main__":
    main()
