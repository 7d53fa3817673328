"""`SemECConnector`: encoder outputs on disk, so that a media item seen before needs no encoder.

An identifier of vLLM's is not a key by itself: ours covers identifier, model, weights, dtype, processor settings, the
request's ``cache_salt`` and its LoRA adapter's weights. vLLM's own encoder cache on the device knows identifiers only;
two tenants that name the same item alike share it there while it lasts, as they do without this connector.

A promised item that then cannot be loaded ends the engine, so `has_cache_item` reads and checks the bytes, and they
travel to the workers inside the step's metadata. What was encoded or read recently is kept in host memory.

vLLM tells an encoder-cache connector nothing of weights that are exchanged in a running engine. Where the KV connector
is in the same engine, it calls this one's `ECScheduler.reset` at each reset of its own (`shared.FOLLOWERS`). Without it
such an engine must not use this connector.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from cachetools import TLRUCache
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from semkv.connectors import REPORT_KEY, identity, shared, wants_skip
from semkv.connectors.identity import Adapters
from semkv.connectors.settings import ECSettings, read_settings
from semkv.errors import StoreError
from semkv.keys import digest
from semkv.stores.block_file import tenant_tag
from semkv.stores.blocks import BlockStore
from semkv.stores.fusion import FusionState, FusionStore

if TYPE_CHECKING:
    import torch

log = logging.getLogger("semkv.connectors")

_T = TypeVar("_T")
_QUEUE_BYTES = 512 << 20  # that may wait for the disk; what comes on top is dropped and counted


@dataclass
class SemECMetadata(ECConnectorMetadata):
    """One step's work, by identifier: states to put in, the keys under which to save what gets encoded, and whose it is
    (`block_file.tenant_tag`). ``since``: the last purge when the step was planned."""

    namespace: str = ""
    since: int = 0
    loads: dict[str, FusionState] = field(default_factory=dict)
    saves: dict[str, str] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Live:
    """A request with media. ``tenant``: its salt and LoRA adapter, or None when its items are to be left alone."""

    tenant: str | None
    rows: dict[str, int]
    loaded: int = 0
    encoded: int = 0


class ECScheduler:
    """Which items to load and to save. Runs in the scheduler's thread."""

    def __init__(
        self,
        settings: ECSettings,
        store: FusionStore,
        namespace: str,
        host: HostStates,
    ) -> None:
        self.settings, self.store, self.namespace = settings, store, namespace
        self.counters: Counter[str] = Counter()
        self._named = namespace
        self.host, self._adapters = host, Adapters(settings.cache_dir)
        self._live: dict[str, _Live] = {}
        self._promised: dict[str, tuple[str, FusionState]] = {}  # by identifier: key and state
        self._step = SemECMetadata(namespace)

    def reset(self) -> bool:
        """See `semkv.connectors.kv.SemKVConnector.reset_cache`, which calls this."""
        before = self.store
        self.namespace = shared.namespace_after(self.namespace)
        self.store = FusionStore(before.blocks, self.namespace)
        self._promised.clear()
        self._step = SemECMetadata(self.namespace)
        return before.blocks.disown(before.namespace)

    def observe(self, request: Any) -> _Live:
        """Remember whose items these are; called before `has` for the same request."""
        live = self._live.get(request.request_id)
        if live is None:
            adapter = None if wants_skip(request.ec_transfer_params) else self._adapters.identity(request.lora_request)
            rows = {
                f.identifier: f.mm_position.get_num_embeds()
                for f in request.mm_features
                if f.modality != "prompt_embeds"
            }
            tenant = request.cache_salt or ""
            if adapter is None:
                tenant = None
            elif adapter:
                tenant = digest("adapter", tenant, adapter)
            live = self._live[request.request_id] = _Live(tenant, rows)
        return live

    def _key(self, identifier: str) -> str | None:
        """The item's key, or None when the requests that name it belong to several tenants or want no cache."""
        tenants = {live.tenant for live in self._live.values() if identifier in live.rows}
        tenant = tenants.pop() if len(tenants) == 1 else None
        return None if tenant is None else digest("ec", identifier, tenant)

    def has(self, identifier: str) -> bool:
        """Whether the item can be loaded; if so its bytes are read, checked and kept for this step."""
        promised = self._promised.pop(identifier, None)
        if (key := self._key(identifier)) is None:
            return False
        state = promised[1] if promised is not None and promised[0] == key else self._read(key)
        if state is None:
            return False
        rows = next(live.rows[identifier] for live in self._live.values() if identifier in live.rows)
        if len(state.shape) != 2 or state.shape[0] != rows:
            log.warning("semkv: an encoder output of shape %s does not fill %d positions", state.shape, rows)
            return False
        self._promised[identifier] = key, state
        return True

    def _read(self, key: str) -> FusionState | None:
        since = self.store.blocks.last_purge()
        if since and (held := self.host.get(key, _kept(self.store, since))) is not None:
            return held
        ends = self.store.ends(key)
        if (state := self.store.load(key)) is not None:
            state = _page_locked(state)
            if since:
                self.host.put(state, _kept(self.store, since), ends)
        return state

    def allocated(self, request: Any, index: int) -> None:
        """An encoder-cache entry was set aside: for a promised item to be loaded, else for the encoder."""
        identifier = request.mm_features[index].identifier
        if (promised := self._promised.get(identifier)) is not None:  # first: vLLM counts on it
            self._step.loads[identifier] = promised[1]
        live = self.observe(request)
        if promised is not None:
            live.loaded += 1
            self.counters["loaded"] += 1
            return
        live.encoded += 1
        self.counters["encoded"] += 1
        if identifier in live.rows and (key := self._key(identifier)) is not None:
            self._step.since = self._step.since or self.store.blocks.last_purge()
            self._step.saves[identifier] = key
            self._step.owners[identifier] = tenant_tag(request.cache_salt)

    def build_step(self) -> SemECMetadata:
        step, self._step = self._step, SemECMetadata(self.namespace)
        self._promised.clear()
        return step

    def finished(self, request: Any) -> dict[str, Any] | None:
        live = self._live.pop(request.request_id, None)
        if live is None or not self.settings.report:
            return None
        return {REPORT_KEY: {"loaded": live.loaded, "encoded": live.encoded}}

    def close(self) -> None:
        """Delete what nobody will find, which is what this engine stored since a reset, and close the files."""
        if self.namespace != self._named:
            self.store.blocks.disown(self.store.namespace)
        self.store.blocks.close()


