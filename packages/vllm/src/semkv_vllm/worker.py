"""``--worker-cls semkv_vllm.worker.DocumentWorker``: vLLM's worker, which shows the model to our connector."""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from semkv_vllm.kv import SemKVConnector

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

log = logging.getLogger("semkv.connectors")


class DocumentWorker(Worker):
    """See the module. Other connectors, `SemKVConnector` below a MultiConnector among them, are left alone."""

    def initialize_from_config(self, kv_cache_config: Any) -> Any:
        done = super().initialize_from_config(kv_cache_config)
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if isinstance(connector, SemKVConnector):
            connector.bind_runner(self.model_runner)
        else:
            log.warning(
                "semkv: no document is reused at another position: the KV connector is %s",
                type(connector).__name__,
            )
        return done
