"""What a request may use of earlier ones: the tiers are asked in their order, and the first candidate that may be used
makes the plan, the canonical prompt.

The order is L0.5 exact text, L2 embedding, L1 semantic text, and then the user's own. Every tier is asked for a donor
of the whole prompt before any is for one of its beginning: each later turn of a conversation has the beginning of an
earlier one. A donor may also be pending: a request whose answer is on its way. Until that is recorded it is compared
here by the rules of the text tiers: the whole prompt, after folding, or a similar question after the same prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv import plug
from semkv.account import EMBEDDING, JUDGE, Account
from semkv.config import CacheConfig
from semkv.counting import Tally
from semkv.encoders import EmbeddingHook, image_roots
from semkv.encoders.text import vectors_of
from semkv.errors import ConfigError, CorruptValue
from semkv.index import as_cosine
from semkv.keys import Keyed, entry_of, exactness_of, has_chunk_text, same_characters
from semkv.stores.catalog import Catalog, Record, unpack
from semkv.stores.media import MediaStore
from semkv.tiers.checking import TOO_FAR, VETO, Checking, is_guarded
from semkv.tiers.images import ImageGuard, require_opencv
from semkv.tiers.judging import texts_of
from semkv.tiers.policies import CLOSE, Decider, Decision
from semkv.tiers.sharing import Sharing, tenant_name
from semkv.tiers.similar import VISION, SimilarTier, cosine_of, unit_vectors
from semkv.tiers.tier import EXACT, SEMANTIC, Candidate, Tier, status_of
from semkv.types import (
    CacheMode,
    Entry,
    Exactness,
    Match,
    MediaSegment,
    Namespace,
    Plan,
    Request,
    ReuseReport,
    Scope,
    Segment,
    Status,
)
from semkv_guards import Guard, misspelled, same_words, spelling, unread, veto, wording
from semkv_guards.reading import differing, is_read
from semkv_stores.digests import digest

if TYPE_CHECKING:
    from semkv.encoders.pairs import PairClassifier
    from semkv.encoders.text import TextEncoder
    from semkv.types import Vector

_DONORS = 4  # of one text: the next ones are asked when the policy refuses the first
_SPELLINGS = 64  # entries of one folded text, of which one may have the same characters


@dataclass(slots=True)
class Lookup:
    """One request on its way through the tiers, and what they found."""

    request: Request
    statuses: dict[str, Status]  # of each tier
    # Unit vectors by layer, computed on the way.
    vectors: dict[str, Vector] = field(default_factory=dict)
    plan: Plan | None = None  # of the first candidate that can be used
    donor: Entry | None = None  # of the plan
    decision: Decision | None = None  # the policy's on the plan, where it was asked
    doubt: tuple[Match, Entry] | None = None  # see `ReuseReport.doubt`
    judge_s: float = 0.0  # how long the judge in this process took
    near: tuple[Match, Entry, str] | None = None  # see `ReuseReport.near`
    left_out: frozenset[str] = frozenset()  # see `ReuseReport.left_out`
    keyed: Keyed | None = None  # see `ReuseReport.keyed`


class Planner:
    """Checks candidates and puts the prompt together: the donor's leading run, then the request's own rest.

    Without ``config.normalised`` a text that nothing found similar must have the donor's characters, and one that only
    folds to the donor's is judged as an approximate match. An image in whose place a donor's stands must show the same.
    Where long texts differ in some sentences, the cosine of each counts; without an ``encoder`` they never match. A
    ``judge`` in this process settles what is in doubt.

    Attributes:
        guard: says why two texts must not stand in for each other.
        least: cosine of a similar question from which the policy is asked.
        bring_images: brings images of a tenant's donors, where others have them.
    """

    def __init__(
        self,
        config: CacheConfig,
        media: MediaStore,
        decider: Decider,
        checking: Checking,
        tally: Tally,
        encoder: TextEncoder | None,
        judge: PairClassifier | None = None,
    ) -> None:
        self._media = media
        self._judge = judge
        self._decider = decider
        self._checking = checking
        self._tally = tally
        self._encoder = encoder
        self._normalised = config.normalised
        self._guarded = config.guards
        self.guard: Guard = veto if config.guards else unread
        self._judges = config.judges
        self._compare_images = config.guards and config.scope is Scope.MEDIA
        self._certain = config.similarity_threshold
        self.least = config.similarity_threshold if decider.floor is None else decider.floor
        self.bring_images: Callable[[str, Iterable[str]], None] = lambda *_: None
        self._images = ImageGuard(media, image_roots(config))
        if self._compare_images and any(layer.name == VISION for layer in config.embedding_layers):
            require_opencv()

    def forget(self) -> None:
        """Drop the images in memory."""
        self._images.forget()

    def take(self, found: Lookup, candidates: Iterable[Candidate]) -> None:
        """Take the first candidate that can be used, with the statuses it brings. One that a guard or the policy
        refuses, or whose image is gone, is counted and passed over."""
        for candidate in candidates:
            found.plan = self._plan(found, candidate)
            if found.plan is not None:
                found.donor = candidate.donor
                found.near = None if found.plan.full else found.near
                found.doubt = None if found.plan.full else found.doubt
                found.statuses.update(dict.fromkeys(candidate.agreed, Status.HIT))
                return

    def _plan(self, found: Lookup, candidate: Candidate) -> Plan | None:
        """The plan that a candidate makes, or None. docs/architecture.md has all checks in their order."""
        request = found.request
        donor = candidate.donor
        found.decision = None
        if donor.namespace != request.namespace:  # a damaged file names another's entry
            return None
        whole = candidate.run == len(donor.segments)
        own = request.segments if whole else request.segments[: candidate.run]
        run = donor.segments[: candidate.run]
        if not self._may_be_typed_so(own, run, candidate.similar):
            return None
        match = Match(
            candidate.tier,
            donor.entry_id,
            candidate.score,
            self._exactness(own, run),
            whole=whole,
            others=candidate.others,
        )
        if candidate.tier == SEMANTIC and candidate.score < self.least:  # proposed to be shown
            _turn_down(found, match, donor, TOO_FAR)
            return None
        self._bring_images(request, run)
        if match.exactness is Exactness.APPROXIMATE:
            judged = self._accepted(found, donor, match, own, run)
            if judged is None:
                return None
            match = judged
        leading = own if match.exactness is Exactness.EXACT else self._available(request, run)
        if leading is None:
            self._tally.add("donor media lost")
            return None
        rest = () if whole else request.segments[candidate.run :]
        return Plan((*leading, *rest), len(leading), match)

    def _exactness(self, own: Sequence[Segment], run: Sequence[Segment]) -> Exactness:
        """How close a run is; where typing counts, one that only folds to the request's is approximate."""
        exactness = exactness_of(own, run)
        if exactness is Exactness.NORMALISED and not self._normalised:
            return Exactness.APPROXIMATE
        return exactness

    def _accepted(
        self,
        found: Lookup,
        donor: Entry,
        match: Match,
        own: Sequence[Segment],
        run: Sequence[Segment],
    ) -> Match | None:
        """An approximate match with all that the policy was told, where guards and policy accept it."""
        request = found.request
        reason = self._veto(request, donor, own, run, whole=match.whole)
        if reason is None and match.whole:
            cosine = self._least_cosine(request, donor)
            # A policy that looks below the threshold knows scores of the semantic text tier alone.
            least = self.least if match.tier == SEMANTIC else self._certain
            if cosine < least:
                reason = "length"
            else:
                match = self._described(request, donor, match, min(match.score, cosine))
        if reason is not None:
            self._tally.add(f"veto:{reason}")
            _turn_down(found, match, donor, f"{VETO}{reason}")
            return None
        found.decision = self._decide(request, donor, match)
        if found.decision.accept:
            return match
        _turn_down(found, match, donor, found.decision.reason or "policy")
        if found.decision.doubt and self._can_judge(request):
            found.doubt = found.doubt or (match, donor)
        return None

    def settle(self, found: Lookup) -> None:
        """Have the judge in this process read what is in doubt, and take the hit that a yes makes.

        It reads both texts and nothing else, so it is asked where nothing else is sent: behind "Translate this." texts
        that one answer serves elsewhere need two."""
        if self._judge is None or found.doubt is None:
            return
        match, donor = found.doubt
        request = found.request
        is_alone = texts_of(request) == [request.question]
        if not is_alone or match.tier != SEMANTIC:
            return
        same = None
        start = time.perf_counter()
        with self._tally.boundary("judge"):
            same = self._judge.serves_both(request.question, donor.question)
        found.judge_s = time.perf_counter() - start
        if same is None:
            return
        self._tally.add(f"judged:{'yes' if same else 'no'}")
        self._checking.keep_verdict(request, donor, same=same)
        found.doubt = None
        if same:
            self.take(found, [_doubted(match, donor)])

    def _described(self, request: Request, donor: Entry, match: Match, score: float) -> Match:
        """A match of a whole prompt with the least of its cosines, and what a policy may ask about it."""
        return replace(
            match,
            score=score,
            wording=wording(request.chunk_text, donor.chunk_text),
            judged=self._verdict(request, donor),
            same_words=self._has_same_words(request, donor, score),
        )

    def _bring_images(self, request: Request, run: Sequence[Segment]) -> None:
        """Bring those of a donor's images that the request has not itself."""
        own = {segment.media_id for segment in request.media}
        images = {segment.media_id for segment in run if isinstance(segment, MediaSegment)}
        if images - own:
            self.bring_images(request.namespace.tenant, images - own)

    def _may_be_typed_so(
        self, own: Sequence[Segment], run: Sequence[Segment], similar: int | None
    ) -> bool:
        """Whether texts may differ in typing, or do not, but for the one that a tier found similar."""
        return self._normalised or same_characters(own, run, similar)

    def _veto(
        self,
        request: Request,
        donor: Entry,
        own: Sequence[Segment],
        run: Sequence[Segment],
        *,
        whole: bool,
    ) -> str | None:
        """Why no approximate match may be made of a run: by the texts that were compared, by the questions where the
        caller had other texts compared, by the images."""
        texts = (
            [(request.chunk_text, donor.chunk_text), (request.question, donor.question)]
            if whole
            else []
        )
        for mine, theirs in dict.fromkeys(texts):
            if (reason := self.guard(mine, theirs)) is not None:
                return reason
        return "image" if self._compare_images and self._shows_another(own, run) else None

    def _least_cosine(self, request: Request, donor: Entry) -> float:
        """Of the sentences in which long texts differ: 1 for short ones, which a tier has compared, and -1 where no
        encoder reads a sentence."""
        texts = {(request.chunk_text, donor.chunk_text), (request.question, donor.question)}
        found = [differing(mine, theirs) for mine, theirs in texts]
        places = [
            place
            for one in found
            if not isinstance(one, str)
            for place in one.places
            if not misspelled(*place)
        ]
        return min(
            (cosine_of(self._encoder, *spelling.alike(*place)) for place in places), default=1.0
        )

    def _has_same_words(self, request: Request, donor: Entry, score: float) -> bool:
        """Whether texts closely below the threshold ask for the same in the same words."""
        is_close = self._certain - CLOSE <= score < self._certain
        if not is_close or not self._guarded:
            return False
        texts = {(request.chunk_text, donor.chunk_text), (request.question, donor.question)}
        return all(same_words(mine, theirs) for mine, theirs in texts)

    def _can_judge(self, request: Request) -> bool:
        """Whether a judge may be asked about a request: it sees no images."""
        return self._judges and not request.media

    def _verdict(self, request: Request, donor: Entry) -> bool | None:
        """What a judge said of a donor; None where none has been asked."""
        return self._checking.verdict(request, donor) if self._can_judge(request) else None

    def _decide(self, request: Request, donor: Entry, match: Match) -> Decision:
        """What checks found, then the policy."""
        if self._checking.blocked(request, donor.entry_id):
            self._tally.add("barred")
            return Decision(False, "found wrong before")
        decision = self._decider.accept(request, donor, match)
        if not decision.accept:
            self._tally.add("refused")
        return decision

    def _shows_another(self, own: Sequence[Segment], run: Sequence[Segment]) -> bool:
        """Whether an image of a donor's run may show something else than the request's in its place: also where either
        cannot be read."""
        mine, theirs = (
            [s for s in segments if isinstance(s, MediaSegment)] for segments in (own, run)
        )
        if len(mine) != len(theirs):
            return True
        pairs = [
            (a, b.media_id) for a, b in zip(mine, theirs, strict=True) if a.media_id != b.media_id
        ]
        try:
            return not all(self._images.same(a, b) for a, b in pairs)
        except OSError:  # which is not remembered
            return True

    def _available(self, request: Request, run: Sequence[Segment]) -> tuple[Segment, ...] | None:
        """The run with a readable, verified file behind each media item that is not the request's own."""
        own = {segment.media_id: segment for segment in request.media}
        ready: list[Segment] = []
        for segment in run:
            if not isinstance(segment, MediaSegment):
                ready.append(segment)
            elif segment.media_id in own:
                ready.append(own[segment.media_id])
            elif self._media.get(segment.media_id) is None:
                return None
            else:
                ready.append(replace(segment, source=self._media.path(segment.media_id)))
        return tuple(ready)


