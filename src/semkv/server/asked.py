"""One cacheable request on its way through the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from semkv.server.admission import Client, Controls
from semkv.server.canonical import CanonicalRequest
from semkv.server.upstream import Call
from semkv.tiers.response import Found

ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with what its client may have.

    Attributes:
        call: as it came.
        canonical: its canonical form.
        controls: what the client asked of the cache.
        client: who asks.
        may_read: the upstream has let this client in before, and the answer is not to be drawn at random.
        start: when it was there, by `time.perf_counter`.
    """

    call: Call
    canonical: CanonicalRequest
    controls: Controls
    client: Client
    may_read: bool
    start: float

    @property
    def reads(self) -> bool:
        """A stored answer would do."""
        return self.controls.read and self.may_read

    @property
    def shared(self) -> bool:
        """An answer that is on its way to somebody else would do, and the other way round."""
        return self.reads and self.controls.write

    @property
    def chat(self) -> bool:
        return ENDPOINTS[self.call.scope["path"]] == "chat"

    def will_do(self, found: Found) -> bool:
        """Whether a stored answer is fresh enough for the client."""
        oldest = self.controls.max_age_s
        return oldest is None or (found.age_s <= oldest and not found.stale)
