"""Whether a donor's image shows the same as a request's: `semkv_guards.pictures` over files."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from semkv.encoders import read_media
from semkv.encoders.vision import JPEG, draft_of, read_pixels
from semkv.errors import ConfigError
from semkv.stores.media import MediaStore
from semkv.types import MediaSegment
from semkv_guards import pictures

_PAIRS = 1024  # verdicts that are remembered: a lookup meets a pair of images with several donors
_AT_ONCE = 2  # comparisons at a time: one of 25 megapixels takes 400 MB


def require_opencv() -> None:
    """
    Raises:
        ConfigError: what images are compared with is not installed.
    """
    if importlib.util.find_spec("cv2") is None:
        allowed = (
            "layers other than vision where OpenCV is not installed: pip install 'semkv[encoders]'"
        )
        raise ConfigError("--embedding-layer", "vision", allowed)


class ImageGuard:
    """Tells images apart that show something else. Any thread may call any method.

    What is computed of an image is remembered, and so are verdicts.
    """

    def __init__(self, media: MediaStore, roots: Iterable[Path]) -> None:
        self._media = media
        self._roots = tuple(roots)
        self._remembered = pictures.Remembered()
        self._comparisons = threading.BoundedSemaphore(_AT_ONCE)
        self._verdict = lru_cache(maxsize=_PAIRS)(self._compared)

    def same(self, mine: MediaSegment, theirs: str) -> bool:
        """Whether a request's image and a donor's, by its media id, show the same.

        Raises:
            OSError: one of them cannot be read, which is not remembered.
        """
        return self._verdict(mine, theirs)

    def forget(self) -> None:
        """Drop images and verdicts in memory."""
        self._remembered = pictures.Remembered()  # a comparison that runs keeps to the old one
        self._verdict.cache_clear()
        draft_of.cache_clear()

    def _compared(self, mine: MediaSegment, theirs: str) -> bool:
        def own() -> bytes | None:
            return read_media(mine, self._roots)

        def donor() -> bytes | None:
            return self._media.get(theirs)

        images = (
            _Image(mine.media_id, cache(own), self._remembered),
            _Image(theirs, cache(donor), self._remembered),
        )
        with self._comparisons:
            small = [image.at_a_glance() for image in images]
            if not pictures.may_show_the_same(*small):
                return False
            whole = [image.at_full_size() for image in images]
            return pictures.difference(*whole) < pictures.LIMIT


@dataclass(frozen=True)
class _Image:
    """An image by its media id, and what is remembered of it."""

    media_id: str
    read: Callable[[], bytes | None]
    remembered: pictures.Remembered

    def at_a_glance(self) -> pictures.Small:
        known = self.remembered.find(pictures.Planes, self.media_id)
        if known is not None:
            return known.small
        small = self.remembered.find(pictures.Small, self.media_id)
        if small is not None:
            return small
        data = _present(self.read())
        if not data.startswith(JPEG):
            return self._planes(data).small
        small = pictures.small_of(draft_of(data, most_pixels=pictures.MOST_PIXELS))
        self.remembered.keep(self.media_id, small)
        return small

    def at_full_size(self) -> pictures.Planes:
        known = self.remembered.find(pictures.Planes, self.media_id)
        return self._planes(_present(self.read())) if known is None else known

    def _planes(self, data: bytes) -> pictures.Planes:
        pixels = read_pixels(data, most_pixels=pictures.MOST_PIXELS, whole=True)
        planes = pictures.planes_of(pixels)
        self.remembered.keep(self.media_id, planes)
        return planes


def _present(data: bytes | None) -> bytes:
    if data is None:
        raise OSError("an image is gone")
    return data
