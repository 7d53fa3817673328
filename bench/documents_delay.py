"""What decoding requests wait for while others bring documents: the gaps between their tokens.

    python bench/documents_delay.py --out bench/results/h200/documents-delay.json
    python bench/documents_delay.py --tiny --block 32 --kv-gib 1 --host-gib 1 --decoding 4 --turns 1 (on a CPU)

One engine with Qwen2.5-7B's shape and dummy weights, in one process with what asks it. 16 or 64 requests decode, and in
each window of time others come with documents of 1,024 tokens, each behind a text of its own, for an answer of one
token: one with 8 documents every half second, four of them at once, or one with 30. By turns these are computed, in
chunks of at most so many tokens a step (``batch``, vLLM's ``max_num_batched_tokens``); reused at another position, with
``document_rows`` as the arm says (0: as ``batch``); or found exactly, in host memory. In one arm nobody comes.

``gap_ms`` is between two tokens of one decoding request, over all of them and all turns. What others do in a server is
taken out of it: checking a request and hashing its blocks before the scheduler gets it. ``longest_with_asking_ms`` has
it. ``first_token_ms`` is of those that come, from the moment at which they should. ``reused`` says how many of these
had documents reused, and ``most_rows`` how many tokens were computed again in one step at most. Nothing is stored
meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from common import machine, write_json
from positions import DOCUMENT, SYSTEM, Engine, engine_options

PROMPT = 256  # of a decoding request
ANSWER = 8192  # more than it ever gets
REPAIR = 32
NOTHING = {"semkv": {"skip": True}}


class Kind(NamedTuple):
    """Requests of a window: how many documents each has, and at which second each comes."""

    documents: int
    at: Sequence[float]


KINDS = {
    "8 documents": Kind(8, (0.0, 0.5, 1.0, 1.5)),
    "4 times 8 at once": Kind(8, (0.0, 0.0, 0.0, 0.0)),
    "30 documents": Kind(30, (0.0,)),
}


class Arm(NamedTuple):
    """How those that come are served: ``way`` is "computed", "reused" or "exact"."""

    way: str
    batch: int
    rows: int = 0

    @property
    def name(self) -> str:
        rows = f", document_rows {self.rows}" if self.rows else ""
        return f"{self.way}, batch {self.batch}{rows}"


@dataclass
class Found:
    """What was seen of one arm in all its windows; times in milliseconds."""

    gaps: list[float] = field(default_factory=list)
    with_asking: float = 0.0  # the longest
    longest: list[float] = field(default_factory=list)  # of each window
    rates: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    reused: int = 0
    loaded: list[int] = field(default_factory=list)  # tokens of each that came
    steps: list[tuple[int, float]] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "gap_ms": spread(self.gaps),
            "longest_gap_of_each_window_ms": self.longest,
            "longest_with_asking_ms": round(self.with_asking, 2),
            "decoded_per_s": round(statistics.median(self.rates), 1),
        }
        if self.firsts:
            row |= {
                "came": len(self.firsts),
                "reused": self.reused,
                "loaded_tokens": statistics.median(self.loaded),
                "first_token_ms": spread(self.firsts),
            }
        if self.steps:
            row |= {
                "most_rows": max(rows for rows, _ in self.steps),
                "steps_with_rows": len(self.steps),
                "longest_putting_right_ms": round(max(ms for _, ms in self.steps), 2),
            }
        return row


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, the 99th percentile (nearest rank) and the longest."""
    ordered = sorted(values)
    place = -(-99 * len(ordered) // 100) - 1
    return {
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[place], 2),
        "longest": round(ordered[-1], 2),
    }


