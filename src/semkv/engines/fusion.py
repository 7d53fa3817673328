"""Fusion states for an engine of one's own, kept on disk by image. Inside vLLM `semkv.connectors.ec` does this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from semkv import plug
from semkv.engines import Engine, EnginePrompt, EngineResult
from semkv.keys import digest
from semkv.stores.block_file import tenant_tag
from semkv.stores.blocks import Bounds
from semkv.stores.fusion import FusionState, FusionStore
from semkv.tiers.base import Tally
from semkv.types import MediaSegment, Status

if TYPE_CHECKING:
    import numpy.typing as npt


class FusionProvider(Protocol):
    """Reads fusion tensors out of an engine, and puts them in. Called by the thread that calls `Engine.generate`.

    Attributes:
        fingerprint: names all that shapes the tensors but the image: weights, dtype, processor settings.
    """

    @property
    def fingerprint(self) -> str: ...

    def capture(self, media: MediaSegment) -> npt.NDArray[Any] | None:
        """The tensor that the engine just computed for an image: float16, float32 (bfloat16 fits into it without loss)
        or float64, of any shape; None where it has none. It must depend on nothing but this image."""
        ...

    def inject(self, media: MediaSegment, tensor: npt.NDArray[Any]) -> None:
        """Have the engine's next prompt use this tensor instead of encoding the image. The array is read-only."""
        ...


class FusionEngine:
    """An engine whose images are encoded once: before a prompt, stored tensors are injected; after it, new ones are
    captured and stored under image, provider and tenant. A fault in that is counted, and the image is encoded.

    Args:
        engine: any engine. It finds injected tensors by itself.
        provider: reads and writes its tensors.
        directory: where they lie; ``<cache_dir>/fusion`` lets ``semkv stats``, ``gc`` and ``purge`` find them.
        bounds: of the directory; 8 GiB by default.

    Raises:
        ConfigError: an argument is no engine, or no provider.
        StoreError: the directory cannot be opened.
    """

    def __init__(self, engine: Engine, provider: FusionProvider, directory: Path, bounds: Bounds | None = None) -> None:
        self._engine: Engine = plug.require("engine", engine, Engine)
        self._provider: FusionProvider = plug.require("provider", provider, FusionProvider)
        self._store = FusionStore.open(directory, digest("provider", provider.fingerprint), bounds)
        self._tally = Tally()

    @property
    def accepts_images(self) -> bool:
        return self._engine.accepts_images

    @property
    def faults(self) -> Mapping[str, int]:
        """How often ``inject`` and ``capture`` failed."""
        return {name.removeprefix("fault:"): count for name, count in self._tally.counts().items()}

    def generate(self, prompt: EnginePrompt) -> EngineResult:
        media = {segment.media_id: segment for segment in prompt.segments if isinstance(segment, MediaSegment)}
        since = self._store.blocks.last_purge() if media else 0
        new = [item for item in media.values() if not self._inject(prompt, item)]
        result = self._engine.generate(prompt)
        for item in new if since else ():  # without the last purge's number nothing may be stored
            with self._tally.boundary("capture"):
                tensor = self._provider.capture(item)
                if tensor is not None:
                    state = FusionState.from_array(prompt.uuid(item), tensor)
                    self._store.save(state, tenant_tag(prompt.cache_salt), since)
        return replace(result, fusion=Status.SKIP if not media else Status.MISS if new else Status.HIT)

    def _inject(self, prompt: EnginePrompt, item: MediaSegment) -> bool:
        with self._tally.boundary("inject"):
            state = self._store.load(prompt.uuid(item))
            if state is not None:
                tensor = state.to_array()
                tensor.flags.writeable = False
                self._provider.inject(item, tensor)
                return True
        return False

    def fingerprint(self) -> str:
        return self._engine.fingerprint()

    def close(self) -> None:
        self._engine.close()
        self._store.close()
