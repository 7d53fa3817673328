"""Similar texts and images: L1 by the chunk text's sentence vector, L2 by one vector index for each registered layer.

A text layer compares entries that agree on everything but the question. L1 asks its one layer, L2 all of its own. Under
``--match all`` a similar image may stand in for the request's own only together with the same text before it, and a
similar question only where the images are the same or were substituted too:

    same or similar media, similar text      the donor's image and text
    similar media only                       the donor's image, the request's own text
    similar text, other media                nothing

``--match any`` is the literal reading of "the best layer decides": whichever single layer scores best brings its whole
donor, whatever the other layers say. It exists to be measured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semkv.config import CacheConfig
from semkv.errors import ConfigError, CorruptValue
from semkv.guards import Guard
from semkv.index import Row, VectorIndex
from semkv.keys import digest, segment_key
from semkv.stores.catalog import Catalog, MediaRow, VectorRow, unpack
from semkv.tiers.base import Candidate, Index, PluggedIndex, Tally
from semkv.tiers.prompt_keys import (
    SPELLINGS,
    Keyed,
    exact_sentences,
    is_context,
    same_texts,
    sentences,
    sketch,
    with_media,
)
from semkv.types import EmbeddingLayer, Entry, MatchPolicy, Namespace, Request, Scope, Score, Segment, TextSegment

if TYPE_CHECKING:
    from semkv.encoders.text import TextEncoder
    from semkv.types import Vector

SEMANTIC = "semantic_text"
VISION = "vision"
EDITED = 0.1  # of a context's sentences, that may be reworded for it still to be similar; one always may
_CONTEXTS = 8  # of one key that are compared sentence by sentence
_NEIGHBOURS, _QUESTIONS = 8, 4  # of a layer, and of L1: the next ones are asked when the policy refuses the best


def status_of(layer: str) -> str:
    """``embedding:<layer>``, the key of a layer's status."""
    return f"embedding:{layer}"


@dataclass(frozen=True)
class _TextLayer:
    """One index of texts.

    Attributes:
        name: of its vectors in a lookup.
        status: of its tier.
        key: the catalog's name of the layer.
        threshold: least cosine.
        index: the vectors.
        partition: among which entries one is compared; empty for none.
    """

    name: str
    status: str
    key: str
    threshold: float
    index: VectorIndex | PluggedIndex
    partition: Callable[[VectorRow], str]


@dataclass(frozen=True, slots=True)
class _Run:
    """Media items that were computed together after one text, and how close they are to the request's."""

    media: tuple[str, ...]
    score: float


