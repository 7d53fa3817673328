"""L2: similar images and similar questions, one vector index per registered layer.

Under ``--match all`` a similar image may stand in for the request's own only together with the same text before it,
and a similar question only where the images are the same or were substituted too:

    same or similar media, similar text      the donor's image and text
    similar media only                       the donor's image, the request's own text
    similar text, other media                nothing

``--match any`` is the literal reading of "the best layer decides": whichever single layer scores best brings its whole
donor, whatever the other layers say. It exists to be measured.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semkv.errors import CorruptValue
from semkv.index import Neighbour, Row, VectorIndex
from semkv.keys import digest
from semkv.stores.catalog import Catalog
from semkv.stores.catalog_rows import MediaRow, VectorRow, unpack
from semkv.stores.kept_graphs import KeptGraphs, kept_beside
from semkv.tiers.base import Candidate, Tally
from semkv.tiers.keying import SPELLINGS, Keyed, same_texts, with_media
from semkv.types import EmbeddingLayer, Entry, MatchPolicy, Namespace, Score

if TYPE_CHECKING:
    from semkv.types import Vector

VISION = "vision"
_NEIGHBOURS = 8


def status_of(layer: str) -> str:
    """``embedding:<layer>``, the key of a layer's status."""
    return f"embedding:{layer}"


@dataclass(frozen=True, slots=True)
class _Run:
    """Media items that were computed together after one text, and how close they are to the request's."""

    media: tuple[str, ...]
    score: float


