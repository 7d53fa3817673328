"""Documents in another order at every request: how much of its prefix cache an engine can use, by who orders them.

    python bench/documents.py --contextpilot-python PATH --out bench/results/cpu/documents.json
    python bench/documents.py --engine tiny --contextpilot-python PATH --out bench/results/cpu/documents-engine.json
    python bench/documents.py --engine qwen2.5-7b --sizes 256 1024 --caches 65536 --out ...          (on a GPU)

A request is a system text, five documents drawn by Zipf's law and shuffled, and a question of its own. Arms:

    none           as they come
    digest         sorted by their digests: one order for each set, and nothing learned
    popularity     sorted by how often they come in the whole trace: nobody can know that before its end
    semkv          `semkv.documents.DocumentOrder`
    contextpilot   ContextPilot's index (pip install contextpilot, numpy and scipy), in the Python that is named. It
                   orders one request after the other. Neither it nor semkv learns what the engine evicts

Without ``--engine`` the prefix cache is simulated as vLLM's is: hashes of blocks that chain, the last token computed,
blocks freed from the end of a prompt, the one that was freed first taken first. ``--engine`` asks vLLM itself, one
request after the other, arm by arm with its prefix cache emptied, in ``--rounds`` turns: what it found there, and the
seconds that it took of the process (``cpu_s``) and of the clock (``wall_s``). Models have random weights.

``ceiling`` is the tokens of the documents that a request shares with the one earlier request with which it shares most:
no order and no cache of any size can find more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from common import ENVIRONMENT, machine, write_json

SYSTEM = 128  # tokens
QUESTION = 48
VOCABULARY = 1000
CHARACTERS = 4  # of a token
Order = list[int]


class Trace:
    """Requests, each the documents that it has in the order in which they come."""

    def __init__(self, options: argparse.Namespace) -> None:
        rng = random.Random(options.seed)  # noqa: S311
        smallest, largest = options.sizes
        self.sizes = [rng.randint(smallest, largest) for _ in range(options.documents)]
        weights = [1 / rank**options.zipf for rank in range(1, options.documents + 1)]
        sums = list(itertools.accumulate(weights))
        self.requests = list[Order]()
        for _ in range(options.requests):
            drawn = set[int]()
            while len(drawn) < options.each:
                drawn.update(rng.choices(range(options.documents), cum_weights=sums))
            listed = sorted(drawn)
            rng.shuffle(listed)
            self.requests.append(listed)

    def tokens(self, documents: Iterable[int]) -> int:
        return sum(self.sizes[document] for document in documents)

    def ceiling(self) -> int:
        """What any order could find at most."""
        found = 0
        earlier = list[set[int]]()
        for request in self.requests:
            own = set(request)
            found += max((self.tokens(own & other) for other in earlier), default=0)
            earlier.append(own)
        return found

    def prompt(self, number: int, documents: Order) -> list[int]:
        """Token ids: a document has the same ones wherever it stands."""
        ids = _ids("system", SYSTEM)
        for document in documents:
            ids += _ids(f"document {document}", self.sizes[document])
        return ids + _ids(f"question {number}", QUESTION)


_known: dict[str, list[int]] = {}


def _ids(name: str, count: int) -> list[int]:
    if name in _known:
        return _known[name].copy()
    rng = random.Random(name)  # noqa: S311
    ids = rng.choices(range(10, VOCABULARY), k=count)
    if not name.startswith("question"):
        _known[name] = ids
    return ids.copy()


# ------------------------------------------------------------------ arms


def in_turn(trace: Trace, order: Callable[[Order], Order]) -> list[Order]:
    return [order(request) for request in trace.requests]


def by_semkv(trace: Trace, stay: float = 0.0) -> list[Order]:
    """``stay``: the share of requests whose documents may not move."""
    from semkv.documents import Document, DocumentOrder

    order = DocumentOrder()
    rng = random.Random(1)  # noqa: S311

    def ordered(request: Order) -> Order:
        known = [
            Document(b"%d" % document, trace.sizes[document] * CHARACTERS) for document in request
        ]
        stays = rng.random() < stay
        places: Sequence[int] = range(len(request))
        if not stays:
            places = order.choose(b"", b"", known)
        order.sent(b"", b"", [known[place] for place in places])
        return [request[place] for place in places]

    return in_turn(trace, ordered)


def by_digest(trace: Trace) -> list[Order]:
    return in_turn(
        trace, lambda request: sorted(request, key=lambda d: blake2b(b"%d" % d).digest())
    )


def by_popularity(trace: Trace) -> list[Order]:
    counts = Counter(itertools.chain(*trace.requests))
    return in_turn(trace, lambda request: sorted(request, key=lambda d: (-counts[d], d)))


def by_contextpilot(trace: Trace, python: str) -> list[Order]:
    """In its own environment: `contextpilot_child`."""
    done = subprocess.run(
        [python, __file__, "--contextpilot-child"],
        input=json.dumps(trace.requests),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: list[Order] = json.loads(done.stdout)
    return found


def contextpilot_child() -> None:
    """Read requests, write them in ContextPilot's order."""
    found = list[Order]()
    with redirect_stdout(sys.stderr):
        from contextpilot.server.live_index import ContextPilot

        index = ContextPilot(use_gpu=False)
        for request in json.load(sys.stdin):
            ordered, _ = index.reorder([request])
            found.append(ordered[0])
    json.dump(found, sys.stdout)


