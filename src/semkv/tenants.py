"""How the tenants of a deployment are named in its stores and in vLLM: by digests that need the deployment's secret."""

from __future__ import annotations

import hmac
import json
from functools import lru_cache

_SECRETS = 16  # of which one HMAC each is begun
_encode = json.JSONEncoder(
    sort_keys=True,
    ensure_ascii=False,
    separators=(",", ":"),
    allow_nan=False,
).encode


def named_tenant(secret: bytes, name: str) -> str:
    """The digest of the tenant that a trusted proxy calls so; ``name`` is text decoded as Latin-1, as headers are."""
    return tenant_of(keyed_digest(secret, "named:", name))


def tenant_of(found: bytes) -> str:
    """The name that a tenant has in the stores."""
    return found[:16].hex()


def keyed_digest(secret: bytes, kind: str, name: str) -> bytes:
    """A digest that only holders of the secret can compute; ``kind`` keeps names of different origin apart."""
    return signature(secret, (kind + name).encode("utf-8", "surrogateescape"))


def tenant_salt(secret: bytes, tenant: str, own: object) -> str:
    """64 hex digits: one salt for each tenant and each salt of the tenant's own (None: none)."""
    return signature(secret, _encode(["salt", tenant, own]).encode()).hex()


def signature(secret: bytes, data: bytes) -> bytes:
    """HMAC-SHA256. OpenSSL takes 6 us to begin one, and lets go of Python's lock meanwhile; a copy takes 1 us."""
    signing = _begun(secret).copy()
    signing.update(data)
    return signing.digest()


@lru_cache(_SECRETS)
def _begun(secret: bytes) -> hmac.HMAC:
    return hmac.new(secret, digestmod="sha256")
