"""How often another image may stand in, on scenes whose contents are known (`bench/scenes.py`); prints JSON.

    python bench/images.py verifier     the comparison of pixels, pair by pair (results/cpu/images.json)
    python bench/images.py cache        the same through the cache (results/cpu/images-cache.json)

Limits were chosen on the tuned part; the other part has fonts, seeds and, MiniGQA apart, kinds of
scenes of its own.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import commands, machine, times, write_json
from scenes import TUNED, UNSEEN, Pair, pairs

from semkv import keys
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.encoders.vision import read_picture
from semkv.guards.pictures import LIMIT, difference
from semkv.presets import get_preset
from semkv.tiers.checking import wilson
from semkv.types import EmbeddingLayer, MediaSegment, Namespace, Request, TextSegment

PARTS = {"tuned": TUNED, "unseen": UNSEEN}
QUESTION = "What does the picture show?"

app = commands(__doc__)


def shares(found: Sequence[tuple[Pair, bool]]) -> dict[str, Any]:
    """Shares of copies and of changes that hit, by what was done and by kind of scene, with 95% intervals."""
    result: dict[str, Any] = {}
    for name, same in (("copies", True), ("changes", False)):
        groups: dict[str, list[bool]] = defaultdict(list)
        for pair, hit in found:
            if pair.same is same:
                for group in ("all", pair.what, f"of {pair.kind}"):
                    groups[group].append(hit)
        result[name] = {
            group: {
                "pairs": len(hits),
                "hits": sum(hits),
                "share": round(sum(hits) / len(hits), 4),
                "interval": [round(end, 4) for end in wilson(sum(hits), len(hits))],
            }
            for group, hits in groups.items()
        }
    return result


def compare(pair: Pair) -> float:
    return difference(read_picture(pair.donor), read_picture(pair.request))


@app.command
def verifier(*, scenes: int = 12, seed: int = 0, out: Path | None = None) -> None:
    """Copies and changes that the comparison lets through, and what one costs, files read included.

    Args:
        scenes: of each kind.
    """
    result: dict[str, Any] = {"machine": machine("numpy", "pillow"), "scenes of a kind": scenes, "seed": seed}
    for name, part in PARTS.items():
        made = pairs(part, scenes, seed)
        values: list[float] = []
        cost = times(lambda pair, values=values: values.append(compare(pair)), made)
        rows = shares([(pair, value < LIMIT) for pair, value in zip(made, values, strict=True)])
        passed = [[p.kind, p.what, round(v, 3)] for p, v in zip(made, values, strict=True) if not p.same and v < LIMIT]
        pixels = [read_picture(pair.donor).size for pair in made]
        result[name] = rows | {"changes that pass": passed, "times": cost}
        result[name]["pixels, median"] = int(np.median([w * h for w, h in pixels]))
        write_json(out, result)


def ask(pair: Pair, data: bytes, folder: Path) -> Request:
    name = keys.media_id(data)
    file = folder / name
    file.write_bytes(data)
    return Request("", Namespace(), (MediaSegment(name, file), TextSegment(QUESTION)))


@app.command
def cache(*, scenes: int = 3, seed: int = 0, out: Path | None = None) -> None:
    """What the cache serves with minigqa-vlm's tower and its default threshold, all first pictures being in it.

    A copy must hit, with its own scene's picture; a change must not hit any.

    Args:
        scenes: of each kind.
    """
    preset = get_preset("minigqa")
    layer = next(text for text in preset.embedding_layers if text.startswith("vision"))
    name, dim, threshold = layer.split(":")
    layers = (EmbeddingLayer(name, int(dim), float(threshold)),)
    result: dict[str, Any] = {"machine": machine("numpy", "pillow"), "layer": layer, "scenes of a kind": scenes}
    made = pairs(UNSEEN, scenes, seed)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "images"
        folder.mkdir()
        config = CacheConfig(
            Path(root) / "cache",
            embedding_layers=layers,
            embedding_hook="vision",
            vision_encoder=preset.vision_encoder,
            semantic=False,
        )
        with SemanticCache(config) as semantic:
            for pair in {pair.donor: pair for pair in made}.values():
                request = ask(pair, pair.donor, folder)
                semantic.add_observation(semantic.try_reuse(request), keys.media_id(pair.donor))
            kept = len({pair.donor for pair in made})
            found = []
            for pair in made:
                report = semantic.try_reuse(ask(pair, pair.request, folder))
                right = report.donor_response == keys.media_id(pair.donor)
                found.append((pair, report.hit and (right or not pair.same)))
            stats = semantic.stats()
    result |= {"pictures": kept, "lookup_ms": round(1e3 * stats.lookup_s / stats.lookups, 1)}
    write_json(out, result | shares(found) | {"vetoes": dict(stats.vetoes)})


if __name__ == "__main__":
    app()
