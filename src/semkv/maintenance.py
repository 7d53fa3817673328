"""Looking after a cache directory from outside: what it holds, whether it is whole, what is nobody's.

Works beside running engines: every step is one that they would do themselves. Purges are in `semkv.purging`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from semkv.errors import StoreError
from semkv.kept_graphs import FOLDER as GRAPHS
from semkv.kept_graphs import damage_of, kept_files
from semkv.keys import namespace_key
from semkv.stores.block_file import owner_of
from semkv.stores.block_folder import MARKER
from semkv.stores.blocks import BlockStore, Bounds
from semkv.stores.cachedir import CACHE_FILES, CATALOG, open_catalog
from semkv.stores.catalog_rows import NamespaceUse
from semkv.stores.files import described, matching, remove_strays
from semkv.stores.media import MediaStore
from semkv.stores.responses import use
from semkv.stores.responses.ahead import FOLDER as AHEAD
from semkv.stores.responses.ahead import discard, held
from semkv.stores.responses.base import Selector
from semkv.stores.responses.open import FILE as ANSWERS
from semkv.types import Namespace

_UNBOUNDED = Bounds(max_bytes=0)


@dataclass(frozen=True, slots=True)
class StoreUse:
    """One store on disk; times are seconds since the epoch, None where it is empty.

    Attributes:
        store: ``kv``, ``fusion``, ``media``, ``graphs`` (of the vector indexes), ``answers`` (of a gateway) or
            ``ahead`` (logs of those on their way there).
        namespace: digest of the model, its settings and the rank; empty for all but ``kv`` and ``fusion``.
        items: block files, fusion states, images, graphs or answers.
        blocks: KV blocks or fusion states.
        nbytes: bytes of the files; of answers, those of heads and payloads, so that tenants' sizes add up; of logs in
            which another tenant has answers too, all.
        oldest: when the oldest was written.
        used: when one was last used.
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
        answers: a gateway's, by tenant.
        stores: all but the catalog, by namespace.
        unread: what could not be read, a line for each, and is not counted.
        tenants: names of the tenant whose alone is counted; None for everybody's.
    """

    cache_dir: str
    entries: tuple[NamespaceUse, ...]
    answers: tuple[use.AnswersUse, ...]
    stores: tuple[StoreUse, ...]
    unread: tuple[str, ...] = ()
    tenants: tuple[str, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of ``stores``."""
        return sum(store.nbytes for store in self.stores)


@dataclass(frozen=True, slots=True)
class Damage:
    """What a check found.

    Attributes:
        checked: files that were read, but for that of a gateway's answers.
        answers: answers that were read.
        damaged: a line for each file and answer that is damaged.
        deleted: how many of those a repair has deleted.
        unread: a line for what could not be read at all, and was left as it is.
    """

    checked: int
    answers: int
    damaged: tuple[str, ...]
    deleted: int = 0
    unread: tuple[str, ...] = ()


def inspect(
    cache_dir: Path,
    fusion_dir: Path | None = None,
    tenants: Sequence[str] | None = None,
    salts: Iterable[str | None] = (),
) -> CacheUse:
    """Counts, bytes and ages: of everything, or of what is known to be a tenant's.

    Args:
        tenants: its names in the catalog and among a gateway's answers. A picture that several have counts for each.
        salts: values of ``cache_salt`` that its requests came with, which tell its KV blocks and encoder outputs.

    Raises:
        StoreError: there is no cache, or it was written by another format version.
    """
    check_is_cache(cache_dir)
    stores: list[StoreUse] = []
    with open_blocks(cache_dir, fusion_dir) as opened:
        for name, store in opened:
            ages = store.ages(None if tenants is None else owners(salts))
            stores += [StoreUse(name, namespace, *counts) for namespace, counts in ages.items()]
    entries: tuple[NamespaceUse, ...] = ()
    theirs: set[str] = set()
    unread: list[str] = []
    if filled(cache_dir / CATALOG):
        try:
            with open_catalog(cache_dir / CATALOG) as catalog:
                entries = tuple(row for tenant in tenants or (None,) for row in catalog.by_namespace(tenant))
                theirs = {media_id for tenant in tenants or () for media_id in catalog.media_of(tenant)}
        except StoreError as error:
            unread.append(str(error))
    spaces = None if tenants is None else [namespace_key(Namespace(row.tenant, row.model)) for row in entries]
    media = [file for file in pictures(cache_dir) if tenants is None or file.name in theirs]
    for name, listed in (("media", media), ("graphs", kept_files(cache_dir / GRAPHS, spaces))):
        files = [status for _, status in described(listed)]
        if files:
            times, nbytes = [status.st_mtime for status in files], sum(status.st_size for status in files)
            stores.append(StoreUse(name, "", len(files), 0, nbytes, min(times), max(times)))
    answers: list[use.AnswersUse] = []
    if (cache_dir / ANSWERS).exists():
        try:
            answers = [a for a in use.by_tenant(cache_dir / ANSWERS) if tenants is None or a.tenant in tenants]
        except StoreError as error:
            unread.append(str(error))
    if answers:
        count, nbytes = sum(a.answers for a in answers), sum(a.nbytes for a in answers)
        oldest, used = min(a.oldest for a in answers), max(a.used for a in answers)
        stores.append(StoreUse("answers", "", count, 0, nbytes, oldest, used))
    logs = [
        (file, count)
        for file, found in held(cache_dir / AHEAD)
        if (count := sum(tenants is None or answer.partition in tenants for answer in found)) or tenants is None
    ]
    if logs:
        count, nbytes = sum(count for _, count in logs), sum(file.st_size for file, _ in logs)
        times = [file.st_mtime for file, _ in logs]
        stores.append(StoreUse("ahead", "", count, 0, nbytes, min(times), max(times)))
    whose = None if tenants is None else tuple(tenants)
    return CacheUse(str(cache_dir), entries, tuple(answers), tuple(stores), tuple(unread), whose)