def _doubted(match: Match, donor: Entry) -> Candidate:
    """The candidate that a match in doubt was."""
    return Candidate(
        donor,
        len(donor.segments),
        match.tier,
        match.score,
        agreed=(match.tier,),
        others=match.others,
        similar=Keyed(donor.namespace, donor.segments).question,
    )


def _turn_down(found: Lookup, match: Match, donor: Entry, reason: str) -> None:
    """Note a match that may not be used; the policy's refusal rather than a guard's."""
    is_better = found.near is None or (is_guarded(found.near[2]) and not is_guarded(reason))
    if match.whole and is_better:
        found.near = (match, donor, reason)


class Matching:
    """The tiers that the settings name, over one catalog. Any thread may call any method.

    Without an ``encoder`` there is no semantic text tier. ``tiers`` are the user's own. The ``account`` says which
    tiers pay. ``sharing`` brings what other directories have; None where there are none.

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
        *,
        account: Account,
    ) -> None:
        self.sharing: Sharing | None = None
        self._config = config
        self._account = account
        self._catalog = catalog
        self._hook = hook
        self._planner = planner
        self._tally = tally
        self._encoder = encoder
        self._similar = similar
        self._tiers: tuple[Tier, ...] = tuple(plug.require("tiers", tier, Tier) for tier in tiers)
        built_in = (EXACT, *(status_of(layer.name) for layer in config.embedding_layers), SEMANTIC)
        taken = [*built_in, "kv_cache", "fusion"]  # the last two an engine adds
        for tier in self._tiers:
            if tier.name in taken:
                raise ConfigError(
                    "tiers", tier.name, f"names that differ, and from {', '.join(sorted(taken))}"
                )
            taken.append(tier.name)
        self._names = (*built_in, *(tier.name for tier in self._tiers))
        is_on = {
            EXACT: config.exact,
            EMBEDDING: bool(config.embedding_layers),
            SEMANTIC: encoder is not None,
            **{tier.name: True for tier in self._tiers},
        }
        self._accounted = {name for name, on in is_on.items() if on}
        # the tier that pays for what is brought from others
        self._brings = SEMANTIC if SEMANTIC in self._accounted else EMBEDDING

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
        found.left_out = frozenset(n for n in self._accounted if not self._account.pays(n))
        with self._tally.boundary("request"):
            keyed = Keyed(request.namespace, request.segments)
            found.keyed = keyed
            spent: dict[str, float] = {}
            if self.sharing is not None and self._accounted - found.left_out:
                start = time.perf_counter()
                with self._tally.boundary("shared entries"):
                    self.sharing.bring(self._partitions(request.namespace, keyed))
                spent[self._brings] = time.perf_counter() - start
            with self._tally.boundary("catalog"):
                if self._catalog.changed():
                    self._similar.refresh()
            asked = (
                (EXACT, self._exact(found, keyed)),
                (EMBEDDING, self._by_layers(found, keyed, given)),
                (SEMANTIC, self._by_meaning(found, keyed)),
                *((tier.name, self._plugged(found, keyed, tier)) for tier in self._tiers),
                # A shared system prompt or image alone is no hit: vLLM's prefix cache has it.
                (EXACT, self._equal(keyed, reversed(keyed.context_depths()))),
            )
            self._ask(found, asked, spent)
        return found

    def _ask(
        self,
        found: Lookup,
        asked: Iterable[tuple[str, Iterable[Candidate]]],
        spent: dict[str, float],
    ) -> None:
        """Ask the tiers that pay until one has a donor, and book what that costs, with what is ``spent`` already."""
        for name, candidates in asked:
            if name in found.left_out and self._account.auto:
                continue
            start = time.perf_counter()
            with self._tally.boundary(name):
                self._planner.take(found, candidates)
                if name == SEMANTIC and found.plan is None:
                    self._planner.settle(found)
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - start
            if found.plan is not None:
                break
        if found.judge_s:
            spent[SEMANTIC] -= found.judge_s
            self._account.spent(JUDGE, found.judge_s)
        for name in spent.keys() & self._accounted:
            self._account.spent(name, spent[name], counts=name not in found.left_out)

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
            keys = (keyed.exact_key(depth), keyed.folded_key(depth, with_media=with_media))
            for key in keys if self._catalog.has(*keys) else ():  # mostly there is none
                for donor in self._catalog.find(key, most):
                    yield Candidate(donor, depth, EXACT, 1.0, (EXACT,))

    def _by_layers(
        self, found: Lookup, keyed: Keyed, given: Mapping[str, Vector] | None
    ) -> Iterator[Candidate]:
        layers = [layer.name for layer in self._config.embedding_layers]
        vectors = self._embedded(found.request, given) if layers else {}
        # Where the hook failed that is a miss, not a layer without input.
        found.statuses.update(
            {status_of(name): Status.MISS for name in (layers if vectors is None else vectors)}
        )
        found.vectors.update(vectors or {})
        if vectors:
            yield from self._similar.by_layers(found.request, keyed, vectors)

    def _embedded(
        self, request: Request, given: Mapping[str, Vector] | None
    ) -> dict[str, Vector] | None:
        """Checked vectors of the embedding layers; None where the hook failed."""
        with self._tally.boundary("hook"):
            raw = self._hook(request) if given is None else given
            return unit_vectors(
                request, raw, self._config.embedding_layers, self._config.embedding_hook
            )
        return None

    def _by_meaning(self, found: Lookup, keyed: Keyed) -> Iterator[Candidate]:
        if self._encoder is None:
            return
        found.statuses[SEMANTIC] = Status.MISS  # also where the encoder fails
        text = found.request.chunk_text
        if not text.strip() or not is_read(text):
            found.statuses[SEMANTIC] = Status.SKIP
        elif self._may_match(found.request, keyed, text):
            vector = self._similar.encoded(keyed, text)
            if vector is not None:
                found.vectors[SEMANTIC] = vector
                self._bring_nearest(found.request, keyed, vector)
                yield from self._similar.by_chunk_text(keyed, vector)
                yield from self._similar.by_spelling(keyed, text, vector)
            else:
                found.statuses[SEMANTIC] = Status.SKIP

    def _may_match(self, request: Request, keyed: Keyed, text: str) -> bool:
        """Whether a text has to be encoded: there is something to compare it with, here or with others."""
        if self._is_searched(request, keyed):
            return True
        return self._similar.has_texts(keyed) and not self._told_apart(keyed, text)

    def _is_searched(self, request: Request, keyed: Keyed) -> bool:
        """Whether others have more in L1's partition of a request than was brought."""
        name = self._partition(request.namespace, self._similar.text_slot(keyed))
        return self.sharing is not None and self.sharing.is_searched(name)

    def _bring_nearest(self, request: Request, keyed: Keyed, vector: Vector) -> None:
        """Bring what is nearest there, where it is searched."""
        if self.sharing is not None and self._is_searched(request, keyed):
            name = self._partition(request.namespace, self._similar.text_slot(keyed))
            self.sharing.bring_nearest(name, vector)

    def _told_apart(self, keyed: Keyed, text: str) -> bool:
        """Whether the guards turn down all that a text has to be compared with, where that is little: nothing is
        encoded then."""
        if not self._similar.stands_for(text):
            return False
        reasons = []
        for other in self._similar.few_texts(keyed):
            reason = self._planner.guard(text, other)
            if reason is None:
                return False
            reasons.append(reason)
        for reason in reasons:
            self._tally.add(f"told apart:{reason}")
        return bool(reasons)

    def _plugged(self, found: Lookup, keyed: Keyed, tier: Tier) -> Iterator[Candidate]:
        """Donors that share a key of a tier of the user's own, and all but the question, the best first."""
        keys = self._tier_keys(tier, found.request, keyed)
        if keys:
            found.statuses[tier.name] = Status.MISS
        donors = {
            donor.entry_id: donor for key in keys for donor in self._catalog.find(key, _SPELLINGS)
        }
        scored = [(as_cosine(tier.score(found.request, donor)), donor) for donor in donors.values()]
        for score, donor in sorted(scored, key=lambda pair: -pair[0])[:_DONORS]:
            if score > 0.0:
                yield Candidate(
                    donor,
                    len(donor.segments),
                    tier.name,
                    score,
                    (tier.name,),
                    similar=keyed.question,
                )

    def _tier_keys(self, tier: Tier, request: Request, keyed: Keyed) -> list[str]:
        """The catalog's keys of a prompt in a tier of the user's own; none where it has no question, or the tier
        fails."""
        slot = keyed.question_slot(with_media=self._config.scope is Scope.MEDIA)
        with self._tally.boundary(tier.name):
            return [digest("tier", tier.name, slot, key) for key in tier.keys(request) if slot]
        return []

    # -- recording ----------------------------------------------------------------------------------------------

    def record(
        self,
        report: ReuseReport,
        response: str,
        tags: tuple[str, ...],
        metadata: Mapping[str, Any],
        now: float,
    ) -> Record:
        """What the catalog keeps of ``report.plan.segments`` and their answer."""
        keyed = report.keyed
        if keyed is None or keyed.segments != report.plan.segments:
            keyed = Keyed(report.request.namespace, report.plan.segments)
        entry = entry_of(report.request, keyed)
        entry = replace(entry, response=response, tags=tags, created=now, metadata=metadata)
        return self._record(report.request, keyed, entry, self._vectors_to_keep(report))

    def _record(
        self, request: Request, keyed: Keyed, entry: Entry, vectors: Mapping[str, Vector]
    ) -> Record:
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
        tier_keys = [
            key for tier in self._tiers for key in self._tier_keys(tier, as_request, keyed)
        ]
        return Record(
            entry=entry,
            keys=(*keyed.entry_keys(), *tier_keys),
            question_slot=keyed.question_slot(),
            any_media_slot=keyed.question_slot(with_media=False),
            media_prefix=keyed.media_prefix(),
            vectors={layers[n]: v for n, v in vectors.items() if n in layers and n != VISION},
            media_vectors=media,
        )

    def partitions(self, entry: Entry) -> tuple[str, ...]:
        """The names of all partitions in which other directories look for an entry."""
        return self._partitions(entry.namespace, Keyed(entry.namespace, entry.segments))

    def _partitions(self, namespace: Namespace, keyed: Keyed) -> tuple[str, ...]:
        slots = self._similar.slots(keyed)
        # Without a question a prompt matches only as a whole.
        slots = slots or {keyed.folded_key(len(keyed.segments), with_media=False)}
        return tuple(self._partition(namespace, slot) for slot in sorted(slots))

    def _partition(self, namespace: Namespace, slot: str) -> str:
        return f"{tenant_name(namespace.tenant)}:{slot}"

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
                vectors[name] = unit_rows(
                    data, layer.dim, len(request.media) if name == VISION else 1
                )
        return self._record(request, keyed, entry, vectors)

    def _vectors_to_keep(self, report: ReuseReport) -> dict[str, Vector]:
        """The lookup's vectors, and those of the embedding layers that an early hit made unnecessary then.

        Where a leading part was rewritten, a layer other than prompt and vision may have been computed from what is
        no longer in the prompt, and is left out. So is that of a chunk text which is more than the question, where a
        context was.
        """
        vectors = dict(report.embeddings)
        layers = self._config.embedding_layers
        if layers and not any(layer.name in vectors for layer in layers):
            vectors |= self._embedded(report.request, None) or {}
        if report.rewritten:
            vectors = {
                name: v for name, v in vectors.items() if name in ("prompt", VISION, SEMANTIC)
            }
        if not has_chunk_text(report.request, report.plan.segments):
            vectors.pop(SEMANTIC, None)
        return vectors


