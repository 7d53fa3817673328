"""Making, inspecting, checking and emptying a cache directory.

Works beside running engines and gateways: every step is one that they would do themselves, and they notice what was
deleted. A directory belongs to semkv when it has a database of ours or a store of blocks. Only files of the forms that
semkv writes are deleted, so files that a user put there stay.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from semkv import plug
from semkv.config import CacheConfig
from semkv.errors import StoreError
from semkv.stores.catalog import CATALOG, EMPTIED, SCHEMA, Catalog, NamespaceUse, Removed
from semkv.stores.media import check_image
from semkv_stores import block_index, database
from semkv_stores.block_file import FILES, INDEX, check_file, is_store, tenant_tag
from semkv_stores.blocks import BlockStore, Bounds
from semkv_stores.database import Database, Schema
from semkv_stores.files import delete_all, described, in_short, make_folder, matching
from semkv_stores.ledger import FILE as WORTH
from semkv_stores.ledger import Ledger, Saved, TierFigures

_STORES = ("kv", "fusion")
_DAY_S = 86_400.0
WORTH_DAYS = 30  # `inspect` shows what was saved on the latest of them
_STRAY_S = 3600.0  # age at which a temporary file is a dead writer's
_WAIT_S = 5.0  # for other processes that use the database
_REMEDY = (
    "an engine, 'semkv gc' or 'semkv verify --repair' begins an empty store where an index is damaged or lost; "
    "a damaged catalog is put aside by an engine or a gateway that starts, and deleted by a purge of everything"
)
_HAS_ANSWERS = "SELECT 1 FROM sqlite_master WHERE name='responses'"
_IMAGES = f"media/??/{'[0-9a-f]' * 64}"
_GROUP = "semkv.stores"  # of entry points: a name, and a factory that takes the cache directory
_WEIGHTS = f"weights/{'?' * 64}.json"
_LEARNED = ("policy.json", "document-reuse.json")
_STRAYS = ("media/??/*.tmp", *(f"{name}.*.tmp" for name in _LEARNED), f"{_WEIGHTS}.*.tmp")

# What semkv writes into a cache directory besides databases and block stores.
# Earlier versions kept answers on their way to a store in folders `ahead*`.
_FORMS = (
    f"{CATALOG}.damaged",
    f"{WORTH}*",
    "media/??/*",
    *_LEARNED,
    _WEIGHTS,
    "ahead*/*.log",
    *_STRAYS,
)
_FOLDERS = (*_STORES, "media", "media/??", "weights", "ahead*")


@dataclass(slots=True)
class Report:
    """What a command found or did.

    Attributes:
        counts: files, entries, answers and so on, by name.
        damaged: a line for each file, answer or database that is damaged.
        unread: a line for what could not be read or deleted. The rest was done.
    """

    counts: Counter[str]
    damaged: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StoreUse:
    """One store on disk: ``kv``, ``fusion``, ``media`` or ``answers`` (of a gateway).

    ``namespace`` is the digest of the model, its settings and the rank, for ``kv`` and ``fusion``, and the tenant for
    ``answers``. ``items`` are block
    files, images or responses, ``blocks`` KV blocks or fusion states. ``oldest`` and ``used`` (when the oldest was
    written, and when one was last used) are seconds since the epoch.
    """

    store: str
    namespace: str
    items: int
    blocks: int
    nbytes: int
    oldest: float
    used: float


@dataclass(frozen=True, slots=True)
class Worth:
    """What was saved in the latest ``days``: seconds by tier, of all tenants, and requests, tokens and money by day,
    model and tenant. ``names`` are what tenants are called."""

    days: int
    tiers: Mapping[str, TierFigures]
    by_day: Mapping[str, Saved]
    by_model: Mapping[str, Saved]
    by_tenant: Mapping[str, Saved]
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a cache directory holds: the catalog by tenant and model, and all else by namespace. ``unread`` has a line
    for each thing that could not be read, and is not counted. ``tenants`` are names of the tenant that is counted; None
    for all tenants. ``worth`` is what was saved; None where nothing was."""

    cache_dir: str
    entries: tuple[NamespaceUse, ...]
    stores: tuple[StoreUse, ...]
    unread: tuple[str, ...] = ()
    tenants: tuple[str, ...] | None = None
    worth: Worth | None = None


