"""Who asks, and what they may ask of the cache: the tenant and the control headers of a request."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address

from semkv.server.asgi import header
from semkv.server.upstream import Scope

Network = IPv4Network | IPv6Network

_CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"api-key"))
_ACCEPTED_S = 300.0
_ACCEPTED_MOST = 10_000


@dataclass(frozen=True, slots=True)
class Controls:
    """What a client asked of the cache.

    Attributes:
        read: an answer may come from the cache.
        write: the answer may be kept.
        max_age_s: oldest answer that will do; None for any.
    """

    read: bool = True
    write: bool = True
    max_age_s: float | None = None

    @property
    def shared(self) -> bool:
        """The request may share an answer that is on its way."""
        return self.read and self.write


_DEFAULT = Controls()
_BYPASS = Controls(read=False, write=False)


def controls_of(scope: Scope) -> Controls:
    """Read ``Cache-Control`` (no-cache, no-store, max-age) and ``X-Semkv-Bypass``; anything else is ignored."""
    asked, bypass = "", ""
    for key, value in scope["headers"]:
        if key == b"cache-control":
            asked += "," + value.decode("latin-1").lower()
        elif key == b"x-semkv-bypass":
            bypass = value.decode("latin-1").strip().lower()
    if bypass not in ("", "0", "false", "no"):
        return _BYPASS
    if not asked:
        return _DEFAULT
    words = {word.strip() for word in asked.split(",")}
    ages = [w.removeprefix("max-age=").strip('"') for w in words if w.startswith("max-age=")]
    numbers = [int(age) for age in ages if age.isdecimal() and len(age) < 12]
    age = float(min(numbers)) if numbers else None
    return Controls(read="no-cache" not in words and age != 0.0, write="no-store" not in words, max_age_s=age)


def credentials(scope: Scope) -> str:
    """Every header that says who asks, as one string."""
    found = [key + b":" + value for key, value in scope["headers"] if key in _CREDENTIALS]
    return b"\n".join(found).decode("latin-1")


class Tenants:
    """Tells tenants apart.

    By default a tenant is whoever holds an API key (``Authorization``, ``X-API-Key`` or ``Api-Key``), so two keys never
    share an answer. A proxy that is trusted may name the tenant instead.

    Args:
        secret: of the deployment; tenants' names are digests under it.
        trusted: networks whose ``X-Semkv-Tenant`` header counts.
        single: everybody is one tenant.
    """

    def __init__(self, secret: bytes, *, trusted: tuple[Network, ...] = (), single: bool = False) -> None:
        self._secret, self._trusted, self._single = secret, trusted, single
        self._accepted: OrderedDict[bytes, float] = OrderedDict()
        self._known: OrderedDict[str, str] = OrderedDict()

    def of(self, scope: Scope) -> str:
        """The tenant's digest; one for everybody in a single-tenant deployment."""
        if self._trusted and (named := header(scope, b"x-semkv-tenant")) and self._from_proxy(scope):
            return self._digest("named:" + named)
        return "" if self._single else self._digest("key:" + credentials(scope))

    def _digest(self, name: str) -> str:
        known = self._known.get(name)
        if known is None:
            known = hmac.new(self._secret, name.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()[:32]
            self._known[name] = known
            if len(self._known) > _ACCEPTED_MOST:
                self._known.popitem(last=False)
        return known

    def _from_proxy(self, scope: Scope) -> bool:
        client = scope.get("client")
        try:
            address = ip_address(client[0]) if client else None
        except ValueError:
            return False
        return address is not None and any(address in network for network in self._trusted)

    def may_read(self, scope: Scope) -> bool:
        """Whether cached answers may be given before the upstream has seen these credentials.

        Where tenants are told apart by their credentials, whoever finds an answer has been let in before. Where all
        are one tenant, credentials count once the upstream has accepted them, and for five minutes.
        """
        if not self._single:
            return True
        until = self._accepted.get(self._fingerprint(scope))
        return until is not None and until > time.monotonic()

    def accepted(self, scope: Scope) -> None:
        """The upstream has answered a request with these credentials."""
        if self._single:
            name = self._fingerprint(scope)
            self._accepted[name] = time.monotonic() + _ACCEPTED_S
            self._accepted.move_to_end(name)
            while len(self._accepted) > _ACCEPTED_MOST:
                self._accepted.popitem(last=False)

    def _fingerprint(self, scope: Scope) -> bytes:
        return hmac.digest(self._secret, credentials(scope).encode("latin-1"), "sha256")
