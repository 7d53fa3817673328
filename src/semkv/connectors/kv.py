"""`SemKVConnector`: a thin shell between vLLM's interface and the two halves.

Newer optional methods are always defined; older vLLM never calls them. Loads and captures are started before and after
the forward pass, never in the per-layer hooks, so CUDA graphs need nothing special. On a GPU a request waits for its
load while others go on.

Left alone: requests whose LoRA adapter is not known for certain (`lora`); models with several KV cache groups, where
the connector stays idle. `SupportsHMA` is not claimed, so vLLM turns its hybrid KV cache manager off and sliding-window
layers keep all of their blocks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from semkv.connectors import namespace as ns
from semkv.connectors import weights
from semkv.connectors.break_even import Measured, RanksGate
from semkv.connectors.kv_plan import KVStep
from semkv.connectors.kv_scheduler import KVScheduler
from semkv.connectors.kv_transfer import PagedTransfer
from semkv.connectors.kv_worker import KVWorker
from semkv.connectors.metrics import SemKVPromMetrics, SemKVStats, kv_stats
from semkv.connectors.settings import KVSettings, read_settings
from semkv.errors import ConfigError
from semkv.stores.extents import ExtentStore

if TYPE_CHECKING:
    import torch

log = logging.getLogger("semkv.connectors")


@dataclass
class SemKVMetadata(KVConnectorMetadata):
    """What travels to the workers."""

    step: KVStep = field(default_factory=KVStep)


@dataclass
class SemKVReport(KVConnectorWorkerMetadata):
    """What travels back: the step this worker has finished, where it had loads, and what it measured."""

    step: int
    measured: Measured = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, SemKVReport)
        names = {**self.measured, **other.measured}
        both = {name: [*self.measured.get(name, ()), *other.measured.get(name, ())] for name in names}
        return SemKVReport(min(self.step, other.step), both)


class SemKVConnector(KVConnectorBase_V1):
    """Keeps the KV blocks of prompts on disk, checked and bounded. See `semkv.connectors.settings.KVSettings`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Build one half.

        Raises:
            ConfigError: an unknown or wrong key in ``kv_connector_extra_config``.
            StoreError: the directory is a file, or was written by another format version.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = read_settings(KVSettings, transfer.kv_connector_extra_config)
        self._scheduler: KVScheduler | None = None
        self._worker: KVWorker | None = None
        self._seeded = self._asynchronous = False
        if (reason := unsupported(vllm_config, kv_cache_config)) is not None:
            log.warning("semkv: the KV connector stays idle: %s", reason)
            self._extents: ExtentStore | None = None
            return
        self._engine = ns.engine_name(vllm_config, transfer.engine_id)
        self._extents = ExtentStore(self._settings.cache_dir / "kv", "kv", self._settings.bounds(), self._engine)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler(vllm_config, kv_cache_config, self._extents)

    def _make_scheduler(self, vllm_config: Any, kv_cache_config: Any, extents: ExtentStore) -> KVScheduler:
        transfer, settings, parallel = vllm_config.kv_transfer_config, self._settings, vllm_config.parallel_config
        from vllm.platforms import current_platform

        self._asynchronous = not current_platform.is_cpu()
        if settings.recompute_on_failure:
            transfer.kv_load_failure_policy = "recompute"  # the scheduler reads it after this constructor
        if settings.stable_hashes:
            self._seeded = ns.seed_block_hashes(vllm_config)
        facts = (ns.model_facts(vllm_config, Path(settings.cache_dir)), ns.kv_facts(vllm_config, kv_cache_config))
        return KVScheduler(
            settings,
            extents,
            lambda: ns.namespace_digest(*facts, ns.hash_facts(vllm_config)),
            engine=self._engine,
            world_size=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            block_size=vllm_config.cache_config.block_size,
            speculative=vllm_config.speculative_config is not None,
            local_worker=local_worker if parallel.world_size == 1 else lambda: None,
            gate=RanksGate(settings.host_bytes, parallel.pipeline_parallel_size) if parallel.world_size > 1 else None,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a lost save is a later miss

    # ------------------------------------------------------------------ scheduler half

    @property
    def scheduler_half(self) -> KVScheduler | None:
        """For `KVAdapter`."""
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        if self._seeded:  # block hashes are seeded by now; child processes need not inherit the seed
            self._seeded = False
            ns.unseed_block_hashes()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None or not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens) and self._asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.admitted(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> SemKVMetadata:
        if self._scheduler is None:
            return SemKVMetadata()
        step = self._scheduler.build_step(scheduler_output)
        if not self._kv_transfer_config.is_kv_producer:
            step.captures.clear()
        return SemKVMetadata(step)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is None:
            return
        if isinstance(report := connector_output.kv_connector_worker_meta, SemKVReport):
            self._scheduler.confirm(report.step)
            if self._scheduler.gate is not None:
                self._scheduler.gate.rates.learn(report.measured)
        if connector_output.invalid_block_ids:
            self._scheduler.load_failed(set(connector_output.invalid_block_ids))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None if self._scheduler is None else self._scheduler.finished(request)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return {CacheHitSource.DISK: num_external_tokens} if num_external_tokens else {}

    def reset_cache(self) -> bool | None:
        """vLLM's word for: the weights may be others; see `KVScheduler.reset`. False where that is not done yet."""
        if self._settings.fixed_weights:
            return True
        done = weights.may_have_changed(str(self._vllm_config.instance_id))
        return (self._scheduler is None or self._scheduler.reset()) and done

    # ------------------------------------------------------------------ worker half

    @property
    def worker_half(self) -> KVWorker | None:
        """For `KVAdapter`."""
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._extents is None:
            return
        config, cache = self._vllm_config, self._kv_cache_config
        try:
            transfer = PagedTransfer(
                kv_caches,
                cache.num_blocks,
                config.cache_config.block_size,
                attention_backends(config),
                self._settings.staging_bytes,
            )
            self._worker = KVWorker(
                self._settings,
                self._extents,
                transfer,
                engine=self._engine,
                rank=model_rank(),
            )
        except ConfigError as error:
            log.warning("semkv: the KV connector stays idle: %s", error)

    def _step(self) -> KVStep | None:
        if self._worker is None or not self.has_connector_metadata():
            return None
        metadata = self._get_connector_metadata()
        return metadata.step if isinstance(metadata, SemKVMetadata) else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None and (step := self._step()) is not None:
            self._worker.load(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        if self._worker is not None and (step := self._step()) is not None:
            self._worker.capture(step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None if self._worker is None else self._worker.finished(self._step()) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        step, far = self._step(), self._vllm_config.parallel_config.world_size > 1
        loads = 0 if step is None or not step.loads else step.step
        measured = self._worker.gate.take() if far and self._worker is not None else {}
        return SemKVReport(loads, measured) if loads or measured else None

    # ------------------------------------------------------------------ both

    def get_kv_connector_stats(self) -> SemKVStats | None:
        half = self._scheduler or self._worker
        return None if half is None else kv_stats(half.take_counters())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SemKVStats | None:
        return SemKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> SemKVPromMetrics:
        return SemKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Write what waits, close the files and let go of host memory. Calling it again changes nothing."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        elif self._scheduler is not None:
            self._scheduler.close()
        elif self._extents is not None:
            self._extents.close()


def local_worker() -> KVWorker | None:
    """The worker half of this process, where vLLM has made one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    worker = getattr(get_kv_transfer_group(), "worker_half", None) if has_kv_transfer_group() else None
    return worker if isinstance(worker, KVWorker) else None


def unsupported(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why the connector cannot serve this engine, or None."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    parallel = vllm_config.parallel_config
    for key in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, key, 1) > 1:
            return f"{key} > 1 spreads a block over ranks"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales makes a block's bytes depend on the first batch"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups, and one is supported"
    spec = groups[0].kv_cache_spec
    specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    if not all(isinstance(s, FullAttentionSpec) for s in specs):
        return f"{type(spec).__name__} does not keep every block of a prompt"
    if spec.block_size != vllm_config.cache_config.block_size:
        return f"blocks of {spec.block_size} tokens are hashed by {vllm_config.cache_config.block_size}"
    return None


def attention_backends(vllm_config: Any) -> str:
    """The names of the attention backends in use; kernels may order a block's bytes each in its own way."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    return ",".join(sorted({layer.get_attn_backend().get_name() for layer in layers.values()}))


def model_rank() -> int:
    """This worker's place in its engine: pipeline rank times tensor-parallel size plus tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor = get_tp_group()
    return int(get_pp_group().rank_in_group * tensor.world_size + tensor.rank_in_group)
