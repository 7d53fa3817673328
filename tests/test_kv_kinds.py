"""The KV connector under every kind of request and engine: what is loaded changes no answer.

Kinds of requests, an FP8 cache, drafts from n-grams, prompt embeddings.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kv_engines import (
    HYBRID,
    NOTHING,
    SKIP,
    Engine,
    connector,
    differs,
    in_child,
    prompt,
    report,
    token_ids,
    usable,
)
from tiny_models import Checkpoint

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "three samples": {"n": 3, "temperature": 1.0, "seed": 5},
    "prompt logprobs": {"temperature": 0, "max_tokens": 4, "prompt_logprobs": 1},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "one token": {"temperature": 0, "max_tokens": 1},
    "stop tokens": {"temperature": 0, "stop_token_ids": [5]},
    "seeded": {"temperature": 0.8, "seed": 3, "top_k": 20},
    "skipped": {"temperature": 0, "extra_args": SKIP},
    "another's parameters": {
        "temperature": 0,
        "extra_args": {"kv_transfer_params": {"do_remote_prefill": False, "x": [1]}},
    },
}
LOADS = (
    "greedy",
    "logprobs",
    "one token",
    "stop tokens",
    "seeded",
    "another's parameters",
    "structured",
)


@pytest.fixture
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama")


def some(*sizes: int) -> list[dict[str, Any]]:
    rng = random.Random(9)
    return [prompt(token_ids(rng, size)) for size in sizes]


# ---------------------------------------------------------------------- kinds of requests


def all_kinds(engine: Engine, *, keep_host: bool | None = None) -> dict[str, Any]:
    """Answers and loads by kind; vLLM's copies, and host's if told, are forgotten before each kind."""
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

    asked, found = some(130, 200, 333), {}
    choice = {
        "structured_outputs": StructuredOutputsParams(choice=["red", "green", "blue"]),
        "ignore_eos": False,
    }
    for kind, fields in {**KINDS, "structured": {"temperature": 0, **choice}}.items():
        if keep_host is not None:
            engine.forget(keep_host=keep_host)
        params = SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | fields))
        outputs = engine.llm.generate(asked, params, use_tqdm=False)
        tokens = [[list(sample.token_ids) for sample in output.outputs] for output in outputs]
        logprobs = [
            [round(next(iter(p.values())).logprob, 3) for p in (o.prompt_logprobs or ())[1:]]
            for o in outputs
        ]
        found[kind] = [
            tokens,
            logprobs,
            [report(output).get("loaded_tokens") for output in outputs],
        ]
    beams = engine.llm.beam_search(asked[:1], BeamSearchParams(beam_width=3, max_tokens=6))
    found["beams"] = [[sequence.tokens[-6:] for sequence in beams[0].sequences], [], []]
    return found


def kinds(model: str, cache: str) -> dict[str, Any]:
    with Engine(model) as plain:
        found = {"plain": all_kinds(plain)}
    with Engine(model, connector(cache)) as engine:
        found |= {"cold": all_kinds(engine), "host": all_kinds(engine, keep_host=True)}
        return found | {"disk": all_kinds(engine, keep_host=False), "left": engine.left()}


@pytest.mark.engine
def test_every_kind_of_request_is_answered_as_without_the_connector(
    model: Path, tmp_path: Path
) -> None:
    found = in_child(kinds, model, tmp_path / "cache")
    for level in ("cold", "host", "disk"):
        for kind, (tokens, logprobs, _) in found["plain"].items():
            assert found[level][kind][0] == tokens, (level, kind)
            close = [pytest.approx(own, abs=2e-3) for own in logprobs]
            assert found[level][kind][1] == close, (level, kind)
    for level in ("host", "disk"):
        for kind in LOADS:
            assert found[level][kind][2] == [usable(130), usable(200), usable(333)], (level, kind)
        assert not any(found[level]["skipped"][2])
        assert not any(found[level]["prompt logprobs"][2])  # vLLM wants every position computed
    assert found["left"] == NOTHING


# ---------------------------------------------------------------------- kinds of engines


DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}


def has_fp8_cache() -> bool:
    """Whether vLLM keeps an FP8 cache on this machine, by the flags that it asks itself."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return True
    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def odd(model: str, cache: str) -> dict[str, Any]:
    """The same with drafts from n-grams, an FP8 cache, generated tokens stored; then prompts given as embeddings.

    Where the machine has no FP8 cache, all the rest is tried with vLLM's default.
    """
    import torch

    fp8 = has_fp8_cache()
    args: dict[str, Any] = {
        "kv_cache_dtype": "fp8" if fp8 else "auto",
        "enable_prompt_embeds": True,
    }
    asked = some(130, 333)
    one = (torch.randn(100, 128, generator=torch.Generator().manual_seed(0)) / 10).to(
        torch.bfloat16
    )
    with Engine(model, **args) as plain:
        found: dict[str, Any] = {"plain": plain.ask(asked, tokens=40), "embeddings": []}
        follow = [
            prompt(p["prompt_token_ids"] + a["tokens"])
            for p, a in zip(asked, found["plain"], strict=True)
        ]
        found["plain follow"] = plain.ask(follow)
    with Engine(
        model, connector(cache, capture_decode=True), speculative_config=DRAFTS, **args
    ) as engine:
        found |= engine.levels(asked, tokens=40)
        found["follow"] = engine.ask(follow)
        for embeddings in (one, -one, one):
            engine.forget()
            found["embeddings"] += engine.ask([{"prompt_embeds": embeddings}])
        return found | {"left": engine.left(), "fp8": fp8}


@pytest.mark.engine
def test_drafts_an_fp8_cache_and_prompt_embeddings(model: Path, tmp_path: Path) -> None:
    """Generated tokens are to be kept too, which must not keep what was drafted and refused."""
    found = in_child(odd, model, tmp_path)
    for level, plain in (
        ("cold", "plain"),
        ("host", "plain"),
        ("disk", "plain"),
        ("follow", "plain follow"),
    ):
        for answer, reference in zip(found[level], found[plain], strict=True):
            assert not differs(answer, reference), level
    for level in ("host", "disk"):
        assert [answer["sources"] for answer in found[level]] == [
            {level: usable(130)},
            {level: usable(333)},
        ]
    assert all(answer["loaded"] > usable(answer["length"] - 40) for answer in found["follow"])
    first, other, again = found["embeddings"]
    assert [answer["loaded"] for answer in (first, other, again)] == [0, 0, 96]
    assert first["tokens"] == again["tokens"] != other["tokens"]
    assert found["left"] == NOTHING
    if not found["fp8"]:
        pytest.skip(
            "all of it holds without an FP8 cache, which vLLM has only on a CPU with AVX-512 or AMX"
        )


def limited(model: str, cache: str) -> dict[str, Any]:
    """vLLM asserts that the tail of a block, which it stores for such a model, is within a request's limit."""
    with Engine(model, connector(cache), prefix_match_unit=32, **HYBRID) as engine:
        tails = engine.scheduler.connector.scheduler.config.supports_partial_tail
        extras = [
            {"kv_transfer_params": {"max_offload_tokens": limit}} for limit in (1, 1000, None)
        ]
        answers = [engine.ask(some(300), extra_args=extra) for extra in extras]
        return {
            "tails": tails,
            "answers": [answer["tokens"] for (answer,) in answers],
            "left": engine.left(),
        }


@pytest.mark.engine
def test_a_requests_limit_ends_no_engine(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = in_child(limited, checkpoint("granite4"), tmp_path)
    assert found["tails"]
    assert found["answers"] == found["answers"][:1] * 3
    assert found["left"] == NOTHING
