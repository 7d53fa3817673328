"""The model of `scale.py`: gateways, a store and replicas on a clock that jumps from event to event.

What a deployment decides, semkv's own code decides here: `Upstreams` routes, `MemoryStore` and `Latest` forget,
`Judgement` asks the encoder and the guards, `BreakEven` refuses loads, and the bounds are those of the modules. Modeled
is what things take: each request of a store, each lookup, each prefill.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import selectors
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from scale_trace import Asked, Judgement, chain

from semkv.encoders.text import SentenceEncoder
from semkv.latest import Latest
from semkv.tiers import sharing
from semkv_gateway import donors
from semkv_gateway.http import Call
from semkv_gateway.metrics import Metrics
from semkv_gateway.responses.store import MemoryStore, StoredResponse
from semkv_gateway.upstreams import Upstreams
from semkv_vllm.bucket_log import POLL_S
from semkv_vllm.shared import BreakEven

PLACES = ("device", "host", "disk", "peer", "bucket")
_REMEMBERED = inspect.signature(SentenceEncoder).parameters["remembered"].default
_MEASURED = 4  # measurements that `BreakEven` wants
_PROGRESS_S = 2.0
_ANSWER_OVERHEAD = 320  # bytes of an answer's JSON without its text


@dataclass(frozen=True)
class Costs:
    """What things take, in seconds where nothing else is said; by default as measured for this project.

    Attributes:
        client: of a request on its way to a gateway and back; drawn from ``clients`` where there are some.
        hit: of a gateway's event loop, for a request that memory answers.
        miss: the same for one that is sent upstream.
        lookup: of a lookup among donors: encoder, guards, search; drawn from ``encodings`` where there are some. A
            gateway does ``lookups`` at once.
        search: of one whose text the encoder remembers; ``unencoded`` of one that finds its partition empty.
        known: until an answer that is stored can be found by others.
        trip: of a request to Redis and back, without Redis's own time.
        command: of Redis, for one command; ``script`` for one that changes several keys; ``row`` for a donor read.
        step: of a replica, for a prefill of any length; ``token`` for each token computed.
        from_host, from_disk, from_peer, from_bucket: for each token loaded from there. Those of a peer and of a bucket
            are 10 Gbit/s and 0.3 GB/s, which were not measured.
        first: of a bucket, until the first byte.
        decode: for each token of an answer.
        token_bytes: KV of a token, in bytes.
    """

    client: float = 0.0005
    hit: float = 0.00008
    miss: float = 0.001
    lookup: float = 0.012
    lookups: int = 2
    search: float = 0.001
    unencoded: float = 0.001
    known: float = 0.1
    trip: float = 0.0003
    command: float = 0.00001
    script: float = 0.00006
    row: float = 0.000002
    step: float = 0.016
    token: float = 0.0000214
    from_host: float = 0.0000042
    from_disk: float = 0.0000425
    from_peer: float = 0.000046
    from_bucket: float = 0.00019
    first: float = 0.03
    decode: float = 0.0004
    token_bytes: int = 57_344
    clients: tuple[float, ...] = ()
    encodings: tuple[float, ...] = ()

    def way(self) -> float:
        """What a request's way takes this time."""
        return random.choice(self.clients) if self.clients else self.client  # noqa: S311

    def encoding(self) -> float:
        """What a lookup that encodes takes this time."""
        return random.choice(self.encodings) if self.encodings else self.lookup  # noqa: S311


