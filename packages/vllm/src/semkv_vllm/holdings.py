"""What each tenant holds in host memory: a bound on it, and the conversations whose blocks stay there.

vLLM's own LRU decides what leaves host memory. Two things come before it:

- A tenant at his bound gives up a block of his own for each new one, the one that was used longest ago.
- Blocks of a conversation are kept: to vLLM they are as if they were being read, so it evicts none of them. A tenant
  keeps no more than his budget, and half of his bound. There the conversation that spoke longest ago is let go, which
  leaves its blocks to the LRU. All tenants together keep half of host memory at most, and leave room for the blocks of
  a step. Nobody's new conversation ends another's.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from vllm.v1.kv_offload.base import OffloadingEvent, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

from semkv_vllm import REPORT_KEY, private
from semkv_vllm.shared import KVShared, RequestFacts, facts_of, ours

_MOST_SESSIONS = 4096
_REMEMBERED = 4  # keys of conversations, by the blocks that host memory holds
_LOOK_S = 0.25  # between two looks whose time is over

_CONTEXT = ReqContext("semkv-kept")  # in whose name blocks are kept

Name = tuple[str, str]
"""Of a conversation: its tenant's tag, and what the tenant calls it."""


@dataclass
class _Session:
    """A conversation of a tenant.

    Attributes:
        facts: of its last request.
        keys: of its last request's blocks, as many as may be kept, in the order of the prompt, with the token where
            each ends.
        kept: those that are kept.
        until: when it is let go, by the clock.
    """

    facts: RequestFacts
    keys: dict[bytes, int] = field(default_factory=dict)
    kept: set[bytes] = field(default_factory=set)
    until: float = 0.0


