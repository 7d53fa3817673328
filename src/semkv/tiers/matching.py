"""The matching tiers over one catalog, asked in their order, and what the catalog keeps of a request.

The order is L0.5 exact text, L2 embedding, L1 semantic text, and then the user's own. The first candidate that the
planner lets through ends a lookup. Every tier is asked for a donor of the whole prompt before any is for one of its
beginning: each later turn of a conversation has the beginning of an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv import plug
from semkv.config import CacheConfig
from semkv.encoders.hooks import EmbeddingHook
from semkv.errors import ConfigError, CorruptValue
from semkv.keys import digest
from semkv.stores.catalog import Catalog, Record, unpack
from semkv.tiers.base import EXACT, SEMANTIC, Candidate, Tally, Tier, as_cosine, status_of
from semkv.tiers.plan import Lookup, Planner
from semkv.tiers.prompt_keys import Keyed, context_rows, entry_of, has_chunk_text
from semkv.tiers.similar import VISION, SimilarContext, SimilarTier, unit_vectors
from semkv.types import (
    Entry,
    MediaSegment,
    Request,
    ReuseReport,
    Scope,
    Status,
)

if TYPE_CHECKING:
    from semkv.encoders.text import TextEncoder
    from semkv.types import Vector

_DONORS = 4  # of one text: the next ones are asked when the policy refuses the first
_SPELLINGS = 64  # entries of one folded text, of which one may have the same characters


class Matching:
    """The tiers that the settings name, over one catalog. Any thread may call any method.

    Without an ``encoder`` there is no semantic text tier. ``tiers`` are the user's own.

    Raises:
        ConfigError: a tier is none, or has the name of another.
    """

    def __init__(
        self,
        config: CacheConfig,
        catalog: Catalog,
        hook: EmbeddingHook,
        encoder: TextEncoder | None,
        planner: Planner,
        similar: SimilarTier,
        tally: Tally,
        tiers: Sequence[Tier] = (),
    ) -> None:
        self._config, self._catalog, self._hook, self._planner, self._tally = config, catalog, hook, planner, tally
        self._encoder, self._similar = encoder, similar
        self._tiers: tuple[Tier, ...] = tuple(plug.require("tiers", tier, Tier) for tier in tiers)
        built_in = (EXACT, *(status_of(layer.name) for layer in config.embedding_layers), SEMANTIC)
        taken = [*built_in, "kv_cache", "fusion"]  # the last two an engine adds
        for tier in self._tiers:
            if tier.name in taken:
                raise ConfigError("tiers", tier.name, f"names that differ, and from {', '.join(sorted(taken))}")
            taken.append(tier.name)
        self._names = (*built_in, *(tier.name for tier in self._tiers))
        self._contexts = None
        if encoder is not None and config.normalised:
            self._contexts = SimilarContext(config, catalog, encoder, planner.guard)

    def warm_up(self) -> None:
        """Run the text encoder once."""
        with self._tally.boundary("encoder"):
            self._chunk_vector("warm up")

    # -- looking up ---------------------------------------------------------------------------------------------

    def statuses(self) -> dict[str, Status]:
        """``skip`` for every tier, as before it was asked."""
        return dict.fromkeys(self._names, Status.SKIP)

    def look_up(self, request: Request, given: Mapping[str, Vector] | None) -> Lookup:
        """Ask the tiers; ``given`` are vectors by layer, instead of the hook's.

        Raises:
            ConfigError: the hook returns vectors of another dimension than a layer was given.
        """
        found = Lookup(request, self.statuses())
        with self._tally.boundary("request"):
            keyed = Keyed(request.namespace, request.segments)
            with self._tally.boundary("catalog"):
                if self._catalog.changed():
                    self._similar.refresh()
            asked = (
                (EXACT, self._exact(found, keyed)),
                ("embedding", self._by_layers(found, keyed, given)),
                (SEMANTIC, self._by_meaning(found, keyed)),
                *((tier.name, self._plugged(found, keyed, tier)) for tier in self._tiers),
                # A shared system prompt or image alone is no hit: vLLM's prefix cache has it.
                (EXACT, self._equal(keyed, reversed(keyed.context_depths()))),
                (SEMANTIC, self._contexts.candidates(keyed) if self._contexts is not None else ()),
            )
            for name, candidates in asked:
                with self._tally.boundary(name):
                    self._planner.take(found, candidates)
                if found.plan is not None:
                    break
        return found

    def _exact(self, found: Lookup, keyed: Keyed) -> Iterator[Candidate]:
        if self._config.exact:
            found.statuses[EXACT] = Status.MISS
            yield from self._equal(keyed, [len(keyed.segments)])

    def _equal(self, keyed: Keyed, depths: Iterable[int]) -> Iterator[Candidate]:
        """L0.5: donors of the same leading run, byte for byte or but for what `keys.normalise` folds. Of one length the
        byte-equal ones come first, then the oldest. With ``--scope any`` media items are all alike.
        """
        with_media = self._config.scope is Scope.MEDIA
        most = _DONORS if self._config.normalised or with_media else _SPELLINGS
        for depth in depths if self._config.exact else ():
            for key in (keyed.exact_key, partial(keyed.folded_key, with_media=with_media)):
                for donor in self._catalog.find(key(depth), most):
                    yield Candidate(donor, depth, EXACT, 1.0, (EXACT,))

    def _by_layers(self, found: Lookup, keyed: Keyed, given: Mapping[str, Vector] | None) -> Iterator[Candidate]:
        layers = [layer.name for layer in self._config.embedding_layers]
        vectors = self._embedded(found.request, given) if layers else {}
        # Where the hook failed that is a miss, not a layer without input.
        found.statuses.update({status_of(name): Status.MISS for name in (layers if vectors is None else vectors)})
        found.vectors.update(vectors or {})
        if vectors:
            yield from self._similar.by_layers(found.request, keyed, vectors)

    def _embedded(self, request: Request, given: Mapping[str, Vector] | None) -> dict[str, Vector] | None:
        """Checked vectors of the embedding layers; None where the hook failed."""
        with self._tally.boundary("hook"):
            raw = self._hook(request) if given is None else given
            return unit_vectors(request, raw, self._config.embedding_layers, self._config.embedding_hook)
        return None

    def _by_meaning(self, found: Lookup, keyed: Keyed) -> Iterator[Candidate]:
        if self._encoder is None:
            return
        found.statuses[SEMANTIC] = Status.MISS  # also where the encoder fails
        vector = self._chunk_vector(found.request.chunk_text)
        if vector is not None:
            found.vectors[SEMANTIC] = vector
            yield from self._similar.by_chunk_text(keyed, vector)
        elif not keyed.context_depths():
            found.statuses[SEMANTIC] = Status.SKIP

    def _plugged(self, found: Lookup, keyed: Keyed, tier: Tier) -> Iterator[Candidate]:
        """Donors that share a key of a tier of the user's own, and all but the question, the best first."""
        keys = self._tier_keys(tier, found.request, keyed)
        if keys:
            found.statuses[tier.name] = Status.MISS
        donors = {donor.entry_id: donor for key in keys for donor in self._catalog.find(key, _SPELLINGS)}
        scored = [(as_cosine(tier.score(found.request, donor)), donor) for donor in donors.values()]
        for score, donor in sorted(scored, key=lambda pair: -pair[0])[:_DONORS]:
            if score > 0.0:
                yield Candidate(donor, len(donor.segments), tier.name, score, (tier.name,), similar=keyed.question)

    def _tier_keys(self, tier: Tier, request: Request, keyed: Keyed) -> list[str]:
        """The catalog's keys of a prompt in a tier of the user's own; none where it has no question, or the tier
        fails."""
        slot = keyed.question_slot(with_media=self._config.scope is Scope.MEDIA)
        with self._tally.boundary(tier.name):
            return [digest("tier", tier.name, slot, key) for key in tier.keys(request) if slot]
        return []

    def _chunk_vector(self, text: str) -> Vector | None:
        """A chunk text's unit vector; None for an empty text, one beyond the encoder's window, and without L1."""
        if self._encoder is None or not text.strip() or not self._encoder.fits(text):
            return None
        found: Vector = self._encoder.encode([text])[0]
        return found

    # -- recording ----------------------------------------------------------------------------------------------

    def record(
        self, report: ReuseReport, response: str, tags: tuple[str, ...], metadata: Mapping[str, Any], now: float
    ) -> Record:
        """What the catalog keeps of ``report.plan.segments`` and their answer."""
        keyed = Keyed(report.request.namespace, report.plan.segments)
        entry = entry_of(report.request, keyed)
        entry = replace(entry, response=response, tags=tags, created=now, metadata=metadata)
        return self._record(report.request, keyed, entry, self._vectors_to_keep(report))

    def _record(self, request: Request, keyed: Keyed, entry: Entry, vectors: Mapping[str, Vector]) -> Record:
        """The record of an entry, with unit vectors by layer that belong to the canonical prompt; ``vision`` by the
        request's own media. Vectors of layers that are not indexed are left out."""
        layers = {name: layer.key for name, layer in self._similar.layers.items()}
        sent = [s.media_id for s in keyed.segments if isinstance(s, MediaSegment)]
        rows = np.atleast_2d(vectors[VISION]) if VISION in vectors and VISION in layers else ()
        media = {
            (layers[VISION], mine.media_id): row
            for mine, computed, row in zip(request.media, sent, rows, strict=False)
            if mine.media_id == computed  # a donor's image has its own vector already
        }
        as_request = Request(entry.entry_id, entry.namespace, entry.segments, entry.chunk_text)
        tier_keys = [key for tier in self._tiers for key in self._tier_keys(tier, as_request, keyed)]
        return Record(
            entry=entry,
            keys=(*keyed.entry_keys(), *tier_keys),
            frame=keyed.question_slot(),
            loose_frame=keyed.question_slot(with_media=False),
            run=keyed.media_prefix(),
            contexts=context_rows(keyed),
            vectors={layers[n]: v for n, v in vectors.items() if n in layers and n != VISION},
            media_vectors=media,
        )

    def shared_record(self, entry: Entry, packed: Mapping[str, bytes]) -> Record:
        """The record of an entry that another cache has made. All by which it is found is computed anew, but for its
        vectors by layer and encoder: those of other encoders are left out.

        Raises:
            CorruptValue: a vector of this cache's encoders is not of their length and of length 1, or the entry's id is
                another's.
        """
        request = Request("", entry.namespace, entry.segments, entry.chunk_text, entry.tags)
        keyed = Keyed(entry.namespace, entry.segments)
        if entry_of(request, keyed).entry_id != entry.entry_id:
            raise CorruptValue(f"entry {entry.entry_id}: under another key")
        vectors = {}
        for name, layer in self._similar.layers.items():
            if (data := packed.get(layer.key)) is not None:
                vectors[name] = unit_rows(data, layer.dim, len(request.media) if name == VISION else 1)
        return self._record(request, keyed, entry, vectors)

    def _vectors_to_keep(self, report: ReuseReport) -> dict[str, Vector]:
        """The lookup's vectors, and those that an early hit made unnecessary then.

        Where a leading part was rewritten, a layer other than prompt and vision may have been computed from what is
        no longer in the prompt, and is left out. So is that of a chunk text which is more than the question, where a
        context was.
        """
        vectors, layers = dict(report.embeddings), self._config.embedding_layers
        if layers and not any(layer.name in vectors for layer in layers):
            vectors |= self._embedded(report.request, None) or {}
        if SEMANTIC not in vectors and (vector := self._chunk_vector(report.request.chunk_text)) is not None:
            vectors[SEMANTIC] = vector
        if report.rewritten:
            vectors = {name: v for name, v in vectors.items() if name in ("prompt", VISION, SEMANTIC)}
        if not has_chunk_text(report.request, report.plan.segments):
            vectors.pop(SEMANTIC, None)
        return vectors


def unit_rows(data: bytes, dim: int, count: int) -> Vector:
    """Packed unit vectors of one length: [dim], or [count, dim].

    Raises:
        CorruptValue: they are not.
    """
    vectors = unpack(data, dim * count).reshape(count, dim)
    if not count or not np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-3):
        raise CorruptValue("a vector that has not length 1")
    return vectors[0] if count == 1 else vectors