@dataclass(frozen=True)
class Sizes:
    """How much there is of what.

    Attributes:
        gateways, replicas, nodes: of the deployment; ``nodes`` of Redis.
        memory_mib, store_mib: of answers, in a gateway's memory and in Redis.
        max_entries: donors that a gateway keeps.
        device, host, disk: tokens of KV that a replica holds there; ``bucket`` that all hold together, 0 for none.
        peers: 1 where a replica loads the beginning of a moved conversation from the one that had it, over p2p.
        block_tokens: of a KV block. Large ones spare time.
    """

    gateways: int = 2
    replicas: int = 3
    nodes: int = 1
    memory_mib: int = 256
    store_mib: int = 4096
    max_entries: int = 100_000
    device: int = 150_000
    host: int = 700_000
    disk: int = 0
    bucket: int = 0
    peers: int = 0
    block_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a request: ``how`` is memory, store, near, joined or miss; seconds to the first token."""

    how: str
    seconds: float


# -- the clock --------------------------------------------------------------------------------------------------------


class _Jumping(selectors.SelectSelector):
    """Waits for nothing: the clock goes on to the next event."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits for somebody")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes at once."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class Queue:
    """Something that serves one at a time, in the order of their coming. ``busy``: seconds."""

    def __init__(self, servers: int = 1) -> None:
        self._free = [0.0] * servers
        self.busy = 0.0

    def until(self, now: float, seconds: float) -> float:
        """When a job is done that comes now and takes so long."""
        server = min(range(len(self._free)), key=self._free.__getitem__)
        end = max(now, self._free[server]) + seconds
        self._free[server] = end
        self.busy += seconds
        return end

    async def take(self, seconds: float, more: float = 0.0) -> None:
        """Wait for a job, and ``more`` that nobody else waits for."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(self.until(now, seconds) - now + more)


# -- replicas ---------------------------------------------------------------------------------------------------------


class Bucket:
    """The KV blocks that all replicas share, each found once the log was looked at. ``requests`` counts."""

    def __init__(self, blocks: int) -> None:
        self.there: Latest[bytes, float] = Latest(blocks)
        self.requests: Counter[str] = Counter()
        self._batches: set[tuple[int, int]] = set()

    def has(self, name: bytes, now: float) -> bool:
        return self.there.get(name, float("inf")) <= now

    def put(self, names: Sequence[bytes], now: float, replica: int) -> None:
        """A file, and a record of all files that a replica has put since its last look at the log."""
        new = [name for name in names if name not in self.there]
        self.requests["put file"] += bool(new)
        batch = (replica, int(now / POLL_S))
        if new and batch not in self._batches:
            self._batches.add(batch)
            self.requests["put record"] += 1
        for name in new:
            self.there[name] = now + POLL_S


class Replica:
    """One engine: what it holds where, and how long a prompt takes. Prefills follow one another."""

    def __init__(self, sizes: Sizes, costs: Costs, bucket: Bucket | None) -> None:
        self._costs = costs
        self._block = sizes.block_tokens
        self._bucket = bucket
        counts = (sizes.device, sizes.host, sizes.disk)
        self._held: list[Latest[bytes, bool]] = [Latest(n // self._block) for n in counts]
        self._compute = Queue()
        self._gate = _gate(costs)
        self.tokens: Counter[str] = Counter()
        self.refused = 0

    async def prefill(self, seed: str, prompt: bytes, peer: Replica | None = None) -> None:
        """Until the first token. ``peer`` had the beginning last."""
        now = asyncio.get_running_loop().time()
        names = chain(seed, prompt, self._block)
        found = self._found(names, now, peer)
        computed = max(1, len(prompt) // 4 - sum(found.values()))
        costs = self._costs
        load = found["host"] * costs.from_host + found["disk"] * costs.from_disk
        load += found["peer"] * costs.from_peer
        if found["bucket"]:
            load += costs.first + found["bucket"] * costs.from_bucket
        self.tokens.update(found)
        self.tokens["computed"] += computed
        self._keep(names, now)
        await asyncio.sleep(load)
        await self._compute.take(costs.step + computed * costs.token)

    def _found(self, names: Sequence[bytes], now: float, peer: Replica | None) -> Counter[str]:
        """Tokens by the places that have them, of the leading run. What lies far is loaded where that is faster."""
        found: Counter[str] = Counter()
        for name in names:
            place = self._place(name, now, peer)
            if not place:
                break
            found[place] += self._block
        far = found["disk"] + found["bucket"]
        nbytes = self._costs.token_bytes
        worth = self._gate.worth(far, found["disk"] * nbytes, found["bucket"] * nbytes)
        if far and not worth:
            self.refused += 1
            del found["disk"], found["bucket"]
        return found

    def _place(self, name: bytes, now: float, peer: Replica | None) -> str:
        for place, held in zip(PLACES, self._held, strict=False):
            if name in held:
                return place
        if peer is not None and name in peer._held[1]:
            return "peer"
        return "bucket" if self._bucket is not None and self._bucket.has(name, now) else ""

    def _keep(self, names: Sequence[bytes], now: float) -> None:
        """The first blocks are used last, so that ends go first."""
        for held in self._held:
            for name in reversed(names):
                held[name] = True
        if self._bucket is not None:
            self._bucket.put(names, now, id(self))

    @property
    def busy(self) -> float:
        return self._compute.busy


def _gate(costs: Costs) -> BreakEven:
    """One that has measured what the costs say."""
    gate = BreakEven()
    tokens = 8192
    for _ in range(_MEASURED):
        gate.prefill.measured(tokens, costs.step + tokens * costs.token)
        gate.disk.measured(tokens * costs.token_bytes, tokens * costs.from_disk)
        gate.bucket.measured(tokens * costs.token_bytes, costs.first + tokens * costs.from_bucket)
    return gate


def prompt_of(messages: Sequence[tuple[str, str]]) -> bytes:
    return "\n".join(f"{role}: {text}" for role, text in messages).encode()


class _Server:
    """A replica as a gateway's `Upstreams` see it."""

    def __init__(self, number: int, replicas: Sequence[Replica], costs: Costs) -> None:
        self.name = f"replica-{number}"
        self.replica = replicas[number]
        self._replicas = replicas
        self._costs = costs

    async def send(self, call: Call) -> _Reply:
        if not call.body:  # which models it has
            return _Reply(0.0, b'{"data": [{"id": "scripted"}]}')
        asked: Asked = call.scope["asked"]
        named = call.body.rpartition(b'"peer":"')
        peer = self._replicas[int(named[2].partition(b'"')[0])] if named[1] else None
        await self.replica.prefill(asked.tenant, prompt_of(asked.messages), peer)
        return _Reply(asked.answer_tokens * self._costs.decode, b"")

    async def ready(self) -> bool:
        return True

    async def aclose(self) -> None:
        return


