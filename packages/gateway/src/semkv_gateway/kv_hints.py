"""What the gateway tells vLLM's KV connector of a request: which conversation it belongs to, for how long that is to be
kept in host memory, and which other server has its beginning (`semkv_vllm.hints`).

A conversation is what a client calls one: OpenAI's ``prompt_cache_key``, or a mark ``cache_control`` of Anthropic's in
the request. The name that goes upstream is a digest that only this deployment can make.

A client that has named one may have it brought back ahead of its next turn, or let go of, by a short request with
``kv_transfer_params.semkv.conversation``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from semkv.tenants import keyed_digest
from semkv_gateway.http import Call
from semkv_gateway.routes import HINT, is_hint

HINTED = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
)
"""Routes of vLLM that hand ``kv_transfer_params`` to the connector."""

PARAMS = "kv_transfer_params"
_OURS = "semkv"
_HINTS = "hints"
_WISH = "conversation"
_PREFETCH = "prefetch"
_LET_GO = "let go"
_MOST_CHARACTERS = 4096  # of a name that a client gives
# Seconds, by what the clients' providers promise.
_USUAL_S = 300
_BY_RETENTION = {"24h": 86_400}
_BY_TTL = {"1h": 3_600}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request's conversation: its name, and for how many seconds after the request it is kept; ``prefetch``: what it
    had at its last turn is brought into host memory."""

    name: str
    keep_s: int
    prefetch: bool = False


def conversation_of(body: Mapping[str, Any], tenant: str, secret: bytes) -> Conversation | None:
    """The conversation that a request's body says it belongs to; None where it says none."""
    given = body.get("prompt_cache_key")
    marks = list(_marks(body))
    if isinstance(given, str) and 0 < len(given) <= _MOST_CHARACTERS:
        name = f"key {given}"
    elif marks and _objects(body.get("messages")):
        name = f"beginning {_beginning(body)}"
    else:
        return None
    retention = body.get("prompt_cache_retention")
    times = [_BY_TTL.get(str(mark.get("ttl")), _USUAL_S) for mark in marks]
    keep_s = max([_BY_RETENTION.get(str(retention), _USUAL_S), *times])
    wish = _said(body).get(_WISH)
    if wish == _LET_GO:
        keep_s = 0
    digest = keyed_digest(secret, "conversation:", json.dumps([tenant, name]))
    return Conversation(digest[:16].hex(), keep_s, prefetch=wish == _PREFETCH)


def _said(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a body says to semkv's connector."""
    params = body.get(PARAMS)
    said = params.get(_OURS) if isinstance(params, dict) else None
    return said if isinstance(said, dict) else {}


def _marks(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every ``cache_control`` that only says how long to keep a beginning."""
    for holder in (body, *_parts(body)):
        mark = holder.get(HINT)
        if isinstance(mark, dict) and is_hint(mark):
            yield mark


def _parts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What may have a mark, beside the body itself."""
    messages = _objects(body.get("messages"))
    for holders in (messages, _objects(body.get("tools")), _objects(body.get("system"))):
        yield from holders
    for message in messages:
        yield from _objects(message.get("content"))


def _objects(value: Any) -> list[Mapping[str, Any]]:
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, dict)]


def _beginning(body: Mapping[str, Any]) -> str:
    """What all turns of a conversation have in common: all up to the first message of a user."""
    first = []
    for message in _objects(body.get("messages")):
        first.append([message.get("role"), _unmarked(message.get("content"))])
        if message.get("role") == "user":
            break
    system = _unmarked(body.get("system"))
    return json.dumps([body.get("model"), system, first], sort_keys=True)


def _unmarked(content: Any) -> Any:
    """A content without marks, which clients move from turn to turn. A text is the part that a mark makes of it."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return content
    return [_without_mark(part) if isinstance(part, dict) else part for part in content]


def _without_mark(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != HINT}


def hinted(
    call: Callable[[bool], Call],
    conversation: Conversation | None,
    peer: str,
    spans: Mapping[str, Any] | None = None,
) -> Callable[[bool], Call]:
    """Add ``kv_transfer_params`` to the request that ``call`` makes. A request without salts gets no hints, since its
    engine knows no tenants.

    Args:
        call: makes the request, with salts (True) or without; its body is a JSON object with fields, none of which is
            ``kv_transfer_params``, unless there is nothing to tell.
        conversation: of the request.
        peer: ``host:port`` of the p2p tier of the server that has its beginning; empty for none.
        spans: what the request says of documents that are reused.
    """
    hints: dict[str, Any] = {}
    if conversation is not None:
        hints["session"] = conversation.name
        hints["keep_s"] = conversation.keep_s
        if conversation.prefetch:
            hints["prefetch"] = True
    if peer:
        hints["peer"] = peer

    def made(salted: bool) -> Call:
        plain = call(salted)
        told = dict(spans or {})
        if salted and hints:
            told[_HINTS] = hints
        if not told:
            return plain
        params = json.dumps({PARAMS: {_OURS: told}}, separators=(",", ":"))
        body = plain.body.rstrip()
        return replace(plain, body=body[:-1] + b"," + params[1:].encode())

    return made


def without_hints(body: dict[str, Any]) -> dict[str, Any]:
    """A body without what its client says of conversations to the connector: only the gateway's word counts there."""
    said = _said(body)
    if said.keys().isdisjoint((_HINTS, _WISH)):
        return body
    rest = {name: value for name, value in said.items() if name not in (_HINTS, _WISH)}
    others = {name: value for name, value in body[PARAMS].items() if name != _OURS}
    params = {**others, _OURS: rest} if rest else others
    bare = {name: value for name, value in body.items() if name != PARAMS}
    return {**bare, PARAMS: params} if params else bare
