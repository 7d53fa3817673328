"""Keys: how requests, segments and models are named in the stores.

A key is always a digest. Nothing a user sent becomes part of a path. A prompt's keys (`Keyed`) are digests over the
namespace too, so that tenants and models share nothing:

    prefix         a leading run: the whole prompt, or what ends in or after a context
    question slot  everything but the last question: requests that differ in their question alone share it
    media prefix   the leading run up to the last media item, with all media items alike: where an image may stand in
    media          the same run with its own media items
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache

from semkv.types import (
    Entry,
    Exactness,
    MediaSegment,
    Namespace,
    Request,
    Role,
    Segment,
    TextSegment,
)
from semkv_guards.folding import asks_of_typing, normalise
from semkv_stores.digests import digest


def media_id(data: bytes) -> str:
    """The exact identity of a media item: SHA-256 of its encoded bytes, lowercase hex."""
    return hashlib.sha256(data).hexdigest()


@lru_cache(maxsize=1024)
def namespace_key(namespace: Namespace) -> str:
    """One digest for tenant and model, used to partition every store."""
    return digest("namespace", namespace.tenant, namespace.model)


def segment_key(segment: Segment, *, normalised: bool, with_media: bool = True) -> str:
    """The key of one segment.

    Args:
        segment: the segment.
        normalised: fold the text (`normalise`) instead of taking its exact characters.
        with_media: False gives every media item the same key (``--scope any``).
    """
    if isinstance(segment, MediaSegment):
        return digest("media", segment.media_id if with_media else "*")
    return digest("text", segment.role, normalise(segment.text) if normalised else segment.text)


def chain_keys(
    segments: Iterable[Segment], *, normalised: bool, with_media: bool = True
) -> list[str]:
    """One key per leading run of segments: ``keys[i]`` covers ``segments[: i + 1]``.

    The same idea as vLLM's chained block hashes, one level up: the longest stored key is the longest shared prefix.
    """
    keys: list[str] = []
    parent = "root"
    for segment in segments:
        parent = digest(
            "chain", parent, segment_key(segment, normalised=normalised, with_media=with_media)
        )
        keys.append(parent)
    return keys


def media_uuid(tenant: str, media: str) -> str:
    """The id a media item goes by inside vLLM: content plus tenant, so that no encoder output crosses tenants."""
    return digest("uuid", tenant, media)[:32]


def model_fingerprint(settings: Mapping[str, object]) -> str:
    """Digest of everything that shapes a model's state and answers.

    Args:
        settings: id, revision, weights digest, dtype, LoRA, chat template, processor settings; any JSON value.
    """
    return digest("model", json.dumps(settings, sort_keys=True, default=str))


# -- a prompt ---------------------------------------------------------------------------------------------------------


class Keyed:
    """A prompt with the chain keys of its leading runs; those that an exact hit does not need are made when asked for.

    Attributes:
        space: `namespace_key` of the namespace.
        segments: the prompt, at least one.
        exact: `chain_keys` over exact characters.
        question, last_media, first_context: positions in ``segments``, or None.
    """

    def __init__(self, namespace: Namespace, segments: tuple[Segment, ...]) -> None:
        self.space = namespace_key(namespace)
        self.segments = segments
        self.exact = chain_keys(segments, normalised=False)
        self.question: int | None = None
        self.last_media: int | None = None
        self.first_context: int | None = None
        for position, segment in enumerate(segments):
            if isinstance(segment, MediaSegment):
                self.last_media = position
            elif segment.role is Role.QUESTION:
                self.question = position
            elif is_context(segment) and self.first_context is None:
                self.first_context = position

    @cached_property
    def folded(self) -> Sequence[str]:
        """`chain_keys` over normalised text; where typing is asked for over exact characters, apart from all others."""
        return self._folded(with_media=True)

    @cached_property
    def any_media(self) -> Sequence[str]:
        """The same over normalised text, with all media items alike."""
        if self.last_media is None:
            return self.folded
        return self._folded(with_media=False)

    @cached_property
    def as_typed(self) -> frozenset[int]:
        """Positions of the texts that ask about typing: where there is one, no text of the prompt is folded."""
        texts = (
            (i, segment)
            for i, segment in enumerate(self.segments)
            if isinstance(segment, TextSegment)
        )
        return frozenset(i for i, segment in texts if asks_of_typing(segment.text))

    def _folded(self, *, with_media: bool) -> list[str]:
        chain = chain_keys(self.segments, normalised=not self.as_typed, with_media=with_media)
        return [digest("as typed", key) for key in chain] if self.as_typed else chain

    def question_slot(self, *, with_media: bool = True) -> str:
        """Digest of all segments but the last question; empty where there is no question, or where another text asks
        how it is typed."""
        if self.question is None or self.as_typed - {self.question}:
            return ""
        chain = self.folded if with_media else self.any_media
        before = chain[self.question - 1] if self.question else ""
        rest = self.segments[self.question + 1 :]
        after = [segment_key(s, normalised=not self.as_typed, with_media=with_media) for s in rest]
        return digest("frame", self.space, before, *after)

    def media_prefix(self) -> str:
        """Digest of the leading run up to the last media item, media alike; empty where there is none."""
        return (
            ""
            if self.last_media is None
            else digest("run", self.space, self.any_media[self.last_media])
        )

    def media_key(self) -> str:
        """Digest of the same run with its own media items; empty where there is none."""
        return (
            ""
            if self.last_media is None
            else digest("media", self.space, self.folded[self.last_media])
        )

    def context_depths(self) -> range:
        """Lengths of the leading runs that hold a context and leave something over, shortest first."""
        if self.first_context is None:
            return range(0)
        return range(self.first_context + 1, len(self.segments))

    def exact_key(self, depth: int) -> str:
        """The key of the first ``depth`` segments, byte for byte."""
        return self._prefix_key(self.exact, "exact", depth)

    def folded_key(self, depth: int, *, with_media: bool = True) -> str:
        """The same after normalisation."""
        return self._prefix_key(self.folded if with_media else self.any_media, "folded", depth)

    def _prefix_key(self, chain: Sequence[str], kind: str, depth: int) -> str:
        name = "lead" if depth < len(self.segments) else "whole"
        return digest(name, self.space, kind, chain[depth - 1])

    def entry_keys(self) -> tuple[str, ...]:
        """All keys under which an entry with this prompt is registered."""
        keys = {self.media_key()}
        for depth in (*self.context_depths(), len(self.segments)):
            keys |= {
                self.exact_key(depth),
                self.folded_key(depth),
                self.folded_key(depth, with_media=False),
            }
        return tuple(sorted(keys - {""}))


def is_context(segment: Segment) -> bool:
    """Whether a segment is a text with the role ``context`` that says anything."""
    return (
        isinstance(segment, TextSegment)
        and segment.role is Role.CONTEXT
        and bool(segment.text.strip())
    )


def exactness_of(own: Sequence[Segment], donor: Sequence[Segment]) -> Exactness:
    """How close a donor's segments are to the request's own, by the weakest pair: another media item is approximate,
    whatever the texts are."""
    alike = len(own) == len(donor) and all(map(_folds_to, own, donor))
    if not alike:
        return Exactness.APPROXIMATE
    return Exactness.EXACT if same_characters(own, donor) else Exactness.NORMALISED


def _folds_to(mine: Segment, theirs: Segment) -> bool:
    """Whether two segments have one normalised `segment_key`, where neither asks how it is typed."""
    if isinstance(mine, MediaSegment) or isinstance(theirs, MediaSegment):
        return _media_of(mine) == _media_of(theirs)
    if mine == theirs:
        return True
    if mine.role is not theirs.role or asks_of_typing(mine.text):
        return False
    return normalise(mine.text) == normalise(theirs.text)


def _media_of(segment: Segment) -> str | None:
    return segment.media_id if isinstance(segment, MediaSegment) else None


def same_characters(
    own: Sequence[Segment], donor: Sequence[Segment], but: int | None = None
) -> bool:
    """Whether two runs have the same characters, whatever the media items; ``but`` is a text that is left out."""
    pairs = enumerate(zip(own, donor, strict=False))
    return all(
        i == but or getattr(mine, "text", "") == getattr(theirs, "text", "")
        for i, (mine, theirs) in pairs
    )


def with_media(segments: Sequence[Segment], media: Sequence[str]) -> tuple[Segment, ...]:
    """The same segments with other media items, in order."""
    left = iter(media)
    return tuple(MediaSegment(next(left)) if isinstance(s, MediaSegment) else s for s in segments)


def has_chunk_text(request: Request, segments: Sequence[Segment]) -> bool:
    """Whether a request's chunk text also fits the prompt that was computed for it. It may quote the request's own
    context, in whose place the donor's stands in that prompt."""
    own = [segment for segment in request.segments if isinstance(segment, TextSegment)]
    computed = [segment for segment in segments if isinstance(segment, TextSegment)]
    return own == computed or request.chunk_text == request.question


def entry_of(request: Request, keyed: Keyed) -> Entry:
    """The entry of a prompt that was computed for a request, without what its answer brings.

    Args:
        request: the request.
        keyed: the prompt. Where the request's chunk text is not its own, the entry has the question's.
    """
    chunk_text = request.chunk_text if has_chunk_text(request, keyed.segments) else request.question
    entry_id = digest("entry", keyed.space, keyed.exact[-1], chunk_text)[:32]
    return Entry(entry_id, request.namespace, keyed.segments, chunk_text, response="")
