"""Donors in Redis, by which gateways of several directories share them.

    {semkv:donors:<name>:<partition>}   stream: the rows of a partition, the latest of a day
    ...}:wrong                          stream: its pairs found wrong
    ...}:vectors:<encoder>              vector set: its entries by their vectors, each with the place of its row
    {semkv:<part>:1}:removals           stream: the latest 1,000 removals
    {semkv:<part>:1}:reports            stream: the latest 4,096 pairs found wrong by who did not have the donor
    {semkv:<part>:1}:begun              a name of those logs: who finds another name knows that they were emptied
    {semkv:<part>:1}:partitions         sorted set: partitions by when they were written last
    {semkv:<part>:1}:encoders           sorted set: encoders that have vectors, by when one of theirs wrote last
    {semkv:<part>:1}:sizes              hash: bytes by partition;  {semkv:<part>:1}:bytes: their sum

A partition has a hash tag of its own, so the nodes of a cluster share them out, and one script changes it. On a cluster
there are sixteen parts, each with a sixteenth of the slots: the partitions in those, and their logs and sizes. A node
that is away so takes with it what is on it, and no more than that. Every removal is in the log of each part. A single
server is one part. So is a cluster that is searched, since one partition may then have half of all bytes.

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
from semkv.tiers.sharing import MOST, DonorStore, Logs, Place, Reached, Removals, SharedRow, numbers
from semkv_gateway.responses.opening import is_redis
from semkv_gateway.responses.redis import asking, connect, is_replicated, root_of
from semkv_gateway.responses.spread import PARTS, part_name, part_of_slot
from semkv_gateway.settings import SEARCHING
from semkv_stores.digests import digest

if TYPE_CHECKING:
    from semkv.types import Vector

_FORMAT = "2"  # gateways of another one share nothing
_KEPT_S = 86_400
_REMOVALS = 1000
_REPORTS = 4096  # which clients make; removals are made by operators, and by a model's change
_PAGE = 256
_SHARE = 4  # bytes of answers to one of donors
_LARGEST_SHARE = 2  # bytes of all partitions to those of the largest one that is searched
_NEVER = (1 << 63, 0)  # a place that no log reaches

# KEYS: a log. ARGV: what is added, how many are kept. A full Redis refuses XADD, but not in a script that has written
# before: so make room first.
_REMOVE = """
redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[2] - 1)
return redis.call('XADD', KEYS[1], '*', 'removal', ARGV[1])
"""
# KEYS: name of the logs, logs. ARGV: a name for logs that have none; for each log a name, and where to read it from if
# that is its own. Returns the name, and of each log its rows and its last one.
_LOGGED = """
local name = redis.call('GET', KEYS[1])
if not name then
  name = ARGV[1]
  redis.call('SET', KEYS[1], name)
