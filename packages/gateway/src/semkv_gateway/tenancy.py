"""Tenants: which client asks, what it may ask of the cache, and labels (tags) of answers.

Labels come from rules, which look only at prompt and model, and from a header of a trusted proxy. The header's labels
are part of a request's key: a label removes everything that was ever served under it.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Network, ip_address

from semkv.errors import ConfigError
from semkv.latest import Latest
from semkv.tenants import keyed_digest, named_tenant, tenant_of
from semkv_gateway.headers import Separation
from semkv_gateway.http import Scope, header
from semkv_gateway.response_cache import Pattern
from semkv_gateway.routes import Unkeyable

Network = IPv4Network | IPv6Network

REFUSED = (401, 403)  # statuses of an upstream that does not know the credentials
_ACCEPTED_S = 300.0
_GOOD_S = 10.0  # after that long another gateway is asked, through the store, whether it was refused there
_REMEMBERED = 10_000  # credentials, by their digests


@dataclass(frozen=True, slots=True)
class Controls:
    """What a client asked of the cache."""

    read: bool = True  # an answer may come from the cache
    write: bool = True  # the answer may be kept
    max_age_s: float | None = None  # oldest answer that will do; None for any
    only: bool = False  # no answer but a stored one will do


_PLAIN = Controls()


def controls_of(scope: Scope) -> Controls:
    """Read ``Cache-Control`` (no-cache, no-store, max-age, only-if-cached) and ``X-Semkv-Bypass``; anything else is
    ignored."""
    bypass = header(scope, b"x-semkv-bypass")
    if bypass and bypass.strip().lower() not in ("", "0", "false", "no"):
        return Controls(read=False, write=False)
    given = header(scope, b"cache-control")
    if not given:
        return _PLAIN
    words = {word.strip() for word in given.lower().split(",")}
    ages = [w.removeprefix("max-age=").strip('"') for w in words if w.startswith("max-age=")]
    age = min((float(age) for age in ages if age.isdecimal() and len(age) < 12), default=None)
    return Controls(
        "no-cache" not in words and age != 0.0,
        "no-store" not in words,
        max_age_s=age,
        only="only-if-cached" in words,
    )


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks."""

    tenant: str  # its digest; empty in a single-tenant deployment
    believed: bool  # the tenant is not merely claimed
    name: bytes  # digest of all that may be a credential
    by_credentials: bool = False  # the credentials name the tenant, not a proxy
    headers: tuple[tuple[str, str], ...] = ()  # which tell requests of the tenant apart
    unknown: tuple[tuple[bytes, bytes], ...] = ()  # headers that nobody has reviewed