class SimilarTier:
    """The indexes of all layers.

    Args:
        config: settings. Without ``normalised`` byte-equal texts alone are the same: a question may be similar, what
            stands around it and before an image may not. ``--match any`` takes no texts for the same.
        catalog: where the entries and vectors are.
        layers: of L2.
        hook: fingerprint of what fills them; vectors of another one are left alone.
        encoder: of L1; None switches that off.
        floor: least cosine of a similar question in L1.
        tally: counts what is damaged.
        lost: told of an entry of an index that the catalog does not have.
        index: makes an index of vectors of a length, instead of `VectorIndex`.
    """

    def __init__(
        self,
        config: CacheConfig,
        catalog: Catalog,
        layers: Sequence[EmbeddingLayer],
        hook: str,
        encoder: TextEncoder | None,
        floor: float,
        tally: Tally,
        lost: Callable[[str], None],
        index: Callable[[int], Index] | None = None,
    ) -> None:
        self._catalog, self._tally, self._lost, self._make_index = catalog, tally, lost, index
        self._any, self._normalised = config.match is MatchPolicy.ANY, config.normalised
        self._within_media = config.scope is Scope.MEDIA
        self._vision = next((layer for layer in layers if layer.name == VISION), None)
        self.keys = {layer.name: f"{layer.name}:{layer.dim}@{hook}" for layer in layers}
        self.dims = {layer.name: layer.dim for layer in layers}

        def text_layer(
            name: str, status: str, dim: int, threshold: float, partition: Callable[[VectorRow], str]
        ) -> _TextLayer:
            return _TextLayer(name, status, self.keys[name], threshold, self._index(dim), partition)

        # The prompt layer is searched first; the others are asked whether they agree.
        self._layers = [
            text_layer(x.name, status_of(x.name), x.dim, x.threshold, lambda r: r.space if self._any else r.frame)
            for x in sorted(layers, key=lambda x: x.name != "prompt")
            if x.name != VISION
        ]
        self._question: _TextLayer | None = None
        if encoder is not None:
            self.keys[SEMANTIC], self.dims[SEMANTIC] = f"{SEMANTIC}@{encoder.fingerprint}", encoder.dim
            self._question = text_layer(
                *(SEMANTIC, SEMANTIC, encoder.dim, floor),
                lambda row: row.frame if self._within_media else row.loose_frame,
            )
        self._texts = [*self._layers, *([] if self._question is None else [self._question])]
        self._run_indexes: dict[int, VectorIndex | PluggedIndex] = {}  # by number of media items
        if index is not None and self._vision is not None:  # a wrong one fails here
            self._run_indexes[1] = self._index(self._vision.dim)
        self._members: dict[str, dict[str, None]] = {}  # run item -> its entries, oldest first
        self._run_of: dict[str, str] = {}  # entry -> run item
        self._media_of: dict[str, tuple[str, ...]] = {}  # run item -> media ids
        self._lock = threading.RLock()

    def _index(self, dim: int) -> VectorIndex | PluggedIndex:
        if self._make_index is not None:
            return PluggedIndex(dim, self._make_index, self._tally)
        return VectorIndex(dim)

    # -- keeping the indexes ------------------------------------------------------------------------------------

    def __contains__(self, entry_id: str) -> bool:
        """Whether every text layer has an entry's vector."""
        return all(entry_id in layer.index for layer in self._texts)

    def load(self, rows: Sequence[VectorRow]) -> None:
        """Index texts of the catalog; rows of other layers are ignored, damaged ones counted."""
        for layer in self._texts:
            ready = []
            for row in rows:
                if row.layer == layer.key and (partition := layer.partition(row)):
                    try:
                        vector = unpack(row.data, layer.index.dim)
                        ready.append(Row(row.entry_id, partition, vector))
                    except CorruptValue as error:
                        self._tally.fault("vector", error)
            layer.index.extend(ready)

    def load_media(self, media: Iterable[MediaRow]) -> None:
        """Index images of the catalog; damaged vectors are counted."""
        if self._vision is not None:
            with self._lock:
                for media_row in media:
                    self._add_run(media_row, self._vision.dim)

    def _add_run(self, row: MediaRow, dim: int) -> None:
        partition = row.space if self._any else row.run
        item, count = digest("item", partition, *row.media), len(row.media)
        self._members.setdefault(item, {})[row.entry_id] = None
        self._run_of[row.entry_id] = item
        self._media_of[item] = row.media
        if count not in self._run_indexes:
            self._run_indexes[count] = self._index(dim * count)
        index = self._run_indexes[count]
        if item in index:
            return
        parts = []
        for media in row.media:
            packed = self._catalog.media_vector(row.space, self.keys[VISION], media)
            if packed is None:  # its image could not be read when it was recorded
                return
            try:
                parts.append(unpack(packed, dim))
            except CorruptValue as error:
                self._tally.fault("vector", error)
                return
        index.extend([Row(item, partition, _joined(parts))])

    def indexes(self) -> list[VectorIndex | PluggedIndex]:
        """Those of all layers."""
        with self._lock:
            return [*(layer.index for layer in self._texts), *self._run_indexes.values()]

    def entries(self) -> set[str]:
        """The entries that are known here."""
        found = {entry for layer in self._texts for entry in layer.index.items()}
        with self._lock:
            return found.union(self._run_of)

    def remove(self, entry_ids: Sequence[str]) -> None:
        """Forget entries, and the images that no entry has any more."""
        for layer in self._texts:
            layer.index.remove(entry_ids)
        with self._lock:
            empty: dict[int, list[str]] = {}
            for entry_id in entry_ids:
                item = self._run_of.pop(entry_id, None)
                if item is None:
                    continue
                self._members[item].pop(entry_id, None)
                if not self._members[item]:
                    del self._members[item]
                    empty.setdefault(len(self._media_of.pop(item)), []).append(item)
            for count, items in empty.items():
                self._run_indexes[count].remove(items)

    # -- looking up ---------------------------------------------------------------------------------------------

    def by_chunk_text(self, keyed: Keyed, vector: Vector) -> Iterator[Candidate]:
        """L1: entries whose chunk text is similar, best first; the whole prompt would be the donor's."""
        if self._question is not None:
            frame = keyed.frame(with_media=self._within_media)
            yield from self._similar(keyed, frame, [self._question], {SEMANTIC: vector}, (SEMANTIC,), most=_QUESTIONS)

    def by_layers(self, namespace: Namespace, keyed: Keyed, vectors: Mapping[str, Vector]) -> Iterator[Candidate]:
        """L2: donors, best first.

        Args:
            namespace: of the request.
            keyed: its prompt.
            vectors: unit vectors by layer: [dim], for ``vision`` [n_media, dim].
        """
        if self._any:
            yield from self._best_layer(keyed, vectors)
            return
        runs = self._runs(keyed, vectors)
        for run in runs:
            yield from self._full(namespace, keyed, run, vectors)
        for run in runs:
            yield from self._media_only(namespace, keyed, run)

    def _similar(
        self,
        keyed: Keyed,
        frame: str,
        layers: Sequence[_TextLayer],
        vectors: Mapping[str, Vector],
        agreed: tuple[str, ...],
        seen: Sequence[Score] = (),
        most: int = _NEIGHBOURS,
    ) -> Iterator[Candidate]:
        """Entries of one frame on which every one of these text layers agrees; ``seen`` is what the images scored."""
        first, *others = layers
        for neighbour in first.index.search(frame, vectors[first.name], most) if frame else ():
            if neighbour.score < first.threshold:
                return
            scores = [Score(first.status, neighbour.score)]
            for layer in others:
                score = layer.index.score(neighbour.item, vectors[layer.name])
                if score is None or score < layer.threshold:
                    break
                scores.append(Score(layer.status, score))
            else:
                donor = self._entry(neighbour.item)
                if donor is not None and (
                    self._normalised or same_texts(keyed.segments, donor.segments, keyed.question)
                ):
                    least, *rest = sorted([*scores, *seen], key=lambda score: score.cosine)
                    yield Candidate(donor, len(donor.segments), *least, agreed, tuple(rest))

    def _runs(self, keyed: Keyed, vectors: Mapping[str, Vector]) -> list[_Run]:
        """The media items within which a text may match: the request's own, and where those are new also similar ones.
        A request without media has one run without items."""
        own = _media_ids(keyed)
        found = [_Run(own, 1.0)]
        if not own or self._catalog.has(keyed.media_key()):
            return found
        vector = vectors.get(VISION)
        index = self._run_indexes.get(len(own))
        if vector is None or self._vision is None or index is None:
            return found
        rows = np.atleast_2d(vector)
        for neighbour in index.search(keyed.run(), _joined(list(rows)), _NEIGHBOURS):
            with self._lock:
                media = self._media_of.get(neighbour.item)
            if media is None:
                continue
            least = self._least(keyed.space, media, rows, self._vision.dim) if len(media) > 1 else neighbour.score
            if least >= self._vision.threshold:
                found.append(_Run(media, least))
        return found

    def _least(self, space: str, media: Sequence[str], rows: Vector, dim: int) -> float:
        """The least cosine of several media items, pair by pair; -1.0 where a vector is gone."""
        scores = []
        for media_id, row in zip(media, rows, strict=True):
            packed = self._catalog.media_vector(space, self.keys[VISION], media_id)
            scores.append(-1.0 if packed is None else float(np.dot(unpack(packed, dim), row)))
        return min(scores)

    def _full(
        self, namespace: Namespace, keyed: Keyed, run: _Run, vectors: Mapping[str, Vector]
    ) -> Iterator[Candidate]:
        """Entries within a run whose text is the same or similar."""
        own_media = run.media == _media_ids(keyed)
        within = keyed if own_media else Keyed.of(namespace, with_media(keyed.segments, run.media))
        texts = [layer for layer in self._layers if layer.name in vectors]
        seeing = [status_of(VISION)] if run.media and self._vision is not None else []
        agreed = (*seeing, *(layer.status for layer in texts))
        if agreed:
            chain, kind = (within.folded, "folded") if self._normalised else (within.exact, "exact")
            for donor in self._catalog.find(within.whole(chain, kind), 1):
                yield Candidate(donor, len(donor.segments), agreed[0], run.score, agreed)
        if texts:
            seen = [] if own_media else [Score(status_of(VISION), run.score)]
            yield from self._similar(within, within.frame(), texts, vectors, agreed, seen)

    def _media_only(self, namespace: Namespace, keyed: Keyed, run: _Run) -> Iterator[Candidate]:
        """An entry whose images stand in for the request's, which keeps its own text after them."""
        if keyed.last_media is None or run.media == _media_ids(keyed) or keyed.last_media + 1 >= len(keyed.segments):
            return
        within = Keyed.of(namespace, with_media(keyed.segments, run.media))
        length = keyed.last_media + 1
        for donor in self._catalog.find(within.media_key(), 1 if self._normalised else SPELLINGS):
            if self._normalised or same_texts(keyed.segments[:length], donor.segments):
                yield Candidate(donor, length, status_of(VISION), run.score, (status_of(VISION),))
                return

    def _best_layer(self, keyed: Keyed, vectors: Mapping[str, Vector]) -> Iterator[Candidate]:
        """The best of all layers by score alone, with its whole donor."""
        found: list[tuple[float, str, str]] = []
        for layer in self._layers:
            if layer.name in vectors:
                best = layer.index.search(keyed.space, vectors[layer.name], 1)
                found += [(b.score, layer.status, b.item) for b in best if b.score >= layer.threshold]
        if self._vision is not None and VISION in vectors:
            rows = np.atleast_2d(vectors[VISION])
            index = self._run_indexes.get(len(rows))
            for run in [] if index is None else index.search(keyed.space, _joined(list(rows)), 1):
                with self._lock:
                    member = next(iter(self._members.get(run.item, {})), None)
                if member is not None and run.score >= self._vision.threshold:
                    found.append((run.score, status_of(VISION), member))
        for score, status, entry_id in sorted(found, key=lambda f: -f[0]):
            donor = self._entry(entry_id)
            if donor is not None:
                yield Candidate(donor, len(donor.segments), status, score, (status,))

    def _entry(self, entry_id: str) -> Entry | None:
        donor = self._catalog.get(entry_id)
        if donor is None:  # another process deleted it
            self._lost(entry_id)
        return donor


