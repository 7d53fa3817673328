"""From the samples of a data set to requests: in which order and how often they are asked, their segments, and the text
that the semantic tiers match on.
"""

# The command line reads the annotations of fields: they must be values, not texts.

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, count, cycle, islice
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from semkv import keys
from semkv.config import POSITIVE, Allowed, check
from semkv.errors import ConfigError, DatasetError
from semkv.types import MediaSegment, Namespace, Request, Role, Segment, TextSegment
from semkv_lab.samples import ImageRef, Sample


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


def asked(request: Request) -> str:
    """Digest of all that an engine is asked: model, tenant, texts and the bytes of pictures."""
    return keys.digest(
        "asked", keys.namespace_key(request.namespace), keys.chain_keys(request.segments, normalised=False)[-1]
    )


# -- order and repeats ------------------------------------------------------------

# YCSB's default for requests over keys (Cooper et al., "Benchmarking Cloud Serving Systems with YCSB", SoCC 2010).
ZIPF_EXPONENT = 0.99
# GQA's testdev asks 12,578 questions on 398 images: a user asks so many of one image on average.
SESSION_QUESTIONS = 31.6
SESSION_USERS = 8  # at the same time; a choice, no measurement


class TraceKind(StrEnum):
    """How requests are drawn from samples.

    - ``in-order``: as the data set has them.
    - ``shuffled``: every sample once before any comes again.
    - ``zipf``: an image by a Zipf law over a random ranking, then one of its questions, with repeats.
    - ``sessions``: `SESSION_USERS` users, each with one image for a geometric number of questions (`SESSION_QUESTIONS`
      on average), interleaved at random; a session never asks the same twice before it has asked all.
    """

    IN_ORDER = "in-order"
    SHUFFLED = "shuffled"
    ZIPF = "zipf"
    SESSIONS = "sessions"


REQUESTS = Parameter(group="Order of requests")


@dataclass(frozen=True)
class Trace:
    """A workload.

    Attributes:
        kind: in-order, shuffled, zipf (over images) or sessions.
        seed: Seed of every draw.
        requests: So many requests, samples repeating as need be; by default as many as there are samples.
        exponent: Exponent of zipf; 0 draws images evenly.
    """

    kind: Annotated[TraceKind, Parameter(name="--trace"), REQUESTS] = TraceKind.IN_ORDER
    seed: Annotated[int, Parameter(name="--trace-seed"), REQUESTS] = 0
    requests: Annotated[int | None, POSITIVE, Parameter(name="--trace-requests"), REQUESTS] = None
    exponent: Annotated[
        float, Allowed("a number from 0 to 10", lambda n: 0 <= n <= 10), Parameter(name="--trace-exponent"), REQUESTS
    ] = ZIPF_EXPONENT

    def __post_init__(self) -> None:
        check(self)


def arrange(samples: Sequence[Sample], trace: Trace) -> list[Sample]:
    """The requests of a trace.

    A sample that comes again gets an id of its own, ``<id>#2``, ``<id>#3`` ..., those left out that the data set uses.
    """
    if not samples:
        return []
    draw = {
        TraceKind.IN_ORDER: lambda s, t: cycle(s),
        TraceKind.SHUFFLED: _shuffled,
        TraceKind.ZIPF: _zipf,
        TraceKind.SESSIONS: _sessions,
    }[trace.kind]
    requests = len(samples) if trace.requests is None else trace.requests
    return _with_own_ids(islice(draw(samples, trace), requests), {sample.sample_id for sample in samples})


def _shuffled(samples: Sequence[Sample], trace: Trace) -> Iterator[Sample]:
    draws = random.Random(trace.seed)  # noqa: S311 (an order, no secret)
    while True:
        yield from draws.sample(samples, len(samples))


def _zipf(samples: Sequence[Sample], trace: Trace) -> Iterator[Sample]:
    draws = random.Random(trace.seed)  # noqa: S311
    images = list(_by_image(samples).values())
    draws.shuffle(images)
    weights = list(accumulate(rank**-trace.exponent for rank in range(1, len(images) + 1)))
    while True:
        (questions,) = draws.choices(images, cum_weights=weights)
        yield draws.choice(questions)


def _sessions(samples: Sequence[Sample], trace: Trace) -> Iterator[Sample]:
    draws = random.Random(trace.seed)  # noqa: S311
    images = list(_by_image(samples).values())
    users = [_user(images, draws) for _ in range(SESSION_USERS)]
    while True:
        yield next(draws.choice(users))


def _user(images: Sequence[Sequence[Sample]], draws: random.Random) -> Iterator[Sample]:
    while True:
        questions = draws.choice(images)
        asked = cycle(draws.sample(questions, len(questions)))
        yield next(asked)
        while draws.random() >= 1 / SESSION_QUESTIONS:
            yield next(asked)


def _by_image(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.image_name, []).append(sample)
    return found


def _with_own_ids(requests: Iterator[Sample], taken: Collection[str]) -> list[Sample]:
    times: dict[str, Iterator[int]] = {}
    named = []
    for sample in requests:
        name = sample.sample_id
        if name in times:
            own = next(own for n in times[name] if (own := f"{name}#{n}") not in taken)
            named.append(replace(sample, sample_id=own, repeats=name))
        else:
            times[name] = count(2)
            named.append(sample)
    return named
