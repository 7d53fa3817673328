"""L1: a similar question after the same prompt, by sentence vectors of the chunk text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from semkv.encoders.text import TextEncoder
from semkv.errors import CorruptValue
from semkv.index import Row, VectorIndex
from semkv.stores.catalog import Catalog
from semkv.stores.catalog_rows import VectorRow, unpack
from semkv.stores.kept_graphs import kept_beside
from semkv.tiers.base import Candidate, Tally
from semkv.tiers.keying import Keyed, same_texts
from semkv.types import Scope

if TYPE_CHECKING:
    from semkv.types import Vector

STATUS = "semantic_text"
_NEIGHBOURS = 4  # the next ones are asked when the decider refuses the best


class SemanticTextTier:
    """Compares chunk texts among entries that agree on everything but the question.

    Args:
        catalog: where the entries are.
        encoder: of the chunk text.
        scope: ``media`` compares within the same images; ``any`` takes all images as one.
        threshold: least cosine.
        lost: told of an entry of the index that the catalog does not have.
        normalised: False takes only donors of which all texts but the question, which is compared, are byte-equal.
    """

    def __init__(
        self,
        catalog: Catalog,
        encoder: TextEncoder,
        scope: Scope,
        threshold: float,
        tally: Tally,
        lost: Callable[[str], None],
        *,
        normalised: bool = True,
    ) -> None:
        self._catalog, self._encoder, self._tally = catalog, encoder, tally
        self._scope, self._threshold, self._lost, self._normalised = scope, threshold, lost, normalised
        self.layer = f"{STATUS}@{encoder.fingerprint}"
        kept = kept_beside(catalog, self.layer, functools.partial(tally.fault, "graph"))
        self._index = VectorIndex(encoder.dim, kept=kept)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._index

    def load(self, rows: Iterable[VectorRow]) -> None:
        """Index what the catalog holds; rows of other layers are ignored, damaged ones counted."""
        ready = []
        for row in rows:
            if row.layer != self.layer:
                continue
            frame = row.frame if self._scope is Scope.MEDIA else row.loose_frame
            try:
                ready.append(Row(row.entry_id, frame, unpack(row.data, self._index.dim), row.space))
            except CorruptValue as error:
                self._tally.fault("vector", error)
        self._index.extend(row for row in ready if row.partition)

    def indexes(self) -> list[VectorIndex]:
        return [self._index]

    def entries(self) -> set[str]:
        """The entries that are known here."""
        return set(self._index.items())

    def remove(self, entry_ids: Iterable[str]) -> None:
        self._index.remove(entry_ids)

    def vector(self, text: str) -> Vector | None:
        """The chunk text's unit vector, or None for an empty text and one beyond the encoder's window."""
        if not text.strip() or not self._encoder.fits(text):
            return None
        found: Vector = self._encoder.encode([text])[0]
        return found

    def candidates(self, keyed: Keyed, vector: Vector) -> Iterator[Candidate]:
        """Entries whose chunk text is similar, best first; the whole prompt would be the donor's."""
        frame = keyed.frame(with_media=self._scope is Scope.MEDIA)
        for neighbour in self._index.search(frame, vector, _NEIGHBOURS) if frame else ():
            if neighbour.score < self._threshold:
                return
            donor = self._catalog.get(neighbour.item)
            if donor is None:  # another process deleted it
                self._lost(neighbour.item)
                continue
            if self._normalised or same_texts(keyed.segments, donor.segments, keyed.question):
                yield Candidate(donor, len(donor.segments), STATUS, neighbour.score, (STATUS,))
