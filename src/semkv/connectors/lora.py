"""What tells the weights of LoRA adapters apart.

vLLM's block hashes and media identifiers know an adapter by its name, in later versions by its path too; either may
come to mean other weights. Here an adapter goes by the digest of its files. Which weights the engine holds cannot be
asked, so an adapter is known only while its files are as they were before the engine started: then whatever the engine
has read of them is what they say. Any other adapter's requests are left alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from semkv.connectors.identity import cached_weights_digest
from semkv.keys import digest

log = logging.getLogger("semkv.connectors")

_CLOCK_S = 1.0  # file systems keep times by a coarser clock


class Adapters:
    """The adapters of one engine. For one thread."""

    def __init__(self, cache_dir: Path, started: float | None = None) -> None:
        """``started``: no adapter can have been loaded before, in seconds since the epoch; now by default."""
        self._notes = cache_dir / "weights"
        self._before = (time.time() if started is None else started) - _CLOCK_S
        self._known: dict[tuple[str, int], str] = {}
        self._refused: set[tuple[str, int]] = set()

    def identity(self, lora_request: Any) -> str | None:
        """A digest of the adapter's weights; empty for no adapter, None where they are not known for certain."""
        if lora_request is None:
            return ""
        key = (str(lora_request.lora_name), int(lora_request.lora_int_id))
        if key in self._refused:
            return None
        path = Path(lora_request.lora_path)
        try:
            value = self._digest(path) if path.is_dir() else ""
        except OSError as error:
            log.warning("semkv: cannot read the adapter %s (%s)", path, error)
            value = ""
        if not value or self._known.setdefault(key, value) != value:
            log.warning("semkv: nothing is kept for adapter %s: %s is no directory older than the engine", key[0], path)
            self._refused.add(key)  # for good: the engine may hold what was there before
            return None
        return digest("lora", value, repr(getattr(lora_request, "is_3d_lora_weight", False)))

    def _digest(self, path: Path) -> str:
        """Of the files' bytes; empty where one was changed, or put there, since the engine started."""
        if max(place.lstat().st_ctime for place in _places(path)) >= self._before:
            return ""
        return cached_weights_digest(path, self._notes)


def _places(path: Path) -> Iterator[Path]:
    """The directory, what is in it, and the links that lead there: a change of any of them changes its time."""
    yield from (place for place in (path.absolute(), *path.absolute().parents) if place.is_symlink())
    yield path.resolve()
    for place in path.resolve().rglob("*"):
        yield place
        if place.is_symlink():
            yield place.resolve()
