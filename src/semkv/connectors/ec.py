"""For ``ec_connector_module_path``; see the package."""

from semkv_vllm.ec import SemECConnector

__all__ = ["SemECConnector"]
