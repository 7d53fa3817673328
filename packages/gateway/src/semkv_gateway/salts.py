"""The ``cache_salt`` that keeps tenants apart in vLLM's own prefix cache.

Every request to a route that takes a salt gets its tenant's, also one that has no key and is passed on. A server that
does not know the field gets requests without it, see `Salts`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from semkv.keys import media_uuid
from semkv.tenants import tenant_salt
from semkv_gateway.http import BegunReply, Call, Reply, Upstream, UpstreamError
from semkv_gateway.kv_hints import PARAMS
from semkv_gateway.routes import ROUTES

log = logging.getLogger(__name__)

_UNKNOWN_FIELD = (400, 422)  # statuses of a server that does not take a field
_ADDED = (b"cache_salt", b"uuid", PARAMS.encode())  # names that a request has only with salts
_ERROR_BYTES = 64 * 1024  # of an error that are searched for these names

# Routes of vLLM that run the model and read `cache_salt` from the body.
SALTED = ROUTES.keys() | frozenset(
    "/v1/chat/completions/batch /v1/systemone /classify /pooling /inference/v1/generate /invocations".split()
)


class NoPlace(ValueError):  # noqa: N818
    """The body is no JSON object, so it has no place for a salt."""


def read_object(raw: bytes) -> dict[str, Any]:
    """A body as Python reads JSON, which is how vLLM reads it: of a name that comes twice the last one counts. Raises
    `NoPlace` where it is no JSON object."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise NoPlace("the body is no JSON object, or nested too deeply") from error
    if not isinstance(body, dict):
        raise NoPlace("the body is no JSON object")
    return body


def salted(body: Mapping[str, Any], tenant: str, secret: bytes) -> bytes:
    """A body as it came but for the tenant's salt, and for media uuids that nobody outside the tenant can name."""
    ours = dict(body)
    if "messages" in body:
        ours["messages"] = _named(body["messages"], tenant_salt(secret, tenant, None))
    ours["cache_salt"] = tenant_salt(secret, tenant, body.get("cache_salt"))
    return json.dumps(ours, separators=(",", ":")).encode()


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


class Salts:
    """Sends requests with their salts, and without them once the upstream of this name has refused these.

    The upstream refuses salts where a request fails with an error that names what was added (``cache_salt``, an
    image's ``uuid``) or cannot be read, and succeeds without them. Of the error alone nothing follows: it may repeat
    what a client wrote.
    """

    def __init__(self, name: str, *, on: bool) -> None:
        self._name = name
        self.on = on
        self.refused = False

    async def send(self, upstream: Upstream, call: Callable[[bool], Call]) -> Reply:
        """Send what ``call`` makes with salts (True) or without. Raises `UpstreamError` as the upstream does."""
        reply = await upstream.send(call(self.on))
        if not self.on or reply.status not in _UNKNOWN_FIELD:
            return reply
        begun = BegunReply(reply)
        try:
            other = await _without(upstream, call) if await _may_refuse(begun) else None
        except BaseException:
            await begun.aclose()
            raise
        if other is None:
            return begun
        await begun.aclose()
        self._note()
        return other

    def _note(self) -> None:
        if not self.refused:
            log.warning(
                "the upstream refuses cache_salt, so requests go to it without one (%s). Tenants then share its prefix"
                " cache: the time that an answer takes can reveal what another tenant has asked. Stored answers stay"
                " separate. --no-salt leaves the field out and this warning away",
                self._name,
            )
        self.on = False
        self.refused = True


async def _without(upstream: Upstream, call: Callable[[bool], Call]) -> Reply | None:
    """The answer to a request without a salt; None where it does not succeed either."""
    try:
        reply = await upstream.send(call(False))
    except UpstreamError:
        return None
    if 200 <= reply.status < 300:
        return reply
    await reply.aclose()
    return None


async def _may_refuse(reply: BegunReply) -> bool:
    """Whether an error may be about the salt."""
    encodings = [
        value
        for name, value in reply.headers
        if name == b"content-encoding" and value != b"identity"
    ]
    said = b"" if encodings else await reply.read(_ERROR_BYTES)
    return bool(encodings) or any(name in said for name in _ADDED)
