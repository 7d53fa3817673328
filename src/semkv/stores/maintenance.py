"""Looking after a cache directory from outside: what it holds, whether it is whole, and deleting from it.

Works beside running engines and gateways: every step is one that they would do themselves, and they hear of what was
deleted. Anything that could not be read or deleted is listed (``unread``), and the rest is done. Responses that an
ended gateway had on their way are brought to the store first.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from semkv.errors import CorruptValue, StoreError
from semkv.stores.block_file import INDEX, MARKER, tenant_tag
from semkv.stores.blocks import BlockStore, Bounds
from semkv.stores.cachedir import CACHE_FILES, is_ours, purge_directory
from semkv.stores.catalog import Catalog, NamespaceUse, Removed
from semkv.stores.database import CATALOG, is_damage, is_filled, is_useless
from semkv.stores.database import is_ours as is_our_database
from semkv.stores.files import described, matching, remove_strays
from semkv.stores.media import MediaStore
from semkv.stores.responses.ahead import deliver, folder_of, replay
from semkv.stores.responses.base import Selector
from semkv.stores.responses.sqlite import AnswersUse, SqliteStore

_UNBOUNDED = Bounds(max_bytes=0)
_DAY_S = 86_400.0
_ALL = 1 << 62  # bounds that evict nothing: they are for the gateway to set
_WAIT_S = 5.0  # for other processes that use the database


@dataclass(frozen=True, slots=True)
class StoreUse:
    """One store on disk; times are seconds since the epoch.

    Attributes:
        store: ``kv``, ``fusion``, ``media`` or ``answers`` (of a gateway).
        namespace: digest of the model, its settings and the rank; empty for all but ``kv`` and ``fusion``.
        items: block files, fusion states, images or responses.
        blocks: KV blocks or fusion states.
        nbytes: bytes of the files; of responses, those of heads and payloads, so that tenants' sizes add up.
        oldest, used: when the oldest was written, and when one was last used; None where it is empty.
    """

    store: str
    namespace: str
    items: int
    blocks: int
    nbytes: int
    oldest: float | None
    used: float | None


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a cache directory holds.

    Attributes:
        cache_dir: the directory.
        entries: the catalog, by tenant and model.
        answers: a gateway's responses, by tenant.
        stores: all but the catalog, by namespace.
        unread: a line for each thing that could not be read, and is not counted.
        tenants: names of the tenant that is counted; None for all tenants.
    """

    cache_dir: str
    entries: tuple[NamespaceUse, ...]
    answers: tuple[AnswersUse, ...]
    stores: tuple[StoreUse, ...]
    unread: tuple[str, ...] = ()
    tenants: tuple[str, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of ``stores``."""
        return sum(store.nbytes for store in self.stores)


@dataclass(frozen=True, slots=True)
class Damage:
    """What a check found: files (but for the database) and responses of a gateway that were read, a line for each that
    is damaged, how many of those a repair deleted, and a line for what could not be read at all."""

    checked: int
    answers: int
    damaged: tuple[str, ...]
    deleted: int = 0
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Purged:
    """What was, or with ``dry_run`` would be, deleted: entries, responses of a gateway, and files (images, KV and
    encoder outputs; of a whole cache all its files); a line for each thing that could not be read, and was left."""

    entries: int = 0
    answers: int = 0
    files: int = 0
    dry_run: bool = False
    unread: tuple[str, ...] = ()

    def __add__(self, other: Purged) -> Purged:
        counts = (self.entries + other.entries, self.answers + other.answers, self.files + other.files)
        return Purged(*counts, self.dry_run, self.unread + other.unread)


@dataclass(frozen=True, slots=True)
class Collected:
    """What was deleted: block files and strays among them, images that no entry has any more, entries and responses for
    their age, other temporary files; a line for each thing that could not be read, and was left."""

    kv: int
    fusion: int
    media: int
    entries: int
    answers: int
    strays: int
    unread: tuple[str, ...]


# -- what is there ----------------------------------------------------------------------------------------------------


def check_is_cache(cache_dir: Path) -> None:
    """Refuse a directory that is no cache, rather than make one.

    Raises:
        StoreError: nothing there was written by semkv.
    """
    if not is_filled(cache_dir / CATALOG) and not is_ours(cache_dir):
        raise StoreError(f"{cache_dir} holds no semkv cache: name one with --cache-dir, or in SEMKV_CACHE_DIR")


@contextmanager
def _database(
    cache_dir: Path, unread: list[str], damaged: list[str] | None = None
) -> Iterator[tuple[Catalog, SqliteStore] | None]:
    """The catalog and the responses of a cache; None where it has none, or none that can be opened.

    A fault ends the ``with`` block and becomes a line of ``unread``, or of ``damaged`` where the file is.
    """
    file, is_open = cache_dir / CATALOG, False
    try:
        if is_filled(file):
            with (
                closing(SqliteStore(file, max_bytes=_ALL, max_entries=_ALL, timeout_s=_WAIT_S, replace=False)) as store,
                closing(Catalog(file, timeout_s=_WAIT_S, replace=False)) as catalog,
            ):
                # A StoreError leaves the rest for another time.
                replay(folder_of(cache_dir), lambda found, since: deliver(store, found, since, time.time()) or True)
                is_open = True
                yield catalog, store
    except (sqlite3.Error, StoreError) as error:
        cause = error.__cause__ or error
        if is_damage(cause):
            (unread if damaged is None else damaged).append(
                f"{file} is damaged ({cause}): a purge without --tenant and --tag deletes it, an engine or a gateway "
                "that is started on it puts it aside"
            )
        else:
            unread.append(str(error) if isinstance(error, StoreError) else f"{file}: {error}")
    if not is_open:
        yield None


@contextmanager
def _blocks(
    cache_dir: Path,
    fusion_dir: Path | None,
    unread: list[str],
    damaged: list[str] | None = None,
    *,
    bounds: Bounds = _UNBOUNDED,
    read_only: bool = False,
) -> Iterator[list[tuple[str, BlockStore]]]:
    """The stores of KV blocks and of encoder outputs that are there, by name.

    With ``read_only`` an index that cannot be used becomes a line of ``unread``, or of ``damaged`` where it is; without
    it such a store is begun anew.
    """
    places = {"kv": cache_dir / "kv", "fusion": fusion_dir or cache_dir / "fusion"}
    with ExitStack() as stack:
        stores = [
            (name, stack.enter_context(closing(BlockStore(root, name, bounds, read_only=read_only))))
            for name, root in places.items()
            if (root / MARKER).is_file()
        ]
        yield stores
        for name, store in stores:
            if store.fault is not None:
                is_damaged = is_useless(store.fault)
                (unread if damaged is None or not is_damaged else damaged).append(
                    f"{name}: {store.root / INDEX} {'is damaged' if is_damaged else 'cannot be read'} ({store.fault}): "
                    "an engine, 'semkv gc' or 'semkv verify --repair' begins an empty store where it is damaged or lost"
                )


def _owners(salts: Iterable[str | None]) -> list[str]:
    """The tags of blocks that were stored for requests with these values of ``cache_salt``."""
    return sorted({tenant_tag(salt) for salt in salts if salt})


def _images(cache_dir: Path) -> list[Path]:
    return sorted(f for f in matching(cache_dir / "media", "??/*") if len(f.name) == 64)


def inspect(
    cache_dir: Path,
    fusion_dir: Path | None = None,
    tenants: Sequence[str] | None = None,
    salts: Iterable[str | None] = (),
) -> CacheUse:
    """Counts, bytes and ages: of everything, or of what is known to be a tenant's.

    Args:
        tenants: its names in the catalog and among a gateway's responses. An image that several have counts for each.
        salts: values of ``cache_salt`` that its requests came with, which tell its KV blocks and encoder outputs.

    Raises:
        StoreError: there is no cache, or it was written by another format version.
    """
    check_is_cache(cache_dir)
    stores: list[StoreUse] = []
    unread: list[str] = []
    with _blocks(cache_dir, fusion_dir, unread, read_only=True) as opened:
        for name, store in opened:
            ages = store.ages(None if tenants is None else _owners(salts))
            stores += [StoreUse(name, namespace, *counts) for namespace, counts in ages.items()]
    entries: tuple[NamespaceUse, ...] = ()
    answers: list[AnswersUse] = []
    theirs: set[str] = set()
    with _database(cache_dir, unread) as database:
        if database is not None:
            catalog, responses = database
            entries = tuple(row for tenant in tenants or (None,) for row in catalog.by_namespace(tenant))
            theirs = {media_id for tenant in tenants or () for media_id in catalog.media_of(tenant)}
            answers = [use for use in responses.by_tenant() if tenants is None or use.tenant in tenants]
    media = [file for file in _images(cache_dir) if tenants is None or file.name in theirs]
    if files := [status for _, status in described(media)]:
        times, nbytes = [status.st_mtime for status in files], sum(status.st_size for status in files)
        stores.append(StoreUse("media", "", len(files), 0, nbytes, min(times), max(times)))
    if answers:
        count, nbytes = sum(use.answers for use in answers), sum(use.nbytes for use in answers)
        oldest, used = min(use.oldest for use in answers), max(use.used for use in answers)
        stores.append(StoreUse("answers", "", count, 0, nbytes, oldest, used))
    whose = None if tenants is None else tuple(tenants)
    return CacheUse(str(cache_dir), entries, tuple(answers), tuple(stores), tuple(unread), whose)


def verify(
    cache_dir: Path,
    fusion_dir: Path | None = None,
    *,
    repair: bool = False,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Damage:
    """Read every file and every response of a gateway, and check every checksum.

    Args:
        repair: delete what is damaged, so that it is computed again; of responses those alone, and never the database.
        advance: called with how many files and responses of how many are done.

    Raises:
        StoreError: there is no cache, or it was written by another format version.
    """
    check_is_cache(cache_dir)
    damaged: list[str] = []
    indexes: list[str] = []
    catalogs: list[str] = []  # damage that no repair deletes
    unread: list[str] = []
    with _blocks(cache_dir, fusion_dir, unread, indexes, read_only=not repair) as opened:
        checks: list[tuple[str, Callable[[], str], Callable[[], object]]] = []  # store, what is wrong, and to delete it
        for name, store in opened:
            store.check()
            checks += [(name, partial(store.damage, file), partial(store.reject, file)) for file in store.files()]
        if images := _images(cache_dir):
            media = MediaStore(cache_dir / "media")
            checks += [("media", partial(media.damage, i.name), partial(media.delete, i.name)) for i in images]
        files = len(checks)
        for done, (name, check, delete) in enumerate(checks, 1):
            if reason := check():
                damaged.append(f"{name}: {reason}")
                if repair:
                    delete()
            advance(done, files)
    answers = 0
    with _database(cache_dir, unread, catalogs) as database:
        if database is not None:
            catalog, responses = database
            if reason := catalog.database.check():
                catalogs.append(f"{reason} (a purge of everything deletes it)")
            total = files + responses.usage()[0]
            for answers, reason in enumerate(responses.examine(repair=repair), 1):
                damaged += [f"answers: {reason}"] * bool(reason)
                advance(files + answers, max(files + answers, total))
    lines = (*damaged, *indexes, *(f"catalog: {line}" for line in catalogs[:1]))
    return Damage(files, answers, lines, len(damaged) if repair else 0, tuple(unread))


# -- deleting ---------------------------------------------------------------------------------------------------------


def collect(cache_dir: Path, fusion_dir: Path | None = None, max_age_days: float | None = None) -> Collected:
    """Delete files that no index names, images that no entry has any more, files that crashed writers left, and
    anything that was stored too long ago.

    Args:
        max_age_days: of KV blocks, encoder outputs, entries (with the images that only they have) and a gateway's
            responses; None or 0: any age.

    Raises:
        StoreError: there is no cache, or it was written by another format version.
    """
    check_is_cache(cache_dir)
    strays = _drop_strays(cache_dir)
    max_age_s, old = (max_age_days or 0.0) * _DAY_S, Purged()
    if max_age_s:
        old = purge_entries(cache_dir, None, None, before=time.time() - max_age_s, dry_run=False)
    unread, loose = list(old.unread), []
    with _blocks(cache_dir, fusion_dir, unread, bounds=Bounds(max_bytes=0, max_age_s=max_age_s)) as opened:
        swept = {"kv": 0, "fusion": 0} | {name: store.sweep() for name, store in opened}
    with _database(cache_dir, unread) as database:
        if database is not None:
            before = time.time() - _DAY_S  # the entry of a younger one may be about to be written
            found = described(_images(cache_dir))
            loose = [f for f, status in found if status.st_mtime < before and not database[0].has_media(f.name)]
    for image in loose:
        image.unlink(missing_ok=True)
    return Collected(
        **swept,
        media=old.files + len(loose),
        entries=old.entries,
        answers=old.answers,
        strays=strays,
        unread=tuple(dict.fromkeys(unread)),
    )


def _drop_strays(cache_dir: Path) -> int:
    """Delete what crashed writers left under temporary names, but for block files; how many files that were."""
    patterns = [pattern for pattern in ("media/??/*.tmp", *CACHE_FILES) if pattern.endswith(".tmp")]
    return sum(remove_strays(cache_dir, pattern) for pattern in patterns)


def purge_entries(
    cache_dir: Path, tenants: Sequence[str] | None, tag: str | None, *, before: float | None = None, dry_run: bool
) -> Purged:
    """Delete the catalog's entries and a gateway's responses of a tenant (by its names), with a tag, made before a time
    (in seconds since the epoch), or those that meet all that is given. With them go the images that only they had.
    Running engines and gateways forget them within a second or so.

    The text of a request that is under way is recorded afterwards.

    Raises:
        StoreError: there is no cache.
    """
    check_is_cache(cache_dir)
    removed, answers = Removed(), 0
    unread: list[str] = []
    with _database(cache_dir, unread) as database:
        if database is not None:
            catalog, responses = database
            if reason := catalog.database.check():  # nothing is written to a damaged file
                raise CorruptValue(
                    f"{catalog.path} is damaged ({reason}): a purge without --tenant and --tag deletes it"
                )
            # Where no gateway was nobody looks for what is logged, and the log would have the tenant's name.
            has_gateway = responses.usage()[0] or any(cache_dir.glob("ahead*"))
            for tenant in ((None,) if tenants is None else tenants) if has_gateway else ():
                answers += responses.invalidate(Selector(partition=tenant, tag=tag, before=before), dry_run=dry_run)
            removed = catalog.invalidate(tenants=tenants, tag=tag, before=before, dry_run=dry_run)
            if not dry_run and not catalog.database.truncate_log():
                unread.append(f"{catalog.path} is being read: its write-ahead log has what was deleted, purge again")
    loose = set(removed.media)
    images = [image for image in _images(cache_dir) if image.name in loose]
    if not dry_run:
        for image in images:
            image.unlink(missing_ok=True)
        _drop_strays(cache_dir)
    return Purged(len(removed.entry_ids), answers, len(images), dry_run, tuple(unread))


def purge_salts(cache_dir: Path, fusion_dir: Path | None, salts: Iterable[str | None], *, dry_run: bool) -> Purged:
    """Delete the KV blocks and encoder outputs of requests that came with one of these values of ``cache_salt``.

    Running engines hear of it, for what they hold in memory.

    Raises:
        StoreError: the cache was written by another format version.
    """
    owners, count = _owners(salts), 0
    unread: list[str] = []
    with _blocks(cache_dir, fusion_dir, unread, read_only=dry_run) as opened:
        for name, store in opened:
            count += sum(store.purge(owner=owner, dry_run=dry_run) for owner in owners)
            if not dry_run and (store.counters["errors"] or not store.writable):
                unread.append(f"{name}: not all could be read or deleted, purge again")
    return Purged(files=count, dry_run=dry_run, unread=tuple(unread))


def purge_all(cache_dir: Path, fusion_dir: Path | None = None, *, dry_run: bool) -> Purged:
    """Delete everything that semkv stored, and nothing else; running engines and gateways go on empty.

    Raises:
        StoreError: there is no cache, or one of the directories is not known to be semkv's: nothing is deleted.
    """
    check_is_cache(cache_dir)
    if not is_ours(cache_dir):
        raise StoreError(f"{cache_dir} is not known to be semkv's, and is not purged: its {CATALOG} cannot be read")
    if fusion_dir is not None:
        purge_directory(fusion_dir, dry_run=True)  # refuses what is not ours
    entries = answers = 0
    unread: list[str] = []
    with _database(cache_dir, unread) as database:
        if database is not None:
            entries, answers = len(database[0]), database[1].usage()[0]
    if is_our_database(cache_dir / CATALOG) is not False:
        unread.clear()  # it goes all the same
    files = 0
    try:
        for folder in (cache_dir,) if fusion_dir is None else (cache_dir, fusion_dir):
            try:
                files += purge_directory(folder, dry_run=dry_run)
            except StoreError as error:
                unread.append(str(error))
    except OSError as error:
        raise StoreError(f"{error.filename or cache_dir} cannot be purged ({error.strerror or error})") from error
    return Purged(entries, answers, files, dry_run, tuple(unread))
