"""The connectors' counts, in the shape vLLM's statistics want."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

KV_COUNTERS = {
    "loads": "Requests whose KV blocks were loaded",
    "loaded_tokens": "Prompt tokens loaded from the store",
    "refused_loads": "Loads not done because computing was faster",
    "lora_skipped": "Requests left alone because the weights of their LoRA adapter are not known for certain",
    "host_tokens": "Prompt tokens found in host memory",
    "disk_tokens": "Prompt tokens read from the disk into host memory",
    "host_evicted": "KV blocks evicted from host memory",
    "failed_loads": "Loads that failed and were recomputed",
    "stored_blocks": "KV blocks written",
    "stored_bytes": "Bytes of KV extents written",
    "read_blocks": "KV blocks read and checked",
    "corrupt": "Extents that failed a check and were deleted",
    "missing": "Extents that had vanished",
    "dropped": "Blocks not stored because the disk was behind",
    "rejected": "Extents larger than the bounds of the store",
    "evicted_blocks": "KV blocks evicted",
    "errors": "Faults of the disk",
}


class SemKVStats(KVConnectorStats):
    """Counts since the last step; counts of several ranks add up."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, n in other.data.items():
            self.data[name] = self.data.get(name, 0) + n
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)


def kv_stats(counts: dict[str, int]) -> SemKVStats | None:
    """The two halves' counts under one name each; None when nothing was counted."""
    data: dict[str, int] = {}
    for name, n in counts.items():
        plain = name.removeprefix("scheduler_")
        data[plain] = data.get(plain, 0) + n
    return SemKVStats(data=data) if data else None


class SemKVPromMetrics(KVConnectorPromMetrics):
    """``vllm:semkv_<count>`` per engine; vLLM takes metrics with its own prefix down with the engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: self._counter_cls(name=f"vllm:semkv_{name}", documentation=text, labelnames=labelnames)
            for name, text in KV_COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values: Iterable[object] = self.per_engine_labelvalues[engine_idx]
        for name, n in transfer_stats_data.items():
            if (metric := self._metrics.get(name)) is not None and n > 0:
                metric.labels(*values).inc(n)
