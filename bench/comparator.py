"""How often the comparator behind checks errs (results/comparator.json); prints JSON.

``semkv bench semantic`` measures the rest of what is labeled. No row of the data sets in ``shared/data`` is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from common import ROOT, SHARED, write_json

from semkv.encoders.text import SentenceEncoder
from semkv.guards import veto
from semkv.tiers.checking import SameMeaning, same_text
from semkv_lab.samples import read_jsonl
from semkv_lab.semantic import rate

DATA = ROOT / "bench" / "data"
PAIRS, GQA = SHARED / "question_pairs_dev.jsonl.gz", SHARED / "gqa_testdev_llava13b.jsonl.gz"
THRESHOLD = 0.92  # the default
LONG = 7  # words from which the comparator compares meaning

Row = dict[str, Any]


def load(path: Path) -> list[Row]:
    return [dict(row) for _, row in read_jsonl(path)]


Labeled = tuple[str, str, bool]


def misjudged(pairs: Iterable[Labeled], same: SameMeaning) -> Row:
    """Shares of misjudged pairs with 95% intervals (Wilson's)."""
    verdicts = [(same(a, b), truth) for a, b, truth in pairs]
    found: Row = {}
    for name, truth in (("says different of the same", True), ("says same of different", False)):
        of_it = [verdict for verdict, label in verdicts if label is truth]
        found[name] = rate(sum(verdict is not truth for verdict in of_it), len(of_it))
    return found


def short_answers(encoder: SentenceEncoder) -> Iterator[Labeled]:
    """LLaVA-1.5-13B's answers to GQA questions on one picture that threshold and guards take for one another.

    Equal strings say the same; the others were labeled by reading, before the comparator was asked.
    """
    rows = {row["questionId"]: row for row in load(GQA)}
    pictures: dict[str, list[str]] = defaultdict(list)
    for number, row in rows.items():
        pictures[row["imageId"]].append(number)
    for numbers in pictures.values():
        vectors = encoder.encode([rows[number]["question"] for number in numbers])
        for i, j in combinations(range(len(numbers)), 2):
            first, second = rows[numbers[i]], rows[numbers[j]]
            near = float(vectors[i] @ vectors[j]) >= THRESHOLD and veto(first["question"], second["question"]) is None
            if near and same_text(first["llava13b"], second["llava13b"]):
                yield first["llava13b"], second["llava13b"], True
    for row in load(DATA / "short_answers.jsonl"):
        yield rows[row["first"]]["llava13b"], rows[row["second"]]["llava13b"], row["same"]


def long_texts(path: Path, same: bool | None = None) -> list[Labeled]:
    """Labeled texts of `LONG` words and more; those of a file without labels have the given one."""
    rows = [(row["a"], row["b"], bool(row["same"]) if same is None else same) for row in load(path)]
    return [row for row in rows if min(len(row[0].split()), len(row[1].split())) >= LONG]


def main() -> None:
    """How often the comparator says "different" of answers that say the same, and "same" of others."""
    encoder = SentenceEncoder()
    same = SameMeaning(encoder)
    result: Row = {"encoder": encoder.fingerprint}
    if GQA.exists():
        result["short answers, GQA"] = misjudged(short_answers(encoder), same)
    result["long answers"] = misjudged(long_texts(DATA / "long_answers.jsonl"), same)
    ours = long_texts(DATA / "paraphrases.jsonl", same=True) + long_texts(DATA / "traps.jsonl", same=False)
    result["stand-ins: paraphrases and traps"] = misjudged(ours, same)
    if PAIRS.exists():
        result["stand-ins: question pairs"] = misjudged(long_texts(PAIRS), same)
    write_json(None, result)


if __name__ == "__main__":
    main()
