"""What a real judge gets wrong: ``python bench/judge_errors.py --model judge.safetensors --out FILE``.

The judge is a file that ``training/judge/train.py`` made, or with ``--url`` any OpenAI-compatible server. Each pair of
a set is asked in an empty cache with ``--policy judge``: the first text is stored, and the second asks. Pairs that this
leaves in doubt are shown to the judge, and those that hit, too. The sets are those of ``bench/data`` that no judge was
trained on, and with ``--pairs`` those of other files, of which nothing but counts is written.

The result has, for each least cosine and each least chance of a yes, how many traps and paraphrases hit. ``fixed`` are
those that hit without a judge. "refused below" is a judge that is shown what hits, and may refuse it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.encoders.pairs import PairClassifier
from semkv.encoders.text import SentenceEncoder
from semkv.tiers.judging import one_token
from semkv.types import Namespace, Request, TextSegment
from semkv_guards.judge import messages
from semkv_lab.labels import Pair, know
from semkv_lab.samples import read_rows
from semkv_lab.semantic import DATA, machine, rate, times

_COSINES = (0.6, 0.7, 0.75, 0.8, 0.85, 0.88)
_CHANCES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_REFUSED = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
_TIMEOUT_S = 30.0
Row = dict[str, Any]


class Judge(Protocol):
    """Tells the chance of a yes."""

    def chance(self, first: str, second: str) -> float | None:
        """Of all that is said for yes and no; None where the pair is not judged."""
        ...


class Server:
    """A server that judges."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc

    def chance(self, first: str, second: str) -> float | None:
        """See `Judge`."""
        shown = messages([], first, second)
        if shown is None:
            return None
        body = json.dumps({"model": "judge", **one_token(shown)})
        connection = http.client.HTTPConnection(self._host, timeout=_TIMEOUT_S)
        connection.request(
            "POST", "/v1/chat/completions", body, {"content-type": "application/json"}
        )
        answer = json.loads(connection.getresponse().read())
        connection.close()
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        chances = {row["token"]: math.exp(row["logprob"]) for row in top}
        return chances["yes"] / (chances["yes"] + chances["no"])


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a pair: whether it hit without a judge, its cosine where it was in doubt, and the judge's chance
    of a yes where it was shown."""

    same: bool
    fixed: bool
    cosine: float = 0.0
    chance: float = 0.0


def ask(cache: SemanticCache, pairs: Sequence[Pair], name: str) -> list[Found]:
    """Each pair by itself, without a judge."""
    found = []
    for number, pair in enumerate(pairs):
        space = Namespace(f"{name} {number}")
        first, second = (
            Request(str(place), space, (TextSegment(text),))
            for place, text in enumerate((pair.a, pair.b))
        )
        cache.add_observation(cache.try_reuse(first), pair.a)
        report = cache.try_reuse(second)
        cosine = 0.0
        if not report.plan.full and report.doubt is not None:
            cosine = report.doubt[0].score
        found.append(Found(pair.same, report.plan.full, cosine))
    return found


def judged(
    found: Sequence[Found], pairs: Sequence[Pair], judge: Judge, seconds: list[float]
) -> list[Found]:
    """The same with the judge's chances."""
    rows = []
    for row, pair in zip(found, pairs, strict=True):
        if row.fixed or row.cosine > 0.0:
            begin = time.perf_counter()
            chance = judge.chance(pair.b, pair.a) or 0.0
            seconds.append(time.perf_counter() - begin)
            row = replace(row, chance=chance)
        rows.append(row)
    return rows


def figures(found: Sequence[Found]) -> Row:
    """How many hit, and how many of those are wrong, without a judge and with it at each setting."""
    table: Row = {"fixed": hits(found, 2.0, 2.0)}
    for cosine in _COSINES:
        for chance in _CHANCES:
            table[f"from {cosine:g}, yes {chance:g}"] = hits(found, cosine, chance)
    for chance in _REFUSED:
        table[f"refused below {chance:g}"] = hits(found, 2.0, 2.0, refused=chance)
    shown_pairs = [row for row in found if row.cosine > 0.0]
    table["shown"] = {
        "same": sum(row.same for row in shown_pairs),
        "different": sum(not row.same for row in shown_pairs),
    }
    return table


def hits(found: Sequence[Found], cosine: float, chance: float, refused: float = 0.0) -> Row:
    """The shares of pairs with one answer, and with two, that hit."""
    by_label = [[row for row in found if row.same is same] for same in (True, False)]
    names = ("same that hit", "different that hit")
    return {
        name: rate(sum(_hits(row, cosine, chance, refused) for row in rows), len(rows))
        for name, rows in zip(names, by_label, strict=True)
        if rows
    }


def _hits(row: Found, cosine: float, chance: float, refused: float) -> bool:
    if row.fixed:
        return row.chance >= refused
    return row.cosine >= cosine and row.chance >= chance


def sets(files: Iterable[Path]) -> dict[str, list[Pair]]:
    """The pairs of each set."""
    found: dict[str, list[Pair]] = {}
    strangers = []
    for name, same, first in (
        ("traps", False, "passed_first"),
        ("paraphrases", True, "kept_first"),
    ):
        for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["held_out"] and first in row:
                strangers.append(Pair(row["a"], row["b"], same))
    found["held out, by strangers"] = strangers
    for which in ("first", "second", "third", "fourth", "fifth"):
        rows = map(json.loads, (DATA / f"unseen_{which}.jsonl").read_text("utf-8").splitlines())
        for row in rows:
            kind = "long" if row["kind"] == "long trap" else "short"
            group = found.setdefault(f"unseen, {which} set, {kind}", [])
            group.append(Pair(row["a"], row["b"], row["same"]))
    found["long, held out"] = [
        Pair(row["a"], row["b"], row["same"])
        for row in map(json.loads, (DATA / "long.jsonl").read_text("utf-8").splitlines())
        if row["held_out"]
    ]
    return found | {f"file {number}": read_rows(file, Pair) for number, file in enumerate(files, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--model", type=Path)
    asked.add_argument("--url")
    parser.add_argument("--pairs", type=Path, nargs="*", default=())
    parser.add_argument("--training", type=Path, help="what the trainer wrote of itself")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    judge: Judge = PairClassifier(given.model) if given.model else Server(given.url)
    result: Row = {"machine": machine()}
    if given.training:
        trained = json.loads(given.training.read_text(encoding="utf-8"))
        trained.pop("log")
        result["training"] = trained
    encoder = SentenceEncoder(remembered=1 << 17)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        config = CacheConfig(Path(folder), policy="judge", judge_threshold=min(_COSINES))
        cache = SemanticCache(config, text_encoder=encoder)
        for name, pairs in sets(given.pairs).items():
            know((text for pair in pairs for text in (pair.a, pair.b)), encoder)
            found = judged(ask(cache, pairs, name), pairs, judge, seconds)
            result[name] = figures(found)
            print(name, json.dumps(result[name]["fixed"]), flush=True)
            result["judge"] = times(seconds)
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        cache.close()


if __name__ == "__main__":
    main()