class _Reply:
    """An answer whose head is there."""

    status = 200

    def __init__(self, seconds: float, body: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self._seconds = seconds
        self._body = body

    async def pieces(self) -> AsyncIterator[bytes]:
        await asyncio.sleep(self._seconds)
        yield self._body

    async def aclose(self) -> None:
        return


# -- the store --------------------------------------------------------------------------------------------------------


class Redis:
    """Answers and partitions of donors, on all nodes by their keys."""

    def __init__(self, sizes: Sizes, costs: Costs, clock: Any) -> None:
        self._costs = costs
        self.answers = MemoryStore(sizes.store_mib << 20, clock=clock)
        self.donors: dict[Any, deque[tuple[int, str]]] = defaultdict(
            lambda: deque(maxlen=sharing.MOST)
        )
        self.added = 0
        self.nodes = [Queue() for _ in range(sizes.nodes)]
        self.requests: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    async def ask(self, what: str, seconds: float, *, node: int = 0, nbytes: int = 0) -> None:
        """One request and its answer."""
        self.requests[what] += 1
        self.nbytes[what] += nbytes
        await self.nodes[node].take(seconds, more=self._costs.trip)

    def node_of(self, partition: Any) -> int:
        return xxhash.xxh3_64_intdigest(repr(partition).encode()) % len(self.nodes)

    async def get(self, key: str) -> StoredResponse | None:
        found = self.answers.get(key)
        nbytes = 0 if found is None else len(found.payload)
        await self.ask("get", 3 * self._costs.command, node=self.node_of(key), nbytes=nbytes)
        return found

    async def put(self, response: StoredResponse) -> None:
        await self.ask("news", self._costs.command)
        nbytes = len(response.payload)
        await self.ask("put", self._costs.script, node=self.node_of(response.key), nbytes=nbytes)
        self.answers.put(response)

    async def read(self, partition: Any, after: int) -> list[tuple[int, str]]:
        """Donors that are new since a place."""
        node = self.node_of(partition)
        rows = [row for row in self.donors.get(partition, ()) if row[0] > after]
        pages = -(-len(rows) // donors._PAGE) + bool(rows)
        for _ in range(1 + max(1, pages)):  # pairs found wrong, and pages until one is empty
            await self.ask("read donors", self._costs.command, node=node)
        if rows:
            self.nbytes["read donors"] += len(rows) * DONOR_BYTES
            await self.ask("removals", self._costs.command)
            await self.ask("removals", self._costs.command)
            await self.nodes[node].take(len(rows) * self._costs.row)
        return rows

    async def add(self, partition: Any, text: str) -> None:
        node = self.node_of(partition)
        await self.ask("add donor", self._costs.command)
        await self.ask("add donor", self._costs.script, node=node, nbytes=DONOR_BYTES)
        self.added += 1
        self.donors[partition].append((self.added, text))
        await self.ask("add donor", self._costs.script)


DONOR_BYTES = 3_000
"""Of a donor in Redis: 599 MiB for 200,000 (`bench/results/cpu/shared_donors.json`)."""


# -- gateways ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Flight:
    """An answer on its way."""

    text: str
    head: asyncio.Event = field(default_factory=asyncio.Event)
    stored: asyncio.Event = field(default_factory=asyncio.Event)


class Gateway:
    """One gateway process."""

    def __init__(
        self,
        number: int,
        *,
        sizes: Sizes,
        costs: Costs,
        redis: Redis,
        servers: Sequence[_Server],
        judgement: Judgement,
    ) -> None:
        self._costs = costs
        self._redis = redis
        self._judgement = judgement
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self.memory = MemoryStore(sizes.memory_mib << 20, clock=loop.time)
        upstreams: Any = servers
        self._peers = [str(number) for number in range(len(servers))] if sizes.peers else []
        self.upstreams = Upstreams(upstreams, Metrics(), salt=bool(sizes.peers), peers=self._peers)
        self._number = number
        self._flights: dict[str, _Flight] = {}
        self._pending: dict[Any, list[_Flight]] = defaultdict(list)
        self._donors: Latest[tuple[Any, str], bool] = Latest(sizes.max_entries)
        self._has: Latest[Any, bool] = Latest(sharing._KNOWN)  # partitions with donors
        self._read: Latest[Any, tuple[float, int]] = Latest(sharing._KNOWN)  # when, and up to where
        self._remembered: Latest[str, bool] = Latest(_REMEMBERED)
        self.loop_time = Queue()
        self.lookups = Queue(costs.lookups)
        self.counts: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, asked: Asked) -> Row:
        begun = self._clock()
        await asyncio.sleep(self._costs.way())
        how = await self._answered(asked)
        self.counts[how] += 1
        return Row(how, self._clock() - begun)

    async def _answered(self, asked: Asked) -> str:
        await self.loop_time.take(self._costs.hit)
        key = _key(asked)
        if self.memory.get(key) is not None:
            return "memory"
        if (flight := self._flights.get(key)) is not None:
            await flight.head.wait()
            return "joined"
        if await self._from_store(key):
            return "store"
        how = await self._near(asked)
        if how:
            return how
        if (flight := self._flights.get(key)) is not None:
            await flight.head.wait()
            return "joined"
        await self._ask_upstream(asked, key)
        return "miss"

    async def _from_store(self, key: str) -> bool:
        """A stream's answer lies under one of two keys."""
        await self._redis.get(f"stream {key}")
        found = await self._redis.get(key)
        if found is None:
            await self._redis.ask("news", self._costs.command)
            return False
        self.memory.put(found)
        return True

    async def _near(self, asked: Asked) -> str:
        """How a donor answers it; empty where none does."""
        partition = asked.partition
        await self._bring(partition)
        if partition not in self._has and partition not in self._pending:
            await self.lookups.take(self._costs.unencoded)
        elif asked.text in self._remembered:
            await self.lookups.take(self._costs.search)
        else:
            await self.lookups.take(self._costs.encoding())
            self.counts["encoded"] += 1
            self._remembered[asked.text] = True
        for text in self._judgement.donors(asked.text):
            donor = asked._replace(messages=(*asked.messages[:-1], ("user", text)))
            if (partition, text) in self._donors:
                key = _key(donor)
                if self.memory.get(key) is not None or await self._from_store(key):
                    return "near"
            for flight in self._pending.get(partition, ()):
                if flight.text == text:
                    await flight.stored.wait()
                    return "joined"
        return ""

    async def _bring(self, partition: Any) -> None:
        """What others have, unless it was asked for a moment ago."""
        looked, place = self._read.get(partition, (float("-inf"), 0))
        if self._clock() - looked < sharing._FRESH_S:
            return
        self._read[partition] = (self._clock(), place)
        for number, text in await self._redis.read(partition, place):
            self._donors[partition, text] = True
            self._has[partition] = True
            place = max(place, number)
        self._read[partition] = (self._clock(), place)

    async def _ask_upstream(self, asked: Asked, key: str) -> None:
        flight = _Flight(asked.text)
        self._flights[key] = flight
        self._pending[asked.partition].append(flight)
        await self.loop_time.take(self._costs.miss)
        call = Call({"asked": asked, "method": "POST"}, asked.body())
        reply = await self.upstreams.send(
            lambda _: call, tenant=asked.tenant, model="scripted", hints=bool(self._peers)
        )
        flight.head.set()
        task = asyncio.ensure_future(self._finish(asked, key, flight, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, asked: Asked, key: str, flight: _Flight, reply: Any) -> None:
        """Keep the answer before its end is sent, then tell others of the donor."""
        async for _ in reply.pieces():
            pass
        await reply.aclose()
        response = StoredResponse(key, asked.tenant, "scripted", _payload(asked), self._clock())
        self.memory.put(response)
        await self._redis.put(response)
        del self._flights[key]
        flight.stored.set()
        await asyncio.sleep(self._costs.known)
        self._donors[asked.partition, asked.text] = True
        self._pending[asked.partition].remove(flight)
        self._has[asked.partition] = True
        if not self._pending[asked.partition]:
            del self._pending[asked.partition]
        await self._redis.add(asked.partition, asked.text)

    async def follow(self, seconds: float) -> None:
        """Look for invalidations and removals, as long as the trace is."""
        while self._clock() < seconds:
            await self._redis.ask("news", self._costs.command)
            for _ in range(4):
                await self._redis.ask("removals", self._costs.script)
                await asyncio.sleep(sharing._POLL_S)

    async def aclose(self) -> None:
        await asyncio.gather(*self._tasks)
        await self.upstreams.aclose()


def _key(asked: Asked) -> str:
    return xxhash.xxh3_128_hexdigest(repr((asked.tenant, asked.messages)).encode())


_payloads: dict[int, bytes] = {}


def _payload(asked: Asked) -> bytes:
    """As long as the answer is; one object for each length."""
    size = _ANSWER_OVERHEAD + 4 * asked.answer_tokens
    return _payloads.setdefault(size, b"x" * size)


# -- a whole deployment -----------------------------------------------------------------------------------------------


def replay(
    trace: Sequence[Asked],
    judgement: Judgement,
    *,
    sizes: Sizes,
    costs: Costs,
    seed: int = 0,
    say: Any = None,
) -> dict[str, Any]:
    """Play a trace; what came of it, as `summary` says."""
    loop = VirtualLoop()
    random.seed(seed)
    try:
        return loop.run_until_complete(_play(trace, judgement, sizes, costs, say))
    finally:
        loop.close()


async def _play(
    trace: Sequence[Asked], judgement: Judgement, sizes: Sizes, costs: Costs, say: Any
) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    bucket = Bucket(sizes.bucket // sizes.block_tokens) if sizes.bucket else None
    redis = Redis(sizes, costs, loop.time)
    replicas = [Replica(sizes, costs, bucket) for _ in range(sizes.replicas)]
    servers = [_Server(number, replicas, costs) for number in range(sizes.replicas)]
    gateways = [
        Gateway(n, sizes=sizes, costs=costs, redis=redis, servers=servers, judgement=judgement)
        for n in range(sizes.gateways)
    ]
    seconds = trace[-1].at if trace else 0.0
    following = [asyncio.ensure_future(gateway.follow(seconds)) for gateway in gateways]
    running: list[asyncio.Task[Row]] = []
    told = time.monotonic()
    for number, asked in enumerate(trace):
        if asked.at > loop.time():
            await asyncio.sleep(asked.at - loop.time())
        gateway = gateways[number % len(gateways)]
        running.append(asyncio.ensure_future(gateway.answer(asked)))
        if say is not None and time.monotonic() - told > _PROGRESS_S:
            told = time.monotonic()
            say(f"{number} of {len(trace)} requests, {asked.at:.0f} of {seconds:.0f} s")
    rows = await asyncio.gather(*running)
    length = loop.time()
    for gateway in gateways:
        await gateway.aclose()
    for task in following:
        task.cancel()
    if bucket is not None:
        bucket.requests["list"] += int(length / POLL_S) * sizes.replicas
        bucket.requests["get record"] = bucket.requests["put record"] * (sizes.replicas - 1)
    return {
        **summary(rows),
        "seconds": round(length, 3),
        "kv_tokens": dict(sum((one.tokens for one in replicas), Counter())),
        "refused_loads": sum(one.refused for one in replicas),
        "lookups": dict(sum((one.counts for one in gateways), Counter())),
        "redis_requests": dict(redis.requests),
        "redis_bytes": dict(redis.nbytes),
        "redis_answers": redis.answers.usage(),
        "redis_donors": redis.added,
        "bucket_requests": dict(bucket.requests) if bucket is not None else {},
        "busy": {
            "gateway": _most(one.loop_time.busy / length for one in gateways),
            "lookups": _most(one.lookups.busy / length / costs.lookups for one in gateways),
            "redis": _most(node.busy / length for node in redis.nodes),
            "replica": _most(one.busy / length for one in replicas),
        },
    }


def _most(shares: Iterator[float]) -> float:
    return round(max(shares), 4)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Requests by what came of them, and seconds to the first token."""
    how = Counter(row.how for row in rows)
    served = [row.seconds for row in rows if row.how != "miss"]
    missed = [row.seconds for row in rows if row.how == "miss"]
    return {
        "requests": len(rows),
        "how": dict(how),
        "hits": len(served),
        "ttft": quantiles([row.seconds for row in rows]),
        "ttft_hits": quantiles(served),
        "ttft_misses": quantiles(missed),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p95, in seconds; empty of nothing."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {f"p{q}": round(ordered[round(last * q / 100)], 5) for q in (50, 95)}


def prompt_in(found: dict[str, Any]) -> tuple[str, bytes, int]:
    """Of a request as a replica gets it: whose it is, the prompt, and how many tokens it wants."""
    messages = [(one["role"], one["content"]) for one in found["messages"]]
    return str(found.get("cache_salt", "")), prompt_of(messages), int(found["max_tokens"])
