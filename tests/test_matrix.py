"""A change of any one thing that shapes a value is a miss, and the same thing again is a hit: for KV and for fusion.

The names come from the functions that a running engine uses, over configurations and requests of a real vLLM.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tiny_models
from block_helpers import totals
from semkv.connectors import KVSettings, identity
from semkv.connectors.identity import Adapters
from semkv.stores.blocks import BlockStore
from semkv.stores.fusion import FusionState, FusionStore

pytestmark = pytest.mark.engine
BLOCK = 32
ROW = 4096


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
    "LoRA rank": {"enable_lora": True, "max_lora_rank": 8},
    "other LoRA rank": {"enable_lora": True, "max_lora_rank": 16},
}
KV_ONLY: dict[str, Change] = {
    "block size": {"block_size": 2 * BLOCK},
    "hash algorithm": {"prefix_caching_hash_algo": "sha256"},
    "KV dtype": {"kv_cache_dtype": "fp8_e5m2"},
}


def names(arguments: dict[str, Any], folder: Path) -> tuple[str, str]:
    """The namespaces of an engine's KV blocks and of its encoder outputs, as the connectors make them."""
    from vllm.engine.arg_utils import EngineArgs

    given = {"dtype": "bfloat16", "block_size": BLOCK, "max_model_len": 512, "enforce_eager": True}
    given |= {"prefix_caching_hash_algo": "sha256_cbor", "limit_mm_per_prompt": {"image": 1, "video": 0}}
    config = EngineArgs(**(given | arguments)).create_engine_config()
    layers = SimpleNamespace(kv_cache_spec="full attention", layer_names=["a"])
    cache = SimpleNamespace(kv_cache_groups=[layers])
    facts = identity.model_facts(config, folder)
    kv = identity.namespace_digest(facts, identity.kv_facts(config, cache), identity.hash_facts(config))
    return kv, identity.namespace_digest(facts)


def test_another_engine_finds_nothing(model: Path, tmp_path: Path) -> None:
    base = names({"model": str(model)}, tmp_path)
    hashes, row = [b"h" * 36], np.ones(ROW, np.uint8)
    kv = BlockStore(tmp_path / "kv", "kv")
    assert kv.write(base[0], {}, hashes, [row])
    FusionStore.open(tmp_path / "fusion", base[1]).save(FusionState.from_array("key", np.ones((2, 2), np.float32)))

    def found(kv_name: str, fusion_name: str) -> tuple[bool, bool]:
        return kv.find(kv_name, hashes) != [None], "key" in FusionStore.open(tmp_path / "fusion", fusion_name)

    assert found(*names({"model": str(model)}, tmp_path)) == (True, True)  # started anew
    seen = {}
    for number, (change, made) in enumerate((BOTH | KV_ONLY).items()):
        (folder := tmp_path / str(number)).mkdir()
        changed = made(model, folder) if callable(made) else made
        name = names({"model": str(model)} | changed, folder)
        assert found(*name) == (False, change in KV_ONLY), change
        seen[change] = name[0]
    assert len(set(seen.values())) == len(seen), seen


def test_the_seed_of_the_hashes_is_part_of_the_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core import kv_cache_utils

    base = names({"model": str(model)}, tmp_path)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"another seed", raising=False)
    other = names({"model": str(model)}, tmp_path)
    assert other[0] != base[0]
    assert other[1] == base[1]


# -- what a request brings ------------------------------------------------------------------------------------------


def adapter(path: Path, weights: bytes = b"weights", name: str = "sql", number: int = 1) -> Any:
    from vllm.lora.request import LoRARequest

    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(weights)
    return LoRARequest(name, number, str(path))


