"""What every data set yields, how its files are read, how samples become requests (in which order and how often they
are asked, their segments, the text that the semantic tiers match on), and the records of a run.
"""

# The command line reads the annotations of fields: they must be values, not texts.

import os
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from cyclopts import Parameter
from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError

from semkv import keys
from semkv.engines import MediaError
from semkv.errors import ConfigError, DatasetError
from semkv.types import MediaSegment, Namespace, Request, Role, Segment, Status, TextSegment
from semkv.user_files import read_json_lines
from semkv_stores.digests import digest
from semkv_stores.settings import POSITIVE, check

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image of a sample.

    Attributes:
        name: in the data set.
        path: its file, or None where it was not found.
        sought: where a file that was not found was looked for, in words; empty where the data set does not say.
    """

    name: str
    path: Path | None
    sought: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with its expected answer.

    Attributes:
        sample_id: unique within the data set.
        answer: the expected answer, or None where there is none to check.
        images: in prompt order.
        system, context: texts before the question, such as a retrieved document; empty for none.
        semantic_str: GQA's functional program of the question, ``select: car [..]->query: color [..]``.
        groups: GQA's group names, global and local; ``group`` is the global one.
        types: GQA's: structural, semantic and detailed.
        valid, plausible: GQA's choices: answers of the question's kind, and those that occur with its objects.
        entailed: ids of questions whose answer follows from this one's.
        variant: how MiniGQA made this question from another (``repeat``, ``paraphrase`` ...), or its image
            (``image:shifted`` ...); empty for an original.
        repeats: the id of the sample that a trace asks again under this one's; empty for the first time.
    """

    sample_id: str
    question: str
    answer: str | None = None
    images: tuple[ImageRef, ...] = ()
    system: str = ""
    context: str = ""
    semantic_str: str = ""
    groups: tuple[str, ...] = ()
    group: str = ""
    types: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    plausible: tuple[str, ...] = ()
    entailed: tuple[str, ...] = ()
    variant: str = ""
    repeats: str = ""

    @property
    def complete(self) -> bool:
        """Whether every image has a file."""
        return all(image.path is not None for image in self.images)

    @property
    def image_name(self) -> str:
        """The first image's name, or the sample's id, the same for its repeats: what results are clustered by."""
        return self.images[0].name if self.images else self.repeats or self.sample_id


Trace = Literal["in-order", "zipf"]
"""How requests are drawn from samples: as the data set has them, or an image by a Zipf law over a random ranking, then
one of its questions, with repeats."""
ChunkSource = Literal["question", "semantic", "group", "combined", "full"]
"""What the semantic tiers match on: the question; GQA's functional program; GQA's group names; the three together; all
text of the prompt. Where a sample lacks the field, the question stands in."""

DATA = Parameter(group="Data")


@dataclass(frozen=True)
class DatasetOptions:
    """Which part of a data set to load, and in which order it is asked.

    Attributes:
        data_dir: Where drawn and unpacked data goes.
        root: Folder (or .jsonl file) with the data; for GQA also GQA_ROOT.
        config: Such as val_balanced_instructions; by default SPLIT_balanced_instructions.
        split: train, val or testdev; by default the one that the config names, else val.
        max_samples: At most so many samples.
        shuffle_seed: Shuffle with this seed before cutting; by default the order of the files.
        trace: in-order or zipf (over images).
        trace_requests: So many requests, samples repeating as need be; by default as many as there are samples.
    """

    data_dir: Annotated[Path, DATA] = field(
        default_factory=lambda: Path("~/.cache/semkv-data").expanduser()
    )
    root: Annotated[Path | None, Parameter(name="--dataset-root"), DATA] = None
    config: Annotated[str, Parameter(name="--dataset-config"), DATA] = ""
    split: Annotated[str, DATA] = ""
    max_samples: Annotated[int | None, POSITIVE, DATA] = None
    shuffle_seed: Annotated[int | None, DATA] = None
    trace: Annotated[Trace, DATA] = "in-order"
    trace_requests: Annotated[int | None, POSITIVE, DATA] = None

    def __post_init__(self) -> None:
        check(self)


