"""Donors in Redis, by which gateways of several directories share them.

    {semkv:donors:<name>:<partition>}   stream: the rows of a partition, the latest of a day
    ...}:wrong                          stream: its pairs found wrong
    ...}:vectors:<encoder>              vector set: its entries by their vectors, each with the place of its row
    {semkv:<name>:1}:removals           stream: the latest 1,000 removals
    {semkv:<name>:1}:begun              a name of that log: who finds another name knows that it was emptied
    {semkv:<name>:1}:partitions         sorted set: partitions by when they were written last
    {semkv:<name>:1}:encoders           sorted set: encoders that have vectors, by when one of theirs wrote last
    {semkv:<name>:1}:sizes              hash: bytes by partition;  {semkv:<name>:1}:bytes: their sum

A partition has a hash tag of its own, so the nodes of a cluster share them out, and one script changes it. Sizes and
removals of all partitions have one tag in common, so one script changes them.

Vector sets are those of Redis 8, and are there only where a deployment asks for them. Then a partition may have more
rows than a gateway reads: it asks for the nearest. These are candidates only: an entry's row has the vector that is
compared with a request's.
"""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from semkv.errors import ConfigError, StoreError
from semkv.tiers.sharing import MOST, DonorStore, Place, Removals, SharedRow, numbers
from semkv_gateway.responses.opening import is_redis
from semkv_gateway.responses.redis import asking, connect, root_of
from semkv_gateway.settings import SEARCHING
from semkv_stores.digests import digest

if TYPE_CHECKING:
    from semkv.types import Vector

_KEPT_S = 86_400
_REMOVALS = 1000
_PAGE = 256
_SHARE = 4  # bytes of answers to one of donors
_LARGEST_SHARE = 2  # bytes of all partitions to those of the largest one that is searched
_NEVER = (1 << 63, 0)  # a place that no log reaches

