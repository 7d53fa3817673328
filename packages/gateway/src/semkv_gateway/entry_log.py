"""The log of entries in Redis, by which gateways of several directories share donors.

The log is two streams in Redis, and a name:

    {semkv:<name>}:entries    what was recorded, and what was removed, in order: the latest 8,192, of one day
    {semkv:<name>}:removals   the latest 1,000 removals again, under the same ids, for readers that were away
    {semkv:<name>}:begun      a name of the log: a reader that finds another name knows that the log was emptied
"""

from __future__ import annotations

import hmac
import time
import uuid
from collections.abc import Callable
from typing import Any

from semkv.tiers.sharing import EntryLog, LogBatch
from semkv_gateway.responses.opening import is_redis
from semkv_gateway.responses.redis import asking, connect, root_of

_ENTRIES = 8192
_KEPT_S = 86_400
_REMOVALS = 1000
_BATCH = 256

# KEYS: entries, removals. ARGV: a removal, how many are kept. A full Redis refuses XADD, but not in a script that has
# written before: so make room first.
_REMOVE = """
redis.call('XTRIM', KEYS[2], 'MAXLEN', ARGV[2] - 1)
local id = redis.call('XADD', KEYS[1], '*', 'removal', ARGV[1])
redis.call('XADD', KEYS[2], id, 'removal', ARGV[1])
return id
"""


class RedisEntryLog(EntryLog):
    """A log that the gateways of one deployment share.

    Args:
        url: of Redis.
        timeout_s: longest wait for a connection and for an answer.
        name: deployments with different names share nothing.

    Raises:
        ConfigError: as `RedisStore`.
    """

    def __init__(self, url: str, *, timeout_s: float = 0.25, name: str = "log") -> None:
        self._db: Any = connect(url, timeout_s)
        root = root_of(name)
        self._entries = f"{root}:entries"
        self._removals = f"{root}:removals"
        self._begun = f"{root}:begun"
        self._remove = self._db.register_script(_REMOVE)

    def add(self, entry: bytes) -> None:
        """Append an entry."""
        with asking():
            pipe = self._db.pipeline()  # one transaction, which a full Redis refuses as a whole
            pipe.xadd(self._entries, {"entry": entry}, maxlen=_ENTRIES, approximate=True)
            pipe.xtrim(self._entries, minid=int((time.time() - _KEPT_S) * 1000), approximate=True)
            pipe.expire(self._entries, _KEPT_S)
            pipe.execute()

    def remove(self, removal: bytes, concerns: Callable[[bytes], bool]) -> None:
        """Append a removal, and delete the entries before it that it concerns."""
        with asking():
            last = self._remove(keys=[self._entries, self._removals], args=[removal, _REMOVALS])
            start = "-"
            while rows := self._db.xrange(self._entries, min=start, max=last, count=_BATCH):
                gone = [
                    name
                    for name, fields in rows
                    if b"entry" in fields and concerns(fields[b"entry"])
                ]
                if gone:
                    self._db.xdel(self._entries, *gone)
                start = f"({rows[-1][0].decode()}"

    def read(self, cursor: str) -> LogBatch:
        """What comes after a cursor; an empty one asks for all that there is. At most `_BATCH` entries at once."""
        name = cursor.rpartition(" ")[0]
        place = cursor.rpartition(" ")[2]
        with asking():
            begun = self._name()
            emptied = bool(name) and name != begun
            after = f"({place}" if place and not emptied else "-"
            pipe = self._db.pipeline(
                transaction=False
            )  # a full Redis refuses a transaction, even one that only reads
            pipe.xrange(self._removals, min=after)
            pipe.xrange(self._entries, min=after, count=_BATCH)
            removals, rows = pipe.execute()
        if after == "-":
            removals = []
        lost = emptied or len(removals) >= _REMOVALS
        found = dict(rows)
        last = _place(rows[-1][0]) if len(rows) == _BATCH else None
        found |= {name: fields for name, fields in removals if last is None or _place(name) <= last}
        names = sorted(found, key=_place)
        place = names[-1].decode() if names else "" if emptied else place
        news = [
            (b"removal" in found[name], next(iter(found[name].values()), b"")) for name in names
        ]
        return LogBatch(f"{begun} {place}", tuple(news), lost)

    def _name(self) -> str:
        """What this log is called since it was last empty."""
        name = self._db.get(self._begun)
        if name is None:
            self._db.set(self._begun, uuid.uuid4().hex, nx=True)
            name = self._db.get(self._begun)
        return str((name or b"").decode())

    def close(self) -> None:
        """Let go of connections."""
        self._db.close()


def open_entry_log(where: str, timeout_s: float, secret: bytes) -> RedisEntryLog | None:
    """The log in the store that a setting names, for those who know a secret; None where that is no Redis. Raises as
    `RedisEntryLog`."""
    if not is_redis(where):
        return None
    return RedisEntryLog(
        where,
        timeout_s=timeout_s,
        name=f"log:{hmac.digest(secret, b'entry log', 'sha256').hex()[:16]}",
    )


def _place(name: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(b"-"))
