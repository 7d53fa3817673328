"""Donors in Redis, by which gateways of several directories share them.

    {semkv:donors:<name>:<partition>}   stream: the rows of a partition, the latest of a day
    {semkv:<name>:1}:removals           stream: the latest 1,000 removals
    {semkv:<name>:1}:begun              a name of that log: who finds another name knows that it was emptied
    {semkv:<name>:1}:partitions         sorted set: partitions by when they were written last
    {semkv:<name>:1}:sizes              hash: bytes by partition;  {semkv:<name>:1}:bytes: their sum

A partition is a key with a hash tag of its own, so the nodes of a cluster share them out, and one command reads it.
Sizes and removals of all partitions have one tag in common, so one script changes them.
"""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from semkv.tiers.sharing import MOST, DonorStore, Place, Removals, SharedRow, numbers
from semkv_gateway.responses.opening import is_redis
from semkv_gateway.responses.redis import asking, connect, root_of

_KEPT_S = 86_400
_REMOVALS = 1000
_PAGE = 256
_SHARE = 4  # bytes of answers to one of donors
_NEVER = (1 << 63, 0)  # a place that no log reaches

# KEYS: removals. ARGV: a removal, how many are kept. A full Redis refuses XADD, but not in a script that has written
# before: so make room first.
_REMOVE = """
redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[2] - 1)
return redis.call('XADD', KEYS[1], '*', 'removal', ARGV[1])
"""
# Times are those of Redis, whatever the gateways' clocks say.
_NOW = "local time = redis.call('TIME'); local now = time[1] + time[2] / 1000000\n"
# KEYS: partitions. ARGV: a partition.
_WRITTEN = _NOW + "return redis.call('ZADD', KEYS[1], now, ARGV[1])"
# KEYS: a partition. ARGV: a row, its writer's place in the log, most rows, seconds that they are kept. Returns the
# bytes that the partition takes.
_ADD = (
    _NOW
    + """
redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[3], '*', 'row', ARGV[1], 'since', ARGV[2])
redis.call('XTRIM', KEYS[1], 'MINID', '~', string.format('%d000', now - ARGV[4]))
redis.call('EXPIRE', KEYS[1], ARGV[4])
return redis.call('MEMORY', 'USAGE', KEYS[1])
"""
)
# KEYS: partitions, sizes, bytes. ARGV: a partition, its bytes, most bytes, seconds that one is kept. Returns the
# partitions that are to go: those written longest ago, as long as there are too many bytes or they are too old.
_SIZED = (
    _NOW
    + """
local known = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0')
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
local bytes = redis.call('INCRBY', KEYS[3], ARGV[2] - known)
local gone = {}
while #gone < 100 do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  if not oldest[1] then redis.call('SET', KEYS[3], 0) break end
  if bytes <= tonumber(ARGV[3]) and oldest[2] + ARGV[4] >= now then break end
  local size = tonumber(redis.call('HGET', KEYS[2], oldest[1]) or '0')
  redis.call('ZREM', KEYS[1], oldest[1])
  redis.call('HDEL', KEYS[2], oldest[1])
  bytes = redis.call('DECRBY', KEYS[3], size)
  gone[#gone + 1] = oldest[1]
end
return gone
"""
)


