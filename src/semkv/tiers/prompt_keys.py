"""Every key by which the tiers find an entry, computed once for a prompt.

    prefix         a leading run: the whole prompt, or what ends in or after a context
    question slot  everything but the last question: requests that differ in their question alone share it
    media prefix   the leading run up to the last media item, with all media items alike: where an image may stand in
    media          the same run with its own media items

Each key is a digest over the namespace too, so that tenants and models share nothing.

A long context is known by the smallest `SKETCH` of its sentence hashes (a bottom-k sketch, after Broder, "On the
resemblance and containment of documents", 1997), so that neither a long document nor a large catalog makes a lookup
slow: two documents that share 90% of their sentences share most of the sketch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache

from semkv.keys import LITERAL, chain_keys, digest, namespace_key, normalise, one_style, segment_key
from semkv.types import Entry, Exactness, MediaSegment, Namespace, Request, Role, Segment, TextSegment

SKETCH = 64
_LONGEST = 64  # words; what has no full stops is cut, so that a piece fits an encoder
_END = re.compile(r"(?<=[.!?])\s+|(?<=。)\s*")
_space = lru_cache(maxsize=1024)(namespace_key)


class Keyed:
    """A prompt with the chain keys of its leading runs; those that an exact hit does not need are made when asked for.

    Attributes:
        space: `keys.namespace_key` of the namespace.
        segments: the prompt, at least one.
        exact: `keys.chain_keys` over exact characters.
        question, last_media, first_context: positions in ``segments``, or None.
    """

    def __init__(self, namespace: Namespace, segments: tuple[Segment, ...]) -> None:
        self.space, self.segments, self.exact = _space(namespace), segments, chain_keys(segments, normalised=False)
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
        """`keys.chain_keys` over normalised text."""
        return chain_keys(self.segments, normalised=True)

    @cached_property
    def any_media(self) -> Sequence[str]:
        """The same over normalised text, with all media items alike."""
        if self.last_media is None:
            return self.folded
        return chain_keys(self.segments, normalised=True, with_media=False)

    def question_slot(self, *, with_media: bool = True) -> str:
        """Digest of all segments but the last question; empty where there is no question."""
        if self.question is None:
            return ""
        chain = self.folded if with_media else self.any_media
        before = chain[self.question - 1] if self.question else ""
        after = [segment_key(s, normalised=True, with_media=with_media) for s in self.segments[self.question + 1 :]]
        return digest("frame", self.space, before, *after)

    def media_prefix(self) -> str:
        """Digest of the leading run up to the last media item, media alike; empty where there is none."""
        return "" if self.last_media is None else digest("run", self.space, self.any_media[self.last_media])

    def media_key(self) -> str:
        """Digest of the same run with its own media items; empty where there is none."""
        return "" if self.last_media is None else digest("media", self.space, self.folded[self.last_media])

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

    def before_context(self, *, with_media: bool = True) -> str:
        """Digest of what stands before the first context; similar contexts are sought among entries that share it."""
        chain = self.folded if with_media else self.any_media
        return digest("before", self.space, chain[self.first_context - 1] if self.first_context else "")

    def entry_keys(self) -> tuple[str, ...]:
        """All keys under which an entry with this prompt is registered."""
        keys = {self.media_key()}
        for depth in (*self.context_depths(), len(self.segments)):
            keys |= {self.exact_key(depth), self.folded_key(depth), self.folded_key(depth, with_media=False)}
        return tuple(sorted(keys - {""}))


def is_context(segment: Segment) -> bool:
    """Whether a segment is a text with the role ``context`` that says anything."""
    return isinstance(segment, TextSegment) and segment.role is Role.CONTEXT and bool(segment.text.strip())


def exactness_of(own: Sequence[Segment], donor: Sequence[Segment]) -> Exactness:
    """How close a donor's segments are to the request's own, by the weakest pair: another media item is approximate,
    whatever the texts are."""
    alike = len(own) == len(donor) and all(
        mine == theirs or segment_key(mine, normalised=True) == segment_key(theirs, normalised=True)
        for mine, theirs in zip(own, donor, strict=True)
    )
    if not alike:
        return Exactness.APPROXIMATE
    return Exactness.EXACT if same_characters(own, donor) else Exactness.NORMALISED


def same_characters(own: Sequence[Segment], donor: Sequence[Segment], but: int | None = None) -> bool:
    """Whether two runs have the same characters, whatever the media items; ``but`` is a text that is left out."""
    pairs = enumerate(zip(own, donor, strict=False))
    return all(i == but or getattr(mine, "text", "") == getattr(theirs, "text", "") for i, (mine, theirs) in pairs)


def with_media(segments: Sequence[Segment], media: Sequence[str]) -> tuple[Segment, ...]:
    """The same segments with other media items, in order."""
    left = iter(media)
    return tuple(MediaSegment(next(left)) if isinstance(s, MediaSegment) else s for s in segments)


def has_chunk_text(request: Request, segments: Sequence[Segment]) -> bool:
    """Whether a request's chunk text is that of a prompt that was computed for it: it may speak of a context in whose
    place a donor's stands."""
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


# -- long contexts ------------------------------------------------------------------------------------------------


def sentences(text: str) -> list[str]:
    """The sentences of a text, each after `keys.normalise`, without lines; more than 64 words come in pieces."""
    pieces = []
    # One word says nothing of the style that a text is typed in.
    styled = one_style(text) and not LITERAL.search(text)
    for sentence in _END.split(text.lower() if styled else text):  # so that a quotation keeps no more than its own
        words = normalise(sentence).split()
        pieces += [" ".join(words[start : start + _LONGEST]) for start in range(0, len(words), _LONGEST)]
    return [piece for piece in pieces if piece]


def sketch(partition: str, pieces: Sequence[str]) -> list[int]:
    """The smallest ``SKETCH`` hashes of a context's sentences within a partition, as signed 64-bit numbers."""
    hashes = {
        int.from_bytes(bytes.fromhex(digest("sentence", partition, piece)[:16]), "big", signed=True) for piece in pieces
    }
    return sorted(hashes)[:SKETCH]


def context_rows(keyed: Keyed) -> dict[str, list[int]]:
    """What the catalog needs to find an entry by its first context: key of the run -> sentence hashes."""
    if not keyed.context_depths():
        return {}
    pieces, depth = first_context(keyed), keyed.context_depths()[0]
    return {
        keyed.folded_key(depth, with_media=with_media): sketch(keyed.before_context(with_media=with_media), pieces)
        for with_media in (True, False)
    }


def first_context(keyed: Keyed) -> list[str]:
    """The sentences of a prompt's first context."""
    segment = None if keyed.first_context is None else keyed.segments[keyed.first_context]
    return sentences(segment.text) if isinstance(segment, TextSegment) else []
