"""Directories that follow a bucket, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from block_helpers import open_store, right, save
from semkv_stores import bucket_index
from semkv_vllm.bucket_log import Follower


class Replica:
    """A directory that follows a bucket, step by step."""

    def __init__(self, root: Path, url: str, **bounds: Any) -> None:
        disk = bounds.pop("disk", None)
        self.store = open_store(root, disk, writer=root.name)
        self.store.finds_far = True
        self.follower = Follower(self.store, url, **bounds)
        self.store.open_far = self.follower.open_far

    def save(self, first: int, count: int = 1, **options: Any) -> str | None:
        return save(self.store, first, count, since=self.store.last_purge(), **options)

    def share(self) -> bool:
        """Put what is new into the bucket, and follow it."""
        done = self.follower.turn()
        while self.follower.uploads.step():
            pass
        return self.follower.turn() and done

    def serves(self, first: int, count: int = 1) -> int:
        return right(self.store, first, count)

    def holds(self) -> set[str]:
        """The files that it knows to be in the bucket."""
        return self.store.ask(bucket_index.in_bucket, set())

    def settle(self) -> None:
        """Wait until what is being deleted is."""
        self.follower.settle()
