"""`SemKVConnector`: vLLM's OffloadingConnector with our disk tier, our keys and our care for what may be used.

vLLM moves the blocks: it knows every kind of KV cache group, keeps host memory, copies beside the forward pass, and
promises a hit only once the blocks lie in host memory, checked. Ours is what it does not know: which weights, tenant
and adapter a block belongs to, what was purged or is too old, and what another connector's failed load has spoiled.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from semkv_stores.block_file import tenant_tag
from semkv_stores.blocks import BlockStore
from semkv_stores.digests import digest
from semkv_stores.errors import StoreError
from semkv_vllm import REPORT_KEY, SPEC, SPEC_MODULE, KVSettings, identity, read_settings, register, wants_skip
from semkv_vllm.identity import Adapters
from semkv_vllm.shared import BreakEven, KVShared
from semkv_vllm.spec import SHM, SemKVManager, agreed_host_bytes, region_of

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_sliding_window_size_in_chunks
except ImportError:  # vLLM 0.32
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import get_sliding_window_size_in_chunks

log = logging.getLogger("semkv.connectors")

_MADE: Counter[tuple[str, Any]] = Counter()  # connectors of an engine and a role in this process


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Stands in where an engine cannot be served: it stores and loads nothing, and the engine runs as without it."""

    requires_kv_delivery = False

    def _nothing(self, *args: Any, **fields: Any) -> None:
        return

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = update_state_after_alloc = _nothing

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> OffloadingConnectorMetadata:
        return OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=set())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class SemKVScheduler(OffloadingConnectorScheduler):
    """vLLM's, which looks for every block of a waiting prompt again in every step, 500 for 8,000 tokens. Here those in
    host memory are counted at once."""

    def _maximal_prefix_lookup(self, keys: Any, req_context: Any, req: Any, config: Any, start: int) -> int | None:
        keys, manager, held, pending, rest = list(keys), self.manager, 0, False, 0
        # With KV events vLLM notes every block that it finds.
        if isinstance(manager, SemKVManager) and not self._events_tracker.self_describing_enabled:
            held, pending = manager.held(keys, req_context)
        if held < len(keys):
            rest = super()._maximal_prefix_lookup(keys[held:], req_context, req, config, start + held)
        return None if pending or rest is None else held + rest


