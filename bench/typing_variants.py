"""How many questions hit that somebody typed in another way: in lower case, without a mark, with a greeting or a slip?

    python bench/typing_variants.py --out bench/results/cpu/typing-variants.json

The first text of each pair of `bench/data/paraphrases.jsonl` that was held out is asked, then its variants, each in a
namespace of its own, at the gateway's default settings. The slips are in a word of five letters or more, drawn with a
fixed seed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from pathlib import Path

from common import ROOT, machine, write_json

from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.types import Namespace, Request, TextSegment

GREETINGS = ("Hi, ", "Hello! ", "Hey, ")


def variants(text: str, chance: random.Random) -> dict[str, str]:
    """The text typed in other ways, by kind; those that differ from it."""
    found = {
        "lower case": text.lower(),
        "no mark": text.rstrip("?.! "),
        "greeting": chance.choice(GREETINGS) + text,
    }
    if words := list(re.finditer(r"[a-z]{5,}", text)):
        word = chance.choice(words)
        place = chance.randrange(word.start() + 1, word.end() - 2)
        found["letter dropped"] = text[:place] + text[place + 1 :]
        found["letters swapped"] = text[:place] + text[place + 1] + text[place] + text[place + 2 :]
    return {kind: other for kind, other in found.items() if other != text}


def measure(texts: list[str]) -> tuple[dict[str, dict[str, int]], list[list[str]]]:
    """How many variants of each kind were asked and hit, and those that did not."""
    chance = random.Random(0)  # noqa: S311
    counts: dict[str, dict[str, int]] = {}
    missed = []
    with tempfile.TemporaryDirectory() as folder, SemanticCache(CacheConfig(Path(folder))) as cache:
        for number, text in enumerate(texts):
            space = Namespace(f"{number}")
            first = cache.try_reuse(Request("", space, (TextSegment(text),)))
            cache.add_observation(first, "an answer")
            for kind, other in variants(text, chance).items():
                hit = cache.try_reuse(Request("", space, (TextSegment(other),))).hit
                count = counts.setdefault(kind, {"asked": 0, "hits": 0})
                count["asked"] += 1
                count["hits"] += hit
                if not hit:
                    missed.append([kind, text, other])
    return counts, missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = (ROOT / "bench/data/paraphrases.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    texts = list(dict.fromkeys(row["a"] for row in rows if row["held_out"]))
    counts, missed = measure(texts)
    print(json.dumps(counts, indent=2))
    if options.out:
        found = {"machine": machine("sentence-transformers"), "kinds": counts, "missed": missed}
        write_json(options.out, found)


if __name__ == "__main__":
    main()
