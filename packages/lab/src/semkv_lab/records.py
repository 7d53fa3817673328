"""What is known about one sample of a run, and when two answers are the same."""

import re
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from semkv.types import Status

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
        image_file: where the image was; empty without one.
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
    image_file: str = ""
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
