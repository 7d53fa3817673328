"""The vocabulary of semkv: small frozen values that pass between its parts. docs/architecture.md has the words.

Invariant: no store holds a value under a key it was not computed from. A semantic hit substitutes input
segments; everything below the canonical prompt is an exact cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from semkv.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from semkv.keys import Keyed

    Vector = npt.NDArray[np.float32]


DEFAULT_LAYER_THRESHOLD = 0.85


class Role(StrEnum):
    """What a text segment is for. Segments stand in prompt order: system, media, context, question."""

    SYSTEM = "system"
    CONTEXT = "context"
    QUESTION = "question"


class Status(StrEnum):
    """What a tier did with a request. ``skip``: not reached, disabled, or no input for it."""

    HIT = "hit"
    MISS = "miss"
    SKIP = "skip"


class Exactness(StrEnum):
    """How close the canonical prompt is to the request, best first."""

    EXACT = "exact"  # byte-equal
    NORMALISED = "normalised"  # equal after Unicode, case and white-space folding
    APPROXIMATE = "approximate"  # similar by an embedding


class CacheMode(StrEnum):
    """``off``: no lookup. ``dry-run``: look up and report, send the request unchanged. ``live``: substitute."""

    OFF = "off"
    DRY_RUN = "dry-run"
    LIVE = "live"


class PolicyName(StrEnum):
    """What decides on an approximate match; see `semkv.tiers.policies`."""

    FIXED = "fixed"
    CALIBRATED = "calibrated"
    BOUNDED = "bounded"
    JUDGE = "judge"


class TierChoice(StrEnum):
    """``all``: every tier is asked. ``auto``: those that have cost more than they saved are asked for a sample only."""

    ALL = "all"
    AUTO = "auto"


class Scope(StrEnum):
    """Whether the text tiers match within the same media only, or across media."""

    MEDIA = "media"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class TextSegment:
    """A run of text in a prompt."""

    text: str
    role: Role = Role.QUESTION


@dataclass(frozen=True, slots=True)
class MediaSegment:
    """An image in a prompt.

    Attributes:
        media_id: lowercase hex SHA-256 of the encoded file's bytes; the exact identity of the item.
        source: a readable file with those bytes, or None where only the media store has them.
        name: the data set's name for it (GQA's ``imageId``), for logs and for hooks that look under image roots.
    """

    media_id: str
    source: Path | None = None
    name: str = ""


Segment = TextSegment | MediaSegment


@dataclass(frozen=True, slots=True)
class Namespace:
    """Tenant and model; every store is partitioned by them before any search.

    Attributes:
        tenant: an opaque tenant id; empty for a single-tenant deployment.
        model: the digest of everything that shapes an answer's state (`keys.model_fingerprint`).
    """

    tenant: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class EmbeddingLayer:
    """One layer of the embedding tier, as ``NAME:DIM[:THRESHOLD]`` on the command line.

    A hook returns one float32 vector of ``dim`` numbers under ``name``; two are similar when their cosine is at
    least ``threshold``. The layers ``prompt`` (text) and ``vision`` (image) have a meaning in the plan; any other
    layer counts as evidence about the text.
    """

    name: str
    dim: int
    threshold: float = DEFAULT_LAYER_THRESHOLD

    @classmethod
    def parse(cls, spec: str | EmbeddingLayer) -> EmbeddingLayer:
        """Read ``NAME:DIM[:THRESHOLD]``, for example ``prompt:384:0.8``; a layer is checked in the same way.

        Raises:
            ConfigError: it is none.
        """
        form = "NAME:DIM[:THRESHOLD] such as prompt:384:0.8"
        try:
            parts = (
                spec.split(":") if isinstance(spec, str) else [str(part) for part in astuple(spec)]
            )
            layer = cls(parts[0], *map(int, parts[1:2]), *map(float, parts[2:]))
        except (TypeError, ValueError):
            raise ConfigError("--embedding-layer", spec, form) from None
        if not layer.name or not layer.name.isprintable() or layer.dim < 1:
            raise ConfigError("--embedding-layer", spec, f"{form}, of a positive dimension")
        if not 0.0 <= layer.threshold <= 1.0:
            raise ConfigError("--embedding-layer", spec, f"{form}, a threshold from 0 to 1")
        return layer

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(cls.parse)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the tiers see it.

    Attributes:
        request_id: unique within a run; appears in logs only, never in a key.
        namespace: tenant and model.
        segments: the whole prompt, in prompt order: system, media, context, question.
        chunk_text: the text the semantic tiers match on; the question unless the caller chooses otherwise.
        tags: labels for invalidation and reports.
    """

    request_id: str
    namespace: Namespace
    segments: tuple[Segment, ...]
    chunk_text: str = ""
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.chunk_text:
            object.__setattr__(self, "chunk_text", self.question)

    @property
    def media(self) -> tuple[MediaSegment, ...]:
        return tuple(s for s in self.segments if isinstance(s, MediaSegment))

    @property
    def question(self) -> str:
        """The text of the last question segment, or an empty string."""
        return _question(self.segments)


def _question(segments: tuple[Segment, ...]) -> str:
    texts = [s.text for s in segments if isinstance(s, TextSegment) and s.role is Role.QUESTION]
    return texts[-1] if texts else ""


class Score(NamedTuple):
    """What a tier or layer, by its status key, scored: a cosine in [-1, 1]."""

    tier: str
    cosine: float


