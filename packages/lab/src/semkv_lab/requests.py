"""From a data set's sample to a request: its segments, and the text that the semantic tiers match on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from semkv import keys
from semkv.errors import ConfigError, DatasetError
from semkv.types import MediaSegment, Namespace, Request, Role, Segment, TextSegment
from semkv_lab.datasets import ImageRef, Sample


class ChunkSource(StrEnum):
    """What the semantic tiers match on.

    ``question``: the question. ``semantic``: GQA's functional program. ``group``: GQA's group names. ``combined``: the
    three together. ``full``: all text of the prompt. Where a sample lacks the field, the question stands in.
    """

    QUESTION = "question"
    SEMANTIC = "semantic"
    GROUP = "group"
    COMBINED = "combined"
    FULL = "full"


def chunk_text(sample: Sample, source: ChunkSource, window: int = 0) -> str:
    """The text that the tiers match on, cut to its first ``window`` characters (0: not cut)."""
    group = " ".join(sample.groups)
    texts = {
        ChunkSource.QUESTION: sample.question,
        ChunkSource.SEMANTIC: sample.semantic_str,
        ChunkSource.GROUP: group,
        ChunkSource.COMBINED: " | ".join(t for t in (sample.question, sample.semantic_str, group) if t),
        ChunkSource.FULL: "\n".join(t for t in (sample.system, sample.context, sample.question) if t),
    }
    text = texts[source] or sample.question
    return text[:window] if window else text


def label_answers(samples: Iterable[Sample], instruction: str = "") -> Callable[[tuple[Segment, ...]], str]:
    """Answers prompts with the data set's own labels, in a model's place: for `ScriptedEngine.answer`.

    A prompt is known by its exact segments; one that no sample asks, such as one picture's context with another's
    question, gets an empty answer.
    """
    builder = RequestBuilder(Namespace(), instruction=instruction)
    labels = {_prompt_key(builder.build(s).segments): s.answer or "" for s in samples}
    return lambda segments: labels.get(_prompt_key(segments), "")


def _prompt_key(segments: tuple[Segment, ...]) -> str:
    return keys.chain_keys(segments, normalised=False)[-1]


@dataclass
class RequestBuilder:
    """Turns samples into requests of one namespace.

    Attributes:
        namespace: tenant and model of every request.
        chunk_source, chunk_window: see `chunk_text`.
        instruction: appended to each question, on a line of its own.
        images: False leaves images out, for a text model.
    """

    namespace: Namespace
    chunk_source: ChunkSource = ChunkSource.QUESTION
    chunk_window: int = 0
    instruction: str = ""
    images: bool = True
    _media: dict[Path, MediaSegment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chunk_window < 0:
            raise ConfigError("--chunk-window", self.chunk_window, "0 (no cut) or a positive number of characters")

    def build(self, sample: Sample) -> Request:
        """The sample's request.

        Raises:
            DatasetError: an image of the sample has no file, or it cannot be read.
        """
        segments: list[Segment] = []
        if sample.system:
            segments.append(TextSegment(sample.system, Role.SYSTEM))
        if self.images:
            segments += [self._segment(image, sample) for image in sample.images]
        if sample.context:
            segments.append(TextSegment(sample.context, Role.CONTEXT))
        question = f"{sample.question}\n{self.instruction}" if self.instruction else sample.question
        segments.append(TextSegment(question, Role.QUESTION))
        return Request(
            request_id=sample.sample_id,
            namespace=self.namespace,
            segments=tuple(segments),
            chunk_text=chunk_text(sample, self.chunk_source, self.chunk_window),
        )

    def _segment(self, image: ImageRef, sample: Sample) -> MediaSegment:
        path = image.path
        if path is None:
            raise DatasetError(
                f"sample {sample.sample_id}: no file for image {image.name!r}; put it under the data set's images/ "
                "folder, or name the folder in GQA_IMAGE_ROOT"
            )
        if path not in self._media:
            try:
                media_id = keys.media_id(path.read_bytes())
            except OSError as e:
                raise DatasetError(f"sample {sample.sample_id}: {path}: {e.strerror or e}") from e
            self._media[path] = MediaSegment(media_id, path, image.name)
        return self._media[path]