def request(name: str, **fields: Any) -> Any:
    """A request of vLLM's with two full blocks, an image and its block hashes."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    kv_cache_utils.init_none_hash(sha256_cbor)
    place = PlaceholderRange(offset=4, length=2)
    image = MultiModalFeatureSpec(None, "image", fields.pop("image", "cat.jpg"), place)
    tokens = fields.pop("tokens", list(range(3, 3 + 2 * BLOCK + 1)))
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256_cbor)
    params = SamplingParams(max_tokens=1)
    return Request(name, tokens, params, None, mm_features=[image], block_hasher=hasher, **fields)


class Halves:
    """What both connectors ask their stores for, as an engine that starts ``later`` seconds from now."""

    def __init__(self, folder: Path, *, later: float = 60.0) -> None:
        from semkv.connectors.ec import ECScheduler
        from semkv.connectors.shared import KVShared

        self.kv = BlockStore(folder / "kv", "kv")
        self.shared = KVShared(KVSettings(folder), self.kv, {}, lambda: {"the same": "engine"})
        self.fusion = FusionStore.open(folder / "fusion", "ns")
        self.ec = ECScheduler(self.fusion.blocks, "ns", folder)
        self.adapters = self.ec._adapters = Adapters(folder, time.time() + later)
        self.skipped = 0

    def serve(self, one: Any) -> tuple[int, bool]:
        """What is found for a request; what is not is stored, as an engine would."""
        from vllm.v1.kv_offload.base import make_offload_key

        from semkv.connectors.kv import describe

        found, facts = 0, describe(one, self.adapters)
        self.skipped += facts is None
        if facts is not None:
            keys = [make_offload_key(h, 0) for h in one.block_hashes]
            name = self.shared.namespace(facts["adapter"])
            found = next((i for i, ref in enumerate(self.kv.find(name, keys)) if ref is None), len(keys))
            new = [np.ones(ROW, np.uint8)] * (len(keys) - found)
            assert not new or self.kv.write(name, {}, keys[found:], new, owner=facts["owner"])
        self.ec.observe(one)
        encoded = self.ec.has(one.mm_features[0].identifier)
        self.ec.allocated(one, 0)
        for key, _ in self.ec.build_step().saves.values():
            self.fusion.save(FusionState.from_array(key, np.ones((2, 4), np.float32)))
        self.ec.finished(one)
        return found * BLOCK, encoded


FOUND, MISSED = (2 * BLOCK, True), (0, False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, FOUND),
        ({"cache_salt": "tenant"}, MISSED),
        ({"image": "dog.jpg"}, MISSED),
        ({"tokens": list(range(4, 4 + 2 * BLOCK + 1))}, (0, True)),  # the same image under another text
        ({"tokens": [*range(3, 3 + BLOCK), *range(BLOCK + 1)]}, (BLOCK, True)),  # its first block is the same
    ],
)
def test_another_request_finds_nothing_of_the_first(
    tmp_path: Path, change: dict[str, Any], expected: tuple[int, bool]
) -> None:
    halves = Halves(tmp_path)
    assert halves.serve(request("1")) == MISSED
    assert halves.serve(request("2", **change)) == expected
    assert halves.serve(request("3", **change)) == FOUND  # and is found itself
    assert halves.serve(request("4")) == FOUND


def test_an_adapter_is_its_weights(tmp_path: Path) -> None:
    halves = Halves(tmp_path / "cache")
    first = adapter(tmp_path / "a")
    assert halves.serve(request("1")) == MISSED
    assert halves.serve(request("2", lora_request=first)) == MISSED
    assert halves.serve(request("3", lora_request=first)) == FOUND
    assert halves.serve(request("4")) == FOUND
    # Another path, or another name: vLLM's hashes differ. Another salt as well.
    assert halves.serve(request("5", lora_request=adapter(tmp_path / "b", number=2))) != FOUND
    assert halves.serve(request("6", lora_request=adapter(tmp_path / "a", name="chat", number=3)))[0] == 0
    assert halves.serve(request("7", lora_request=first, cache_salt="tenant")) == MISSED
    # The same name and path with other weights, in the next engine.
    shutil.rmtree(tmp_path / "a")
    second = Halves(tmp_path / "cache")
    assert second.serve(request("8", lora_request=adapter(tmp_path / "a", b"WEIGHTS"))) == MISSED
    assert second.serve(request("9", lora_request=first)) == FOUND
    shutil.rmtree(tmp_path / "a")
    third = Halves(tmp_path / "cache")
    assert third.serve(request("10", lora_request=adapter(tmp_path / "a"))) == FOUND  # what the first one stored


@pytest.mark.parametrize("how", ["rewritten", "replaced with its old times", "linked elsewhere", "grown"])
def test_an_adapter_changed_under_a_running_engine_is_left_alone(tmp_path: Path, how: str) -> None:
    """The engine may still hold the old weights: nothing is loaded or stored for the name any more."""
    real, link = tmp_path / "real", tmp_path / "adapter"
    adapter(real)
    link.symlink_to(real)
    one = adapter(link)
    time.sleep(0.05)
    halves = Halves(tmp_path / "cache", later=Adapters.__init__.__globals__["_CLOCK_S"] + 0.01)
    assert halves.serve(request("1", lora_request=one)) == MISSED
    assert halves.serve(request("2", lora_request=one)) == FOUND
    weights = real / "adapter_model.safetensors"
    while time.time() < halves.adapters._before + 0.1:
        time.sleep(0.02)
    if how == "rewritten":
        weights.write_bytes(b"WEIGHTS")
    elif how == "grown":
        (real / "more.safetensors").write_bytes(b"more")
    elif how == "linked elsewhere":
        other = tmp_path / "other"
        adapter(other, b"WEIGHTS")
        link.unlink()
        link.symlink_to(other)
    else:
        status = weights.stat()
        weights.write_bytes(b"WEIGHTS")
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    stored = totals(halves.kv)[1]
    assert halves.serve(request("3", lora_request=one)) == MISSED
    assert totals(halves.kv)[1] == stored
    assert halves.skipped == 1
    weights.write_bytes(b"weights")  # nor when the old bytes come back
    assert halves.serve(request("4", lora_request=one)) == MISSED
    assert halves.serve(request("5")) == MISSED  # others go on
    assert halves.serve(request("6")) == FOUND


def test_adapters_that_are_no_directory_are_left_alone(tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    halves = Halves(tmp_path / "cache")
    for i, path in enumerate(["someone/adapter-on-a-hub", str(tmp_path / "missing")], 1):
        for number in range(2):
            one = request(f"{path}{number}", lora_request=LoRARequest(str(i), i, path))
            assert halves.serve(one) == MISSED
