"""Many random requests with and without documents at other positions: how many exact answers are wrong?

    python bench/documents_stress.py --out bench/results/cpu/documents-stress.json      (400 seconds an arm)
    python bench/documents_stress.py --seconds 60 --seed 7

Tiny random models in float32, in a KV cache that is too small for them: requests are preempted, chunked and aborted.
Each round has a trouble of its own: one of semkv's hooks fails now and then, the documents are purged in the middle of
it, files on disk are damaged after host memory was emptied, or nothing is wrong. One arm has two ranks, of which one
fails now and then, before a pass of ours or within it. In a model of one layer keys and values depend on token and
position alone, so there every answer must be the computed one; in the other those without approximate tokens must. Ends
with status 1 if an answer is wrong, an engine ends or stands still, or something is left in it.
"""

from __future__ import annotations

import argparse
import pkgutil
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from common import ROOT, Answer, machine, options_of, run_child, write_json

sys.path.insert(0, str(ROOT / "tests"))
import tiny_models
from kv_engines import NOTHING, prompt
from maintenance_helpers import purge
from test_positions import CLOSE, HOOKS, SIZES, Reuse, approximate, broken_rank, off, sampling

THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # of each rank
PATIENCE_S = 1200  # beyond an arm's time
AT_ONCE = 12  # requests of a round
TOKENS = 16  # of an answer
ONE_LAYER = "llama3"
ARMS = {
    "one layer": {"model": ONE_LAYER, "ranks": 1},
    "two layers": {"model": "llama-shallow", "ranks": 1},
    "one layer on two ranks": {"model": ONE_LAYER, "ranks": 2},
}
FAULT = 0.2  # of the calls of a hook that fails
ABORT = 0.03  # of the steps
RANK = 0.2  # of the steps before which the second rank begins or ceases to fail
DAMAGED = 0.3  # of the files on disk


