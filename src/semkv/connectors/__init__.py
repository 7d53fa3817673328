"""What vLLM loads: connectors that keep KV blocks and encoder outputs in host memory and on disk. vLLM 0.32 or 0.33.

With semkv installed, this is all there is to type:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SemKVConnector", "kv_role": "kv_both"}' \\
                     --ec-transfer-config '{"ec_connector": "SemECConnector", "ec_role": "ec_both"}'

The directory is ``cache_dir`` in ``kv_connector_extra_config``, else ``SEMKV_CACHE_DIR``, else ``~/.cache/semkv``.
All settings: `semkv.connectors.settings`.
"""

from __future__ import annotations

import logging

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
