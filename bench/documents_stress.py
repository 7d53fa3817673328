"""Many random requests with and without documents at other positions: how many exact answers are wrong?

    python bench/documents_stress.py --out bench/results/cpu/documents-stress.json      (180 seconds an arm)
    python bench/documents_stress.py --seconds 60 --seed 7 --only "two ranks"     (the other arms stay in the file)
    python bench/documents_stress.py --seconds 120 --at-once 6     (on GPUs: other arms, see `GPU_ARMS`)

Tiny random models in float32, in a KV cache that is too small for them: requests are preempted, chunked and aborted.
Each round has a trouble of its own: one of semkv's hooks fails now and then, so do most passes of ours, the documents
are purged in the middle of the round, files on disk are damaged after host memory was emptied, or nothing is wrong. Two
ranks have one that fails now and then, before a pass of ours or within it; in other arms documents have pictures. On a
CPU each is run once more with asynchronous scheduling, and one with model runner V2. On a GPU these two are what
vLLM does by default, and arms without them are the ones more; attention is Triton's there, which takes float32, and
nothing is rounded to TF32. In a model of one layer keys and values depend on token and position alone, so there every
answer must be the computed one; in the other those without approximate tokens must. Ends with status 1 if an answer is
wrong, an engine ends or stands still, or something is left in it.

An answer is wrong where a log-probability is more than `CLOSE` off, or a token is another one, unless the computed
answer's two best tokens are a tie there. ``plain off`` is how far two runs without the connector are apart, of which
one asks all prompts together and the other one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

from common import ROOT, Answer, machine, options_of, run_child, write_json

sys.path.insert(0, str(ROOT / "tests"))
import tiny_models
import vllm_defaults

if "TRITON_INTERPRET" in os.environ:
    vllm_defaults.choose_second_runner()  # before vLLM is imported
from document_engines import (
    BLOCKS,
    BROKEN_RANK,
    CLOSE,
    FAILED,
    HOOKS,
    LAYER_BYTES,
    SIGN,
    PictureReuse,
    Reuse,
    approximate,
    row_off,
    sampling,
)
from kv_engines import NOTHING, SKIP, report
from vllm_forks import fork_always

SECOND_RUNNER = "TRITON_INTERPRET"  # a variable that an arm has which takes it
THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # of each rank
PATIENCE_S = 1200  # beyond an arm's time
AT_ONCE = 12  # requests of a round
TOKENS = 16  # of an answer
FEW = 48  # rows that may be computed again in a step: what needs more takes several
ARMS: dict[str, dict[str, Any]] = {
    "one layer": {"model": "llama3", "rows": FEW},
    "two layers": {"model": "llama-shallow"},
    "pictures": {"model": "qwen3-vl-shallow"},
    "two ranks": {"model": "llama3", "ranks": 2, "rows": FEW},
    "asynchronous: one layer": {"model": "llama3", "ahead": True},
    "asynchronous: two layers": {"model": "llama-shallow", "ahead": True, "rows": FEW},
    "asynchronous: pictures": {"model": "qwen2.5-vl", "ahead": True},
    "asynchronous: two ranks": {"model": "llama3", "ranks": 2, "ahead": True},
    "model runner V2": {"model": "llama3", "ahead": True, "second_runner": True},
}
OLDER = {"older": True}  # model runner V1, and no step planned ahead
GPU_ARMS: dict[str, dict[str, Any]] = {
    "one layer": {"model": "llama3", "rows": FEW},
    "two layers": {"model": "llama-shallow", "rows": FEW},
    "pictures": {"model": "qwen3-vl-shallow"},
    "CUDA graphs": {"model": "llama3", "graphs": True},
    "older: one layer": {"model": "llama3", **OLDER},
    "older: pictures": {"model": "qwen2.5-vl", **OLDER},
    "two ranks": {"model": "llama3", "ranks": 2, "rows": FEW},
    "older: two ranks": {"model": "llama3", "ranks": 2, **OLDER},
}
EXACTLY = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Of arms on a GPU: float32 is not rounded, and workers do not inherit this process's threads."""
TWO_LAYERS = "llama-shallow"  # what is moved is not what would be computed
FAULT = 0.2  # of the calls of a hook that fails
PASS = 0.6  # of our passes, where most fail
ABORT = 0.03  # of the steps
RANK = 0.2  # of the steps before which the second rank begins or ceases to fail
DAMAGED = 0.3  # of the files on disk


