"""The matching tiers over one catalog, asked in their order: L0.5 exact text, L2 embedding, L1 semantic text.

The first candidate that the planner lets through ends a lookup. A thread heeds what others purge from the catalog, so
that an idle process forgets it, too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from semkv.config import CacheConfig
from semkv.encoders.hooks import EmbeddingHook
from semkv.errors import ConfigError
from semkv.guards import Guard, forget
from semkv.index import VectorIndex
from semkv.stores.catalog import Catalog
from semkv.tiers import exact_text, semantic_text
from semkv.tiers.base import Boundary, Candidate, GuardedEncoder, PartError, Tally
from semkv.tiers.embedding import VISION, EmbeddingTier, status_of
from semkv.tiers.exact_text import ExactTextTier
from semkv.tiers.keying import Keyed
from semkv.tiers.plan import Planner
from semkv.tiers.record import entry_of, has_chunk_text
from semkv.tiers.semantic_text import SemanticTextTier
from semkv.tiers.similar_context import SimilarContext
from semkv.tiers.vectors import clean
from semkv.types import CacheMode, Entry, Near, Plan, Request, ReuseReport, Status

if TYPE_CHECKING:
    from semkv.types import Vector

_EXACT, _SEMANTIC = exact_text.STATUS, semantic_text.STATUS
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
        check: chance of a check that the policy asks for.
        near: the first match that the policy refused; None beside a plan.
    """

    request: Request
    given: Mapping[str, Vector] | None
    statuses: dict[str, Status]
    vectors: dict[str, Vector] = field(default_factory=dict)
    plan: Plan | None = None
    donor: Entry | None = None
    check: float = 0.0
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
    """

    def __init__(
        self,
        config: CacheConfig,
        catalog: Catalog,
        hook: EmbeddingHook,
        encoder: GuardedEncoder | None,
        planner: Planner,
        guard: Guard,
        floor: float,
        tally: Tally,
    ) -> None:
        self._config, self._catalog, self._hook, self._planner, self._tally = config, catalog, hook, planner, tally
        self._encoder = encoder
        self._purge: str | None = None
        with self._boundary("catalog"):
            self._purge = catalog.purge()  # before anything is read
        self._layers = config.embedding_layers if config.mode is not CacheMode.OFF else ()
        self._exact = ExactTextTier(catalog, config.scope, normalised=config.normalised) if config.exact else None
        self._embedding = EmbeddingTier(
            catalog, self._layers, config.match, hook.fingerprint, tally, self._lost, normalised=config.normalised
        )
        self._semantic: SemanticTextTier | None = None
        self._contexts: SimilarContext | None = None
        if encoder is not None:
            least, share = config.similarity_threshold, config.context_edit_share
            folds = config.normalised
            self._semantic = SemanticTextTier(
                catalog, encoder, config.scope, floor, tally, self._lost, normalised=folds
            )
            self._contexts = SimilarContext(catalog, encoder, config.scope, least, share, guard, normalised=folds)
        self._similar: list[EmbeddingTier | SemanticTextTier] = [self._embedding]
        if self._semantic is not None:
            self._similar.append(self._semantic)
        self._seen_vectors = self._seen_media = 0
        self._seen_file = catalog.database.opened
        self._behind = False  # whether the last refresh failed
        self._refreshing = threading.Lock()
        with self._boundary("catalog"):
            self.refresh()
        self._closing = threading.Event()
        self._follower = threading.Thread(
            target=_follow, args=(weakref.ref(self), self._closing), name="semkv-purges", daemon=True
        )
        self._follower.start()

    def close(self) -> None:
        """Stop the indexes' upkeep and keep their graphs, without what was purged."""
        self._closing.set()
        self._follower.join()
        with self._boundary("purge"):  # graphs are not written then
            self.heed()
        for index in self._indexes():
            index.close()

    def warm_up(self) -> None:
        """Run the text encoder once."""
        if self._semantic is not None:
            with self._boundary("encoder"):
                self._semantic.vector("warm up")

    def _boundary(self, kind: str) -> Boundary:
        return Boundary(self._tally, kind)

    # -- looking up ---------------------------------------------------------------------------------------------

    def statuses(self) -> dict[str, Status]:
        """``skip`` for every tier, as before it was asked."""
        layers = (status_of(layer.name) for layer in self._config.embedding_layers)
        return dict.fromkeys([_EXACT, *layers, _SEMANTIC], Status.SKIP)

    def look_up(self, request: Request, given: Mapping[str, Vector] | None) -> Lookup:
        """Ask the tiers; ``given`` are vectors by layer, instead of the hook's.

        Raises:
            ConfigError: the hook returns vectors of another dimension than a layer was given.
        """
        found = Lookup(request, given, self.statuses())
        tiers: Sequence[Callable[[Lookup, Keyed], None]] = (self._ask_exact, self._ask_embedding, self._ask_semantic)
        with self._boundary("request"):
            keyed = Keyed.of(request.namespace, request.segments)
            with self._boundary("catalog"):
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
                found.plan, found.donor, found.check, found.near = verdict.plan, candidate.donor, verdict.check, None
                found.statuses.update(dict.fromkeys(candidate.agreed, Status.HIT))
                return
            found.near = found.near or verdict.near

    def _ask_exact(self, found: Lookup, keyed: Keyed) -> None:
        if self._exact is not None:
            found.statuses[_EXACT] = Status.MISS
            with self._boundary(_EXACT):
                self._take(found, self._exact.candidates(keyed))

    def _ask_embedding(self, found: Lookup, keyed: Keyed) -> None:
        if not self._layers:
            return
        vectors = self._embedded(found.request, found.given)
        if vectors is None:  # the hook failed: a miss, not a layer without input
            found.statuses.update({status_of(layer.name): Status.MISS for layer in self._layers})
            return
        found.vectors.update(vectors)
        found.statuses.update({status_of(name): Status.MISS for name in vectors})
        with self._boundary("embedding"):
            self._take(found, self._embedding.candidates(found.request.namespace, keyed, vectors))

    def _embedded(self, request: Request, given: Mapping[str, Vector] | None) -> dict[str, Vector] | None:
        """Checked vectors of the embedding layers; None where the hook failed."""
        try:
            raw = self._hook(request) if given is None else given
        except ConfigError:
            raise
        except Exception as error:  # a hook may be the user's own
            self._tally.fault("hook", error)
            return None
        with self._boundary("hook"):
            return clean(request, raw, self._layers, self._config.embedding_hook)
        return None

    def _ask_semantic(self, found: Lookup, keyed: Keyed) -> None:
        if self._semantic is None or self._contexts is None:
            return
        if keyed.lead_depths():
            found.statuses[_SEMANTIC] = Status.MISS
        with self._boundary(_SEMANTIC):
            try:
                vector = self._semantic.vector(found.request.chunk_text)
            except PartError:
                found.statuses[_SEMANTIC] = Status.MISS
                raise
            if vector is not None:
                found.statuses[_SEMANTIC] = Status.MISS
                found.vectors[_SEMANTIC] = vector
                self._take(found, self._semantic.candidates(keyed, vector))
            if found.plan is None:
                self._take(found, self._contexts.candidates(keyed))

    # -- keeping up with the catalog ----------------------------------------------------------------------------

    def layer_keys(self) -> dict[str, str]:
        """The catalog's name of every layer that is filled here."""
        semantic = {_SEMANTIC: self._semantic.layer} if self._semantic is not None else {}
        return self._embedding.keys | semantic

    def refresh(self) -> None:
        """Index what was written since the last time, by this process or another."""
        with self._refreshing:
            try:
                self._read()
            except BaseException:
                self._behind = True  # the catalog says only once that others wrote: `heed` tries again
                raise
            self._behind = False

    def _read(self) -> None:
        if self._seen_file != (opened := self._catalog.database.opened):  # a new file numbers its rows anew
            self._seen_file, self._seen_vectors, self._seen_media = opened, 0, 0
        layers = [key for name, key in self.layer_keys().items() if name != VISION]
        while rows := self._catalog.vectors(layers, self._seen_vectors, _PAGE):
            for tier in self._similar:
                tier.load(rows)
            self._seen_vectors = rows[-1].number
        while VISION in self._embedding.keys and (media := self._catalog.media_rows(self._seen_media, _PAGE)):
            self._embedding.load_media(media)
            self._seen_media = media[-1].number
        for index in self._indexes():
            index.loaded()

    def heed(self) -> None:
        """Forget what was purged since the last time, by this process or another: vectors, graphs, words of texts."""
        if self._catalog.changed() or self._behind:
            self.refresh()
        purge = self._catalog.purge()
        if purge == self._purge:
            return
        with self._refreshing:  # what was read before that purge is in the indexes by now
            known = list(self._entries())
        self.remove(known)
        for index in self._indexes():
            index.heed(purge)
        forget()
        if self._encoder is not None:
            self._encoder.forget()
        self._purge = purge

    def _indexes(self) -> list[VectorIndex]:
        return [index for tier in self._similar for index in tier.indexes()]

    def _entries(self) -> set[str]:
        return {entry for tier in self._similar for entry in tier.entries()}

    def remove(self, entry_ids: Sequence[str]) -> None:
        """Forget those of some entries that the catalog does not have."""
        for start in range(0, len(entry_ids), _ASKED):
            with self._refreshing:  # what is recorded again meanwhile is indexed after this, and stays
                gone = self._catalog.missing(entry_ids[start : start + _ASKED])
                for tier in self._similar:
                    tier.remove(gone)

    def _lost(self, entry_id: str) -> None:
        """Forget an entry that another process deleted."""
        self._tally.add("index out of step")
        self.remove([entry_id])

    def lacks(self, report: ReuseReport, entry_id: str) -> bool:
        """Whether there is a vector to add for a request that is byte-equal to an entry, as for all after a change of
        encoder. A prompt may have none: its text is beyond the encoder's window, or it has no question."""
        if (self._semantic is None or entry_id in self._semantic) and (not self._layers or entry_id in self._embedding):
            return False
        own = entry_of(report.request, Keyed.of(report.request.namespace, report.plan.segments))
        layers = {name: key for name, key in self.layer_keys().items() if name != VISION}
        missing = set(layers.values()) - self._catalog.layers(own.entry_id)
        return bool(missing) and any(layers.get(name) in missing for name in self.vectors_to_keep(report))

    def vectors_to_keep(self, report: ReuseReport) -> dict[str, Vector]:
        """The lookup's vectors, and those that an early hit made unnecessary then.

        Where a leading part was substituted, a layer other than prompt and vision may have been computed from what is
        no longer in the prompt, and is left out. So is that of a chunk text which is more than the question, where a
        context was.
        """
        vectors = dict(report.embeddings)
        if self._layers and not any(layer.name in vectors for layer in self._layers):
            vectors |= self._embedded(report.request, None) or {}
        if self._semantic is not None and _SEMANTIC not in vectors:
            vector = self._semantic.vector(report.request.chunk_text)
            if vector is not None:
                vectors[_SEMANTIC] = vector
        if report.plan.substituted:
            vectors = {name: v for name, v in vectors.items() if name in ("prompt", VISION, _SEMANTIC)}
        if not has_chunk_text(report.request, report.plan.segments):
            vectors.pop(_SEMANTIC, None)
        return vectors


def _follow(matching: weakref.ref[Matching], closing: threading.Event) -> None:
    """Heed purges until the tiers are closed, or nobody has them any more."""
    while not closing.wait(_FOLLOW_S):
        tiers = matching()
        if tiers is None:
            return
        with tiers._boundary("purge"):  # user code may be in it
            tiers.heed()
        del tiers
