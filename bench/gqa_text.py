"""What reuse of text is worth on real questions: GQA with LLaVA-1.5-13B's answers, tier by tier; prints JSON.

Two things are measured, on figures alone, with no row of the data set in the output:

- how often the model gives one answer to one question asked of two images: over all pairs of rows with the same
  normalised question and different images;
- the hit rate of each text tier, and how many of its hits give the label of the request's own row, with ``--scope
  media`` and ``any``. An engine that answers from the labels stands in for the model, so a hit gets its donor's label.

    python bench/gqa_text.py --data ../shared/data/gqa_testdev_llava13b.jsonl.gz --out bench/results/gqa-text.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semkv.cache import SemanticCache
from semkv.encoders.text import DEFAULT_MODEL, SentenceEncoder
from semkv.engines.scripted import ScriptedEngine
from semkv.keys import normalise
from semkv_lab.console import Listener, write_json
from semkv_lab.datasets import load_samples
from semkv_lab.metrics import Estimate, Summary
from semkv_lab.records import normalise_answer
from semkv_lab.run import run
from semkv_lab.samples import Sample, label_answers
from semkv_lab.settings import resolve

DATA = Path(__file__).parents[2] / "shared" / "data" / "gqa_testdev_llava13b.jsonl.gz"

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "exact text alone": {"disable_semantic_cache": True},
    "semantic text alone, .80": {"disable_exact_cache": True, "similarity_threshold": 0.80},
    "semantic text alone, .92": {"disable_exact_cache": True, "similarity_threshold": 0.92},
    "semantic text alone, .92, no guards": {
        "disable_exact_cache": True,
        "similarity_threshold": 0.92,
        "disable_guards": True,
    },
    "embedding:prompt alone, .92": {
        "disable_exact_cache": True,
        "disable_semantic_cache": True,
        "embedding_layer": ("prompt:384:0.92",),
        "embedding_hook": "prompt",
    },
    "all text tiers": {"embedding_layer": ("prompt:384:0.92",), "embedding_hook": "prompt"},
}


def pairs(samples: Sequence[Sample]) -> dict[str, Any]:
    """Over all pairs of samples with one normalised question and two images: how many have one answer."""
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for sample in samples:
        groups[normalise(sample.question)].append((sample.image_name, normalise_answer(sample.answer or "")))
    total = same = 0
    for rows in groups.values():
        total += _across(rows)
        for answer in {a for _, a in rows}:
            same += _across([row for row in rows if row[1] == answer])
    repeated = [rows for rows in groups.values() if len({image for image, _ in rows}) > 1]
    return {
        "questions": len(samples),
        "distinct": len(groups),
        "asked of several images": len(repeated),
        "pairs across images": total,
        "with the same answer": same,
        "share": round(same / total, 4) if total else None,
    }


def _across(rows: Sequence[tuple[str, str]]) -> int:
    """How many pairs of these rows have different images."""
    every = len(rows) * (len(rows) - 1) // 2
    return every - sum(n * (n - 1) // 2 for n in Counter(image for image, _ in rows).values())


def tiers(
    samples: Sequence[Sample], data: Path, folder: Path, flags: Mapping[str, Any], encoder: SentenceEncoder
) -> Summary:
    """One run over an empty cache."""
    settings = resolve(
        preset="opt-125m",
        engine="scripted",
        dataset="gqa-text",
        dataset_root=data,
        cache_dir=folder,
        **flags,
    )
    answers = label_answers(samples)
    _, summary = run(
        settings,
        samples,
        lambda _, attach: ScriptedEngine(answer=answers, name="labels"),
        lambda s: SemanticCache(s.cache, text_encoder=encoder),
        Listener(),
    )
    return summary


def figures(summary: Summary, seconds: float) -> dict[str, Any]:
    """What is kept of a run."""
    return {
        "samples": summary.samples,
        "hits": summary.hits,
        "hit rate": _estimate(summary.hit_share),
        "agreement on hits": _estimate(summary.accuracy_on_hits),
        "agreement": _estimate(summary.accuracy),
        "wrong hits a request": _estimate(summary.wrong_hit_share),
        "P-CHR AUC": _estimate(summary.chr_area.area),
        "refused": summary.refused,
        "tiers": {
            row.tier: {"n": row.n, "rate": _estimate(row.share), "agreement": _estimate(row.accuracy)}
            for row in summary.tiers
        },
        "faults": dict(summary.faults),
        "lookup p50 ms": None if summary.lookup.p50_s is None else round(1000 * summary.lookup.p50_s, 2),
        "seconds": round(seconds, 1),
    }


def _estimate(value: Estimate) -> list[float | None]:
    return [None if x is None else round(x, 4) for x in (value.value, value.low, value.high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=DATA, help="a .jsonl or .jsonl.gz file, see datasets/gqa_text.py")
    parser.add_argument("--max-samples", type=int, default=None)
    parser.add_argument("--index-encoder", default=DEFAULT_MODEL)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = {
            "preset": "opt-125m",
            "dataset": "gqa-text",
            "dataset_root": options.data,
            "data_dir": folder,
            "engine": "scripted",
        }
        samples = load_samples("gqa-text", resolve(flags).data)[: options.max_samples]
        encoder = SentenceEncoder(options.index_encoder, remembered=2 * len(samples))
        start = time.perf_counter()
        encoder.encode(sorted({s.question for s in samples}))  # in batches, once for all runs
        result: dict[str, Any] = {
            "data": options.data.name,
            "encoder": options.index_encoder,
            "encoding seconds": round(time.perf_counter() - start, 1),
            "identical text": pairs(samples),
            "runs": {},
        }
        for scope in ("media", "any"):
            for number, (title, values) in enumerate(SETTINGS.items()):
                start = time.perf_counter()
                summary = tiers(samples, options.data, folder / f"{scope}{number}", {**values, "scope": scope}, encoder)
                row = figures(summary, time.perf_counter() - start)
                result["runs"].setdefault(scope, {})[title] = row
                print(
                    f"{scope:6} {title:40} {row['hit rate']} {row['agreement on hits']} {row['seconds']} s", flush=True
                )
    if options.out is not None:
        write_json(options.out, result)
    else:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
