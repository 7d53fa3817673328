"""Every key by which the tiers find an entry, computed once for a prompt.

    whole   all segments of a prompt: what the exact text tier asks for first
    lead    a leading run that ends in a context, shorter than the prompt
    frame   everything but the last question: requests that differ in their question alone share it
    run     the leading run up to the last media item, with all media items alike: where an image may be substituted
    media   the same run with its own media items

Each key is a digest over the namespace too, so that tenants and models share nothing.

A long context is known by the smallest `SKETCH` of its sentence hashes (a bottom-k sketch, after Broder, "On the
resemblance and containment of documents", 1997), so that neither a long document nor a large catalog makes a lookup
slow: two documents that share 90% of their sentences share most of the sketch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from semkv.keys import LITERAL, chain_keys, digest, namespace_key, normalise, one_style, segment_key
from semkv.types import Entry, Exactness, MediaSegment, Namespace, Request, Role, Segment, TextSegment

SPELLINGS = 64  # entries of one folded text that are looked through for the same characters
SKETCH = 64
_LONGEST = 64  # words; what has no full stops is cut, so that a piece fits an encoder
_END = re.compile(r"(?<=[.!?])\s+|(?<=。)\s*")
_STOP = re.compile(r"(?<=[.!?])(?=\s)|(?<=。)")
_WORD = re.compile(r"\s*\S+|\s+\Z")
_space = lru_cache(maxsize=1024)(namespace_key)


@dataclass(frozen=True)
class Keyed:
    """A prompt with the chain keys of its leading runs; those that an exact hit does not need are made when asked for.

    Attributes:
        space: `keys.namespace_key` of the namespace.
        segments: the prompt, at least one.
        exact: `keys.chain_keys` over exact characters.
        question, last_media, first_context: positions in ``segments``, or None.
    """

    space: str
    segments: tuple[Segment, ...]
    exact: Sequence[str]
    question: int | None
    last_media: int | None
    first_context: int | None

    @classmethod
    def of(cls, namespace: Namespace, segments: tuple[Segment, ...]) -> Keyed:
        media = [i for i, s in enumerate(segments) if isinstance(s, MediaSegment)]
        contexts = [i for i, s in enumerate(segments) if is_context(s)]
        questions = [i for i, s in enumerate(segments) if isinstance(s, TextSegment) and s.role is Role.QUESTION]
        return cls(
            space=_space(namespace),
            segments=segments,
            exact=chain_keys(segments, normalised=False),
            question=questions[-1] if questions else None,
            last_media=media[-1] if media else None,
            first_context=contexts[0] if contexts else None,
        )

    @cached_property
    def folded(self) -> Sequence[str]:
        """`keys.chain_keys` over normalised text."""
        return chain_keys(self.segments, normalised=True)

    @cached_property
    def loose(self) -> Sequence[str]:
        """The same with all media items alike."""
        if self.last_media is None:
            return self.folded
        return chain_keys(self.segments, normalised=True, with_media=False)

    def chain(self, *, normalised: bool, with_media: bool) -> Sequence[str]:
        """`keys.chain_keys` of the prompt."""
        if normalised:
            return self.folded if with_media else self.loose
        if with_media or self.last_media is None:
            return self.exact
        return chain_keys(self.segments, normalised=False, with_media=False)

    def frame(self, *, normalised: bool = True, with_media: bool = True) -> str:
        """Digest of all segments but the last question; empty where there is no question."""
        if self.question is None:
            return ""
        before = self.chain(normalised=normalised, with_media=with_media)[self.question - 1] if self.question else ""
        after = [
            segment_key(s, normalised=normalised, with_media=with_media) for s in self.segments[self.question + 1 :]
        ]
        return digest("frame", self.space, before, *after)

    def run(self) -> str:
        """Digest of the leading run up to the last media item, media alike; empty where there is none."""
        return "" if self.last_media is None else digest("run", self.space, self.loose[self.last_media])

    def media_key(self) -> str:
        """Digest of the same run with its own media items; empty where there is none."""
        return "" if self.last_media is None else digest("media", self.space, self.folded[self.last_media])

    def lead_depths(self) -> range:
        """Lengths of the leading runs that hold a context and leave something over, shortest first."""
        if self.first_context is None:
            return range(0)
        return range(self.first_context + 1, len(self.segments))

    def whole(self, chain: Sequence[str], kind: str) -> str:
        """The key of all segments under one of the chains; ``kind`` is ``exact`` or ``folded``."""
        return self.lead(chain, kind, len(self.segments))

    def lead(self, chain: Sequence[str], kind: str, depth: int) -> str:
        """The key of the first ``depth`` segments under one of the chains, `whole` where these are all."""
        name = "lead" if depth < len(self.segments) else "whole"
        return digest(name, self.space, kind, chain[depth - 1])

    def before_context(self, *, with_media: bool = True) -> str:
        """Digest of what stands before the first context; similar contexts are sought among entries that share it."""
        chain = self.chain(normalised=True, with_media=with_media)
        first = self.first_context
        return digest("before", self.space, chain[first - 1] if first else "")

    def entry_keys(self) -> tuple[str, ...]:
        """All keys under which an entry with this prompt is registered."""
        keys = {
            self.whole(self.exact, "exact"),
            self.whole(self.folded, "folded"),
            self.whole(self.loose, "folded"),
            self.media_key(),
        }
        for depth in self.lead_depths():
            keys |= {
                self.lead(self.exact, "exact", depth),
                self.lead(self.folded, "folded", depth),
                self.lead(self.loose, "folded", depth),
            }
        return tuple(sorted(keys - {""}))


def is_context(segment: Segment) -> bool:
    """Whether a segment is a text with the role ``context`` that says anything."""
    return isinstance(segment, TextSegment) and segment.role is Role.CONTEXT and bool(segment.text.strip())


def exactness_of(own: Sequence[Segment], donor: Sequence[Segment], *, normalised: bool = True) -> Exactness:
    """How close a donor's segments are to the request's own, by the weakest pair.

    A donor's media item that is not the request's own is approximate, whatever the texts are; without ``normalised``
    so is every text that is not byte-equal.
    """
    if len(own) != len(donor):
        return Exactness.APPROXIMATE
    weakest = Exactness.EXACT
    for mine, theirs in zip(own, donor, strict=True):
        if isinstance(mine, MediaSegment) and isinstance(theirs, MediaSegment):
            if mine.media_id != theirs.media_id:
                return Exactness.APPROXIMATE
        elif isinstance(mine, MediaSegment) or isinstance(theirs, MediaSegment) or mine.role != theirs.role:
            return Exactness.APPROXIMATE
        elif mine.text != theirs.text:
            if not normalised or normalise(mine.text) != normalise(theirs.text):
                return Exactness.APPROXIMATE
            weakest = Exactness.NORMALISED
    return weakest


def same_texts(own: Sequence[Segment], donor: Sequence[Segment], but: int | None = None) -> bool:
    """Whether the donor's leading segments have the same characters as these, whatever the media items.

    ``but`` is the position of a text that is compared in another way.
    """
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


def exact_sentences(text: str) -> list[str]:
    """The sentences of a text as they stand, with the blanks before them: joined, they are the text."""
    pieces = []
    for sentence in _STOP.split(text):
        words = _WORD.findall(sentence)
        pieces += ["".join(words[start : start + _LONGEST]) for start in range(0, len(words), _LONGEST)]
    return pieces


def sketch(partition: str, pieces: Sequence[str]) -> list[int]:
    """The smallest ``SKETCH`` hashes of a context's sentences within a partition, as signed 64-bit numbers."""
    hashes = {
        int.from_bytes(bytes.fromhex(digest("sentence", partition, piece)[:16]), "big", signed=True) for piece in pieces
    }
    return sorted(hashes)[:SKETCH]


def context_rows(keyed: Keyed) -> dict[str, list[int]]:
    """What the catalog needs to find an entry by its first context: lead key -> sentence hashes."""
    first = keyed.first_context
    if first is None or first + 1 >= len(keyed.segments):
        return {}
    segment = keyed.segments[first]
    pieces = sentences(segment.text) if isinstance(segment, TextSegment) else []
    rows = {}
    for chain, with_media in ((keyed.folded, True), (keyed.loose, False)):
        key = keyed.lead(chain, "folded", first + 1)
        rows[key] = sketch(keyed.before_context(with_media=with_media), pieces)
    return rows
