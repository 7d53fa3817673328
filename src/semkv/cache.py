"""The semantic cache: what may a request use of what was computed before?

>>> import tempfile
>>> from pathlib import Path
>>> from semkv.config import CacheConfig
>>> from semkv.types import Namespace, Request, TextSegment
>>> folder = tempfile.TemporaryDirectory()
>>> cache = SemanticCache(CacheConfig(Path(folder.name), semantic=False))
>>> first = Request("1", Namespace(), (TextSegment("What color is the car?"),))
>>> report = cache.try_reuse(first)
>>> report.hit
False
>>> entry = cache.add_observation(report, "red")   # after the engine has answered report.plan.segments
>>> again = cache.try_reuse(Request("2", Namespace(), (TextSegment("what color  is the car?"),)))
>>> again.provenance, again.plan.segments[0].text
('text:normalised', 'What color is the car?')
>>> cache.close()
>>> folder.cleanup()
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from semkv.config import CacheConfig
from semkv.encoders.hooks import EmbeddingHook, NoHook, build_hook, declared, image_roots, read_media
from semkv.encoders.text import SentenceEncoder, TextEncoder
from semkv.errors import ConfigError, StoreError
from semkv.stores.catalog import Catalog
from semkv.stores.catalog_rows import Removed
from semkv.stores.media import MediaStore
from semkv.tiers.base import Boundary, Candidate, GuardedEncoder, PartError, Tally
from semkv.tiers.checking import Checking, Comparator, HitLog, SameMeaning, same_text
from semkv.tiers.embedding import VISION, EmbeddingTier, status_of
from semkv.tiers.exact_text import ExactTextTier
from semkv.tiers.guards import no_veto, veto
from semkv.tiers.keying import Keyed
from semkv.tiers.plan import Planner
from semkv.tiers.policies import Decider, build_policy
from semkv.tiers.record import make_record
from semkv.tiers.rerank import Reranker
from semkv.tiers.semantic_text import SemanticTextTier
from semkv.tiers.similar_context import SimilarContext
from semkv.tiers.stats import CacheStats, stats_of
from semkv.tiers.underway import Joining
from semkv.tiers.vectors import check_layers, clean
from semkv.types import (
    CacheMode,
    Entry,
    Exactness,
    MatchPolicy,
    Namespace,
    Near,
    Plan,
    Request,
    ReuseReport,
    Status,
)

if TYPE_CHECKING:
    from semkv.types import Vector

_EXACT, _SEMANTIC = "exact_text", "semantic_text"
_PAGE = 4096


@dataclass(slots=True)
class _Lookup:
    """One lookup on its way through the tiers."""

    request: Request
    keyed: Keyed
    statuses: dict[str, Status]
    vectors: dict[str, Vector] = field(default_factory=dict)
    given: Mapping[str, Vector] | None = None
    near: Near | None = None
    check: float = 0.0


class SemanticCache:
    """Tiers, stores and indexes behind two calls: `try_reuse` before the engine, `add_observation` after it.

    `joining` answers requests by others whose answers are not there yet.

    Any thread may call any method. Encoders run in the calling thread. A fault inside is counted (`stats`) and the
    request goes on as a miss; only a wrong setting raises.

    Args:
        config: settings.
        hook: fills the embedding layers; made from ``config.embedding_hook`` when not given.
        text_encoder: of the semantic text tier; made from ``config.index_encoder`` when not given.
        decider: judges approximate matches; made from ``config.policy`` when not given.
        reranker: a second stage after the decider's first; none by default.
        same_answer: compares answers in checks; by default short ones as strings and longer ones by meaning.

    Raises:
        ConfigError: a hook, encoder or layer that does not exist or does not fit.
        StoreError: the cache directory cannot be opened, or was written by another format version.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        hook: EmbeddingHook | None = None,
        text_encoder: TextEncoder | None = None,
        decider: Decider | None = None,
        reranker: Reranker | None = None,
        same_answer: Comparator | None = None,
    ) -> None:
        self.config = config
        self._layers = config.embedding_layers if config.mode is not CacheMode.OFF else ()
        self._tally = Tally()
        self._lookup_s = 0.0
        encoder = text_encoder if text_encoder is not None else SentenceEncoder(config.index_encoder)
        self._encoder = GuardedEncoder(encoder)
        self._hook: EmbeddingHook = NoHook()
        if self._layers:
            self._hook = build_hook(config, encoder) if hook is None else declared(hook, type(hook).__name__)
        check_layers(self._layers, self._hook, config.embedding_hook)
        semantic = config.semantic and config.mode is not CacheMode.OFF
        dim = encoder.dim if semantic else 0  # loads the model, so that a wrong name fails here
        self._catalog = Catalog(config.cache_dir / "catalog.sqlite", max_entries=config.max_entries)
        self._media = MediaStore(config.cache_dir / "media", max_bytes=config.max_media_bytes)
        self._roots = image_roots(config)
        guard = veto if config.guards and config.match is MatchPolicy.ALL else no_veto
        self._decider = decider or build_policy(config, encoder.fingerprint if config.calibration else "")
        least = config.similarity_threshold
        floor = least if self._decider.floor is None else self._decider.floor
        self._hits = HitLog(config.checked_share)
        self._planner = Planner(self._media, self._decider, guard, reranker, self._hits, self._tally)
        self.joining = Joining(config, floor, self._planner, self._hits, self._tally)
        self._exact = ExactTextTier(self._catalog, config.scope) if config.exact else None
        self._embedding = EmbeddingTier(self._catalog, self._layers, config.match, self._hook.fingerprint, self._tally)
        self._semantic: SemanticTextTier | None = None
        self._contexts: SimilarContext | None = None
        if semantic and dim:
            self._semantic = SemanticTextTier(self._catalog, self._encoder, config.scope, floor, self._tally)
            self._contexts = SimilarContext(
                self._catalog, self._encoder, config.scope, least, config.context_edit_share, guard
            )
        self._checking = Checking(
            self._hits,
            self._decider,
            same_answer or (SameMeaning(self._encoder) if semantic else same_text),
            lambda entry_id: self.invalidate(entry_id=entry_id),
            config.cache_dir,
            self._encoder.fingerprint if self._semantic is not None else self._hook.fingerprint,
            self._tally,
        )
        self._seen_vectors = self._seen_media = 0
        self._refreshing = threading.Lock()
        with self._boundary("catalog"):
            self._refresh()

    def __enter__(self) -> SemanticCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Keep what the policy learned and close the catalog. A later lookup is a counted miss."""
        self._checking.save()
        self._embedding.close()
        if self._semantic is not None:
            self._semantic.close()
        self._catalog.close()

    def warm_up(self) -> None:
        """Run the text encoder once, so that the first request does not pay for its start."""
        if self._semantic is not None:
            with self._boundary("encoder"):
                self._encoder.encode(["warm up"])

    # -- looking up ---------------------------------------------------------------------------------------------

    def try_reuse(self, request: Request, *, embeddings: Mapping[str, Vector] | None = None) -> ReuseReport:
        """Find what the request may use, and the canonical prompt to send instead of it.

        Args:
            request: the request.
            embeddings: vectors by layer, instead of asking the hook; any length but zero.

        Returns:
            The report. In dry-run ``plan`` keeps the request's own segments (``substituted`` is 0) with the match that
            was found, and ``proposed`` is the plan that live mode would follow.

        Raises:
            ConfigError: the hook returns vectors of another dimension than a layer was given.
        """
        start = time.perf_counter()
        names = [_EXACT, *(status_of(layer.name) for layer in self.config.embedding_layers), _SEMANTIC]
        statuses = dict.fromkeys(names, Status.SKIP)
        own = Plan(request.segments)
        if self.config.mode is CacheMode.OFF or not request.segments:
            return ReuseReport(request, own, statuses)
        plan: Plan | None = None
        donor: Entry | None = None
        lookup: _Lookup | None = None
        vectors: dict[str, Vector] = {}
        self._decider.arrived()
        with self._boundary("request"):
            lookup = _Lookup(request, Keyed.of(request.namespace, request.segments), statuses, vectors, embeddings)
            with self._boundary("catalog"):
                if self._catalog.changed():
                    self._refresh()
            for step in (self._ask_exact, self._ask_embedding, self._ask_semantic):
                plan, donor = step(lookup)
                if plan is not None:
                    break
        proposed = None
        sent = plan or own
        if plan is not None and self.config.mode is CacheMode.DRY_RUN:
            proposed, sent = plan, Plan(request.segments, 0, plan.match)
        answer = donor.response if plan is not None and plan.full and donor is not None else None
        seconds = time.perf_counter() - start
        self._count(plan, seconds)
        hit_id = ""
        if plan is not None and plan.match is not None:
            hit_id = self._hits.open(request, plan.match, lookup.check if lookup else 0.0)
        near = lookup.near if lookup is not None and plan is None else None
        return ReuseReport(request, sent, statuses, vectors, seconds, answer, proposed, hit_id, near)

    def _count(self, plan: Plan | None, seconds: float) -> None:
        self._tally.add("lookups")
        self._lookup_s += seconds
        if plan is not None and plan.match is not None:
            self._tally.add(f"hit:{plan.match.tier}")
            self._tally.add("partial", 0 if plan.full else 1)

    def _boundary(self, kind: str) -> Boundary:
        return Boundary(self._tally, kind)

    def _take(self, lookup: _Lookup, candidates: Iterable[Candidate]) -> tuple[Plan | None, Entry | None]:
        """The first candidate that can be used, with the statuses it brings."""
        for candidate in candidates:
            verdict = self._planner.plan(lookup.request, candidate)
            lookup.near = lookup.near or verdict.near
            if verdict.plan is not None:
                lookup.check = verdict.check
                lookup.statuses.update(dict.fromkeys(candidate.agreed, Status.HIT))
                return verdict.plan, candidate.donor
        return None, None

    def _ask_exact(self, lookup: _Lookup) -> tuple[Plan | None, Entry | None]:
        if self._exact is None:
            return None, None
        lookup.statuses[_EXACT] = Status.MISS
        with self._boundary(_EXACT):
            return self._take(lookup, self._exact.candidates(lookup.keyed))
        return None, None

    def _ask_embedding(self, lookup: _Lookup) -> tuple[Plan | None, Entry | None]:
        if not self._layers:
            return None, None
        found = self._vectors(lookup.request, lookup.given)
        if found is None:  # the hook failed: a miss, not a layer without input
            lookup.statuses.update({status_of(layer.name): Status.MISS for layer in self._layers})
            return None, None
        lookup.vectors.update(found)
        lookup.statuses.update({status_of(name): Status.MISS for name in found})
        with self._boundary("embedding"):
            namespace = lookup.request.namespace
            return self._take(lookup, self._embedding.candidates(namespace, lookup.keyed, found))
        return None, None

    def _vectors(self, request: Request, given: Mapping[str, Vector] | None) -> dict[str, Vector] | None:
        """Checked vectors of the embedding layers; None where the hook failed."""
        try:
            raw = self._hook(request) if given is None else given
        except ConfigError:
            raise
        except Exception as error:  # a hook may be the user's own
            self._tally.fault("hook", error)
            return None
        with self._boundary("hook"):
            return clean(request, raw, self._layers, self.config.embedding_hook)
        return None

    def _ask_semantic(self, lookup: _Lookup) -> tuple[Plan | None, Entry | None]:
        if self._semantic is None or self._contexts is None:
            return None, None
        plan: Plan | None = None
        donor: Entry | None = None
        if lookup.keyed.lead_depths():
            lookup.statuses[_SEMANTIC] = Status.MISS
        with self._boundary(_SEMANTIC):
            vector = self._chunk_vector(lookup)
            if vector is not None:
                plan, donor = self._take(lookup, self._semantic.candidates(lookup.keyed, vector))
            if plan is None:
                plan, donor = self._take(lookup, self._contexts.candidates(lookup.keyed))
        return plan, donor

    def _chunk_vector(self, lookup: _Lookup) -> Vector | None:
        assert self._semantic is not None
        try:
            vector = self._semantic.vector(lookup.request.chunk_text)
        except PartError:
            lookup.statuses[_SEMANTIC] = Status.MISS
            raise
        if vector is not None:
            lookup.statuses[_SEMANTIC] = Status.MISS
            lookup.vectors[_SEMANTIC] = vector
        return vector

    # -- recording ----------------------------------------------------------------------------------------------

    def add_observation(
        self,
        report: ReuseReport,
        response: str,
        *,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Record what the engine computed: the canonical prompt of ``report`` and its answer.

        A request that a donor served whole adds nothing but a hit on the donor, so donors never come from donors.
        A prompt that is stored already, byte for byte, gets a hit and keeps its first answer.

        Args:
            report: what `try_reuse` returned for the request.
            response: the engine's answer to ``report.plan.segments``.
            tags: labels for `invalidate`, beside the request's own.
            metadata: any JSON values.

        Returns:
            The id of the entry that now stands for the prompt; None where nothing was recorded (mode off, or a fault).
        """
        if self.config.mode is CacheMode.OFF or not report.request.segments:
            return None
        self._checking.learn(report, response)
        all_tags = tuple(dict.fromkeys((*report.request.tags, *tags)))
        match = report.plan.match if report.plan.substituted else None
        with self._boundary("record"):
            now = time.time()
            if match is not None:
                exact = match.exactness is Exactness.EXACT and report.plan.full
                there = self._catalog.touch(match.entry_id, now, all_tags if exact else ())
                if report.plan.full and not (exact and there and self._lacks_vectors(match.entry_id)):
                    self._tally.add("repeats")
                    return match.entry_id if there else None
            vectors = self._vectors_to_keep(report)
            record = make_record(report, response, vectors, self._layer_keys(), all_tags, dict(metadata or {}), now)
            self._keep_media(record.entry)
            new, removed = self._catalog.add(record)
            self._tally.add("recorded" if new else "repeats")
            self._forget(removed)
            self._refresh()
            return record.entry.entry_id
        return None

    def _lacks_vectors(self, entry_id: str) -> bool:
        """Whether an entry is unknown to an index, as all are after a change of encoder."""
        if self._semantic is not None and entry_id not in self._semantic:
            return True
        return bool(self._layers) and entry_id not in self._embedding

    def _layer_keys(self) -> dict[str, str]:
        """The catalog's name of every layer that this cache fills."""
        keys = dict(self._embedding.keys)
        if self._semantic is not None:
            keys[_SEMANTIC] = self._semantic.layer
        return keys

    def _vectors_to_keep(self, report: ReuseReport) -> dict[str, Vector]:
        """The lookup's vectors, and those that an early hit made unnecessary then.

        Where a leading part was substituted, a layer other than prompt and vision may have been computed from what is
        no longer in the prompt, and is left out.
        """
        request = report.request
        vectors = dict(report.embeddings)
        if self._layers and not any(layer.name in vectors for layer in self._layers):
            vectors |= self._vectors(request, None) or {}
        if self._semantic is not None and _SEMANTIC not in vectors:
            vector = self._semantic.vector(request.chunk_text)
            if vector is not None:
                vectors[_SEMANTIC] = vector
        if report.plan.substituted:
            vectors = {name: v for name, v in vectors.items() if name in ("prompt", VISION, _SEMANTIC)}
        return vectors

    def _keep_media(self, entry: Entry) -> None:
        """Keep the bytes of an entry's images; without them it serves only requests that bring the same image."""
        for segment in Request("", entry.namespace, entry.segments, " ").media:
            if self._media.path(segment.media_id) is None:
                data = read_media(segment, self._roots)
                if data is None:
                    self._tally.add("media not found")
                    continue
                with self._boundary("media"):
                    self._media.put(data)

    def _refresh(self) -> None:
        """Index what was written since the last time, by this process or another."""
        layers = [key for name, key in self._layer_keys().items() if name != VISION]
        with self._refreshing:
            while rows := self._catalog.vectors(layers, self._seen_vectors, _PAGE):
                self._embedding.load(rows, ())
                if self._semantic is not None:
                    self._semantic.load(rows)
                self._seen_vectors = rows[-1].number
            while VISION in self._embedding.keys and (media := self._catalog.media_rows(self._seen_media, _PAGE)):
                self._embedding.load((), media)
                self._seen_media = media[-1].number
            self._embedding.loaded()
            if self._semantic is not None:
                self._semantic.loaded()

    # -- checking -----------------------------------------------------------------------------------------------

    def should_check(self, report: ReuseReport) -> bool:
        """Whether the unchanged request should also be run, in the background, and its answer be compared.

        True for a share of approximate hits (``verify_rate``, and what the policy asks for beside it). Run
        ``report.unchanged()``, call `checked` with the outcome, and `add_observation` with the answer, so that the
        next request of this kind is an exact hit.
        """
        return self._hits.drawn(report.hit_id) and self.config.mode is CacheMode.LIVE

    def same_answer(self, first: str, second: str) -> bool:
        """Whether two answers to one request say the same; False where the comparison fails."""
        return self._checking.same_answer(first, second)

    def checked(self, hit_id: str, correct: bool) -> bool:
        """Hand in the outcome of a check. A wrong donor never answers this text again.

        Returns:
            Whether the hit was open: False for one that is unknown, closed, or too old.
        """
        return self._checking.checked(hit_id, correct)

    def report_wrong(self, hit_id: str) -> bool:
        """A user says that a hit's answer was wrong.

        The entry of an exact hit is removed. An approximate donor never answers this text again, the policy learns of
        it, and the entry is removed once it was wrong for several texts.

        Returns:
            Whether the hit was open: False for one that is unknown, closed, or too old.

        Raises:
            StoreError: the entry could not be removed.
        """
        return self._checking.report_wrong(hit_id)

    # -- the rest -----------------------------------------------------------------------------------------------

    def _forget(self, removed: Removed) -> None:
        self._embedding.remove(removed.entry_ids)
        if self._semantic is not None:
            self._semantic.remove(removed.entry_ids)
        for media_id in removed.media:
            self._media.delete(media_id)

    def invalidate(
        self,
        *,
        tag: str | None = None,
        entry_id: str | None = None,
        namespace: Namespace | None = None,
        dry_run: bool = False,
    ) -> int:
        """Delete the entries that meet every criterion given, with the images that only they had.

        Returns:
            How many; with ``dry_run`` how many would be, and nothing is deleted.

        Raises:
            ValueError: no criterion was given.
            StoreError: the catalog could not be read or written; nothing was deleted.
        """
        try:
            removed = self._catalog.invalidate(tag=tag, entry_id=entry_id, namespace=namespace, dry_run=dry_run)
        except sqlite3.Error as error:
            raise StoreError(f"catalog {self._catalog.path}: {error}") from error
        if not dry_run:
            self._forget(removed)
        return len(removed.entry_ids)

    def stats(self) -> CacheStats:
        """Counters and sizes."""
        entries = 0
        with self._boundary("catalog"):
            entries = len(self._catalog)
        return stats_of(
            self._tally.counts(), self._lookup_s, entries, self._media.nbytes, rerank_s=self._planner.rerank_s
        )
