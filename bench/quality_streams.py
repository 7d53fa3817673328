"""Draws streams of requests from clusters of texts that mean the same, and from MiniGQA."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from semkv_lab.minigqa.generate import Knobs, generate
from semkv_lab.quality import Asked, Pair, clusters

_POPULAR = 0.6  # of the clusters with several texts; the others lend one text each to the singletons


def halves(pairs: Sequence[Pair], seed: int) -> tuple[list[Pair], list[Pair]]:
    """The pairs in two parts that share no cluster; pairs between the parts are left out."""
    cluster = clusters(pairs)
    count = max(cluster.values()) + 1
    first = np.random.default_rng(seed).permutation(count) < count // 2
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    for pair in pairs:
        a, b = first[cluster[pair.group, pair.a]], first[cluster[pair.group, pair.b]]
        if a == b:
            sides[0 if a else 1].append(pair)
    return sides


def draw_stream(pairs: Sequence[Pair], seed: int, *, requests: int = 10_000, popular: float = 0.7) -> list[Asked]:
    """Requests, of which a share falls on clusters of several texts by Zipf's law, and the rest on single texts.

    Args:
        pairs: labelled pairs.
        seed: of the draw.
        requests: how many.
        popular: share of requests on clusters of several texts.
    """
    random = np.random.default_rng(seed)
    members: dict[int, list[str]] = defaultdict(list)
    for (_, text), number in clusters(pairs).items():
        members[number].append(text)
    several = [n for n, texts in members.items() if len(texts) > 1]
    order = [several[i] for i in random.permutation(len(several))]
    head = order[: max(1, round(_POPULAR * len(order)))]
    single = [n for n, texts in members.items() if len(texts) == 1] + order[len(head) :]
    single = [single[i] for i in random.permutation(len(single))]
    chosen = {n: members[n][int(random.integers(len(members[n])))] for n in single}
    weights = 1.0 / np.arange(1, len(head) + 1)
    ranks = random.choice(len(head), size=requests, p=weights / weights.sum())
    stream, used = [], 0
    for rank, lot in zip(ranks, random.random(requests), strict=True):
        if lot < popular or not single:
            number = head[int(rank)]
            text = members[number][int(random.integers(len(members[number])))]
        else:
            number = single[used % len(single)]
            text, used = chosen[number], used + 1
        stream.append(Asked(text, str(number)))
    return stream


def minigqa_stream(folder: Path, seed: int, *, images: int = 300) -> list[Asked]:
    """MiniGQA's questions, with many paraphrases and hard negatives, in the order of its requests; one answer serves
    those of one picture that mean the same. A group is a picture.

    Args:
        folder: an empty one to draw into.
        seed: of the draw.
        images: base pictures.
    """
    plain = dict.fromkeys(("reencoded", "resized", "brightness", "shifted", "lookalike"), 0.0)
    knobs = Knobs(images=images, paraphrase=0.3, negative=0.3, **plain)  # type: ignore[arg-type]
    generate(folder, knobs, seed=seed)
    records = json.loads((folder / "val_balanced_questions.json").read_text(encoding="utf-8"))
    return [
        Asked(row["question"], f"{row['imageId']}: {row['semanticStr']}", str(row["imageId"]))
        for row in records.values()
    ]


def pairs_of(stream: Sequence[Asked], *, most: int = 20) -> list[Pair]:
    """Labelled pairs from a stream: each text with earlier ones of its group, same and different."""
    seen: dict[str, list[Asked]] = defaultdict(list)
    pairs, done = [], set()
    for asked in stream:
        for other in seen[asked.group][-most:]:
            key = (asked.group, asked.text, other.text)
            if asked.text != other.text and key not in done:
                done.add(key)
                pairs.append(Pair(asked.text, other.text, asked.answer == other.answer, asked.group))
        seen[asked.group].append(asked)
    return pairs
