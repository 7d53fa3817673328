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
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from semkv_stores.block_file import tenant_tag
from semkv_stores.blocks import BlockStore
from semkv_stores.digests import digest
from semkv_stores.errors import StoreError
from semkv_vllm import (
    REPORT_KEY,
    SPEC,
    SPEC_MODULE,
    KVSettings,
    identity,
    private,
    read_settings,
    register,
    wants_skip,
)
from semkv_vllm.configuration import UnknownError
from semkv_vllm.documents import Documents, Matched, Orders, refusal_of
from semkv_vllm.gate import refusal, wanted
from semkv_vllm.hints import read_hints
from semkv_vllm.host_memory import (
    OURS,
    SHM,
    Need,
    agreed_host_bytes,
    default_host_bytes,
    let_go,
    region_of,
)
from semkv_vllm.identity import Adapters
from semkv_vllm.media import ByContent, Media
from semkv_vllm.old_weights import OldWeights
from semkv_vllm.orders import DocumentStep, Gated, WorkerNews
from semkv_vllm.params import PEER_KEY, client_params, peer_params
from semkv_vllm.placement import Placement
from semkv_vllm.shared import BreakEven, KVShared, RequestFacts, ours
from semkv_vllm.spec import SemKVManager

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        get_sliding_window_size_in_chunks,
    )
except ImportError:  # vLLM 0.32
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        get_sliding_window_size_in_chunks,
    )

log = logging.getLogger("semkv.connectors")
engine_log = init_logger("vllm.semkv")
"""For what an operator wants to read at each start: vLLM shows lines below a warning of its own loggers only."""