class Maintained(Protocol):
    """A store that ``semkv stats``, ``verify``, ``gc`` and ``purge`` look after beside the catalog.

    A distribution names it as an entry point of the group ``semkv.stores``, which is called with the cache directory.
    Every method may raise `StoreError`.
    """

    name: str

    def usage(self, tenants: Sequence[str] | None = None) -> Iterable[StoreUse]:
        """What everybody has in it, or some tenants."""

    def verify(self, *, repair: bool = False) -> Iterable[str]:
        """Read every item: for each what is wrong with it, or an empty string. ``repair`` deletes those."""

    def collect(self, before: float) -> int:
        """Delete what was stored before a time, in seconds since the epoch; how many items."""

    def purge(
        self,
        *,
        tenants: Sequence[str] | None = None,
        tag: str | None = None,
        dry_run: bool = False,
    ) -> int:
        """Delete, or with ``dry_run`` count, the items that meet all that is given; how many."""

    def close(self) -> None:
        """Let go of files."""


# -- making one -------------------------------------------------------------------------------------------------------


def prepare(config: CacheConfig, *, purge: bool = False) -> None:
    """Make the cache directory ready: empty it where asked, and see that nobody else's files are in it.

    Raises:
        StoreError: it is no directory, cannot be written, or holds something else.
    """
    root, fusion = config.cache_dir, config.fusion_cache_dir
    for folder in (root,) if fusion is None else (root, fusion):
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder} is a file; a cache lives in a directory of its own")
        if purge:
            purge_directory(folder)
    if root.is_dir() and not is_ours(root) and not _is_empty(root):
        raise StoreError(
            f"{root} holds files that are not semkv's; choose an empty or new --cache-dir"
        )
    make_cache_folder(root)


def make_cache_folder(root: Path) -> None:
    """Make the folder of a cache, with those above it, or raise a StoreError."""
    try:
        make_folder(root)
    except OSError as error:
        reason = (
            os.strerror(errno.ENOTDIR)
            if isinstance(error, FileExistsError)
            else error.strerror or error
        )
        raise StoreError(
            f"{root} cannot be written ({reason}); choose another --cache-dir"
        ) from error


def is_ours(root: Path) -> bool:
    """Whether there is a sign that `purge_directory` goes by: a database of ours, also a damaged or an empty one that
    was opened as ours before, or a store of blocks."""
    file = root / CATALOG
    found = database.is_ours(file)
    # Of a gateway that keeps nothing else here.
    if found is None and database.is_ours(root / WORTH):
        return True
    if found is None:
        found = file.is_file() and file.with_name(f"{CATALOG}.lock").is_file()
    return found or bool(_block_stores(root))


def _begin(cache_dir: Path, **counts: int) -> Report:
    """The report of a command, with a line for each folder that it cannot read.

    Raises:
        StoreError: nothing there was written by semkv.
    """
    try:
        if not is_ours(cache_dir):
            raise StoreError(
                f"{cache_dir} holds no semkv cache: name one with --cache-dir, or in SEMKV_CACHE_DIR"
            )
    except OSError as error:
        raise StoreError(f"{cache_dir} cannot be read ({error.strerror or error})") from error
    closed = [
        f
        for f in _folders(cache_dir)
        if os.path.isdir(f) and not os.access(f, os.R_OK | os.X_OK)  # noqa: PTH112
    ]
    return Report(Counter(counts), unread=[f"{folder} cannot be read" for folder in closed])


def _folders(root: Path) -> list[Path]:
    return [folder for name in _FOLDERS for folder in matching(root, name)]


# -- its stores, opened to look after them ----------------------------------------------------------------------------


@contextmanager
def _noting(found: Report, name: str, file: Path) -> Iterator[None]:
    """A block over a database. A fault ends it, and becomes a line of ``found``."""
    try:
        yield
    except FileNotFoundError:  # no catalog
        pass
    except (OSError, StoreError, sqlite3.Error, ValueError) as error:
        cause = error.__cause__ or error
        if database.is_useless(cause):
            found.damaged.append(f"{name}: {file} is damaged ({cause}); {_REMEDY}")
        else:
            remedy = f"; {_REMEDY}" * (not database.is_filled(file))
            found.unread.append(f"{name}: {file} cannot be used ({error}){remedy}")


