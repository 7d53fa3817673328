"""The matching tiers over one catalog, asked in their order: L0.5 exact text, L2 embedding, L1 semantic text, and then
the user's own.

The first candidate that the planner lets through ends a lookup. Every tier is asked for a donor of the whole prompt
before any is for one of its beginning: each later turn of a conversation has the beginning of an earlier one. A thread
applies what others purge from the catalog, so that an idle process forgets it, too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.config import CacheConfig
from semkv.encoders.hooks import EmbeddingHook
from semkv.errors import ConfigError, CorruptValue
from semkv.guards import Guard, forget
from semkv.stores.catalog import Catalog, Record, unpack
from semkv.tiers.base import EXACT, Candidate, Every, Index, PluggedTiers, Tally, Tier
from semkv.tiers.plan import Planner
from semkv.tiers.policies import Decision
from semkv.tiers.prompt_keys import SPELLINGS, Keyed, context_rows, entry_of, has_chunk_text, same_texts
from semkv.tiers.similar import SEMANTIC, VISION, SimilarContext, SimilarTier, status_of, unit_vectors
from semkv.types import CacheMode, Entry, MediaSegment, Near, Plan, Request, ReuseReport, Scope, Status

if TYPE_CHECKING:
    from semkv.encoders.text import TextEncoder
    from semkv.types import Vector

_DONORS = 4  # of one text: the next ones are asked when the policy refuses the first
_PAGE = 4096
_FOLLOW_S = 1.0  # between two looks for purges
_ASKED = 512  # entries that are looked for at once; lookups wait for that, a millisecond or so


@dataclass(slots=True)
class Lookup:
    """One request on its way through the tiers, and what they found.

    Attributes:
        request: the request.
        given: vectors by layer, instead of asking the hook.
        statuses: of each tier.
        vectors: unit vectors by layer that were computed on the way.
        plan, donor: of the first candidate that can be used; None where there is none.
        decision: the policy's on the plan, where it was asked.
        near: the first match that the policy refused; None beside a plan with a donor's whole prompt.
    """

    request: Request
    given: Mapping[str, Vector] | None
    statuses: dict[str, Status]
    vectors: dict[str, Vector] = field(default_factory=dict)
    plan: Plan | None = None
    donor: Entry | None = None
    decision: Decision | None = None
    near: Near | None = None


class Matching:
    """The tiers that the settings name. Any thread may call any method.

    Args:
        config: settings.
        catalog: where the entries and vectors are.
        hook: fills the embedding layers.
        encoder: of the semantic text tier; None switches that off.
        planner: makes a plan of a candidate, or refuses it.
        guard: may veto a changed sentence of a context.
        floor: least cosine of a similar question that the policy is asked about.
        tally: counts faults.
        index: makes the vector indexes, instead of `VectorIndex`.
        tiers: of the user's own.

    Raises:
        ConfigError: an index or a tier is none.
    """

    def __init__(
        self,
        config: CacheConfig,
        catalog: Catalog,
        hook: EmbeddingHook,
        encoder: TextEncoder | None,
        planner: Planner,
        guard: Guard,
        floor: float,
        tally: Tally,
        index: Callable[[int], Index] | None = None,
        tiers: Sequence[Tier] = (),
    ) -> None:
        self._config, self._catalog, self._hook, self._planner, self._tally = config, catalog, hook, planner, tally
        self._encoder = encoder
        self._purge: str | None = None
        with self._tally.boundary("catalog"):
            self._purge = catalog.purge()  # before anything is read
        self._layers = config.embedding_layers if config.mode is not CacheMode.OFF else ()
        names = (EXACT, *(status_of(layer.name) for layer in config.embedding_layers), SEMANTIC)
        self._plugged = PluggedTiers(tiers, config, catalog, tally, names)
        self._names = (*names, *(tier.name for tier in self._plugged.tiers))
        self._similar = SimilarTier(
            config, catalog, self._layers, hook.fingerprint, encoder, floor, tally, self._lost, index
        )
        self._contexts = None if encoder is None else SimilarContext(config, catalog, encoder, guard)
        self._seen_vectors = self._seen_media = 0
        self._seen_file = catalog.database.opened
        self._behind = False  # whether the last refresh failed
        self._refreshing = threading.Lock()
        with self._tally.boundary("catalog"):
            self.refresh()
        self._follower = Every(_FOLLOW_S, self._follow, "semkv-purges")

    def close(self) -> None:
        """Forget what was purged, and stop the indexes' upkeep."""
        self._follower.stop()
        self._follow()
        for index in self._similar.indexes():
            index.close()

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
        found = Lookup(request, given, self.statuses())
        tiers: Sequence[Callable[[Lookup, Keyed], None]] = (
            *(self._ask_exact, self._ask_embedding, self._ask_semantic),
            *(functools.partial(self._ask_plugged, tier) for tier in self._plugged.tiers),
            self._ask_contexts,
        )
        with self._tally.boundary("request"):
            keyed = Keyed.of(request.namespace, request.segments)
            with self._tally.boundary("catalog"):
                if self._catalog.changed():
                    self.refresh()
            for ask in tiers:
                ask(found, keyed)
                if found.plan is not None:
                    break
        return found

    def _take(self, found: Lookup, candidates: Iterable[Candidate]) -> None:
        """Take the first candidate that can be used, with the statuses it brings."""
        for candidate in candidates:
            verdict = self._planner.plan(found.request, candidate)
            if verdict.plan is not None:
                found.plan, found.donor, found.decision = verdict.plan, candidate.donor, verdict.decision
                found.near = None if verdict.plan.full else found.near
                found.statuses.update(dict.fromkeys(candidate.agreed, Status.HIT))
                return
            found.near = found.near or verdict.near

    def _ask_exact(self, found: Lookup, keyed: Keyed) -> None:
        if self._config.exact:
            found.statuses[EXACT] = Status.MISS
            with self._tally.boundary(EXACT):
                self._take(found, self._equal(keyed, [len(keyed.segments)]))

    def _equal(self, keyed: Keyed, depths: Iterable[int]) -> Iterator[Candidate]:
        """L0.5: donors of the same leading run, byte for byte or but for what `keys.normalise` folds. Of one length the
        byte-equal ones come first, then the oldest. With ``--scope any`` media items are all alike.
        """
        normalised, alike = self._config.normalised, self._config.scope is Scope.ANY
        most = _DONORS if normalised or not alike else SPELLINGS

        def keys(depth: int) -> Iterator[str]:  # the first is what most hits are found by
            yield keyed.lead(keyed.exact, "exact", depth)
            if normalised or alike:  # no key is kept of exact texts with media alike
                yield keyed.lead(keyed.loose if alike else keyed.folded, "folded", depth)

        for depth in depths:
            for key in keys(depth):
                for donor in self._catalog.find(key, most):
                    if normalised or same_texts(keyed.segments[:depth], donor.segments):
                        yield Candidate(donor, depth, EXACT, 1.0, (EXACT,))

    def _ask_embedding(self, found: Lookup, keyed: Keyed) -> None:
        if not self._layers:
            return
        vectors = self._embedded(found.request, found.given)
        if vectors is None:  # the hook failed: a miss, not a layer without input
            found.statuses.update({status_of(layer.name): Status.MISS for layer in self._layers})
            return
        found.vectors.update(vectors)
        found.statuses.update({status_of(name): Status.MISS for name in vectors})
        with self._tally.boundary("embedding"):
            self._take(found, self._similar.by_layers(found.request.namespace, keyed, vectors))

    def _embedded(self, request: Request, given: Mapping[str, Vector] | None) -> dict[str, Vector] | None:
        """Checked vectors of the embedding layers; None where the hook failed."""
        try:
            raw = self._hook(request) if given is None else given
        except ConfigError:
            raise
        except Exception as error:  # a hook may be the user's own
            self._tally.fault("hook", error)
            return None
        with self._tally.boundary("hook"):
            return unit_vectors(request, raw, self._layers, self._config.embedding_hook)
        return None

    def _ask_semantic(self, found: Lookup, keyed: Keyed) -> None:
        if self._contexts is None:
            return
        found.statuses[SEMANTIC] = Status.MISS  # also where the encoder fails
        with self._tally.boundary(SEMANTIC):
            vector = self._chunk_vector(found.request.chunk_text)
            if vector is not None:
                found.vectors[SEMANTIC] = vector
                self._take(found, self._similar.by_chunk_text(keyed, vector))
            elif not keyed.lead_depths():
                found.statuses[SEMANTIC] = Status.SKIP

    def _ask_contexts(self, found: Lookup, keyed: Keyed) -> None:
        """Donors of a beginning that ends in a context: the longest equal one, else one with a few other sentences.

        A shared system prompt or image alone is no hit: vLLM's prefix cache has it.
        """
        if self._config.exact:
            with self._tally.boundary(EXACT):
                self._take(found, self._equal(keyed, reversed(keyed.lead_depths())))
        if self._contexts is not None and found.plan is None:
            with self._tally.boundary(SEMANTIC):
                self._take(found, self._contexts.candidates(keyed))

    def _ask_plugged(self, tier: Tier, found: Lookup, keyed: Keyed) -> None:
        keys = self._plugged.keys(tier, found.request, keyed)
        if keys:
            found.statuses[tier.name] = Status.MISS
            with self._tally.boundary(tier.name):
                self._take(found, self._plugged.candidates(tier, found.request, keyed, keys, _DONORS))

    def _chunk_vector(self, text: str) -> Vector | None:
        """A chunk text's unit vector; None for an empty text, one beyond the encoder's window, and without L1."""
        if self._encoder is None or not text.strip() or not self._encoder.fits(text):
            return None
        found: Vector = self._encoder.encode([text])[0]
        return found

    # -- keeping up with the catalog ----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Index what was written since the last time, by this process or another."""
        with self._refreshing:
            try:
                self._read()
            except BaseException:
                self._behind = True  # the catalog says only once that others wrote: `apply_purges` tries again
                raise
            self._behind = False

    def _read(self) -> None:
        if self._seen_file != (opened := self._catalog.database.opened):  # a new file numbers its rows anew
            self._seen_file, self._seen_vectors, self._seen_media = opened, 0, 0
        layers = [key for name, key in self._similar.keys.items() if name != VISION]
        while rows := self._catalog.vectors(layers, self._seen_vectors, _PAGE):
            self._similar.load(rows)
            self._seen_vectors = rows[-1].number
        while VISION in self._similar.keys and (media := self._catalog.media_rows(self._seen_media, _PAGE)):
            self._similar.load_media(media)
            self._seen_media = media[-1].number

    def _follow(self) -> None:
        with self._tally.boundary("purge"):  # user code may be in it
            self.apply_purges()

    def apply_purges(self) -> None:
        """Forget what was purged since the last time, by this process or another: vectors, words of texts."""
        if self._catalog.changed() or self._behind:
            self.refresh()
        purge = self._catalog.purge()
        if purge == self._purge:
            return
        with self._refreshing:  # what was read before that purge is in the indexes by now
            known = list(self._similar.entries())
        self.remove(known)
        for index in self._similar.indexes():
            index.apply_purges()
        forget()
        getattr(self._encoder, "forget", lambda: None)()  # texts in memory, where it keeps any
        self._purge = purge

    def remove(self, entry_ids: Sequence[str]) -> None:
        """Forget those of some entries that the catalog does not have."""
        for start in range(0, len(entry_ids), _ASKED):
            with self._refreshing:  # what is recorded again meanwhile is indexed after this, and stays
                gone = self._catalog.missing(entry_ids[start : start + _ASKED])
                self._similar.remove(gone)

    def _lost(self, entry_id: str) -> None:
        """Forget an entry that another process deleted."""
        self._tally.add("index out of step")
        self.remove([entry_id])

    def record(
        self, report: ReuseReport, response: str, tags: tuple[str, ...], metadata: Mapping[str, Any], now: float
    ) -> Record:
        """What the catalog keeps of ``report.plan.segments`` and their answer."""
        return self._record(report, response, self._vectors_to_keep(report), tags, metadata, now)

    def _record(
        self,
        report: ReuseReport,
        response: str,
        vectors: Mapping[str, Vector],
        tags: tuple[str, ...],
        metadata: Mapping[str, Any],
        now: float,
    ) -> Record:
        """The record, with unit vectors by layer that belong to the canonical prompt; ``vision`` by the request's own
        media. Vectors of layers that are not indexed are left out."""
        request, segments, layers = report.request, report.plan.segments, self._similar.keys
        keyed = Keyed.of(request.namespace, segments)
        entry = replace(entry_of(request, keyed), response=response, tags=tags, created=now, metadata=metadata)
        sent = [s.media_id for s in segments if isinstance(s, MediaSegment)]
        rows = np.atleast_2d(vectors[VISION]) if VISION in vectors and VISION in layers else ()
        media = {
            (layers[VISION], mine.media_id): row
            for mine, computed, row in zip(request.media, sent, rows, strict=False)
            if mine.media_id == computed  # a donor's image has its own vector already
        }
        return Record(
            entry=entry,
            keys=(*keyed.entry_keys(), *self._plugged.entry_keys(entry, keyed)),
            frame=keyed.frame(),
            loose_frame=keyed.frame(with_media=False),
            run=keyed.run(),
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
        vectors = {}
        for name, key in self._similar.keys.items():
            if (data := packed.get(key)) is not None:
                rows = len(request.media) if name == VISION else 1
                vectors[name] = unit_rows(data, self._similar.dims[name], rows)
        report = ReuseReport(request, Plan(entry.segments), {})
        record = self._record(report, entry.response, vectors, entry.tags, entry.metadata, entry.created)
        if record.entry.entry_id != entry.entry_id:
            raise CorruptValue(f"entry {entry.entry_id}: under another key")
        return record

    def lacks_vectors(self, report: ReuseReport, entry_id: str) -> bool:
        """Whether there is a vector to add for a request that is byte-equal to an entry, as for all after a change of
        encoder. A prompt may have none: its text is beyond the encoder's window, or it has no question."""
        if entry_id in self._similar:
            return False
        own = entry_of(report.request, Keyed.of(report.request.namespace, report.plan.segments))
        layers = {name: key for name, key in self._similar.keys.items() if name != VISION}
        missing = set(layers.values()) - self._catalog.layers(own.entry_id)
        return bool(missing) and any(layers.get(name) in missing for name in self._vectors_to_keep(report))

    def _vectors_to_keep(self, report: ReuseReport) -> dict[str, Vector]:
        """The lookup's vectors, and those that an early hit made unnecessary then.

        Where a leading part was rewritten, a layer other than prompt and vision may have been computed from what is
        no longer in the prompt, and is left out. So is that of a chunk text which is more than the question, where a
        context was.
        """
        vectors = dict(report.embeddings)
        if self._layers and not any(layer.name in vectors for layer in self._layers):
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
