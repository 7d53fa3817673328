"""`SemECConnector`: encoder outputs on disk, so that a media item seen before needs no encoder.

An identifier of vLLM's is no key, since a client or a counter may have chosen it. Ours covers what the encoder is given
(`semkv_vllm.media`), all that shapes its output (`semkv_vllm.identity`), the request's ``cache_salt`` and
its LoRA adapter's weights. vLLM's own encoder cache on the device knows identifiers only; two tenants that name two
items alike share one of them there while it lasts, as they do without this connector. What is stored is the output of
the item whose encoding was asked for.

A promised item that then cannot be loaded ends the engine, so `has_cache_item` reads and checks the bytes, and they
travel to the workers inside the step's metadata.

vLLM tells an encoder-cache connector nothing of weights that are exchanged in a running engine. Where the KV connector
is in the same engine, it calls this one's `ECScheduler.reset` at each reset of its own (`identity.FOLLOWERS`). Without
it such an engine must not use this connector.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from semkv_stores.block_file import PAGE, tenant_tag
from semkv_stores.block_index import BlockRef
from semkv_stores.blocks import BlockStore
from semkv_stores.digests import digest
from semkv_stores.errors import StoreError
from semkv_stores.fusion import FusionState, FusionStore
from semkv_vllm import REPORT_KEY, ECSettings, identity, read_settings, wants_skip
from semkv_vllm.configuration import UnknownError
from semkv_vllm.disk_process import DiskProcess, HostShape
from semkv_vllm.identity import Adapters
from semkv_vllm.media import Media

if TYPE_CHECKING:
    import torch

log = logging.getLogger("semkv.connectors")

_T = TypeVar("_T")
_FETCH_S = 10.0  # how long a request waits for outputs from the bucket
_MOST_WAITING = (
    64  # encoder outputs that may wait for the disk; what comes on top is dropped and counted
)


@dataclass
class SemECMetadata(ECConnectorMetadata):
    """One step's work, by identifier: states to put in, and for what gets encoded the key and the tenant's tag
    (`block_file.tenant_tag`) to save it under. ``since``: the last purge when the step was planned."""

    namespace: str = ""
    since: int = 0
    loads: dict[str, FusionState] = field(default_factory=dict)
    saves: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(slots=True)
class _Live:
    """A request with media.

    Attributes:
        tenant: its salt and LoRA adapter, or None when its items are to be left alone.
        rows: how many rows an item's output has, by vLLM's identifier.
        keys: of the items' outputs, in the order of the request's features; None for what is left alone.
        named: the same by identifier.
        fetches: jobs that bring its outputs from the bucket; None while it was not looked for them.
        until: when it no longer waits for these.
    """

    tenant: str | None
    rows: dict[str, int] = field(default_factory=dict)
    keys: list[str | None] = field(default_factory=list)
    named: dict[str, set[str | None]] = field(default_factory=dict)
    loaded: int = 0
    encoded: int = 0
    fetches: set[int] | None = None
    until: float = 0.0


class ECScheduler:
    """Which items to load and to save. Runs in the scheduler's thread."""

    def __init__(
        self,
        blocks: BlockStore,
        namespace: str,
        cache_dir: Path,
        media: Media,
        bucket: Mapping[str, Any] | None = None,
    ) -> None:
        self.namespace = self._named = namespace
        self.store = FusionStore(blocks, namespace)
        self._adapters = Adapters(cache_dir)
        self._media = media
        self._live: dict[str, _Live] = {}
        self._promised: dict[str, FusionState] = {}
        self._step = SemECMetadata(namespace)
        self._fetcher = None if bucket is None else Fetcher(blocks, bucket)

    def reset(self) -> None:
        """See `semkv_vllm.kv.SemKVConnector.reset_cache`, which calls this."""
        before = self.store
        self.namespace = identity.namespace_after(self.namespace)
        self.store = FusionStore(before.blocks, self.namespace)
        self._promised.clear()
        self._step = SemECMetadata(self.namespace)
        before.blocks.disown(before.namespace)

    def observe(self, request: Any) -> _Live:
        """Remember whose items these are; called before `has` for the same request."""
        live = self._live.get(request.request_id)
        if live is None:
            live = self._live[request.request_id] = _Live(self._tenant(request))
        for feature in request.mm_features[len(live.keys) :]:
            key = self._key(live.tenant, feature)
            live.keys.append(key)
            if feature.modality != "prompt_embeds":
                live.rows[feature.identifier] = feature.mm_position.get_num_embeds()
                live.named.setdefault(feature.identifier, set()).add(key)
        return live

    def _tenant(self, request: Any) -> str | None:
        adapter = (
            None
            if wants_skip(request.ec_transfer_params)
            else self._adapters.identity(request.lora_request)
        )
        if adapter is None:
            return None
        tenant = request.cache_salt or ""
        return digest("adapter", tenant, adapter) if adapter else tenant

    def _key(self, tenant: str | None, feature: Any) -> str | None:
        """The key of an item's output; None where it is left alone."""
        if (
            tenant is None
            or feature.modality == "prompt_embeds"
            or not (content := self._media.content(feature))
        ):
            return None
        return digest("ec", content, tenant)

    def ready(self, request: Any) -> bool:
        """Whether a request need not wait for outputs that come from the bucket."""
        live = self.observe(request)
        if self._fetcher is None:
            return True
        if live.fetches is None:
            live.until = time.monotonic() + _FETCH_S
            live.fetches = self._fetcher.bring(self.store, {key for key in live.keys if key})
        return time.monotonic() >= live.until or self._fetcher.are_done(live.fetches)

    def has(self, identifier: str) -> bool:
        """Whether the item can be loaded; if so its bytes are read, checked and kept for this step.

        It cannot where an identifier means different things to the requests that use it: other items, tenants or
        adapters.
        """
        state = self._promised.pop(identifier, None)
        using = [live for live in self._live.values() if identifier in live.rows]
        keys = set[str | None]().union(*(live.named[identifier] for live in using))
        key = keys.pop() if len(keys) == 1 else None
        if key is None:
            return False
        if state is None or state.key != key:
            state = self.store.load(key)
        if state is None:
            return False
        rows = using[0].rows[identifier]
        if len(state.shape) != 2 or state.shape[0] != rows:
            log.warning(
                "semkv: an encoder output of shape %s does not fill %d positions", state.shape, rows
            )
            return False
        self._promised[identifier] = state
        return True

    def allocated(self, request: Any, index: int) -> None:
        """An encoder-cache entry was set aside: for a promised item to be loaded, else for the encoder."""
        identifier = request.mm_features[index].identifier
        promised = self._promised.get(identifier)
        if promised is not None:  # first: vLLM counts on it
            self._step.loads[identifier] = promised
        live = self.observe(request)
        if promised is not None:
            live.loaded += 1
            return
        live.encoded += 1
        key = live.keys[index]
        if key is not None:
            self._step.since = self._step.since or self.store.blocks.last_purge()
            self._step.saves[identifier] = key, tenant_tag(request.cache_salt)

    def build_step(self) -> SemECMetadata:
        step = self._step
        self._step = SemECMetadata(self.namespace)
        self._promised.clear()
        return step

    def finished(self, request: Any) -> dict[str, Any] | None:
        live = self._live.pop(request.request_id, None)
        return (
            None if live is None else {REPORT_KEY: {"loaded": live.loaded, "encoded": live.encoded}}
        )

    def close(self) -> None:
        """Delete what nobody will find, which is what this engine stored since a reset, and close the files."""
        if self.namespace != self._named:
            self.store.blocks.disown(self.store.namespace)
        if self._fetcher is not None:
            self._fetcher.close()
        self.store.blocks.close()


