"""Purges from outside: of all that semkv wrote to a cache directory, or of what is one tenant's or has one tag.

Works beside running engines and gateways. What cannot be read is told (`Purged.unread`), and the rest goes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from semkv.errors import StoreError
from semkv.maintenance import check_is_cache, filled, open_extents, owners, pictures
from semkv.stores.cachedir import CACHE_FILES, CATALOG, EXTENT_FILES, MARKER, is_ours, purge_directory
from semkv.stores.catalog import Catalog
from semkv.stores.catalog_rows import Removed
from semkv.stores.graphs import FOLDER as GRAPHS
from semkv.stores.graphs import sweep
from semkv.stores.responses import use
from semkv.stores.responses.ahead import FOLDER as AHEAD
from semkv.stores.responses.ahead import discard
from semkv.stores.responses.base import Selector
from semkv.stores.responses.open import FILE as ANSWERS


class _DamagedError(StoreError):
    """A catalog that cannot be read and never will be."""


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


def purge_entries(cache_dir: Path, tenants: Sequence[str] | None, tag: str | None, *, dry_run: bool) -> Purged:
    """Delete the catalog's entries of a tenant (by its names), with a tag, or both; without either, all. With them go
    the images that only they had and the graphs in which their vectors are: a running engine writes new ones.

    The text of a request that is under way is recorded afterwards.

    Raises:
        StoreError: there is no cache.
    """
    check_is_cache(cache_dir)
    if not filled(cache_dir / CATALOG):
        return Purged(dry_run=dry_run)
    try:
        removed, others = _delete_entries(cache_dir / CATALOG, tenants, tag, dry_run=dry_run)
    except StoreError as error:
        return Purged(dry_run=dry_run, unread=(str(error),))
    loose = set(removed.media)
    images = [image for image in pictures(cache_dir) if image.name in loose]
    if not dry_run:
        sweep(cache_dir / GRAPHS, others)
        for image in images:
            image.unlink(missing_ok=True)
    return Purged(entries=len(removed.entry_ids), files=len(images), dry_run=dry_run)


def _delete_entries(
    file: Path, tenants: Sequence[str] | None, tag: str | None, *, dry_run: bool
) -> tuple[Removed, set[str]]:
    """What went, and the namespaces of which nothing went.

    Raises:
        _DamagedError: the catalog cannot be read.
        StoreError: it is locked, another program's, or of another format version.
    """
    try:
        with closing(Catalog(file)) as catalog:
            if tenants is None and tag is None:
                tenants = sorted({row.tenant for row in catalog.by_namespace()})
            removed = catalog.invalidate(tenants=tenants, tag=tag, dry_run=dry_run)
            return removed, set(catalog.spaces()).difference(removed.spaces)
    except (sqlite3.Error, StoreError) as error:
        if type(error.__cause__ or error) is sqlite3.DatabaseError:  # its subclasses mean locked, full and the like
            raise _DamagedError(f"catalog {file} is damaged: a purge without --tenant and --tag deletes it") from error
        raise StoreError(str(error) if isinstance(error, StoreError) else f"catalog {file}: {error}") from error


def purge_answers(cache_dir: Path, tenants: Sequence[str] | None, tag: str | None, *, dry_run: bool) -> Purged:
    """Delete a gateway's answers of a tenant (by its names), with a tag, or both; without either, all of them; also
    those on their way to the store that a gateway which has ended left. Running gateways heed it within a second or so.
    """
    selectors = [Selector(partition=tenant, tag=tag) for tenant in ((None,) if tenants is None else tenants)]
    gone, unread = 0, []
    if (cache_dir / ANSWERS).exists():
        try:
            gone += use.remove(cache_dir / ANSWERS, selectors, dry_run=dry_run)
        except StoreError as error:
            unread.append(str(error))
    try:
        for selector in selectors:
            gone += discard(cache_dir / AHEAD, selector, dry_run=dry_run)
    except OSError as error:
        unread.append(f"answers {cache_dir / AHEAD}: {error}")
    return Purged(answers=gone, dry_run=dry_run, unread=tuple(unread))


def purge_salts(cache_dir: Path, fusion_dir: Path | None, salts: Iterable[str | None], *, dry_run: bool) -> Purged:
    """Delete the KV blocks and encoder outputs of requests that came with one of these values of ``cache_salt``.

    Running engines find them on the disk no more; what they hold in memory is out of reach.

    Raises:
        StoreError: the cache was written by another format version.
    """
    whose, count = owners(salts), 0
    with open_extents(cache_dir, fusion_dir) as opened:
        for _, store in opened:
            found = [extent for owner in whose for extent in store.owned(owner)]
            count += len(found)
            if not dry_run:
                store.drop(found)
    return Purged(files=count, dry_run=dry_run)


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
        purge_directory(fusion_dir, EXTENT_FILES, dry_run=True)  # refuses what is not ours
    entries, stays, unread = 0, False, []
    if filled(cache_dir / CATALOG):
        try:
            removed, _ = _delete_entries(cache_dir / CATALOG, None, None, dry_run=dry_run)
            entries, stays = len(removed.entry_ids), _is_open(cache_dir / CATALOG)
        except _DamagedError:
            pass  # it goes with the rest
        except StoreError as error:
            stays = True
            unread.append(str(error))
    patterns = tuple(pattern for pattern in CACHE_FILES if not (stays and pattern.startswith(CATALOG)))
    if stays or (cache_dir / ANSWERS).exists():  # it is a cache still
        patterns = tuple(pattern for pattern in patterns if pattern != MARKER)
    files = purge_directory(cache_dir, patterns, dry_run=dry_run, known=True)
    if fusion_dir is not None:
        files += purge_directory(fusion_dir, EXTENT_FILES, dry_run=dry_run)
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


def _is_open(database: Path) -> bool:
    """Whether another connection has it open: the last one to close takes the write-ahead log along."""
    return database.with_name(f"{database.name}-wal").exists()
