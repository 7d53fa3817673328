"""How many questions still hit when they are typed otherwise: ``python bench/typing_variants.py --out FILE``.

Each held-out question of ``bench/data/paraphrases.jsonl`` is stored, and asked in a variant of every kind, in an empty
cache with default settings. One word of four letters or more is misspelled, drawn at random.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

from semkv.config import PolicyConfig
from semkv.encoders.text import SentenceEncoder
from semkv_lab.caches import SemKV, ask_pair
from semkv_lab.labels import Pair, know
from semkv_lab.semantic import DATA, machine, rate

_QUESTIONS = 200
_LETTERS = 4  # of a word that is misspelled, at least
_MARKS = "?.,!"
_FILLERS = ("um, ", "so, ", "hi, ", "hey, ", "um so ")


def dropped(word: str, random: Random) -> str:
    place = random.randrange(len(word))
    return word[:place] + word[place + 1 :]


def swapped(word: str, random: Random) -> str:
    place = random.randrange(len(word) - 1)
    return word[:place] + word[place : place + 2][::-1] + word[place + 2 :]


def doubled(word: str, random: Random) -> str:
    place = random.randrange(len(word))
    return word[: place + 1] + word[place:]


def misspelled(question: str, slip: Callable[[str, Random], str], random: Random) -> str:
    """A question with a slip in one of its words."""
    words = question.split()
    place = random.choice([i for i, word in enumerate(words) if is_long(word)])
    core = words[place].rstrip(_MARKS)
    words[place] = slip(core, random) + words[place][len(core) :]
    return " ".join(words)


def is_long(word: str) -> bool:
    core = word.rstrip(_MARKS)
    return core.isalpha() and len(core) >= _LETTERS


def variants(question: str, random: Random) -> dict[str, str]:
    """A question typed otherwise, by what is done to it."""
    slips = {"letter dropped": dropped, "letters swapped": swapped, "letter doubled": doubled}
    found = {name: misspelled(question, slip, random) for name, slip in slips.items()}
    found["small letters"] = question.lower()
    found["filler"] = random.choice(_FILLERS) + question[0].lower() + question[1:]
    found["no mark"] = question.rstrip("?.!")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    lines = (DATA / "paraphrases.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["held_out"]]
    questions = [
        row["a"] for row in rows if row["a"].isascii() and any(map(is_long, row["a"].split()))
    ]
    random = Random(0)  # noqa: S311
    typed = [(question, variants(question, random)) for question in questions[:_QUESTIONS]]
    found: dict[str, object] = {"machine": machine()}
    encoder = SentenceEncoder(remembered=1 << 16)
    know((text for question, changed in typed for text in (question, *changed.values())), encoder)
    with closing(SemKV(encoder, PolicyConfig())) as cache:
        for name in typed[0][1]:
            pairs = [Pair(question, changed[name], same=True) for question, changed in typed]
            hits = [ask_pair(cache, pair, f"{name} {n}") for n, pair in enumerate(pairs)]
            missed = [pair.b for pair, hit in zip(pairs, hits, strict=True) if not hit]
            found[name] = {**rate(sum(hits), len(hits)), "missed": missed}
            print(f"{name}: {sum(hits)} of {len(hits)}")
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
