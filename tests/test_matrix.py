"""A change of any one thing that shapes a value gives it another name: KV blocks and encoder outputs.

The names come from the functions that a running engine uses, over configurations of a real vLLM.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny_models
from semkv_lab.local_engine import wait_until_settled
from semkv_stores.block_file import tenant_tag
from semkv_vllm import identity
from semkv_vllm.identity import Adapters
from semkv_vllm.kv import describe
from semkv_vllm.shared import RequestFacts

pytestmark = pytest.mark.engine
BLOCK = 32


@pytest.fixture
def model(checkpoint: tiny_models.Checkpoint) -> Path:
    return checkpoint("llava")


# -- what an engine is started with ---------------------------------------------------------------------------------


def other_weights(model: Path, folder: Path) -> dict[str, Any]:
    """One bit of one weight; same names, sizes and times."""
    copy = folder / "other"
    shutil.copytree(model, copy)
    weights = copy / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    shutil.copystat(model / "model.safetensors", weights)
    return {"model": str(copy)}


def swapped_in_place(model: Path, folder: Path) -> dict[str, Any]:
    """Other weights under the same path as before, with the old size and time."""
    copy = folder / "same"
    shutil.copytree(model, copy)
    first = names({"model": str(copy)}, folder)  # the digest is noted
    assert first == names({"model": str(copy)}, folder)
    (copy / "model.safetensors").unlink()
    shutil.copy2(Path(other_weights(model, folder)["model"]) / "model.safetensors", copy)
    assert names({"model": str(copy)}, folder)[0] != first[0]
    return {"model": str(copy)}


def other_processor(model: Path, folder: Path) -> dict[str, Any]:
    copy = folder / "other"
    shutil.copytree(model, copy)
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (path := copy / name).exists():
            path.write_text(path.read_text().replace("0.48145466", "0.5"))
    return {"model": str(copy)}


Change = dict[str, Any] | Callable[[Path, Path], dict[str, Any]]
BOTH: dict[str, Change] = {
    "weights": other_weights,
    "weights in place": swapped_in_place,
    "processor files": other_processor,
    "revision": {"revision": "0123456789abcdef0123456789abcdef01234567"},
    "dtype": {"dtype": "float32"},
    "dummy weights": {"load_format": "dummy"},
    "seed of dummy weights": {"load_format": "dummy", "seed": 1},
    "processor settings": {"mm_processor_kwargs": {"do_rescale": False}},
    "media loading": {"media_io_kwargs": {"image": {"mode": "L"}}},
    "model configuration": {"hf_overrides": {"vision_feature_layer": -1}},
    "length of a context": {"max_model_len": 256},  # LongRoPE and Llama 4 compute by it
    "load format": {"load_format": "pt"},
    "settings of the loader": {
        "load_format": "sharded_state",
        "model_loader_extra_config": {"pattern": "x-{rank}"},
    },
    "files left out": {"ignore_patterns": ["a*"]},
    "code revision": {"code_revision": "abc"},
    "implementation": {"model_impl": "transformers"},
    "quantization": {"quantization": "fp8_per_tensor"},
    "settings of quantization": {
        "quantization": "fp8_per_tensor",
        "quantization_config": {"ignore": ["re:.*mlp.*"]},
    },
    "generation settings": {"override_generation_config": {"attn_temperature_tuning": True}},
    "generation file": {"generation_config": "vllm"},
    "eager or compiled": {"enforce_eager": False},
    "attention backend": {"attention_backend": "TORCH_SDPA"},
    "ranks": {"tensor_parallel_size": 2},
    "drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
        }
    },
    "more drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
        }
    },
    "video pruning": {"video_pruning_rate": 0.5},
    "way of video pruning": {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
    "strings between media": {"interleave_mm_strings": True},
    "encoder dtype": {"mm_encoder_attn_dtype": "fp8"},
    "no encoder": {"language_model_only": True},
    "a setting of a plugin": {"additional_config": {"a": 1}},
    "LoRA rank": {"enable_lora": True, "max_lora_rank": 8},
    "other LoRA rank": {"enable_lora": True, "max_lora_rank": 16},
    "LoRA modules": {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["v_proj"]},
    "LoRA of experts": {"enable_lora": True, "max_lora_rank": 8, "enable_moe_shared_loras": True},
    "mixed LoRA of experts": {
        "enable_lora": True,
        "max_lora_rank": 8,
        "enable_mixed_moe_lora_format": True,
    },
}
KV_ONLY: dict[str, Change] = {
    "block size": {"block_size": 2 * BLOCK},
    "hash algorithm": {"prefix_caching_hash_algo": "sha256"},
    "KV dtype": {"kv_cache_dtype": "fp8_e5m2"},
    "layers with another KV dtype": {
        "kv_cache_dtype": "fp8_e5m2",
        "kv_cache_dtype_skip_layers": ["0"],
    },
    "KV shared between layers": {"kv_sharing_fast_prefill": True},
}
HARMLESS: dict[str, dict[str, Any]] = {
    "room": {
        "gpu_memory_utilization": 0.3,
        "num_gpu_blocks_override": 70,
        "kv_cache_memory_bytes": 1 << 27,
    },
    "batches": {"max_num_seqs": 3, "max_num_batched_tokens": 1024},
    "turns": {"scheduling_policy": "priority", "async_scheduling": False},
    "names": {"served_model_name": ["a", "b"]},
    "sampling": {"seed": 7, "logprobs_mode": "raw_logits", "max_logprobs": 3},
    "what is measured": {"disable_log_stats": True, "kv_cache_metrics": True},
    "caches of pictures": {"mm_processor_cache_gb": 1.0, "mm_hasher_algorithm": "sha256"},
    "addresses": {"data_parallel_rpc_port": 4242, "master_port": 4343},
}


def names(arguments: dict[str, Any], folder: Path) -> tuple[str, str]:
    """The namespaces of an engine's KV blocks and of its encoder outputs, as the connectors make them."""
    from vllm.engine.arg_utils import EngineArgs

    wait_until_settled(Path(arguments["model"]))
    given = {"dtype": "bfloat16", "block_size": BLOCK, "max_model_len": 512, "enforce_eager": True}
    given |= {
        "prefix_caching_hash_algo": "sha256_cbor",
        "limit_mm_per_prompt": {"image": 1, "video": 0},
    }
    config = EngineArgs(**(given | arguments)).create_engine_config()
    layers = SimpleNamespace(kv_cache_spec="full attention", layer_names=["a"])
    cache = SimpleNamespace(kv_cache_groups=[layers])
    facts = identity.model_facts(config, folder)
    kv = identity.namespace_digest(
        facts, identity.kv_facts(config, cache), identity.hash_facts(config)
    )
    return kv, identity.namespace_digest(facts)