def one(spec: dict[str, Any], answer: Answer) -> None:
    """One arm on an empty directory."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cache = Path(folder) / "cache"
        cache.mkdir()
        if spec.get("ahead"):
            vllm_defaults.plan_ahead()
        reuse = started(spec, Path(folder), cache)
        assert not reuse.half.refused, reuse.half.refused
        answer(load(spec, reuse, cache))


def started(spec: dict[str, Any], folder: Path, cache: Path) -> Reuse:
    """The engine of an arm."""
    family = spec["model"]
    model = str(tiny_models.make(family, folder / family))
    args: dict[str, Any] = {"rows": spec.get("rows", 1000)}
    if spec["gpu"]:
        args["attention_backend"] = "TRITON_ATTN"
        args["enforce_eager"] = not spec.get("graphs")
    if spec.get("older"):
        args["async_scheduling"] = False
    if family.startswith("qwen"):
        return PictureReuse(model, str(cache), layers=1, **args)
    ranks = spec.get("ranks", 1)
    if ranks > 1:
        os.environ[SIGN] = str(cache / BROKEN)
        args["worker_extension_cls"] = BROKEN_RANK
        args["tensor_parallel_size"] = ranks
        args["kv_cache_memory_bytes"] = BLOCKS * LAYER_BYTES // ranks
        if not spec["gpu"]:
            fork_always()  # a new interpreter would import vLLM again
    return Reuse(model, str(cache), **args)


def load(spec: dict[str, Any], reuse: Reuse, cache: Path) -> dict[str, Any]:
    """Rounds until an arm's time is over: what was seen in all of them."""
    dice = random.Random(spec["seed"])  # noqa: S311
    found = Counter[str]()
    this = Round(
        reuse=reuse,
        cache=cache,
        dice=dice,
        found=found,
        ranks=spec.get("ranks", 1),
        every=spec["model"] != TWO_LAYERS,
    )
    preempted = reuse.engine.count_preemptions()
    worst = {"plain off": plain_off(this)}
    begun = time.monotonic()
    with noted_failures(found):
        for trouble in cycle(TROUBLES if this.ranks == 1 else RANKS_TROUBLES):
            if time.monotonic() - begun > spec["seconds"]:
                break
            found["rounds"] += 1
            with TROUBLE[trouble](this) as before_step:
                round_of(this, before_step)
            if trouble in ("purge", "disk"):
                reuse.store()
            print(trouble, round(time.monotonic() - begun), dict(found), flush=True)
    failed = cache / FAILED
    found["faults"] += failed.stat().st_size if failed.exists() else 0
    found["preempted"] = len(preempted)
    found["mismatches"] = reuse.counters["document_mismatches"]
    found["errors"] = reuse.counters["errors"]
    seconds = round(time.monotonic() - begun)
    return {
        **found,
        "ways": reuse.engine.ways(),
        **worst,
        "off": this.off,
        "seconds": seconds,
        "left": reuse.engine.left(),
    }


def plain_off(this: Round) -> float:
    """How far answers without the connector are apart, asked together and one after the other."""
    reuse = this.reuse
    prompts = [job_of(reuse, this.dice)[0] for _ in range(AT_ONCE)]
    reuse.forget()
    together = reuse.together(prompts, tokens=TOKENS)
    worst = 0.0
    for ids, other in zip(prompts, together, strict=True):
        reuse.forget()
        alone = reuse.output(ids, SKIP, tokens=TOKENS, logprobs=2)
        difference, is_tie = compared(alone, other)
        this.found["plain ties"] += is_tie
        worst = max(worst, difference)
    return worst


@contextmanager
def noted_failures(found: Counter[str]) -> Iterator[None]:
    """Count the loads that have failed: vLLM computes what they were to bring."""
    from semkv_vllm.kv import SemKVConnector

    hears = SemKVConnector.update_connector_output

    def noted(self: Any, said: Any) -> None:
        found["failed loads"] += len(said.failed_recving or ())
        hears(self, said)

    with mock.patch.object(SemKVConnector, "update_connector_output", noted):
        yield


# ---------------------------------------------------------------------- troubles


@dataclass
class Round:
    """What a round and its trouble need.

    Attributes:
        cache: the directory of what is stored.
        found: counts what happens.
        every: also answers with approximate tokens must be right.
        off: how far the worst of the answers that must be right is from the computed one.
    """

    reuse: Reuse
    cache: Path
    dice: random.Random
    found: Counter[str]
    ranks: int
    every: bool
    off: float = 0.0


Trouble = Iterator[Callable[[], None]]
"""Gives what is called before each step."""


def nothing() -> None:
    """Before a step of a round in which nothing is wrong."""


