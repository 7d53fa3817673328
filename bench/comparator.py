"""How often the comparator behind checks is wrong: "different" for answers that say the same, "same" for others. JSON.

short answers     LLaVA-1.5-13B's answers to GQA questions on one picture that the default threshold and guards take
                  for one another (cosine .92). Equal strings say the same; the others were labelled by reading,
                  before the comparator was asked (``bench/data/short_answers.jsonl`` has numbers of questions)
long answers      our own: an answer reworded, and one that says something else (``bench/data/long_answers.jsonl``,
                  written before the comparator was asked)
stand-ins         labelled texts of seven words and more that are no answers: paraphrases, traps, question pairs

python bench/comparator.py > bench/results/comparator.json
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from traps import DATA, PAIRS, load

from semkv.encoders.text import SentenceEncoder
from semkv.guards import veto
from semkv.tiers.checking import SameMeaning, same_text, wilson

GQA = PAIRS.with_name("gqa_testdev_llava13b.jsonl.gz")
THRESHOLD = 0.92
_LONG = 7  # words from which meaning is compared

Labelled = tuple[str, str, bool]


def rates(pairs: Iterable[Labelled], same: SameMeaning) -> dict[str, Any]:
    """Shares of misjudged pairs with 95% intervals (Wilson's)."""
    judged = [(same(a, b), truth) for a, b, truth in pairs]
    found: dict[str, Any] = {}
    for name, truth in (("says different of the same", True), ("says same of different", False)):
        verdicts = [verdict for verdict, label in judged if label is truth]
        wrong = sum(verdict is not truth for verdict in verdicts)
        interval = [round(end, 4) for end in wilson(wrong, len(verdicts))]
        share = round(wrong / len(verdicts), 4) if verdicts else None
        found[name] = {"pairs": len(verdicts), "wrong": wrong, "share": share, "interval": interval}
    return found


def short_answers(encoder: SentenceEncoder) -> Iterator[Labelled]:
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


def texts(path: Path, same: bool | None = None) -> list[Labelled]:
    """Labelled texts; those of a file without labels have the given one."""
    rows = [(row["a"], row["b"], bool(row["same"]) if same is None else same) for row in load(path)]
    return [row for row in rows if min(len(row[0].split()), len(row[1].split())) >= _LONG]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "").parse_args()
    encoder = SentenceEncoder()
    same = SameMeaning(encoder)
    result: dict[str, Any] = {"encoder": encoder.fingerprint}
    if GQA.exists():
        result["short answers, GQA"] = rates(short_answers(encoder), same)
    result["long answers"] = rates(texts(DATA / "long_answers.jsonl"), same)
    ours = texts(DATA / "paraphrases.jsonl", same=True) + texts(DATA / "traps.jsonl", same=False)
    result["stand-ins: paraphrases and traps"] = rates(ours, same)
    if PAIRS.exists():
        result["stand-ins: question pairs"] = rates(texts(PAIRS), same)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
