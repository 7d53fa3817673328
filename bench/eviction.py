"""Which eviction policy keeps the most useful extents: hit rates of LRU, ARC, S3-FIFO and GDSF over drawn workloads.

A request names an extent; a hit needs it to be there. Sizes are those of KV extents (a document or an image with its
questions: 0.2 to 40 MB, log-uniform), and what a hit saves is proportional to its bytes. ``bytes`` is the share of
requested bytes that were there, which is what a KV store is for; ``requests`` the share of requests.

ARC: Megiddo and Modha, FAST 2003. S3-FIFO: Yang et al., SOSP 2023. GDSF: Cherkasova, HP Labs 98-69R1, with the cost
of an extent proportional to its bytes, so that its priority is ``clock + uses`` (LFU with dynamic aging). ``semkv`` is
the index of a store itself, which does ARC in SQLite.

    python bench/eviction.py --out bench/results/eviction.json
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import struct
import tempfile
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.progress import track

from semkv.stores.block_index import BlockIndex, NewExtent
from semkv.stores.bounds import Bounds


class Policy(Protocol):
    def request(self, key: int, size: int) -> bool:
        """Whether ``key`` was there; it is afterwards, if it fits."""
        ...


class Lru:
    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.items = limit, 0, OrderedDict[int, int]()

    def request(self, key: int, size: int) -> bool:
        if key in self.items:
            self.items.move_to_end(key)
            return True
        while self.items and self.used + size > self.limit:
            self.used -= self.items.popitem(last=False)[1]
        self.items[key] = size
        self.used += size
        return False


class Gdsf:
    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.clock = limit, 0, 0.0
        self.items: dict[int, tuple[int, int, float]] = {}
        self.heap: list[tuple[float, int]] = []

    def request(self, key: int, size: int) -> bool:
        hit = key in self.items
        uses = self.items[key][1] + 1 if hit else 1
        if not hit:
            while self.items and self.used + size > self.limit:
                priority, victim = heapq.heappop(self.heap)
                if victim in self.items and self.items[victim][2] == priority:
                    self.clock = priority
                    self.used -= self.items.pop(victim)[0]
            self.used += size
        self.items[key] = (size, uses, self.clock + uses)
        heapq.heappush(self.heap, (self.clock + uses, key))
        return hit


class S3Fifo:
    def __init__(self, limit: int) -> None:
        self.limit, self.small_limit = limit, limit // 10
        self.small, self.main = deque[int](), deque[int]()
        self.size: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.where: dict[int, str] = {}
        self.bytes = {"small": 0, "main": 0}
        self.ghost = OrderedDict[int, int]()
        self.ghost_bytes = 0

    def request(self, key: int, size: int) -> bool:
        if key in self.where:
            self.uses[key] = min(3, self.uses[key] + 1)
            return True
        while self.where and sum(self.bytes.values()) + size > self.limit:
            if self.bytes["small"] > self.small_limit or not self.main:
                self._evict_small()
            else:
                self._evict_main()
        self._insert(key, size, "main" if key in self.ghost else "small")
        return False

    def _insert(self, key: int, size: int, queue: str) -> None:
        (self.small if queue == "small" else self.main).append(key)
        self.where[key], self.size[key], self.uses[key] = queue, size, 0
        self.bytes[queue] += size

    def _evict_small(self) -> None:
        while self.small:
            key = self.small.popleft()
            size = self.size[key]
            self.bytes["small"] -= size
            if self.uses[key] > 1:
                self._insert(key, size, "main")
                continue
            del self.where[key]
            self.ghost[key] = size
            self.ghost_bytes += size
            while self.ghost_bytes > self.limit:
                self.ghost_bytes -= self.ghost.popitem(last=False)[1]
            return

    def _evict_main(self) -> None:
        while self.main:
            key = self.main.popleft()
            if self.uses[key] > 0:
                self.uses[key] -= 1
                self.main.append(key)
                continue
            self.bytes["main"] -= self.size[key]
            del self.where[key]
            return


class Arc:
    """ARC with lists bounded in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.target = limit, 0.0
        self.lists = {name: OrderedDict[int, int]() for name in ("t1", "t2", "b1", "b2")}
        self.bytes = dict.fromkeys(self.lists, 0)

    def _pop(self, name: str, key: int | None = None) -> tuple[int, int]:
        found = self.lists[name].popitem(last=False) if key is None else (key, self.lists[name].pop(key))
        self.bytes[name] -= found[1]
        return found

    def _put(self, name: str, key: int, size: int) -> None:
        self.lists[name][key] = size
        self.bytes[name] += size

    def _make_room(self, size: int, from_b2: bool) -> None:
        while self.bytes["t1"] + self.bytes["t2"] + size > self.limit and (self.lists["t1"] or self.lists["t2"]):
            over = self.bytes["t1"] > self.target or (from_b2 and self.bytes["t1"] >= self.target > 0)
            name = "t1" if self.lists["t1"] and (over or not self.lists["t2"]) else "t2"
            self._put("b1" if name == "t1" else "b2", *self._pop(name))
        for ghost in ("b1", "b2"):
            while self.bytes[ghost] > self.limit:
                self._pop(ghost)

    def request(self, key: int, size: int) -> bool:
        for name in ("t1", "t2"):
            if key in self.lists[name]:
                self._put("t2", *self._pop(name, key))
                return True
        in_b1, in_b2 = key in self.lists["b1"], key in self.lists["b2"]
        if in_b1:
            self.target = min(self.limit, self.target + size * max(1.0, self.bytes["b2"] / max(1, self.bytes["b1"])))
            self._pop("b1", key)
        elif in_b2:
            self.target = max(0.0, self.target - size * max(1.0, self.bytes["b1"] / max(1, self.bytes["b2"])))
            self._pop("b2", key)
        self._make_room(size, in_b2)
        self._put("t2" if in_b1 or in_b2 else "t1", key, size)
        return False