@contextmanager
def calm(_: Round) -> Trouble:
    yield nothing


@contextmanager
def hook(this: Round) -> Trouble:
    """One hook of this process fails in some of its calls."""
    names = [name for name in HOOKS if not name.endswith(".ended")]
    if this.ranks > 1:  # workers are other processes
        names = [name for name in names if name.startswith("documents.")]
    with failing(this, this.dice.choice(names), FAULT):
        yield nothing


@contextmanager
def broken_pass(this: Round) -> Trouble:
    """Most passes fail, also those of requests that wait for another try."""
    with failing(this, "repair.Repair.run", PASS):
        yield nothing


@contextmanager
def failing(this: Round, name: str, share: float) -> Iterator[None]:
    owner, _, method = name.rpartition(".")
    kind = pkgutil.resolve_name(f"semkv_vllm.{owner}")
    works = getattr(kind, method)

    def breaks(*args: Any, **fields: Any) -> Any:
        if this.dice.random() < share:
            this.found["faults"] += 1
            raise ValueError(name)
        return works(*args, **fields)

    with mock.patch.object(kind, method, breaks):
        yield


@contextmanager
def purged(this: Round) -> Trouble:
    """All is purged once, in the middle of the round, by another process."""
    steps = iter(range(this.dice.randint(5, 60), -1, -1))

    def step() -> None:
        if next(steps, -1) == 0:
            command = [sys.executable, "-m", "semkv", "purge", "--cache-dir", str(this.cache)]
            subprocess.run(command, check=True, capture_output=True)
            this.found["purges"] += 1

    yield step


@contextmanager
def disk(this: Round) -> Trouble:
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
def rank(this: Round) -> Trouble:
    """The second rank fails now and then."""
    sign = this.cache / BROKEN

    def step() -> None:
        if this.dice.random() < RANK:
            sign.write_text(this.dice.choice(["moving", "in the pass", "", ""]))

    yield step
    sign.unlink(missing_ok=True)


BROKEN = "broken"  # a file that tells the second rank where to fail
TROUBLE = {
    "none": calm,
    "hook": hook,
    "pass": broken_pass,
    "purge": purged,
    "disk": disk,
    "rank": rank,
}
TROUBLES = ("purge", "hook", "disk", "pass", "none", "hook")  # in turns
RANKS_TROUBLES = ("rank", "purge", "rank", "disk", "hook", "rank", "none")


# ---------------------------------------------------------------------- a round


