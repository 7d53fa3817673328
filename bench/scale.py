"""What does a deployment of many gateways and replicas find, how fast is it, and what of it breaks first?

    python bench/scale.py                                        (two gateways, three replicas, one minute)
    python bench/scale.py --trace mine.jsonl --gateways 4 --replicas 8 --bucket 50000000
    python bench/scale.py --check --out bench/results/cpu/scale-check.json
    python bench/scale.py --large --out bench/results/cpu/scale-large.json

Plays a trace on a clock that jumps (`scale_model`). ``--check`` also plays it in real time: real gateways, a real
Redis, and replicas that take a known time, each in a process of its own. It measures first what a lookup and a request
to Redis take there, and during the run what a hit and an encoded text take: beside other work they wait for a
processor, each for another time. It exits with 1 where the model is off by more than 10% in hits, or 25% in times.
``--large`` plays 100 replicas, and reckons what 100 million donors are to each part: they are not played one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import redis
import uvicorn
from common import ROOT, machine, write_json
from gateway import free_port, gateway, process
from scale_model import DONOR_BYTES, Costs, Replica, Row, Sizes, prompt_in, replay, summary
from scale_trace import TOKEN_BYTES, Asked, Judgement, Shape, drawn, read, wordings

from semkv.tiers import sharing
from semkv_gateway import donors
from semkv_gateway.settings import ServerSettings
from semkv_vllm.bucket_log import POLL_S

sys.path.insert(0, str(ROOT / "tests"))
from redis_server import RedisServer
from scripted_upstream import chunks

THRESHOLD = 0.9
OFF_HITS, OFF_TIMES = 0.10, 0.25
CALIBRATED = 8  # requests of each kind
_STORED = 6  # texts; with fewer a lookup may do without the encoder
_PATIENCE_S = 60.0
_HITS_S, _ENCODED_S = 0.25, 1.5  # mean pauses between requests that are measured during a run
CHECK = {
    "device": 3_000,
    "host": 100_000,
    "seconds": 80.0,
    "rate": 1.2,
    "classes": 20,
    "step": 0.3,
    "token": 0.0015,
    "from_host": 0.0002,
    "decode": 0.005,
}
"""Of a check: replicas that are slow beside what a busy machine adds, and hold less than is asked."""
NODE_GIB = 32
NODE_SHARE = 0.6  # of a node's memory that data may take
DAY_S = 86_400
MONTH_S = 30 * DAY_S
PUT_PRICE, GET_PRICE = 0.005, 0.0004
"""Dollars for a thousand requests: puts and lists, gets. S3's list price in us-east-1."""
GIB_PRICE = 0.023  # for a month
INDEX_BYTES = 170  # of a block in the index of each machine (docs/operations.md)
Found = dict[str, Any]


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


# -- a real run -------------------------------------------------------------------------------------------------------


class Scripted:
    """A server in front of a `Replica`, which takes its time."""

    def __init__(self, replica: Replica, costs: Costs) -> None:
        self._replica = replica
        self._costs = costs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/v1/models":
            await _send_json(send, {"data": [{"id": "scripted"}]})
        elif path == "/figures":
            await _send_json(send, {"tokens": self._replica.tokens})
        elif path == "/health":
            await _send_json(send, {})
        else:
            await self._answer(await _body(receive), send)

    async def _answer(self, body: bytes, send: Any) -> None:
        wanted = json.loads(body)
        seed, prompt, tokens = prompt_in(wanted)
        await self._replica.prefill(seed, prompt)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        text = "x" * tokens * TOKEN_BYTES
        for number, chunk in enumerate(chunks(wanted, text, {})):
            event = f"data: {json.dumps(chunk)}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if number == 0:
                await asyncio.sleep(tokens * self._costs.decode)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _send_json(send: Any, value: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})


async def _body(receive: Any) -> bytes:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def serve_replicas(ports: Sequence[int], sizes: Sizes, costs: Costs) -> None:
    servers = []
    for port in ports:
        app: Any = Scripted(Replica(sizes, costs, None), costs)
        config = uvicorn.Config(app, port=port, log_level="warning", lifespan="off")
        servers.append(uvicorn.Server(config))
    await asyncio.gather(*(server.serve() for server in servers))