class Holdings:
    """See the module. For the scheduler's thread.

    Attributes:
        shared: of the connector.
    """

    def __init__(
        self,
        shared: KVShared,
        primary: Any,
        row_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``primary``: vLLM's host memory, with rows of ``row_bytes``."""
        settings = shared.settings
        rows, _ = primary.get_kv_memoryview().shape or (0, 0)
        self.shared = shared
        self._primary = primary
        self._clock = clock
        self._most = settings.tenant_host_bytes // row_bytes if settings.tenant_host_bytes else rows
        # vLLM stores the blocks of a step or none of them: what is kept leaves room for one.
        self._most_kept_by_all = max(0, min(rows // 2, rows - shared.step_rows))
        self._most_kept = min(
            settings.keep_bytes // row_bytes, self._most // 2, self._most_kept_by_all
        )
        self._most_keys = _REMEMBERED * rows
        self._bounded = self._most < rows
        # By tenant, what he holds and nobody keeps, used longest ago first.
        self._loose: dict[str, OrderedDict[bytes, None]] = {}
        self._owner: dict[bytes, str] = {}
        self._keepers = Counter[bytes]()  # by block, how many conversations keep it
        self._kept_by = Counter[str]()  # by tenant, how many blocks
        self._sessions: OrderedDict[Name, _Session] = OrderedDict()  # spoke longest ago first
        self._keys = 0  # of all conversations
        self._awaited: dict[bytes, set[Name]] = {}  # blocks that are kept as soon as they are there
        self._looked = 0.0

    # ------------------------------------------------------------------ a tenant's bound

    @ours("a tenant's bound", otherwise=())
    def admitted(self, keys: Collection[bytes], context: Any) -> Collection[bytes]:
        """Those of some blocks that a request may store, after its tenant has made room for them."""
        if not self._bounded:
            return keys
        owner = facts_of(context).owner
        new = [key for key in keys if key not in self._owner]
        room = self._most - self._count(owner)
        if room < len(new):
            spared = {*keys, *private.key_positions(context)}
            room += self._give_up(owner, len(new) - room, spared)
        refused = set(new[max(0, room) :])
        # In their order: vLLM pairs them with the blocks that it copies.
        return [key for key in keys if key not in refused]

    def _count(self, owner: str) -> int:
        return len(self._loose.get(owner, ())) + self._kept_by[owner]

    def _give_up(self, owner: str, count: int, spared: set[bytes]) -> int:
        """Take blocks of a tenant out of host memory; how many went. A request's own beginning is spared: without it
        the rest is of no use."""
        primary = self._primary
        gone: list[Any] = []
        for key in self._loose.get(owner, ()):
            if len(gone) >= count:
                break
            if key in spared:
                continue
            if private.remove_unused(primary, key) is None:
                continue
            gone.append(key)
        self.gone(gone)
        self.shared.counters["tenant_evicted_blocks"] += len(gone)
        if gone and primary.events is not None:
            primary.events.append(OffloadingEvent(gone, primary.medium, removed=True))
        return len(gone)

    @ours("a tenant's bound")
    def came(self, keys: Iterable[bytes], context: Any) -> None:
        """Blocks have a place in host memory now."""
        owner = facts_of(context).owner
        for key in keys:
            self._loose.setdefault(owner, OrderedDict())[key] = None
            self._owner[key] = owner

    @ours("a tenant's bound")
    def gone(self, keys: Iterable[bytes]) -> None:
        """Blocks have left host memory."""
        for key in keys:
            owner = self._owner.pop(key, None)
            if owner is None:
                continue
            loose = self._loose[owner]
            loose.pop(key, None)
            if not loose and not self._kept_by[owner]:
                del self._loose[owner]

    @ours("a tenant's bound")
    def used(self, keys: Iterable[bytes]) -> None:
        """Blocks were used, the least important first."""
        for key in keys:
            loose = self._loose.get(self._owner.get(key, ""), None)
            if loose is not None and key in loose:
                loose.move_to_end(key)

    # ------------------------------------------------------------------ conversations

    @ours("a conversation")
    def ended(self, context: Any) -> None:
        """A request has ended: keep what its conversation may keep."""
        facts = facts_of(context)
        keys = private.key_positions(context)
        self.used(reversed(list(keys)))
        if not facts.hints.session or facts.hints.prefetch or not self._most_kept:
            return
        if not keys:  # it was given up before it was scheduled
            return
        if facts.hints.keep_s:
            self.shared.counters["unkept_blocks"] += max(0, len(keys) - self._most_kept)
        keys = dict(islice(keys.items(), self._most_kept))
        name = (facts.owner, facts.hints.session)
        session = self._sessions.get(name) or _Session(facts)
        self._await_no_more(name, session)
        self._let_go(session, session.kept.difference(keys))
        self._keys += len(keys) - len(session.keys)
        session.facts = facts
        session.keys = keys
        self._sessions[name] = session
        self._sessions.move_to_end(name)
        self._keep(name, session)
        self._forget_oldest(name)

    @ours("a conversation", otherwise=None)
    def prefetched(self, context: Any) -> ReqContext | None:
        """In whose name what the conversation of a request had is to be looked up; None for nothing."""
        facts = facts_of(context)
        name = (facts.owner, facts.hints.session)
        session = self._sessions.get(name)
        if not facts.hints.prefetch or session is None:
            return None
        if session.facts.adapter != facts.adapter:
            return None
        self._sessions.move_to_end(name)
        session.facts = facts
        self._keep(name, session)
        found = ReqContext(f"{context.req_id} prefetch", {REPORT_KEY: facts})
        for key, end in session.keys.items():
            found.set_offload_key_position(key, end)
        return found

    def _keep(self, name: Name, session: _Session) -> None:
        """Keep a conversation from now on for as long as its last request says."""
        keep_s = session.facts.hints.keep_s
        session.until = self._clock() + keep_s
        if keep_s:
            self._take(name, session, [key for key in session.keys if key not in session.kept])
        else:
            self._end(name, session)

    def _take(self, name: Name, session: _Session, keys: Iterable[bytes]) -> None:
        """Keep those of some blocks that are there, and await the others."""
        for key in keys:
            chunk = private.chunk_of(self._primary, key)
            if chunk is None or not chunk.is_ready:
                self._awaited.setdefault(key, set()).add(name)
            elif key in self._keepers:
                self._keepers[key] += 1
                session.kept.add(key)
            elif self._has_budget(name):
                self._hold(key)
                session.kept.add(key)
            else:
                self.shared.counters["unkept_blocks"] += 1

    @ours("a conversation")
    def arrived(self, keys: Iterable[bytes]) -> None:
        """Blocks are in host memory now."""
        now = self._clock()
        for key in keys if self._awaited else ():
            for name in self._awaited.pop(key, ()):
                session = self._sessions[name]
                if session.until > now:
                    self._take(name, session, [key])

    def _end(self, name: Name, session: _Session) -> None:
        """Let go of a conversation, and await nothing more of it."""
        self._await_no_more(name, session)
        self._let_go(session, session.kept)

    def _await_no_more(self, name: Name, session: _Session) -> None:
        for key in session.keys:
            names = self._awaited.get(key, set())
            names.discard(name)
            if not names:
                self._awaited.pop(key, None)

    def _has_budget(self, name: Name) -> bool:
        """Whether a tenant may keep a block more, after older conversations of his were let go."""
        owner = name[0]
        own = self._sessions[name].kept
        while self._kept_by[owner] >= self._most_kept:
            if len(own) >= self._kept_by[owner]:  # no other has anything to let go
                return False
            older = (
                other
                for other, session in self._sessions.items()
                if other[0] == owner and other != name and session.kept
            )
            oldest = next(older, None)
            if oldest is None:
                return False
            self._end(oldest, self._sessions[oldest])
        return len(self._keepers) < self._most_kept_by_all

    def _hold(self, key: bytes) -> None:
        owner = self._owner[key]
        loose = self._loose[owner]
        # The last step that may fail, so a fault leaves nothing pinned.
        self._primary.prepare_read([key], _CONTEXT)
        self._keepers[key] = 1
        loose.pop(key, None)
        self._kept_by[owner] += 1
        self.shared.counters["kept_blocks"] += 1

    def _let_go(self, session: _Session, keys: Iterable[bytes]) -> None:
        """Leave blocks of a conversation to vLLM's LRU, unless another one keeps them."""
        for key in list(keys):
            session.kept.discard(key)
            self._keepers[key] -= 1
            if not self._keepers[key]:
                self._release(key)

    def _release(self, key: bytes) -> None:
        del self._keepers[key]
        self._primary.complete_read([key], _CONTEXT)  # first: a fault leaves nothing pinned
        owner = self._owner[key]
        self._kept_by[owner] -= 1
        if not self._kept_by[owner]:
            del self._kept_by[owner]
        self._loose[owner][key] = None

    @ours("a conversation")
    def drop(self, key: bytes) -> None:
        """Nobody keeps a block any more, which is to leave host memory."""
        if key not in self._keepers:
            return
        for session in self._sessions.values():
            session.kept.discard(key)
        self._release(key)

    @ours("a conversation")
    def step(self) -> None:
        """Let go of what has been kept long enough."""
        now = self._clock()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        for name, session in self._sessions.items():
            if session.kept and session.until <= now:
                self._end(name, session)

    def _forget_oldest(self, speaker: Name) -> None:
        """Remember so many conversations and blocks at most. First go others of the tenant who spoke, then those of
        which nothing is kept."""
        while len(self._sessions) > _MOST_SESSIONS or (
            self._keys > self._most_keys and len(self._sessions) > 1
        ):
            own = (name for name in self._sessions if name[0] == speaker[0] and name != speaker)
            idle = (name for name, session in self._sessions.items() if not session.kept)
            oldest = next(iter(self._sessions))
            self._forget(next(own, None) or next(idle, oldest))

    def _forget(self, name: Name) -> None:
        session = self._sessions.pop(name)
        self._keys -= len(session.keys)
        self._end(name, session)

    @ours("a purge")
    def forget(self, owner: str | None) -> None:
        """Forget all conversations, or those of a tenant."""
        for name in [name for name in self._sessions if owner in (None, name[0])]:
            self._forget(name)

    def reset(self) -> None:
        """Host memory is empty now."""
        self._loose.clear()
        self._owner.clear()
        self._keepers.clear()
        self._kept_by.clear()
        self._sessions.clear()
        self._awaited.clear()
        self._keys = 0

    def kept(self) -> int:
        """How many blocks are kept."""
        return len(self._keepers)


class HeldPrimary(CPUPrimaryTierOffloadingManager):
    """vLLM's host memory, with holdings."""

    holdings: Holdings

    @classmethod
    def of(cls, primary: CPUPrimaryTierOffloadingManager, holdings: Holdings) -> None:
        """Turn vLLM's host memory into one of these."""
        made: Any = primary
        made.__class__ = cls
        made.holdings = holdings
        made.prepare_write = made.prepare_promotion
        made.complete_write = made.complete_store

    def prepare_store(
        self, keys: Collection[Any], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        admitted: Sequence[Any] = list(self.holdings.admitted(keys, req_context))
        prepared = super().prepare_store(admitted, req_context)
        if prepared is not None:
            self.holdings.gone(prepared.evicted_keys)
            self.holdings.came(prepared.keys_to_store, req_context)
        return prepared

    def prepare_promotion(
        self, keys: Collection[Any], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """`prepare_store` of what comes from a tier below; None where there is no room."""
        prepared = self.prepare_store(keys, req_context)
        return None if prepared is None or not prepared.keys_to_store else prepared

    def complete_store(
        self, keys: Collection[Any], req_context: ReqContext, success: bool = True
    ) -> None:
        super().complete_store(keys, req_context, success)
        if success:
            self.holdings.arrived(keys)
        else:
            self.holdings.gone(key for key in keys if private.chunk_of(self, key) is None)

    def prepare_load(self, keys: Collection[Any], req_context: ReqContext) -> Any:
        self.holdings.used(reversed(list(keys)))
        return super().prepare_load(keys, req_context)
