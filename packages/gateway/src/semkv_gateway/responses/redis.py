"""Answers in Redis, for several gateways.

    {semkv:<name>:1}:a:<key>   hash: head and payload of an answer (`encode`), with Redis's own expiry
    {semkv:<name>:1}:used      sorted set: keys by when they were last used
    {semkv:<name>:1}:sizes     hash: bytes by key;  {semkv:<name>:1}:bytes: their sum
    {semkv:<name>:1}:log       stream: the latest invalidations
    {semkv:<name>:1}:refused   sorted set: digests of refused credentials by when they were refused

What changes several of these is one script, so that no client that dies half-way leaves them at odds. All names hold
one hash tag, so a cluster keeps them together; `SpreadStore` has several such stores there. Give Redis
``appendonly yes`` where answers are to outlive it, and ``appendfsync always`` where no invalidation may be lost with
its last second.

A Redis that is full (``maxmemory`` with ``noeviction``) keeps nothing new, but goes on to serve, and to invalidate: the
log is bounded, and its script begins with a write that frees. One that evicts keys of its own choice may evict these
too: an answer that is not in ``used`` is not served, since an invalidation would not find it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from semkv.errors import ConfigError, CorruptValue, StoreError
from semkv_gateway.responses.store import (
    FORMAT,
    LOG,
    REFUSALS,
    REFUSED_S,
    News,
    ResponseStore,
    Selector,
    StoredResponse,
    decode,
    encode,
    read_selectors,
)

_BATCH = 500
_OVERHEAD = 512  # bytes that Redis takes for an entry besides head and payload
_WAITED = 800  # milliseconds of a wait for replicas to a second of the longest wait for an answer
_NOTHING = Selector(key="")

# KEYS: used, sizes, bytes, log. In every script `drop` removes one answer and its bookkeeping.
_DROP = """
local function drop(key)
  local size = tonumber(redis.call('HGET', KEYS[2], key) or '0')
  redis.call('DEL', ARGV[1] .. key)
  redis.call('HDEL', KEYS[2], key)
  redis.call('ZREM', KEYS[1], key)
  redis.call('DECRBY', KEYS[3], size)
end
"""
# ARGV: prefix, key, head, payload, now, milliseconds to live or '', size, max bytes, expected log end or ''
_PUT = (
    _DROP
    + """
local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)
if ARGV[9] ~= '' and (#last == 0 or last[1][1] ~= ARGV[9]) then return 0 end
-- The first write must be one that a full Redis refuses: after any other it lets the rest of the script pass.
if redis.call('HEXISTS', KEYS[2], ARGV[2]) == 1 then drop(ARGV[2]) end
redis.call('HSET', ARGV[1] .. ARGV[2], 'head', ARGV[3], 'payload', ARGV[4])
if ARGV[6] ~= '' then redis.call('PEXPIRE', ARGV[1] .. ARGV[2], ARGV[6]) end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[7])
redis.call('ZADD', KEYS[1], ARGV[5], ARGV[2])
local bytes = redis.call('INCRBY', KEYS[3], ARGV[7])
while bytes > tonumber(ARGV[8]) do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if not oldest then redis.call('SET', KEYS[3], 0) break end
  drop(oldest)
  bytes = tonumber(redis.call('GET', KEYS[3]))
end
return 1
"""
)
# ARGV: selector, '' or '1' to add it only where the log is empty, and how long the log may be. Returns the log's end.
_NOTE = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if ARGV[2] == '1' and #last > 0 then return last[1][1] end
-- A full Redis refuses XADD, but not in a script that has written before: so make room first.
redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[3] - 1)
return redis.call('XADD', KEYS[1], '*', 'selector', ARGV[1])
"""
# KEYS: a name of no other use. The first write is one that a full Redis takes.
_MARK = """
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], '', 'PX', 60000)
"""
# ARGV: prefix, key...
_DELETE = _DROP + "for i = 2, #ARGV do drop(ARGV[i]) end"


