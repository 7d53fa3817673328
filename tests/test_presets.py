"""Presets fill in what was not given; any flag overrides; a wrong value says what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from semkv.config import PRESETS
from semkv.errors import ConfigError
from semkv.types import EmbeddingLayer
from semkv_lab.settings import resolve


def test_every_preset_resolves() -> None:
    for name, preset in PRESETS.items():
        settings = resolve(preset=name)
        assert settings.model == preset.model
        assert settings.trust_remote_code is preset.trust_remote_code
        assert settings.cache.embedding_hook == preset.embedding_hook
        assert len(settings.cache.embedding_layers) == len(preset.embedding_layers)


def test_the_default_is_minigqa() -> None:
    settings = resolve()
    assert (settings.preset, settings.dataset) == ("minigqa", "minigqa")
    assert settings.cache.fusion
    assert settings.cache.vision_encoder == settings.model


def test_flags_override_the_preset(tmp_path: Path) -> None:
    settings = resolve(
        preset="internvl3.5-2b",
        model="other/model",
        trust_remote_code=False,
        embedding_layer=("prompt:384:0.9",),
        embedding_hook="prompt",
        similarity_threshold=0.0,
        enable_fusion_cache=False,
        max_tokens=3,
        dataset="jsonl",
        cache_dir=tmp_path,
    )
    assert settings.model == "other/model"
    assert settings.trust_remote_code is False
    assert settings.cache.embedding_layers == (EmbeddingLayer("prompt", 384, 0.9),)
    assert settings.cache.similarity_threshold == 0.0
    assert settings.cache.fusion is False
    assert settings.max_tokens == 3
    assert settings.instruction == ""  # GQA's instruction belongs to GQA's questions


def test_a_hook_drops_the_presets_layers_it_cannot_fill() -> None:
    settings = resolve(embedding_hook="prompt")
    assert [layer.name for layer in settings.cache.embedding_layers] == ["prompt"]
    assert resolve(embedding_hook="none").cache.embedding_layers == ()


def test_a_model_without_a_preset_starts_from_nothing() -> None:
    settings = resolve(model="facebook/opt-125m")
    assert (settings.preset, settings.dataset, settings.cache.embedding_layers) == ("", "gqa", ())


@pytest.mark.parametrize(
    ("flags", "key", "expected"),
    [
        ({"preset": "nope"}, "--preset", "internvl3.5-2b, minigqa, opt-125m, qwen2.5-vl-7b, qwen3-vl-2b"),
        ({"dataset": "vqa"}, "--dataset", "gqa, jsonl, minigqa"),
        ({"chunk_source": "words"}, "--chunk-source", "'question', 'semantic', 'group', 'combined' or 'full'"),
        ({"engine": "tpu"}, "--engine", "labels, scripted, transformers, vllm"),
        ({"similarity_threshold": -0.1}, "--similarity-threshold", "from 0 to 1"),
        ({"embedding_layer": ("prompt:384:7",)}, "--embedding-layer", "from 0 to 1"),
        ({"embedding_layer": ("prompt",)}, "--embedding-layer", "NAME:DIM"),
        ({"embedding_layer": ("prompt:0",)}, "--embedding-layer", "positive"),
        ({"embedding_layer": ("a:3", "a:3")}, "--embedding-layer", "once"),
        ({"preset": "opt-125m", "embedding_layer": ("prompt:384",)}, "--embedding-hook", "prompt_vision"),
        ({"max_samples": 0}, "--max-samples", "positive"),
        ({"chunk_window": -1}, "--chunk-window", "positive"),
        ({"max_cached_blocks": -1}, "--max-cached-blocks", "positive"),
        ({"dataset_root": Path("/no/such/place")}, "--dataset-root", "exists"),
        ({"samples_out": Path("/")}, "--samples-out", "a file"),
    ],
)
def test_a_wrong_value_names_flag_value_and_what_is_allowed(flags: dict[str, Any], key: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(flags)
    assert caught.value.key == key
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"max_samples": []},
        {"max_samples": "null"},
        {"tenant": ["a", "b"]},
        {"tenant": {"a": 1}},
        {"similarity_threshold": "half"},
        {"disable_guards": "perhaps"},
    ],
)
def test_a_value_of_another_type_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(given)).replace("_", "-")):
        resolve(given)


def test_of_two_names_of_a_flag_the_last_one_counts() -> None:
    settings = resolve({"embedding-layers": ["prompt:384"]}, embedding_layer=["vision:6912:0.9"])
    assert settings.cache.embedding_layers == (EmbeddingLayer("vision", 6912, 0.9),)
    assert resolve(model="", preset="") == resolve()