@dataclass(frozen=True, slots=True)
class _Aligned:
    """How much of a donor stands for the request's: length of the run, and the sentences that differ, in pairs."""

    donor: Entry
    run: int
    changed: tuple[tuple[str, str], ...]


class SimilarContext:
    """L1 for long contexts: entries whose contexts say the same but for a few reworded sentences.

    A sentence encoder reads a few hundred tokens, so a document's vector would stand for its beginning alone. Instead
    its sentences' hashes name stored contexts that share most of them. The best must then agree sentence by sentence,
    but for a few that were reworded, and only those are encoded. The guard may veto one, such as one with another
    number. Without ``normalised`` a sentence that is typed in another way is a changed one, and what is no context has
    to be byte-equal.
    """

    def __init__(self, config: CacheConfig, catalog: Catalog, encoder: TextEncoder, guard: Guard) -> None:
        self._catalog, self._encoder, self._guard = catalog, encoder, guard
        self._with_media, self._threshold = config.scope is Scope.MEDIA, config.similarity_threshold
        self._normalised = config.normalised
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
            donor
            for key in self._catalog.vote(sketch(partition, pieces))
            for donor in self._catalog.find(key, _CONTEXTS)
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
        if len(pairs) > max(1, int(EDITED * len(mine))) or any(self._guard(a, b) for a, b in pairs):
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


