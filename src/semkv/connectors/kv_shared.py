"""What the connector, the manager and the tier of one engine share, all in the scheduler's process."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from semkv.connectors.break_even import BreakEven
from semkv.connectors.resets import namespace_after
from semkv.connectors.settings import KVSettings
from semkv.keys import digest
from semkv.stores.blocks import BlockStore

log = logging.getLogger("semkv.connectors")


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the tier must know of a request, beyond its keys.

    Attributes:
        owner: the tag of its tenant (`semkv.stores.block_file.owner_of`).
        adapter: digest of its LoRA adapter's weights; empty without one.
    """

    owner: str = ""
    adapter: str = ""

    def params(self) -> dict[str, str]:
        """As they travel in the request's ``kv_transfer_params``, which vLLM hands to every tier."""
        return {"owner": self.owner, "adapter": self.adapter}


def request_facts(params: Mapping[str, Any] | None) -> RequestFacts:
    """Read `RequestFacts.params` back. The connector writes them over whatever a client sent."""
    found = (params or {}).get("semkv") or {}
    return RequestFacts(str(found.get("owner", "")), str(found.get("adapter", "")))


@dataclass
class KVShared:
    """See the module.

    Attributes:
        settings: of the connector.
        store: on disk; None where it cannot be opened.
        layout: of a row, as it stands in the head of every block file.
        facts: what the namespace is a digest of; called once, when the first request comes.
        gate: whether a load from disk is worth it; None where that is not asked.
        counters: of this process and of the disk process; see `semkv.connectors.tier.COUNTERS`.
        records: of each block in host memory, its tenant's tag and when it was computed, in seconds since the epoch.
        stamp: another object after each purge and reset; what was found in the index before does not count any more.
        storing: False while nothing may be stored.
        renamed: whether a reset gave this engine a namespace of its own, which ends with it.
    """

    settings: KVSettings
    store: BlockStore | None
    layout: Any
    facts: Callable[[], dict[str, object]]
    gate: BreakEven | None = None
    counters: Counter[str] = field(default_factory=Counter)
    records: dict[bytes, tuple[str, float]] = field(default_factory=dict)
    stamp: object = field(default_factory=object)
    storing: bool = True
    renamed: bool = False
    _base: str = ""
    _names: dict[str, str] = field(default_factory=dict)

    def namespace(self, adapter: str = "") -> str:
        """The name under which this engine's blocks lie in the store, for one LoRA adapter or none."""
        if not self._base:
            self._base = digest("kv", json.dumps(self.facts(), sort_keys=True, default=str))
        if adapter not in self._names:
            self._names[adapter] = digest("adapter", self._base, adapter) if adapter else self._base
        return self._names[adapter]

    def rename(self) -> list[str]:
        """Go on under a namespace of this engine's own; returns the names that it used so far."""
        base, used = self.namespace(), self.used()
        self._base, self.renamed, self.stamp = namespace_after(base), True, object()
        self._names.clear()
        return used

    def used(self) -> list[str]:
        """The namespaces in use since the last reset."""
        return list(self._names.values())

    def fault(self, where: str) -> None:
        """Count and log the exception that is being handled: it is a miss."""
        log.warning("semkv: %s of KV blocks failed; the request goes on without", where, exc_info=True)
        self.counters["errors"] += 1

    def totals(self) -> Counter[str]:
        """All counts since the start, the store's among them."""
        return self.counters + Counter({} if self.store is None else self.store.counters)
