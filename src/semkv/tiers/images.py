"""Whether a donor's image shows the same as a request's: `semkv.pictures` over files."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

from semkv import pictures
from semkv.encoders import read_media
from semkv.encoders.vision import read_picture
from semkv.errors import ConfigError
from semkv.stores.media import MediaStore
from semkv.types import MediaSegment

_PAIRS = 1024  # verdicts that are remembered: a lookup meets a pair of images with several donors
_GLANCE = 256  # pixels a side that are read of a JPEG at first
_AT_ONCE = 2  # comparisons at a time: one of 25 megapixels takes 400 MB
_JPEG = b"\xff\xd8\xff"

_Read = Callable[[], bytes | None]


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

    def _compared(self, mine: MediaSegment, theirs: str) -> bool:
        def own() -> bytes | None:
            return read_media(mine, self._roots)

        def donor() -> bytes | None:
            return self._media.get(theirs)

        with self._comparisons:
            a = self._at_a_glance(mine.media_id, own)
            b = self._at_a_glance(theirs, donor)
            if not pictures.may_show_the_same(a, b):
                return False
            first = self._at_full_size(mine.media_id, own)
            second = self._at_full_size(theirs, donor)
            return pictures.difference(first, second) < pictures.LIMIT

    def _at_a_glance(self, media_id: str, read: _Read) -> pictures.Small:
        known = self._remembered.find(pictures.Planes, media_id)
        if known is not None:
            return known.small
        small = self._remembered.find(pictures.Small, media_id)
        if small is not None:
            return small
        data = _present(read())
        if not data.startswith(_JPEG):
            return self._planes(media_id, data).small
        image = read_picture(data, most_pixels=pictures.MOST_PIXELS, whole=True, side=_GLANCE)
        small = pictures.small_of(image)
        self._remembered.keep(media_id, small)
        return small

    def _at_full_size(self, media_id: str, read: _Read) -> pictures.Planes:
        known = self._remembered.find(pictures.Planes, media_id)
        return self._planes(media_id, _present(read())) if known is None else known

    def _planes(self, media_id: str, data: bytes) -> pictures.Planes:
        image = read_picture(data, most_pixels=pictures.MOST_PIXELS, whole=True)
        planes = pictures.planes_of(image)
        self._remembered.keep(media_id, planes)
        return planes


def _present(data: bytes | None) -> bytes:
    if data is None:
        raise OSError("an image is gone")
    return data