# KEYS: removals. ARGV: a removal, how many are kept. A full Redis refuses XADD, but not in a script that has written
# before: so make room first.
_REMOVE = """
redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[2] - 1)
return redis.call('XADD', KEYS[1], '*', 'removal', ARGV[1])
"""
# Times are those of Redis, whatever the gateways' clocks say.
_NOW = "local time = redis.call('TIME'); local now = time[1] + time[2] / 1000000\n"
# KEYS: partitions, encoders. ARGV: a partition, the writer's encoder or '', seconds that an encoder is known, which are
# more than its vectors live. Returns all encoders.
_WRITTEN = (
    _NOW
    + """
redis.call('ZADD', KEYS[1], now, ARGV[1])
if ARGV[2] ~= '' then redis.call('ZADD', KEYS[2], now, ARGV[2]) end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[3])
return redis.call('ZRANGE', KEYS[2], 0, -1)
"""
)
# KEYS of a partition: rows, pairs found wrong, vectors, those of each other encoder. `bytes_taken` are those of all.
_BYTES = """
local function bytes_taken()
  local bytes = 0
  for _, key in ipairs(KEYS) do bytes = bytes + (redis.call('MEMORY', 'USAGE', key) or 0) end
  return bytes
end
"""
# ARGV: which of these keys, a row, its writer's place in the log, most rows, seconds that they are kept. Returns the
# bytes that the partition takes.
_ADD = (
    _NOW
    + _BYTES
    + """
local key = KEYS[tonumber(ARGV[1])]
redis.call('XADD', key, 'MAXLEN', ARGV[4], '*', 'row', ARGV[2], 'since', ARGV[3])
redis.call('XTRIM', key, 'MINID', '~', string.format('%d000', now - ARGV[5]))
redis.call('EXPIRE', key, ARGV[5])
return bytes_taken()
"""
)
# `take_out` removes rows. The vector of an entry stays where another gateway has added the entry, too.
_TAKE_OUT = """
local function take_out(rows)
  for _, row in ipairs(rows) do
    local item = row[2][6]
    for at = 3, item and #KEYS or 0 do
      if redis.call('VGETATTR', KEYS[at], item) == row[1] then redis.call('VREM', KEYS[at], item) end
    end
    redis.call('XDEL', KEYS[1], row[1])
  end
end
"""
# ARGV: a row, its writer's place in the log, the entry's id, its vector or '', seconds that rows are kept, most bytes.
# A row takes the place of a few old ones, where there are too many bytes or they are too old. Returns as _ADD.
_ADD_SEARCHED = (
    _NOW
    + _BYTES
    + _TAKE_OUT
    + """
-- The first write must be one that a full Redis refuses: after any other it lets the rest of the script pass.
if ARGV[4] ~= '' then redis.call('VADD', KEYS[3], 'FP32', ARGV[4], ARGV[3]) end
local at = redis.call('XADD', KEYS[1], '*', 'row', ARGV[1], 'since', ARGV[2], 'item', ARGV[3])
if ARGV[4] ~= '' then redis.call('VSETATTR', KEYS[3], ARGV[3], at) end
for at = 1, 3 do redis.call('EXPIRE', KEYS[at], ARGV[5]) end
local oldest = string.format('%d000', now - ARGV[5])
take_out(redis.call('XRANGE', KEYS[1], '-', oldest, 'COUNT', 4))
if bytes_taken() > tonumber(ARGV[6]) then
  take_out(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 4))
end
return bytes_taken()
"""
)
# ARGV: ids of entries. Returns their rows, and forgets the vectors of those that have none.
_ROWS_OF = """
local found = {}
for _, item in ipairs(ARGV) do
  local at = redis.call('VGETATTR', KEYS[3], item)
  local rows = at and redis.call('XRANGE', KEYS[1], at, at) or {}
  if rows[1] then found[#found + 1] = rows[1] elseif at then redis.call('VREM', KEYS[3], item) end
end
return found
"""
# ARGV: the place of a row, which goes.
_SWEEP = _TAKE_OUT + "take_out(redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]))"
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
        vector_sets: whether partitions are searched, by the vectors of an encoder. Each then has as many rows as half
            of these bytes hold.

    Raises:
        ConfigError: as `RedisStore`.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 0.25,
        name: str = "log",
        max_bytes: int = 1 << 30,
        vector_sets: bool = False,
    ) -> None:
        self._db: Any = connect(url, timeout_s)
        self._name = name
        self._max_bytes = max_bytes
        self._vector_sets = vector_sets
        self._encoder = ""  # whose vectors are searched
        self._others: Sequence[str] = ()  # encoders by whose vectors other gateways search
        root = root_of(name)
        self._removals = f"{root}:removals"
        self._begun = f"{root}:begun"
        self._encoders = f"{root}:encoders"
        self._about = [f"{root}:{part}" for part in ("partitions", "sizes", "bytes")]

    def _key(self, partition: str) -> str:
        return f"{{semkv:donors:{self._name}:{partition}}}"

    def _keys(self, partition: str) -> list[str]:
        """Of the rows, of the pairs found wrong, and of the vectors of each encoder, which may not be there."""
        key = self._key(partition)
        encoders = (self._encoder, *self._others)
        return [key, f"{key}:wrong", *(f"{key}:vectors:{encoder}" for encoder in encoders)]

    @property
    def _searched(self) -> bool:
        """Whether any gateway searches, so that rows have vectors."""
        return bool(self._encoder or self._others)

    def _note_encoders(self, encoders: Sequence[bytes]) -> None:
        self._others = [name.decode() for name in encoders if name.decode() != self._encoder]

    def search_by(self, encoder: str) -> bool:
        if self._vector_sets:
            self._encoder = digest(encoder)[:16]
        return self._vector_sets

    def add(
        self,
        partition: str,
        data: bytes,
        since: str,
        *,
        most: int = MOST,
        wrong: bool = False,
        item: str = "",
        vector: Vector | None = None,
    ) -> None:
        with asking():
            # First: all that is there is known.
            written = [self._about[0], self._encoders]
            known_s = 2 * _KEPT_S
            self._note_encoders(self._run(_WRITTEN, written, partition, self._encoder, known_s))
            keys = self._keys(partition)
            if item and self._searched:
                packed = b""
                if vector is not None and self._encoder:
                    packed = vector.astype("<f4").tobytes()
                largest = self._max_bytes // _LARGEST_SHARE
                size = self._run(_ADD_SEARCHED, keys, data, since, item, packed, _KEPT_S, largest)
            else:
                place = 2 if wrong else 1
                size = self._run(_ADD, keys, place, data, since, most, _KEPT_S)
            for gone in self._run(_SIZED, self._about, partition, size, self._max_bytes, _KEPT_S):
                self._db.unlink(*self._keys(gone.decode()))

    def _run(self, script: str, keys: Sequence[str], *values: object) -> Any:
        return self._db.eval(script, len(keys), *keys, *values)

    def read(
        self, partition: str, after: str, before: str, *, wrong: bool = False
    ) -> Sequence[SharedRow]:
        end = f"({before}" if before else "+"
        start = f"({after}" if after else "-"
        key = self._keys(partition)[1 if wrong else 0]
        with asking():
            rows = self._db.xrevrange(key, max=end, min=start, count=_PAGE)
        return [
            SharedRow(at.decode(), fields.get(b"since", b"").decode(), fields.get(b"row", b""))
            for at, fields in rows
        ]

    # -- searching ----------------------------------------------------------------------------------------------

    def has_vector_sets(self) -> bool:
        """Whether this Redis has vector sets; True where it does not answer."""
        try:
            with asking():
                self._db.execute_command("VCARD", self._keys("")[2])
        except StoreError as error:
            return "unknown command" not in str(error).lower()
        return True

    def is_large(self, partition: str) -> bool:
        with asking():
            return bool(self._encoder) and int(self._db.xlen(self._key(partition))) > MOST

    def nearest(self, partition: str, vector: Vector, most: int) -> Sequence[str]:
        vectors = self._keys(partition)[2]
        packed = vector.astype("<f4").tobytes()
        with asking():
            found = self._db.execute_command("VSIM", vectors, "FP32", packed, "COUNT", most)
        return [item.decode() for item in found]

    def rows_of(self, partition: str, items: Sequence[str]) -> Sequence[SharedRow]:
        if not items:
            return []
        with asking():
            found = self._run(_ROWS_OF, self._keys(partition), *items)
        return [SharedRow(at.decode(), row[3].decode(), row[1]) for at, row in found]

    # -- removals -----------------------------------------------------------------------------------------------

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
        with asking():
            self._note_encoders(self._db.zrange(self._encoders, 0, -1))
        chosen = filter(among, self._partitions()) if callable(among) else iter(among)
        for partition in chosen:
            for row in self._rows(partition):
                if concerns(row.data):
                    self._take_out(partition, row)
            for row in self._rows(partition, wrong=True):
                if concerns(row.data):
                    with asking():
                        self._db.xdel(self._keys(partition)[1], row.at)

    def _take_out(self, partition: str, row: SharedRow) -> None:
        keys = self._keys(partition)
        with asking():
            if self._searched:
                self._run(_SWEEP, keys, row.at)
            else:
                self._db.xdel(keys[0], row.at)

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

    def _rows(self, partition: str, *, wrong: bool = False) -> Iterator[SharedRow]:
        before = ""
        while rows := self.read(partition, "", before, wrong=wrong):
            yield from rows
            before = rows[-1].at

    def close(self) -> None:
        self._db.close()


def open_donors(
    where: str, timeout_s: float, secret: bytes, *, store_bytes: int, search: str = ""
) -> RedisDonors | None:
    """The donors in the store that a setting names, for those who know a secret; None where that is no Redis. They take
    a quarter of the bytes that answers may take, beside those.

    Args:
        where: the setting ``--store``.
        search: the setting ``--donor-search``, a Redis with vector sets in which donors lie in place of that one.

    Raises:
        ConfigError: as `RedisDonors`, and where the one to search answers and has no vector sets.
    """
    if not is_redis(search or where):
        return None
    donors = RedisDonors(
        search or where,
        timeout_s=timeout_s,
        name=f"log:{hmac.digest(secret, b'entry log', 'sha256').hex()[:16]}",
        max_bytes=store_bytes // _SHARE,
        vector_sets=bool(search),
    )
    if search and not donors.has_vector_sets():
        donors.close()
        raise ConfigError("--donor-search", search, SEARCHING.text)
    return donors


def _end(place: Place, found: Sequence[tuple[Place, bytes]]) -> Place:
    return found[-1][0] if found else place
