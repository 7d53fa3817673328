"""The tenant's ``cache_salt``: what keeps tenants apart in vLLM's own prefix cache.

Every request to a route that takes one gets it, also the requests that have no key and are passed on: nobody can leave
his tenant by asking in a way that the gateway does not cache.
"""

from __future__ import annotations

import hmac
import json
from typing import Any

from semkv.keys import media_uuid

# Routes of vLLM that run the model and read `cache_salt` from the body.
SALTED = frozenset(
    "/v1/chat/completions /v1/chat/completions/batch /v1/completions /v1/responses /v1/messages /v1/embeddings"
    " /v1/score /v1/rerank /v2/rerank /v1/systemone /score /rerank /classify /pooling /inference/v1/generate"
    " /invocations".split()
)


class NoPlace(ValueError):  # noqa: N818
    """The body is no JSON object, so it has no place for a salt."""


def tenant_salt(secret: bytes, tenant: str, own: object) -> str:
    """64 hex digits: one salt for each tenant and each salt of the tenant's own (None: none).

    Raises:
        ValueError: ``own`` is no JSON.
    """
    said = json.dumps(["salt", tenant, own], sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hmac.digest(secret, said.encode(), "sha256").hex()


def salted(raw: bytes, tenant: str, secret: bytes) -> bytes:
    """A body as it came but for the tenant's salt, and for media uuids that nobody outside the tenant can name.

    It is read as Python reads JSON, which is how vLLM reads it: of a name that comes twice the last one counts.

    Raises:
        NoPlace: it is no JSON object.
    """
    try:
        body = json.loads(raw)
        if not isinstance(body, dict):
            raise NoPlace("the body is no JSON object")
        if "messages" in body:
            body["messages"] = _named(body["messages"], tenant_salt(secret, tenant, None))
        body["cache_salt"] = tenant_salt(secret, tenant, body.get("cache_salt"))
        return json.dumps(body, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise NoPlace("the body is no JSON object, or nested too deeply") from error


def _named(value: Any, salt: str) -> Any:
    """``value`` with the client's own media uuids made the tenant's; they never equal one that `body` makes."""
    if isinstance(value, list):
        return [_named(item, salt) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = dict(value)
    if isinstance(value.get("content"), list):
        renamed["content"] = _named(value["content"], salt)
    if isinstance(uuid := value.get("uuid"), str):
        renamed["uuid"] = media_uuid(salt, f"own {uuid}")
    return renamed