class HostStates:
    """Fusion states in host memory, least recently used first out. For several threads.

    An engine's own: a scheduler half and a worker half in one process share it (`of_engine`).
    """

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._held: TLRUCache[tuple[str, str], tuple[FusionState, float]] = TLRUCache(
            max_bytes, ttu=lambda _, held, __: held[1], timer=time.time, getsizeof=lambda held: len(held[0].data)
        )

    @classmethod
    def of_engine(cls, engine: str, max_bytes: int) -> HostStates:
        """The one of this engine in this process, made for the first who asks."""
        return _ENGINES.setdefault(engine, cls(max_bytes))

    def get(self, key: str, namespace: str) -> FusionState | None:
        """The state, where it was put under the same namespace and is not too old."""
        with self._lock:
            held = self._held.get((namespace, key))
        return None if held is None else held[0]

    def put(self, state: FusionState, namespace: str, ends: float) -> None:
        """Keep a state until it is pushed out, or too old at ``ends`` (seconds since the epoch)."""
        with self._lock, contextlib.suppress(ValueError):  # it is larger than the bound
            self._held[namespace, state.key] = state, ends

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._held.clear()


def _kept(store: FusionStore, since: int) -> str:
    """The namespace in host memory of what was read or computed after the purge ``since``: nothing of it is found once
    anything was purged."""
    return f"{store.namespace} {since}"


