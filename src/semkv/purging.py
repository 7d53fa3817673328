"""Deleting from outside: all that semkv wrote to a cache directory, what is one tenant's or has one tag, what is old or
nobody's.

Works beside running engines and gateways. What cannot be read is told (`Purged.unread`), and the rest goes.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from semkv.errors import CorruptValue, StoreError
from semkv.kept_graphs import FOLDER as GRAPHS
from semkv.kept_graphs import forget_kept
from semkv.maintenance import check_is_cache, drop_strays, filled, open_blocks, owners, pictures
from semkv.stores.block_folder import MARKER
from semkv.stores.blocks import Bounds
from semkv.stores.cachedir import (
    BLOCK_FILES,
    CACHE_FILES,
    CATALOG,
    empty_catalog,
    is_ours,
    open_catalog,
    purge_directory,
    without_catalog,
)
from semkv.stores.catalog import Catalog
from semkv.stores.catalog_rows import Removed
from semkv.stores.files import described
from semkv.stores.responses import use
from semkv.stores.responses.ahead import FOLDER as AHEAD
from semkv.stores.responses.ahead import discard
from semkv.stores.responses.base import Selector
from semkv.stores.responses.open import FILE as ANSWERS

_DAY_S = 86_400.0
_WAIT_S = 5.0  # for readers of a database


@dataclass(frozen=True, slots=True)
class Purged:
    """What was, or with ``dry_run`` would be, deleted.

    Attributes:
        entries: of the catalog.
        answers: a gateway's, in its store and in the logs of ended ones.
        files: pictures, KV and encoder outputs, with all of them also what lies beside.
        dry_run: nothing was deleted.
        unread: a line for what could not be read, and was left as it is.
    """

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
    """What was deleted.

    Attributes:
        kv, fusion: block files and stray files.
        media: images that no entry has any more.
        graphs: of the vector indexes, where nobody has entries any more.
        entries: of the catalog, for their age.
        answers: a gateway's, for their age.
        strays: temporary files that dead writers left beside those.
        unread: a line for what could not be read, and was left as it is.
    """

    kv: int
    fusion: int
    media: int
    graphs: int
    entries: int
    answers: int
    strays: int
    unread: tuple[str, ...]


def collect(cache_dir: Path, fusion_dir: Path | None = None, max_age_days: float | None = None) -> Collected:
    """Delete what is nobody's: files that no index names, images that no entry has any more, what dead writers left;
    and what was stored too long ago.

    Args:
        max_age_days: of KV blocks, encoder outputs, entries (with the images that only they have) and a gateway's
            answers; None or 0: any age.

    Raises:
        StoreError: there is no cache, or it was written by another format version.
    """
    check_is_cache(cache_dir)
    strays = drop_strays(cache_dir)
    max_age_s, old = (max_age_days or 0.0) * _DAY_S, Purged()
    if max_age_s:
        before = time.time() - max_age_s
        old = purge_entries(cache_dir, None, None, before=before, dry_run=False)
        old += purge_answers(cache_dir, None, None, before=before, dry_run=False)
    swept, graphs, images, unread = {"kv": 0, "fusion": 0}, 0, old.files, list(old.unread)
    with open_blocks(cache_dir, fusion_dir, Bounds(max_bytes=0, max_age_s=max_age_s)) as opened:
        for name, store in opened:
            swept[name] += store.swept
    if filled(cache_dir / CATALOG):
        try:
            with open_catalog(cache_dir / CATALOG) as catalog:
                graphs = forget_kept(cache_dir / GRAPHS, catalog.spaces())
                for image, status in described(pictures(cache_dir)):
                    young = time.time() - status.st_mtime < _DAY_S  # its entry may be about to be written
                    if not young and not catalog.has_media(image.name):
                        image.unlink(missing_ok=True)
                        images += 1
        except StoreError as error:
            unread.append(str(error))
    return Collected(
        **swept,
        media=images,
        graphs=graphs,
        entries=old.entries,
        answers=old.answers,
        strays=strays,
        unread=tuple(dict.fromkeys(unread)),
    )


def purge_entries(
    cache_dir: Path, tenants: Sequence[str] | None, tag: str | None, *, before: float | None = None, dry_run: bool
) -> Purged:
    """Delete the catalog's entries of a tenant (by its names), with a tag, recorded before a time (in seconds since the
    epoch), or those that meet all that is given; where nothing is, all. With them go the images that only they had, and
    the graphs in which their vectors are. A running engine forgets them within a second or so, and writes new graphs.

    The text of a request that is under way is recorded afterwards.

    Raises:
        StoreError: there is no cache.
    """
    check_is_cache(cache_dir)
    if not filled(cache_dir / CATALOG):
        return Purged(dry_run=dry_run)
    try:
        removed, others = _delete_entries(cache_dir / CATALOG, tenants, tag, before, dry_run=dry_run)
    except StoreError as error:
        return Purged(dry_run=dry_run, unread=(str(error),))
    loose = set(removed.media)
    images = [image for image in pictures(cache_dir) if image.name in loose]
    unread = ""
    if not dry_run:
        forget_kept(cache_dir / GRAPHS, others)
        for image in images:
            image.unlink(missing_ok=True)
        drop_strays(cache_dir)
        unread = _overwrite(cache_dir / CATALOG)
    return Purged(len(removed.entry_ids), files=len(images), dry_run=dry_run, unread=(unread,) if unread else ())


def _overwrite(database: Path) -> str:
    """Bring the write-ahead log of a database that others have open into it, so that nothing of what was deleted stays
    there; the database has overwritten it. Why that could not be done, or an empty string."""
    if not database.with_name(f"{database.name}-wal").exists():
        return ""
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True, timeout=_WAIT_S)) as db:
            busy = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    except sqlite3.Error as error:
        return f"{database}: {error}"
    return f"{database} is being read: its write-ahead log has what was deleted, purge again" if busy else ""


def _delete_entries(
    file: Path, tenants: Sequence[str] | None, tag: str | None, before: float | None, *, dry_run: bool
) -> tuple[Removed, set[str]]:
    """What went, and the namespaces of which nothing went. Raises as `open_catalog`."""
    with open_catalog(file) as catalog:
        if tenants is None and tag is None and before is None:
            tenants = sorted({row.tenant for row in catalog.by_namespace()})
        removed = catalog.invalidate(tenants=tenants, tag=tag, before=before, dry_run=dry_run)
        return removed, set(catalog.spaces()).difference(removed.spaces)


def purge_answers(
    cache_dir: Path, tenants: Sequence[str] | None, tag: str | None, *, before: float | None = None, dry_run: bool
) -> Purged:
    """Delete a gateway's answers of a tenant (by its names), with a tag, kept before a time, or those that meet all
    that is given; where nothing is, all of them; also those on their way to the store that a gateway which has ended
    left. Running gateways heed it within a second or so.
    """
    selectors = [
        Selector(partition=tenant, tag=tag, before=before) for tenant in ((None,) if tenants is None else tenants)
    ]
    gone, unread = 0, []
    if (cache_dir / ANSWERS).exists():
        try:
            gone += use.remove(cache_dir / ANSWERS, selectors, dry_run=dry_run)
        except StoreError as error:
            unread.append(str(error))
        else:
            unread += [fault] if not dry_run and (fault := _overwrite(cache_dir / ANSWERS)) else []
    try:
        for selector in selectors:
            gone += discard(cache_dir / AHEAD, selector, dry_run=dry_run)
    except OSError as error:
        unread.append(f"answers {cache_dir / AHEAD}: {error}")
    return Purged(answers=gone, dry_run=dry_run, unread=tuple(unread))


def purge_salts(cache_dir: Path, fusion_dir: Path | None, salts: Iterable[str | None], *, dry_run: bool) -> Purged:
    """Delete the KV blocks and encoder outputs of requests that came with one of these values of ``cache_salt``.

    Running engines hear of it, for what they hold in memory.

    Raises:
        StoreError: the cache was written by another format version.
    """
    whose, count, unread = owners(salts), 0, []
    with open_blocks(cache_dir, fusion_dir) as opened:
        for name, store in opened:
            count += sum(store.purge(owner=owner, dry_run=dry_run) for owner in whose)
            if store.counters["errors"]:
                unread.append(f"{name}: not all could be read or deleted, purge again")
    return Purged(files=count, dry_run=dry_run, unread=tuple(unread))


def purge_all(cache_dir: Path, fusion_dir: Path | None = None, *, dry_run: bool) -> Purged:
    """Delete everything that semkv wrote, and nothing else; running engines serve nothing of it from memory either.

    What a running engine or gateway has open is emptied and stays: its catalog, and the store of answers.

    Raises:
        StoreError: there is no cache, or one of the directories is not known to be semkv's: nothing is deleted.
    """
    check_is_cache(cache_dir)
    if not is_ours(cache_dir):
        _check_is_gateways(cache_dir)
    if fusion_dir is not None:
        purge_directory(fusion_dir, BLOCK_FILES, dry_run=True)  # refuses what is not ours
    entries, stays, unread = 0, False, []
    if filled(cache_dir / CATALOG):
        try:
            entries, stays = empty_catalog(cache_dir / CATALOG, dry_run=dry_run)
        except CorruptValue:
            pass  # it goes with the rest
        except StoreError as error:
            stays = True
            unread.append(str(error))
    patterns = without_catalog(CACHE_FILES) if stays else CACHE_FILES
    if stays or (cache_dir / ANSWERS).exists():  # it is a cache still
        patterns = tuple(pattern for pattern in patterns if pattern != MARKER)
    files = purge_directory(cache_dir, patterns, dry_run=dry_run, known=True)
    if stays and not unread and not dry_run and (fault := _overwrite(cache_dir / CATALOG)):
        unread.append(fault)
    if fusion_dir is not None:
        files += purge_directory(fusion_dir, BLOCK_FILES, dry_run=dry_run)
    if (aside := cache_dir / f"{ANSWERS}.damaged").is_file():
        files += 1
        if not dry_run:
            aside.unlink()
    return Purged(entries, files=files, dry_run=dry_run, unread=tuple(unread)) + purge_answers(
        cache_dir, None, None, dry_run=dry_run
    )


def _check_is_gateways(cache_dir: Path) -> None:
    """Refuse a directory without a sign in which no store that a gateway made can be read.

    Raises:
        StoreError: so it is.
    """
    faults = []
    for file, read in ((cache_dir / CATALOG, lambda file: Catalog(file).close()), (cache_dir / ANSWERS, use.count)):
        if filled(file):
            try:
                read(file)
            except StoreError as error:
                faults.append(str(error))
            else:
                return
    if not discard(cache_dir / AHEAD, Selector(), dry_run=True):
        raise StoreError(f"{cache_dir} is not known to be semkv's, and is not purged: {'; '.join(faults)}")