def verify(
    cache_dir: Path,
    fusion_dir: Path | None = None,
    *,
    repair: bool = False,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Damage:
    """Read every file and every answer of a gateway, and check every checksum.

    Args:
        repair: delete what is damaged, so that it is computed again; of answers those alone, and never the catalog.
        advance: told how many files and answers of how many are done.

    Raises:
        StoreError: there is no cache, or it was written by another format version.
    """
    check_is_cache(cache_dir)
    damaged: list[str] = []
    unread: list[str] = []
    images, graphs, answers = pictures(cache_dir), kept_files(cache_dir / GRAPHS), cache_dir / ANSWERS
    with open_blocks(cache_dir, fusion_dir) as opened:
        blocks = [(name, store, file) for name, store in opened for file in store.files()]
        for name, store in opened:  # deleted when a lost index was built again
            damaged += [f"{name}: a file whose head was damaged"] * store.counters["corrupt"]
        done, total = 0, len(blocks) + len(images) + len(graphs)
        for name, store, file in blocks:
            if (reason := store.damage(file)) and file in store.files():  # else it was evicted meanwhile
                damaged.append(f"{name}: {reason}")
                if repair:
                    store.reject(file)
            done += 1
            advance(done, total)
    media = MediaStore(cache_dir / "media") if images else None
    for image in images:
        if media is not None and not media.whole(image.name) and image.exists():
            damaged.append(f"media: {image.name} is not what its name says")
            if repair:
                media.delete(image.name)
        done += 1
        advance(done, total)
    for graph in graphs:
        if reason := damage_of(graph):
            damaged.append(f"graphs: {reason}")
            if repair:
                graph.unlink(missing_ok=True)
        done += 1
        advance(done, total)
    kept = 0
    if reason := _catalog_damage(cache_dir / CATALOG):
        damaged.append(f"catalog: {reason} (a purge of everything deletes it)")
        kept = 1
    files = done
    try:
        total += use.count(answers) if answers.exists() else 0
        for reason in use.examine(answers, repair=repair) if total > files else ():
            damaged += [f"answers: {reason}"] * bool(reason)
            done += 1
            advance(done, max(done, total))
    except StoreError as error:
        unread.append(str(error))
    return Damage(files, done - files, tuple(damaged), len(damaged) - kept if repair else 0, tuple(unread))


def check_is_cache(cache_dir: Path) -> None:
    """Refuse what is no cache, rather than make one.

    Raises:
        StoreError: nothing there was written by semkv.
    """
    places = (cache_dir, cache_dir / "kv", cache_dir / "fusion")
    signs = (cache_dir / CATALOG, cache_dir / ANSWERS, *(place / MARKER for place in places))
    if not any(filled(sign) for sign in signs) and not discard(cache_dir / AHEAD, Selector(), dry_run=True):
        raise StoreError(f"{cache_dir} holds no semkv cache: name one with --cache-dir, or in SEMKV_CACHE_DIR")


def filled(file: Path) -> bool:
    """Whether a file has anything in it. An empty database is nobody's: to open one is to make it ours."""
    return file.is_file() and file.stat().st_size > 0


@contextmanager
def open_blocks(
    cache_dir: Path, fusion_dir: Path | None, bounds: Bounds = _UNBOUNDED
) -> Iterator[list[tuple[str, BlockStore]]]:
    """The stores of KV blocks and of encoder outputs that are there, by name, with their indexes complete."""
    with ExitStack() as open_stores:
        found = []
        for name, root in (("kv", cache_dir / "kv"), ("fusion", fusion_dir or cache_dir / "fusion")):
            if (root / MARKER).is_file():
                store = open_stores.enter_context(closing(BlockStore(root, name, bounds)))
                found.append((name, store))
        yield found


def owners(salts: Iterable[str | None]) -> list[str]:
    """The tags of blocks that were stored for requests with these values of ``cache_salt``."""
    return sorted({owner_of(salt) for salt in salts if salt})


def pictures(cache_dir: Path) -> list[Path]:
    """The files of the media store."""
    return sorted(f for f in matching(cache_dir / "media", "??/*") if len(f.name) == 64)


def drop_strays(cache_dir: Path) -> int:
    """Delete what writers that have ended left under temporary names, but for block files; how many files that were."""
    patterns = ("media/??/.new-*", *(pattern for pattern in CACHE_FILES if pattern.endswith(".tmp")))
    return sum(remove_strays(cache_dir, pattern) for pattern in patterns)


def _catalog_damage(path: Path) -> str:
    if not filled(path):
        return ""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            found = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
            return "" if found == "ok" else found
    except sqlite3.Error as error:
        return str(error)
