"""A hook and an encoder whose vectors are written down, so that a test says which things are similar."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.keys import media_id
from semkv.types import (
    EmbeddingLayer,
    MediaSegment,
    Namespace,
    Request,
    ReuseReport,
    Role,
    Segment,
    TextSegment,
)
from semkv_guards.folding import normalise

DIM = 64
LAYERS = (EmbeddingLayer("vision", DIM, 0.9), EmbeddingLayer("prompt", DIM, 0.8))


def direction(name: str) -> np.ndarray:
    """A unit vector that a name decides; those of different names are nearly orthogonal."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    vector = np.random.default_rng(seed).normal(size=DIM).astype(np.float32)
    return vector / np.linalg.norm(vector)


def vector_of(text: str) -> np.ndarray:
    """``topic~0.95`` lies at cosine .95 from ``topic``; any other text is its own topic."""
    text = normalise(text)
    topic, _, cosine = text.partition("~")
    base = direction(topic.strip())
    if not cosine:
        return base
    other = direction(text)
    other -= (other @ base) * base
    other /= np.linalg.norm(other)
    c = float(cosine)
    return (c * base + np.sqrt(1 - c * c) * other).astype(np.float32)


class WrittenEncoder:
    """A text encoder of `vector_of`, with a window in words."""

    dim = DIM
    fingerprint = "written"

    def __init__(self, window: int = 20) -> None:
        self.window = window
        self.calls: list[str] = []
        self.error: Exception | None = None

    def fits(self, text: str) -> bool:
        return len(text.split()) <= self.window

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        if self.error:
            raise self.error
        self.calls += texts
        return np.stack([vector_of(t) for t in texts])


class WrittenHook:
    """``vision`` by the image's name, ``prompt`` by the question; images named ``missing`` have no file."""

    dims: Mapping[str, int] = {"vision": DIM, "prompt": DIM, "other": DIM}
    fingerprint = "written"

    def __init__(self, config: CacheConfig | None = None) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.other: str | None = None

    def __call__(self, request: Request) -> dict[str, Any]:
        if self.error:
            raise self.error
        self.calls += 1
        found: dict[str, Any] = {"prompt": vector_of(request.question)}
        if self.other:
            found["other"] = vector_of(self.other)
        if request.media and all(m.name != "missing" for m in request.media):
            found["vision"] = np.stack([vector_of(m.name) for m in request.media])
        return found


class Bench:
    """A cache in a folder, with images made from their names."""

    def __init__(
        self,
        root: Path,
        *,
        index: Callable[[int], Any] | None = None,
        kind: type[SemanticCache] = SemanticCache,
        **settings: Any,
    ) -> None:
        self.root, self.index = root, index
        self.kind = kind
        self.images = root / "images"
        self.images.mkdir(parents=True, exist_ok=True)
        self.settings = {
            "embedding_layers": LAYERS,
            "embedding_hook": "cache_helpers:WrittenHook",
            **settings,
        }
        self.hook, self.encoder = WrittenHook(), WrittenEncoder()
        self.number = 0
        self.cache = self.open()

    def open(self) -> SemanticCache:
        # The texts here are stand-ins such as "color~0.9": guards on real sentences have tests of their own.
        config = CacheConfig(self.root / "cache", **{"guards": False, **self.settings})
        self.cache = self.kind(config, hook=self.hook, text_encoder=self.encoder, index=self.index)
        return self.cache

    def reopen(self, **settings: Any) -> None:
        self.cache.close()
        self.settings |= settings
        self.open()

    def image(self, name: str) -> MediaSegment:
        data = f"bytes of {name}".encode()
        file = self.images / f"{media_id(data)}.bin"
        file.write_bytes(data)
        return MediaSegment(media_id(data), file, name)

    def request(
        self,
        question: str | None,
        image: str | Sequence[str] = (),
        *,
        context: str | Sequence[str] = (),
        system: str = "",
        tenant: str = "",
        chunk: str = "",
    ) -> Request:
        segments: list[Segment] = [TextSegment(system, Role.SYSTEM)] if system else []
        segments += [self.image(i) for i in ([image] if isinstance(image, str) else image)]
        segments += [
            TextSegment(c, Role.CONTEXT)
            for c in ([context] if isinstance(context, str) else context)
        ]
        if question is not None:
            segments.append(TextSegment(question))
        self.number += 1
        return Request(str(self.number), Namespace(tenant, "model"), tuple(segments), chunk)

    def ask(
        self, question: str | None, image: str | Sequence[str] = (), **rest: Any
    ) -> ReuseReport:
        """Look a request up and record it, as a run does; the engine's answer names what it saw."""
        response = rest.pop("response", None)
        report = self.cache.try_reuse(self.request(question, image, **rest))
        self.entry = self.cache.add_observation(report, response or seen(report.plan.segments))
        return report

    def look(
        self, question: str | None, image: str | Sequence[str] = (), **rest: Any
    ) -> ReuseReport:
        return self.cache.try_reuse(self.request(question, image, **rest))


def seen(segments: Sequence[Segment]) -> str:
    """What a prompt consists of, in short: text, or ``<name>`` of an image."""
    return " | ".join(f"<{s.name}>" if isinstance(s, MediaSegment) else s.text for s in segments)


def line(report: ReuseReport) -> str:
    """The statuses as the log prints them."""
    return ", ".join(f"{name}={status}" for name, status in report.statuses.items())
