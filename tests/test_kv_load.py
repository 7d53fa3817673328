"""What ended engines or made them answer wrongly, with default settings, and a random load over several families.

Every engine runs in a process of its own. Every test asks for the right tokens from an engine that lives on, and for
nothing left behind: no request, no job, no block.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import random_load
import tiny_models
from kv_engines import (
    HYBRID,
    NOTHING,
    Answer,
    Engine,
    answered,
    connector,
    differs,
    encoder_connector,
    in_child,
    prompt,
    report,
    several,
    token_ids,
)
from tiny_models import Checkpoint

BROKEN = {
    "kv_connector": "BrokenConnector",
    "kv_connector_module_path": "broken_connector",
    "kv_role": "kv_both",
}


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def references(model: Path) -> dict[str, list[Answer]]:
    """What an engine without a connector answers to `marked`, shortly and at length."""
    return in_child(alone, model)


def marked() -> list[dict[str, Any]]:
    """Three prompts; the first is the one that `BrokenConnector` makes promises for."""
    rng = random.Random(5)
    ids = [token_ids(rng, size) for size in (300, 180, 420)]
    for one, first in zip(ids, (11, 12, 12), strict=True):
        one[0] = first
    return [prompt(one) for one in ids]


LOADABLE = [288, 160, 416]


def alone(model: str) -> dict[str, list[Answer]]:
    with Engine(model) as engine:
        return {"short": engine.ask(marked()), "long": engine.ask(marked(), tokens=100)}


def right(answers: list[Answer], references: list[Answer]) -> list[bool]:
    return [
        not differs(answer, reference)
        for answer, reference in zip(answers, references, strict=True)
    ]


# ---------------------------------------------------------------------- a sibling whose loads fail


def failing(model: str, cache: str, references: dict[str, list[Answer]]) -> dict[str, Any]:
    """A load of a sibling fails while another request decodes; then all of it from our host memory and disk."""
    from vllm import SamplingParams

    import broken_connector

    prompts, short = marked(), references["short"]
    engine = Engine(model, several(BROKEN, connector(cache), kv_load_failure_policy="recompute"))
    core = engine.llm.llm_engine
    core.add_request(
        "decodes",
        prompts[1],
        SamplingParams(max_tokens=100, temperature=0, ignore_eos=True, logprobs=2),
    )
    done = [output for _ in range(50) for output in core.step() if output.finished]
    core.add_request(
        "fails",
        prompts[0],
        SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=2),
    )
    while core.has_unfinished_requests():
        done += [output for output in core.step() if output.finished]
    answers = {output.request_id: answered(output) for output in done}
    found = {
        "beside": right([answers["fails"], answers["decodes"]], [short[0], references["long"][1]])
    }
    broken_connector.ARMED.clear()
    for level, keep_host in (("host", True), ("disk", False)):
        engine.forget(keep_host=keep_host)
        again = engine.ask(prompts)
        found[level] = right(again, short)
        found[f"{level} loaded"] = [answer["loaded"] for answer in again]
    left = engine.left()
    engine.close()
    return found | {"left": left}


@pytest.mark.engine
def test_what_rests_on_a_siblings_failed_load_is_not_kept(
    model: Path, tmp_path: Path, references: Any
) -> None:
    found = in_child(failing, model, tmp_path, references)
    for level in ("beside", "host", "disk"):
        assert all(found[level]), found
    assert found["disk loaded"][0] == 288  # computed and stored again
    assert found["left"] == NOTHING


# ---------------------------------------------------------------------- siblings, and damage


def damage(cache: str) -> int:
    """Turn one byte in the middle of every block file."""
    files = list(Path(cache).rglob("*.safetensors"))
    for file in files:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 0xFF
        file.write_bytes(raw)
    return len(files)


def siblings(model: str, cache: str, short: list[Answer]) -> dict[str, Any]:
    """Two connectors of ours and vLLM's own for demonstrations in one engine: one prompt after another, then all at
    once; then our files are damaged, and the sibling has nothing to give in their place."""
    theirs = {"shared_storage_path": f"{cache}/theirs"}
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": theirs,
    }
    ours = [connector(f"{cache}/ours-{number}") for number in range(2)]
    prompts, engine = marked(), Engine(model, several(*ours, example))
    found: dict[str, Any] = {"cold": right(engine.ask(prompts), short)}
    engine.forget()
    outputs = [engine.outputs([p], 16)[0] for p in prompts]
    found["disk"] = right([answered(o) for o in outputs], short)
    found["reports"] = [
        [report(o, key)["loaded_tokens"] for o in outputs] for key in ("semkv", "semkv-2")
    ]
    engine.forget()
    found["together"] = right(engine.ask(prompts), short)
    engine.forget()
    shutil.rmtree(f"{cache}/theirs")
    found["files"] = damage(cache)
    for level in ("damaged", "again", "last"):
        answers = engine.ask(prompts)
        found[level] = right(answers, short)
        found[f"{level} loaded"] = sum(answer["loaded"] for answer in answers)
        engine.forget()
    left = engine.left()
    engine.close()
    return found | {"left": left}


@pytest.mark.engine
def test_connectors_beside_each_other(model: Path, tmp_path: Path, references: Any) -> None:
    found = in_child(siblings, model, tmp_path, references["short"])
    assert found["cold"] == found["disk"] == found["together"] == [True] * 3
    # The first connector that has blocks gives them; each reports under a key of its own.
    assert found["reports"] == [LOADABLE, [0, 0, 0]]
    assert found["files"] > 0
    assert found["damaged"] == found["again"] == found["last"] == [True] * 3
    # What lay in a damaged file before the damage goes with it, and is stored again a round later.
    assert found["damaged loaded"] < found["last loaded"] == sum(LOADABLE), found
    assert found["left"] == NOTHING


# ---------------------------------------------------------------------- pooling


def pooled(model: str, cache: str) -> dict[str, Any]:
    def embed(engine: Engine) -> list[list[float]]:
        outputs = engine.llm.encode(marked(), pooling_task="embed", use_tqdm=False)
        return [output.outputs.data.tolist() for output in outputs]

    kind = {"runner": "pooling", "convert": "embed"}
    with Engine(model, **kind) as plain:
        found = {"plain": embed(plain)}
    with Engine(model, connector(cache), **kind) as engine:
        found["cold"] = embed(engine)
        engine.forget()
        return found | {"disk": embed(engine), "left": engine.left()}


@pytest.mark.engine
def test_embeddings_are_those_of_an_engine_without_the_connector(
    model: Path, tmp_path: Path
) -> None:
    found = in_child(pooled, model, tmp_path)
    for level in ("cold", "disk"):
        for vector, plain in zip(found[level], found["plain"], strict=True):
            assert vector == pytest.approx(plain, abs=1e-4)
    assert found["left"] == NOTHING


# ---------------------------------------------------------------------- random load


def under_load(model: str, cache: str, fields: dict[str, Any]) -> dict[str, Any]:
    return random_load.RandomLoad(model, cache, **fields).run()


def assert_well(found: dict[str, Any]) -> None:
    assert not found["wrong"], found
    assert found["left"] == NOTHING, found
    assert found["loaded at last"] > 0, found


@pytest.mark.engine
def test_a_random_load_beside_another_engine_that_is_killed(model: Path, tmp_path: Path) -> None:
    """Host memory, the disk and the engine's own cache are all too small for what is asked."""
    small = {"capture_decode": True, "host_bytes": 2 << 20, "max_bytes": 8 << 20}
    tight = {
        "answers": 24,
        "longest": 300,
        "blocks": 24,
        "preempts": True,
        "args": {"max_model_len": 640, "max_num_batched_tokens": 512},
    }
    found = in_child(
        under_load, model, tmp_path, {**tight, "purges": True, "kills": 0.2, "settings": small}
    )
    assert_well(found)
    assert min(found["aborted"], found["purges"]) > 0, found
    assert found["began"] == found["kills"] > 0, found


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "blocks", "args"), [("gemma3", 100, {}), ("granite4", 36, HYBRID)]
)
def test_a_random_load_on_windows_and_on_states(
    checkpoint: Checkpoint, tmp_path: Path, family: str, blocks: int, args: dict[str, Any]
) -> None:
    fields = {"prompts": 12, "longest": 600, "blocks": blocks, "preempts": True, "args": args}
    assert_well(in_child(under_load, checkpoint(family), tmp_path, fields))