_MADE: Counter[tuple[str, Any]] = Counter()  # connectors of an engine and a role in this process


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Stands in where an engine cannot be served: it stores and loads nothing, and the engine runs as without it."""

    requires_kv_delivery = False

    def _nothing(self, *args: Any, **fields: Any) -> None:
        return

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = (
        update_state_after_alloc
    ) = _nothing

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> OffloadingConnectorMetadata:
        return OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=set())

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class SemKVScheduler(OffloadingConnectorScheduler):
    """vLLM's, which looks for every block of a waiting prompt again in every step, 500 for 8,000 tokens. Here those in
    host memory are counted at once."""

    def _maximal_prefix_lookup(
        self, keys: Any, req_context: Any, req: Any, config: Any, start: int
    ) -> int | None:
        keys = list(keys)
        manager = self.manager
        held = 0
        pending = False
        rest = 0
        # With KV events vLLM notes every block that it finds.
        if isinstance(manager, SemKVManager) and not manager.tells_events:
            held, pending = manager.held(keys, req_context)
        if held < len(keys):
            rest = super()._maximal_prefix_lookup(
                keys[held:], req_context, req, config, start + held
            )
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
        self._config = config
        self._settings = settings
        if reason is None:
            names = (str(config.kv_transfer_config.engine_id), engine[0], str(self._number))
            self._engine = OURS + digest("engine", *names)[:24]
            reason = self._take_memory(kv_cache_config, role)
        if reason is None:
            return self
        if role == KVConnectorRole.SCHEDULER:
            log.warning("semkv: the KV connector stays idle: %s", reason)
        return IdleConnector(vllm_config, role, kv_cache_config)

    def _take_memory(self, kv_cache_config: Any, role: Any) -> str | None:
        """Agree with the other processes on host memory; why it is of no use, or None. The scheduler's process says how
        much there is.

        Where it is of no use its file stays for as long as the processes live: its length is what they agree on.
        """
        offloading = build_offloading_config(self._config, kv_cache_config)
        need = Need(offloading, self._config, sealed=self._settings.sealed)
        self._step_rows = need.rows
        wanted = self._settings.host_bytes or max(default_host_bytes(), need.host_bytes)
        try:
            self._host_bytes, self._first = agreed_host_bytes(self._engine, wanted)
        except OSError as error:
            return f"{SHM} cannot be used ({error}); mount it, or give the container --ipc=host"
        if reason := need.unmet(wanted, self._host_bytes):
            return reason
        if role == KVConnectorRole.SCHEDULER:
            found = need.found(wanted, self._host_bytes)
            if self._host_bytes < wanted:
                log.warning(
                    "semkv: %s; enlarge %s (docker: --shm-size) or lower host_bytes", found, SHM
                )
            else:
                engine_log.info("semkv: %s", found)
        return None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Build one half."""
        register()
        config, settings = self._config, self._settings
        transfer = config.kv_transfer_config
        transfer.engine_id = self._engine
        transfer.kv_connector_extra_config["cpu_bytes_to_use"] = self._host_bytes
        # For the spec; in the scheduler's half for others, too.
        self.shared = KVShared(settings, None, None, dict)
        if role == KVConnectorRole.SCHEDULER:
            self.shared = make_shared(config, kv_cache_config, settings)
            self.shared.step_rows = self._step_rows
        transfer.kv_connector_extra_config["semkv"] = self.shared
        super().__init__(config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            self.connector_scheduler.__class__ = SemKVScheduler
            # The scheduler is the last to map the memory, which goes with its last process now.
            if not self._first:
                region_of(self._engine).unlink(missing_ok=True)
        self._adapters = Adapters(settings.cache_dir)
        self._media = Media(trusted=settings.trust_media_names, stop_storing=self._stop_storing)
        # By request, what vLLM was given.
        self._handed: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._instance = str(vllm_config.instance_id)
        self._cache_manager: Any = None  # vLLM's own cache
        # By id the requests of which something may still be stored, as vLLM's half sees them.
        self._live: dict[str, Any] = {}
        kinds = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        parallel = config.parallel_config
        ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
        self._tokens_per_block = [kind.block_size * ranks for kind in kinds]
        self._one_group = len(kinds) == 1 and isinstance(kinds[0], FullAttentionSpec)
        self.on_finished: Callable[[Any], None] | None = None
        self._loads = transfer.is_kv_consumer
        self._stores = transfer.is_kv_producer
        self.shared.storing = self._stores
        self._documents: Documents | None = None  # in the scheduler's half
        self._placement: Placement | None = None  # in a worker's
        self._kv_caches: dict[str, Any] = {}
        if wanted(config):
            # What cannot be repaired is a load that failed: it is computed, and no request fails.
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
            self._prepare_documents(kv_cache_config)

    # ------------------------------------------------------------------ documents at other positions

    @ours("the start of documents")
    def _prepare_documents(self, kv_cache_config: Any) -> None:
        config = self._config
        block = self._tokens_per_block[0]
        if self.connector_scheduler is None:
            self._placement = Placement(config, kv_cache_config, block, self.shared)
        elif reason := refusal(config, kv_cache_config):
            self._tell_refusal(reason)
        else:
            self._documents = Documents(
                self.scheduler,
                self.shared,
                config,
                block,
                seen=self._seen,
                by_content=self.by_content,
            )

    def _tell_refusal(self, reason: str) -> None:
        log.warning("semkv: no document is reused at another position: %s", reason)

    def bind_runner(self, runner: Any) -> None:
        """Called by `semkv_vllm.worker.DocumentWorker` with vLLM's model runner, whose KV cache is there."""
        if self._placement is not None:
            self._placement.bind(runner, self._kv_caches)

    def get_handshake_metadata(self) -> Any:
        return None if self._placement is None else Gated(self._placement.refused)

    @ours("the check of the model")
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        if self._documents is None:
            return
        ranks = self._config.parallel_config.tensor_parallel_size
        self._documents.refused = refusal_of(list(metadata.values()), ranks)
        if self._documents.refused:
            self._tell_refusal(self._documents.refused)
        else:
            engine_log.info("semkv: documents are reused at other positions, where requests ask")

    @ours("the documents of a request")
    def _ask_documents(self, request: Any, sent: Any) -> None:
        if self._documents is not None and self._loads:
            self._documents.on_new_request(request, sent)

    def _unmatched(self, request: Any, computed: int) -> Matched | None:
        return None if self._documents is None else self._documents.unmatched(request, computed)

    @ours("the documents of a request", instead=_unmatched)
    def _match_documents(self, request: Any, computed: int) -> Matched | None:
        return None if self._documents is None else self._documents.matched(request, computed)

    def _not_loaded(self, request: Any, _: Any, tokens: int) -> int | None:
        return None if self._documents is None else self._documents.not_loaded(request, tokens)

    @ours("the documents of a request", instead=_not_loaded)
    def _allocate_documents(self, request: Any, blocks: Any, tokens: int) -> int | None:
        """How many tokens are loaded; None where that is not ours to say."""
        documents = self._documents
        return None if documents is None else documents.allocated(request, blocks, tokens)

    @ours("the pictures of a step")
    def _give_pictures(self, scheduled: Any) -> None:
        if self._documents is not None:
            self._documents.give_pictures(scheduled)

    def _all_failed(self, meta: Any) -> Orders:
        """After a fault no load of this step is of use, not even an exact one."""
        assert self._documents is not None
        orders = self._documents.orders
        self._documents.orders = Orders()
        names = [job.req_id for job in meta.load_jobs.values()]
        return orders._replace(unloaded=[*orders.unloaded, *names])

    @ours("the documents of a step", instead=_all_failed)
    def _orders_of_step(self, _: Any) -> Orders:
        return Orders() if self._documents is None else self._documents.take_orders()

    @ours("the documents of a step")
    def _news_of_documents(self, output: Any) -> None:
        documents = self._documents
        if documents is None:
            return
        news = output.kv_connector_worker_meta
        self.shared.counters["errors"] += getattr(news, "faults", 0)
        if getattr(news, "mismatch", False):
            documents.mistrust()
        for name in output.failed_recving:
            self._outcomes.pop(name, None)
            self._load_no_more(name)
        documents.arrived(output.finished_recving or (), output.failed_recving)

    def _load_no_more(self, name: str) -> None:
        """Have a request computed from its beginning, whose load has failed.

        vLLM keeps room for what such a request still needs, and lets it load again only beside that: one of more than
        half of the KV cache would wait for ever.
        """
        with suppress(KeyError):  # it has ended
            private.state_of(self.scheduler, name).max_load_tokens = 0

    # ------------------------------------------------------------------ worker half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._kv_caches = kv_caches
        if self._placement is not None and self._placement.bound:
            self._placement.distrust("the KV cache was made anew")

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._placement is not None:
            self._placement.begin(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if self._placement is not None:
            self._placement.finish(results)
        return results

    def build_connector_worker_meta(self) -> Any:
        meta = super().build_connector_worker_meta()
        return self._news(meta) or meta

    @ours("the documents of a step")
    def _news(self, meta: Any) -> WorkerNews | None:
        return None if self._placement is None else self._placement.take_news(meta)

    # ------------------------------------------------------------------ scheduler half

    @property
    def manager(self) -> SemKVManager:
        manager = self.scheduler.manager
        assert isinstance(manager, SemKVManager)
        return manager

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._cache_manager = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        """Tell the tier whose request this is, and hand on what its client may say.

        Both travel in the request's ``kv_transfer_params``. Other connectors in a MultiConnector read these too, so
        the request has its own again when vLLM's half has read them.
        """
        sent = request.kv_transfer_params
        params = self._begun(request)
        view = self.by_content(request)
        if params is None or view is None:
            params = {"max_load_tokens": 0, "max_offload_tokens": 0}
        request.kv_transfer_params = params
        self._handed[request] = params
        self._live[request.request_id] = request if view is None else view
        try:
            super().on_new_request(self._live[request.request_id])
        finally:
            request.kv_transfer_params = sent if isinstance(sent, dict) else None
        if params.get("max_load_tokens") is None:
            self._ask_documents(request, sent)

    @ours("a request")
    def _begun(self, request: Any) -> dict[str, Any]:
        params = client_params(request.kv_transfer_params, self._settings.allowed_params)
        facts = describe(request, self._adapters, alone=len(self._settings.tiers()) == 1)
        self.shared.counters["lora_skipped"] += facts is None and not wants_skip(
            request.kv_transfer_params
        )
        if not self._media.knows(request):
            facts = None
        if facts is None or not self._loads:
            params["max_load_tokens"] = 0
        # Where vLLM 0.32 stores tails of blocks, a tail beyond the request's limit would end the engine.
        if facts is None or (
            params.get("max_offload_tokens") and self.scheduler.config.supports_partial_tail
        ):
            params["max_offload_tokens"] = 0
        if facts is None:
            return {**params, REPORT_KEY: RequestFacts()}
        hints = read_hints(request.kv_transfer_params, self._settings.others)
        if hints.peer and self._loads and not self.shared.is_away(hints.peer):
            params[PEER_KEY] = peer_params(hints.peer)
        return {**params, REPORT_KEY: replace(facts, hints=hints)}

    @ours("the media of a request")
    def by_content(self, request: Any) -> Any:
        """The request, with block hashes that cover the content of its media; None after a fault."""
        if not request.mm_features and not request.resumable:  # the prompt of a resumable one grows
            return request
        return ByContent(request, self._media, self.scheduler.config.tokens_per_hash)

    def _seen(self, request: Any) -> Any:
        """The request as vLLM's half has it: all hooks must name its blocks alike."""
        return self._live.get(request.request_id, request)

    def _stop_storing(self, request: Any) -> None:
        """No KV of a request is stored from now on: vLLM hands these parameters to the manager with each store."""
        if request in self._handed:
            self._handed[request]["max_offload_tokens"] = 0

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._tell_old(lambda old: old.looked_up(request.request_id, num_computed_tokens))
        found: Matched | None = self._match_documents(request, num_computed_tokens)
        if found is None:
            found = super().get_num_new_matched_tokens(self._seen(request), num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name = request.request_id
        self._tell_old(lambda old: old.allocated(name, blocks.get_block_ids(), num_external_tokens))
        loaded = self._allocate_documents(request, blocks, num_external_tokens)
        if loaded is None:
            loaded = num_external_tokens
            super().update_state_after_alloc(self._seen(request), blocks, num_external_tokens)
        if loaded and self._settings.report_loads:
            self._note_loads(request, loaded)

    @ours("a report")
    def _note_loads(self, request: Any, tokens: int) -> None:
        sources = self.get_external_cache_hit_sources(request, tokens)
        self._outcomes[request.request_id] = {
            "loaded_tokens": tokens,
            "sources": {str(source.value): count for source, count in sources.items()},
        }

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """As vLLM's, which goes through every block; where all are host memory's, there is nothing to go through."""
        if self._approximate(request):
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}
        if num_external_tokens and self._one_group and self._from_host(request):
            return {CacheHitSource.HOST: num_external_tokens}
        sources: dict[Any, int] = super().get_external_cache_hit_sources(
            self._seen(request), num_external_tokens
        )
        return sources

    @ours("a report", otherwise=1)
    def _approximate(self, request: Any) -> int:
        """How many tokens of a request are those of documents at another position; what is not known counts as some."""
        return 0 if self._documents is None else self._documents.used(request.request_id)

    @ours("the documents of a request")
    def _end_documents(self, request: Any) -> None:
        if self._documents is not None:
            self._documents.ended(request.request_id)

    @ours("a report", otherwise=False)
    def _from_host(self, request: Any) -> bool:
        return not private.promoted(self.manager, request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._step_begins(scheduler_output)
        self._tell_old(lambda old: old.step(scheduler_output))
        meta = super().build_connector_meta(scheduler_output)
        self._forget_finished(scheduler_output.finished_req_ids or ())
        self._give_pictures(scheduler_output)
        orders = self._orders_of_step(meta)
        return DocumentStep(**vars(meta), **orders._asdict()) if any(orders) else meta

    @ours("a step")
    def _step_begins(self, scheduler_output: Any) -> None:
        if self.shared.gate is not None:
            self.shared.gate.step_begins(sum(scheduler_output.num_scheduled_tokens.values()))
        if self.shared.store is not None:
            self.shared.store.disown()

    @ours("a step")
    def _forget_finished(self, finished: Any) -> None:
        """Nothing more is stored of some requests."""
        for request in finished:
            self._live.pop(request, None)
        if self._tell_old(lambda old: old.is_over(finished)):
            self.shared.old = None
            log.warning(
                "semkv: all requests from before the reset have ended, and all KV is stored again"
            )

    def update_connector_output(self, connector_output: Any) -> None:
        self._step_ends(connector_output)
        self._news_of_documents(connector_output)
        super().update_connector_output(connector_output)

    @ours("a step")
    def _step_ends(self, connector_output: Any) -> None:
        if self.shared.gate is not None:
            self.shared.gate.step_ends()
        if connector_output.invalid_block_ids:
            # Another connector's load failed, and what is being stored may have been computed on it. vLLM 0.32 would
            # keep that under the right hashes.
            self.manager.spoil(private.keys_being_stored(self.scheduler))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._ended(request, [block_ids])
        seen = self._seen(request)
        return self._reported(request, *super().request_finished(seen, block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        self._ended(request, block_ids)
        seen = self._seen(request)
        return self._reported(request, *super().request_finished_all_groups(seen, block_ids))

    @ours("a capture")
    def _ended(self, request: Any, block_ids: Any) -> None:
        self._tell_old(lambda old: old.ended(request.request_id, block_ids))
        if self.on_finished is not None:
            self.on_finished(request)

    def _reported(
        self, request: Any, wait: bool, params: dict[str, Any] | None
    ) -> tuple[bool, dict[str, Any] | None]:
        outcome: dict[str, Any] = {}
        if self._settings.report_loads:
            outcome = self._outcomes.pop(request.request_id, {"loaded_tokens": 0, "sources": {}})
        if approximate := self._approximate(request):
            outcome["approximate_tokens"] = approximate
        self._end_documents(request)
        if not outcome:
            return wait, params
        # MultiConnector refuses equal keys.
        key = REPORT_KEY if self._number == 1 else f"{REPORT_KEY}-{self._number}"
        return wait, {**(params or {}), key: outcome}

    # ------------------------------------------------------------------ other weights

    def _tell_old(self, tell: Callable[[OldWeights], Any]) -> Any:
        """Keep account of what old weights computed. Where that fails, nothing is stored until a reset finds nothing
        running."""
        try:
            return None if self.shared.old is None else tell(self.shared.old)
        except Exception:
            self.shared.fault("the account of a reset")
            self.shared.storing = False
            return None

    def reset_cache(self) -> bool | None:
        """Called by vLLM when the weights may have changed, or are about to.

        Nothing that is stored is served to this engine any more: it goes on under a namespace of its own. What it
        stored so far may be of new weights already, so it is deleted, where the disk fails in a later step; what other
        engines stored stays theirs. Beside running requests storing goes on for those that rest on nothing old
        (`semkv_vllm.old_weights`). With ``fixed_weights`` nothing happens.

        Returns:
            Whether nothing from before can be served. Where not, vLLM does not go to sleep.
        """
        if self._settings.fixed_weights:
            return True
        shared = self.shared
        shared.storing = shared.loading = (
            False  # first: whatever fails below, old blocks get no new names
        )
        try:
            done = self._reset()
        except Exception:
            shared.fault("a reset")
            log.warning(
                "semkv: a reset failed: no KV is stored or loaded until another one succeeds"
            )
            return False
        shared.storing = self._stores
        shared.loading = True
        return done

    def _reset(self) -> bool:
        shared = self.shared
        used = shared.rename()
        if self._documents is not None:
            self._documents.reset()
        super().reset_cache()
        followed = identity.may_have_changed(self._instance)
        if shared.store is not None:
            shared.store.disown(*used)
        manager = self._cache_manager
        if manager is None:
            raise StoreError("vLLM's own cache is not known")
        shared.old = None
        if manager.block_pool.get_usage() == 0:
            return followed
        shared.old = OldWeights(self._live, manager, self._tokens_per_block)
        log.warning(
            "semkv: requests were running during a reset: KV of %d of them is not stored",
            len(shared.old.requests),
        )
        return False

    def shutdown(self) -> None:
        """Write what waits, and close the files. Calling it again changes nothing."""
        try:
            super().shutdown()
        except Exception:
            log.warning("semkv: a half of the KV connector could not be closed", exc_info=True)
        let_go(self._engine)
        if (store := self.shared.store) is not None:
            self.shared.store = None
            if self.shared.renamed:  # no other engine uses these names
                store.disown(*self.shared.used())
            store.close()

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        register()
        return super().build_prom_metrics(expand(vllm_config)[0], *args, **kwargs)


def describe(request: Any, adapters: Adapters, *, alone: bool = True) -> RequestFacts | None:
    """Whose request this is; None where the request is left alone: it says so, or its adapter's weights are
    not known, or not to the tiers beside ours."""
    adapter = adapters.identity(request.lora_request)
    if adapter is None or (adapter and not alone) or wants_skip(request.kv_transfer_params):
        return None
    return RequestFacts(owner=tenant_tag(request.cache_salt), adapter=adapter)


def expand(vllm_config: Any) -> tuple[Any, KVSettings]:
    """A copy of the configuration with our settings in vLLM's words, and the settings.

    Raises:
        ConfigError: an unknown, wrong or void key in ``kv_connector_extra_config``.
    """
    settings = read_settings(KVSettings, vllm_config.kv_transfer_config.kv_connector_extra_config)
    if not wanted(vllm_config):
        settings.refuse_documents()
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
    store = None
    try:
        facts = {"layout": layout, **identity.model_facts(config, settings.cache_dir)}
        facts |= identity.kv_facts(config, kv_cache_config)
        writer = identity.engine_name(config, config.kv_transfer_config.engine_id)
        store = BlockStore(settings.cache_dir / "kv", "kv", settings.bounds(), writer)
        store.finds_far = bool(settings.bucket)
    except UnknownError as reason:
        log.warning("semkv: no KV is kept on disk: %s", reason)
        facts = identity.nobody_elses()
    except StoreError as error:
        log.warning("semkv: no KV is kept on disk: %s", error)
    gate = BreakEven() if settings.break_even else None
    model = identity.namespace_digest(facts)[:16]
    events = config.kv_events_config
    return KVShared(
        settings,
        store,
        layout,
        facts=lambda: facts | identity.hash_facts(config),
        model=model,
        gate=gate,
        tells_events=events is not None and events.enable_kv_cache_events,
    )


def unsupported(config: Any, kv_cache_config: Any) -> str | None:
    """Why the engine of this expanded configuration cannot be served, with the remedy, or None. The same in every
    process of the engine."""
    parallel = config.parallel_config
    if parallel.nnodes_within_dp > 1 or parallel.distributed_executor_backend not in (
        None,
        "mp",
        "uni",
    ):
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