class RedisStore(ResponseStore):
    """A store that many gateways share. A Redis that is down is no error until it is asked for something.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``; ``redis+cluster://`` or ``rediss+cluster://`` of a cluster.
        max_bytes: bound on heads, payloads and what Redis itself needs for an entry.
        timeout_s: longest wait for a connection and for an answer.
        name: deployments with different names share nothing.
        client: in place of one for the URL; closed with the store.

    Raises:
        ConfigError: the URL cannot be read, or the ``redis`` package is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        max_bytes: int = 4 << 30,
        timeout_s: float = 0.25,
        name: str = "answers",
        clock: Callable[[], float] = time.time,
        client: Any = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.unreplicated = 0
        self._clock = clock
        self._timeout_s = timeout_s
        self._db = client or connect(url, timeout_s)
        root = root_of(name)
        self._answer = f"{root}:a:"
        self._log = f"{root}:log"
        self._refusals = f"{root}:refused"
        self._keys = [f"{root}:{part}" for part in ("used", "sizes", "bytes")] + [self._log]

    def get(self, key: str) -> StoredResponse | None:
        with asking():
            pipe = self._db.pipeline(transaction=False)
            pipe.hmget(self._answer + key, "head", "payload")
            pipe.zscore(self._keys[0], key)
            pipe.zadd(self._keys[0], {key: self._clock()}, xx=True)
            *found, _ = pipe.execute(
                raise_on_error=False
            )  # a full Redis refuses the note of use alone
            for part in found:
                if isinstance(part, Exception):
                    raise part
            (head, payload), used = found
        if head is None or used is None:
            return None
        try:
            response = decode(key, head, payload or b"")
        except CorruptValue:
            self._remove([key])
            raise
        return None if response.stale_until <= self._clock() else response

    def _remove(self, keys: Sequence[str]) -> None:
        with asking():
            self._run(_DELETE, self._keys, self._answer, *keys)

    def _run(self, script: str, keys: Sequence[str], *values: object) -> Any:
        return self._db.eval(script, len(keys), *keys, *values)

    def put(self, response: StoredResponse, since: str = "") -> bool:
        head, payload = encode(response)
        size = len(head) + len(payload) + _OVERHEAD
        if size > self.max_bytes:
            return False
        for _ in range(3):  # an invalidation of something else may come in between
            expected = ""
            if since:
                news = self.news(since)
                if news.hit(response):
                    return False
                expected = news.cursor
            now = self._clock()
            left = response.stale_until - now
            to_live = "" if left == float("inf") else max(1, int(left * 1000))
            with asking():
                arguments = (
                    response.key,
                    head,
                    payload,
                    now,
                    to_live,
                    size,
                    self.max_bytes,
                    expected,
                )
                if self._run(_PUT, self._keys, self._answer, *arguments):
                    return True
        return False

    def invalidate(self, selector: Selector, *, dry_run: bool = False) -> int:
        """Log first: what is computed from now on is kept, what was begun before is refused by `put`."""
        if not dry_run:
            self._end_of_log()
            self._end_of_log(selector)
        found: set[str] = set()  # a scan may show a key twice
        cursor = 0
        keys = [] if selector.key is None else [selector.key]
        while True:
            if selector.key is None:  # all that were there from the start
                with asking():
                    cursor, rows = self._db.zscan(self._keys[0], cursor, count=_BATCH)
                keys = [key.decode() for key, _ in rows]
            gone = self._matching(selector, keys)
            found.update(gone)
            if gone and not dry_run:
                self._remove(gone)
            if not cursor:
                break
        if not dry_run:
            self.unreplicated += not is_replicated(self._db, self._log, self._timeout_s)
        return len(found)

    def _matching(self, selector: Selector, keys: list[str]) -> list[str]:
        """The keys of answers that are there and meet a selector, or cannot be read."""
        gone = []
        for key, head in zip(keys, self.heads_of(keys), strict=True):
            with suppress(CorruptValue):
                if head is None or not selector.matches(decode(key, head, None)):
                    continue
            gone.append(key)
        return gone

    def _end_of_log(self, new: Selector | None = None) -> str:
        """The end of the log, with ``new`` at it. One that is empty, as in a new or a flushed Redis, gets a first
        entry."""
        selector = json.dumps((new or _NOTHING).view())
        with asking():
            end = self._run(_NOTE, [self._log], selector, "" if new else "1", LOG)
        return cast("str", end.decode())

    def news(self, cursor: str) -> News:
        if not cursor:
            return News(self._end_of_log())
        with asking():
            rows = self._db.xrange(self._log, min=cursor)
        if not rows or rows[0][0].decode() != cursor:
            return News(self._end_of_log(), None)
        return News(
            rows[-1][0].decode(), read_selectors(row[1].get(b"selector", b"") for row in rows[1:])
        )

    def refuse(self, name: str, *, refused: bool) -> None:
        with asking():
            if refused:
                self._db.zadd(self._refusals, {name: self._clock()})
                self._db.zremrangebyrank(self._refusals, 0, -REFUSALS - 1)
            else:
                self._db.zrem(self._refusals, name)

    def refused(self, name: str) -> bool:
        with asking():
            at = self._db.zscore(self._refusals, name)
        return at is not None and self._clock() - at < REFUSED_S

    def heads(self, first: int, most: int) -> list[tuple[str, bytes | None]]:
        """Keys and heads of the answers that were used last, from a place on."""
        keys = [key for key, _ in self.used(first, most)]
        return list(zip(keys, self.heads_of(keys), strict=True))

    def used(self, first: int, most: int) -> list[tuple[str, float]]:
        """Keys of the answers that were used last, from a place on, and when."""
        last = first + most - 1
        with asking():
            found = self._db.zrevrange(self._keys[0], first, last, withscores=True)
        return [(key.decode(), used) for key, used in found]

    def heads_of(self, keys: Sequence[str]) -> list[bytes | None]:
        """The heads of answers; None of one that has gone."""
        with asking():
            pipe = self._db.pipeline(transaction=False)
            for key in keys:
                pipe.hget(self._answer + key, "head")
            return list(pipe.execute())

    def usage(self) -> tuple[int, int]:
        with asking():
            return int(self._db.zcard(self._keys[0])), int(self._db.get(self._keys[2]) or 0)

    def close(self) -> None:
        self._db.close()


def root_of(name: str) -> str:
    """What the names of all keys of a deployment begin with."""
    return f"{{semkv:{name}:{FORMAT}}}"


def connect(url: str, timeout_s: float) -> Any:
    """A client that connects when it is first used. Raises as `RedisStore`."""
    try:
        import redis
    except ImportError:
        raise ConfigError(
            "--store", "redis", "redis: in a checkout of semkv, pip install '.[redis]'"
        ) from None
    try:
        return _clustered(url, timeout_s) if "+cluster://" in url else _single(url, timeout_s)
    except (ValueError, TypeError, redis.RedisError, redis.exceptions.RedisClusterException):
        allowed = "a URL such as redis://host:6379/0 or redis+cluster://host:7000,other:7000"
        raise ConfigError("--store", url, allowed) from None


def _single(url: str, timeout_s: float) -> Any:
    import redis

    db = redis.Redis.from_url(url, retry=_once(), health_check_interval=30, **_timeouts(timeout_s))
    pool = db.connection_pool
    pool.connection_kwargs["decode_responses"] = (
        False  # what is stored is bytes, whatever a URL says
    )
    # which connects to nothing, and knows what a URL may say
    pool.connection_class(**pool.connection_kwargs)
    return db


def _clustered(url: str, timeout_s: float) -> Any:
    """A client of a cluster, by one or more of its nodes."""
    from redis import cluster, connection

    parse: Any = connection.parse_url
    node: Any = cluster.ClusterNode
    found = re.fullmatch(r"(rediss?)\+cluster://(.*@)?([^/?]*)(.*)", url)
    if found is None:
        raise ValueError("no URL of a cluster")
    scheme = found[1]
    user = found[2] or ""
    options = [parse(f"{scheme}://{user}{host}{found[4]}") for host in found[3].split(",")]
    if not all(option.get("host") for option in options):
        raise ValueError("a cluster has hosts")
    nodes = [(option["host"], option.get("port", 6379)) for option in options]
    given = options[0]
    for name in ("host", "port"):
        given.pop(name, None)
    if given.pop("db", 0):
        raise ValueError("a cluster has no database but 0")
    kind = given.pop("connection_class", connection.Connection)
    kind(**given)  # which connects to nothing, and knows what a URL may say
    given |= _timeouts(timeout_s)
    given |= {"decode_responses": False, "protocol": 2}
    return _Later(
        lambda: cluster.RedisCluster(
            startup_nodes=[node(*one) for one in nodes],
            retry=_once(),
            ssl=kind is not connection.Connection,
            **given,
        )
    )


def _once() -> Any:
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Retry(NoBackoff(), 0)


def _timeouts(seconds: float) -> dict[str, float]:
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds}


def is_replicated(db: Any, key: str, timeout_s: float) -> bool:
    """Whether a replica has all that was written to a key's node so far, so that no fail-over undoes it. True of a node
    that has had no replica for an hour, since then nothing can take its place.

    Args:
        db: a client that `connect` made.
        key: its hash tag names the node.
        timeout_s: longest wait for a replica.
    """
    from redis import RedisError, exceptions

    try:
        is_clustered = isinstance(db, _Later)
        node = db.get_redis_connection(db.get_node_from_key(key)) if is_clustered else db
        if not node.info("replication").get("repl_backlog_active"):
            return True
        # Redis waits for what the same connection has written.
        pipe = node.pipeline(transaction=False)
        pipe.eval(_MARK, 1, f"{key}:mark")
        pipe.execute_command("WAIT", 1, max(1, int(_WAITED * timeout_s)))
        return int(pipe.execute()[1]) > 0
    except (RedisError, exceptions.RedisClusterException, OSError):
        return False


class _Later:
    """A client that is made when it is first used: one of a cluster asks the cluster for its nodes at once."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None
        self._making = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        with self._making:
            if self._made is None:
                self._made = self._make()
        return getattr(self._made, name)

    def close(self) -> None:
        with self._making:
            if self._made is not None:
                self._made.close()


def _away(exceptions: Any) -> tuple[type[Exception], ...]:
    """Errors of a Redis that cannot be reached, or of a cluster that lacks a part."""
    of_one = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
    return (*of_one, exceptions.RedisClusterException, exceptions.ClusterDownError)


@contextmanager
def asking() -> Iterator[None]:
    """A block in which the client's errors are a `StoreError`."""
    from redis import RedisError, exceptions

    try:
        yield
    except (RedisError, exceptions.RedisClusterException, OSError) as error:
        failed = StoreError(f"redis: {type(error).__name__}: {error}")
        if isinstance(error, exceptions.OutOfMemoryError) or "OOM" in str(error):
            failed.reason = "full"
        elif isinstance(error, exceptions.ReadOnlyError) or "MISCONF" in str(
            error
        ):  # its disk is full
            failed.reason = "read-only"
        elif isinstance(error, _away(exceptions)):
            failed.reason = "away"
        raise failed from error
