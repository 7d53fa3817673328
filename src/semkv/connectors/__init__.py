"""What vLLM loads: connectors that keep KV blocks and encoder outputs on disk, for vLLM 0.26 to 0.33.

With semkv installed, this is all there is to type:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SemKVConnector", "kv_role": "kv_both"}' \\
                     --ec-transfer-config '{"ec_connector": "SemECConnector", "ec_role": "ec_both"}'

The directory is ``cache_dir`` in ``kv_connector_extra_config``, else ``SEMKV_CACHE_DIR``, else ``~/.cache/semkv``.
All settings: `semkv.connectors.settings`.
"""

from __future__ import annotations

KV_CONNECTOR = "SemKVConnector"
EC_CONNECTOR = "SemECConnector"
KV_MODULE = "semkv.connectors.kv"
EC_MODULE = "semkv.connectors.ec"


def register() -> None:
    """Make both connectors known to vLLM by name. vLLM calls this in every process (``vllm.general_plugins``).

    Calling it again changes nothing. The connectors' modules are imported when an engine asks for them.
    """
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if KV_CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(KV_CONNECTOR, KV_MODULE, KV_CONNECTOR)
    if EC_CONNECTOR not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(EC_CONNECTOR, EC_MODULE, EC_CONNECTOR)
