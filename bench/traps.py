"""How many traps the guards let pass, how many paraphrases they keep, and what they cost; prints JSON.

Traps are pairs of near-equal texts with different answers, paraphrases pairs with the same; both are our own
(``bench/data``). Every third trap and every second paraphrase of a category was held out while the guards were tuned.
Rows with ``passed_first`` or ``kept_first`` are later ones, written before anybody looked (those "unseen" by hands
that had never seen the guards); it says what became of them then. Pairs in other languages (some without accents, as
they are often typed) mean something else each.
Labelled pairs (JSONL, ``a``, ``b``, ``same``; gzip or not) show what the guards do to the cosine's own decisions.

    python bench/traps.py > bench/results/traps.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from semkv import guards
from semkv.encoders.text import DEFAULT_MODEL, SentenceEncoder
from semkv.guards import veto

DATA = Path(__file__).parent / "data"
PAIRS = Path(__file__).parents[2] / "shared" / "data" / "question_pairs_dev.jsonl.gz"
ACCEPTED = 0.85
THRESHOLDS = (0.8, 0.85, 0.9, 0.92, 0.95)
SHARES = (0.2, 0.14, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002)
_BATCH = 128

Row = dict[str, Any]


def load(path: Path) -> list[Row]:
    """Rows of a JSONL file, gzip or not."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    return [json.loads(line) for line in text.splitlines()]


def cosines(rows: Sequence[Row], encoder: SentenceEncoder) -> list[float]:
    """Cosine of ``a`` and ``b`` by row; texts of a length are encoded together."""
    texts = sorted({row[side] for row in rows for side in "ab"}, key=lambda text: (len(text), text))
    vectors: dict[str, Any] = {}
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        vectors.update(zip(batch, encoder.encode(batch), strict=True))
    return [float(vectors[row["a"]] @ vectors[row["b"]]) for row in rows]


def traps(rows: Sequence[Row]) -> Row:
    """The traps that pass, whatever their cosine; by category and half."""
    passed = [row for row in rows if veto(row["a"], row["b"]) is None]
    first = [row for row in rows if "passed_first" in row]
    return _rates(rows, passed, "category", "passed") | {
        "tuned on": _rates(*_half(rows, passed, held=False), "category", "passed"),
        "held out": _rates(*_half(rows, passed, held=True), "category", "passed"),
        "as first seen": _rates(first, [row for row in first if row["passed_first"]], "category", "passed"),
        "reasons": dict(Counter(veto(row["a"], row["b"]) or "none" for row in rows).most_common()),
    }


def paraphrases(rows: Sequence[Row], encoder: SentenceEncoder) -> Row:
    """The paraphrases that cosine accepts and the guards keep; by kind and half."""
    accepted = [row for row, cosine in zip(rows, cosines(rows, encoder), strict=True) if cosine >= ACCEPTED]
    first = [row for row in accepted if "kept_first" in row]
    kept = [row for row in accepted if veto(row["a"], row["b"]) is None]
    return (
        {"written": len(rows), "cosine at least": ACCEPTED}
        | _rates(accepted, kept, "kind", "kept")
        | {
            "tuned on": _rates(*_half(accepted, kept, held=False), "kind", "kept"),
            "held out": _rates(*_half(accepted, kept, held=True), "kind", "kept"),
            "as first seen": _rates(first, [row for row in first if row["kept_first"]], "kind", "kept"),
            "lost by reason": dict(Counter(filter(None, (veto(r["a"], r["b"]) for r in accepted))).most_common()),
        }
    )


def other_languages(rows: Sequence[Row]) -> Row:
    """The pairs in other languages that pass."""
    return _rates(rows, [row for row in rows if veto(row["a"], row["b"]) is None], "language", "passed")


def _half(rows: Sequence[Row], some: Sequence[Row], *, held: bool) -> tuple[list[Row], list[Row]]:
    return [r for r in rows if r["held_out"] is held], [r for r in some if r["held_out"] is held]


def _rates(rows: Iterable[Row], some: Iterable[Row], field: str, name: str) -> Row:
    every, part = Counter(row[field] for row in rows), Counter(row[field] for row in some)
    return {
        "pairs": every.total(),
        name: part.total(),
        "rate": round(part.total() / max(1, every.total()), 4),
        "by": {kind: f"{part[kind]} of {count}" for kind, count in every.items()},
    }