@contextmanager
def deployment(sizes: Sizes, costs: Costs) -> Iterator[tuple[list[str], list[str], RedisServer]]:
    """Real gateways (their URLs), replicas (theirs) and a Redis."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(RedisServer(folder))
        ports = [free_port() for _ in range(sizes.replicas)]
        command = [sys.executable, __file__, "--serve", *map(str, ports)]
        given = {"SCALE_SIZES": json.dumps(asdict(sizes)), "SCALE_COSTS": json.dumps(asdict(costs))}
        upstreams = [f"http://127.0.0.1:{port}" for port in ports]
        stack.enter_context(process(command, f"{upstreams[-1]}/health", **given))
        flags = [word for upstream in upstreams[1:] for word in ("--upstream", upstream)]
        flags += ["--store", server.url, "--similarity-threshold", str(THRESHOLD), "--tiers", "all"]
        flags += ["--encoder-timeout", "10", "--store-timeout", "2"]
        urls = []
        for number in range(sizes.gateways):
            port = free_port()
            begin = gateway(folder / f"gateway-{number}", port, upstreams[0], *flags)
            health = f"http://127.0.0.1:{port}/healthz"
            stack.enter_context(process(begin, health, SEMKV_SECRET="x" * 16))
            urls.append(f"http://127.0.0.1:{port}")
            say(f"gateway {number + 1} of {sizes.gateways} runs")
        yield urls, upstreams, server


async def ask(
    session: aiohttp.ClientSession, url: str, asked: Asked, *, stored: bool = False
) -> Row:
    """What a gateway did with a request, and when its first token came. With ``stored`` it asks no replica."""
    headers = {"Authorization": f"Bearer {asked.tenant}", "Content-Type": "application/json"}
    if stored:
        headers["Cache-Control"] = "only-if-cached"
    start = time.perf_counter()
    target = f"{url}/v1/chat/completions"
    async with session.post(target, data=asked.body(), headers=headers) as answer:
        await answer.content.readany()
        seconds = time.perf_counter() - start
        await answer.read()
        if answer.status != (504 if stored and "hit" not in answer.headers["X-Semkv"] else 200):
            raise SystemExit(f"a gateway answered {answer.status}")
    return Row(_how(answer.headers["X-Semkv"]), seconds)


def _how(said: str) -> str:
    words = said.split()
    if "joined" in words:
        return "joined"
    if words[0] != "hit":
        return "miss"
    return "stored" if "tier=exact" in words else "near"


def sessions() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=120)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def play_really(
    trace: Sequence[Asked], urls: Sequence[str], costs: Costs, judgement: Judgement
) -> tuple[list[Row], Costs]:
    """What came of a trace, and what hits and encoded texts took meanwhile."""
    running = []
    async with sessions() as session:
        hits = asyncio.ensure_future(_hits(session, urls, judgement))
        encoded = asyncio.ensure_future(_encoded(session, urls[0]))
        start = time.perf_counter()
        for number, asked in enumerate(trace):
            await asyncio.sleep(max(0.0, start + asked.at - time.perf_counter()))
            running.append(asyncio.ensure_future(ask(session, urls[number % len(urls)], asked)))
            if number % 20 == 0:
                say(f"{number} of {len(trace)} requests really asked")
        rows = await asyncio.gather(*running)
        for task in (hits, encoded):
            task.cancel()
        clients = [max(0.0, seconds - costs.hit) for seconds in await hits]
        before = median(clients) + 5 * costs.trip
        encodings = [max(costs.search, seconds - before) for seconds in await encoded]
        say(f"meanwhile {len(clients)} clients hit, and {len(encodings)} texts were looked up")
    return rows, replace(costs, clients=tuple(clients), encodings=tuple(encodings))


async def _hits(
    session: aiohttp.ClientSession, urls: Sequence[str], judgement: Judgement
) -> list[float]:
    """Times of hits in memory, until it is canceled."""
    text = judgement.pairs()[0][0]
    asked = Asked(0.0, "calibration", (("system", "Case 0."), ("user", text)), 1)
    found: list[float] = []
    try:
        while True:
            await asyncio.sleep(random.expovariate(1 / _HITS_S))
            found.append((await ask(session, urls[len(found) % len(urls)], asked)).seconds)
    except asyncio.CancelledError:
        return found


async def _encoded(session: aiohttp.ClientSession, url: str) -> list[float]:
    """Times of lookups of texts that the encoder does not know and that nobody has stored, until it is canceled."""
    found: list[float] = []
    try:
        for number in itertools.count():
            await asyncio.sleep(random.expovariate(1 / _ENCODED_S))
            text = f"What did room {number} of the old house by the river look like?"
            messages = (("system", "You know many things."), ("user", text))
            asked = Asked(0.0, "calibration", messages, 1)
            found.append((await ask(session, url, asked, stored=True)).seconds)
    except asyncio.CancelledError:
        pass
    return found


async def calibrated(urls: Sequence[str], costs: Costs, judgement: Judgement) -> Costs:
    """Costs as they are here now, from some requests of each kind, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in ("empty", "memory", "store", "near")}
    waits = []
    texts = judgement.pairs()
    async with sessions() as session:
        for number in range(-2, CALIBRATED):
            text, other = texts[number % len(texts)]
            first = Asked(0.0, "calibration", (("system", f"Case {number}."), ("user", text)), 1)
            near = first._replace(messages=(first.messages[0], ("user", other)))
            rows = [await ask(session, urls[0], first)]
            answered = time.perf_counter()
            rows += [await ask(session, urls[0], first), await ask(session, urls[1], first)]
            while (row := await ask(session, urls[1], near, stored=True)).how != "near":
                if time.perf_counter() - answered > _PATIENCE_S:
                    raise SystemExit(f"{other!r} does not find {text!r}")
                await asyncio.sleep(0.05)
            waited = time.perf_counter() - answered - row.seconds
            say(f"{number}: {[one.how for one in rows]}, found after {waited:.2f} s")
            if number < 0:  # encoders are loaded
                continue
            waits.append(waited)
            for name, one in zip(times, [*rows, row], strict=True):
                times[name].append(one.seconds)
        times["known"] = await _lookups(session, urls[0])
    mid = {name: median(seconds) for name, seconds in times.items()}
    say(", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in mid.items()))
    client = mid["memory"] - costs.hit
    # Two keys of a stream.
    trip = max(0.0001, (mid["store"] - mid["memory"]) / 2)
    # The two keys twice, the log of invalidations, donors and pairs found wrong.
    search = max(0.0, mid["near"] - mid["store"] - 4 * trip)
    miss = max(0.0, mid["empty"] - mid["memory"] - 5 * trip - costs.step - costs.unencoded)
    lookup = max(search, mid["known"] - mid["empty"] + costs.unencoded)
    known = max(0.0, median(waits) - mid["memory"] - mid["store"])
    found = {"client": client, "trip": trip, "search": search, "lookup": lookup, "miss": miss}
    return replace(costs, known=known, **found)


async def _lookups(session: aiohttp.ClientSession, url: str) -> list[float]:
    """Times of misses behind a beginning with many stored texts, each of a text that the encoder does not know."""
    times = []
    for number, (text, _) in enumerate(wordings()[-CALIBRATED - _STORED :]):
        messages = (("system", "You know many things."), ("user", text))
        row = await ask(session, url, Asked(0.0, "calibration", messages, 1))
        if number >= _STORED and row.how == "miss":
            times.append(row.seconds)
    return times


def check(trace: Sequence[Asked], sizes: Sizes, costs: Costs, seed: int) -> Found:
    judgement = Judgement(trace, THRESHOLD)
    with deployment(sizes, costs) as (urls, upstreams, server):
        costs = asyncio.run(calibrated(urls, costs, judgement))
        before = _tokens(upstreams)
        commands = _commands(server)
        rows, costs = asyncio.run(play_really(trace, urls, costs, judgement))
        really = summary(rows)
        really["kv_tokens"] = dict(_tokens(upstreams) - before)
        calls = _commands(server) - commands
        beside = 2 * len(costs.encodings)  # keys of requests that were measured beside the trace
        gets = calls["cmdstat_hmget"] - beside
        # Each donor is one XADD and three scripts, of which one has an HSET. Each answer is one, with two.
        added = calls["cmdstat_xadd"]
        scripts = (calls["cmdstat_hset"] - added) // 2 + 3 * added
        really["redis_requests"] = {"get": gets, "scripts": scripts}
    modeled = replay(trace, judgement, sizes=sizes, costs=costs, seed=seed)
    modeled["how"]["stored"] = modeled["how"].pop("memory", 0) + modeled["how"].pop("store", 0)
    asked = modeled["redis_requests"]
    scripts = asked["put"] + asked["add donor"]
    off = {
        "requests of answers": _off(asked["get"], really["redis_requests"]["get"]),
        "requests that write": _off(scripts, really["redis_requests"]["scripts"]),
    }
    off |= {"hits": _off(modeled["hits"], really["hits"])}
    total = sum(really["kv_tokens"].values())
    for place in ("device", "host", "computed"):
        own = modeled["kv_tokens"].get(place, 0) - really["kv_tokens"].get(place, 0)
        off[f"tokens {place}, of all"] = round(own / total, 3)
    for name in ("ttft", "ttft_misses", "ttft_hits"):
        for quantile, seconds in really[name].items():
            off[f"{name} {quantile}"] = _off(modeled[name][quantile], seconds)
    return {
        "costs": asdict(costs),
        "sizes": asdict(sizes),
        "really": really,
        "modeled": modeled,
        "off": off,
    }


def _tokens(upstreams: Sequence[str]) -> Counter[str]:
    """KV tokens of all replicas by the place where they were found."""
    import urllib.request

    found: Counter[str] = Counter()
    for url in upstreams:
        with urllib.request.urlopen(f"{url}/figures", timeout=30) as answer:  # noqa: S310
            found.update(json.load(answer)["tokens"])
    return found


def _commands(server: RedisServer) -> Counter[str]:
    with redis.Redis(port=server.port, socket_timeout=60.0) as client:
        stats = client.info("commandstats")
    return Counter({name: values["calls"] for name, values in stats.items()})


def _off(modeled: float, really: float) -> float:
    return round(modeled / really - 1, 3) if really else float(modeled != 0)


def verdict(off: dict[str, float]) -> list[str]:
    """What the model is too far off in. The slowest hits are a handful, whose times are only told."""
    bounds = {name: OFF_TIMES for name in off if name.startswith("ttft ")}
    bounds["ttft_hits p50"] = OFF_TIMES
    bounds |= {name: OFF_TIMES for name in off if name.startswith("ttft_misses")}
    bounds |= {name: OFF_HITS for name in off if not name.startswith("ttft")}
    return [name for name, bound in bounds.items() if abs(off[name]) > bound]


# -- a hundred replicas, a hundred million donors ---------------------------------------------------------------------


def large(found: Found, sizes: Sizes, costs: Costs, total: int) -> Found:
    """What a replay of a large deployment, and so many donors, are to each part of it."""
    return {
        "donors": [_donors(count, sizes) for count in (10**5, 10**6, 10**7, total)],
        "partitions": [_partition(classes) for classes in (10**3, 10**4, 10**5, 10**6)],
        "bucket": _bucket(found, sizes, costs),
        "parts": _parts(found, sizes, costs, total),
    }


def _donors(count: int, sizes: Sizes) -> Found:
    """What donors are to Redis. They are kept for a day, so there are as many as misses in one."""
    nbytes = count * DONOR_BYTES
    bound = ServerSettings.store_mib << 20
    kept = min(1.0, bound / donors._SHARE / nbytes)
    return {
        "donors": count,
        "misses_a_second": round(count / donors._KEPT_S, 1),
        "redis_gib": round(nbytes / (1 << 30), 1),
        "nodes": -(-nbytes // int(NODE_GIB * NODE_SHARE * (1 << 30))),
        "kept_by_default": round(kept, 4),
        "store_mib_for_all": -(-nbytes * donors._SHARE // (1 << 20)),
        "share_that_a_gateway_holds": round(min(1.0, sizes.max_entries / count), 4),
    }


def _partition(classes: int, exponent: float = 1.0) -> Found:
    """Near-repeats that a bounded partition finds, where so many questions are asked by Zipf's law behind one prompt.

    Rows go in the order in which they came, and a question that hits adds none. In such a queue of C rows a question
    with the share p is there with the chance pT / (1 + pT), where T makes the sum of these C (as for random eviction,
    Gelenbe 1973).
    """
    weights = [(1 + number) ** -exponent for number in range(classes)]
    total = sum(weights)
    shares = [weight / total for weight in weights]
    rows = min(sharing.MOST, classes)
    if rows == classes:
        return {"questions": classes, "found": 1.0}
    low, high = 0.0, 1e12
    for _ in range(60):
        middle = (low + high) / 2 if high - low < 1e6 else (low * high or high) ** 0.5
        held = sum(share * middle / (1 + share * middle) for share in shares)
        low, high = (middle, high) if held < rows else (low, middle)
    found = sum(share * share * low / (1 + share * low) for share in shares)
    return {"questions": classes, "found": round(found, 3)}


def _bucket(found: Found, sizes: Sizes, costs: Costs) -> Found:
    """Requests and price of a bucket, for KV and encoder outputs of all machines."""
    resting = 2 * sizes.replicas / POLL_S
    each = {name: count / found["seconds"] for name, count in found["bucket_requests"].items()}
    puts = each["put file"] + 2 * each["put record"] + resting
    gets = each["get record"]
    price = puts * PUT_PRICE + gets * GET_PRICE
    tokens = found["kv_tokens"].get("computed", 0) / found["seconds"]
    kv_gib = tokens * DAY_S * costs.token_bytes / (1 << 30)
    blocks = (1 << 40) / (16 * costs.token_bytes)
    return {
        "lists_a_second_at_rest": resting,
        "dollars_a_month_at_rest": round(resting * PUT_PRICE / 1000 * MONTH_S),
        "files_a_second": round(each["put file"], 1),
        "records_a_second": round(each["put record"], 1),
        "gets_of_records_a_second": round(gets, 1),
        "dollars_a_month": round(price / 1000 * MONTH_S),
        "computed_kv_gib_a_day": round(kv_gib),
        "minutes_until_1_tib": round(1440 * 1024 / kv_gib, 2) if kv_gib else None,
        "dollars_a_month_for_1_tib": round(1024 * GIB_PRICE),
        "blocks_in_1_tib": round(blocks),
        "index_mib_of_each_machine": round(blocks * INDEX_BYTES / (1 << 20)),
        "replay_s_of_a_cold_machine": round(25 * blocks / 1e6),
    }


def _parts(found: Found, sizes: Sizes, costs: Costs, total: int) -> list[Found]:
    """Each part with the share of it that is used, the fullest first."""
    busy = found["busy"]
    answers, nbytes = found["redis_answers"]
    misses = found["how"].get("miss", 0) / found["seconds"]
    each = nbytes / max(1, answers)
    by_default = ServerSettings.store_mib << 20
    node = NODE_GIB * NODE_SHARE * (1 << 30)
    traffic = sum(found["redis_bytes"].values()) / found["seconds"]
    used = {
        "bytes of donors (a quarter of --store-mib, by default)": total
        * DONOR_BYTES
        / (by_default / donors._SHARE),
        "a gateway's --max-entries, of all donors": total / sizes.max_entries,
        f"memory of {sizes.nodes} Redis nodes, donors": total * DONOR_BYTES / (node * sizes.nodes),
        f"memory of {sizes.nodes} Redis nodes, a day's answers": misses
        * DAY_S
        * each
        / (node * sizes.nodes),
        "a day's answers in --store-mib, by default": misses * DAY_S * each / by_default,
        "a replica's prefill": busy["replica"],
        "processor of the busiest Redis node": busy["redis"],
        "a gateway's event loop": busy["gateway"],
        "a gateway's lookups": busy["lookups"],
        "network of Redis, of 10 Gbit/s": traffic * 8 / 1e10,
    }
    rows = [{"part": part, "used": round(share, 4)} for part, share in used.items()]
    return sorted(rows, key=lambda row: -row["used"])


# -- the command ------------------------------------------------------------------------------------------------------


def show(found: Found) -> None:
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}: " + ", ".join(f"{key} {one}" for key, one in value.items()))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            columns = list(value[0])
            print(f"{name}:\n| " + " | ".join(columns) + " |")
            print("|" + "---|" * len(columns))
            for row in value:
                print("| " + " | ".join(str(row.get(column, "")) for column in columns) + " |")
        else:
            print(f"{name}: {value}")


LARGE = {
    "gateways": 20,
    "replicas": 100,
    "nodes": 3,
    "bucket": 100_000_000,
    "peers": 1,
    "block_tokens": 256,
    "seconds": 30.0,
    "rate": 300.0,
    "tenants": 500,
    "classes": 20_000,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="lines of JSON; by default one is drawn")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--donors", type=int, default=10**8, help="of --large")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=int, nargs="+", help=argparse.SUPPRESS)
    for kind in (Sizes, Shape, Costs):
        group = parser.add_argument_group(kind.__name__.lower())
        for one in fields(kind):
            group.add_argument(f"--{one.name.replace('_', '-')}", type=type(one.default))
    return parser


_COUNTED = "gateways replicas nodes block_tokens lookups rate seconds tenants classes turns".split()


def _check(made: Sequence[Any]) -> None:
    """End where a number is none that a deployment can have."""
    for name, value in (pair for one in made for pair in vars(one).items()):
        if isinstance(value, tuple):
            continue
        least = 1e-9 if name in _COUNTED else 0
        if not least <= value < float("inf"):
            raise SystemExit(f"--{name.replace('_', '-')}: {value} is not allowed")


def _read(path: Path) -> list[Asked]:
    try:
        return read(path)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"--trace: {path} is no trace ({error})") from None


def main() -> None:
    args = _parser().parse_args()
    if args.serve:
        sizes = Sizes(**json.loads(os.environ["SCALE_SIZES"]))
        costs = Costs(**json.loads(os.environ["SCALE_COSTS"]))
        asyncio.run(serve_replicas(args.serve, sizes, costs))
        return
    given = LARGE if args.large else CHECK if args.check else {}
    made: list[Any] = []
    for kind in (Sizes, Shape, Costs):
        known = {one.name for one in fields(kind)}
        values = {name: value for name, value in given.items() if name in known}
        values |= {name: v for name, v in vars(args).items() if name in known and v is not None}
        made.append(kind(**values))
    _check(made)
    sizes, shape, costs = made
    start = time.monotonic()
    trace = _read(args.trace) if args.trace else drawn(shape, args.seed)
    say(f"{len(trace)} requests")
    if not trace:
        raise SystemExit("there is nothing to ask")
    out: Found = {"machine": machine("redis", "aiohttp"), "seed": args.seed, "shape": asdict(shape)}
    status = 0
    if args.check:
        found = check(trace, sizes, costs, args.seed)
        wrong = verdict(found["off"])
        found["too far off"] = wrong
        status = int(bool(wrong))
    else:
        judgement = Judgement(trace, THRESHOLD)
        say("the questions are compared")
        found = replay(trace, judgement, sizes=sizes, costs=costs, seed=args.seed, say=say)
        if args.large:
            found |= large(found, sizes, costs, args.donors)
        found |= {"sizes": asdict(sizes), "costs": asdict(costs)}
    say(f"{time.monotonic() - start:.0f} s")
    show(found)
    if args.out:
        write_json(args.out, out | found)
    sys.exit(status)


if __name__ == "__main__":
    main()
