"""The names under which an engine's KV blocks lie in the store, for both halves of the connector. No vLLM, no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from semkv.keys import digest


def rank_namespace(namespace: str, rank: int) -> str:
    """The namespace of one rank's blocks."""
    return digest("rank", namespace, str(rank))


def block_keys(hashes: Sequence[bytes], adapter: str) -> list[bytes]:
    """The engine's block hashes as keys of the store, apart for each LoRA adapter's weights."""
    if not adapter:
        return [bytes(h) for h in hashes]
    return [hashlib.sha256(adapter.encode() + h).digest() for h in hashes]