class Tenants:
    """Tells tenants apart.

    By default, requests belong to one tenant if they have the same value in every header that is not known to be
    harmless (``Authorization``, ``X-API-Key``, ``Cookie`` and all others that may be credentials), so two keys never
    share an answer. With ``single``, or where a trusted proxy names the tenant, known credentials do not separate
    tenants, and headers that nobody has reviewed are part of the key. A request of any other client that names a tenant
    is not cached, since that client relies on a name that is not trusted.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        separation: Separation | None = None,
        trusted: tuple[Network, ...] = (),
        single: bool = False,
    ) -> None:
        self._secret = secret
        self._trusted = trusted
        self._single = single
        self._separation = separation or Separation()
        self._accepted: Latest[bytes, float] = Latest(_REMEMBERED)  # until when they are good
        self._refused: Latest[bytes, None] = Latest(_REMEMBERED)

    def client(self, scope: Scope) -> Client:
        """Who sent a request. A tenant's name that is not believed makes a tenant of its own of these credentials."""
        sent = self._separation.sort(scope)
        lines = [name + b":" + value for name, value in (*sent.credentials, *sent.unknown)]
        held = b"\n".join(lines).decode("latin-1")
        named = header(scope, b"x-semkv-tenant")
        name = keyed_digest(self._secret, "key:", held)
        by_credentials = not named and not self._single
        believed = not named or self._from_proxy(scope)
        if by_credentials:
            tenant = tenant_of(name)
        elif not named:
            tenant = ""
        elif believed:
            tenant = named_tenant(self._secret, named)
        else:
            tenant = tenant_of(keyed_digest(self._secret, "claimed:", named + "\n" + held))
        counting = sent.chooses if by_credentials else [*sent.chooses, *sent.unknown]
        return Client(
            tenant=tenant,
            believed=believed,
            name=name,
            by_credentials=by_credentials,
            headers=tuple(
                (key.decode("latin-1"), value.decode("latin-1")) for key, value in counting
            ),
            unknown=tuple(sent.unknown),
        )

    def of_user(self, client: Client, body: bytes) -> Client:
        """The end user of a client whom a body names, as a tenant; the client where it names none."""
        named = named_user(body)
        if not named:
            return client
        found = keyed_digest(self._secret, "user:", f"{client.tenant}\n{named}")
        return replace(client, tenant=tenant_of(found))

    def told(self, scope: Scope) -> tuple[list[str], str]:
        """By what people may know a client: its keys, and the name that a trusted proxy gave."""
        headers = (header(scope, name) for name in (b"authorization", b"x-api-key", b"api-key"))
        keys = [value.removeprefix("Bearer ") for value in headers if value]
        named = header(scope, b"x-semkv-tenant")
        return keys, named if named and self._from_proxy(scope) else ""

    def tags_of(self, scope: Scope) -> tuple[str, ...]:
        """Labels for the answer, from the ``X-Semkv-Tags`` header of a trusted proxy; none from any other client."""
        given = header(scope, b"x-semkv-tags") if self._trusted else ""
        return read_tags(given) if given and self._from_proxy(scope) else ()

    def _from_proxy(self, scope: Scope) -> bool:
        """Whether the connection comes from a trusted proxy. An address that uvicorn took from a header (it has port 0)
        does not count: any client can send that header."""
        client = scope.get("client")
        if not self._trusted or not client or not client[1]:
            return False
        try:
            address = ip_address(client[0])
        except ValueError:
            return False
        plain = getattr(address, "ipv4_mapped", None) or address
        return any(plain in network for network in self._trusted)

    def may_read(self, client: Client) -> bool | None:
        """Whether cached answers may be given before the upstream has seen these credentials.

        Where credentials separate tenants, a client that finds an answer was accepted before, and may read until the
        upstream refuses one of its requests. None: another gateway may have noted a refusal in the store, or this one
        before its last start. Then one request asks the store, and the earlier result holds for the others meanwhile.
        Where all clients are one tenant, credentials count for five minutes after the upstream has accepted them.
        """
        if not self._single and client.name in self._refused:
            return False
        until, now = self._accepted.get(client.name), time.monotonic()
        if until is not None and until > now:
            return True
        if until is not None and until > now - _GOOD_S and not self._single:
            self._accepted[client.name] = now + _GOOD_S
        return False if self._single else None

    def looked_up(self, client: Client, refused: bool | None) -> bool:
        """Whether stored answers may be given, by what the store says; where it says nothing (None), what was so
        before holds."""
        if refused:
            self._refuse(client)
        if client.name in self._refused or (refused is None and client.name not in self._accepted):
            return False
        self._accepted[client.name] = time.monotonic() + _GOOD_S
        return True

    def _refuse(self, client: Client) -> None:
        self._accepted.pop(client.name, None)
        self._refused[client.name] = None

    def answered(self, client: Client, status: int) -> bool | None:
        """The upstream has answered a request with these credentials.

        A success lets them in, 401 and 403 shut them out; anything else may have been said before they were looked at.
        Returns what the store must note: that they are refused (True), or are not any more; None for nothing.
        """
        if status in REFUSED:
            self._refuse(client)
            return None if self._single else True
        if 200 <= status < 300:
            was_refused = client.name in self._refused
            self._refused.pop(client.name, None)
            self._accepted[client.name] = time.monotonic() + (
                _ACCEPTED_S if self._single else _GOOD_S
            )
            return False if was_refused and not self._single else None
        return None


def named_user(body: bytes) -> str:
    """The names of the end user in a JSON body: `user`, `safety_identifier`, `metadata.user_id`; empty without any.

    >>> named_user(b'{"user": "ann", "metadata": {"user_id": 7}}')
    '["ann", null, 7]'
    >>> named_user(b'{"user": null}')
    ''
    """
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(said, dict):
        return ""
    metadata = said.get("metadata")
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    names = [said.get("user"), said.get("safety_identifier"), user_id]
    return "" if names == [None, None, None] else json.dumps(names)


# -- labels of answers -------------------------------------------------------------------------------------------------

MOST = 16  # labels in one header
_TAG = re.compile(r"[\w.:/@+-]{1,64}", re.ASCII)
_ALLOWED = "1 to 64 letters, digits or _.:/@+-"
_FORM = f"FIELD:PATTERN=TAG, FIELD being prompt or model and TAG {_ALLOWED}, such as prompt:*weather*=weather"


TagRule = tuple[Pattern, str]
"""Picks answers, and the label that they get."""


def parse_tag_rule(text: str, key: str = "--tag-rule") -> TagRule:
    """Read ``FIELD:PATTERN=TAG``.

    >>> parse_tag_rule("model:*-news=news")
    (Pattern(name='model', pattern='*-news'), 'news')
    """
    form = re.fullmatch(r"(prompt|model):(.+)=([^=]*)", text, re.DOTALL)
    if form is None or not _TAG.fullmatch(form[3]):
        raise ConfigError(key, text, _FORM)
    return Pattern(form[1], form[2]), form[3]


def read_tags(given: str) -> tuple[str, ...]:
    """The labels in a header, separated by commas: each once, sorted. Raises `Unkeyable`: an answer without them could
    not be removed by them."""
    tags = sorted({part for piece in given.split(",") if (part := piece.strip())})
    if len(tags) > MOST or not all(map(_TAG.fullmatch, tags)):
        raise Unkeyable("tags")
    return tuple(tags)