class SemKVConnector(OffloadingConnector):
    """See the module, and `semkv_vllm.KVSettings`."""

    def __new__(cls, vllm_config: Any, role: Any, kv_cache_config: Any) -> Any:
        """An `IdleConnector`, with a warning, where this engine cannot be served.

        Raises:
            ConfigError: an unknown or wrong key in ``kv_connector_extra_config``.
        """
        config, settings = expand(vllm_config)
        reason = unsupported(config, kv_cache_config)
        engine = (str(vllm_config.instance_id), role)
        _MADE[engine] += 1
        self = super().__new__(cls)
        self._number = _MADE[engine]  # in the same order in every process of the engine
        self._config, self._settings = config, settings
        if reason is None:
            names = (str(config.kv_transfer_config.engine_id), engine[0], str(self._number))
            self._engine = digest("engine", *names)[:24]
            try:
                wanted = settings.host_bytes or default_host_bytes()
                self._host_bytes, self._first = agreed_host_bytes(self._engine, wanted)
                if reason := too_small(config, kv_cache_config, self._host_bytes):
                    region_of(self._engine).unlink(missing_ok=True)
            except OSError as error:
                reason = f"{SHM} cannot be used ({error}); mount it, or give the container --ipc=host"
        if reason is None:
            return self
        if role == KVConnectorRole.SCHEDULER:
            log.warning("semkv: the KV connector stays idle: %s", reason)
        return IdleConnector(vllm_config, role, kv_cache_config)

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Build one half."""
        register()
        config, settings = self._config, self._settings
        transfer = config.kv_transfer_config
        transfer.engine_id = self._engine
        transfer.kv_connector_extra_config["cpu_bytes_to_use"] = self._host_bytes
        self.shared = KVShared(settings, None, None, dict)  # for the spec; in the scheduler's half for others, too
        if role == KVConnectorRole.SCHEDULER:
            self.shared = make_shared(config, kv_cache_config, settings)
        transfer.kv_connector_extra_config["semkv"] = self.shared
        super().__init__(config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            self.connector_scheduler.__class__ = SemKVScheduler
            if not self._first:  # the scheduler is the last to map the memory, which goes with its last process now
                region_of(self._engine).unlink(missing_ok=True)
        self._adapters = Adapters(settings.cache_dir)
        self._outcomes: dict[str, dict[str, Any]] = {}
        kinds = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._one_group = len(kinds) == 1 and isinstance(kinds[0], FullAttentionSpec)
        self.on_finished: Callable[[Any], None] | None = None
        self._loads, self._stores = transfer.is_kv_consumer, transfer.is_kv_producer
        self.shared.storing = self._stores

    # ------------------------------------------------------------------ scheduler half

    @property
    def manager(self) -> SemKVManager:
        manager = self.scheduler.manager
        assert isinstance(manager, SemKVManager)
        return manager

    def on_new_request(self, request: Any) -> None:
        """Tell the tier, by the request's ``kv_transfer_params``, whose request this is."""
        params = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
        facts = None
        try:
            facts = describe(request, self._adapters, alone=len(self._settings.tiers()) == 1)
            self.shared.counters["lora_skipped"] += facts is None and not wants_skip(params)
        except Exception:
            self.shared.fault("a request")
        if facts is None or not self._loads:
            params = {**params, "max_load_tokens": 0}
        # Where vLLM 0.32 stores tails of blocks, a tail beyond the request's limit would end the engine.
        if facts is None or (params.get("max_offload_tokens") and self.scheduler.config.supports_partial_tail):
            params = {**params, "max_offload_tokens": 0}
        request.kv_transfer_params = {**params, REPORT_KEY: facts or {}}
        super().on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            sources = self.get_external_cache_hit_sources(request, num_external_tokens)
            self._outcomes[request.request_id] = {
                "loaded_tokens": num_external_tokens,
                "sources": {str(source.value): tokens for source, tokens in sources.items()},
            }

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """As vLLM's, which goes through every block; where all are host memory's, there is nothing to go through."""
        if num_external_tokens and self._one_group and not self.manager.promoted(request.request_id):
            return {CacheHitSource.HOST: num_external_tokens}
        sources: dict[Any, int] = super().get_external_cache_hit_sources(request, num_external_tokens)
        return sources

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        try:
            if self.shared.gate is not None:
                self.shared.gate.step_begins(sum(scheduler_output.num_scheduled_tokens.values()))
            if self.shared.store is not None:
                self.shared.store.disown()
        except Exception:
            self.shared.fault("a step")
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if self.shared.gate is not None:
            self.shared.gate.step_ends()
        if connector_output.invalid_block_ids:
            # Another connector's load failed, and what is being stored may have been computed on it. vLLM 0.32 would
            # keep that under the right hashes.
            jobs = self.scheduler._jobs.values()
            self.manager.spoil({key for job in jobs if job.is_store for key in job.keys})
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._reported(request, *super().request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._reported(request, *super().request_finished_all_groups(request, block_ids))

    def _reported(self, request: Any, wait: bool, params: dict[str, Any] | None) -> tuple[bool, dict[str, Any] | None]:
        if self.on_finished is not None:
            try:
                self.on_finished(request)
            except Exception:
                self.shared.fault("a capture")
        outcome = self._outcomes.pop(request.request_id, {"loaded_tokens": 0, "sources": {}})
        key = REPORT_KEY if self._number == 1 else f"{REPORT_KEY}-{self._number}"  # MultiConnector refuses equal keys
        return wait, {**(params or {}), key: outcome}

    def reset_cache(self) -> bool | None:
        """vLLM's word for: the weights may be others, or will be.

        Nothing that is stored is served to this engine any more: it goes on under a namespace of its own. What it
        stored so far may be of new weights already, so it is deleted, where the disk fails in a later step; what other
        engines stored stays theirs. While blocks from before are left in vLLM's own cache, nothing is stored. With
        ``fixed_weights`` nothing happens.

        Returns:
            Whether nothing from before can be served. Where not, vLLM does not go to sleep.
        """
        if self._settings.fixed_weights:
            return True
        shared = self.shared
        used, shared.storing = shared.rename(), False  # first: whatever fails below, old blocks get no new names
        super().reset_cache()
        told = identity.may_have_changed(str(self._vllm_config.instance_id))
        if shared.store is not None:
            shared.store.disown(*used)
        clean = self._kv_cache_manager is None or self._kv_cache_manager.block_pool.get_usage() == 0
        if not clean:
            log.warning("semkv: requests were running during a reset: no KV is stored until a reset finds none")
        shared.storing = self._stores and clean
        return told and clean

    def shutdown(self) -> None:
        """Write what waits, and close the files. Calling it again changes nothing."""
        try:
            super().shutdown()
        except Exception:
            log.warning("semkv: a half of the KV connector could not be closed", exc_info=True)
        if (store := self.shared.store) is not None:
            self.shared.store = None
            if self.shared.renamed:  # nobody else has these names
                store.disown(*self.shared.used())
            store.close()

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        register()
        return super().build_prom_metrics(expand(vllm_config)[0], *args, **kwargs)


def describe(request: Any, adapters: Adapters, *, alone: bool = True) -> dict[str, str] | None:
    """What `shared.request_fact` reads; None where the request is left alone: it says so, or its adapter's weights are
    not known, or not to the tiers beside ours."""
    adapter = adapters.identity(request.lora_request)
    if adapter is None or (adapter and not alone) or wants_skip(request.kv_transfer_params):
        return None
    return {"owner": tenant_tag(request.cache_salt), "adapter": adapter}


def default_host_bytes() -> int:
    """4 GiB; for a CPU engine, whose KV cache lies in the same memory, 256 MiB."""
    from vllm.platforms import current_platform

    return 256 << 20 if current_platform.is_cpu() else 4 << 30


def expand(vllm_config: Any) -> tuple[Any, KVSettings]:
    """A copy of the configuration with our settings in vLLM's words, and the settings.

    Raises:
        ConfigError: an unknown or wrong key in ``kv_connector_extra_config``.
    """
    settings = read_settings(KVSettings, vllm_config.kv_transfer_config.kv_connector_extra_config)
    config = copy.copy(vllm_config)
    config.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    config.kv_transfer_config.kv_connector_extra_config = {
        "spec_name": SPEC,
        "spec_module_path": SPEC_MODULE,
        "cpu_bytes_to_use": settings.host_bytes or default_host_bytes(),
        "secondary_tiers": settings.tiers(),
        "offload_prompt_only": not settings.capture_decode,
        "blocks_per_chunk": 1,
        "self_describing_kv_events": True,  # where vLLM's KV events are on
    }
    return config, settings


def make_shared(config: Any, kv_cache_config: Any, settings: KVSettings) -> KVShared:
    """The scheduler half's store and namespace, of an expanded configuration. A directory that cannot be used costs
    the disk, never the engine."""
    layout = identity.row_layout(build_offloading_config(config, kv_cache_config))
    facts = {"layout": layout, **identity.model_facts(config, settings.cache_dir)}
    facts |= identity.kv_facts(config, kv_cache_config)
    try:
        writer = identity.engine_name(config, config.kv_transfer_config.engine_id)
        store = BlockStore(settings.cache_dir / "kv", "kv", settings.bounds(), writer)
    except StoreError as error:
        log.warning("semkv: no KV is kept on disk: %s", error)
        store = None
    gate = BreakEven() if settings.break_even else None
    model = identity.namespace_digest(facts)[:16]
    return KVShared(settings, store, layout, lambda: facts | identity.hash_facts(config), model, gate)


def unsupported(config: Any, kv_cache_config: Any) -> str | None:
    """Why the engine of this expanded configuration cannot be served, with the remedy, or None. The same in every
    process of the engine."""
    parallel = config.parallel_config
    if parallel.nnodes_within_dp > 1 or parallel.distributed_executor_backend not in (None, "mp", "uni"):
        return (
            "its ranks may be on several nodes, and host memory is one node's; "
            "use --distributed-executor-backend mp on one node"
        )
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is off for this model; --enable-prefix-caching turns it on where vLLM can"
    try:
        for group in build_offloading_config(config, kv_cache_config).groups:
            spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
            for layer in iter_layer_specs(spec):
                get_sliding_window_size_in_chunks(layer, group.tokens_per_block)
    except Exception as error:
        kinds = sorted({type(g.kv_cache_spec).__name__ for g in kv_cache_config.kv_cache_groups})
        return f"vLLM cannot offload its KV cache ({', '.join(kinds)}): {error or type(error).__name__}"
    return None


def too_small(config: Any, kv_cache_config: Any, host_bytes: int) -> str | None:
    """Why so much host memory is of no use to an engine of this expanded configuration, or None."""
    offloading = build_offloading_config(config, kv_cache_config)
    ranks = 1 if offloading.replicated_layout else offloading.parallel.world_size
    row = offloading.worker_kv_bytes_per_block * ranks
    if row > 0 and host_bytes >= 8 * (row + 4096):
        return None
    return f"{host_bytes} bytes of host memory hold fewer than 8 blocks of {row}; raise host_bytes, or enlarge /dev/shm"