def one(spec: dict[str, Any], answer: Answer) -> None:
    """One arm on an empty directory."""
    family = spec["model"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        model = tiny_models.make(family, Path(folder) / family)
        cache = Path(folder) / "cache"
        cache.mkdir()
        dice = random.Random(spec["seed"])  # noqa: S311
        if spec["ranks"] > 1:
            with broken_rank(cache / SIGN):
                reuse = Reuse(str(model), str(cache), tensor_parallel_size=spec["ranks"])
        else:
            reuse = Reuse(str(model), str(cache))
        preempted = reuse.engine.count_preemptions()
        found = Counter[str]()
        end = time.monotonic() + spec["seconds"]
        troubles = cycle(RANKS_TROUBLES if spec["ranks"] > 1 else TROUBLES)
        while time.monotonic() < end:
            trouble = next(troubles)
            found[f"rounds: {trouble}"] += 1
            with TROUBLE[trouble](Round(reuse, cache, dice, found)) as before_step:
                found.update(round_of(reuse, dice, before_step, every=family == ONE_LAYER))
            if trouble in ("purge", "disk"):
                reuse.store()
            print(dict(found), flush=True)
        found["preempted"] = len(preempted)
        found["mismatches"] = reuse.counters["document_mismatches"]
        found["errors"] = reuse.counters["errors"]
        answer({**found, "left": reuse.engine.left()})


# ---------------------------------------------------------------------- troubles


class Round(NamedTuple):
    """What a trouble of a round may see."""

    reuse: Reuse
    cache: Path
    dice: random.Random
    found: Counter[str]


def nothing() -> None:
    """Before a step of a round in which nothing is wrong."""


@contextmanager
def calm(_: Round) -> Iterator[Callable[[], None]]:
    yield nothing


@contextmanager
def hook(this: Round) -> Iterator[Callable[[], None]]:
    """One hook fails in some of its calls."""
    name = this.dice.choice([name for name in HOOKS if not name.endswith(".ended")])
    owner, _, method = name.rpartition(".")
    kind = pkgutil.resolve_name(f"semkv_vllm.{owner}")
    works = getattr(kind, method)

    def breaks(*args: Any, **fields: Any) -> Any:
        if this.dice.random() < FAULT:
            this.found["faults"] += 1
            raise ValueError(name)
        return works(*args, **fields)

    with mock.patch.object(kind, method, breaks):
        yield nothing


@contextmanager
def purged(this: Round) -> Iterator[Callable[[], None]]:
    """All is purged once, in the middle of the round."""
    steps = iter(range(this.dice.randint(5, 60), -1, -1))

    def step() -> None:
        if next(steps, -1) == 0:
            purge(this.cache)
            this.found["purges"] += 1

    yield step


@contextmanager
def disk(this: Round) -> Iterator[Callable[[], None]]:
    """Only the disk has the documents, and some of its files are damaged."""
    this.reuse.engine.forget()
    for path in sorted((this.cache / "kv").glob("*/*/*.safetensors")):
        if this.dice.random() < DAMAGED:
            raw = bytearray(path.read_bytes())
            raw[this.dice.randrange(len(raw))] ^= 255
            path.write_bytes(raw[: this.dice.choice([len(raw), len(raw) // 2])])
            this.found["damaged files"] += 1
    yield nothing


@contextmanager
def rank(this: Round) -> Iterator[Callable[[], None]]:
    """The second rank fails now and then."""
    sign = this.cache / SIGN

    def step() -> None:
        if this.dice.random() < RANK:
            where = this.dice.choice(["moving", "in the pass", "", ""])
            sign.write_text(where)
            this.found["rank told to fail"] += bool(where)

    yield step
    sign.unlink(missing_ok=True)


SIGN = "broken"  # a file that tells the second rank where to fail
TROUBLE = {
    "none": calm,
    "hook": hook,
    "purge": purged,
    "disk": disk,
    "rank": rank,
}
TROUBLES = ("purge", "hook", "disk", "hook", "none", "hook")  # in turns
RANKS_TROUBLES = ("rank", "purge", "rank", "none", "rank")


def round_of(
    reuse: Reuse,
    dice: random.Random,
    before_step: Callable[[], None],
    *,
    every: bool,
) -> Counter[str]:
    """One crowd; ``every``: also answers with approximate tokens must be right."""
    jobs = [job_of(reuse, dice) for _ in range(AT_ONCE)]
    jobs += [(dice.choice(jobs)[0], None) for _ in range(AT_ONCE // 4)]
    dice.shuffle(jobs)
    prompts = [ids for ids, _ in jobs]
    reuse.forget()
    wanted = reuse.together(prompts, tokens=TOKENS)
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
            core.add_request(str(number), prompt(ids), sampling(extra, tokens=TOKENS))
        before_step()
        done |= {int(out.request_id): out for out in core.step() if out.finished}
        running = set(range(len(jobs))) - set(waiting) - set(done)
        if running and dice.random() < ABORT:
            dropped.add(dice.choice(sorted(running)))
            core.abort_request([str(number) for number in dropped])
    for number, out in done.items():
        if number in dropped:
            continue
        found["answers"] += 1
        found["approximate"] += bool(approximate(out))
        if every or not approximate(out):
            found["checked"] += 1
            found["wrong"] += off(out, wanted[number]) > CLOSE
    found["aborted"] = len(dropped)
    after = reuse.together(prompts, tokens=TOKENS)
    reuse.forget()
    after += reuse.together(prompts, load=True, tokens=TOKENS)
    wanted += wanted
    found["wrong"] += sum(off(out, own) > CLOSE for out, own in zip(after, wanted, strict=True))
    found["checked"] += len(after)
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
    parser.add_argument("--seconds", type=int, default=400, help="for each arm")
    parser.add_argument("--seed", type=int, default=1)
    options = options_of(parser, one)
    arms = {}
    bad = 0
    for name, arm in ARMS.items():
        spec = {**arm, "seconds": options.seconds, "seed": options.seed}
        log = options.logs / f"documents-stress-{name.replace(' ', '-')}.log"
        found = arms[name] = run_child(name, spec, log, options.seconds + PATIENCE_S, THREADS)
        bad += bool(found.get("wrong")) or found.get("left") != NOTHING
        print(name, found, flush=True)
        known = {"machine": machine("vllm", "torch"), "seed": options.seed, "arms": arms}
        known["seconds"] = options.seconds
        write_json(options.out, known)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