def unit_vectors(
    request: Request, raw: Mapping[str, Vector], layers: Sequence[EmbeddingLayer], hook_name: str
) -> dict[str, Vector]:
    """What a hook returned, at length 1: float32 [dim], or [n_media, dim] for ``vision`` of several media items.

    Raises:
        ConfigError: a vector of another length than its layer's.
        ValueError: a vector that is not finite, has no length, or does not come once per media item.
    """
    vectors: dict[str, Vector] = {}
    for layer in layers:
        if layer.name not in raw:
            continue
        vector = np.asarray(raw[layer.name], dtype=np.float32)
        if vector.ndim not in (1, 2) or vector.shape[-1] != layer.dim:
            raise wrong_dimension(layer, vector.shape[-1] if vector.ndim else 0, hook_name)
        expected = max(1, len(request.media)) if layer.name == VISION else 1
        rows = np.atleast_2d(vector)
        if len(rows) != expected:
            raise ValueError(f"layer {layer.name}: {len(rows)} vectors where {expected} belong")
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)  # float32 holds no square of 1e30
        if not np.isfinite(rows).all() or not lengths.all():
            raise ValueError(f"layer {layer.name}: a vector that is zero or not finite")
        unit = (rows / lengths).astype(np.float32)
        vectors[layer.name] = unit[0] if len(unit) == 1 else unit
    return vectors


def wrong_dimension(layer: EmbeddingLayer, dim: int, hook_name: str) -> ConfigError:
    """What is said of a layer whose hook returns vectors of another dimension."""
    allowed = f"{layer.name}:{dim}, the dimension that hook {hook_name} returns"
    return ConfigError("--embedding-layer", f"{layer.name}:{layer.dim}", allowed)


def _media_ids(keyed: Keyed) -> tuple[str, ...]:
    return tuple(s.media_id for s in keyed.segments if hasattr(s, "media_id"))


def _joined(rows: Sequence[Vector]) -> Vector:
    """Unit vectors of several media items as one unit vector, whose inner product is their mean cosine."""
    joined: Vector = (np.concatenate(rows) / np.sqrt(len(rows))).astype(np.float32)
    return joined