def labelled(rows: Sequence[Row], encoder: SentenceEncoder) -> Row:
    """What the guards do to labelled pairs: at fixed cosines, and at equal shares of different pairs let through."""
    cosine, same = np.array(cosines(rows, encoder)), np.array([bool(row["same"]) for row in rows])
    reasons = [veto(row["a"], row["b"]) for row in rows]
    free = np.array([reason is None for reason in reasons])
    fixed = {}
    for least in THRESHOLDS:
        over = cosine >= least
        fixed[str(least)] = {
            "different let through": [_share(over, ~same), _share(over & free, ~same)],
            "same found": [_share(over, same), _share(over & free, same)],
        }
    guarded = np.where(free, cosine, -1.0)
    equal = {str(share): [_found(cosine, same, share), _found(guarded, same, share)] for share in SHARES}
    each = list(zip(reasons, same, cosine >= ACCEPTED, strict=True))
    counted = {
        reason: {
            "different": sum(bool(r == reason and high and not alike) for r, alike, high in each),
            "same": sum(bool(r == reason and high and alike) for r, alike, high in each),
        }
        for reason in sorted(set(filter(None, reasons)))
    }
    return {
        "pairs": len(rows),
        "same": int(same.sum()),
        "at a cosine: without guards, with": fixed,
        "same found at a share of different let through: without guards, with": equal,
        f"vetoes at {ACCEPTED}": counted,
    }


def _share(chosen: Any, among: Any) -> float:
    return round(float(chosen[among].mean()), 4)


def _found(score: Any, same: Any, share: float) -> float:
    limit = np.sort(score[~same])[::-1][int(share * (~same).sum())]
    return round(float((score[same] > limit).mean()), 4)


def latency(rows: Sequence[Row], rounds: int) -> Row:
    """Microseconds for a pair: two new texts, and a new request against a donor that is still taken apart. The least of
    several calls is what a pair costs; the others were interrupted, or found the processor's caches cold. The words of
    earlier texts stay known, as they do in use; ``with new words`` forgets them too."""
    found: Row = {"load": os.getloadavg()[0]}
    for clock, name in ((time.thread_time_ns, "processor time"), (time.perf_counter_ns, "wall time")):
        for label, known, words in (
            ("two new texts", False, True),
            ("two new texts with new words", False, False),
            ("a new request, a known donor", True, True),
        ):
            calls = [[_timed(row["a"], row["b"], clock, known, words) for _ in range(rounds)] for row in rows]
            found[f"{name}, {label}"] = {
                "calls": _quantiles([call for own in calls for call in own]),
                f"least of {rounds} calls of a pair": _quantiles([min(own) for own in calls]),
            }
    return found


def _timed(a: str, b: str, clock: Callable[[], int], known: bool, words: bool) -> float:
    """Microseconds of the guards and the wording; the texts of earlier calls are forgotten first, and unless ``words``
    their words as well."""
    for cache in guards._CACHES[:2] if words else guards._CACHES:
        cache.cache_clear()
    if known:
        guards._short_text(b, guards.languages()[0])
    start = clock()
    guards.veto(a, b)
    guards.wording(a, b)
    return (clock() - start) / 1e3


def _quantiles(values: list[float]) -> Row:
    cuts = statistics.quantiles(values, n=100)
    return {
        "count": len(values),
        "p50_us": round(cuts[49], 1),
        "p99_us": round(cuts[98], 1),
        "min_us": round(min(values), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="labelled pairs; left out where missing")
    parser.add_argument("--index-encoder", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    encoder = SentenceEncoder(options.index_encoder)
    trap_rows, paraphrase_rows = load(DATA / "traps.jsonl"), load(DATA / "paraphrases.jsonl")
    foreign_rows = load(DATA / "other_languages.jsonl")
    result = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "versions": {name: version(name) for name in ("semkv", "sentence-transformers", "numpy")},
        "encoder": options.index_encoder,
        "traps": traps(trap_rows),
        "paraphrases": paraphrases(paraphrase_rows, encoder),
        "other languages": other_languages(foreign_rows),
        "latency": latency(paraphrase_rows, options.rounds),
    }
    if options.pairs.is_file():
        result["labelled pairs"] = labelled(load(options.pairs), encoder)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
