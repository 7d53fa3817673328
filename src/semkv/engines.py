"""What an inference engine is, and prompts and answers as it sees them.

An engine answers canonical prompts. It knows nothing of tiers or donors: everything it reuses, it reuses by exact key.
The lab has engines: vLLM in this process, and a scripted one. `FusionEngine` keeps the fusion states of an engine of
one's own on disk; inside vLLM `semkv_vllm.ec` does this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from semkv import keys, plug
from semkv.counting import Tally
from semkv.encoders.vision import READING, read_picture
from semkv.errors import EngineError
from semkv.types import MediaSegment, Namespace, Role, Segment, Status, TextSegment
from semkv_stores.block_file import tenant_tag
from semkv_stores.blocks import Bounds
from semkv_stores.digests import digest
from semkv_stores.fusion import FusionState, FusionStore

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL.Image import Image

TEXT_SEPARATOR = "\n"


class MediaError(EngineError):
    """A media segment's bytes are missing, or are not the bytes its id was computed from."""


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """One prompt for an engine.

    Attributes:
        segments: the canonical prompt, in prompt order.
        tenant: partitions everything the engine may reuse; empty for a single tenant.
        max_tokens: bound on generated tokens, at least 1.
        temperature: 0 for greedy decoding.
        seed: of the sampler; without effect when greedy.
    """

    segments: tuple[Segment, ...]
    tenant: str = ""
    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0

    @property
    def cache_salt(self) -> str | None:
        """The tenant's digest for vLLM's ``cache_salt``; None for the single tenant, as ``vllm serve`` sends it."""
        return keys.namespace_key(Namespace(self.tenant)) if self.tenant else None

    def uuid(self, media: MediaSegment) -> str:
        """The name a media item of this prompt goes by inside the engine, under which its state is kept."""
        return keys.media_uuid(self.tenant, f"{READING} {media.media_id}")


@dataclass(frozen=True, slots=True)
class EngineResult:
    """An answer, and how much of the prompt had to be computed.

    Attributes:
        text: the generated text, special tokens left out.
        token_ids: the generated tokens.
        prompt_tokens: length of the prompt, image placeholders included.
        cached_tokens: prompt tokens that were not computed, from whatever cache.
        loaded_tokens: the part of them that came from our KV store; None when no connector is attached.
        kv: hit: blocks came from our store. miss: blocks were computed that the store could have held. skip: no
            connector, or the engine's own prefix cache already had every full block.
        fusion: hit: encoder output came from our store. miss: the encoder ran. skip: not needed, or no connector.
        ttft_s: seconds from arrival to the first token, or None where the engine does not say.
        latency_s: seconds from call to answer.
        finish_reason: ``stop``, ``length`` or another word of the engine.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int | None
    kv: Status
    fusion: Status
    ttft_s: float | None
    latency_s: float
    finish_reason: str

    @property
    def prefix_tokens(self) -> int:
        """Prompt tokens from the engine's own prefix cache."""
        return self.cached_tokens - (self.loaded_tokens or 0)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt_tokens - self.cached_tokens


class Engine(Protocol):
    """Answers one prompt at a time. Not thread-safe unless the class says so.

    ``semkv run --engine`` calls a dotted path with the run's settings, and whether caches may be attached.
    """

    @property
    def accepts_images(self) -> bool:
        """False for a text model: the caller leaves media segments out of its prompts."""
        ...

    def generate(self, prompt: EnginePrompt) -> EngineResult:
        """Answer ``prompt``.

        Raises:
            MediaError: an image cannot be read, or its bytes are not what its id says.
            EngineError: the engine refused the prompt or failed on it.
        """
        ...

    def fingerprint(self) -> str:
        """Digest of everything that shapes the model's state and answers (`keys.model_fingerprint`)."""
        ...

    def close(self) -> None:
        """Give memory and files back. The engine cannot be used afterwards; a second call does nothing."""
        ...


def media_bytes(media: MediaSegment) -> bytes:
    """The encoded bytes of a media item, checked against its id.

    Raises:
        MediaError: there is no file, or it holds other bytes than those the id was computed from.
    """
    if media.source is None:
        raise MediaError(f"no file is known for image {media.name or media.media_id[:12]}")
    try:
        data = media.source.read_bytes()
    except OSError as e:
        raise MediaError(f"{media.source}: cannot be read ({e.strerror or e})") from e
    if keys.media_id(data) != media.media_id:
        raise MediaError(f"{media.source}: the file changed since it was first read")
    return data


def load_image(media: MediaSegment) -> Image:
    """The decoded RGB image of a media item, as ``vllm serve`` would show it to the model.

    Raises:
        MediaError: as `media_bytes`, or the bytes are no image.
    """
    data = media_bytes(media)
    try:
        return read_picture(data)
    except OSError as e:
        raise MediaError(f"{media.source}: not a readable image ({e})") from e


def system_text(segments: tuple[Segment, ...]) -> str:
    """All system text of a prompt, joined."""
    return TEXT_SEPARATOR.join(
        s.text for s in segments if isinstance(s, TextSegment) and s.role is Role.SYSTEM
    )


def user_parts(segments: tuple[Segment, ...]) -> list[MediaSegment | str]:
    """The user's turn: media and text in prompt order, neighbouring texts joined by `TEXT_SEPARATOR`."""
    parts: list[MediaSegment | str] = []
    for segment in segments:
        if isinstance(segment, MediaSegment):
            parts.append(segment)
        elif segment.role is not Role.SYSTEM:
            if parts and isinstance(parts[-1], str):
                parts[-1] = f"{parts[-1]}{TEXT_SEPARATOR}{segment.text}"
            else:
                parts.append(segment.text)
    return parts


# -- fusion states ----------------------------------------------------------------------------------------------------


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

    def __init__(
        self,
        engine: Engine,
        provider: FusionProvider,
        directory: Path,
        bounds: Bounds | None = None,
    ) -> None:
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
        media = {
            segment.media_id: segment
            for segment in prompt.segments
            if isinstance(segment, MediaSegment)
        }
        since = self._store.blocks.last_purge() if media else 0
        new = [item for item in media.values() if not self._inject(prompt, item)]
        result = self._engine.generate(prompt)
        for item in new if since else ():  # without the last purge's number nothing may be stored
            with self._tally.boundary("capture"):
                tensor = self._provider.capture(item)
                if tensor is not None:
                    state = FusionState.from_array(prompt.uuid(item), tensor)
                    self._store.save(state, tenant_tag(prompt.cache_salt), since)
        if not media:
            return replace(result, fusion=Status.SKIP)
        return replace(result, fusion=Status.MISS if new else Status.HIT)

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
