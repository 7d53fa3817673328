"""Host memory for the connectors: page-locked where the process uses CUDA, and one for all of a cache directory."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from semkv.errors import ConfigError
from semkv.stores.host_memory import HostBuffer, HostMemories
from semkv.stores.host_pool import HostPool

log = logging.getLogger("semkv.connectors")

PROCESS = HostMemories()
"""Where the connectors of this process meet: vLLM makes each of them with nothing but its own configuration."""


def allocate(nbytes: int) -> HostBuffer:
    """Memory for a `HostPool`, aligned to pages; page-locked where the process uses CUDA already.

    Raises:
        ConfigError: so much cannot be had, or not be page-locked.
    """
    import torch

    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError("host_bytes", nbytes, "memory that this machine has") from error
    memory = np.frombuffer(pages, np.uint8)
    if not torch.cuda.is_initialized():
        return HostBuffer(memory)
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    if int(runtime.cudaHostRegister(address, nbytes, 0)) != 0:
        raise ConfigError("host_bytes", nbytes, "memory that can be page-locked")

    def free() -> None:
        runtime.cudaHostUnregister(address)

    return HostBuffer(memory, free)


class SharedPool:
    """The pool of a cache directory in this process, taken when it is first asked for."""

    def __init__(self, cache_dir: Path, nbytes: int, memories: HostMemories = PROCESS) -> None:
        """``nbytes``: bound where nobody has a memory for this directory yet; with 0 there is no pool."""
        self._acquire: Callable[[], HostPool] = lambda: memories.acquire(cache_dir, nbytes, allocate)
        self._release, self._lock = memories.release, threading.Lock()
        self._pool: HostPool | None = None
        self._wanted = nbytes > 0

    def get(self) -> HostPool | None:
        """The pool; None where none is wanted, or it cannot be had."""
        with self._lock:
            if self._pool is None and self._wanted:
                try:
                    self._pool = self._acquire()
                except ConfigError as error:
                    log.warning("semkv: no host memory for fusion states: %s", error)
                    self._wanted = False
            return self._pool

    def close(self) -> None:
        """Let go of the pool; there is none from now on."""
        with self._lock:
            if self._pool is not None:
                self._release(self._pool)
            self._pool, self._wanted = None, False