_ENGINES: weakref.WeakValueDictionary[str, HostStates] = weakref.WeakValueDictionary()


def _page_locked(state: FusionState) -> FusionState:
    """The state in memory from which a GPU can copy by itself, where this process uses one."""
    import torch

    if not torch.cuda.is_initialized():
        return state
    return dataclasses.replace(state, data=torch.from_numpy(state.data).pin_memory().numpy())


class ECWorker:
    """Loads into and saves from the runner's encoder cache; rank 0 of the tensor-parallel group saves, in a thread.

    Args:
        max_age_s: of `ECSettings`.
    """

    def __init__(
        self, blocks: BlockStore | None, device: str, max_age_s: float, *, saves: bool, host: HostStates
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.host = host
        self._blocks, self._device, self._max_age_s, self._saves = blocks, device, max_age_s, saves
        self._writer = ThreadPoolExecutor(1, "semkv-ec-writer")
        self._waiting, self._lock = 0, threading.Lock()  # bytes that the writer has yet to write
        self._stream: torch.cuda.Stream | None = None
        self._landing: list[tuple[torch.cuda.Event, FusionState]] = []

    def load(self, step: SemECMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Start to copy the step's states to the device; the engine's stream waits for them, this thread does not."""
        import torch

        self._landing = [(event, state) for event, state in self._landing if not event.query()]
        while step.loads:
            identifier, state = step.loads.popitem()
            if identifier in encoder_cache:
                continue
            flat = torch.empty(len(state.data), dtype=torch.uint8, device=self._device)
            flat.copy_(torch.from_numpy(state.data), non_blocking=True)
            encoder_cache[identifier] = flat.view(getattr(torch, state.dtype)).view(state.shape)
            if flat.is_cuda:  # what lies in host memory stays there until it has been copied
                copied = torch.cuda.Event()
                copied.record(torch.cuda.current_stream(flat.device))
                self._landing.append((copied, state))

    def save(self, step: SemECMetadata, encoder_cache: dict[str, torch.Tensor], identifier: str) -> None:
        import torch

        key = step.saves.get(identifier)
        if key is None or not self._saves or self._blocks is None:
            return
        blocks, store, since = self._blocks, FusionStore(self._blocks, step.namespace), step.since
        if not since:  # the index does not answer
            self.counters["dropped"] += 1
            return
        tensor = encoder_cache[identifier].detach()
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        flat, copied = self._to_host(tensor.contiguous().view(-1).view(torch.uint8))
        ends = time.time() + self._max_age_s if self._max_age_s else math.inf
        owner = step.owners.get(identifier, "")
        with self._lock:
            if self._waiting and self._waiting + flat.nbytes > _QUEUE_BYTES:
                self.counters["dropped"] += 1
                return
            self._waiting += flat.nbytes

        def save() -> None:
            try:
                if copied is not None:
                    copied.synchronize()
                state = FusionState(key, flat.numpy(), shape, dtype)
                self.host.put(state, _kept(store, since), ends)
                store.save(state, owner, since)
            except Exception:
                log.exception("semkv: an encoder output is not stored")
                blocks.counters["errors"] += 1
            finally:
                with self._lock:
                    self._waiting -= flat.nbytes

        self._writer.submit(save)

    def _to_host(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Start a copy to the host that the engine does not wait for, and the event that ends it on a GPU."""
        import torch

        if not flat.is_cuda:
            return flat.clone(), None
        if self._stream is None:
            self._stream = torch.cuda.Stream(flat.device)
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(self._stream):
            host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            flat.record_stream(self._stream)
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
        return host, copied

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything saved is on disk and found by lookups; False when ``timeout`` seconds are too few."""
        try:
            self._writer.submit(int).result(timeout)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._writer.shutdown()
        self._landing.clear()
        if self._blocks is not None:
            self._blocks.close()


class SemECConnector(ECConnectorBase):
    """Keeps encoder outputs on disk, checked and bounded. See `semkv.connectors.settings.ECSettings`."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """Build one half.

        Raises:
            ConfigError: an unknown or wrong key in ``ec_connector_extra_config``.
        """
        super().__init__(vllm_config=vllm_config, role=role)
        settings = read_settings(ECSettings, vllm_config.ec_transfer_config.ec_connector_extra_config)
        engine = identity.engine_name(vllm_config, vllm_config.ec_transfer_config.engine_id)
        self._blocks: BlockStore | None = (
            None  # without it the scheduler promises nothing; the worker loads all the same
        )
        try:
            self._blocks = BlockStore(settings.root, "fusion", settings.bounds(), engine)
        except StoreError as error:
            log.warning("semkv: no encoder outputs are kept: %s", error)
        # A worker in another process than the scheduler has no use for host memory: states are read where they are
        # promised.
        alone = vllm_config.parallel_config.world_size > 1 and role != ECConnectorRole.SCHEDULER
        self._host = HostStates(0) if alone else HostStates.of_engine(f"{engine} {settings.root}", settings.host_bytes)
        self.scheduler_half: ECScheduler | None = None
        self.worker_half: ECWorker | None = None
        if role == ECConnectorRole.SCHEDULER:
            if self._blocks is None:
                return
            name = identity.namespace_digest(identity.model_facts(vllm_config, settings.cache_dir))
            self.scheduler_half = ECScheduler(settings, FusionStore(self._blocks, name), name, self._host)
            shared.FOLLOWERS[self.scheduler_half] = str(vllm_config.instance_id)
        else:
            from vllm.distributed.parallel_state import get_tp_group
            from vllm.platforms import current_platform

            first = get_tp_group().rank_in_group == 0
            device = current_platform.device_type
            self.worker_half = ECWorker(self._blocks, device, settings.max_age_s, saves=first, host=self._host)

    def _try(self, otherwise: _T, what: Callable[..., _T], *arguments: Any) -> _T:
        """What a half of ours does for a hook of vLLM's. A fault in it is counted, and the engine goes on."""
        try:
            return what(*arguments)
        except Exception:
            if self._blocks is not None:
                self._blocks.counters["errors"] += 1
            log.warning("semkv: an encoder output is computed or not stored, by a fault of semkv's", exc_info=True)
            return otherwise

    # ------------------------------------------------------------------ scheduler half

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        if self.scheduler_half is not None:
            self._try(None, self.scheduler_half.observe, request)
        return True

    def has_cache_item(self, identifier: str) -> bool:
        return (
            self.scheduler_half is not None
            and self.is_consumer
            and self._try(False, self.scheduler_half.has, identifier)
        )

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if self.scheduler_half is not None:
            self._try(None, self.scheduler_half.allocated, request, index)

    def build_connector_meta(self, scheduler_output: Any) -> SemECMetadata:
        if self.scheduler_half is None:
            return SemECMetadata()
        self._try(None, self.scheduler_half.store.blocks.disown)  # what failed at a reset
        return self.scheduler_half.build_step()

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None if self.scheduler_half is None else self._try(None, self.scheduler_half.finished, request)

    # ------------------------------------------------------------------ worker half

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        step = self._connector_metadata
        if self.worker_half is not None and isinstance(step, SemECMetadata):
            self.worker_half.load(step, encoder_cache)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        step = self._connector_metadata
        if self.worker_half is not None and self.is_producer and isinstance(step, SemECMetadata):
            self._try(None, self.worker_half.save, step, encoder_cache, mm_hash)

    def shutdown(self) -> None:
        """Write what waits and close the files."""
        if self.worker_half is not None:
            self.worker_half.close()
        elif self.scheduler_half is not None:
            shared.FOLLOWERS.pop(self.scheduler_half, None)
            self.scheduler_half.close()