class Fetcher:
    """Has a process follow the bucket, put encoder outputs there and bring them from there. For the scheduler's thread,
    which waits for none of it."""

    def __init__(self, blocks: BlockStore, bucket: Mapping[str, Any]) -> None:
        blocks.finds_far = True
        shape = HostShape(rows=1, stride=PAGE, row_bytes=PAGE)
        memory = os.memfd_create("semkv-ec")
        os.ftruncate(memory, PAGE)
        self._memory = memory
        self._blocks = blocks
        self._process = DiskProcess(memory, shape, blocks, bucket)
        self._under_way: dict[int, str] = {}  # the key that each job brings
        self._away_until = 0.0

    def bring(self, store: FusionStore, keys: Collection[str]) -> set[int]:
        """Ask for what is in the bucket only; the jobs under way that bring it."""
        self._process.revive()
        if time.monotonic() < self._away_until:
            return set()
        numbers = {key: number for number, key in self._under_way.items()}
        for key in keys:
            if key not in numbers and (found := store.far(key)) is not None:
                numbers[key] = self._submit(store, key, found)
        return {number for key, number in numbers.items() if key in keys}

    def _submit(self, store: FusionStore, key: str, found: tuple[bytes, BlockRef]) -> int:
        block, ref = found
        number = self._process.submit(
            namespace=store.namespace,
            layout=None,
            keys=[block],
            chunks=[],
            file=ref.file,
            places=[ref.row],
            owner=ref.owner,
            since=self._blocks.last_purge(),
            far=True,
        )
        self._under_way[number] = key
        return number

    def are_done(self, jobs: set[int]) -> bool:
        for done in self._process.finished():
            self._under_way.pop(done.number, None)
            self._blocks.counters.update(done.counters)
            if done.away_s:
                self._away_until = time.monotonic() + done.away_s
        return self._under_way.keys().isdisjoint(jobs)

    def close(self) -> None:
        self._process.close()
        os.close(self._memory)