def arms_of(
    trace: Trace,
    python: str,
    stay: Sequence[float],
) -> tuple[dict[str, list[Order]], dict[str, float]]:
    """Every arm's orders, and the milliseconds a request that it took to find them."""
    makers: dict[str, Callable[[], list[Order]]] = {
        "none": lambda: trace.requests,
        "digest": lambda: by_digest(trace),
        "popularity": lambda: by_popularity(trace),
        "semkv": lambda: by_semkv(trace),
    }
    for share in stay:
        makers[f"semkv, {share:.0%} stay"] = partial(by_semkv, trace, share)
    if python:
        makers["contextpilot"] = lambda: by_contextpilot(trace, python)
    orders = dict[str, list[Order]]()
    times = dict[str, float]()
    for name, make in makers.items():
        start = time.perf_counter()
        orders[name] = make()
        times[name] = round((time.perf_counter() - start) * 1e3 / len(trace.requests), 3)
        assert list(map(sorted, orders[name])) == list(map(sorted, trace.requests)), name
    return orders, times


# ------------------------------------------------------------------ the simulated cache


class PrefixCache:
    """vLLM's, for one request after the other."""

    def __init__(self, tokens: int, block: int) -> None:
        self._blocks = tokens // block
        self._size = block
        self._free: OrderedDict[int, None] = OrderedDict()  # the one that is taken first in front

    def ask(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt it has; then it has the prompt."""
        keys = list[int]()
        key = 0
        for start in range(0, len(prompt) - self._size + 1, self._size):
            key = hash((key, *prompt[start : start + self._size]))
            keys.append(key)
        hit = 0
        for key in keys[: (len(prompt) - 1) // self._size]:
            if key not in self._free:
                break
            hit += 1
        for key in reversed(keys):
            self._free[key] = None
            self._free.move_to_end(key)
        while len(self._free) > self._blocks:
            self._free.popitem(last=False)
        return hit * self._size


def simulated(trace: Trace, orders: list[Order], tokens: int, block: int) -> dict[str, int]:
    cache = PrefixCache(tokens, block)
    hits = 0
    of_documents = 0
    for number, documents in enumerate(orders):
        hit = cache.ask(trace.prompt(number, documents))
        hits += hit
        of_documents += max(0, hit - SYSTEM)
    return {"hit_tokens": hits, "hit_tokens_of_documents": of_documents}


# ------------------------------------------------------------------ vLLM


class Engine:
    """vLLM in this process."""

    def __init__(
        self, name: str, folder: Path, *, tokens: int, block: int, longest: int, more: Any
    ) -> None:
        from vllm import LLM

        if name == "tiny":
            from models import write_family

            write_family("llama", folder)
            few = {"enforce_eager": True, "gpu_memory_utilization": 0.1}
            more = few | {"block_size": block} | more
        else:
            from kv import QWEN_7B

            (folder / "config.json").write_text(json.dumps(QWEN_7B))
        self.llm: Any = LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=longest,
            max_num_seqs=4,
            enable_prefix_caching=True,
            num_gpu_blocks_override=tokens // block + 1,  # one is vLLM's own
            **more,
        )

    def ask(self, trace: Trace, orders: list[Order]) -> dict[str, Any]:
        from vllm import SamplingParams

        assert self.llm.reset_prefix_cache()
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        prompts = [trace.prompt(number, documents) for number, documents in enumerate(orders)]
        hits = 0
        of_documents = 0
        cpu_s = time.process_time()
        wall_s = time.perf_counter()
        for prompt in prompts:
            given = [{"prompt_token_ids": prompt}]
            (output,) = self.llm.generate(given, params, use_tqdm=False)
            hits += output.num_cached_tokens
            of_documents += max(0, output.num_cached_tokens - SYSTEM)
        return {
            "hit_tokens": hits,
            "hit_tokens_of_documents": of_documents,
            "cpu_s": round(time.process_time() - cpu_s, 2),
            "wall_s": round(time.perf_counter() - wall_s, 2),
        }


# ------------------------------------------------------------------ command line


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--each", type=int, default=5, help="documents of a request")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent")
    parser.add_argument("--sizes", type=int, nargs=2, default=(256, 1024), help="least and most")
    parser.add_argument("--caches", type=int, nargs="+", default=(32768, 65536, 131072, 262144))
    parser.add_argument("--block", type=int, default=16, help="tokens of a block")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--contextpilot-python", default="", help="a Python that has ContextPilot")
    parser.add_argument("--contextpilot-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--stay",
        type=float,
        nargs="+",
        default=[],
        help="more arms: shares of requests whose documents may not move",
    )
    parser.add_argument("--engine", choices=("tiny", "qwen2.5-7b"))
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON, for vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.contextpilot_child:
        contextpilot_child()
        return
    trace = Trace(options)
    orders, times = arms_of(trace, options.contextpilot_python, options.stay)
    result: dict[str, Any] = {
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "machine": machine("vllm", "torch"),
        "prompt_tokens": sum(
            SYSTEM + QUESTION + trace.tokens(request) for request in trace.requests
        ),
        "document_tokens": sum(map(trace.tokens, trace.requests)),
        "distinct_document_tokens": sum(trace.sizes),
        "ceiling_of_documents": trace.ceiling(),
        "order_ms": times,
        "simulated": {},
    }
    for tokens in options.caches:
        result["simulated"][tokens] = {
            name: simulated(trace, found, tokens, options.block) for name, found in orders.items()
        }
        _print(f"cache of {tokens} tokens", result, result["simulated"][tokens])
    if options.engine:
        os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        tokens = options.caches[0]
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine(
                options.engine,
                Path(folder),
                tokens=tokens,
                block=options.block,
                longest=SYSTEM + QUESTION + options.each * options.sizes[1] + 1,
                more=options.engine_args,
            )
            engine.ask(trace, trace.requests[:20])  # warm
            result["engine"] = {name: list[Any]() for name in orders}
            for _ in range(options.rounds):
                for name, found in orders.items():
                    result["engine"][name].append(engine.ask(trace, found))
                write_json(options.out, result)
        latest = {name: rounds[-1] for name, rounds in result["engine"].items()}
        _print(f"vLLM, cache of {tokens} tokens", result, latest)
    write_json(options.out, result)


def _print(title: str, result: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    total = result["document_tokens"]
    least = found["none"]["hit_tokens_of_documents"]
    print(f"{title}; at most {result['ceiling_of_documents'] / total:.1%}", file=sys.stderr)
    for name, arm in found.items():
        hits = arm["hit_tokens_of_documents"]
        seconds = f" {arm['cpu_s']:.1f} s of processor" if "cpu_s" in arm else ""
        said = f"  {name:17}{hits / total:7.1%}  {hits / max(1, least):5.2f} times none{seconds}"
        print(said, file=sys.stderr)


if __name__ == "__main__":
    main()
