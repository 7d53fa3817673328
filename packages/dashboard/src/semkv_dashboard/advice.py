"""What to type where most requests cannot be kept: one line in the log, and a banner on the dashboard."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

log = logging.getLogger(__name__)

SAMPLED = "sampled"
STORE = "store"
_EVERY = 20  # requests
_MOST = 10  # of them that may fail to be kept without a word
_SAMPLED: Final = (
    "they name neither temperature 0 nor a seed, so their answers are drawn at random. --default-temperature 0 sends"
    " them with temperature 0 where they leave it open, and keeps the answers; --sampled keeps them as they are drawn"
)
_STILL_SAMPLED: Final = (
    "they name a temperature above 0, or the model takes none, so their answers are drawn at random."
    " --sampled-rule 'model:NAME=keep' keeps those of a model as they are drawn, --sampled all"
)
_REMEDIES: Final = {
    STORE: (
        'the upstream may keep the responses for later requests. Send "store": false, or start with'
        " --stateless-responses where it keeps none, as vLLM does unless VLLM_ENABLE_RESPONSES_API_STORE is set"
    ),
    "tenant": "they name a tenant, and come from no --trusted-proxy NETWORK",
    "content type": "their Content-Type is not application/json",
    "key": "the upstream has refused their API key, or has not answered a request with it",
}
_OTHER: Final = "docs/serving.md says what this reason means"


class Advice:
    """Looks at every twenty requests. Used only on the event loop.

    Args:
        steady: whether requests that leave the temperature open are given one.
    """

    def __init__(self, *, steady: bool) -> None:
        self._remedies = {
            **_REMEDIES,
            SAMPLED: _STILL_SAMPLED if steady else _SAMPLED,
        }
        self._reasons: Counter[str] = Counter()
        self._counted = 0
        self._said: set[str] = set()
        self.text = ""  # for the dashboard; empty where most requests can be kept

    def count(self, reason: str) -> None:
        """Count a request to a cached route. ``reason``: why no answer to it can be kept; empty where one can."""
        self._reasons[reason] += 1
        self._counted += 1
        if self._counted < _EVERY:
            return
        self.text = self._of(self._reasons)
        self._reasons.clear()
        self._counted = 0

    def _of(self, reasons: Counter[str]) -> str:
        unkept = reasons.total() - reasons[""]
        if unkept <= _MOST:
            return ""
        del reasons[""]
        ((reason, count),) = reasons.most_common(1)
        remedy = self._remedies.get(reason, _OTHER)
        text = f"{unkept} of the latest {_EVERY} requests could not be kept, {count} as {reason}: {remedy}"
        if reason not in self._said:
            self._said.add(reason)
            log.warning("%s", text)
        return text