def select(rows: list[_T], options: DatasetOptions) -> list[_T]:
    """Shuffle by ``shuffle_seed`` and cut to ``max_samples``: raw rows, so that only what is used is unpacked."""
    rows = list(rows)
    if options.shuffle_seed is not None:
        random.Random(options.shuffle_seed).shuffle(rows)  # noqa: S311 (an order, no secret)
    return rows[: options.max_samples]


# YCSB's default for requests over keys (Cooper et al., "Benchmarking Cloud Serving Systems with YCSB", SoCC 2010).
ZIPF_EXPONENT = 0.99


def arrange(samples: Sequence[Sample], options: DatasetOptions) -> list[Sample]:
    """The requests of a trace. A sample that comes again gets an id of its own: ``<id>#2``, ``<id>#3`` ..."""
    requests = _zipf(samples) if options.trace == "zipf" else cycle(samples)
    many = len(samples) if options.trace_requests is None else options.trace_requests
    taken = {sample.sample_id for sample in samples}
    times = Counter[str]()
    arranged = []
    for sample in islice(requests, many):
        times[sample.sample_id] += 1
        if times[sample.sample_id] > 1:
            while (name := f"{sample.sample_id}#{times[sample.sample_id]}") in taken:
                times[sample.sample_id] += 1
            sample = replace(sample, sample_id=name, repeats=sample.sample_id)
        arranged.append(sample)
    return arranged


def _zipf(samples: Sequence[Sample]) -> Iterator[Sample]:
    draws = random.Random(0)  # noqa: S311 (an order, no secret)
    by_image: dict[str, list[Sample]] = {}
    for sample in samples:
        by_image.setdefault(sample.image_name, []).append(sample)
    images = list(by_image.values())
    draws.shuffle(images)
    weights = list(accumulate(rank**-ZIPF_EXPONENT for rank in range(1, len(images) + 1)))
    while True:
        (questions,) = draws.choices(images, cum_weights=weights)
        yield draws.choice(questions)


# -- files ------------------------------------------------------------

NonEmpty = Annotated[str, Field(min_length=1)]