class Store:
    """The index of a real store directory, with its transactions; nothing is written but the index."""

    def __init__(self, limit: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.index = BlockIndex(Path(self.folder.name) / "index.sqlite", lambda: ())
        self.bounds = Bounds(max_bytes=limit)

    def request(self, key: int, size: int) -> bool:
        block = struct.pack(">Q", key)
        (ref,) = self.index.find("ns", [block])
        if ref is not None:
            self.index.touch([ref.extent], again=True)
            return True
        new = NewExtent(uuid.uuid4().hex, "ns", 1, size, 0, block)
        if self.index.reserve(new, self.bounds, lambda extent: None).granted:
            self.index.commit(new, [block])
        return False


POLICIES: dict[str, Callable[[int], Policy]] = {"lru": Lru, "arc": Arc, "s3fifo": S3Fifo, "gdsf": Gdsf, "semkv": Store}


def zipf(rng: np.random.Generator, n: int, keys: int, exponent: float) -> np.ndarray:
    weights = 1 / np.arange(1, keys + 1) ** exponent
    return rng.choice(keys, n, p=weights / weights.sum())


def workloads(n: int, keys: int, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Requests over ``keys`` extents; what is read once has keys of its own."""
    rng = np.random.default_rng(seed)
    for exponent in (0.7, 0.9, 1.1):
        yield f"zipf {exponent}", zipf(rng, n, keys, exponent)
    once = zipf(rng, n, keys, 0.9)
    alone = rng.random(n) < 0.3
    once[alone] = keys + np.arange(int(alone.sum()))
    yield "zipf 0.9 + 30% once", once
    scanned = zipf(rng, n, keys, 0.9)
    for start in range(0, n, n // 5):
        scanned[start : start + keys // 4] = keys + np.arange(keys // 4)  # a data set walked through, again and again
    yield "zipf 0.9 + scans", scanned
    drift = zipf(rng, n, keys, 0.9)
    yield "zipf 0.9, drifting", (drift + np.arange(n) * keys // n) % keys
    # Users who stay with one picture for a while, 31.6 questions each as in GQA, eight at a time.
    yield "sessions", np.repeat(zipf(rng, n // 30 + 1, keys, 0.7), 32)[:n].reshape(-1, 8, 4).transpose(0, 2, 1).ravel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16_000)
    parser.add_argument("--keys", type=int, default=1_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for seed in track(range(args.seeds), "Seeds"):
        rng = np.random.default_rng(1000 + seed)
        for name, keys in workloads(args.requests, args.keys, seed):
            sizes = np.exp(rng.uniform(np.log(2e5), np.log(4e7), int(keys.max()) + 1)).astype(np.int64)
            unique = int(sizes[: args.keys].sum())
            for share in (0.02, 0.1, 0.3):
                for policy, make in POLICIES.items():
                    cache = make(int(unique * share))
                    hits = np.array([cache.request(int(k), int(sizes[k])) for k in keys])
                    asked = sizes[keys]
                    rows.append((name, share, policy, float(hits.mean()), float(asked[hits].sum() / asked.sum())))
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name, share, policy, _, _ in rows:
        found = [(r, b) for n, s, p, r, b in rows if (n, s, p) == (name, share, policy)]
        mean = np.mean(found, axis=0)
        table.setdefault(f"{name}, {share:.0%} fits", {})[policy] = {
            "requests": round(float(mean[0]), 4),
            "bytes": round(float(mean[1]), 4),
        }
    document = {
        "settings": {k: str(v) for k, v in vars(args).items() if k != "out"},
        "python": platform.python_version(),
        "hit_rates": table,
    }
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name, found in table.items():
        print(f"{name:34}", *(f"{p} {v['requests']:.3f}/{v['bytes']:.3f}" for p, v in found.items()), sep="  ")


if __name__ == "__main__":
    main()
