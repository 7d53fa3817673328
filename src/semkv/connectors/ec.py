"""`SemECConnector`: encoder outputs on disk, so that a media item seen before needs no encoder.

An identifier of vLLM's is not a key by itself: ours covers identifier, model, weights, dtype, processor settings and
the request's ``cache_salt``. vLLM's own encoder cache on the device knows identifiers only; two tenants that name the
same item alike share it there while it lasts, as they do without this connector.

A promised item that then cannot be loaded ends the engine, so `has_cache_item` reads and checks the bytes, and they
travel to the workers inside the step's metadata.

vLLM tells an encoder-cache connector nothing of weights exchanged in a running engine: such an engine must not use it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from semkv.connectors import namespace as ns
from semkv.connectors.counters import Counters
from semkv.connectors.outcome import REPORT_KEY, wants_skip
from semkv.connectors.settings import ECSettings, read_settings
from semkv.connectors.writer import BackgroundWriter
from semkv.keys import digest
from semkv.stores.extents import ExtentStore
from semkv.stores.fusion import FusionState, FusionStore
from semkv.stores.host_pool import HostItems

if TYPE_CHECKING:
    import torch

log = logging.getLogger("semkv.connectors")


@dataclass
class SemECMetadata(ECConnectorMetadata):
    """One step's work: states to put in by identifier, and the keys under which to save what gets encoded."""

    namespace: str = ""
    loads: dict[str, FusionState] = field(default_factory=dict)
    saves: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Live:
    """A request with media. ``tenant``: its salt, or None when its items are to be left alone."""

    tenant: str | None
    rows: dict[str, int]
    loaded: int = 0
    encoded: int = 0


class ECScheduler:
    """Which items to load and to save. Runs in the scheduler's thread."""

    def __init__(self, settings: ECSettings, store: FusionStore, namespace: str) -> None:
        self.settings, self.store, self.namespace, self.counters = settings, store, namespace, Counters()
        self._live: dict[str, _Live] = {}
        self._promised: dict[str, tuple[str, FusionState]] = {}  # by identifier: key and state
        self.host: HostItems[FusionState] = HostItems(settings.host_bytes)  # checked already
        self._step = SemECMetadata(namespace)

    def observe(self, request: Any) -> _Live:
        """Remember whose items these are; called before `has` for the same request."""
        live = self._live.get(request.request_id)
        if live is None:
            ignore = request.lora_request is not None or wants_skip(request.ec_transfer_params)
            rows = {
                f.identifier: f.mm_position.get_num_embeds()
                for f in request.mm_features
                if f.modality != "prompt_embeds"
            }
            live = self._live[request.request_id] = _Live(None if ignore else request.cache_salt or "", rows)
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
        state = self.host.get(key)
        if state is None and (state := self.store.load(key)) is not None:
            self.host.put(key, state, state.data.nbytes)
        return state

    def allocated(self, request: Any, index: int) -> None:
        """An encoder-cache entry was set aside: for a promised item to be loaded, else for the encoder."""
        identifier = request.mm_features[index].identifier
        live = self.observe(request)
        if (promised := self._promised.get(identifier)) is not None:
            self._step.loads[identifier] = promised[1]
            live.loaded += 1
            self.counters.add("loaded")
            return
        live.encoded += 1
        self.counters.add("encoded")
        if identifier in live.rows and (key := self._key(identifier)) is not None:
            self._step.saves[identifier] = key

    def build_step(self) -> SemECMetadata:
        step, self._step = self._step, SemECMetadata(self.namespace)
        self._promised.clear()
        return step

    def finished(self, request: Any) -> dict[str, Any] | None:
        live = self._live.pop(request.request_id, None)
        if live is None or not self.settings.report:
            return None
        return {REPORT_KEY: {"loaded": live.loaded, "encoded": live.encoded}}


class ECWorker:
    """Loads into and saves from the runner's encoder cache; rank 0 of the tensor-parallel group saves."""

    def __init__(self, settings: ECSettings, extents: ExtentStore, device: str, saves: bool) -> None:
        self.counters = Counters()
        self._extents, self._device, self._saves = extents, device, saves
        self._writer = BackgroundWriter("semkv-ec-writer", settings.queue_bytes)
        self._stream: torch.cuda.Stream | None = None

    def load(self, step: SemECMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        import torch

        for identifier, state in step.loads.items():
            if identifier not in encoder_cache:
                flat = torch.from_numpy(state.data).to(self._device)
                encoder_cache[identifier] = flat.view(getattr(torch, state.dtype)).view(state.shape)

    def save(self, step: SemECMetadata, encoder_cache: dict[str, torch.Tensor], identifier: str) -> None:
        import torch

        key = step.saves.get(identifier)
        if key is None or not self._saves or not self._extents.writable:
            return
        tensor = encoder_cache[identifier].detach()
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        flat, copied = self._to_host(tensor.contiguous().view(-1).view(torch.uint8))
        store = FusionStore(self._extents, step.namespace)

        def save() -> None:
            if copied is not None:
                copied.synchronize()
            store.save(FusionState(key, flat.numpy(), shape, dtype))

        if not self._writer.submit(save, flat.nbytes):
            self.counters.add("dropped")

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
        """Wait until everything saved is on disk and found by lookups."""
        return self._writer.flush(timeout)

    def close(self) -> None:
        self._writer.close()
        self._extents.close()


class SemECConnector(ECConnectorBase):
    """Keeps encoder outputs on disk, checked and bounded. See `semkv.connectors.settings.ECSettings`."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """Build one half.

        Raises:
            ConfigError: an unknown or wrong key in ``ec_connector_extra_config``.
            StoreError: the directory is a file, or was written by another format version.
        """
        super().__init__(vllm_config=vllm_config, role=role)
        settings = read_settings(ECSettings, vllm_config.ec_transfer_config.ec_connector_extra_config)
        self._extents = ExtentStore(settings.root, "fusion", settings.bounds())
        self._scheduler: ECScheduler | None = None
        self._worker: ECWorker | None = None
        if role == ECConnectorRole.SCHEDULER:
            name = ns.namespace_digest(ns.model_facts(vllm_config, settings.cache_dir))
            self._scheduler = ECScheduler(settings, FusionStore(self._extents, name), name)
        else:
            from vllm.distributed.parallel_state import get_tp_group
            from vllm.platforms import current_platform

            first = get_tp_group().rank_in_group == 0
            self._worker = ECWorker(settings, self._extents, current_platform.device_type, first)

    # ------------------------------------------------------------------ scheduler half

    @property
    def scheduler_half(self) -> ECScheduler | None:
        return self._scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        if self._scheduler is not None:
            self._scheduler.observe(request)
        return True

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler is not None and self.is_consumer and self._scheduler.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> SemECMetadata:
        return SemECMetadata() if self._scheduler is None else self._scheduler.build_step()

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None if self._scheduler is None else self._scheduler.finished(request)

    # ------------------------------------------------------------------ worker half

    @property
    def worker_half(self) -> ECWorker | None:
        return self._worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        step = self._connector_metadata
        if self._worker is not None and isinstance(step, SemECMetadata):
            self._worker.load(step, encoder_cache)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        step = self._connector_metadata
        if self._worker is not None and self.is_producer and isinstance(step, SemECMetadata):
            self._worker.save(step, encoder_cache, mm_hash)

    def shutdown(self) -> None:
        """Write what waits and close the files."""
        if self._worker is not None:
            self._worker.close()
        else:
            self._extents.close()
