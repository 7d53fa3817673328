"""A random load on an engine with the KV connector, its answers compared with those of an engine without it.

Requests share beginnings, some go on with an earlier answer, some belong to a tenant (a salt), some are aborted. The
engine's cache is small, so that it preempts; host memory and the disk may be small too, the store may be purged, and
another engine on the same directory may be killed at any moment.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kv_engines import (
    BLOCK,
    Answer,
    Engine,
    answered,
    command,
    connector,
    differs,
    prompt,
    token_ids,
)
from semkv.stores.maintenance import purge_directory

TOKENS = 24
SMALL = {"max_num_batched_tokens": 160, "max_model_len": 768}


class RandomLoad:
    """An engine under a load.

    Args:
        model, cache: the checkpoint's folder and the connector's.
        answers: after how many it ends, but not before a request was preempted where ``preempts`` is set.
        seconds: nor before it has gone on for so long.
        blocks: of the engine's own cache.
        prompts, longest: how many different ones, and the tokens of the longest.
        purges: whether the store is purged now and then.
        kills: share of rounds after which another engine, which runs beside this one, is killed and another started.
        args: of both engines.
        settings: of the connector.
    """

    def __init__(
        self,
        model: str,
        cache: str,
        *,
        answers: int = 24,
        seconds: float = 0.0,
        blocks: int = 40,
        prompts: int = 24,
        longest: int = 400,
        preempts: bool = False,
        purges: bool = False,
        kills: float = 0.0,
        seed: int = 1,
        args: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.beside = model, cache, args or {}, settings or {}
        self.answers, self.preempts, self.purges, self.kills = answers, preempts, purges, kills
        self.seconds = seconds
        self.cache = Path(cache)
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self.seen: dict[
            str | None, set[bytes]
        ] = {}  # by tenant: beginnings that anybody of it has asked
        self.live: dict[str, tuple[int, str | None, int]] = {}
        self.prompts = self.trunks(prompts, longest)
        self.engine = Engine(model, **(args or {}))
        self.references = self.asked_alone()
        self.engine.close()
        small = {**SMALL, "num_gpu_blocks_override": blocks, **(args or {})}
        self.engine = Engine(model, connector(cache, **(settings or {})), **self.media(), **small)
        self.preempted = self.engine.count_preemptions()
        self.other = self.another() if kills else None

    def trunks(self, count: int, longest: int) -> list[list[int]]:
        """Prompts that share beginnings of one of three trunks."""
        trunks, found = [token_ids(self.rng, longest * part // 4) for part in (1, 2, 3)], []
        for _ in range(count):
            trunk = self.rng.choice(trunks)
            end = token_ids(self.rng, self.rng.randrange(1, longest // 4))
            found.append(trunk[: self.rng.randrange(len(trunk) + 1)] + end)
        return found

    def asked_alone(self) -> list[Answer]:
        """The right answers; a quarter of the prompts comes again with its answer and more behind it."""
        first = self.together(map(prompt, self.prompts))
        pairs = list(zip(self.prompts, first, strict=True))[: len(first) // 4]
        follow = [asked + answer["tokens"] + token_ids(self.rng, 40) for asked, answer in pairs]
        self.prompts += follow
        return first + self.together(map(prompt, follow))

    def together(self, asked: Iterable[Any]) -> list[Answer]:
        """The answers to prompts that are asked at once: one after the other takes three times as long."""
        return [answered(output) for output in self.engine.outputs(list(asked), TOKENS)]

    def media(self) -> dict[str, Any]:
        """What the engine with the connector gets beyond the other one's arguments."""
        return {}

    def run(self) -> dict[str, Any]:
        """What happened, by kind; wrong answers come with the reason."""
        until = time.monotonic() + self.seconds
        while (
            self.counts["answers"] < self.answers
            or time.monotonic() < until
            or (self.preempts and not self.preempted)
        ):
            self.one_round()
        if self.other is not None:
            self.end_other()
        left = self.engine.left()
        self.engine.forget()
        answers = self.together(map(self.made, range(len(self.references))))
        for answer, reference in zip(answers, self.references, strict=True):
            self.compare("afterwards", answer, reference)
        longest = max(range(len(self.prompts)), key=lambda which: len(self.prompts[which]))
        for keep_host in (False, True):  # whatever happened to the store, it stores and loads
            self.engine.forget(keep_host=keep_host)
            (answer,) = self.engine.ask([self.made(longest)], TOKENS)
        self.counts["loaded at last"] = answer["loaded"]
        self.engine.close()
        return {
            "wrong": self.wrong[:5],
            "left": left,
            "preemptions": len(self.preempted),
            **self.counts,
        }

    def one_round(self) -> None:
        """Some requests at once, stepped to their end."""
        for _ in range(self.rng.randrange(1, 12)):
            self.add()
        core, idle_since = self.engine.llm.llm_engine, time.monotonic()
        while core.has_unfinished_requests():
            outputs = core.step()
            idle_since = time.monotonic() if outputs else idle_since
            assert time.monotonic() < idle_since + 300, "no request goes on"
            for output in outputs:
                if output.finished and output.request_id in self.live:
                    self.end(output)
            self.disturb()
        assert not self.live, "a request ended without an answer"
        if self.rng.random() < 0.5:
            self.engine.llm.reset_prefix_cache()
        if self.rng.random() < 0.3:
            self.engine.forget()
        if self.other is not None and self.rng.random() < self.kills:
            self.end_other()
            self.other = self.another()

    def add(self) -> None:
        from vllm import SamplingParams

        which, name = self.rng.randrange(len(self.prompts)), f"r{self.counts['asked']}"
        salt = self.rng.choice("abc") if self.rng.random() < 0.5 else None
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=2)
        (rendered,) = self.engine.llm.renderer.render_cmpl([self.made(which, salt)])
        self.engine.llm.llm_engine.add_request(name, rendered, params)
        self.live[name] = which, salt, self.loadable(which, salt)
        self.counts["asked"] += 1

    def made(self, which: int, salt: str | None = None) -> Any:
        """A prompt as a client gives it."""
        return prompt(self.prompts[which], salt)

    def loadable(self, which: int, salt: str | None) -> int:
        """How many tokens of a prompt can have been stored for a tenant before this request."""
        known, asked = self.seen.setdefault(salt, set()), self.prompts[which]
        found = next(
            (n for n, one in enumerate(beginnings(asked)) if one not in known), len(asked) // BLOCK
        )
        # An answer's tokens may be stored too, and come back when they stand in a later prompt.
        known.update(beginnings(asked + self.references[which]["tokens"]))
        return found * BLOCK

    def end(self, output: Any) -> None:
        which, salt, loadable = self.live.pop(output.request_id)
        answer = answered(output)
        self.compare(output.request_id, answer, self.references[which])
        self.counts["answers"] += 1
        self.counts["loaded tokens"] += answer["loaded"] or 0
        reused = max(answer["loaded"] or 0, answer["cached"] or 0)
        # A request that was preempted finds its own blocks; another engine beside this one asks without a salt.
        preempted = any(output.request_id in name for name in self.preempted)
        if reused > loadable and not preempted and not (salt is None and self.kills):
            self.wrong.append(
                (output.request_id, f"{reused} tokens reused for {salt}, which had {loadable}")
            )

    def compare(self, name: str, answer: Answer, reference: Answer) -> None:
        if reason := differs(answer, reference):
            self.wrong.append((name, reason, answer["loaded"], answer["sources"], answer["ended"]))

    def disturb(self) -> None:
        """Now and then, between two steps: abort a request, purge the store."""
        self.counts["steps"] += 1
        if self.live and self.counts["steps"] % 31 == 0:
            name = self.rng.choice(sorted(self.live))
            self.engine.llm.llm_engine.abort_request([name])
            del self.live[name]
            self.counts["aborted"] += 1
        if self.purges and self.counts["steps"] % 41 == 0:
            purge_directory(self.cache)
            self.counts["purges"] += 1

    def another(self) -> subprocess.Popen[str]:
        asks = command(ask_without_end, *self.beside, self.prompts)
        return subprocess.Popen(asks, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def end_other(self) -> None:
        """Kill the other engine with no chance to tidy up; not before it has answered."""
        assert self.other is not None
        with self.other as process:
            assert process.stdout is not None
            self.counts["began"] += any(line == "asked\n" for line in process.stdout)
            process.kill()
        self.counts["kills"] += 1


def beginnings(ids: list[int]) -> list[bytes]:
    """The beginnings of a prompt that end where a block does."""
    return [str(ids[: n * BLOCK]).encode() for n in range(1, len(ids) // BLOCK + 1)]


def ask_without_end(
    model: str, cache: str, args: dict[str, Any], settings: dict[str, Any], prompts: list[list[int]]
) -> None:
    """In another child, until it is killed: some of the prompts again and again, nothing kept on the way."""
    rng, engine = random.Random(time.time_ns()), Engine(model, connector(cache, **settings), **args)
    while True:
        engine.outputs([prompt(p) for p in rng.sample(prompts, 4)], TOKENS)
        engine.forget()
        print("asked", flush=True)
