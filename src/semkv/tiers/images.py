"""The guard of images: whether a donor's image shows what the request's own does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from semkv.encoders.hooks import read_media
from semkv.encoders.vision import read_picture
from semkv.guards import pictures
from semkv.stores.media import MediaStore
from semkv.types import MediaSegment, Segment

_REMEMBERED = 1024  # verdicts: a lookup meets a pair of images with several donors


class ImageGuard:
    """Compares the pixels of a request's images with those of a donor's, which the media store keeps.

    Args:
        media: where donors' images are.
        roots: folders searched for a request's own.
    """

    def __init__(self, media: MediaStore, roots: Sequence[Path]) -> None:
        self._media, self._roots = media, roots
        self._alike = lru_cache(maxsize=_REMEMBERED)(self._compare)

    def changed(self, own: Sequence[Segment], donor: Sequence[Segment]) -> bool:
        """Whether an image of a donor's run may show something else than the request's in its place: also where
        either cannot be read."""
        mine, theirs = ([s for s in run if isinstance(s, MediaSegment)] for run in (own, donor))
        if len(mine) != len(theirs):
            return True
        try:
            return not all(
                a.media_id == b.media_id or self._alike(a, b.media_id) for a, b in zip(mine, theirs, strict=True)
            )
        except OSError:  # which is not remembered
            return True

    def _compare(self, mine: MediaSegment, theirs: str) -> bool:
        first, second = read_media(mine, self._roots), self._media.get(theirs)
        if first is None or second is None:
            raise OSError("an image is gone")
        a, b = (read_picture(data, most_pixels=pictures.MOST_PIXELS, whole=True) for data in (first, second))
        return pictures.difference(a, b) < pictures.LIMIT