@contextmanager
def _entries(
    found: Report, cache_dir: Path, *, whole: bool = False, room: bool = False
) -> Iterator[tuple[Catalog, list[Maintained]]]:
    """The catalog, and the stores beside it. With ``whole`` the structure of the database is checked before, with
    ``room`` there is room for what a deletion writes: also the stores beside it may write when they are opened."""
    file = cache_dir / CATALOG
    if not database.is_filled(file):
        raise FileNotFoundError(file)
    with ExitStack() as opened:
        catalog = Catalog(file, timeout_s=_WAIT_S, replace=False)
        opened.enter_context(closing(catalog))
        if room:
            _make_room(catalog)
        beside = _beside(found, catalog)
        for store in beside:
            opened.enter_context(closing(store))
        if whole:
            catalog.database.check()
        yield catalog, beside


def _beside(found: Report, catalog: Catalog) -> list[Maintained]:
    """The stores that installed distributions name: a gateway's answers, and the user's own."""
    stores: list[Maintained] = []
    points = entry_points(group=_GROUP)
    if "answers" not in points.names and catalog.database.rows(_HAS_ANSWERS):
        found.unread.append(
            f"answers: {catalog.path} has a gateway's, and semkv-gateway is not installed"
        )
    for point in points:
        try:
            store = plug.load(f"entry point {point.name}", point.value, catalog.path.parent)
            stores.append(plug.require(point.name, store, Maintained, point.value))
        except StoreError as error:
            if error.reason != "missing":  # else it has no tables, and this user cannot make them
                raise
    return stores


def _block_stores(root: Path) -> list[tuple[str, Path]]:
    """The stores of KV blocks and of encoder outputs that are there, names and folders: below a cache directory, or
    that of one alone."""
    places = (("fusion", root), *((name, root / name) for name in _STORES))
    return [(name, folder) for name, folder in places if is_store(folder)]


@contextmanager
def _index(root: Path, *, whole: bool = False) -> Iterator[sqlite3.Connection]:
    """The index of a block store as it is, to read. With ``whole`` its structure is checked before."""
    schema = block_index.SCHEMA
    with closing(
        Database(
            root / INDEX,
            schema=schema,
            timeout_s=_WAIT_S,
            replace=False,
        )
    ) as opened:
        if whole:
            opened.check()
        with opened as db:
            yield db


@contextmanager
def _store(
    found: Report,
    name: str,
    root: Path,
    max_age_s: float = 0.0,
) -> Iterator[BlockStore]:
    """A block store to delete from. What could not be deleted becomes a line of ``found``."""
    with closing(BlockStore(root, name, Bounds(max_bytes=0, max_age_s=max_age_s))) as store:
        yield store
        if store.counters["errors"] or not store.writable:
            found.unread.append(f"{name}: not all in {root} could be read or deleted, do it again")


def _owners(salts: Iterable[str | None]) -> list[str]:
    """The tags of blocks that were stored for requests with these values of ``cache_salt``."""
    return sorted({tenant_tag(salt) for salt in salts if salt})


# -- stats and verify -------------------------------------------------------------------------------------------------


