"""The names of vLLM that are no public interface and that semkv touches all the same, with what for.

vLLM calls its offloading interface experimental. A test resolves every name here, so that a vLLM which renames one
fails by that name.
"""

from __future__ import annotations

FLOOR = (0, 32)
"""The oldest vLLM whose OffloadingConnector has out-of-tree tiers, partial promotion and hit sources."""

PRIVATE = {
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler._jobs": (
        "which stores are under way when another connector's load fails"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:get_sliding_window_size_in_chunks": (
        "whether vLLM can offload a KV cache group"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.config:build_offloading_config": (
        "whether vLLM can offload this engine's cache"
    ),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory._registry": "whether ours are registered",
    "vllm.distributed.ec_transfer.ec_connector.factory:ECConnectorFactory._registry": "whether ours are registered",
    "vllm.v1.kv_offload.factory:OffloadingSpecFactory._registry": "whether ours is registered",
    "vllm.v1.kv_offload.tiering.factory:SecondaryTierFactory._registry": "whether ours is registered",
    "vllm.v1.kv_offload.base:ReqContext._offload_key_positions": "a request's keys, to look many up at once",
    "vllm.v1.kv_offload.tiering.spec:TieringOffloadingSpec._manager": "the manager is made once",
    "vllm.v1.kv_offload.tiering.spec:TieringOffloadingSpec._worker": "the worker is made once",
    "vllm.v1.kv_offload.tiering.spec:TieringOffloadingSpec._engine_id": "the name of the shared memory",
    "vllm.v1.kv_offload.tiering.spec:TieringOffloadingSpec._scheduler_mmap": "to take its name out of /dev/shm",
    "vllm.v1.kv_offload.tiering.base:SecondaryTierManager._primary_kv_view": "let go of before vLLM closes it",
    "vllm.v1.kv_offload.cpu.shared_offload_region:SharedOffloadRegion._creator": "who deletes the file in /dev/shm",
    "vllm.v1.kv_offload.cpu.gpu_worker:CPUOffloadingWorker._mmap_region": "the same",
    "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager._policy": "to forget a purged block of host memory",
    "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager._free_chunk": "the same",
    "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager._num_evictable_cache_chunks": "the same",
    "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager._num_chunks": "how many blocks host memory holds",
}
"""``module:Class.attribute`` or ``module:function``. An attribute may be an instance's: then the class's source has
``self.attribute``."""


def too_old() -> str | None:
    """Why the installed vLLM cannot be used, or None."""
    import vllm

    words = vllm.__version__.split(".")
    numbers = tuple(int(word) for word in words[:2] if word.isdecimal())
    if len(numbers) == 2 and numbers < FLOOR:
        return f"semkv needs vLLM {FLOOR[0]}.{FLOOR[1]} or newer, and {vllm.__version__} is installed"
    return None
