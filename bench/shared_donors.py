"""How soon does a near-repeat of one gateway hit at the others, and what do the donors elsewhere cost a gateway?

    python bench/shared_donors.py --parts gateways --donors 1000 200000 --out bench/results/cpu/shared_donors.json

Parts:

- ``gateways``: Redis, or with ``--cluster`` three nodes, is filled with donors of other tenants, 50 to a partition, in
  the form in which a gateway writes them. Three gateways on it, each with a directory of its own, are then asked by new
  tenants: one a question, the others the same question in other words, again and again until that is a hit. `seconds`
  is the time from the first gateway's answer to the second and third one's hit, the requests included. ``--pictures``
  asks about a picture that the others get with another compression, half a second later, once.
- ``large``: ``--donors`` in one partition of a Redis 8, each with a vector. A cache that has none of them is asked for
  200 of them by vectors at cosine .97; `hits` counts those that found the donor.
- ``whole``: what it costs to bring the largest partition that is read.
- ``node``: what three gateways have of donors and answers on a cluster, with an encoder that takes no time, under load
  while a node is killed; with ``--replicas`` another one takes its place after two seconds, else it starts again after
  eight. `whole_s` is the time from the node's start, or with replicas from its end, until the cluster takes writes to
  all slots; `recovery_s` until in each of twelve partitions what one computes then is a near-repeat and an answer's
  hit at another.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import redis
from common import ROOT, machine, write_json
from gateway_faults import Upstream, serving

sys.path.insert(0, str(ROOT / "tests"))
from redis.crc import key_slot

from gateway_helpers import wait_until
from redis_server import RedisCluster, RedisServer, redis_8
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.keys import Keyed, entry_of
from semkv.stores.catalog import Record
from semkv.tiers.sharing import MOST, Place, dump, load, tenant_name
from semkv.types import Namespace, Request, Role, TextSegment
from semkv_gateway.donors import RedisDonors, open_donors
from semkv_gateway.response_cache import ResponseCache
from semkv_gateway.responses.redis import connect
from semkv_gateway.responses.spread import SpreadStore
from semkv_gateway.responses.store import StoredResponse
from sharing_helpers import Again, Cache

SECRET = b"x" * 16
PER_PARTITION = 50
TRIALS = 20
TIMEOUT_S = 0.5  # of the stores, where a node is killed
SOON_S = 0.5
QUESTION = "How do I bake sourdough bread at home?"
REWORDED = "How can I bake sourdough bread at home?"
DIM = 384
PARTITIONS = 12


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
    ends = [str(store.removals(part, Place()).end) for part in range(store.parts)]
    firsts = itertools.islice(donors(count, 1), count // PER_PARTITION)
    filled = 0
    for partition, data in firsts:
        since = ends[store.part_of(partition)]
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


def ask(url: str, content: Any, tenant: str, **headers: str) -> httpx.Response:
    body = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": content}]}
    headers = {"Authorization": f"Bearer {tenant}", **headers}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def picture(number: int, quality: int) -> list[dict[str, Any]]:
    """A question about a drawn picture; of one number all show the same."""
    from PIL import Image, ImageDraw

    random = np.random.default_rng(number)
    image = Image.new("RGB", (320, 240), tuple(random.integers(0, 255, 3).tolist()))
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        left, top = random.integers(0, 240, 2).tolist()
        width, height = random.integers(20, 80, 2).tolist()
        colour = tuple(random.integers(0, 255, 3).tolist())
        draw.rectangle((left, top, left + width, top + height), fill=colour)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    data = base64.b64encode(file.getvalue()).decode()
    return [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}},
        {"type": "text", "text": "What does this picture show?"},
    ]


def until_hits(urls: Sequence[str], contents: tuple[Any, Any], tenant: str) -> list[float]:
    """Seconds from the first gateway's answer until each of the others has a hit; infinite after 30."""
    first, second = contents
    ask(urls[0], first, tenant)
    start = time.perf_counter()

    def until_hit(url: str) -> float:
        while "hit" not in said(ask(url, second, tenant, **{"Cache-Control": "only-if-cached"})):
            if time.perf_counter() - start > 30:
                return float("inf")
            time.sleep(0.1)  # the machine has to do what is asked
        return time.perf_counter() - start

    with ThreadPoolExecutor() as asking:
        return list(asking.map(until_hit, urls[1:]))