class ECWorker:
    """Loads into and saves from the runner's encoder cache. One rank of a tensor-parallel group saves, in a thread.

    Args:
        blocks: None where the directory cannot be used; then nothing is saved.
        device: of the encoder cache.
        saves: whether this rank does.
    """

    def __init__(self, blocks: BlockStore | None, device: str, *, saves: bool) -> None:
        self._blocks = blocks
        self._device = device
        self._saves = saves
        self._writer = ThreadPoolExecutor(1, "semkv-ec-writer")
        self._room = threading.Semaphore(_MOST_WAITING)

    def load(self, step: SemECMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        import torch

        for identifier, state in step.loads.items():
            if identifier not in encoder_cache:
                tensor = (
                    torch.from_numpy(state.data).view(getattr(torch, state.dtype)).view(state.shape)
                )
                encoder_cache[identifier] = tensor.to(self._device)

    def save(
        self, step: SemECMetadata, encoder_cache: dict[str, torch.Tensor], identifier: str
    ) -> None:
        """Start to copy an output to the host and to write it; the engine waits for neither."""
        if identifier not in step.saves or not self._saves or self._blocks is None:
            return
        # Without its number the last purge might be missed.
        if not step.since or not self._room.acquire(blocking=False):
            self._blocks.counters["dropped"] += 1
            return
        try:
            self._writer.submit(
                self._write, step, identifier, *_to_host(encoder_cache[identifier].detach())
            )
        except BaseException:
            self._room.release()
            raise

    def _write(self, step: SemECMetadata, identifier: str, host: torch.Tensor, copied: Any) -> None:
        import torch

        assert self._blocks is not None
        try:
            if copied is not None:
                copied.synchronize()
            (key, owner) = step.saves[identifier]
            dtype = str(host.dtype).removeprefix("torch.")
            state = FusionState(
                key, host.view(-1).view(torch.uint8).numpy(), tuple(host.shape), dtype
            )
            FusionStore(self._blocks, step.namespace).save(state, owner, step.since)
        except Exception:
            log.exception("semkv: an encoder output is not stored")
            self._blocks.counters["errors"] += 1
        finally:
            self._room.release()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything saved is on disk and found by lookups; False when ``timeout`` seconds are too few."""
        try:
            self._writer.submit(int).result(timeout)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._writer.shutdown()
        if self._blocks is not None:
            self._blocks.close()


def _to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy in host memory, and on a GPU the event that ends it."""
    import torch

    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    host.copy_(tensor, non_blocking=True)
    if not tensor.is_cuda:
        return host, None
    copied = torch.cuda.Event(blocking=True)
    copied.record(torch.cuda.current_stream(tensor.device))
    return host, copied


class SemECConnector(ECConnectorBase):
    """Keeps encoder outputs on disk, checked and bounded. See `semkv_vllm.ECSettings`."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """Build one half.

        Raises:
            ConfigError: an unknown or wrong key in ``ec_connector_extra_config``.
        """
        super().__init__(vllm_config=vllm_config, role=role)
        settings = read_settings(
            ECSettings, vllm_config.ec_transfer_config.ec_connector_extra_config
        )
        self._reports = settings.report_loads
        self._config = vllm_config
        engine = identity.engine_name(vllm_config, vllm_config.ec_transfer_config.engine_id)
        self._blocks: BlockStore | None = None
        try:
            self._blocks = BlockStore(settings.root, "fusion", settings.bounds(), engine)
        except StoreError as error:
            log.warning("semkv: no encoder outputs are kept: %s", error)
        self.scheduler_half: ECScheduler | None = None
        self.worker_half: ECWorker | None = None
        self._step: SemECMetadata | None = None
        if role != ECConnectorRole.SCHEDULER:
            from vllm.distributed.parallel_state import get_tp_group
            from vllm.platforms import current_platform

            first = get_tp_group().rank_in_group == 0
            self.worker_half = ECWorker(self._blocks, current_platform.device_type, saves=first)
        elif self._blocks is not None:
            self.scheduler_half = self._scheduler(self._blocks, settings)

    def _scheduler(self, blocks: BlockStore, settings: ECSettings) -> ECScheduler | None:
        """The half that decides; None where what shapes the outputs is not known."""
        config = self._config
        try:
            namespace = identity.namespace_digest(identity.model_facts(config, settings.cache_dir))
        except UnknownError as reason:
            log.warning("semkv: no encoder outputs are kept: %s", reason)
            return None
        media = Media(trusted=settings.trust_media_names)
        bucket = settings.follower()
        half = ECScheduler(blocks, namespace, settings.cache_dir, media=media, bucket=bucket)
        identity.FOLLOWERS[str(config.instance_id)] = half
        return half

    def _try(self, otherwise: _T, what: Callable[..., _T], *arguments: Any) -> _T:
        """What a half of ours does for a hook of vLLM's. A fault in it is counted, and the engine goes on."""
        try:
            return what(*arguments)
        except Exception:
            if self._blocks is not None:
                self._blocks.counters["errors"] += 1
            log.warning(
                "semkv: a fault in semkv: an encoder output is computed again, or not stored",
                exc_info=True,
            )
            return otherwise

    # ------------------------------------------------------------------ scheduler half

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        half = self.scheduler_half
        return half is None or self._try(True, half.ready, request)

    def has_cache_item(self, identifier: str) -> bool:
        half = self.scheduler_half
        return half is not None and self.is_consumer and self._try(False, half.has, identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if self.scheduler_half is not None:
            self._try(None, self.scheduler_half.allocated, request, index)

    def build_connector_meta(self, scheduler_output: Any) -> SemECMetadata:
        if self.scheduler_half is None:
            return SemECMetadata()
        # Disowning failed where the index was locked at a reset of the cache: it is tried again.
        self._try(None, self.scheduler_half.store.blocks.disown)
        return self.scheduler_half.build_step()

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        done = (
            None
            if self.scheduler_half is None
            else self._try(None, self.scheduler_half.finished, request)
        )
        return False, done if self._reports else None

    # ------------------------------------------------------------------ worker half

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        is_ours = isinstance(connector_metadata, SemECMetadata)
        self._step = connector_metadata if is_ours else None

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._step = None

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        if self.worker_half is not None and self._step is not None:
            self.worker_half.load(self._step, encoder_cache)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        step = self._step
        if self.worker_half is not None and self.is_producer and step is not None:
            self._try(None, self.worker_half.save, step, encoder_cache, mm_hash)

    def shutdown(self) -> None:
        """Write what waits and close the files."""
        if self.worker_half is not None:
            self.worker_half.close()
        elif self.scheduler_half is not None:
            identity.FOLLOWERS.pop(str(self._config.instance_id), None)
            self.scheduler_half.close()
