"""For ``kv_connector_module_path``; see the package."""

from semkv_vllm.kv import SemKVConnector

__all__ = ["SemKVConnector"]
