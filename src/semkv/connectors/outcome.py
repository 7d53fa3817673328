"""What the connectors did for one request, read from vLLM's output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REPORT_KEY = "semkv"
"""The key of our report inside ``kv_transfer_params`` and ``ec_transfer_params``."""


@dataclass(frozen=True, slots=True)
class ConnectorOutcome:
    """What came from the stores. A field is None when nothing is known: no connector, or its report is off.

    Attributes:
        loaded_tokens: prompt tokens whose KV was loaded from the KV store.
        sources: of those, by where they came from: ``host``, ``disk``, ``p2p``.
        fusion_loaded: media items whose encoder output was loaded from the fusion store.
        fusion_encoded: media items that the encoder processed for this request. An item in neither count was in
            vLLM's own encoder cache, or lay in a part of the prompt whose KV was there.
        cached_tokens: prompt tokens vLLM did not compute, from its own prefix cache or from the store.
    """

    loaded_tokens: int | None = None
    sources: Mapping[str, int] = field(default_factory=dict)
    fusion_loaded: int | None = None
    fusion_encoded: int | None = None
    cached_tokens: int | None = None


def _report(params: object, name: str = REPORT_KEY) -> Mapping[str, Any]:
    report = params.get(name) if isinstance(params, Mapping) else None
    return report if isinstance(report, Mapping) else {}


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def read_outcome(output: object) -> ConnectorOutcome:
    """Read the outcome from a vLLM ``RequestOutput``, or from any object with the same attributes. The reports of
    several SemKVConnectors in one MultiConnector, of which one loads for a request, are added up."""
    params = getattr(output, "kv_transfer_params", None)
    names = [name for name in params if name.startswith(REPORT_KEY)] if isinstance(params, Mapping) else []
    reports = [_report(params, name) for name in names]
    loaded = [n for report in reports if (n := _int(report.get("loaded_tokens"))) is not None]
    sources: Counter[str] = Counter()
    for report in reports:
        sources.update(report.get("sources") or {})
    ec = _report(getattr(output, "ec_transfer_params", None))
    return ConnectorOutcome(
        loaded_tokens=sum(loaded) if loaded else None,
        sources=dict(sources),
        fusion_loaded=_int(ec.get("loaded")),
        fusion_encoded=_int(ec.get("encoded")),
        cached_tokens=_int(getattr(output, "num_cached_tokens", None)),
    )


def wants_skip(params: object) -> bool:
    """Whether a request's ``kv_transfer_params`` (or ``ec_transfer_params``) say ``{"semkv": {"skip": true}}``."""
    return _report(params).get("skip") is True
