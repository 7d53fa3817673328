"""Similar texts and images: L1 by the chunk text's sentence vector, L2 by one vector index for each registered layer.

A text layer compares entries that agree on everything but the question. L1 asks its one layer, L2 all of its own. A
similar image may stand in for the request's own only together with the same text before it, and a similar question only
where the images are the same or were substituted too:

    same or similar media, similar text      the donor's image and text
    similar media only                       the donor's image, the request's own text
    similar text, other media                nothing
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, ge
from typing import TYPE_CHECKING

import numpy as np

from semkv import plug
from semkv.config import CacheConfig
from semkv.counting import Tally
from semkv.encoders import wrong_dimension
from semkv.encoders.text import at_unit_length, stands_for, vectors_of
from semkv.encoders.timed import EncoderLateError
from semkv.errors import CorruptValue
from semkv.index import Index, Neighbour, Row, VectorIndex, as_cosine
from semkv.keys import Keyed, with_media
from semkv.periodic import Every
from semkv.stores.catalog import Catalog, MediaRow, VectorRow, unpack
from semkv.tiers.layer import Layer
from semkv.tiers.tier import SEMANTIC, Candidate, status_of
from semkv.tiers.unencoded import Unencoded
from semkv.types import CacheMode, EmbeddingLayer, Entry, Request, Scope, Score
from semkv_guards import spelling

if TYPE_CHECKING:
    from semkv.encoders.text import TextEncoder
    from semkv.types import Vector

VISION = "vision"
# of a layer, and of L1: the next ones are asked when the policy refuses the best
_NEIGHBOURS = 8
_QUESTIONS = 4
_MISSPELLED = 0.3  # least cosine of a text with a slip to the same text without it
_RESPELLED = 2  # pairs of texts that a lookup encodes anew, with slips put right
_SPELLINGS = 64  # entries of one folded text, of which one may have the same characters
_PAGE = 4096
_FOLLOW_S = 1.0  # between two looks for purges
_FEW = 4  # texts of a partition that take less time to compare by words than one takes to encode
_ENCODED = 15  # entries that a lookup encodes beside its own text, the latest of its partition
_ASKED = 512  # entries that are looked for at once; lookups wait for that, a millisecond or so


@dataclass(frozen=True, slots=True)
class _Run:
    """Media items that were computed together after one text, and how close they are to the request's; ``item`` is
    their name in the index."""

    media: tuple[str, ...]
    score: float
    item: str = ""


class SimilarTier:
    """The indexes of all layers, which follow the catalog: what other processes record is read at the next lookup, and
    what they purge is forgotten within a second.

    L1 encodes a text only where there is something to compare it with. So an entry may come without a vector of L1,
    and gets it with the next request of its partition, in the same pass.

    ``hook`` is the fingerprint of what fills the layers of L2; ``encoder`` is that of L1, None switches it off;
    ``least`` is the cosine of a similar question there; ``index`` makes an index instead of `VectorIndex`. What a purge
    has dropped is dropped from memory by ``forgetting``, too.
    """

    def __init__(
        self,
        config: CacheConfig,
        catalog: Catalog,
        hook: str,
        encoder: TextEncoder | None,
        least: float,
        tally: Tally,
        index: Callable[[int], Index] | None = None,
        forgetting: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._forgetting = forgetting
        self._catalog = catalog
        self._tally = tally
        self._encoder = encoder
        self._within_media = config.scope is Scope.MEDIA
        self._most = 1 if config.normalised else _SPELLINGS
        self._certain = config.similarity_threshold
        self._purge: str | None = None
        with tally.boundary("catalog"):
            self._purge = catalog.purge()  # before anything is read

        def layer(
            name: str,
            key: str,
            dim: int,
            threshold: float,
            partition: str,
        ) -> Layer:
            made = VectorIndex(dim) if index is None else plug.require("index", index(dim), Index)
            return Layer(
                name,
                key,
                dim,
                threshold=threshold,
                partition=partition,
                index=made,
                tally=tally,
            )

        self.layers: dict[str, Layer] = {}
        # The prompt layer is searched first; the others are asked whether they agree.
        registered = config.embedding_layers if config.mode is not CacheMode.OFF else ()
        for given in sorted(registered, key=lambda given: given.name != "prompt"):
            partition = self.partition_of(given)
            key = f"{given.name}:{given.dim}@{hook}"
            self.layers[given.name] = layer(given.name, key, given.dim, given.threshold, partition)
        self._vision = self.layers.get(VISION)
        self._embedded = [layer for name, layer in self.layers.items() if name != VISION]
        if encoder is not None:
            key = f"{SEMANTIC}@{encoder.fingerprint}"
            partition = "question_slot" if self._within_media else "any_media_slot"
            self.layers[SEMANTIC] = layer(SEMANTIC, key, encoder.dim, least, partition)
        self._texts = [layer for name, layer in self.layers.items() if name != VISION]
        self._item_of: dict[str, str] = {}  # entry -> item of the media index, oldest first
        self._unencoded = Unencoded()
        self._seen_texts = 0
        self._seen_vectors = 0
        self._seen_media = 0
        self._seen_file = catalog.database.opened
        self._behind = False  # whether the last refresh failed
        self._refreshing = threading.Lock()
        with tally.boundary("catalog"):
            self.refresh()
        self._follower = Every(_FOLLOW_S, self._follow, "semkv-purges")

    @staticmethod
    def partition_of(layer: EmbeddingLayer) -> str:
        """Which field of a catalog's row says what a layer of L2 compares with each other."""
        return "media_prefix" if layer.name == VISION else "question_slot"

    def close(self) -> None:
        """Forget what was purged, and stop the indexes' upkeep."""
        self._follower.stop()
        self._follow()
        for layer in self.layers.values():
            layer.close()

    # -- keeping up with the catalog ----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Index what was written since the last time, by this process or another; damaged vectors are counted."""
        with self._refreshing:
            self._behind = True  # the catalog reports others' writes once: where this fails, the next lookup reads them
            opened = self._catalog.database.opened
            if self._seen_file != opened:  # a new file numbers its rows anew
                self._seen_file = opened
                self._seen_texts = 0
                self._seen_vectors = 0
                self._seen_media = 0
            # Before the vectors: one that is written in between takes its entry out again.
            while self._encoder is not None and self._read_texts(self.layers[SEMANTIC]):
                pass
            keys = [layer.key for layer in self._texts]
            while rows := self._catalog.vectors(keys, self._seen_vectors, _PAGE):
                self._add_texts(rows)
                self._seen_vectors = rows[-1].number
            while self._vision is not None and self._read_media(self._vision):
                pass
            self._behind = False

    def _read_texts(self, layer: Layer) -> bool:
        """Note which of the next entries have no vector of L1; whether there were any entries."""
        rows = self._catalog.text_rows(layer.key, self._seen_texts, _PAGE)
        for row in rows:
            if not row.encoded and row.entry_id not in layer.items:
                self._unencoded.add(row.entry_id, getattr(row, layer.partition))
        if rows:
            self._seen_texts = rows[-1].number
        return bool(rows)

    def _read_media(self, layer: Layer) -> bool:
        """Index the images of the next entries; whether there were any entries."""
        rows = self._catalog.media_rows(self._seen_media, _PAGE)
        for row in rows:
            self._add_media(row, layer)
        if rows:
            self._seen_media = rows[-1].number
        return bool(rows)

    def _add_texts(self, rows: Sequence[VectorRow]) -> None:
        for layer in self._texts:
            ready = []
            for row in rows:
                partition = getattr(row, layer.partition)
                if row.layer != layer.key or not partition:
                    continue
                with self._tally.boundary("vector"):
                    vector = unpack(row.data, layer.dim)
                    ready.append(Row(row.entry_id, partition, vector))
            layer.extend(ready)
            if layer.name == SEMANTIC:
                self._unencoded.discard(row.item for row in ready)

    def _add_media(self, row: MediaRow, layer: Layer) -> None:
        """Several images are found by the first of them, and then compared one by one."""
        partition = getattr(row, layer.partition)
        item = " ".join((partition, *row.media))
        self._item_of[row.entry_id] = item
        if item in layer.items:
            return
        packed = [self._catalog.media_vector(row.space, layer.key, media) for media in row.media]
        first = packed[0]
        if first is None or None in packed:  # an image could not be read when it was recorded
            return
        with self._tally.boundary("vector"):
            vector = unpack(first, layer.dim)
            layer.extend([Row(item, partition, vector)])

    def _follow(self) -> None:
        """Forget what was purged since the last time, by this process or another: vectors, and texts."""
        with self._tally.boundary("purge"):  # user code may be in it
            if self._catalog.changed() or self._behind:
                self.refresh()
            purge = self._catalog.purge()
            if purge == self._purge:
                return
            # A refresh that read rows from before the purge has put them into the indexes by now.
            with self._refreshing:
                known = self._unencoded.entries() | self._item_of.keys()
                for layer in self._texts:
                    known |= layer.items.keys()
            self.remove(list(known))
            for forget in self._forgetting:
                with self._tally.boundary("purge"):
                    forget()
            self._purge = purge

    def remove(self, entry_ids: Sequence[str]) -> None:
        """Forget those of some entries that the catalog does not have, and the images that no entry has any more."""
        for start in range(0, len(entry_ids), _ASKED):
            asked = entry_ids[start : start + _ASKED]
            # What is recorded again meanwhile is indexed after this, and stays.
            with self._refreshing:
                gone = self._catalog.missing(asked)
                for layer in self._texts:
                    layer.remove(gone)
                self._unencoded.discard(gone)
                self._remove_media(gone)

    def _remove_media(self, gone: Sequence[str]) -> None:
        """Forget the images of entries that are gone, but for those that another entry has."""
        items = {self._item_of.pop(entry_id) for entry_id in gone if entry_id in self._item_of}
        if items and self._vision is not None:
            self._vision.remove(items.difference(self._item_of.values()))

    # -- looking up ---------------------------------------------------------------------------------------------

    def slots(self, keyed: Keyed) -> set[str]:
        """The partitions in which the layers compare a prompt."""
        named = {
            "space": keyed.space,
            "media_prefix": keyed.media_prefix(),
            "question_slot": keyed.question_slot(),
            "any_media_slot": keyed.question_slot(with_media=False),
        }
        return {named[layer.partition] for layer in self.layers.values()} - {""}

    @property
    def text_key(self) -> str:
        """The catalog's name of L1's layer; empty where it is off."""
        return self.layers[SEMANTIC].key if SEMANTIC in self.layers else ""

    def text_slot(self, keyed: Keyed) -> str:
        """The partition in which L1 compares a prompt; empty where it has no question."""
        return keyed.question_slot(with_media=self._within_media)

    def has_texts(self, keyed: Keyed) -> bool:
        """Whether L1 has anything to compare a request with."""
        slot = self.text_slot(keyed)
        return bool(slot) and (slot in self.layers[SEMANTIC].members or slot in self._unencoded)

    def few_texts(self, keyed: Keyed) -> Iterator[str]:
        """The texts that L1 has to compare a request with, where they are few; none where they are many."""
        slot = self.text_slot(keyed)
        with self._refreshing:
            known = [*self.layers[SEMANTIC].members.get(slot, ())]
            waiting = self._unencoded.of(slot, _FEW + 1)
        if len(known) + len(waiting) <= _FEW:
            for entry_id in (*waiting, *known):
                yield from self._texts_of([entry_id]).values()

    def stands_for(self, text: str) -> bool:
        """Whether a text's vector would stand for all of it."""
        return self._encoder is not None and stands_for(self._encoder, text)

    def encoded(self, keyed: Keyed, text: str) -> Vector | None:
        """The unit vector of a request's chunk text, once what it is to be compared with has vectors: those that have
        none yet get theirs in the same pass. None where its vector would not stand for all of it."""
        if not self.stands_for(text):
            return None
        slot = self.text_slot(keyed)
        with self._refreshing:
            waiting = self._unencoded.of(slot, _ENCODED)
        texts = self._texts_of(waiting)
        own, *others = self._vectors(text, texts.values())
        vectors = dict(zip(texts, others, strict=True))
        self._take(slot, vectors)
        return own

    def _texts_of(self, entry_ids: Sequence[str]) -> dict[str, str]:
        """The chunk texts of entries, by their ids."""
        found: dict[str, str] = {}
        for entry_id in entry_ids:
            entry = None
            try:
                entry = self._catalog.get(entry_id)
            except CorruptValue as error:  # the catalog has deleted the row
                self._tally.fault("catalog", error)
            if entry is not None:
                found[entry_id] = entry.chunk_text
        gone = [entry_id for entry_id in entry_ids if entry_id not in found]
        with self._refreshing:
            self._unencoded.discard(gone)
        return found

    def _vectors(self, text: str, others: Collection[str]) -> list[Vector | None]:
        """The vectors of a request's text and of entries' texts. An entry's text on which the encoder fails gets none
        and leaves the others alone."""
        assert self._encoder is not None
        try:
            return vectors_of(self._encoder, [text, *others])
        except Exception as error:
            if not others or isinstance(error, EncoderLateError):
                raise
            found = vectors_of(self._encoder, [text])  # raises where the encoder fails on any text
            self._tally.fault("vector", error)
        for other in others:
            vector: list[Vector | None] = [None]
            with self._tally.boundary("vector"):
                vector = vectors_of(self._encoder, [other])
            found += vector
        return found

    def _take(self, slot: str, vectors: Mapping[str, Vector | None]) -> None:
        """Index the vectors of entries, and keep them with the next write. An entry that got none is not asked for
        again before the next start."""
        layer = self.layers[SEMANTIC]
        with self._refreshing:
            gone = set(self._catalog.missing(list(vectors))) if vectors else set()
            rows = [
                Row(entry_id, slot, vector)
                for entry_id, vector in vectors.items()
                if vector is not None and entry_id not in gone
            ]
            layer.extend(rows)
            self._unencoded.discard(vectors)
        for row in rows:
            self._catalog.keep_vector(row.item, layer.key, row.vector)

    def by_chunk_text(self, keyed: Keyed, vector: Vector) -> Iterator[Candidate]:
        """L1: entries whose chunk text is similar, best first; the whole prompt would be the donor's."""
        slot = self.text_slot(keyed)
        layers = [self.layers[SEMANTIC]]
        yield from self._similar(
            keyed, slot, layers, {SEMANTIC: vector}, (SEMANTIC,), most=_QUESTIONS
        )

    def by_spelling(self, keyed: Keyed, text: str, vector: Vector) -> Iterator[Candidate]:
        """L1: entries whose chunk text is similar once what is misspelled in either is put right.

        An encoder reads a misspelled word as pieces of others, so such texts are looked for below the threshold, and
        once more where a policy looks below it. Those that stay below are proposed to be turned down, so that operators
        see them.
        """
        slot = self.text_slot(keyed)
        layer = self.layers[SEMANTIC]
        left = _RESPELLED
        for neighbour in layer.search(slot, vector, _QUESTIONS, _MISSPELLED):
            is_misspelled = neighbour.score < self._certain and left > 0
            donor = self._entry(neighbour.item) if is_misspelled else None
            if donor is None:
                continue
            pair = spelling.alike(text, donor.chunk_text)
            score = neighbour.score
            if pair != (text, donor.chunk_text):
                left -= 1
                score = cosine_of(self._encoder, *pair)
            elif score >= layer.threshold:
                continue  # unchanged it was a candidate before
            run = len(donor.segments)
            agreed = (SEMANTIC,)
            yield Candidate(donor, run, SEMANTIC, score, agreed, similar=keyed.question)

    def by_layers(
        self, request: Request, keyed: Keyed, vectors: Mapping[str, Vector]
    ) -> Iterator[Candidate]:
        """L2: donors, best first; ``vectors`` are unit vectors by layer: [dim], for ``vision`` [n_media, dim]."""
        runs = self._runs(keyed, vectors)
        # The prompt as it would be with each run's media in it.
        prompts = [
            (run, Keyed(request.namespace, with_media(keyed.segments, run.media)))
            for run in runs[1:]
        ]
        for run, within in [(runs[0], keyed), *prompts]:
            yield from self._whole(within, run, vectors)
        for run, within in prompts:
            yield from self._media_only(within, run)

    def _similar(
        self,
        keyed: Keyed,
        slot: str,
        layers: Sequence[Layer],
        vectors: Mapping[str, Vector],
        agreed: tuple[str, ...],
        seen: Sequence[Score] = (),
        most: int = _NEIGHBOURS,
    ) -> Iterator[Candidate]:
        """Entries of one question slot on which all these text layers agree; ``seen`` is what the images scored."""
        first, *others = layers
        for neighbour in first.search(slot, vectors[first.name], most) if slot else ():
            cosines = [layer.score(neighbour.item, vectors[layer.name]) for layer in others]
            least = [layer.threshold for layer in others]
            donor = None
            if all(map(ge, cosines, least)):
                donor = self._entry(neighbour.item)
            if donor is None:
                continue
            names = [layer.status for layer in layers]
            scores = list(map(Score, names, [neighbour.score, *cosines]))
            scores += seen
            worst, *rest = sorted(scores, key=attrgetter("cosine"))
            yield Candidate(
                donor,
                len(donor.segments),
                tier=worst.tier,
                score=worst.cosine,
                agreed=agreed,
                others=tuple(rest),
                similar=keyed.question,
            )

    def _runs(self, keyed: Keyed, vectors: Mapping[str, Vector]) -> list[_Run]:
        """The media items within which a text may match: the request's own, and where those are new also similar ones.
        A request without media has one run without items."""
        own = _Run(_media_ids(keyed), 1.0)
        if not own.media or VISION not in vectors or self._catalog.has(keyed.media_key()):
            return [own]
        return [
            own,
            *self._similar_media(keyed, keyed.media_prefix(), vectors[VISION], _NEIGHBOURS),
        ]

    def _similar_media(
        self, keyed: Keyed, partition: str, vector: Vector, most: int
    ) -> Iterator[_Run]:
        """Media items above the threshold, each of them, the nearest first."""
        if self._vision is None:
            return
        rows = np.atleast_2d(vector)
        for neighbour in self._vision.search(partition, rows[0], most):
            media = tuple(neighbour.item.split()[1:])
            if len(media) == len(rows):
                score = self._least(self._vision, keyed.space, media, rows, neighbour)
                if score >= self._vision.threshold:
                    yield _Run(media, score, neighbour.item)

    def _least(
        self, layer: Layer, space: str, media: Sequence[str], rows: Vector, first: Neighbour
    ) -> float:
        """The least cosine of several media items, pair by pair; -1.0 where a vector is gone."""
        scores = [first.score]
        for media_id, row in zip(media[1:], rows[1:], strict=True):
            packed = self._catalog.media_vector(space, layer.key, media_id)
            scores.append(-1.0 if packed is None else float(np.dot(unpack(packed, layer.dim), row)))
        return min(scores)

    def _whole(
        self, within: Keyed, run: _Run, vectors: Mapping[str, Vector]
    ) -> Iterator[Candidate]:
        """Entries within a run whose text is the same or similar."""
        texts = [layer for layer in self._embedded if layer.name in vectors]
        seeing = [status_of(VISION)] if run.media and self._vision is not None else []
        agreed = (*seeing, *(layer.status for layer in texts))
        if agreed:
            for donor in self._catalog.find(within.folded_key(len(within.segments)), self._most):
                yield Candidate(donor, len(donor.segments), agreed[0], run.score, agreed)
        if texts:
            seen = [Score(status_of(VISION), run.score)] if run.item else []
            yield from self._similar(within, within.question_slot(), texts, vectors, agreed, seen)

    def _media_only(self, within: Keyed, run: _Run) -> Iterator[Candidate]:
        """Entries whose images stand in for the request's, which keeps its own text after them."""
        length = 0 if within.last_media is None else within.last_media + 1
        if length < len(within.segments):
            for donor in self._catalog.find(within.media_key(), self._most):
                yield Candidate(donor, length, status_of(VISION), run.score, (status_of(VISION),))

    def _entry(self, entry_id: str) -> Entry | None:
        donor = self._catalog.get(entry_id)
        if donor is None:  # another process deleted it
            self._tally.add("index out of step")
            self.remove([entry_id])
        return donor


def cosine_of(encoder: TextEncoder | None, mine: str, theirs: str) -> float:
    """The cosine of two texts; -1, the least, where a vector would not stand for all of one."""
    if encoder is None:
        return -1.0
    first, second = vectors_of(encoder, [mine, theirs])
    return -1.0 if first is None or second is None else as_cosine(float(first @ second))


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
        unit = at_unit_length(rows)
        vectors[layer.name] = unit[0] if len(unit) == 1 else unit
    return vectors


def _media_ids(keyed: Keyed) -> tuple[str, ...]:
    return tuple(s.media_id for s in keyed.segments if hasattr(s, "media_id"))
