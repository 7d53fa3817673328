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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from common import write_json
from positions import NO_REUSE, SYSTEM, Engine, engine_options, reuse

PROMPT = 256  # of a decoding request
ANSWER = 8192  # more than it ever gets
REPAIR = 32


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
    longest: list[float] = field(default_factory=list)  # of each window
    longest_with_asking: float = 0.0
    rates: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    reused: int = 0
    loaded: list[int] = field(default_factory=list)  # tokens of each that came
    steps: list[tuple[int, float]] = field(default_factory=list)  # as `noted_steps` has them

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "gap_ms": spread(self.gaps),
            "longest_gap_of_each_window_ms": self.longest,
            "longest_with_asking_ms": round(self.longest_with_asking, 2),
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


class Window:
    """What is seen of one window of time."""

    def __init__(self, decoding: Iterable[str]) -> None:
        self.begun = time.perf_counter()
        self.last = dict.fromkeys(decoding, self.begun)  # when each got its last token
        self.waiting: dict[str, float] = {}  # by request that came, when it should have
        self.gaps: list[float] = []
        self.longest_with_asking = 0.0
        self.asking = 0.0  # seconds since the last tokens

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def asked(self, request: str, at: float, seconds: float) -> None:
        """A request came, which should have at a second of the window, and took some before the scheduler had it."""
        self.waiting[request] = self.begun + at
        self.asking += seconds
        self.last = {name: then + seconds for name, then in self.last.items()}

    def answered(self, outputs: Sequence[Any], found: Found) -> None:
        """A step's tokens are there."""
        now = time.perf_counter()
        for out in outputs:
            if out.request_id in self.last:
                self.decoded(out.request_id, now)
            else:
                found.firsts.append(1e3 * (now - self.waiting.pop(out.request_id)))
                told = (out.kv_transfer_params or {}).get("semkv") or {}
                found.reused += bool(told.get("approximate_tokens"))
                found.loaded.append(told.get("loaded_tokens", 0))
        if any(out.request_id in self.last for out in outputs):
            self.asking = 0.0

    def decoded(self, request: str, now: float) -> None:
        gap = now - self.last[request]
        self.gaps.append(1e3 * gap)
        self.longest_with_asking = max(self.longest_with_asking, 1e3 * (gap + self.asking))
        self.last[request] = now


class Crowd:
    """Requests that decode, and those that come."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        assert not engine.told["refused"], engine.told
        self.engine = engine
        self.seconds = seconds
        self.llm: Any = engine.llm.llm_engine
        self.prompts: list[list[int]] = []
        self.number = 0
        self.exact = {name: self.prompts_of(kind) for name, kind in KINDS.items()}
        for prompts in self.exact.values():
            for prompt in prompts:
                engine.ask(prompt)
        engine.settle()
        gc.collect()
        gc.freeze()  # as vLLM's server does

    def prompts_of(self, kind: Kind) -> list[list[int]]:
        """Each with a text of its own in front."""
        engine = self.engine
        return [engine.prompt(kind.documents, engine.drawn(SYSTEM)) for _ in kind.at]

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

    def decoding(self, count: int) -> set[str]:
        """Start requests that decode; their names."""
        while len(self.prompts) < count:
            self.prompts.append(self.engine.drawn(PROMPT))
        names = {self.add(prompt, NO_REUSE, ANSWER)[0] for prompt in self.prompts[:count]}
        missing = set(names)
        while missing:
            missing -= {out.request_id for out in self.step()}
        return names

    def step(self) -> list[Any]:
        """What has come in one step."""
        return [out for out in self.llm.step() if out.outputs[0].token_ids]

    def window(self, count: int, arm: Arm | None, name: str, found: Found) -> None:
        """Decode for some time while those of a kind come, and until they have their answers."""
        coming = []
        if arm is not None:
            self.set(arm)
            coming = self.coming(arm, name)
        decoding = self.decoding(count)
        self.forget()
        with noted_steps(found.steps):
            window = Window(decoding)
            while coming or window.waiting or window.seconds < self.seconds:
                while coming and coming[0][0] <= window.seconds:
                    at, prompt, said = coming.pop(0)
                    request, seconds = self.add(prompt, said, 1)
                    window.asked(request, at, seconds)
                window.answered(self.step(), found)
            found.rates.append(len(window.gaps) / window.seconds)
        found.gaps += window.gaps
        found.longest.append(round(max(window.gaps), 2))
        found.longest_with_asking = max(found.longest_with_asking, window.longest_with_asking)
        self.llm.abort_request(list(decoding))
        self.engine.settle()

    def coming(self, arm: Arm, name: str) -> list[tuple[float, list[int], dict[str, Any]]]:
        """When each comes, its prompt, and what it says."""
        kind = KINDS[name]
        ways = {
            "computed": NO_REUSE,
            "reused": reuse(kind.documents, REPAIR),
            "exact": {"max_offload_tokens": 0},
        }
        said = ways[arm.way]
        prompts = self.exact[name] if arm.way == "exact" else self.prompts_of(kind)
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
    """What is compared, in this order; the first batch is also tried with other rows."""
    arms = [Arm(way, batch) for batch in batches for way in ("computed", "reused")]
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
        **engine.described(),
        "turns": options.turns,
        "rows": rows,
    }
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
