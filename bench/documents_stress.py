"""Many random requests with and without documents at other positions: how many exact answers are wrong?

    python bench/documents_stress.py --out bench/results/cpu/documents-stress.json      (1,200 seconds a model)
    python bench/documents_stress.py --seconds 60 --seed 7

Tiny random models in float32, in a KV cache that is too small for them: requests are preempted, chunked and aborted,
documents are purged and stored again. In a third of the rounds one of semkv's hooks fails now and then. In the model of
one layer keys and values depend on token and position alone, so there every answer must be the computed one; in the
other those without approximate tokens must. Ends with status 1 if an answer is wrong, an engine ends, or something is
left in it.
"""

from __future__ import annotations

import argparse
import pkgutil
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from common import ROOT, Answer, machine, options_of, run_child, write_json

sys.path.insert(0, str(ROOT / "tests"))
import tiny_models
from kv_engines import NOTHING, prompt
from maintenance_helpers import purge
from test_positions import CLOSE, HOOKS, LAYERS, SIZES, Reuse, approximate, off, sampling

LIMIT_S = 36000
MODELS = ("llama3", "llama-shallow")
AT_ONCE = 24  # requests of a round


def one(spec: dict[str, Any], answer: Answer) -> None:
    """One model on an empty directory."""
    family = spec["name"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        model = tiny_models.make(family, Path(folder) / family)
        reuse = Reuse(str(model), f"{folder}/cache")
        dice = random.Random(spec["seed"])  # noqa: S311
        preempted = reuse.engine.count_preemptions()
        found = Counter[str]()
        end = time.monotonic() + spec["seconds"]
        while time.monotonic() < end:
            with faults(dice, found):
                found.update(round_of(reuse, dice, every=LAYERS.get(family) == 1))
        found["preempted"] = len(preempted)
        found["mismatches"] = reuse.counters["document_mismatches"]
        found["errors"] = reuse.counters["errors"]
        answer({**found, "left": reuse.engine.left()})


@contextmanager
def faults(dice: random.Random, found: Counter[str]) -> Iterator[None]:
    """In some rounds one hook fails in every fifth call."""
    hook = dice.choice([name for name in HOOKS if not name.endswith(".ended")])
    if dice.random() > 1 / 3:
        yield
        return
    owner, _, name = hook.rpartition(".")
    kind = pkgutil.resolve_name(f"semkv_vllm.{owner}")
    works = getattr(kind, name)

    def breaks(*args: Any, **fields: Any) -> Any:
        if dice.random() < 0.2:
            found["faults"] += 1
            raise ValueError(hook)
        return works(*args, **fields)

    with mock.patch.object(kind, name, breaks):
        yield


def round_of(reuse: Reuse, dice: random.Random, *, every: bool) -> Counter[str]:
    """One crowd; ``every``: also answers with approximate tokens must be right."""
    jobs = [job_of(reuse, dice) for _ in range(AT_ONCE)]
    jobs += [(dice.choice(jobs)[0], None) for _ in range(AT_ONCE // 4)]
    dice.shuffle(jobs)
    reuse.forget()
    wanted = reuse.together([ids for ids, _ in jobs])
    reuse.forget()
    core = reuse.engine.llm.llm_engine
    done: dict[int, Any] = {}
    dropped = set[int]()
    waiting = list(range(len(jobs)))
    found = Counter[str]()
    while waiting or core.has_unfinished_requests():
        while waiting and dice.random() < 0.4:
            number = waiting.pop()
            ids, extra = jobs[number]
            core.add_request(str(number), prompt(ids), sampling(extra))
        done |= {int(out.request_id): out for out in core.step() if out.finished}
        running = set(range(len(jobs))) - set(waiting) - set(done)
        if running and dice.random() < 0.01:
            dropped.add(dice.choice(sorted(running)))
            core.abort_request([str(number) for number in dropped])
        if dice.random() < 0.001:
            purge(reuse.engine.scheduler.connector._settings.cache_dir)
            found["purges"] += 1
    for number, out in done.items():
        if number in dropped:
            continue
        found["answers"] += 1
        found["approximate"] += bool(approximate(out))
        if every or not approximate(out):
            found["checked"] += 1
            found["wrong"] += off(out, wanted[number]) > CLOSE
    found["aborted"] = len(dropped)
    after = reuse.together([ids for ids, _ in jobs])
    reuse.forget()
    after += reuse.together([ids for ids, _ in jobs], load=True)
    wanted += wanted
    found["wrong"] += sum(off(out, own) > CLOSE for out, own in zip(after, wanted, strict=True))
    found["checked"] += len(after)
    if found["purges"]:
        reuse.store()
    return found


def job_of(reuse: Reuse, dice: random.Random) -> tuple[list[int], Any]:
    order = dice.sample(range(len(SIZES)), dice.randint(1, 3))
    parts: list[Any] = [reuse.text(dice.choice([0, 5, 64, 90]))]
    for document in order:
        parts += [document, reuse.text(dice.choice([0, 0, 3, 40]))]
    ids, places = reuse.compose(*parts, reuse.text(dice.randint(1, 40)))
    if dice.random() < 0.3:
        return ids, None
    said = {"spans": places, "repair": dice.choice([0, 32, 64])}
    limit = {"max_offload_tokens": 0} if dice.random() < 0.7 else {}
    return ids, {"kv_transfer_params": {"semkv": said, **limit}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=1200, help="for each model")
    parser.add_argument("--seed", type=int, default=1)
    options = options_of(parser, one)
    models = {}
    bad = 0
    for name in MODELS:
        spec = {"name": name, "seconds": options.seconds, "seed": options.seed}
        log = options.logs / f"documents-stress-{name}.log"
        found = models[name] = run_child(name, spec, log, LIMIT_S, {})
        bad += bool(found.get("wrong")) or found.get("left") != NOTHING
        print(name, found, flush=True)
        known = {"machine": machine("vllm", "torch"), "seed": options.seed, "models": models}
        write_json(options.out, known)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
