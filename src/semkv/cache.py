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
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from semkv import plug
from semkv.account import Account
from semkv.config import BUNDLED, CacheConfig
from semkv.counting import Tally
from semkv.encoders import EmbeddingHook, JoinedHook, build_hook, image_roots, read_media
from semkv.encoders.pairs import PairClassifier
from semkv.encoders.text import SentenceEncoder, TextEncoder
from semkv.encoders.timed import TimedEncoder
from semkv.errors import StoreError
from semkv.index import Index
from semkv.stores.catalog import Catalog, Record, Removed
from semkv.stores.media import MediaStore
from semkv.tiers.checking import Checking, Comparator, SameMeaning, same_text, wilson
from semkv.tiers.matching import Matching, PendingTier, Planner
from semkv.tiers.policies import Decider, build_policy
from semkv.tiers.sharing import DonorStore, Sharing
from semkv.tiers.similar import VISION, SimilarTier
from semkv.tiers.tier import Tier
from semkv.types import (
    CacheMode,
    Entry,
    Exactness,
    Namespace,
    Plan,
    Request,
    ReuseReport,
    TierChoice,
)
from semkv_stores.ledger import Ledger

if TYPE_CHECKING:
    from semkv.types import Vector

# Counted under their own names beside the faults that were raised as exceptions.
_PLAIN_FAULTS = ("donor media lost", "media not found", "index out of step")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since this object was made, and sizes now.

    Attributes:
        lookups, lookup_s: calls of `SemanticCache.try_reuse` and the seconds they took.
        hits: by the status key of the tier that decided.
        recorded, repeats: new entries, and observations that counted as a hit on an entry.
        refused: approximate matches that the decider turned down.
        vetoes: approximate matches that a guard turned down, by reason.
        judged: pairs in doubt that the judge in this process read, by what it said.
        told_apart: stored texts that a guard turned down before anything was encoded, by reason.
        barred: approximate matches turned down because the donor was found wrong for the same text before.
        checked, checked_wrong: approximate hits of the random sample that were checked, and that were wrong.
        reported_wrong: hits that a user reported.
        faults: things that went wrong inside the cache and became misses, by kind.
        entries, media_bytes: what is stored.
    """

    lookups: int = 0
    lookup_s: float = 0.0
    hits: Mapping[str, int] = field(default_factory=dict)
    recorded: int = 0
    repeats: int = 0
    refused: int = 0
    vetoes: Mapping[str, int] = field(default_factory=dict)
    judged: Mapping[str, int] = field(default_factory=dict)
    told_apart: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)
    entries: int = 0
    media_bytes: int = 0
    barred: int = 0
    checked: int = 0
    checked_wrong: int = 0
    reported_wrong: int = 0

    @property
    def wrong_rate(self) -> float | None:
        """Share of approximate hits that are wrong, from the random sample, as the comparator sees it: not corrected
        for its errors, which take reworded answers for wrong. None where nothing was checked."""
        return self.checked_wrong / self.checked if self.checked else None

    @property
    def wrong_interval(self) -> tuple[float, float]:
        """Its 95% interval (Wilson's), of chance alone; (0, 1) where nothing was checked."""
        return wilson(self.checked_wrong, self.checked)


class SemanticCache:
    """Tiers, stores and indexes behind two calls: `try_reuse` before the engine, `add_observation` after it.

    `pending` answers requests by others whose answers are not there yet. `media` holds donors' images, and a request's
    own where a caller puts them there. `account` has what each tier cost; the caller tells it what hits saved.

    Any thread may call any method. Encoders run in the calling thread. A fault inside is counted (`stats`) and the
    request goes on as a miss; only a wrong setting raises.

    Args:
        config: settings.
        hook: fills the embedding layers; made from ``config.embedding_hook`` when not given.
        text_encoder: of the semantic text tier; made from ``config.index_encoder`` when not given.
        decider: judges approximate matches; made from ``config.policy`` when not given.
        same_answer: compares answers in checks; by default short ones as strings and longer ones by meaning.
        index: makes an index of vectors of this length; by default a `semkv.index.VectorIndex`.
        tiers: asked after the built-in ones, in this order.
        encoder_limit_s: longest wait of a lookup for the text encoder; None for no limit.
        judge: names the model whose verdicts count, where the settings have one that does not run in this process.
        shared: through which caches of other directories share entries; closed with the cache.
        shared_limit_s: longest wait of a lookup for it.

    Raises:
        ConfigError: a part or layer that does not exist or does not fit.
        StoreError: the cache directory cannot be opened, or was written by another format version.
    """

    planner: type[Planner] = Planner
    similar: type[SimilarTier] = SimilarTier

    def __init__(
        self,
        config: CacheConfig,
        *,
        hook: EmbeddingHook | None = None,
        text_encoder: TextEncoder | None = None,
        decider: Decider | None = None,
        same_answer: Comparator | None = None,
        index: Callable[[int], Index] | None = None,
        tiers: Sequence[Tier] = (),
        encoder_limit_s: float | None = None,
        judge: str = "",
        shared: DonorStore | None = None,
        shared_limit_s: float = 0.25,
    ) -> None:
        self.config = config
        on = config.mode is not CacheMode.OFF
        plain = text_encoder
        if plain is None:
            plain = SentenceEncoder(config.index_encoder, device=config.encoder_device)
        # Lookups wait for the encoder up to the limit. Checks run in the background, without a limit.
        self._timed = None if encoder_limit_s is None else TimedEncoder(plain, encoder_limit_s)
        looking = self._timed or plain
        hook = build_hook(config, looking, hook) if on and config.embedding_layers else JoinedHook()
        is_semantic = on and config.semantic
        if is_semantic:
            _ = plain.dim  # loads the model, so that a wrong name fails here
        self._plain_encoder = plain if is_semantic else None
        encoder = looking if is_semantic else None  # of lookups
        self._tally = Tally()
        self._lookup_s = 0.0
        self._catalog = Catalog(config.cache_dir / "catalog.sqlite", max_entries=config.max_entries)
        self.media = MediaStore(config.cache_dir / "media", max_bytes=config.media_mib << 20)
        self._roots = image_roots(config)
        self._decider = _decider_of(config, decider, plain)
        own_judge = _own_judge(config, is_semantic=is_semantic)
        self._checking = self._new_checking(
            same_answer,
            plain.fingerprint if is_semantic else hook.fingerprint,
            _judge_name(own_judge, served=judge),
        )
        fills_prompts = config.embedding_hook.startswith("prompt")
        self._planner = self.planner(
            config,
            self.media,
            self._decider,
            checking=self._checking,
            tally=self._tally,
            encoder=looking if fills_prompts else encoder,
            judge=own_judge,
        )
        self.pending = PendingTier(
            config,
            encoder,
            planner=self._planner,
            checking=self._checking,
            tally=self._tally,
        )
        self._similar = self.similar(
            config,
            self._catalog,
            hook.fingerprint,
            encoder=encoder,
            least=self._planner.least,
            tally=self._tally,
            index=index,
            forgetting=_forgetting(looking, hook, self._planner),
        )
        # A dry run serves no hits, so every tier would seem not to pay.
        live = config.mode is CacheMode.LIVE
        self.account = Account(auto=live and config.tiers is TierChoice.AUTO)
        self._matching = Matching(
            config,
            self._catalog,
            hook,
            encoder=encoder,
            planner=self._planner,
            similar=self._similar,
            tally=self._tally,
            tiers=tiers,
            account=self.account,
        )
        self._sharing: Sharing | None = None
        if shared is not None:
            self._share_through(shared, shared_limit_s)

    def _new_checking(
        self,
        same_answer: Comparator | None,
        fingerprint: str,
        judge: str,
    ) -> Checking:
        """Checks of hits. By default answers are compared by meaning where there is an encoder."""
        encoder = self._plain_encoder
        if same_answer is None:
            same_answer = same_text if encoder is None else SameMeaning(encoder)
        return Checking(
            self.config.checked_share,
            self._decider,
            same=same_answer,
            remove=lambda entry_id: self.invalidate(entry_id=entry_id),
            share=self._share_wrong,
            catalog=self._catalog,
            fingerprint=fingerprint,
            tally=self._tally,
            judge=judge,
        )

    def _share_through(self, store: DonorStore, limit_s: float) -> None:
        """Share entries with caches of other directories."""
        self._sharing = Sharing(
            store,
            self._catalog,
            partitions=self._matching.partitions,
            to_record=self._matching.shared_record,
            add=self._add_shared,
            removed=self._forget,
            media=self.media if VISION in self._similar.layers else None,
            encoder=self._similar.text_key,
            reads_all=bool(self.config.embedding_layers),
            tally=self._tally,
            limit_s=limit_s,
        )
        self._planner.bring_images = self._sharing.bring_images
        self._matching.sharing = self._sharing

    def __enter__(self) -> SemanticCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Keep what the policy learned and close the catalog. A later lookup is a counted miss."""
        if self._sharing is not None:
            self._sharing.close()
        self._checking.save()
        self._similar.close()
        self._keep_account()
        if self._timed is not None:
            self._timed.close()
        self._catalog.close()

    def _keep_account(self) -> None:
        """Write what is new in the account into the cache directory."""
        new = self.account.take()
        if new:
            with self._tally.boundary("worth"), closing(Ledger(self.config.cache_dir)) as ledger:
                ledger.add(new)

    def warm_up(self) -> None:
        """Run the text encoder once, so that the first request does not pay for its start."""
        with self._tally.boundary("encoder"):
            if self._plain_encoder is not None:
                self._plain_encoder.encode(["warm up"])

    # -- looking up ---------------------------------------------------------------------------------------------

    def try_reuse(
        self, request: Request, *, embeddings: Mapping[str, Vector] | None = None
    ) -> ReuseReport:
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
        own = Plan(request.segments)
        if self.config.mode is CacheMode.OFF or not request.segments:
            return ReuseReport(request, own, self._matching.statuses())
        with self._tally.boundary("decider"):
            self._decider.arrived()
        found = self._matching.look_up(request, embeddings)
        plan = found.plan
        proposed = None
        answer = None
        hit_id = ""
        sent = plan or own
        if plan is not None and self.config.mode is CacheMode.DRY_RUN:
            proposed = plan
            sent = Plan(request.segments, 0, plan.match)
        if plan is not None and plan.full and found.donor is not None:
            answer = found.donor.response
        seconds = time.perf_counter() - start
        self._tally.add("lookups")
        self._lookup_s += seconds
        if plan is not None and plan.match is not None:
            if sent.substituted:
                with self._tally.boundary("catalog"):
                    self._catalog.hit(plan.match.entry_id, time.time())
            self._tally.add(f"hit:{plan.match.tier}")
            with self._tally.boundary("hit"):
                hit_id = self._checking.open(request, plan.match, found.decision)
        return ReuseReport(
            request,
            sent,
            found.statuses,
            embeddings=found.vectors,
            lookup_s=seconds,
            donor_response=answer,
            proposed=proposed,
            hit_id=hit_id,
            near=found.near,
            doubt=found.doubt if self.config.mode is CacheMode.LIVE else None,
            left_out=found.left_out,
            keyed=found.keyed,
        )

    def keep_verdict(self, report: ReuseReport, *, same: bool) -> None:
        """Take a judge's verdict on ``report.doubt``: whether one answer serves the request and the donor. It counts
        for these texts from now on, in every process on the directory."""
        if report.doubt is not None:
            with self._tally.boundary("catalog"):
                self._checking.keep_verdict(report.request, report.doubt[1], same=same)

    def settled(self, report: ReuseReport) -> ReuseReport:
        """The report once the verdict on its doubt is kept: of the hit that a yes makes, or of the miss that it is."""
        return self.pending.settled(report)

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

        A request that a donor served whole adds nothing, so donors never come from donors. A prompt that is stored
        already, byte for byte, keeps its first answer.

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
        with self._tally.boundary("record"):
            now = time.time()
            if match is not None and report.plan.full:
                there = self._catalog.tag(
                    match.entry_id, all_tags if match.exactness is Exactness.EXACT else ()
                )
                self._tally.add("repeats")
                return match.entry_id if there else None
            record = self._matching.record(report, response, all_tags, dict(metadata or {}), now)
            self._keep_media(record.entry)
            new = self._add(record)
            self._tally.add("recorded" if new else "repeats")
            if new and self._sharing is not None:
                self._sharing.add(record)
            return record.entry.entry_id
        return None

    def _add(self, record: Record) -> bool:
        """Bring a record into the catalog and the indexes; whether it is new."""
        new, removed = self._catalog.add(record)
        self._forget(removed)
        self._similar.refresh()
        return new

    def _add_shared(self, records: Sequence[Record]) -> None:
        """Bring records of other directories into the catalog and the indexes."""
        self._forget(self._catalog.add_all(records))
        self._similar.refresh()

    def _share_wrong(self, pair: str, entry_id: str) -> None:
        if self._sharing is not None:
            self._sharing.add_wrong(pair, entry_id)

    def _keep_media(self, entry: Entry) -> None:
        """Keep the bytes of an entry's images; without them it serves only requests that bring the same image."""
        for segment in Request("", entry.namespace, entry.segments, " ").media:
            if self.media.path(segment.media_id) is None:
                if (data := read_media(segment, self._roots)) is None:
                    self._tally.add("media not found")
                else:
                    with self._tally.boundary("media"):
                        self.media.put(data)

    # -- checking -----------------------------------------------------------------------------------------------

    def should_check(self, report: ReuseReport) -> bool:
        """Whether the unchanged request should also be run, in the background, and its answer be compared.

        True for a share of approximate hits (``verify_rate``, and what the policy asks for beside it). Run
        ``report.unchanged()``, call `checked` with the outcome, and `add_observation` with the answer, so that the
        next request of this kind is an exact hit.
        """
        return self._checking.selected(report.hit_id) and self.config.mode is CacheMode.LIVE

    def same_answer(self, first: str, second: str) -> bool:
        """Whether two answers to one request say the same; False where the comparison fails."""
        return self._checking.same_answer(first, second)

    def checked(self, hit_id: str, correct: bool) -> bool:
        """Hand in the outcome of a check. A wrong donor never answers this text again. False where the hit is unknown,
        closed, or too old."""
        return self._checking.checked(hit_id, correct)

    def report_wrong(self, hit_id: str) -> bool:
        """A user says that a hit's answer was wrong.

        The entry of an exact hit is removed. An approximate donor never answers this text again, the policy learns of
        it, and the entry is removed once it was wrong for two texts. False where the hit is unknown, closed, or too
        old.

        Raises:
            StoreError: that could not be noted, or the entry not be removed.
        """
        try:
            return self._checking.report_wrong(hit_id)
        except sqlite3.Error as error:
            raise StoreError(f"catalog {self._catalog.path}: {error}") from error

    def bar(self, pair: str, entry_id: str) -> None:
        """The same for a hit that another process may have served; `semkv.tiers.checking.pair_of` names the pair. The
        policy learns nothing of it."""
        try:
            self._checking.bar(pair, entry_id)
        except sqlite3.Error as error:
            raise StoreError(f"catalog {self._catalog.path}: {error}") from error

    # -- the rest -----------------------------------------------------------------------------------------------

    def _forget(self, removed: Removed) -> None:
        # Where the catalog cannot be read now, the indexes are found out of step with it later.
        with self._tally.boundary("catalog"):
            self._similar.remove(removed.entry_ids)
        with self._tally.boundary("media"):
            for media_id in removed.media:
                self.media.delete(media_id)

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
            if self._sharing is not None and entry_id is not None and not dry_run:
                self._sharing.removing(entry_id)
            removed = self._catalog.invalidate(
                tag=tag, entry_id=entry_id, namespace=namespace, dry_run=dry_run
            )
        except sqlite3.Error as error:
            raise StoreError(f"catalog {self._catalog.path}: {error}") from error
        if removed.entry_ids and not dry_run:
            self._forget(removed)
        return len(removed.entry_ids)

    def forget(self, tenant: str, text: str) -> int:
        """Delete the entries of a tenant that ask this; how many. Raises as `invalidate`."""
        try:
            found = self._catalog.asking(tenant, text)
        except sqlite3.Error as error:
            raise StoreError(f"catalog {self._catalog.path}: {error}") from error
        return sum(self.invalidate(entry_id=entry_id) for entry_id in found)

    def stats(self) -> CacheStats:
        """Counters and sizes."""
        entries = 0
        with self._tally.boundary("catalog"):
            entries = len(self._catalog)
        counts = self._tally.counts()

        def named(prefix: str) -> dict[str, int]:
            return {
                name.removeprefix(prefix): n
                for name, n in counts.items()
                if name.startswith(prefix)
            }

        faults = named("fault:") | {name: counts[name] for name in _PLAIN_FAULTS if name in counts}
        counted: dict[str, Any] = {
            f.name: counts.get(f.name.replace("_", " "), 0) for f in fields(CacheStats)
        }
        counted |= {
            "lookup_s": self._lookup_s,
            "hits": named("hit:"),
            "vetoes": named("veto:"),
            "told_apart": named("told apart:"),
            "judged": named("judged:"),
            "faults": faults,
        }
        return CacheStats(**counted | {"entries": entries, "media_bytes": self.media.nbytes})


def _own_judge(config: CacheConfig, *, is_semantic: bool) -> PairClassifier | None:
    """The bundled judge, where the configuration asks for it."""
    return PairClassifier() if is_semantic and config.judges_itself else None


def _judge_name(own: PairClassifier | None, *, served: str) -> str:
    """What verdicts are kept under: the bundled judge with its fingerprint, or the served one."""
    return served if own is None else f"{BUNDLED} {own.fingerprint}"


def _decider_of(config: CacheConfig, decider: Decider | None, encoder: TextEncoder) -> Decider:
    """The user's own decider, or the policy of the settings; the encoder must be a calibration's."""
    if decider is None:
        return build_policy(config, encoder.fingerprint if config.calibration else "")
    own: Decider = plug.require("decider", decider, Decider)
    return own


def _forgetting(*parts: object) -> list[Callable[[], None]]:
    """The methods by which those parts that remember anything forget it."""
    return [part.forget for part in parts if hasattr(part, "forget")]