@functools.cache
def plain_names(model: Path) -> tuple[str, str]:
    """Those of an engine that is told nothing but its model."""
    return names({"model": str(model)}, model.parent)


def test_another_engine_finds_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since another name never finds what lies under this one (`test_blocks`, `test_fusion_store`)."""
    from vllm.v1.core import kv_cache_utils

    kv, fusion = names({"model": str(model)}, tmp_path)
    assert names({"model": str(model)}, tmp_path) == (kv, fusion)  # started anew
    seen = {kv}
    for number, (change, made) in enumerate((BOTH | KV_ONLY).items(), 1):
        (folder := tmp_path / str(number)).mkdir()
        name = names(
            {"model": str(model)} | (made(model, folder) if callable(made) else made), folder
        )
        assert (name[1] == fusion) == (change in KV_ONLY), change
        seen.add(name[0])
        assert len(seen) == 1 + number, change
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"another seed", raising=False)
    other = names({"model": str(model)}, tmp_path)
    assert (other[0] in seen, other[1]) == (False, fusion)


@pytest.mark.parametrize(
    "change", [{"mm_device_do_normalize": False}, {"mm_encoder_tp_mode": "data"}], ids=str
)
def test_settings_of_an_encoder_that_not_every_model_takes(
    checkpoint: tiny_models.Checkpoint, tmp_path: Path, change: dict[str, Any]
) -> None:
    model = checkpoint("qwen3-vl")
    kv, fusion = plain_names(model)
    other = names({"model": str(model)} | change, tmp_path)
    assert kv != other[0]
    assert fusion != other[1]


@pytest.mark.parametrize("what", HARMLESS)
def test_what_is_harmless_leaves_the_name(model: Path, tmp_path: Path, what: str) -> None:
    assert names({"model": str(model)} | HARMLESS[what], tmp_path) == plain_names(model)


# -- LoRA adapters --------------------------------------------------------------------------------------------------


def adapter(path: Path, weights: bytes = b"weights") -> Any:
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(weights)
    return named(path)


def named(path: object) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("sql", 1, str(path))


def test_an_adapter_is_its_weights_whatever_it_is_called(tmp_path: Path) -> None:
    def identity_of(path: Path) -> str | None:
        return Adapters(tmp_path / "cache", time.time() + 60.0).identity(named(path))

    adapter(tmp_path / "a")
    first = identity_of(tmp_path / "a")
    assert first
    adapter(tmp_path / "b")
    assert identity_of(tmp_path / "b") == first
    shutil.rmtree(tmp_path / "a")
    adapter(tmp_path / "a", b"WEIGHTS")  # as large as before
    assert identity_of(tmp_path / "a") not in (first, "", None)
    for nothing in ("someone/adapter-on-a-hub", tmp_path / "missing"):
        assert identity_of(nothing) is None  # type: ignore[arg-type]
    request = SimpleNamespace(
        lora_request=named(tmp_path / "b"), kv_transfer_params=None, cache_salt=None
    )
    adapters = Adapters(tmp_path / "cache", time.time() + 60.0)
    assert describe(request, adapters) == RequestFacts(owner=tenant_tag(None), adapter=first)
    assert describe(request, adapters, alone=False) is None, (
        "another tier knows the adapter's name only"
    )


@pytest.mark.parametrize(
    "how", ["rewritten", "replaced with its old times", "linked elsewhere", "grown"]
)
def test_an_adapter_changed_under_a_running_engine_is_left_alone(tmp_path: Path, how: str) -> None:
    """The engine may still hold the old weights, also when the old bytes come back."""
    real, link = tmp_path / "real", tmp_path / "adapter"
    adapter(real)
    link.symlink_to(real)
    one, weights = named(link), real / "adapter_model.safetensors"
    time.sleep(0.05)
    adapters = Adapters(tmp_path / "cache", time.time() + identity._CLOCK_S + 0.01)
    assert adapters.identity(one)
    while time.time() < adapters._before + 0.1:
        time.sleep(0.02)
    status = weights.stat()
    if how == "grown":
        (real / "more.safetensors").write_bytes(b"more")
    elif how == "linked elsewhere":
        adapter(tmp_path / "other", b"WEIGHTS")
        link.unlink()
        link.symlink_to(tmp_path / "other")
    else:
        weights.write_bytes(b"WEIGHTS")
    if how == "replaced with its old times":
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert adapters.identity(one) is None
    weights.write_bytes(b"weights")
    assert adapters.identity(one) is None
    assert adapters.identity(None) == "", "requests without an adapter go on"