@dataclass(frozen=True, slots=True)
class Match:
    """Why a donor was chosen.

    Attributes:
        tier: ``exact_text``, ``semantic_text`` or ``embedding:<layer>``: the status key that says ``hit``; of several
            layers the one that scored least.
        entry_id: the donor.
        score: cosine in [-1, 1] of what decided; 1.0 for an exact or normalised match.
        exactness: of the weakest substituted segment.
        whole: whether the donor's whole prompt matched, so that its answer can be used.
        wording: how the words differ (`semkv_guards.Wording`); None where nobody asked.
        others: what the other layers scored that this match rests on.
        judged: whether a judge said that one answer serves both; None where none has.
        same_words: whether the texts ask for the same in the same words (`semkv_guards.same_words`), where the score is
            a little below the threshold.
    """

    tier: str
    entry_id: str
    score: float
    exactness: Exactness
    whole: bool = True
    wording: tuple[float, float, float] | None = None
    others: tuple[Score, ...] = ()
    judged: bool | None = None
    same_words: bool = False

    @property
    def scores(self) -> tuple[Score, ...]:
        """What everything scored that this match rests on, the least first. A policy must be content with each."""
        return (Score(self.tier, self.score), *self.others)


@dataclass(frozen=True, slots=True)
class Plan:
    """The canonical prompt, and where it came from.

    Attributes:
        segments: the canonical prompt: what the engine is asked. Equal to the request's own when nothing is
            substituted.
        substituted: how many leading segments come from the donor (0: none).
        match: the donor and why, or None.
        full: whether every segment comes from the donor, so that its answer can be used.
    """

    segments: tuple[Segment, ...]
    substituted: int = 0
    match: Match | None = None

    @property
    def full(self) -> bool:
        return self.match is not None and self.substituted == len(self.segments)


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What the lookup found. ``statuses`` has a key per tier, in the order of the lookup.

    Attributes:
        request: the request as it came.
        plan: what to send to the engine.
        statuses: ``exact_text``, ``embedding:<layer>`` per layer, ``semantic_text``; the runner adds ``kv_cache`` and
            ``fusion`` when the engine has answered.
        embeddings: the vectors computed on the way, by layer, each normalised to length 1.
        lookup_s: seconds spent in the lookup, encoders included.
        donor_response: what the donor answered, for comparison; never returned by the KV tiers.
        proposed: in dry-run the plan that live mode would follow, while ``plan`` keeps the request's own segments, 0
            substituted, and the match; None otherwise.
        hit_id: names this hit for `SemanticCache.checked` and `SemanticCache.report_wrong`; empty on a miss.
        near: the best approximate match of a whole prompt that was turned down, its donor, and why; None where there is
            none, or another match was used. What the policy refused comes before what a guard did, since the engine's
            answer tells whether it would have been right.
        doubt: the best match that a judge's yes would make a hit, with its donor: see `SemanticCache.keep_verdict`.
        left_out: tiers that ``--tiers auto`` did not ask; with ``all`` those that it would not have asked.
        keyed: the request's keys, which the record of its answer needs again; None where nothing was looked up.
    """

    request: Request
    plan: Plan
    statuses: Mapping[str, Status]
    embeddings: Mapping[str, Vector] = field(default_factory=dict)
    lookup_s: float = 0.0
    donor_response: str | None = None
    proposed: Plan | None = None
    hit_id: str = ""
    near: tuple[Match, Entry, str] | None = None
    doubt: tuple[Match, Entry] | None = None
    left_out: frozenset[str] = frozenset()
    keyed: Keyed | None = field(default=None, repr=False, compare=False)

    @property
    def hit(self) -> bool:
        return self.plan.match is not None

    @property
    def rewritten(self) -> bool:
        """Whether the plan has other segments than the request: not where the donor's are byte-equal."""
        return self.plan.segments != self.request.segments

    @property
    def provenance(self) -> str:
        """``text:exact``, ``text:normalised``, ``text:semantic`` or ``embedding:<layer>``; empty on a miss.

        ``text:approximate`` is the same text on other media, which ``--scope any`` allows.

        ``/media`` or ``/context`` is appended when only a leading part of the prompt was substituted.
        """
        match = self.plan.match
        if match is None:
            return ""
        names = {"exact_text": f"text:{match.exactness}", "semantic_text": "text:semantic"}
        name = names.get(match.tier, match.tier)
        plan = self.proposed or self.plan
        if plan.full or not plan.substituted:
            return name
        last = plan.segments[plan.substituted - 1]
        return f"{name}/{'media' if isinstance(last, MediaSegment) else last.role}"

    def unchanged(self) -> ReuseReport:
        """The same lookup with nothing substituted: what a check runs, and records when it is answered."""
        return replace(
            self,
            plan=Plan(self.request.segments),
            donor_response=None,
            proposed=None,
            hit_id="",
            near=None,
            doubt=None,
        )

    def unused(self) -> ReuseReport:
        """The same lookup, where the request was computed beside it: its answer tells what the donor's was worth."""
        return replace(self, plan=Plan(self.request.segments), proposed=None)

    def with_status(self, **statuses: Status) -> ReuseReport:
        """The same report with more tiers' statuses, such as the engine's ``kv_cache`` and ``fusion``."""
        return replace(self, statuses={**self.statuses, **statuses})


@dataclass(frozen=True, slots=True)
class Entry:
    """One observed request as the catalog keeps it.

    ``segments`` is the canonical prompt that was really computed, so ``response`` belongs to exactly these segments.
    Times are seconds since the epoch.
    """

    entry_id: str
    namespace: Namespace
    segments: tuple[Segment, ...]
    chunk_text: str
    response: str
    embeddings: Mapping[str, Vector] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    created: float = 0.0
    last_hit: float = 0.0
    hits: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The text of the last question segment, or an empty string."""
        return _question(self.segments)