class Pictures(random_load.RandomLoad):
    """Prompts with pictures; which picture and which text, by number. Tenants are the matter of the other loads."""

    def trunks(self, count: int, longest: int) -> list[list[int]]:
        return [[] for _ in range(count)]

    def asked_alone(self) -> list[Answer]:
        return self.together(map(self.made, range(len(self.prompts))))

    def media(self) -> dict[str, Any]:
        return {"ec_transfer_config": encoder_connector(self.cache)}

    def made(self, which: int, salt: str | None = None) -> Any:
        picture, words = divmod(which, 4)
        text = "<s><image>" + " is there a dog 0123456789" * (1, 3, 5, 7)[words]
        asked = {"prompt": text, "multi_modal_data": {"image": tiny_models.picture(picture)}}
        return asked | ({"cache_salt": salt} if salt else {})

    def loadable(self, which: int, salt: str | None) -> int:
        return 1 << 30


def pictures(model: str, cache: str) -> dict[str, Any]:
    """With a connector for encoder outputs beside ours."""
    return Pictures(model, cache, prompts=16, args={"limit_mm_per_prompt": {"image": 1}}).run()


@pytest.mark.engine
def test_pictures_under_a_random_load(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert_well(in_child(pictures, checkpoint("llava"), tmp_path))
