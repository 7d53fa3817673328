"""The gateway's hints about a request's conversation, in ``kv_transfer_params.semkv.hints``.

A hint chooses among what the operator of the engine has allowed: how long blocks of the request's own tenant stay in
host memory, within that tenant's budget, and which of the operator's own peers is asked for them. So a hint of a
stranger does no harm. One that is wrong in any way says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from semkv_vllm import REPORT_KEY

LONGEST_S = 86_400.0
"""For which blocks are kept at most."""

_MOST_CHARACTERS = 128
_KNOWN = frozenset(("session", "keep_s", "prefetch", "peer"))


@dataclass(frozen=True, slots=True)
class Hints:
    """
    Attributes:
        session: the conversation's name, which is the tenant's own; empty for none.
        keep_s: for how many seconds from the request's end the conversation's blocks are kept in host memory. 0 lets
            go of them.
        prefetch: bring what the conversation had at its last request into host memory now. The request itself is none
            of its turns.
        peer: ``host:port`` of the peer that has the beginning of the prompt; empty for none.
    """

    session: str = ""
    keep_s: float = 0.0
    prefetch: bool = False
    peer: str = ""


NO_HINTS = Hints()


def read_hints(params: object, peers: Collection[str] = ()) -> Hints:
    """The hints in a request's ``kv_transfer_params``.

    Args:
        params: whatever came with the request.
        peers: those that may be asked.
    """
    said = params.get(REPORT_KEY) if isinstance(params, Mapping) else None
    given = said.get("hints") if isinstance(said, Mapping) else None
    if not isinstance(given, dict) or not given.keys() <= _KNOWN:
        return NO_HINTS
    hints = Hints(**given)
    return hints if _is_right(hints, peers) else NO_HINTS


def _is_right(hints: Hints, peers: Collection[str]) -> bool:
    if not isinstance(hints.session, str) or len(hints.session) > _MOST_CHARACTERS:
        return False
    if not isinstance(hints.peer, str) or (hints.peer and hints.peer not in peers):
        return False
    return _is_time(hints.keep_s) and isinstance(hints.prefetch, bool)


def _is_time(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= LONGEST_S
