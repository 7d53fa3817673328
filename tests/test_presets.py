"""Presets fill in what was not given; any flag overrides; a wrong value says what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from semkv.errors import ConfigError
from semkv.presets import PRESETS, get_preset
from semkv.types import CacheMode, EmbeddingLayer, MatchPolicy, Scope
from semkv_lab.flags import RunFlags
from semkv_lab.requests import ChunkSource
from semkv_lab.settings import resolve


def test_every_preset_resolves() -> None:
    for name, preset in PRESETS.items():
        settings = resolve(RunFlags(preset=name))
        assert settings.model == preset.model
        assert settings.trust_remote_code is preset.trust_remote_code
        assert settings.cache.embedding_hook == preset.embedding_hook
        assert len(settings.cache.embedding_layers) == len(preset.embedding_layers)


def test_the_default_is_minigqa() -> None:
    settings = resolve(RunFlags())
    assert (settings.preset, settings.dataset) == ("minigqa", "minigqa")
    assert settings.cache.fusion
    assert settings.cache.vision_encoder == settings.model


def test_known_figures() -> None:
    assert get_preset("internvl3.5-2b").trust_remote_code
    assert get_preset("qwen3-vl-2b").embedding_layers == ("prompt:384:0.8", "vision:512:0.82")
    assert get_preset("qwen2.5-vl-7b").model == "Qwen/Qwen2.5-VL-7B-Instruct"


def test_flags_override_the_preset(tmp_path: Path) -> None:
    flags = RunFlags(
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
    settings = resolve(flags)
    assert settings.model == "other/model"
    assert settings.trust_remote_code is False
    assert settings.cache.embedding_layers == (EmbeddingLayer("prompt", 384, 0.9),)
    assert settings.cache.similarity_threshold == 0.0
    assert settings.cache.fusion is False
    assert settings.max_tokens == 3
    assert settings.instruction == ""  # GQA's instruction belongs to GQA's questions


def test_a_hook_drops_the_presets_layers_it_cannot_fill() -> None:
    settings = resolve(RunFlags(embedding_hook="prompt"))
    assert [layer.name for layer in settings.cache.embedding_layers] == ["prompt"]
    assert resolve(RunFlags(embedding_hook="none")).cache.embedding_layers == ()


def test_a_model_without_a_preset_starts_from_nothing() -> None:
    settings = resolve(RunFlags(model="facebook/opt-125m"))
    assert (settings.preset, settings.dataset, settings.cache.embedding_layers) == ("", "gqa", ())


def test_words_become_values() -> None:
    settings = resolve(RunFlags(chunk_source="combined", cache_mode="dry-run", match="any", scope="any"))
    assert settings.chunk_source is ChunkSource.COMBINED
    assert settings.cache.mode is CacheMode.DRY_RUN
    assert settings.cache.match is MatchPolicy.ANY
    assert settings.cache.scope is Scope.ANY


@pytest.mark.parametrize(
    ("flags", "key", "expected"),
    [
        (RunFlags(preset="nope"), "--preset", "internvl3.5-2b, minigqa, opt-125m, qwen2.5-vl-7b, qwen3-vl-2b"),
        (RunFlags(dataset="vqa"), "--dataset", "gqa, gqa-text, jsonl, minigqa"),
        (RunFlags(chunk_source="words"), "--chunk-source", "combined, full, group, question, semantic"),
        (RunFlags(cache_mode="on"), "--cache-mode", "dry-run, live, off"),
        (RunFlags(match="some"), "--match", "all, any"),
        (RunFlags(scope="all"), "--scope", "any, media"),
        (RunFlags(engine="tpu"), "--engine", "labels, scripted, vllm"),
        (RunFlags(similarity_threshold=1.2), "--similarity-threshold", "from 0 to 1"),
        (RunFlags(similarity_threshold=-0.1), "--similarity-threshold", "from 0 to 1"),
        (RunFlags(embedding_layer=("prompt:384:7",)), "--embedding-layer", "from 0 to 1"),
        (RunFlags(embedding_layer=("prompt",)), "--embedding-layer", "NAME:DIM"),
        (RunFlags(embedding_layer=("prompt:0",)), "--embedding-layer", "positive"),
        (RunFlags(embedding_layer=("a:3", "a:3")), "--embedding-layer", "once"),
        (RunFlags(preset="opt-125m", embedding_layer=("prompt:384",)), "--embedding-hook", "prompt_vision"),
        (RunFlags(max_samples=0), "--max-samples", "positive"),
        (RunFlags(max_tokens=0), "--max-tokens", "positive"),
        (RunFlags(max_model_len=-1), "--max-model-len", "positive"),
        (RunFlags(chunk_window=-1), "--chunk-window", "positive"),
        (RunFlags(max_cached_blocks=-1), "--max-cached-blocks", "positive"),
        (RunFlags(max_entries=0), "--max-entries", "positive"),
        (RunFlags(media_mib=0), "--media-mib", "positive"),
        (RunFlags(dataset_root=Path("/no/such/place")), "--dataset-root", "exists"),
        (RunFlags(samples_out=Path("/")), "--samples-out", "a file"),
    ],
)
def test_a_wrong_value_names_flag_value_and_what_is_allowed(flags: RunFlags, key: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(flags)
    assert caught.value.key == key
    assert expected in str(caught.value)