def round_of(this: Round, before_step: Callable[[], None]) -> None:
    """One crowd, and then the same prompts from what it has left in vLLM's cache, and in the store."""
    reuse = this.reuse
    found = this.found
    jobs = [job_of(reuse, this.dice) for _ in range(AT_ONCE)]
    jobs += [(this.dice.choice(jobs)[0], None) for _ in range(AT_ONCE // 4)]
    this.dice.shuffle(jobs)
    prompts = [ids for ids, _ in jobs]
    reuse.forget()
    wanted = reuse.together(prompts, tokens=TOKENS)
    reuse.forget()
    for number, out in crowd(this, jobs, before_step).items():
        found["answers"] += 1
        found["approximate"] += bool(approximate(out))
        if this.every or not approximate(out):
            check(this, [out], [wanted[number]])
    after = reuse.together(prompts, tokens=TOKENS)
    found["tokens of vLLM's cache"] += sum(int(out.num_cached_tokens or 0) for out in after)
    check(this, after, wanted)
    reuse.forget()
    after = reuse.together(prompts, load=True, tokens=TOKENS)
    found["tokens of the store"] += sum(report(out).get("loaded_tokens", 0) for out in after)
    check(this, after, wanted)


def crowd(
    this: Round,
    jobs: Sequence[tuple[list[int], Any]],
    before_step: Callable[[], None],
) -> dict[int, Any]:
    """The answers to requests that come one after the other, but for those that are aborted, by number."""
    core = this.reuse.engine.llm.llm_engine
    dice = this.dice
    done: dict[int, Any] = {}
    dropped = set[int]()
    waiting = list(range(len(jobs)))
    while waiting or core.has_unfinished_requests():
        while waiting and dice.random() < 0.4:
            number = waiting.pop()
            ids, extra = jobs[number]
            asked = this.reuse.as_prompt(ids)
            core.add_request(str(number), asked, sampling(extra, tokens=TOKENS))
        before_step()
        done |= {int(out.request_id): out for out in core.step() if out.finished}
        running = set(range(len(jobs))) - set(waiting) - set(done) - dropped
        if running and dice.random() < ABORT:
            one_of_them = dice.choice(sorted(running))
            dropped.add(one_of_them)
            core.abort_request([str(one_of_them)])
    this.found["aborted"] += len(dropped)
    return {number: out for number, out in done.items() if number not in dropped}


def check(this: Round, outputs: Sequence[Any], wanted: Sequence[Any]) -> None:
    found = this.found
    found["checked"] += len(outputs)
    for out, own in zip(outputs, wanted, strict=True):
        difference, is_tie = compared(out, own)
        found["ties"] += is_tie
        if difference > CLOSE:
            found["wrong"] += 1
            where = f"request {out.request_id} of {len(own.prompt_token_ids)} tokens"
            print(f"wrong by {difference}: {where}: {report(out)}", flush=True)
        if difference < float("inf"):
            this.off = max(this.off, difference)


def compared(output: Any, wanted: Any) -> tuple[float, bool]:
    """The largest difference of log-probabilities, and whether a tie ended the comparison.

    Infinite where a token is another one that is no tie. What follows a tie is not compared: it is of another text.
    """
    worst = 0.0
    one, other = output.outputs[0], wanted.outputs[0]
    for place, token in enumerate(other.token_ids):
        row, own = one.logprobs[place], other.logprobs[place]
        worst = max(worst, row_off(row, own))
        mine = one.token_ids[place]
        if mine != token:
            is_tie = mine in own and own[token].logprob - own[mine].logprob <= 2 * CLOSE
            return (worst if is_tie else float("inf")), is_tie
    return worst, False


def job_of(reuse: Reuse, dice: random.Random) -> tuple[list[int], Any]:
    """A prompt, and what its request says."""
    order = dice.sample(range(len(reuse.documents)), dice.randint(1, 3))
    parts: list[Any] = []
    if isinstance(reuse, PictureReuse) and dice.random() < 0.4:
        parts.append(reuse.picture(dice.randrange(2, 5), 3))  # of no document
    parts.append(reuse.text(dice.choice([0, 5, 64, 90])))
    for document in order:
        parts += [document, reuse.text(dice.choice([0, 0, 3, 40]))]
    ids, places = reuse.compose(*parts, reuse.text(dice.randint(1, 40)))
    if dice.random() < 0.3:
        return ids, None
    said = {"spans": places, "repair": dice.choice([0, 32, 64])}
    limit = {"max_offload_tokens": 0} if dice.random() < 0.7 else {}
    return ids, {"kv_transfer_params": {"semkv": said, **limit}}


# ---------------------------------------------------------------------- all arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=180, help="for each arm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="names of arms with commas between them")
    parser.add_argument("--at-once", type=int, default=1, help="arms")
    options = options_of(parser, one)
    gpus = count_gpus()
    known = json.loads(options.out.read_text()) if options.only and options.out.exists() else {}
    arms = known.get("arms", {})
    all_arms = GPU_ARMS if gpus else ARMS
    names = options.only.split(",") if options.only else list(all_arms)

    def run(name: str) -> None:
        spec = {
            **all_arms[name],
            "seconds": options.seconds,
            "seed": options.seed,
            "gpu": bool(gpus),
        }
        log = options.logs / f"documents-stress-{name.replace(': ', '-').replace(' ', '-')}.log"
        environment = environment_of(spec, names.index(name), gpus)
        found = run_child(name, spec, log, options.seconds + PATIENCE_S, environment)
        arms[name] = {"seed": options.seed, "load_average": os.getloadavg(), **found}
        print(name, found, flush=True)
        result = {
            "machine": machine("vllm", "torch"),
            "all": sums(arms),
            "arms": arms,
        }
        write_json(options.out, result)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(run, names))
    bad = [
        name for name, found in arms.items() if found.get("wrong") or found.get("left") != NOTHING
    ]
    sys.exit(1 if bad else 0)


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def environment_of(spec: dict[str, Any], number: int, gpus: int) -> dict[str, str]:
    """Variables of an arm, where the caller has set no others."""
    found = dict(THREADS)
    if spec.get("second_runner"):
        found[SECOND_RUNNER] = "1"
    if gpus:
        found |= EXACTLY
        if spec.get("ranks", 1) == 1:
            found["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
    if spec.get("older"):
        found["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return found


def sums(arms: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Over all arms; an arm without an end is an engine that ended, or stood still."""
    found = Counter[str]()
    for arm in arms.values():
        found["ended engines"] += "error" in arm
        counts = {name: n for name, n in arm.items() if isinstance(n, int) and name != "seed"}
        found.update(counts)
    return dict(found)


if __name__ == "__main__":
    main()
