"""Documents whose KV the upstream reuses at another position, with a bound on how often that changes an answer.

A request says where its documents stand (``kv_transfer_params.semkv.spans``), and semkv's KV connector reuses them.
The answer is approximate. So a request is sent with its spans only where the policy `Bounded` accepts that, for its
model and tenant by themselves. Requests that the policy selects are also sent without spans, in the background, and the
two answers are compared. What is sent without spans has an exact answer.

What the policies have learned is kept in a file, as that of near-repeats is: of several processes the last one's stays.
Their budgets begin empty.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from semkv.tiers.bounded import Bounded
from semkv.tiers.policies import Decision
from semkv.types import Entry, Exactness, Match, Namespace, Request
from semkv_gateway import strict_json
from semkv_gateway.request_key import CanonicalRequest
from semkv_gateway.routes import objects_in
from semkv_gateway.singleflight import InFlight
from semkv_stores.digests import digest
from semkv_stores.files import read_bytes, replace_text

log = logging.getLogger(__name__)

# What becomes of requests with spans, and of checks.
REUSED: Final = "reused"
UNUSED: Final = "nothing reused"
REFUSED: Final = "beyond the bound"
BUSY: Final = "too many checks"
UNCHECKABLE: Final = "cannot be compared"
SAME: Final = "checked, same"
OTHER: Final = "checked, other"
LOST: Final = "not checked"
COMPARED: Final = {True: SAME, False: OTHER, None: UNCHECKABLE}

APPROXIMATE: Final = "approximate"
"""Why such an answer is not kept."""

# Pairs of a model and a tenant; one that is forgotten begins anew, with an empty budget.
_KNOWN = 256
_TEXTS = 1024  # of each pair: the latest requests with reuse, which take 250 bytes each
_CHECKS = 4  # requests at once that are to be checked
_SAVE_AFTER = 20  # outcomes of checks
FILE: Final = "document-reuse.json"
_FORMAT = 1
# The share of changed answers to begin with, 0.05: with 16 tokens or more bench/documents_quality.py found 0 to 13.5%,
# and bench/pictures_quality.py 1 to 27%. Checks of answers find out which it is.
_PRIOR_SCORE = 0.948
_MATCH = Match(
    tier="documents",
    entry_id="",
    score=_PRIOR_SCORE,
    exactness=Exactness.APPROXIMATE,
)


class DocumentReuse:
    """See the module. For the event loop.

    Args:
        rate: most changed answers of a model and tenant, by their requests with spans; None where such requests pass
            by the cache as they came.
        count: called with what became of a request or a check.
        file: keeps what was learned.
        on_fault: called after a fault of the file, which costs what was learned.
    """

    def __init__(
        self,
        rate: float | None,
        count: Callable[[str], None],
        file: Path,
        on_fault: Callable[[str], None],
    ) -> None:
        self._rate = rate
        self.count = count
        self.checks = 0  # requests that are to be checked, and are not yet
        self.outcomes = 0  # of checks that are not in the file yet
        self._file = file
        self._on_fault = on_fault
        self._bounds: OrderedDict[tuple[str, str], Bounded] = OrderedDict()
        if rate is not None:
            self._restore(rate)

    @property
    def is_on(self) -> bool:
        """Whether requests may be sent with spans."""
        return self._rate is not None

    def accept(self, canonical: CanonicalRequest) -> Reuse | None:
        """How a request is sent with its spans; None where it is sent without, or has none."""
        if self._rate is None or canonical.spans is None:
            return None
        if canonical.is_drawn or not canonical.route.converts:
            self.count(UNCHECKABLE)
            return None
        bound = self._bound_of(canonical.partition, canonical.model, self._rate)
        bound.arrived()
        if self.checks >= _CHECKS:
            self.count(BUSY)
            return None
        space = Namespace(canonical.partition, canonical.model)
        request = Request(canonical.key, space, (), chunk_text=canonical.key)
        donor = Entry("", space, (), chunk_text="", response="")
        decision = bound.accept(request, donor, _MATCH)
        if not decision.accept:
            self.count(REFUSED)
            return None
        return Reuse(self, bound, decision)

    @property
    def is_due(self) -> bool:
        """Whether it is time for `save`."""
        return self.outcomes >= _SAVE_AFTER

    def save(self) -> None:
        """Write what was learned to the file. May be called in another thread."""
        if not self.outcomes:
            return
        self.outcomes = 0
        pairs = [
            {
                "tenant": tenant,
                "model": model,
                "policy": bound.state(),
            }
            for (tenant, model), bound in list(self._bounds.items())
        ]
        text = json.dumps({"format": _FORMAT, "pairs": pairs})
        try:
            replace_text(self._file, text, private=True)
        except OSError:
            self._failed("could not be kept")

    def _restore(self, rate: float) -> None:
        """Read what earlier runs have learned. A file that cannot be read counts as none."""
        try:
            kept = json.loads(read_bytes(self._file))
            if kept["format"] != _FORMAT:
                return
            for pair in kept["pairs"][-_KNOWN:]:
                bound = Bounded(rate, texts=_TEXTS)
                bound.restore(pair["policy"])
                self._bounds[str(pair["tenant"]), str(pair["model"])] = bound
        except FileNotFoundError:
            return
        except Exception:  # whatever is in the file, the gateway starts
            self._bounds.clear()
            self._failed("could not be read")

    def _failed(self, what: str) -> None:
        log.exception("what was learned of reused documents %s: %s", what, self._file)
        self._on_fault("documents")

    def _bound_of(self, tenant: str, model: str, rate: float) -> Bounded:
        """The bound of a model and tenant. Where there are too many, the oldest of the tenant that has the most goes,
        since clients choose the names of models."""
        name = (tenant, digest(model))
        bound = self._bounds.get(name) or Bounded(rate, texts=_TEXTS)
        self._bounds[name] = bound
        self._bounds.move_to_end(name)
        if len(self._bounds) > _KNOWN:
            counts = Counter(owner for owner, _ in self._bounds)
            most = max(counts.values())
            del self._bounds[next(name for name in self._bounds if counts[name[0]] == most)]
        return bound


class Reuse:
    """A request that is sent with its spans: what becomes of its answer.

    Args:
        requests: which accepted it.
        bound: of its model and tenant.
        decision: what that said.
    """

    def __init__(self, requests: DocumentReuse, bound: Bounded, decision: Decision) -> None:
        self._requests = requests
        self._bound = bound
        self._decision = decision
        self._is_checked = decision.check > 0.0
        requests.checks += self._is_checked

    def came(self, flight: InFlight) -> bool:
        """The answer has come, or none has; whether to check it, after which `checked` must be called."""
        if flight.whole and (flight.streamed or may_have_reused(flight.payload)):
            self._requests.count(REUSED)
            if self._is_checked:
                return True
        elif flight.whole or flight.status != 200:  # 0: not even the head of an answer has come
            self._requests.count(UNUSED)
            self._bound.give_back(self._decision)
        else:  # how much of it its client has is not known
            self._requests.count(LOST)
        self._requests.checks -= self._is_checked
        return False

    def checked(self, outcome: str) -> None:
        """The outcome of a check. Where it says neither `SAME` nor `OTHER`, the budget pays as for a wrong answer."""
        self._requests.checks -= 1
        self._requests.count(outcome)
        if outcome in (SAME, OTHER):
            correct = outcome == SAME
            self._bound.observe(_MATCH, correct=correct, served=self._decision)
            self._requests.outcomes += 1


def without_spans(raw: bytes) -> bytes:
    """A body that asks for no reuse of documents. What is no JSON object stays as it is."""
    try:
        body = json.loads(raw)
        # Wherever a route takes them from, a body or what it hands on to the engine.
        found = [_drop_spans(holder) for holder in objects_in(body)]
        return json.dumps(body, separators=(",", ":")).encode() if any(found) else raw
    except (ValueError, RecursionError):
        return raw


def _drop_spans(holder: Any) -> bool:
    try:
        del holder["kv_transfer_params"]["semkv"]["spans"]
    except (LookupError, TypeError):
        return False
    return True


def may_have_reused(payload: bytes | None) -> bool:
    """Whether documents may have been reused for a whole answer: all but one that says that none were.

    An answer that ends with one of the request's stop strings says nothing: vLLM ends it before the connector does. Of
    several choices vLLM says it of one, and their prompts and luck may differ.
    """
    try:
        body = strict_json.read(payload or b"")
    except (ValueError, RecursionError):
        return True
    if not isinstance(body, dict):
        return True
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        return True
    found = body.get("kv_transfer_params")
    said = found.get("semkv") if isinstance(found, dict) else None
    return not isinstance(said, dict) or bool(said.get("approximate_tokens"))
