"""Host memory for KV blocks: how much of ``/dev/shm`` an engine gets, and what dead engines have left there.

vLLM's processes share one file. While they start it has a name, and an engine that is killed then leaves it. So each
process of an engine holds a lock on the file. The kernel releases a lock when its process ends, however it ends. A file
of ours that nobody has locked belongs to a dead engine, and the next engine that starts deletes it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

from semkv_stores.block_file import PAGE
from semkv_stores.files import described

log = logging.getLogger("semkv.connectors")

SHM = Path("/dev/shm")  # noqa: S108  where vLLM puts the host memory that its processes share
OURS = "semkv-"
"""How the names of our engines begin. Files of other programs, vLLM's own among them, have other names."""

_SHARE = 0.8  # of the room there that an engine takes at most
_FILLING_S = 300.0  # for an engine to fill its memory; until then its missing bytes are not free
_LEAST_ROWS = 8

_held: dict[str, int] = {}
"""By engine the descriptor whose lock says that this process of it lives."""


def region_of(engine: str, shm: Path = SHM) -> Path:
    """Where vLLM's `SharedOffloadRegion` lies; it takes a file that is there already."""
    return shm / f"vllm_offload_{engine}.mmap"


def agreed_host_bytes(engine: str, wanted: int, shm: Path = SHM) -> tuple[int, bool]:
    """How much host memory an engine gets: what is ``wanted``, or four fifths of the room that there is.

    All processes of an engine must come to the same answer: the first one makes the file, whose length says it. The
    lock on the folder is held from the making of a file until it is locked, and while leftovers are deleted, so no
    engine takes the file of one that starts at the same moment for a leftover.

    Returns:
        Bytes, and whether this process is the first one.
    """
    region = region_of(engine, shm)
    folder = os.open(shm, os.O_RDONLY)
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, folder)
        fcntl.flock(folder, fcntl.LOCK_EX)
        _delete_leftovers(shm, but=region)
        descriptor = os.open(region, os.O_CREAT | os.O_RDWR, 0o600)
        let_go(engine)
        _held[engine] = descriptor
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if size := os.fstat(descriptor).st_size:
            return size, False
        atexit.register(region.unlink, missing_ok=True)  # a scheduler that starts unlinks it sooner
        size = min(wanted, int(_SHARE * _free(shm)))
        os.ftruncate(descriptor, size)
        return size, True


def _free(shm: Path) -> int:
    """The room in a folder, less what engines that start at this moment have not filled yet."""
    status = os.statvfs(shm)
    regions = described(shm.glob(region_of("*").name))
    new = [found for _, found in regions if time.time() - found.st_mtime < _FILLING_S]
    filling = sum(max(0, found.st_size - found.st_blocks * 512) for found in new)
    return max(0, status.f_bavail * status.f_frsize - filling)


def _delete_leftovers(shm: Path, but: Path) -> None:
    for path, _ in described(shm.glob(region_of(f"{OURS}*").name)):
        if path == but:
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another user's, or just gone
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            log.warning("semkv: deleted %s, host memory of an engine that has ended", path)
        except OSError:  # its engine lives
            continue
        finally:
            os.close(descriptor)


def let_go(engine: str) -> None:
    """This process of the engine needs its host memory no more."""
    descriptor = _held.pop(engine, None)
    if descriptor is not None:
        os.close(descriptor)


# ---------------------------------------------------------------------- how much is enough


class Need:
    """What an engine needs of host memory, by vLLM's ``OffloadingConfig``.

    Attributes:
        row_bytes: of one block in host memory.
        rows: as many as one step computes blocks. vLLM stores the blocks of a step or none of them, so with fewer
            rows nothing is stored of a long prompt.
    """

    def __init__(self, offloading: Any, vllm_config: Any, *, sealed: bool) -> None:
        ranks = 1 if offloading.replicated_layout else offloading.parallel.world_size
        pages = math.ceil(offloading.worker_kv_bytes_per_block * ranks / PAGE)
        scheduler = vllm_config.scheduler_config
        longest = scheduler.max_num_seqs * vllm_config.model_config.max_model_len
        self.step_tokens: int = min(scheduler.max_num_batched_tokens, longest)
        self._tokens_per_block = [group.tokens_per_block for group in offloading.groups]
        self.row_bytes: int = (pages + sealed) * PAGE
        step_rows: int = sum(
            math.ceil(self.step_tokens / tokens) for tokens in self._tokens_per_block
        )
        self.rows: int = max(_LEAST_ROWS, step_rows)

    @property
    def host_bytes(self) -> int:
        return self.rows * self.row_bytes

    def tokens(self, host_bytes: int) -> int:
        """How many tokens' blocks fit into so much host memory."""
        rows = host_bytes // max(1, self.row_bytes)
        rows_per_token = sum(1 / tokens for tokens in self._tokens_per_block)
        return int(rows / rows_per_token) if rows_per_token else 0

    def unmet(self, wanted: int, got: int) -> str | None:
        """Why so much host memory is of no use, with the remedy, or None."""
        if got >= self.host_bytes:
            return None
        if got < wanted:
            remedy = f"give {SHM} at least {math.ceil(self.host_bytes / _SHARE)} bytes (docker: --shm-size)"
        else:
            remedy = f"set host_bytes to at least {self.host_bytes}"
        return (
            f"{self.found(wanted, got)}, and one step computes up to {self.step_tokens} tokens, which need "
            f"{self.host_bytes} bytes; {remedy}, or lower --max-num-batched-tokens"
        )

    def found(self, wanted: int, got: int) -> str:
        return f"of {wanted} bytes of host memory wanted there are {got}, for {self.tokens(got)} tokens"


def default_host_bytes() -> int:
    """4 GiB; for a CPU engine, whose KV cache lies in the same memory, 256 MiB. An engine whose steps need more gets
    what one step needs."""
    from vllm.platforms import current_platform

    return 256 << 20 if current_platform.is_cpu() else 4 << 30
