"""Ids of hits, by which a client or an operator reports one as wrong.

An id names the answer and, of an approximate hit, the donor and the pair of texts, and is signed: so any worker and any
gateway of a deployment knows it, and none keeps it.
"""

from __future__ import annotations

import base64
import hmac
import struct
from dataclasses import dataclass
from functools import lru_cache

from semkv.tenants import signature

_SIGNED = 16  # bytes of a signature
_EXACT = struct.Struct(">I32s")  # when the answer was kept, and its key
_NEAR = struct.Struct(">I32s16s32s")  # and the donor, and the pair; of no pair zeros
_NO_PAIR = bytes(32)


@dataclass(frozen=True, slots=True)
class WrongHit:
    """What a hit's id names.

    Attributes:
        created: when the answer was kept, in seconds since the epoch.
        key: of the answer.
        donor: its entry; empty for an exact hit.
        pair: of the texts; empty where they differ in typing only.
    """

    created: int
    key: str
    donor: str = ""
    pair: str = ""


class HitIds:
    """Makes and reads ids. ``secret`` is of this use alone."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.exact = lru_cache(1024)(self._exact)

    def _exact(self, tenant: str, created: int, key: str) -> str:
        """The id of an exact hit, of which many are alike."""
        return self.of(tenant, WrongHit(created, key))

    def of(
        self,
        tenant: str,
        hit: WrongHit,
    ) -> str:
        """The id of a tenant's hit."""
        body = _EXACT.pack(hit.created, bytes.fromhex(hit.key))
        if hit.donor:
            body += bytes.fromhex(hit.donor) + (bytes.fromhex(hit.pair) or _NO_PAIR)
        return base64.urlsafe_b64encode(body + self._signature(tenant, body)).decode().rstrip("=")

    def _signature(
        self,
        tenant: str,
        body: bytes,
    ) -> bytes:
        return signature(self._secret, tenant.encode() + b":" + body)[:_SIGNED]

    def read(
        self,
        number: str,
        tenant: str | None,
    ) -> WrongHit | None:
        """What an id names; None where it is none, or another tenant's. None as tenant: of whichever."""
        try:
            data = base64.urlsafe_b64decode(number + "=" * (-len(number) % 4))
        except ValueError:
            return None
        body = data[:-_SIGNED]
        signed = self._signature(tenant or "", body)
        if tenant is not None and not hmac.compare_digest(data[-_SIGNED:], signed):
            return None
        if len(body) == _EXACT.size:
            values = _EXACT.unpack(body)
            return WrongHit(values[0], values[1].hex())
        if len(body) == _NEAR.size:
            values = _NEAR.unpack(body)
            pair = "" if values[3] == _NO_PAIR else values[3].hex()
            return WrongHit(
                values[0],
                values[1].hex(),
                donor=values[2].hex(),
                pair=pair,
            )
        return None
