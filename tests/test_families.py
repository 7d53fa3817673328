"""Every family of models gives the same answers without a connector, from host memory and from the disk.

Tokens are equal and so is the gap between the two best at every place; what was loaded, and from where, is what is
expected to the token.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from kv_engines import (
    HYBRID,
    NOTHING,
    SKIP,
    Answer,
    Engine,
    connector,
    differs,
    encoder_connector,
    gap_change,
    in_child,
    prompt,
    token_ids,
)
from tiny_models import Checkpoint

WITH_PICTURES = ("llava", "qwen3-vl", "internvl")
TOGETHER = (
    ("llama", "mistral", "gemma3"),
    WITH_PICTURES,
    ("granite4", "falcon-h1", "qwen3-next"),
)
"""Families whose engines run in one process after each other. The last one is asked again in a new process: for models
like the others, `test_configuration` and `test_docs` start engines anew."""

ARGS: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "dtype": "bfloat16",
        **HYBRID,
    },  # the CPU has its experts and its kernel in bfloat16 only
    "granite4": HYBRID,
    "falcon-h1": HYBRID,
    **{family: {"limit_mm_per_prompt": {"image": 1, "video": 0}} for family in WITH_PICTURES},
}
TOKENS = 8
TIES = {"qwen3-next": 0.05}
"""What bfloat16 cannot tell apart."""


def prompts(family: str) -> list[dict[str, Any]]:
    """Three prompts; the second begins as the first does, the third is alone."""
    if family in WITH_PICTURES:
        words, pictures = (
            " is there a dog 0123456789",
            [tiny_models.picture(seed) for seed in (0, 1)],
        )
        asked, begin = [(0, 5), (0, 7), (1, 7)], tiny_models.PROMPTS[family]
        return [
            {"prompt": begin + words * n, "multi_modal_data": {"image": pictures[i]}}
            for i, n in asked
        ]
    rng, size = random.Random(3), 2 if family == "qwen3-next" else 1  # a page of it has 640 tokens
    shared = token_ids(rng, 250 * size)
    ends = [
        shared + token_ids(rng, 80 * size),
        shared + token_ids(rng, 23 * size),
        token_ids(rng, 395 * size),
    ]
    return [prompt(ids) for ids in ends]


def media(family: str, cache: str) -> dict[str, Any]:
    """Beside the KV connector of a model with pictures: the connector for encoder outputs."""
    return {"ec_transfer_config": encoder_connector(cache)} if family in WITH_PICTURES else {}


def levels(family: str, model: str, cache: str) -> dict[str, Any]:
    """Without a connector, with an empty store, from host memory, from the disk."""
    asked, args = prompts(family), ARGS.get(family, {})
    with Engine(model, **args) as plain:
        found: dict[str, Any] = {
            "plain": plain.ask(asked, tokens=TOKENS),
            "plain_blocks": plain.scheduler.kv_cache_config.num_blocks,
        }
    with Engine(model, connector(cache), **args, **media(family, cache)) as engine:
        found |= {
            "page": engine.page,
            "blocks": engine.scheduler.kv_cache_config.num_blocks,
            **engine.levels(asked, tokens=TOKENS),
        }
        skipped = engine.ask(asked, tokens=TOKENS, extra_args=SKIP)
        return found | {"skipped": skipped, "left": engine.left()}


def again(family: str, model: str, cache: str) -> list[Answer]:
    """From what another process left on the disk."""
    with Engine(model, connector(cache), **ARGS.get(family, {}), **media(family, cache)) as engine:
        return engine.ask(prompts(family), tokens=TOKENS)


def all_levels(folders: list[list[str]]) -> list[dict[str, Any]]:
    return [levels(*folder) for folder in folders]


@pytest.mark.engine
@pytest.mark.parametrize("families", TOGETHER, ids="+".join)
def test_every_level_gives_the_same_answers_and_loads_what_can_be_loaded(
    checkpoint: Checkpoint, tmp_path: Path, families: tuple[str, ...]
) -> None:
    folders = [[family, str(checkpoint(family)), str(tmp_path / family)] for family in families]
    found = in_child(all_levels, folders)
    if families == TOGETHER[-1]:
        found[-1]["new"] = in_child(again, *folders[-1])
    for family, seen in zip(families, found, strict=True):
        assert_same(family, seen)
        assert_loaded(family, seen)


def assert_same(family: str, seen: dict[str, Any]) -> None:
    tie = TIES.get(family, 1e-3)
    for level in {"cold", "host", "disk", "new", "skipped"} & seen.keys():
        for number, (answer, plain) in enumerate(zip(seen[level], seen["plain"], strict=True)):
            assert not differs(answer, plain, tie), (family, level, number)
            assert gap_change(answer, plain) < tie, (family, level, number)
    assert (
        len({tuple(answer["tokens"]) for answer in seen["plain"]}) == 3
    )  # the model does look at its prompt
    assert (
        seen["blocks"] == seen["plain_blocks"]
    )  # vLLM's hybrid manager stays on: the same memory, the same blocks
    assert seen["left"] == NOTHING


def assert_loaded(family: str, seen: dict[str, Any]) -> None:
    assert [answer["loaded"] for answer in seen["cold"]] == [0, 0, 0]
    for level, source in {"host": "host", "disk": "disk", "new": "disk"}.items():
        first, beside, other = seen.get(level, [None] * 3)
        for answer in filter(None, (first, other)):
            usable = (
                (answer["length"] - 1) // seen["page"] * seen["page"]
            )  # one token is always computed
            assert usable > 0
            assert (answer["loaded"], answer["cached"]) == (usable, usable), (family, level)
            assert sum(answer["sources"].values()) == usable
            # Where every layer has a window, vLLM loads the window's blocks and counts the others as of no source.
            assert set(answer["sources"]) - {"external_unspecified"} == {source}, (family, level)
        if beside:  # begins as the first, of which vLLM has something itself
            assert sum(beside["sources"].values()) == beside["loaded"] <= beside["cached"]
    if family in WITH_PICTURES:  # encoder outputs are loaded where the KV is not
        first, _, other = seen["skipped"]  # vLLM itself has the second one's picture
        assert [(answer["loaded"], answer["encoded"]) for answer in (first, other)] == [
            (0, [1, 0])
        ] * 2
        assert [answer["encoded"] for answer in (seen["cold"][0], seen["cold"][2])] == [[0, 1]] * 2