def hits_soon(urls: Sequence[str], contents: tuple[Any, Any], tenant: str) -> list[float]:
    """The same of pictures, for which a gateway that may store nothing looks for no donor: each of the others is asked
    once, after a while. Infinite for a miss."""
    first, second = contents
    ask(urls[0], first, tenant)
    start = time.perf_counter()
    time.sleep(SOON_S)

    def once(url: str) -> float:
        is_hit = "hit" in said(ask(url, second, tenant))
        return time.perf_counter() - start if is_hit else float("inf")

    with ThreadPoolExecutor() as asking:
        return list(asking.map(once, urls[1:]))


def said(answer: httpx.Response) -> str:
    return answer.headers.get("x-semkv", "")


@contextmanager
def gateways(folder: Path, count: int, *flags: str) -> Iterator[tuple[list[str], list[int]]]:
    """URLs and process ids of gateways with directories of their own."""
    with ExitStack() as stack:
        up = Upstream()
        stack.enter_context(up())
        given = ("--encoder-timeout", "5", "--similarity-threshold", "0.8", *flags)
        running = [
            stack.enter_context(serving(folder / f"gateway {number}", up, *given))
            for number in range(count)
        ]
        yield [url for url, _ in running], [process.pid for _, process in running]


def measured(folder: Path, *, count: int, cluster: bool, pictures: bool) -> dict[str, Any]:
    kind = RedisCluster if cluster else RedisServer
    layer = ("--embedding-layer", "vision:512:0.9", "--embedding-hook", "vision")
    seeing = (*layer, "--vision-encoder", "small") if pictures else ()
    with (
        kind(folder) as server,
        gateways(folder, 3, "--store", server.url, *seeing) as (urls, pids),
    ):
        until_hits(urls, (QUESTION, REWORDED), "warm up")
        before = resident_mib(pids[-1])
        store = open_donors(server.url, 10.0, SECRET, store_bytes=16 << 30)
        assert store is not None
        partitions = fill(store, count)
        seconds: list[float] = []
        for number in range(TRIALS):
            tenant = f"tenant {number}"
            if pictures:
                shown = (picture(number, 95), picture(number, 75))
                seconds += hits_soon(urls, shown, tenant)
            else:
                seconds += until_hits(urls, (QUESTION, REWORDED), tenant)
        return {
            "part": "gateways",
            "gateways": 3,
            "cluster": cluster,
            "pictures": pictures,
            "donors": count,
            "partitions": partitions,
            "redis_mib": round(redis_mib(server), 1),
            "seconds": [round(one, 3) for one in sorted(seconds) if one < float("inf")],
            "misses": seconds.count(float("inf")),
            "mib_before": round(before, 1),
            "mib_after": round(resident_mib(pids[-1]), 1),
            "load_average": os.getloadavg()[0],
        }


# -- one partition that is searched -----------------------------------------------------------------------------------


class Known:
    """A text encoder with given vectors. The vector of ``near N`` has a cosine of .97 with that of donor N."""

    dim = DIM
    fingerprint = "bench"

    def __init__(self) -> None:
        self.vectors: dict[int, np.ndarray] = {}

    def fits(self, text: str) -> bool:
        return bool(text)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        return np.stack([self._near(int(text.rpartition(" ")[2])) for text in texts])

    def _near(self, number: int) -> np.ndarray:
        own = self.vectors[number]
        other = np.random.default_rng(number + 1).normal(size=DIM)
        other -= (other @ own) * own
        near = 0.97 * own + (1 - 0.97**2) ** 0.5 * other / np.linalg.norm(other)
        return near.astype(np.float32)


