"""What a client may say in ``kv_transfer_params``: a list of keys that are known to be harmless, each with its values.

vLLM hands these parameters to every tier. Some of its tiers read addresses of other machines from them, and a value of
the wrong kind ends the engine. So whatever is not on the list, or has a value that is not, is dropped.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm.v1.kv_offload.base import Locality, Medium

_MOST_TOKENS = 1 << 40
_MOST_MATCHERS = 16
_MOST_CHARACTERS = 1024

PEER_KEY = "remote_kv_source"
_PEERS = (PEER_KEY, "remote_prefiller", "remote_decoder")
"""Where vLLM's ``p2p`` reads what the other side of a transfer is."""


def client_params(given: object, allowed: Collection[str] = ()) -> dict[str, Any]:
    """What of a client's ``kv_transfer_params`` may be handed on to vLLM and its tiers.

    Args:
        given: whatever the client sent.
        allowed: keys that the operator allows beside the harmless ones.
    """
    if not isinstance(given, Mapping):
        return {}
    kept = {
        key: given[key]
        for key, is_right in _HARMLESS.items()
        if key in given and is_right(given[key])
    }
    for key in allowed:
        if key in given and key not in _HARMLESS and (key not in _PEERS or _is_peer(given[key])):
            kept[key] = given[key]
    return kept


def peer_params(peer: str) -> dict[str, Any]:
    """What vLLM's ``p2p`` reads of the peer (``host:port``) that a request's blocks are asked of. Each request has an
    id of its own there, which nobody else can name."""
    parts = peer.rpartition(":")
    return {
        "kv_request_id": uuid.uuid4().hex,
        "remote_host": parts[0],
        "remote_port": int(parts[2]),
    }


def _is_limit(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_TOKENS


def _is_tier_list(value: object) -> bool:
    """A list of objects such as ``{"medium": "CPU"}``, as vLLM reads them."""
    return isinstance(value, list) and len(value) <= _MOST_MATCHERS and all(map(_is_matcher, value))


def _is_matcher(value: object) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    return all(key in _TIERS and _names(_TIERS[key], asked) for key, asked in value.items())


def _names(kinds: Any, asked: object) -> bool:
    return isinstance(asked, str) and asked.upper() in {kind.value for kind in kinds}


def _is_peer(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(key in _PEER and _PEER[key](part) for key, part in value.items())


def _is_word(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MOST_CHARACTERS


def _is_port(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 16


_TIERS: dict[str, Any] = {"medium": Medium, "locality": Locality}
_PEER: dict[str, Callable[[object], bool]] = {
    "kv_request_id": _is_word,
    "remote_host": _is_word,
    "remote_port": _is_port,
}
_HARMLESS: dict[str, Callable[[object], bool]] = {
    "max_load_tokens": _is_limit,  # load less
    "max_offload_tokens": _is_limit,  # store less
    "kv_load_tiers": _is_tier_list,  # load from fewer tiers
}