class Crowd:
    """Requests that decode, and those that come."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        assert not engine.told["refused"], engine.told
        self.engine = engine
        self.seconds = seconds
        self.llm: Any = engine.llm.llm_engine
        self.prompts: list[list[int]] = []
        self.number = 0
        self.exact = {name: [self.prompt(kind) for _ in kind.at] for name, kind in KINDS.items()}
        for prompts in self.exact.values():
            for prompt in prompts:
                engine.ask(prompt)
        engine.settle()
        gc.collect()
        gc.freeze()  # as vLLM's server does

    def prompt(self, kind: Kind) -> list[int]:
        """A text of its own, documents in some order, a question."""
        own = self.engine.drawn(SYSTEM)
        chosen = self.engine.order()[: kind.documents]
        texts = [self.engine.documents[number] for number in chosen]
        return [*own, *(token for text in texts for token in text), *self.engine.question]

    def set(self, arm: Arm) -> None:
        """As an engine with these settings has it."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler = self.engine.core.scheduler
        scheduler.max_num_scheduled_tokens = arm.batch
        rows = arm.rows or arm.batch
        scheduler.connector._documents._most_rows = rows
        get_kv_transfer_group()._placement._repair._most_tokens = rows

    def forget(self) -> None:
        """Leave vLLM's prefix cache with nothing but what decoding requests have."""
        pool = self.engine.core.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if not block.ref_cnt})

    def add(self, prompt: list[int], said: dict[str, Any], tokens: int) -> tuple[str, float]:
        """Ask; the request's name, and seconds that went by before the scheduler had it."""
        self.number += 1
        name = str(self.number)
        asked = {"prompt_token_ids": prompt}
        scheduler = self.engine.core.scheduler
        add = scheduler.add_request
        own = 0.0

        def timed(*request: Any) -> None:
            nonlocal own
            begun = time.perf_counter()
            add(*request)
            own = time.perf_counter() - begun

        begun = time.perf_counter()
        with mock.patch.object(scheduler, "add_request", timed):
            self.llm.add_request(name, asked, self.engine.sampling(said, tokens))
        return name, time.perf_counter() - begun - own

    def decoding(self, count: int) -> dict[str, float]:
        """Start requests that decode; by name, when each got its last token."""
        while len(self.prompts) < count:
            self.prompts.append(self.engine.drawn(PROMPT))
        names = [self.add(prompt, NOTHING, ANSWER)[0] for prompt in self.prompts[:count]]
        last: dict[str, float] = {}
        while len(last) < count:
            last |= dict.fromkeys(self.step(), time.perf_counter())
        assert set(names) == set(last)
        return last

    def step(self) -> dict[str, Any]:
        """By request what has come in one step."""
        return {out.request_id: out for out in self.llm.step() if out.outputs[0].token_ids}

    def window(self, count: int, arm: Arm | None, name: str, found: Found) -> None:
        """Decode for some time while those of a kind come, and until they have their answers."""
        coming = []
        if arm is not None:
            self.set(arm)
            coming = self.coming(arm, name)
        last = self.decoding(count)
        self.forget()
        last = dict.fromkeys(last, time.perf_counter())
        open_: dict[str, float] = {}
        gaps: list[float] = []
        longest = 0.0
        asking = 0.0  # since the last tokens
        with noted_steps(found.steps):
            begun = time.perf_counter()
            while coming or open_ or time.perf_counter() - begun < self.seconds:
                while coming and begun + coming[0][0] <= time.perf_counter():
                    at, prompt, said = coming.pop(0)
                    request, seconds = self.add(prompt, said, 1)
                    open_[request] = begun + at
                    asking += seconds
                    last = {name: at + seconds for name, at in last.items()}
                came = self.step()
                now = time.perf_counter()
                for request, out in came.items():
                    if request in last:
                        gaps.append(1e3 * (now - last[request]))
                        longest = max(longest, gaps[-1] + 1e3 * asking)
                        last[request] = now
                    else:
                        found.firsts.append(1e3 * (now - open_.pop(request)))
                        told = (out.kv_transfer_params or {}).get("semkv") or {}
                        found.reused += bool(told.get("approximate_tokens"))
                        found.loaded.append(told.get("loaded_tokens", 0))
                asking = 0.0 if came.keys() & last.keys() else asking
            found.rates.append(len(gaps) / (time.perf_counter() - begun))
        found.gaps += gaps
        found.with_asking = max(found.with_asking, longest)
        found.longest.append(round(max(gaps), 2))
        self.llm.abort_request(list(last))
        self.engine.settle()

    def coming(self, arm: Arm, name: str) -> list[tuple[float, list[int], dict[str, Any]]]:
        kind = KINDS[name]
        said: dict[str, Any] = {"max_offload_tokens": 0}
        if arm.way == "computed":
            said = NOTHING
        if arm.way == "reused":
            begins = [SYSTEM + DOCUMENT * place for place in range(kind.documents)]
            spans = [[begin, begin + DOCUMENT] for begin in begins]
            said = said | {"semkv": {"spans": spans, "repair": REPAIR}}
        prompts = [self.prompt(kind) for _ in kind.at]
        if arm.way == "exact":
            prompts = self.exact[name]
        return [(at, prompt, said) for at, prompt in zip(kind.at, prompts, strict=True)]


@contextmanager
def noted_steps(steps: list[tuple[int, float]]) -> Iterator[None]:
    """Note of each step that repairs documents how many tokens it computes again, and how long it takes.

    That begins while the GPU still computes the step.
    """
    from semkv_vllm.placement import Placement
    from semkv_vllm.repair import Repair

    finish = Placement.finish
    run = Repair.run
    rows: list[int] = []

    def noted_run(self: Any, passes: Any) -> None:
        rows.extend(len(each.ids) for each in passes)
        run(self, passes)

    def noted(self: Any, results: Any) -> None:
        rows.clear()
        begun = time.perf_counter()
        finish(self, results)
        if rows:
            steps.append((sum(rows), 1e3 * (time.perf_counter() - begun)))

    with mock.patch.object(Placement, "finish", noted), mock.patch.object(Repair, "run", noted_run):
        yield


def arms_of(batches: Sequence[int], rows: Sequence[int]) -> list[Arm]:
    arms = []
    for batch in batches:
        arms += [Arm("computed", batch), Arm("reused", batch)]
    smallest = batches[0]
    arms += [Arm("reused", smallest, count) for count in rows]
    return [*arms, Arm("exact", smallest)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decoding", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--batches", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 256])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.2, help="of a window, at least")
    engine_options(parser, host_gib=12, kv_gib=24)
    options = parser.parse_args()
    options.batch = max(options.batches)
    arms = arms_of(options.batches, options.rows)
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(options, Path(scratch))
        crowd = Crowd(engine, options.seconds)
        found: defaultdict[tuple[int, str, str], Found] = defaultdict(Found)
        for turn in range(options.turns + 1):  # the first compiles
            for count in options.decoding:
                for arm in [None, *arms]:
                    for name in KINDS if arm else ["nobody"]:
                        key = (count, arm.name if arm else "nothing", name)
                        seen = found[key] if turn else Found()
                        crowd.window(count, arm, name, seen)
            print(f"turn {turn} of {options.turns}", flush=True)
            if turn:
                report(options, engine, found)


def report(
    options: argparse.Namespace,
    engine: Engine,
    found: dict[tuple[int, str, str], Found],
) -> None:
    rows = []
    for (count, arm, kind), seen in found.items():
        row = {"decoding": count, "arm": arm, "come": kind, **seen.row()}
        rows.append(row)
        print(count, arm, kind, row["gap_ms"], row.get("first_token_ms"), row.get("reused"))
    result = {
        "machine": machine("vllm", "torch"),
        "shape": engine.shape,
        "engine": engine.told,
        "turns": options.turns,
        "rows": rows,
    }
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
