"""``--match any``: the literal reading of "the best layer decides". It exists to be measured.

Whichever single layer scores best brings its whole donor, whatever the other layers say. No guard looks at texts or
pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from semkv.cache import SemanticCache
from semkv.keys import Keyed
from semkv.tiers.matching import Planner
from semkv.tiers.similar import VISION, SimilarTier
from semkv.tiers.tier import Candidate, status_of
from semkv.types import EmbeddingLayer, Entry, Request, Segment

if TYPE_CHECKING:
    from semkv.types import Vector


class BestLayerTier(SimilarTier):
    """Compares a request with all entries of its tenant and model."""

    @staticmethod
    def partition_of(layer: EmbeddingLayer) -> str:
        return "space"

    def by_layers(
        self, request: Request, keyed: Keyed, vectors: Mapping[str, Vector]
    ) -> Iterator[Candidate]:
        """The best of all layers by score alone, with its whole donor."""
        found: list[tuple[float, str, str]] = []
        for layer in self._embedded:
            if layer.name in vectors:
                best = layer.search(keyed.space, vectors[layer.name], 1)
                found += [(one.score, layer.status, one.item) for one in best]
        if VISION in vectors:
            for run in self._similar_media(keyed, keyed.space, vectors[VISION], 1):
                entries = [entry for entry, item in list(self._item_of.items()) if item == run.item]
                found += [(run.score, status_of(VISION), entry) for entry in entries[:1]]
        for score, status, entry_id in sorted(found, key=itemgetter(0), reverse=True):
            donor = self._entry(entry_id)
            if donor is not None:
                yield Candidate(donor, len(donor.segments), status, score, (status,))


class UnguardedPlanner(Planner):
    """Objects to no words, pixels or typing. The policy alone may refuse a candidate."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.guard = lambda _own, _donor: None

    def _may_be_typed_so(
        self, own: Sequence[Segment], run: Sequence[Segment], similar: int | None
    ) -> bool:
        return True

    def _veto(
        self,
        request: Request,
        donor: Entry,
        own: Sequence[Segment],
        run: Sequence[Segment],
        *,
        whole: bool,
    ) -> None:
        return None

    def _least_cosine(self, request: Request, donor: Entry) -> float:
        return 1.0


class BestLayerCache(SemanticCache):
    """A cache in which the best layer decides."""

    planner = UnguardedPlanner
    similar = BestLayerTier
