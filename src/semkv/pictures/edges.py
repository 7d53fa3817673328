"""Whether an edge that only one of two pictures has shows what does not go on inside."""

from __future__ import annotations

from typing import Any

import numpy as np

from semkv.pictures.planes import Plane

_STRIP = 48.0  # levels


def lost(luma: Plane, columns: slice, rows: slice) -> bool:
    """Whether a strip outside of these rows and columns shows what does not go on inside of them."""
    for plane, kept in ((luma, rows), (luma.T, columns)):
        for strip, inner in (
            (plane[: kept.start], plane[kept.start : 2 * kept.start + 8]),
            (plane[kept.stop :][::-1], plane[2 * kept.stop - len(plane) - 8 : kept.stop][::-1]),
        ):
            if len(strip) > 0 and len(inner):
                there, beside = _contrast(strip), _contrast(inner)
                beside = np.maximum(beside, np.maximum(np.roll(beside, 1), np.roll(beside, -1)))
                if (there > _STRIP + 1.5 * beside).any():
                    return True
    return False


def _contrast(strip: Plane) -> Any:
    """Largest less smallest value in every 8 pixels along a strip."""
    blocks = strip[:, : strip.shape[1] // 8 * 8].reshape(len(strip), -1, 8).astype(np.float32)
    return np.ptp(blocks, axis=(0, 2)) if blocks.size else np.zeros(1)
