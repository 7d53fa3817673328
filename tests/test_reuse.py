"""What a hit may use: a donor's KV under the request's own tokens, blended, or none; held against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from command_line import invoke
from semkv import keys
from semkv.cache import SemanticCache
from semkv.config import MINIGQA_VLM, CacheConfig
from semkv.engines import EnginePrompt, load_image
from semkv.errors import ConfigError, EngineError
from semkv.types import MediaSegment, Namespace, Request, Role, Segment, Status, TextSegment
from semkv_lab.run import execute
from semkv_lab.settings import resolve

torch = pytest.importorskip("torch")

SCENE = Path(__file__).parents[1] / "docs" / "pictures" / "scene.jpg"
DONOR = "What color is the car left of the tree?"
OTHER = "Is there a dog on the left of the car?"
SHIFTED = "So: what color is the car left of the tree?"


def engine(model: Path, reuse: str = "inputs", share: float = 0.15, *, attach: bool = True) -> Any:
    from semkv_lab.reuse import TransformersEngine

    given = {"blend_share": share} if reuse == "blend" else {}
    chosen = resolve(model=str(model), engine="transformers", reuse=reuse, **given)
    return TransformersEngine(chosen, attach)


def prompt(*segments: Segment | str) -> EnginePrompt:
    return EnginePrompt(
        tuple(TextSegment(s) if isinstance(s, str) else s for s in segments), max_tokens=8
    )


def picture(path: Path) -> MediaSegment:
    return MediaSegment(keys.media_id(path.read_bytes()), path)


def forced(made: Any, donor: str, own: str, used: int) -> tuple[int, ...]:
    """The answer to ``own`` with the first ``used`` keys and values of ``donor``, by transformers alone."""
    from transformers import DynamicCache

    model, ids = (
        made._model,
        [torch.tensor([made._tokenizer(text).input_ids]) for text in (donor, own)],
    )
    cache, answer = DynamicCache(), []
    with torch.inference_mode():
        model(ids[0], past_key_values=cache)
        cache.crop(used - ids[0].shape[1])
        fed = ids[1][:, used:]
        while len(answer) < 8 and made._model.generation_config.eos_token_id not in answer:
            answer.append(int(model(fed, past_key_values=cache).logits[0, -1].argmax()))
            fed = torch.tensor([[answer[-1]]])
    return tuple(answer)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_computed_answer_is_that_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {**tiny_models._LLAMA, "sliding_window": None, "tie_word_embeddings": False}
    monkeypatch.setitem(tiny_models.TEXT, family, (family, shape))
    made = engine(tiny_models.text(family, tmp_path))
    ids = torch.tensor([made._tokenizer(DONOR).input_ids])
    expected = made._model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    assert made.generate(prompt(DONOR)).token_ids == tuple(expected[0, ids.shape[1] :].tolist())


def test_a_picture_reaches_the_model_as_transformers_shows_it() -> None:
    from transformers import AutoProcessor

    made, question = engine(MINIGQA_VLM), "What color is the large cube?"
    text = f"<s>USER: <image>\n{question} ASSISTANT:"
    inputs = AutoProcessor.from_pretrained(MINIGQA_VLM)(
        text=text, images=load_image(picture(SCENE)), return_tensors="pt", add_special_tokens=False
    )
    expected = made._model.generate(**inputs, max_new_tokens=8, do_sample=False)[
        0, inputs.input_ids.shape[1] :
    ]
    found = made.generate(prompt(picture(SCENE), question))
    assert (found.prompt_tokens, found.token_ids) == (
        inputs.input_ids.shape[1],
        tuple(expected.tolist()),
    )
    again = made.generate(prompt(picture(SCENE), "How many cubes are there?"))
    assert again.cached_tokens > 144  # the picture was not encoded again
    assert (
        again.token_ids
        == engine(MINIGQA_VLM)
        .generate(prompt(picture(SCENE), "How many cubes are there?"))
        .token_ids
    )
    with pytest.raises(EngineError, match="'<image>' in it"):
        made.generate(prompt(picture(SCENE), "What is an <image>?"))


def test_an_equal_donor_gives_what_computing_gives(checkpoint: tiny_models.Checkpoint) -> None:
    model = checkpoint("llama")
    computed = engine(model, attach=False).generate(prompt(DONOR))
    assert (computed.kv, computed.cached_tokens, computed.loaded_tokens) == (Status.SKIP, 0, None)
    for reuse in ("prefix", "literal", "blend"):
        made = engine(model, reuse, 0.0)
        made.generate(prompt(DONOR))
        found = made.reuse(prompt(DONOR), prompt(DONOR))
        assert (found.token_ids, found.computed_tokens, found.kv) == (
            computed.token_ids,
            1,
            Status.HIT,
        )


def test_literal_puts_the_donors_kv_under_the_requests_tokens(
    checkpoint: tiny_models.Checkpoint,
) -> None:
    made = engine(checkpoint("llama"), "literal")
    own = {text: made.generate(prompt(text)) for text in (OTHER, DONOR)}
    for donor, asked in ((DONOR, OTHER), (OTHER, DONOR), (DONOR, SHIFTED)):
        found = made.reuse(prompt(asked), prompt(donor))
        used = min(own[donor].prompt_tokens, found.prompt_tokens - 1)
        assert (found.kv, found.cached_tokens, found.loaded_tokens) == (Status.HIT, used, used)
        assert found.token_ids == forced(made, donor, asked, used)
    assert made.reuse(prompt(OTHER), prompt(DONOR)).token_ids != own[OTHER].token_ids
    assert made.generate(prompt(OTHER)).token_ids == own[OTHER].token_ids


def test_literal_stops_where_the_requests_own_segments_begin(
    checkpoint: tiny_models.Checkpoint,
) -> None:
    made = engine(checkpoint("llama"), "literal")
    facts = [
        TextSegment(text, Role.CONTEXT)
        for text in ("The red car is left.", "The car that is red is left.")
    ]
    made.generate(prompt(facts[0], DONOR))
    found = made.reuse(prompt(facts[1], OTHER), prompt(facts[0], OTHER))
    stands = len(made._tokenizer(facts[0].text + "\n").input_ids)
    assert found.cached_tokens == stands
    assert found.token_ids == forced(
        made, f"{facts[0].text}\n{DONOR}", f"{facts[1].text}\n{OTHER}", stands
    )


def test_blend_computes_what_its_share_says(checkpoint: tiny_models.Checkpoint) -> None:
    model = checkpoint("llama")
    computed = engine(model).generate(prompt(SHIFTED))
    work = []
    for share in (0.0, 0.5, 1.0):
        made = engine(model, "blend", share)
        made.generate(prompt(DONOR))
        found = made.reuse(prompt(SHIFTED), prompt(DONOR))
        assert found.prompt_tokens == computed.prompt_tokens
        work.append(found.computed_tokens)
    assert found.token_ids == computed.token_ids
    assert work == sorted(set(work))
    assert work[-1] == computed.prompt_tokens


def test_what_donors_gave_is_not_kept(
    checkpoint: tiny_models.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reuse in ("literal", "blend"):
        made = engine(checkpoint("llama"), reuse, 0.0)
        made.generate(prompt(DONOR))
        (kept,) = made._kept
        before = [k.clone() for k, _ in kept.layers]
        made.reuse(prompt(OTHER), prompt(DONOR))
        assert list(made._kept) == [kept]
        assert all(torch.equal(now, old) for (now, _), old in zip(kept.layers, before, strict=True))
        tenants = EnginePrompt(prompt(DONOR).segments, "another", max_tokens=8)
        assert made.reuse(tenants, tenants).kv is Status.MISS
    monkeypatch.setattr("semkv_lab.reuse._MOST_BYTES", 1)
    made.generate(prompt(OTHER))
    assert not made._kept
    lost = made.reuse(prompt(OTHER), prompt(DONOR))
    assert (lost.kv, lost.cached_tokens) == (Status.MISS, 0)


@pytest.mark.parametrize("family", ["opt", "gemma3"])
def test_other_models_are_refused(family: str, checkpoint: tiny_models.Checkpoint) -> None:
    with pytest.raises(
        EngineError, match="--engine transformers takes llama, mistral, qwen2, qwen3"
    ):
        engine(checkpoint(family))


def test_a_literal_run_stores_nothing_that_a_donor_gave(
    tmp_path: Path, checkpoint: tiny_models.Checkpoint
) -> None:
    data, folder, typed = (
        tmp_path / "prompts.jsonl",
        tmp_path / "cache",
        DONOR.lower().replace(" ", "  "),
    )
    facts = "The red car stands left of the tree, and the dog lies right of it."
    asked = [{"question": q} for q in (DONOR, OTHER, typed, typed)]
    asked += [
        {"context": facts, "question": DONOR},
        {"context": facts.replace(" ", "  "), "question": OTHER},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in asked), "utf-8")
    out = tmp_path / "samples.jsonl"
    flags = {
        "semantic": False,
        "baseline": True,
        "cache_dir": folder,
        "samples_out": out,
        "verify_rate": 1.0,
    }
    model, found = str(checkpoint("llama")), {}
    for reuse in ("literal", "prefix"):
        settings = resolve(
            model=model, engine="transformers", dataset=str(data), reuse=reuse, purge=True, **flags
        )
        summary = execute(settings, quiet=True)
        rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
        whole, part = "text:normalised", "text:normalised/context"
        assert [row["provenance"] for row in rows] == ["", "", whole, whole, "", part]
        assert rows[2]["statuses"]["kv_cache"] == ("hit" if reuse == "literal" else "miss")
        found[reuse] = rows[2]["token_ids"]
        assert summary["against_cold"] is not None
        assert summary["against_cold"]["same_tokens"]["value"] == float(
            found[reuse] == rows[2]["cold"]["token_ids"]
        )
        assert (
            summary["against_cold"]["saved_tokens"]["value"] or 0
        ) > 5  # the last one asks what was asked before
        model_key = engine(Path(model)).fingerprint()
        with SemanticCache(CacheConfig(folder, semantic=False)) as cache:
            assert cache.stats().entries == 3
            report = cache.try_reuse(Request("r", Namespace("", model_key), (TextSegment(typed),)))
            assert (report.provenance, report.donor_response) == (
                "text:normalised",
                rows[0]["text"],
            )
        assert not (folder / "kv").exists()
    assert found["prefix"] == rows[2]["cold"]["token_ids"] != found["literal"]


def test_only_experiments_reach_a_donors_kv() -> None:
    with pytest.raises(ConfigError, match="--engine transformers"):
        resolve(model="m", reuse="literal")
    with pytest.raises(ConfigError, match="from 0 to 1"):
        resolve(model="m", engine="transformers", reuse="blend", blend_share=1.5)
    served = invoke(["serve", "--upstream", "http://127.0.0.1:1", "--reuse", "literal"])
    assert served.exit_code != 0
    assert "--reuse" in served.output
