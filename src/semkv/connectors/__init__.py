"""What vLLM loads: connectors that keep KV blocks and encoder outputs in host memory and on disk. vLLM 0.32 or 0.33.

With semkv installed, this is all there is to type:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SemKVConnector", "kv_role": "kv_both"}' \\
                     --ec-transfer-config '{"ec_connector": "SemECConnector", "ec_role": "ec_both"}'

The directory is ``cache_dir`` in ``kv_connector_extra_config``, else ``SEMKV_CACHE_DIR``, else ``~/.cache/semkv``.
All settings: `semkv.connectors.settings`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KV_CONNECTOR = "SemKVConnector"
EC_CONNECTOR = "SemECConnector"
KV_MODULE = "semkv.connectors.kv"
EC_MODULE = "semkv.connectors.ec"
SPEC = "SemKVSpec"
SPEC_MODULE = "semkv.connectors.spec"
TIER = "semkv"
TIER_MODULE = "semkv.connectors.tier"

FLOOR = (0, 32)
"""The oldest vLLM whose OffloadingConnector has out-of-tree tiers, partial promotion and hit sources."""


def register() -> None:
    """Make the connectors, the spec and the tier known to vLLM by name. vLLM calls this in every process
    (``vllm.general_plugins``).

    Calling it again changes nothing. The modules are imported when an engine asks for them. An older vLLM gets a
    warning that names the oldest version.
    """
    if (reason := too_old()) is not None:
        logging.getLogger("semkv.connectors").warning("semkv: no connectors: %s", reason)
        return
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if KV_CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(KV_CONNECTOR, KV_MODULE, KV_CONNECTOR)
    if EC_CONNECTOR not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(EC_CONNECTOR, EC_MODULE, EC_CONNECTOR)
    if SPEC not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(SPEC, SPEC_MODULE, SPEC)
    if TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER, TIER_MODULE, "SemKVTier")


def too_old() -> str | None:
    """Why the installed vLLM cannot be used, or None."""
    import vllm

    words = vllm.__version__.split(".")
    numbers = tuple(int(word) for word in words[:2] if word.isdecimal())
    if len(numbers) == 2 and numbers < FLOOR:
        return f"semkv needs vLLM {FLOOR[0]}.{FLOOR[1]} or newer, and {vllm.__version__} is installed"
    return None


# -- what they did for one request, read from vLLM's output -----------------------------------------------------------

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
