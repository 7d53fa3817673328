"""A random load on an engine with the KV connector, its answers compared with those of an engine without it.

Requests share beginnings, some go on with an earlier answer, some belong to a tenant (a salt), some are aborted. The
engine's cache is small, so that it preempts; host memory and the disk may be small too, the store may be purged, and
another engine on the same directory may be killed at any moment.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv_engines import BLOCK, Answer, Engine, answered, command, connector, differs, prompt, token_ids

TENANTS = ("a", "b", "c")


@dataclass(frozen=True)
class Load:
    """What is asked of an engine, and how it is disturbed. Shares are of steps, unless they are of something else."""

    answers: int = 100
    seed: int = 1
    prompts: int = 24
    longest: int = 400
    tokens: int = 24
    blocks: int = 60
    tenants: float = 0.5  # of requests
    aborts: float = 0.03
    purges: float = 0.0
    forgets: float = 0.3  # of rounds
    kills: float = 0.0  # of rounds, of another engine beside this one
    tie: float = 1e-3
    args: dict[str, Any] = field(default_factory=dict)
    connector: dict[str, Any] = field(default_factory=dict)


def asked(load: Load) -> list[list[int]]:
    """Prompts that share beginnings of one of three trunks."""
    rng = random.Random(load.seed)
    trunks = [token_ids(rng, load.longest * part // 4) for part in (1, 2, 3)]
    found = []
    for _ in range(load.prompts):
        trunk = rng.choice(trunks)
        found.append(trunk[: rng.randrange(len(trunk) + 1)] + token_ids(rng, rng.randrange(1, load.longest // 4)))
    return found


def run(model: str, cache: str, fields: dict[str, Any]) -> dict[str, Any]:
    """In a child: the whole load. The counts say what happened; the wrong answers come with the reason."""
    load = Load(**fields)
    prompts = asked(load)
    common = {name: value for name, value in load.args.items() if name != "speculative_config"}
    plain = Engine(model, **common)
    first = plain.ask([prompt(p) for p in prompts], load.tokens)
    rng = random.Random(load.seed + 2)
    follow = [prompts[n] + first[n]["tokens"] + token_ids(rng, 40) for n in range(len(prompts) // 4)]
    prompts += follow
    references = first + plain.ask([prompt(p) for p in follow], load.tokens)
    plain.close()
    return Under(load, model, cache, prompts, references).run()


class Under:
    """An engine under a load."""

    def __init__(self, load: Load, model: str, cache: str, prompts: list[list[int]], references: list[Answer]) -> None:
        self.load, self.cache, self.model = load, cache, model
        self.prompts, self.references = prompts, references
        self.rng = random.Random(load.seed + 1)
        self.counts: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self.seen: dict[str | None, set[bytes]] = {}  # by tenant: beginnings that anybody of it has asked
        self.live: dict[str, tuple[int, str | None, int]] = {}
        small: dict[str, Any] = {"num_gpu_blocks_override": load.blocks, "max_num_batched_tokens": 160}
        self.engine = Engine(model, connector(cache, **load.connector), **(small | {"max_model_len": 768} | load.args))
        self.preempted = self.engine.count_preemptions()
        self.beside = Other(self.model, self.cache, load, prompts) if load.kills else None

    def run(self) -> dict[str, Any]:
        while self.counts["answers"] < self.load.answers:
            self.one_round()
        if self.beside is not None:
            self.end_other()
        left = self.engine.left()
        self.engine.forget()
        for which, reference in enumerate(self.references):
            (answer,) = self.engine.ask([self.made(which)], self.load.tokens)
            self.compare("afterwards", answer, reference)
        self.engine.close()
        counts = {"preemptions": len(self.preempted), **self.counts}
        return {"wrong": len(self.wrong), "examples": self.wrong[:5], "left": left, **counts}

    def one_round(self) -> None:
        """Some requests at once, stepped to their end."""
        for _ in range(self.rng.randrange(1, 12)):
            self.add()
        idle_since = time.monotonic()
        while self.engine.llm.llm_engine.has_unfinished_requests():
            outputs = self.engine.llm.llm_engine.step()
            idle_since = time.monotonic() if outputs else idle_since
            assert time.monotonic() < idle_since + 300, "no request goes on"
            for output in outputs:
                if output.finished and output.request_id in self.live:
                    self.end(output)
            self.disturb()
        assert not self.live, "a request ended without an answer"
        if self.rng.random() < 0.5:
            self.engine.llm.reset_prefix_cache()
        if self.rng.random() < self.load.forgets:
            self.engine.forget()
        if self.beside is not None and self.rng.random() < self.load.kills:
            self.end_other()
            self.beside = Other(self.model, self.cache, self.load, self.prompts)

    def add(self) -> None:
        from vllm import SamplingParams

        which = self.rng.randrange(len(self.prompts))
        salt = self.rng.choice(TENANTS) if self.rng.random() < self.load.tenants else None
        name = f"r{self.counts['asked']}"
        params = SamplingParams(max_tokens=self.load.tokens, temperature=0, ignore_eos=True, logprobs=2)
        self.engine.llm.llm_engine.add_request(name, self.rendered(self.made(which, salt)), params)
        self.live[name] = (which, salt, self.loadable(which, salt))
        self.counts["asked"] += 1

    def made(self, which: int, salt: str | None = None) -> Any:
        """A prompt as a client gives it."""
        return prompt(self.prompts[which], salt)

    def rendered(self, asked: Any) -> Any:
        """The same as the engine's queue takes it."""
        return asked

    def loadable(self, which: int, salt: str | None) -> int:
        """How many tokens of a prompt can have been stored for a tenant before this request."""
        known = self.seen.setdefault(salt, set())
        asked = self.prompts[which]
        found = next((n for n, one in enumerate(beginnings(asked)) if one not in known), len(asked) // BLOCK)
        # An answer's tokens may be stored too, and come back when they stand in a later prompt.
        known.update(beginnings(asked + self.references[which]["tokens"]))
        return found * BLOCK

    def end(self, output: Any) -> None:
        which, salt, loadable = self.live.pop(output.request_id)
        answer = answered(output)
        self.compare(output.request_id, answer, self.references[which])
        self.counts["answers"] += 1
        loaded = answer["loaded"] or 0
        reused = max(loaded, answer["cached"] or 0)
        self.counts["loaded tokens"] += loaded
        for source, tokens in (answer["sources"] or {}).items():
            self.counts[f"from {source}"] += tokens
        # A request that was preempted finds its own blocks; another engine beside this one asks without a salt.
        preempted = any(output.request_id in name for name in self.preempted)
        if reused > loadable and not preempted and not (salt is None and self.load.kills):
            self.wrong.append((output.request_id, f"{reused} tokens reused for {salt}, which had {loadable}"))

    def compare(self, name: str, answer: Answer, reference: Answer) -> None:
        if reason := differs(answer, reference, self.load.tie):
            self.wrong.append((name, reason, answer["loaded"], answer["sources"], answer["ended"]))
        self.counts["ties"] += not reason and answer["tokens"] != reference["tokens"]

    def disturb(self) -> None:
        """Now and then, between two steps: abort a request, purge the store."""
        if self.live and self.rng.random() < self.load.aborts:
            name = self.rng.choice(sorted(self.live))
            self.engine.llm.llm_engine.abort_request([name])
            del self.live[name]
            self.counts["aborted"] += 1
        if self.rng.random() < self.load.purges:
            from semkv.stores.maintenance import purge_directory

            purge_directory(Path(self.cache))
            self.counts["purges"] += 1

    def end_other(self) -> None:
        """Kill it with no chance to tidy up; not before it has begun."""
        assert self.beside is not None
        self.counts["began"] += self.beside.has_begun()
        self.beside.kill()
        self.counts["kills"] += 1


class Other:
    """Another engine on the directory, which asks the same prompts without end."""

    def __init__(self, model: str, cache: str, load: Load, prompts: list[list[int]]) -> None:
        asks = command(beside, model, cache, dataclasses.asdict(load), prompts)
        self._process = subprocess.Popen(asks, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def has_begun(self) -> bool:
        """Wait for its first answers; False if it ended without any."""
        assert self._process.stdout is not None
        return any(line == "asked\n" for line in self._process.stdout)

    def kill(self) -> None:
        with self._process:
            self._process.kill()


def beginnings(ids: list[int]) -> list[bytes]:
    """The beginnings of a prompt that end where a block does."""
    return [str(ids[: n * BLOCK]).encode() for n in range(1, len(ids) // BLOCK + 1)]


def beside(model: str, cache: str, fields: dict[str, Any], prompts: list[list[int]]) -> None:
    """In another child, until it is killed: some of the prompts again and again, nothing kept on the way."""
    load, rng = Load(**fields), random.Random(time.time_ns())
    engine = Engine(model, connector(cache, **load.connector), **load.args)
    while True:
        engine.outputs([prompt(p) for p in rng.sample(prompts, 4)], load.tokens)
        engine.forget()
        print("asked", flush=True)