def read_jsonl(path: Path, *, cut_off: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for every line that is not blank, as `semkv.user_files.read_json_lines` reads it.

    NaN and infinity, which JSON does not have, are read as null.

    Raises:
        DatasetError: the file cannot be read, or a line is not a JSON object; the message names file and line.
    """
    for number, row in read_json_lines(path, nan_is_null=True, cut_off=cut_off):
        if not isinstance(row, dict):
            raise DatasetError(
                f"{path}, line {number}: expected an object, found {type(row).__name__}"
            )
        yield number, row


def read_rows(
    path: Path,
    kind: type[_T],
    *,
    cut_off: bool = False,
) -> list[_T]:
    """The lines of a file (`read_jsonl`) as objects of a dataclass."""
    found = [
        as_row(row, kind, f"{path}, line {number}")
        for number, row in read_jsonl(path, cut_off=cut_off)
    ]
    if not found and not cut_off:
        raise DatasetError(f"{path}: no rows")
    return found


def as_row(row: Any, kind: type[_T], where: str) -> _T:
    """A JSON value as an object of a dataclass; ``where`` stands before the message of a `DatasetError`."""
    try:
        found: _T = _reader(cast("Hashable", kind)).validate_python(row)
    except ValidationError as error:
        first = error.errors()[0]
        raise DatasetError(
            ": ".join(filter(None, (where, ".".join(map(str, first["loc"])), first["msg"])))
        ) from None
    return found


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@dataclass(frozen=True)
class _Prompt:
    """A line of a ``.jsonl`` file of prompts."""

    __pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    question: NonEmpty
    id: str | None = None
    system: str | None = None
    context: str | None = None
    images: Annotated[
        list[NonEmpty] | NonEmpty | None, Field(validation_alias=AliasChoices("images", "image"))
    ] = None
    answer: str | None = None
    semantic: str | None = None
    group: str | None = None
    variant: str | None = None


def load_jsonl(options: DatasetOptions) -> list[Sample]:
    """Any prompts, one JSON object a line: ``system``, ``context``, ``images``, ``question``, ``answer``.

    Only ``question`` is required. ``images`` is a path or a list of paths, relative to the file. ``id``, ``semantic``
    and ``group`` are taken where they are given.
    """
    path = options.root
    if path is None:
        raise ConfigError("--dataset-root", None, "a .jsonl file when --dataset is jsonl")
    samples: dict[str, Sample] = {}
    for number, row in read_jsonl(path):
        where = f"{path}, line {number}"
        prompt = as_row(row, _Prompt, where)
        name = prompt.id or f"{number:08d}"
        if name in samples:
            raise DatasetError(f"{where}: another line has the id {name!r}")
        images = [prompt.images] if isinstance(prompt.images, str) else prompt.images or []
        samples[name] = Sample(
            sample_id=name,
            question=prompt.question,
            answer=prompt.answer or None,
            images=tuple(_image(path.parent, image) for image in images if image),
            system=prompt.system or "",
            context=prompt.context or "",
            semantic_str=prompt.semantic or "",
            groups=(prompt.group,) if prompt.group else (),
            variant=prompt.variant or "",
        )
    return select(list(samples.values()), options)


def _image(folder: Path, name: str) -> ImageRef:
    file = folder / name
    whole = os.path.normpath(name)  # s1/frame.png is not s2/frame.png
    with suppress(OSError):  # such as a name that is too long
        if file.is_file():
            return ImageRef(whole, file)
    return ImageRef(
        whole, None, f"there is no file {file}; a path is relative to the folder of the .jsonl file"
    )


# -- requests ------------------------------------------------------------


def chunk_text(sample: Sample, source: ChunkSource, window: int = 0) -> str:
    """The text that the tiers match on, cut to its first ``window`` characters (0: not cut)."""
    group = " ".join(sample.groups)
    texts = {
        "question": sample.question,
        "semantic": sample.semantic_str,
        "group": group,
        "combined": " | ".join(t for t in (sample.question, sample.semantic_str, group) if t),
        "full": "\n".join(t for t in (sample.system, sample.context, sample.question) if t),
    }
    text = texts[source] or sample.question
    return text[:window] if window else text


def label_answers(
    samples: Iterable[Sample], instruction: str = ""
) -> Callable[[tuple[Segment, ...]], str]:
    """Answers prompts with the data set's own labels, in a model's place: for `ScriptedEngine.answer`.

    A prompt is known by its exact segments; one that no sample asks, such as one picture's context with another's
    question, gets an empty answer.
    """
    builder = RequestBuilder(Namespace(), instruction=instruction)
    labels = {_prompt_key(builder.build(s).segments): s.answer or "" for s in samples if s.complete}
    return lambda segments: labels.get(_prompt_key(segments), "")


def _prompt_key(segments: tuple[Segment, ...]) -> str:
    return keys.chain_keys(segments, normalised=False)[-1]


@dataclass
class RequestBuilder:
    """Turns samples into requests of one namespace.

    ``instruction`` is appended to each question, on a line of its own; without ``images`` a text model gets none.
    """

    namespace: Namespace
    chunk_source: ChunkSource = "question"
    chunk_window: int = 0
    instruction: str = ""
    images: bool = True
    _media: dict[Path, MediaSegment] = field(default_factory=dict)

    def build(self, sample: Sample) -> Request:
        """The sample's request."""
        segments: list[Segment] = []
        if sample.system:
            segments.append(TextSegment(sample.system, Role.SYSTEM))
        if self.images:
            segments += [self._segment(image) for image in sample.images]
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

    def _segment(self, image: ImageRef) -> MediaSegment:
        path = image.path
        if path is None:
            raise DatasetError(f"no file for image {image.name!r}")
        if path not in self._media:
            try:
                media_id = keys.media_id(path.read_bytes())
            except OSError as e:
                raise MediaError(f"{path}: {e.strerror or e}") from e
            self._media[path] = MediaSegment(media_id, path, image.name)
        return self._media[path]


def asked(request: Request) -> str:
    """Digest of all that an engine is asked: model, tenant, texts and the bytes of pictures."""
    return digest("asked", keys.namespace_key(request.namespace), _prompt_key(request.segments))


# -- what came of a sample ------------------------------------------------------------

_PUNCTUATION = re.compile(rf"[{re.escape(string.punctuation)}](?!\d)")


def at(value: Any, *path: str) -> Any:
    """What lies at this path of keys in nested objects, or None."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def normalise_answer(text: str) -> str:
    """Lowercase, punctuation removed, outer white space stripped: lmms-eval's exact match for GQA.

    Other than there, what stands before a digit stays: -5 is not 5, and 1.5 is not 15.
    """
    return _PUNCTUATION.sub("", text.lower()).strip()


def answers_match(prediction: str, answer: str) -> bool:
    """Whether two answers are equal but for case and punctuation."""
    return normalise_answer(prediction) == normalise_answer(answer)


@dataclass(frozen=True, slots=True)
class Cold:
    """The same sample on an engine with vLLM's prefix cache alone.

    Attributes:
        asked: digest of what was asked (`samples.asked`); empty in files of earlier versions.
        again_text, again_token_ids: the answer to the same prompt asked a second time, computed from nothing; on a few
            samples only (`run.NOISE_SAMPLES`), None on the others.
    """

    image: str
    text: str
    match: bool | None
    latency_s: float
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...] = ()
    again_text: str | None = None
    again_token_ids: tuple[int, ...] | None = None
    asked: str = ""

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """All that is known about one sample of a run; a line of ``--samples-out``.

    Attributes:
        text, answer, match: what was answered, what was expected (or None), and whether they are equal.
        provenance: `ReuseReport.provenance`: which tier hit; with ``exactness`` empty on a miss.
        applied: whether the donor's segments were sent (False on a miss and in dry-run mode).
        donor_answer: what the donor answered, where all of its prompt stands in (or would, in dry-run mode).
        donor_question, donor_image: each empty where that part of the donor does not stand in.
        latency_s: lookup and generation together; ``lookup_s`` the lookup alone, encoders included.
        after_s: recording, and the check of an approximate hit: after the answer, and in no latency.
        cached_tokens: prompt tokens not computed; ``loaded_tokens`` of them from our KV store (None: no connector),
            ``prefix_tokens`` from vLLM's own prefix cache.
        group, types: GQA's annotations of the question (`samples.Sample`).
        valid, plausible: whether the answer is of the question's kind, and occurs with its objects; None without GQA's
            choices.
        entailed: ids of samples whose answer follows from this one's.
        cold: the same sample without our caches, when a baseline was run.
    """

    sample_id: str
    image: str
    question: str
    text: str
    answer: str | None
    match: bool | None
    provenance: str
    exactness: str
    applied: bool
    score: float | None
    donor: str
    donor_answer: str | None
    statuses: dict[str, Status]
    latency_s: float
    lookup_s: float
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int | None
    prefix_tokens: int
    finish_reason: str = ""
    token_ids: tuple[int, ...] = ()
    variant: str = ""
    donor_question: str = ""
    donor_image: str = ""
    entailed: tuple[str, ...] = ()
    cold: Cold | None = None
    after_s: float = 0.0
    group: str = ""
    types: tuple[str, ...] = ()
    valid: bool | None = None
    plausible: bool | None = None

    @property
    def hit(self) -> bool:
        return bool(self.provenance)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def to_json(self) -> dict[str, Any]:
        return {"hit": self.hit, **asdict(self)}