def large_partition(folder: Path, *, count: int) -> dict[str, Any]:
    encoder = Known()
    with RedisServer(folder, program=redis_8()) as server:
        store = RedisDonors(server.url, timeout_s=60.0, max_bytes=16 << 30, vector_sets=True)
        config = CacheConfig(folder / "cold", guards=False, similarity_threshold=0.9)
        with SemanticCache(
            config, text_encoder=encoder, shared=store, shared_limit_s=60.0
        ) as cache:
            wait_until(cache._sharing._followed.is_set)
            since = str(store.removals(0, Place()).end)
            start = time.perf_counter()
            with ThreadPoolExecutor(4) as adding:
                for number, (partition, data) in enumerate(donors(count, count)):
                    row = load(data)
                    vector = np.frombuffer(row.vectors["semantic_text@bench"], "<f4")
                    encoder.vectors[number] = vector
                    entry_id = row.entry.entry_id
                    adding.submit(store.add_item, partition, data, since, entry_id, vector)
            filled_s = time.perf_counter() - start
            before = resident_mib(os.getpid())
            asked = np.random.default_rng(1).permutation(count)[:200]
            seconds = []
            right = 0
            for number in asked.tolist():
                start = time.perf_counter()
                report = cache.try_reuse(asked_near(number))
                seconds.append(time.perf_counter() - start)
                right += f"article {number} of" in report.plan.segments[-1].text
            return {
                "part": "large partition",
                "donors": count,
                "add_ms": round(1000 * filled_s / count, 2),
                "redis_mib": round(redis_mib(server), 1),
                "asked": len(asked),
                "hits": right,
                "median_ms": round(1000 * statistics.median(seconds), 1),
                "worst_ms": round(1000 * max(seconds), 1),
                "entries_here": cache.stats().entries,
                "mib_more": round(resident_mib(os.getpid()) - before, 1),
                "load_average": os.getloadavg()[0],
            }


def asked_near(number: int) -> Request:
    request = question_of(0, number)
    history = request.segments[0]
    return Request("", request.namespace, (history, TextSegment(f"near {number}")))


# -- a node that is killed --------------------------------------------------------------------------------------------


class Member:
    """What a gateway has of donors and answers on a cluster, with an encoder that takes no time."""

    def __init__(self, folder: Path, url: str) -> None:
        donors_store = open_donors(url, TIMEOUT_S, SECRET, store_bytes=1 << 30)
        self.semantic = Cache(folder, donors_store, limit_s=TIMEOUT_S)
        self.answers = ResponseCache(SpreadStore(url, timeout_s=TIMEOUT_S))

    def compute(self, topic: str, history: str) -> None:
        """Record a prompt with its answer."""
        report = self.semantic.look(topic, history=history)
        self.semantic.cache.add_observation(report, f"of {topic}")
        key = f"{history} {topic}"
        payload = key.encode()
        answer = StoredResponse(key, "ours", "model", payload, created=time.time())
        self.answers.keep_all([(answer, self.answers.begin())])

    def near(self, topic: str, history: str) -> str:
        """``hit``, ``miss`` or ``wrong`` for a near-repeat of a topic."""
        donor = self.semantic.look(f"{topic}~0.95", history=history).donor_response
        if donor is None:
            return "miss"
        return "hit" if donor == f"of {topic}" else "wrong"

    def exact(self, topic: str, history: str) -> str:
        """The same for the answer, from the store or from memory."""
        key = f"{history} {topic}"
        found = self.answers.lookup(key)
        if found is None:
            return "miss"
        return "hit" if found.response.payload == key.encode() else "wrong"

    def close(self) -> None:
        self.answers.close()
        self.semantic.cache.close()


