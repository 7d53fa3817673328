"""L1 for long contexts: a near-equal revision of a document, found without encoding the document.

A sentence encoder reads a few hundred tokens, so a document's vector would stand for its beginning alone. Instead a
context is split into sentences, and its sentences' hashes name stored contexts that share most of them. The best must
then agree sentence by sentence, but for a few that were reworded, and only those are encoded.

Each context is known by the smallest ``SKETCH`` of its sentence hashes (a bottom-k sketch, after Broder, "On the
resemblance and containment of documents", 1997), so that neither a long document nor a large catalog makes a lookup
slow: two documents that share 90% of their sentences share most of the sketch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from semkv.config import CacheConfig
from semkv.encoders.text import TextEncoder
from semkv.guards import Guard
from semkv.keys import LITERAL, digest, normalise, one_style, segment_key
from semkv.stores.catalog import Catalog
from semkv.tiers.base import Candidate
from semkv.tiers.prompt_keys import Keyed, is_context
from semkv.tiers.similar import SEMANTIC
from semkv.types import Entry, Scope, Segment, TextSegment

SKETCH = 64
_LONGEST = 64  # words; what has no full stops is cut, so that a piece fits an encoder
_DONORS = 8
_END = re.compile(r"(?<=[.!?])\s+|(?<=。)\s*")
_STOP = re.compile(r"(?<=[.!?])(?=\s)|(?<=。)")
_WORD = re.compile(r"\s*\S+|\s+\Z")


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


@dataclass(frozen=True, slots=True)
class _Aligned:
    """How much of a donor stands for the request's: length of the run, and the sentences that differ, in pairs."""

    donor: Entry
    run: int
    changed: tuple[tuple[str, str], ...]


class SimilarContext:
    """Finds entries whose contexts say the same but for a few reworded sentences.

    Args:
        config: settings. Without ``normalised`` a sentence that is typed in another way is a changed one, and what is
            no context has to be byte-equal.
        catalog: where the entries are.
        encoder: of single sentences.
        guard: may veto a changed sentence, such as one with another number.
    """

    def __init__(self, config: CacheConfig, catalog: Catalog, encoder: TextEncoder, guard: Guard) -> None:
        self._catalog, self._encoder, self._guard = catalog, encoder, guard
        self._with_media, self._threshold = config.scope is Scope.MEDIA, config.similarity_threshold
        self._share, self._normalised = config.context_edit_share, config.normalised
        self._cut = sentences if config.normalised else exact_sentences

    def candidates(self, keyed: Keyed) -> Iterator[Candidate]:
        """Donors by length of the run, then by likeness; the run ends in a context, the rest is the request's own."""
        first = keyed.first_context
        if first is None or first + 1 >= len(keyed.segments):
            return
        context = keyed.segments[first]
        pieces = sentences(context.text) if isinstance(context, TextSegment) else []
        partition = keyed.before_context(with_media=self._with_media)
        donors = [
            donor for key in self._catalog.vote(sketch(partition, pieces)) for donor in self._catalog.find(key, _DONORS)
        ]
        aligned = [found for donor in donors if (found := self._align(keyed.segments, donor)) is not None]
        for found in sorted(aligned, key=lambda a: (-a.run, len(a.changed))):
            score = self._least_cosine(found.changed)
            if score is not None and score >= self._threshold:
                yield Candidate(found.donor, found.run, SEMANTIC, score, (SEMANTIC,))

    def _align(self, own: Sequence[Segment], donor: Entry) -> _Aligned | None:
        changed: list[tuple[str, str]] = []
        run = 0
        most = min(len(own), len(donor.segments)) - 1  # the question stays the request's own
        for position in range(most):
            mine, theirs = own[position], donor.segments[position]
            if self._same(mine, theirs):
                pairs: list[tuple[str, str]] | None = []
            elif is_context(mine) and is_context(theirs):
                assert isinstance(mine, TextSegment)
                assert isinstance(theirs, TextSegment)
                pairs = self._changed(self._cut(mine.text), self._cut(theirs.text))
            else:
                pairs = None
            if pairs is None:
                break
            changed += pairs
            if is_context(mine):
                run = position + 1
        return _Aligned(donor, run, tuple(changed)) if run else None

    def _same(self, mine: Segment, theirs: Segment) -> bool:
        keys = [segment_key(s, normalised=self._normalised, with_media=self._with_media) for s in (mine, theirs)]
        return keys[0] == keys[1]

    def _changed(self, mine: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, str]] | None:
        """The pairs that differ, sentence by sentence; None for an insertion, a deletion, too many, or a veto."""
        if len(mine) != len(theirs):
            return None
        pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a != b]
        if len(pairs) > max(1, int(self._share * len(mine))) or any(self._guard(a, b) for a, b in pairs):
            return None
        return pairs

    def _least_cosine(self, pairs: Sequence[tuple[str, str]]) -> float | None:
        texts = [text for pair in pairs for text in pair]
        if not texts:
            return 1.0
        if not all(self._encoder.fits(text) for text in texts):
            return None
        vectors = self._encoder.encode(texts)
        return min(1.0, float(np.min(np.sum(vectors[0::2] * vectors[1::2], axis=1))))