def unit_rows(data: bytes, dim: int, count: int) -> Vector:
    """Packed unit vectors, each of ``dim`` numbers: [dim], or [count, dim].

    Raises:
        CorruptValue: they are not.
    """
    rows = [unpack(data[at : at + 4 * dim], dim) for at in range(0, len(data), 4 * dim)]
    if not rows or len(rows) != count:
        raise CorruptValue(f"{len(rows)} vectors where {count} belong")
    return rows[0] if count == 1 else np.stack(rows)


# -- pending entries -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PendingEntry:
    """A request that goes to the engine as it is."""

    donor: Entry  # what it will be recorded as; its response is still empty
    prompt_key: str  # of its whole prompt, folded; empty where exact matches are off
    slot_key: str  # the same of all but its question; empty where it has no question
    question: int | None  # position of its question

    def meets(self, other: PendingEntry) -> bool:
        """Whether they may match: both have all but the question in common, or the whole prompt after folding."""
        in_one_slot = self.slot_key == other.slot_key != ""
        return in_one_slot or self.prompt_key == other.prompt_key != ""


class PendingTier:
    """Decides who may have the answer of a request that is still on its way. Any thread may call any method."""

    def __init__(
        self,
        config: CacheConfig,
        encoder: TextEncoder | None,
        *,
        planner: Planner,
        checking: Checking,
        tally: Tally,
    ) -> None:
        self._config = config
        self._encoder = encoder
        self._planner = planner
        self._checking = checking
        self._tally = tally

    def _entry(self, request: Request, keyed: Keyed) -> PendingEntry:
        with_media = self._config.scope is Scope.MEDIA
        prompt_key = (
            keyed.folded_key(len(keyed.segments), with_media=with_media)
            if self._config.exact
            else ""
        )
        slot_key = keyed.question_slot(with_media=with_media)
        return PendingEntry(
            entry_of(request, keyed),
            prompt_key,
            slot_key,
            keyed.question,
        )

    def entry(self, report: ReuseReport) -> PendingEntry | None:
        """The request of a lookup as others may find it until its answer is recorded; None where the cache is not live,
        or the lookup found a donor of more than a byte-equal beginning."""
        request = report.request
        if (
            report.rewritten
            or report.plan.full
            or not request.segments
            or self._config.mode is not CacheMode.LIVE
        ):
            return None
        with self._tally.boundary("request"):
            keyed = report.keyed or Keyed(request.namespace, request.segments)
            return self._entry(request, keyed)
        return None

    def similar(
        self, own: PendingEntry, others: Sequence[PendingEntry]
    ) -> list[tuple[PendingEntry, Candidate]]:
        """Those of some pending entries that may stand in for one, as donors, the best first."""
        found: list[tuple[PendingEntry, Candidate]] = []
        cosines: dict[PendingEntry, float] = {}
        with self._tally.boundary("join"):
            beside = [other for other in others if other.slot_key == own.slot_key != ""]
            cosines = self._cosines(own, beside)
        for other in others:
            run = len(other.donor.segments)
            cosine = cosines.get(other, -1.0)
            if own.prompt_key and own.prompt_key == other.prompt_key:
                found.append((other, Candidate(other.donor, run, EXACT, 1.0, (EXACT,))))
            elif cosine >= self._planner.least:
                candidate = Candidate(
                    other.donor,
                    run,
                    SEMANTIC,
                    cosine,
                    (SEMANTIC,),
                    similar=other.question,
                )
                found.append((other, candidate))
        return sorted(found, key=lambda pair: -pair[1].score)

    def _cosines(
        self, own: PendingEntry, others: Sequence[PendingEntry]
    ) -> dict[PendingEntry, float]:
        """How similar the chunk texts are, where the encoder reads them whole."""
        if self._encoder is None or not others:
            return {}
        texts = [entry.donor.chunk_text for entry in (own, *others)]
        mine, *theirs = vectors_of(self._encoder, texts)
        found = {
            other: as_cosine(float(mine @ vector))
            for other, vector in zip(others, theirs, strict=True)
            if mine is not None and vector is not None
        }
        return found | self._respelled(own, found)

    def _respelled(
        self, own: PendingEntry, cosines: Mapping[PendingEntry, float]
    ) -> dict[PendingEntry, float]:
        """The cosines of those below the threshold that have slips, once these are put right."""
        text = own.donor.chunk_text
        certain = self._config.similarity_threshold
        far = [other for other, cosine in cosines.items() if cosine < certain]
        pairs = {other: spelling.alike(text, other.donor.chunk_text) for other in far}
        slips = [other for other in far if pairs[other] != (text, other.donor.chunk_text)]
        return {other: cosine_of(self._encoder, *pairs[other]) for other in slips[:_DONORS]}

    def try_reuse(self, report: ReuseReport, candidate: Candidate) -> ReuseReport | None:
        """Whether a request whose lookup found nothing may have the answer of a pending entry, a ``candidate`` that
        `similar` made: the report of the hit, or None. Guards, policy and the pairs found wrong are asked
        as for a stored donor, and the hit counts as theirs do."""
        with self._tally.boundary("join"):
            found = Lookup(report.request, dict(report.statuses))
            self._planner.take(found, [candidate])
            if found.plan is None or found.plan.match is None:
                return None
            hit_id = self._checking.open(report.request, found.plan.match, found.decision)
            self._tally.add(f"hit:{found.plan.match.tier}")
            return replace(
                report,
                plan=found.plan,
                statuses=found.statuses,
                hit_id=hit_id,
                near=None,
            )
        return None

    def settled(self, report: ReuseReport) -> ReuseReport:
        """The report of a lookup once a judge's verdict on its doubt is known: of a hit, or of the miss that it is."""
        if report.doubt is None:
            return report
        match, donor = report.doubt
        candidate = _doubted(match, donor)
        report = replace(report, doubt=None)
        found = self.try_reuse(report, candidate)
        return report if found is None else replace(found, donor_response=donor.response)