class Load(Again):
    """Lets one of several gateways compute and another look, and notes each outcome until it is stopped."""

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(*(partial(self._ask, number) for number in range(len(members))))
        self.members = members
        self.seen: Counter[str] = Counter()

    def taken(self) -> dict[str, int]:
        """What was seen since the last time."""
        seen = dict(self.seen)
        self.seen.clear()
        return seen

    def _ask(self, number: int, count: int) -> None:
        topic = f"load{number}x{count}"
        history = f"History {count % PARTITIONS}."
        self.members[number].compute(topic, history)
        time.sleep(0.05)
        other = self.members[(number + 1) % len(self.members)]
        self.seen[f"near {other.near(topic, history)}"] += 1
        self.seen[f"exact {other.exact(topic, history)}"] += 1


def until_whole(url: str, slot_range: int) -> float:
    """Seconds until the cluster takes a write to a third of its slots."""
    start = time.perf_counter()
    key = next(
        k for k in map(str, itertools.count()) if key_slot(k.encode()) * 3 // 16384 == slot_range
    )
    while True:
        try:
            client = connect(url, 1.0)
            client.set(key, "x")
            client.close()
            return time.perf_counter() - start
        except (redis.RedisError, redis.exceptions.RedisClusterException):
            time.sleep(0.05)


def until_all_recover(members: Sequence[Member]) -> float:
    """Seconds until in each partition what one computes then is a near-repeat and a hit at another."""
    start = time.perf_counter()

    def one(number: int) -> None:
        history = f"History {number}."
        for count in itertools.count():
            topic = f"after{number}x{start:.0f}x{count}"
            members[0].compute(topic, history)
            time.sleep(0.1)
            hits = [members[1].near(topic, history), members[1].exact(topic, history)]
            if hits == ["hit", "hit"]:
                return

    with ThreadPoolExecutor(PARTITIONS) as asking:
        list(asking.map(one, range(PARTITIONS)))
    return time.perf_counter() - start


def killed_node(folder: Path, *, number: int, replicas: bool) -> dict[str, Any]:
    with ExitStack() as stack:
        cluster = stack.enter_context(RedisCluster(folder, replicas=replicas))
        members = [Member(folder / f"member {name}", cluster.url) for name in "abc"]
        for member in members:
            stack.callback(member.close)
        until_all_recover(members)
        load_on = stack.enter_context(Load(members))
        time.sleep(5)
        before = load_on.taken()
        cluster.nodes[number].kill()
        start = time.perf_counter()
        if not replicas:
            time.sleep(8)
            cluster.nodes[number].start()
            start = time.perf_counter()
        whole = until_whole(cluster.url, number)
        until_all_recover(members)
        recovery = time.perf_counter() - start
        during = load_on.taken()
        time.sleep(5)
        return {
            "part": "node killed under load",
            "replicas": replicas,
            "node": number,
            "whole_s": round(whole, 2),
            "recovery_s": round(recovery, 2),
            "before": before,
            "until_recovery": during,
            "after": load_on.taken(),
            "load_average": os.getloadavg()[0],
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
            wait_until(cache._sharing._followed.is_set)
            since = str(store.removals(0, Place()).end)
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
    parser.add_argument("--parts", nargs="+", default=["gateways"])
    parser.add_argument("--donors", type=int, nargs="+", default=[1000])
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--pictures", action="store_true")
    parser.add_argument("--replicas", action="store_true")
    parser.add_argument("--out", type=Path, help="rows that are there stay")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if args.out and args.out.exists():
        rows = json.loads(args.out.read_text())["rows"]
    of_many = partial(measured, cluster=args.cluster, pictures=args.pictures)
    runs: dict[str, list[Callable[[Path], dict[str, Any]]]] = {
        "gateways": [partial(of_many, count=count) for count in args.donors],
        "large": [partial(large_partition, count=count) for count in args.donors],
        "whole": [whole_partition],
        "node": [partial(killed_node, number=n, replicas=args.replicas) for n in (0, 1)],
    }
    for part in args.parts:
        for run in runs[part]:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run(Path(folder)))
            print(rows[-1], flush=True)
            if args.out:
                write_json(args.out, {"machine": machine("redis", "numpy"), "rows": rows})


if __name__ == "__main__":
    main()