class EmbeddingTier:
    """The indexes of all layers.

    Args:
        catalog: where the entries and vectors are.
        layers: as configured.
        match: see `MatchPolicy`.
        fingerprint: of the hook; vectors of another one are left alone.
        tally: counts what is damaged.
        lost: told of an entry of an index that the catalog does not have.
        normalised: False takes byte-equal texts alone for the same: a question may be similar, what stands around it
            and before an image may not. ``--match any`` takes no texts for the same, and is as it was.
    """

    def __init__(
        self,
        catalog: Catalog,
        layers: Sequence[EmbeddingLayer],
        match: MatchPolicy,
        fingerprint: str,
        tally: Tally,
        lost: Callable[[str], None],
        *,
        normalised: bool = True,
    ) -> None:
        self._catalog, self._match, self._tally, self._lost = catalog, match, tally, lost
        self._normalised = normalised
        self._vision = next((layer for layer in layers if layer.name == VISION), None)
        # The prompt layer is searched first; the others are asked whether they agree.
        self._texts = sorted((x for x in layers if x.name != VISION), key=lambda x: x.name != "prompt")
        self.keys = {layer.name: f"{layer.name}:{layer.dim}@{fingerprint}" for layer in layers}
        self._text_indexes = {x.name: VectorIndex(x.dim, kept=self._kept(self.keys[x.name])) for x in self._texts}
        self._run_indexes: dict[int, VectorIndex] = {}  # by number of media items
        self._members: dict[str, dict[str, None]] = {}  # run item -> its entries, oldest first
        self._run_of: dict[str, str] = {}  # entry -> run item
        self._media_of: dict[str, tuple[str, ...]] = {}  # run item -> media ids
        self._lock = threading.RLock()

    def __contains__(self, entry_id: str) -> bool:
        """Whether every text layer has an entry's vector."""
        return all(entry_id in index for index in self._text_indexes.values())

    def _kept(self, layer: str) -> KeptGraphs:
        return kept_beside(self._catalog, layer, functools.partial(self._tally.fault, "graph"))

    # -- keeping the indexes ------------------------------------------------------------------------------------

    def load(self, rows: Iterable[VectorRow]) -> None:
        """Index texts of the catalog; rows of other layers are ignored, damaged ones counted."""
        names = {key: name for name, key in self.keys.items() if name != VISION}
        ready: dict[str, list[Row]] = {name: [] for name in names.values()}
        for row in rows:
            name = names.get(row.layer)
            partition = row.space if self._match is MatchPolicy.ANY else row.frame
            if name is None or not partition:
                continue
            try:
                ready[name].append(
                    Row(row.entry_id, partition, unpack(row.data, self._text_indexes[name].dim), row.space)
                )
            except CorruptValue as error:
                self._tally.fault("vector", error)
        for name, found in ready.items():
            self._text_indexes[name].extend(found)

    def load_media(self, media: Iterable[MediaRow]) -> None:
        """Index images of the catalog; damaged vectors are counted."""
        if self._vision is not None:
            with self._lock:
                for media_row in media:
                    self._add_run(media_row, self._vision)

    def _add_run(self, row: MediaRow, vision: EmbeddingLayer) -> None:
        partition = self._run_partition(row.space, row.run)
        item = digest("item", partition, *row.media)
        self._members.setdefault(item, {})[row.entry_id] = None
        self._run_of[row.entry_id] = item
        self._media_of[item] = row.media
        index = self._run_index(len(row.media), vision)
        if item in index:
            return
        parts = []
        for media in row.media:
            packed = self._catalog.media_vector(row.space, self.keys[VISION], media)
            if packed is None:  # its image could not be read when it was recorded
                return
            try:
                parts.append(unpack(packed, vision.dim))
            except CorruptValue as error:
                self._tally.fault("vector", error)
                return
        index.extend([Row(item, partition, _joined(parts), row.space)])

    def _run_index(self, count: int, vision: EmbeddingLayer) -> VectorIndex:
        if count not in self._run_indexes:
            kept = self._kept(f"{self.keys[VISION]} of {count}")
            self._run_indexes[count] = VectorIndex(vision.dim * count, kept=kept)
        return self._run_indexes[count]

    def _run_partition(self, space: str, run: str) -> str:
        return space if self._match is MatchPolicy.ANY else run

    def indexes(self) -> list[VectorIndex]:
        """Those of all layers."""
        with self._lock:
            return [*self._text_indexes.values(), *self._run_indexes.values()]

    def entries(self) -> set[str]:
        """The entries that are known here."""
        found = {entry for index in self._text_indexes.values() for entry in index.items()}
        with self._lock:
            return found.union(self._run_of)

    def remove(self, entry_ids: Iterable[str]) -> None:
        """Forget entries, and the images that no entry has any more."""
        gone = list(entry_ids)
        for index in self._text_indexes.values():
            index.remove(gone)
        with self._lock:
            empty: dict[int, list[str]] = {}
            for entry_id in gone:
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

    def candidates(self, namespace: Namespace, keyed: Keyed, vectors: Mapping[str, Vector]) -> Iterator[Candidate]:
        """Donors, best first.

        Args:
            namespace: of the request.
            keyed: its prompt.
            vectors: unit vectors by layer: [dim], for ``vision`` [n_media, dim].
        """
        if self._match is MatchPolicy.ANY:
            yield from self._any(keyed, vectors)
            return
        runs = self._runs(keyed, vectors)
        for run in runs:
            yield from self._full(namespace, keyed, run, vectors)
        for run in runs:
            yield from self._media_only(namespace, keyed, run)

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
            least = self._least(keyed.space, media, rows) if len(media) > 1 else neighbour.score
            if least >= self._vision.threshold:
                found.append(_Run(media, least))
        return found

    def _least(self, space: str, media: Sequence[str], rows: Vector) -> float:
        """The least cosine of several media items, pair by pair; -1.0 where a vector is gone."""
        assert self._vision is not None
        scores = []
        for media_id, row in zip(media, rows, strict=True):
            packed = self._catalog.media_vector(space, self.keys[VISION], media_id)
            scores.append(-1.0 if packed is None else float(np.dot(unpack(packed, self._vision.dim), row)))
        return min(scores)

    def _full(
        self, namespace: Namespace, keyed: Keyed, run: _Run, vectors: Mapping[str, Vector]
    ) -> Iterator[Candidate]:
        """Entries within a run whose text is the same or similar."""
        within = keyed
        if run.media != _media_ids(keyed):
            within = Keyed.of(namespace, with_media(keyed.segments, run.media))
        texts = [layer.name for layer in self._texts if layer.name in vectors]
        seeing = [VISION] if run.media and self._vision is not None else []
        if seeing or texts:
            chain, kind = (within.folded, "folded") if self._normalised else (within.exact, "exact")
            for donor in self._catalog.find(within.whole(chain, kind), 1):
                decided = seeing or texts
                agreed = tuple(status_of(name) for name in (*seeing, *texts))
                yield Candidate(donor, len(donor.segments), status_of(decided[0]), run.score, agreed)
        frame = within.frame()
        if not texts or not frame:
            return
        agreed = tuple(status_of(name) for name in (*seeing, *texts))
        seen = [Score(status_of(VISION), run.score)] if run.media != _media_ids(keyed) else []
        for entry_id, scores in self._similar_texts(frame, texts, vectors):
            donor_entry = self._entry(entry_id)
            if donor_entry is None:
                continue
            if self._normalised or same_texts(within.segments, donor_entry.segments, within.question):
                least, *others = sorted([*scores, *seen], key=lambda score: score.cosine)
                yield Candidate(donor_entry, len(donor_entry.segments), *least, agreed, tuple(others))

    def _similar_texts(
        self, frame: str, texts: Sequence[str], vectors: Mapping[str, Vector]
    ) -> Iterator[tuple[str, list[Score]]]:
        """Entries on which every text layer agrees, with what each scored."""
        thresholds = {layer.name: layer.threshold for layer in self._texts}
        first, *others = texts
        for neighbour in self._text_indexes[first].search(frame, vectors[first], _NEIGHBOURS):
            if neighbour.score < thresholds[first]:
                return
            scores = {first: neighbour.score}
            for name in others:
                score = self._text_indexes[name].score(neighbour.item, vectors[name])
                scores[name] = -1.0 if score is None else score
            if all(scores[name] >= thresholds[name] for name in texts):
                yield neighbour.item, [Score(status_of(name), score) for name, score in scores.items()]

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

    def _any(self, keyed: Keyed, vectors: Mapping[str, Vector]) -> Iterator[Candidate]:
        """The best of all layers by score alone, with its whole donor."""
        found: list[tuple[float, str, str]] = []
        for layer in self._texts:
            if layer.name in vectors:
                best = self._text_indexes[layer.name].search(keyed.space, vectors[layer.name], 1)
                found += [(b.score, layer.name, b.item) for b in best if b.score >= layer.threshold]
        if self._vision is not None and VISION in vectors:
            for run in self._best_run(keyed, vectors[VISION]):
                with self._lock:
                    members = next(iter(self._members.get(run.item, {})), None)
                if members is not None and run.score >= self._vision.threshold:
                    found.append((run.score, VISION, members))
        for score, name, entry_id in sorted(found, key=lambda f: -f[0]):
            donor = self._entry(entry_id)
            if donor is not None:
                yield Candidate(donor, len(donor.segments), status_of(name), score, (status_of(name),))

    def _best_run(self, keyed: Keyed, vector: Vector) -> list[Neighbour]:
        rows = np.atleast_2d(vector)
        index = self._run_indexes.get(len(rows))
        return [] if index is None else index.search(keyed.space, _joined(list(rows)), 1)

    def _entry(self, entry_id: str) -> Entry | None:
        donor = self._catalog.get(entry_id)
        if donor is None:  # another process deleted it
            self._lost(entry_id)
        return donor


def _media_ids(keyed: Keyed) -> tuple[str, ...]:
    return tuple(s.media_id for s in keyed.segments if hasattr(s, "media_id"))


def _joined(rows: Sequence[Vector]) -> Vector:
    """Unit vectors of several media items as one unit vector, whose inner product is their mean cosine."""
    joined: Vector = (np.concatenate(rows) / np.sqrt(len(rows))).astype(np.float32)
    return joined