end
local found = {name}
for at = 2, #KEYS do
  local first = '-'
  if ARGV[2 * at - 2] == name then first = ARGV[2 * at - 1] end
  found[#found + 1] = redis.call('XRANGE', KEYS[at], first, '+')
  found[#found + 1] = redis.call('XREVRANGE', KEYS[at], '+', '-', 'COUNT', 1)
end
return found
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
            of these bytes hold. On a cluster those who search share nothing with those who do not.

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
        self._timeout_s = timeout_s
        is_spread = "+cluster://" in url and not vector_sets
        self.parts = PARTS if is_spread else 1
        self._name = f"{name}:spread" if is_spread else name
        self._max_bytes = max_bytes // self.parts
        self._vector_sets = vector_sets
        self._encoder = ""  # whose vectors are searched
        self._others: Sequence[str] = ()  # encoders by whose vectors other gateways search
        names = [part_name(self._name, part) for part in range(PARTS)] if is_spread else [name]
        self._roots = [root_of(one) for one in names]

    def part_of(self, partition: str) -> int:
        return part_of_slot(self._key(partition)) if self.parts > 1 else 0

    def _about(self, partition: str) -> list[str]:
        """Keys of what is known of all partitions of a part: when they were written, sizes, their sum."""
        root = self._roots[self.part_of(partition)]
        return [f"{root}:{name}" for name in ("partitions", "sizes", "bytes")]

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

    def add(self, partition: str, data: bytes, since: str, *, most: int = MOST) -> None:
        with asking():
            keys = self._written(partition)
            self._sized(partition, self._run(_ADD, keys, 1, data, since, most, _KEPT_S))

    def add_wrong(self, partition: str, data: bytes, since: str) -> None:
        with asking():
            keys = self._written(partition)
            self._sized(partition, self._run(_ADD, keys, 2, data, since, MOST, _KEPT_S))

    def add_item(
        self, partition: str, data: bytes, since: str, item: str, vector: Vector | None
    ) -> None:
        with asking():
            keys = self._written(partition)
            if not self._searched:
                size = self._run(_ADD, keys, 1, data, since, MOST, _KEPT_S)
            else:
                packed = b""
                if vector is not None and self._encoder:
                    packed = vector.astype("<f4").tobytes()
                largest = self._max_bytes // _LARGEST_SHARE
                size = self._run(_ADD_SEARCHED, keys, data, since, item, packed, _KEPT_S, largest)
            self._sized(partition, size)

    def _written(self, partition: str) -> list[str]:
        """Note that a partition is written, first of all, so that all that is there is known. Returns its keys."""
        root = self._roots[self.part_of(partition)]
        keys = [f"{root}:partitions", f"{root}:encoders"]
        self._note_encoders(self._run(_WRITTEN, keys, partition, self._encoder, 2 * _KEPT_S))
        return self._keys(partition)

    def _sized(self, partition: str, size: int) -> None:
        """Note how large a partition is, and let others go where all are too large."""
        about = self._about(partition)
        for gone in self._run(_SIZED, about, partition, size, self._max_bytes, _KEPT_S):
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

    def remove(self, part: int, removal: bytes, *, is_report: bool = False) -> bool:
        root = self._roots[part]
        log = f"{root}:reports" if is_report else f"{root}:removals"
        with asking():
            self._run(_REMOVE, [log], removal, _REPORTS if is_report else _REMOVALS)
            return is_replicated(self._db, root, self._timeout_s)

    def removals(self, part: int, after: Place) -> Removals:
        return self._logged(part, [("removals", _REMOVALS, after)])[0]

    def logs(self, part: int, after: Reached) -> Logs:
        asked = [
            ("removals", _REMOVALS, after.removals),
            ("reports", _REPORTS, after.reports),
        ]
        return Logs(*self._logged(part, asked))

    def _logged(self, part: int, asked: Sequence[tuple[str, int, Place]]) -> list[Removals]:
        """What some logs of a part have after a place in each, from names, lengths and places."""
        root = self._roots[part]
        keys = [f"{root}:begun"]
        values = [uuid.uuid4().hex]
        for name, _, after in asked:
            keys.append(f"{root}:{name}")
            values += [after.log, f"{after.at[0]}-{after.at[1]}"]
        with asking():
            log, *found = self._run(_LOGGED, keys, *values)
        name = log.decode()
        ends = found[1::2]
        return [
            _removals(after if after.log == name else Place(name), rows, end, most)
            for (_, most, after), rows, end in zip(asked, found[::2], ends, strict=True)
        ]

    def sweep(
        self, concerns: Callable[[bytes], bool], among: Callable[[str], bool] | Sequence[str]
    ) -> None:
        encoders: list[bytes] = []
        for root in self._roots:
            with asking():
                encoders += self._db.zrange(f"{root}:encoders", 0, -1)
        self._note_encoders(list(dict.fromkeys(encoders)))
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
        for root in self._roots:
            cursor = 0
            while True:
                with asking():
                    cursor, rows = self._db.zscan(f"{root}:partitions", cursor, count=_PAGE)
                for name, _ in rows:
                    yield name.decode()
                if not cursor:
                    break

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
        name=f"{_FORMAT}:{hmac.digest(secret, b'entry log', 'sha256').hex()[:16]}",
        max_bytes=store_bytes // _SHARE,
        vector_sets=bool(search),
    )
    if search and not donors.has_vector_sets():
        donors.close()
        raise ConfigError("--donor-search", search, SEARCHING.text)
    return donors


def _removals(after: Place, rows: Sequence[Any], last: Sequence[Any], most: int) -> Removals:
    """What a log of at most so many rows has after a place, from those that Redis has from that place on."""
    found = [_row(after.log, row) for row in rows]
    end = _row(after.log, last[0])[0] if last else Place(after.log)
    if not after.at[0]:  # from the first one on, where that is still there
        is_whole = len(found) < most
        return Removals(after if is_whole else found[0][0], tuple(found), end)
    if found and found[0][0] == after:
        return Removals(after, tuple(found[1:]), end)
    # It has dropped the place since, or lost its own end.
    reached = found[0][0] if found else Place(after.log, _NEVER)
    return Removals(reached, tuple(found), end)


def _row(log: str, row: Sequence[Any]) -> tuple[Place, bytes]:
    """The place and the value of a stream's row."""
    at = numbers(row[0].decode())
    return Place(log, at), bytes(row[1][1])