def inspect(
    cache_dir: Path,
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
    found, stores = _begin(cache_dir), list[StoreUse]()
    owners = None if tenants is None else _owners(salts)
    for name, root in _block_stores(cache_dir):
        with _noting(found, name, root / INDEX), _index(root) as db:
            ages = block_index.ages(db, owners)
            stores += [StoreUse(name, namespace, *use) for namespace, use in ages.items()]
    entries, theirs = list[NamespaceUse](), set[str]()
    with (
        _noting(found, "catalog", cache_dir / CATALOG),
        _entries(found, cache_dir) as (catalog, beside),
    ):
        for tenant in tenants or (None,):
            entries += catalog.by_namespace(tenant)
            theirs |= catalog.media(tenant)
        for store in beside:
            stores += store.usage(tenants)
    stores += _images_use(cache_dir, None if tenants is None else theirs)
    whose = None if tenants is None else tuple(tenants)
    worth: Worth | None = None
    file = cache_dir / WORTH
    if database.is_filled(file):
        with _noting(found, "worth", file), closing(Ledger(cache_dir, replace=False)) as ledger:
            worth = _worth(ledger, tenants)
    unread = (*found.damaged, *found.unread)
    return CacheUse(
        str(cache_dir),
        tuple(entries),
        tuple(stores),
        unread=unread,
        tenants=whose,
        worth=worth,
    )


def _worth(ledger: Ledger, tenants: Sequence[str] | None) -> Worth:
    """What was saved, for the tenants or for all."""
    return Worth(
        days=WORTH_DAYS,
        tiers=ledger.tiers(WORTH_DAYS) if tenants is None else {},
        by_day=ledger.by("day", WORTH_DAYS, tenants),
        by_model=ledger.by("model", WORTH_DAYS, tenants),
        by_tenant=ledger.by("tenant", WORTH_DAYS, tenants),
        names={
            tenant: name
            for tenant, name in ledger.names().items()
            if tenants is None or tenant in tenants
        },
    )


def _images_use(cache_dir: Path, names: set[str] | None) -> list[StoreUse]:
    """The images of some names, or all."""
    found = [status for image, status in _images(cache_dir) if names is None or image.name in names]
    if not found:
        return []
    times = [status.st_mtime for status in found]
    use = StoreUse(
        "media",
        namespace="",
        items=len(found),
        blocks=0,
        nbytes=sum(status.st_size for status in found),
        oldest=min(times),
        used=max(times),
    )
    return [use]


Watched = Callable[[Iterable[Any], str], Iterable[Any]]


def verify(
    cache_dir: Path, *, repair: bool = False, watched: Watched = lambda rows, what: rows
) -> Report:
    """Read every file, entry and response, and check every checksum. Counts what was ``checked`` of files, ``entries``,
    ``answers`` and, with ``repair``, ``deleted``.

    Args:
        repair: delete what is damaged, so that it is computed again, and empty a block store whose index is damaged or
            lost; never the database.
        watched: shows how far it is: takes what is looked at, and a word for it, and passes it on.

    Raises:
        StoreError: there is no cache, or it was written by another format version.
    """
    found = _begin(cache_dir, checked=0, entries=0, answers=0, deleted=0)

    def is_damaged(name: str, reason: str, counted: str = "checked") -> bool:
        found.counts[counted] += 1
        if reason:
            found.damaged.append(f"{name}: {reason}")
            found.counts["deleted"] += repair
        return bool(reason)

    def read(check: Callable[..., str], *what: Any) -> str:
        try:
            return check(*what)
        except (
            OSError
        ) as error:  # a fault that says nothing of the content: nothing is deleted for it
            found.unread.append(f"{what[-1]} cannot be read ({error.strerror or error})")
            return ""

    for name, root in _block_stores(cache_dir):
        files, faults = list[str](), len(found.damaged)
        if repair and not database.is_filled(root / INDEX):
            found.unread += _begin_anew(root / INDEX, block_index.SCHEMA)
        with _noting(found, name, root / INDEX), _index(root, whole=True) as db:
            files = block_index.file_ids(db, {}, committed=True)
        if repair and len(found.damaged) > faults:
            found.counts["deleted"] += 1
            found.unread += _begin_anew(root / INDEX, block_index.SCHEMA)
        damaged = [
            file for file in watched(files, name) if is_damaged(name, read(check_file, root, file))
        ]
        if repair and damaged:
            with _noting(found, name, root / INDEX), _store(found, name, root) as store:
                store.drop(damaged)
                store.sweep()
    images = [
        image
        for image, _ in watched(_images(cache_dir), "media")
        if is_damaged("media", read(check_image, image))
    ]
    _delete(images * repair, found)
    with (
        _noting(found, "catalog", cache_dir / CATALOG),
        _entries(found, cache_dir, whole=True) as (catalog, beside),
    ):
        for reason in watched(catalog.verify(repair=repair), "catalog"):
            is_damaged("catalog", reason, "entries")
        for other in beside:
            for reason in watched(other.verify(repair=repair), other.name):
                is_damaged(other.name, reason, other.name)
    return found


# -- gc and purge -----------------------------------------------------------------------------------------------------


def collect(cache_dir: Path, max_age_days: float | None = None) -> Report:
    """Delete files that no index names, images that no entry has any more, files that crashed writers left, and
    anything that was stored too long ago.

    Args:
        max_age_days: of KV blocks, encoder outputs, entries (with the images that only they have) and a gateway's
            responses; None or 0: any age.

    Raises:
        StoreError: there is no cache, or it was written by another format version.
    """
    found = _begin(cache_dir, kv=0, fusion=0, media=0, entries=0, answers=0)
    found.counts["strays"] = _drop_strays(cache_dir)
    max_age_s, now = (max_age_days or 0.0) * _DAY_S, time.time()
    for name, root in _block_stores(cache_dir):
        with _noting(found, name, root / INDEX), _store(found, name, root, max_age_s) as store:
            found.counts[name] = store.sweep()
    with (
        _noting(found, "catalog", cache_dir / CATALOG),
        _entries(found, cache_dir, whole=bool(max_age_s), room=bool(max_age_s)) as (
            catalog,
            beside,
        ),
    ):
        if max_age_s:
            before = now - max_age_s
            for other in beside:
                found.counts[other.name] += other.collect(before)
            removed = catalog.invalidate(before=before)
            found.counts["entries"] = len(removed.entry_ids)
            found.counts["media"] = _delete_images(cache_dir, catalog, removed, found)
        shown = catalog.media()
        # The entry of a younger image may be about to be written.
        loose = [
            i
            for i, status in _images(cache_dir)
            if status.st_mtime < now - _DAY_S and i.name not in shown
        ]
        found.counts["media"] += _delete(loose, found)
    return found


def purge(
    cache_dir: Path,
    *,
    tenants: Sequence[str] | None = None,
    tag: str | None = None,
    salts: Iterable[str | None] | None = None,
    dry_run: bool = False,
) -> Report:
    """Delete everything that semkv stored, and nothing else, or what is given; running processes forget it within a
    second or so. Counts ``entries``, ``answers`` of a gateway and ``files`` (with their images, or of KV blocks and
    encoder outputs; of a whole cache all its files).

    The text of a request that is under way is recorded afterwards.

    Args:
        tenants, tag: of entries and responses; with both, those that meet both.
        salts: of KV blocks and encoder outputs: the values of ``cache_salt`` that their requests came with.
        dry_run: only count.

    Raises:
        StoreError: there is no cache, it was written by another format version, is not known to be semkv's, or cannot
            be read.
    """
    found = _begin(cache_dir, entries=0, answers=0, files=0)
    if tenants is None and tag is None and salts is None:
        _purge_all(cache_dir, found, dry_run=dry_run)
    if tenants is not None or tag is not None:
        _purge_entries(cache_dir, found, tenants=tenants, tag=tag, dry_run=dry_run)
    if tenants is not None and tag is None and not dry_run:
        _forget_worth(cache_dir, tenants, found)
    if salts is not None:
        _purge_blocks(cache_dir, found, owners=_owners(salts), dry_run=dry_run)
    return found


def _purge_entries(
    cache_dir: Path,
    found: Report,
    *,
    tenants: Sequence[str] | None,
    tag: str | None,
    dry_run: bool,
) -> None:
    """Delete, or count, entries with their images, and what the stores beside the catalog have."""
    with (
        _noting(found, "catalog", cache_dir / CATALOG),
        _entries(found, cache_dir, whole=True, room=not dry_run) as (catalog, beside),
    ):
        for other in beside:
            found.counts[other.name] += other.purge(tenants=tenants, tag=tag, dry_run=dry_run)
        removed = catalog.invalidate(tenants=tenants, tag=tag, dry_run=dry_run)
        found.counts["entries"] = len(removed.entry_ids)
        if dry_run:
            found.counts["files"] = len(_images_of(cache_dir, removed))
        else:
            found.counts["files"] = _delete_images(cache_dir, catalog, removed, found)
    if not dry_run:
        _drop_strays(cache_dir)


def _purge_blocks(
    cache_dir: Path,
    found: Report,
    *,
    owners: Sequence[str],
    dry_run: bool,
) -> None:
    """Delete, or count, the block files of some owners."""
    for name, root in _block_stores(cache_dir):
        with _noting(found, name, root / INDEX):
            if dry_run:
                with _index(root) as db:
                    files = [block_index.file_ids(db, {"owner": owner}) for owner in owners]
                found.counts["files"] += sum(map(len, files))
            else:
                with _store(found, name, root) as store:
                    found.counts["files"] += sum(store.purge(owner) for owner in owners)


def _forget_worth(cache_dir: Path, tenants: Sequence[str], found: Report) -> None:
    """Delete what was saved for some tenants."""
    file = cache_dir / WORTH
    if database.is_filled(file):
        with _noting(found, "worth", file), closing(Ledger(cache_dir)) as ledger:
            ledger.forget(tenants)


def _make_room(catalog: Catalog) -> None:
    """Empty the write-ahead log, so that a full disk can take what the deletion writes."""
    with suppress(sqlite3.OperationalError):
        catalog.database.truncate_log()


def _delete_images(cache_dir: Path, catalog: Catalog, removed: Removed, found: Report) -> int:
    """Delete the images that no entry has any more, and what the database's log has of the entries; how many images."""
    if not catalog.database.truncate_log():
        found.unread.append(
            f"{catalog.path} is being read: its write-ahead log has what was deleted, purge again"
        )
    return _delete(_images_of(cache_dir, removed), found)


def _delete(files: Sequence[Path], found: Report) -> int:
    """Delete files; how many went. That others did not becomes a line of ``found``."""
    left = delete_all(files)
    if left:
        found.unread.append(in_short(left))
    return len(files) - len(left)


def _purge_all(root: Path, found: Report, *, dry_run: bool) -> None:
    """Delete, or count, all that semkv has in a directory. A catalog that cannot be read goes all the same."""
    file = root / CATALOG
    look = Report(Counter())
    schema = SCHEMA
    with _noting(look, "catalog", file), _entries(look, root) as (catalog, beside):
        found.counts["entries"] = len(catalog)
        for other in beside:
            found.counts[other.name] = sum(use.items for use in other.usage())
            if other.name != "answers" and not dry_run:  # answers lie in the catalog's file
                other.purge()
        if catalog.database.rows("SELECT 1 FROM shared"):
            schema = EMPTIED
    if database.is_ours(file) is False:
        found.unread += look.unread
    places = [folder for _, folder in _block_stores(root)]
    stores = [folder for folder in places if folder == root or not folder.is_symlink()]
    found.unread += [
        f"{link} is a link, and nothing behind it is deleted: see to {link.resolve()}"
        for link in filter(Path.is_symlink, _folders(root))
    ]
    files = _all_files(root, stores)
    if dry_run:
        found.counts["files"] = len(files)
        return
    _begin_all_anew(file, schema, stores, found)
    files |= _all_files(root, stores)  # others may have written new ones meanwhile
    found.counts["files"] = _delete(sorted(files), found)


def _all_files(root: Path, stores: Sequence[Path]) -> set[Path]:
    """What is there of the forms that semkv writes, and the files of block stores."""
    found = set(_files(root, *_FORMS))
    for store in stores:
        found.update(_files(store, f"{FILES}/??/*"))
    return found


def _begin_all_anew(file: Path, schema: Schema, stores: Sequence[Path], found: Report) -> None:
    """Begin the catalog and the indexes of block stores anew. What cannot be is a line of ``found``."""
    if database.is_filled(file) and database.is_ours(file) is not False:
        left = _begin_anew(file, schema)
        if left:
            found.unread += left
            found.counts["entries"] = 0
            found.counts["answers"] = 0
    for store in stores:
        found.unread += _begin_anew(store / INDEX, block_index.EMPTIED)


def purge_directory(root: Path) -> None:
    """`purge` of everything below a directory; nothing where that is empty.

    Raises:
        StoreError: as `purge`, or not all could be deleted.
    """
    if root.is_dir() and (is_ours(root) or not _is_empty(root)) and (left := purge(root).unread):
        raise StoreError("; ".join(left))


def _begin_anew(file: Path, schema: Schema) -> list[str]:
    """Delete a database with everything that only it names, and begin another. Processes that have it open go on with
    the new one, and treat everything as purged. Returns a line for what could not be deleted."""
    try:
        Database(
            file,
            schema=schema,
            anew=True,
        ).close()
    except StoreError as error:
        if file.exists() and file.stat().st_size:  # else the disk is full
            return [f"{file} cannot be begun anew ({error}), purge again"]
    return []


# -- its files --------------------------------------------------------------------------------------------------------


def _images(cache_dir: Path) -> list[tuple[Path, os.stat_result]]:
    return described(matching(cache_dir, _IMAGES))


def _images_of(cache_dir: Path, removed: Removed) -> list[Path]:
    gone = set(removed.media)
    return [image for image, _ in _images(cache_dir) if image.name in gone]


def _drop_strays(cache_dir: Path) -> int:
    """Delete what crashed writers left under temporary names, but for block files; how many files that were."""
    found = described(path for form in _STRAYS for path in matching(cache_dir, form))
    old = [path for path, status in found if time.time() - status.st_mtime > _STRAY_S]
    return len(old) - len(delete_all(old))


def _is_empty(root: Path) -> bool:
    """Whether nothing is there but folders, and digests of weights, which may be written before all else."""
    paths = set(matching(root, "**/*")).difference(_files(root, _WEIGHTS))
    return all(path.is_dir() and not path.is_symlink() for path in paths)


def _files(root: Path, *patterns: str) -> list[Path]:
    """What is there of some forms, but nothing behind a link."""
    there = {path for pattern in patterns for path in matching(root, pattern)}
    found = [path for path in there if os.path.isfile(path) or os.path.islink(path)]  # noqa: PTH113, PTH114 (no error)
    within = len(root.parents) + 1
    return sorted(
        file for file in found if not any(part.is_symlink() for part in file.parents[:-within])
    )