class RedisDonors(DonorStore):
    """Partitions that the gateways of one deployment share. A Redis that is down is no error until it is asked.

    Args:
        url: of Redis.
        timeout_s: longest wait for a connection and for an answer.
        name: deployments with different names share nothing.
        max_bytes: bound on what all partitions take in Redis.

    Raises:
        ConfigError: as `RedisStore`.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 0.25, name: str = "log", max_bytes: int = 1 << 30
    ) -> None:
        self._db: Any = connect(url, timeout_s)
        self._name = name
        self._max_bytes = max_bytes
        root = root_of(name)
        self._removals = f"{root}:removals"
        self._begun = f"{root}:begun"
        self._about = [f"{root}:{part}" for part in ("partitions", "sizes", "bytes")]

    def _key(self, partition: str) -> str:
        return f"{{semkv:donors:{self._name}:{partition}}}"

    def add(self, partition: str, data: bytes, since: str, *, most: int = MOST) -> None:
        key = self._key(partition)
        with asking():
            self._run(_WRITTEN, self._about[:1], partition)  # first: all that is there is known
            size = self._run(_ADD, [key], data, since, most, _KEPT_S)
            for gone in self._run(_SIZED, self._about, partition, size, self._max_bytes, _KEPT_S):
                self._db.unlink(self._key(gone.decode()))

    def _run(self, script: str, keys: Sequence[str], *values: object) -> Any:
        return self._db.eval(script, len(keys), *keys, *values)

    def read(self, partition: str, after: str, before: str) -> Sequence[SharedRow]:
        end = f"({before}" if before else "+"
        start = f"({after}" if after else "-"
        with asking():
            rows = self._db.xrevrange(self._key(partition), max=end, min=start, count=_PAGE)
        return [
            SharedRow(at.decode(), fields.get(b"since", b"").decode(), fields.get(b"row", b""))
            for at, fields in rows
        ]

    def remove(self, removal: bytes) -> None:
        with asking():
            self._run(_REMOVE, [self._removals], removal, _REMOVALS)

    def removals(self, after: Place) -> Removals:
        with asking():
            log = self._log()
            place = after if after.log == log else Place(log)
            found = self._removals_from(place)
            if not place.at[0]:  # from the first one on, where that is still there
                whole = len(found) < _REMOVALS
                return Removals(place if whole else found[0][0], found, _end(place, found))
            if found and found[0][0] == place:
                return Removals(place, found[1:], found[-1][0])
            # It has dropped the place since, or lost its own end.
            every = self._removals_from(Place(log))
            reached = found[0][0] if found else Place(log, _NEVER)
            return Removals(reached, found, _end(Place(log), every))

    def _removals_from(self, place: Place) -> tuple[tuple[Place, bytes], ...]:
        rows = self._db.xrange(self._removals, min=f"{place.at[0]}-{place.at[1]}")
        return tuple(
            (Place(place.log, numbers(at.decode())), fields.get(b"removal", b""))
            for at, fields in rows
        )

    def _log(self) -> str:
        """What the log is called since it was last empty."""
        name = self._db.get(self._begun)
        if name is None:
            self._db.set(self._begun, uuid.uuid4().hex, nx=True)
            name = self._db.get(self._begun)
        return str((name or b"").decode())

    def sweep(
        self, concerns: Callable[[bytes], bool], among: Callable[[str], bool] | Sequence[str]
    ) -> None:
        chosen = filter(among, self._partitions()) if callable(among) else iter(among)
        for partition in chosen:
            for row in self._rows(partition):
                if concerns(row.data):
                    with asking():
                        self._db.xdel(self._key(partition), row.at)

    def _partitions(self) -> Iterator[str]:
        """The names of all that are there from the start; some may come twice."""
        cursor = 0
        while True:
            with asking():
                cursor, rows = self._db.zscan(self._about[0], cursor, count=_PAGE)
            for name, _ in rows:
                yield name.decode()
            if not cursor:
                return

    def _rows(self, partition: str) -> Iterator[SharedRow]:
        before = ""
        while rows := self.read(partition, "", before):
            yield from rows
            before = rows[-1].at

    def close(self) -> None:
        self._db.close()


def open_donors(
    where: str, timeout_s: float, secret: bytes, *, store_bytes: int
) -> RedisDonors | None:
    """The donors in the store that a setting names, for those who know a secret; None where that is no Redis. They take
    a quarter of the bytes that answers may take, beside those. Raises as `RedisDonors`."""
    if not is_redis(where):
        return None
    return RedisDonors(
        where,
        timeout_s=timeout_s,
        name=f"log:{hmac.digest(secret, b'entry log', 'sha256').hex()[:16]}",
        max_bytes=store_bytes // _SHARE,
    )


def _end(place: Place, found: Sequence[tuple[Place, bytes]]) -> Place:
    return found[-1][0] if found else place
