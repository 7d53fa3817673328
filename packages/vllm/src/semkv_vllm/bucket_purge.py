"""Purges a bucket from the command line, while no engine of this machine need run.

A purge is a record of the bucket's log, as one of an engine's machine is. To know which objects it covers, the log is
replayed into an index of its own, which goes afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from semkv_stores import block_index, bucket_index
from semkv_stores.blocks import BUSY_S, BlockStore
from semkv_stores.errors import ConfigError, StoreError
from semkv_vllm import BUCKET
from semkv_vllm.bucket import Address, Objects
from semkv_vllm.bucket_log import Follower

KINDS = ("kv", "fusion")

_TURNS = 3  # until a record is in the log, while others append theirs


def purge_bucket(
    url: str,
    *,
    owners: Sequence[str] | None = None,
    dry_run: bool = False,
) -> int:
    """Delete what a bucket holds; how many files that are.

    When this returns, the log says so: a directory that follows it from now on finds nothing of it, and each that
    follows it already does so with its next look (`semkv_vllm.bucket_log.POLL_S`). The objects are deleted.

    Args:
        url: of the bucket, as engines have it.
        owners: tags of tenants (`semkv_stores.block_file.tenant_tag`) whose files go; None for all.
        dry_run: only count.

    Raises:
        ConfigError: the URL is wrong.
        StoreError: there is no log of semkv, or the bucket does not do what it is asked for.
    """
    if not url or not BUCKET.test(url):
        raise ConfigError("--bucket", url, BUCKET.text)
    kinds = [kind for kind in KINDS if _is_there(Address(url, kind))]
    if not kinds:
        raise StoreError(f"{url} holds no blocks of semkv")
    return sum(_purge(url, kind, owners, dry_run=dry_run) for kind in kinds)


def _is_there(address: Address) -> bool:
    """Whether there is a log. None is begun, nor is a folder made."""
    try:
        if address.folder is not None:
            return (address.folder / address.kind / "semkv.json").is_file()
        Objects(address, "a purge").get("semkv.json")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(f"{address.url} cannot be read ({error})") from error
    return True


def _purge(url: str, kind: str, owners: Sequence[str] | None, *, dry_run: bool) -> int:
    with _followed(url, kind) as follower:
        covered = _covered(follower.store, owners)
        if dry_run:
            return covered
        for which in [{}] if owners is None else [{"owner": owner} for owner in owners]:
            _record(follower.store, which)
        for _ in range(_TURNS):
            if follower.turn() and not _pending(follower.store):
                break
        else:
            raise StoreError(f"{url}: the purge of {kind} is not in its log; purge again")
        if not follower.settle():
            raise StoreError(
                f"{url}: its log says that {kind} was purged, so nothing of it is served, but not all objects could be "
                "deleted; purge again"
            )
        return covered


@contextmanager
def _followed(url: str, kind: str) -> Iterator[Follower]:
    """A follower that has applied the whole log, for a directory of its own."""
    with (
        TemporaryDirectory(prefix="semkv-purge-") as folder,
        closing(BlockStore(Path(folder, kind), kind, writer="semkv purge")) as store,
        closing(Follower(store, url)) as follower,
    ):
        if not follower.turn():
            raise StoreError(f"{url}: the log of {kind} cannot be followed; purge again")
        yield follower


def _covered(store: BlockStore, owners: Sequence[str] | None) -> int:
    """How many files of the bucket belong to some tenants."""
    if owners is None:
        return store.ask(lambda db: len(bucket_index.in_bucket(db)), 0)
    return store.ask(lambda db: bucket_index.count_of(db, owners), 0)


def _record(store: BlockStore, which: dict[str, str]) -> None:
    """Note a purge that is to be appended."""
    done = store.ask(lambda db: block_index.purge(db, store.root, which), None, write_s=BUSY_S)
    if done is None:
        raise StoreError(f"{store.root} cannot be written")


def _pending(store: BlockStore) -> bool:
    """Whether a purge is still to be appended."""
    return bool(store.ask(bucket_index.pending_purges, {0: bucket_index.EVERYTHING}))
