"""A change of any one thing that shapes a value is a miss, and the same thing again is a hit: for KV and for fusion.

The names come from the functions that a running engine uses, over configurations and requests of a real vLLM.
"""

from __future__ import annotations

import json
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
from semkv.connectors import namespace as ns
from semkv.connectors.host import SharedPool
from semkv.connectors.kv_keys import rank_namespace
from semkv.connectors.kv_scheduler import KVScheduler
from semkv.connectors.lora import Adapters
from semkv.connectors.settings import ECSettings, KVSettings
from semkv.stores.blocks import KVLayout, KVStore, LayerLayout
from semkv.stores.bounds import Bounds
from semkv.stores.extents import ExtentStore
from semkv.stores.fusion import FusionState, FusionStore

vllm = pytest.importorskip("vllm")
BLOCK = 32
LAYOUT = KVLayout((LayerLayout("a", "bfloat16", (1, 2), (2, 1), 4),), BLOCK)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llava", tmp_path_factory.mktemp("model") / "llava")


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
    layers = SimpleNamespace(kv_cache_spec=object(), layer_names=["a"])
    cache = SimpleNamespace(kv_cache_groups=[layers])
    facts = ns.model_facts(config, folder)
    kv = ns.namespace_digest(facts, ns.kv_facts(config, cache), ns.hash_facts(config))
    return kv, ns.namespace_digest(facts)


@pytest.mark.parametrize("change", [*BOTH, *KV_ONLY])
def test_another_engine_finds_nothing(model: Path, tmp_path: Path, change: str) -> None:
    base = names({"model": str(model)}, tmp_path)
    made = (BOTH | KV_ONLY)[change]
    kv_name, fusion_name = names({"model": str(model)} | (made(model, tmp_path) if callable(made) else made), tmp_path)

    hashes, rows = [b"h" * 32], np.ones((1, 4), np.uint8)
    KVStore.open(tmp_path / "kv", rank_namespace(base[0], 0), LAYOUT).save_rows(hashes, rows)
    FusionStore.open(tmp_path / "fusion", base[1]).save(FusionState.from_array("key", np.ones((2, 2), np.float32)))

    def found(kv_name: str, fusion_name: str) -> tuple[bool, bool]:
        kv = KVStore.open(tmp_path / "kv", rank_namespace(kv_name, 0), LAYOUT)
        return bool(kv.lookup(hashes)), "key" in FusionStore.open(tmp_path / "fusion", fusion_name)

    assert found(*names({"model": str(model)}, tmp_path)) == (True, True)  # started anew
    assert found(kv_name, fusion_name) == (False, change in KV_ONLY)


def test_every_change_has_a_name_of_its_own(model: Path, tmp_path: Path) -> None:
    changes = {k: c for k, c in (BOTH | KV_ONLY).items() if not callable(c)}
    found = [names({"model": str(model)} | change, tmp_path) for change in changes.values()]
    assert len({kv for kv, _ in found}) == len(changes)


def test_the_seed_of_the_hashes_is_part_of_the_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core import kv_cache_utils

    base = names({"model": str(model)}, tmp_path)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"another seed", raising=False)
    other = names({"model": str(model)}, tmp_path)
    assert other[0] != base[0]
    assert other[1] == base[1]


def test_ranks_and_layouts_are_apart(tmp_path: Path) -> None:
    store = KVStore.open(tmp_path, rank_namespace("ns", 0), LAYOUT)
    store.save_rows([b"h"], np.ones((1, 4), np.uint8))
    assert store.lookup([b"h"]) == 1
    assert KVStore.open(tmp_path, rank_namespace("ns", 1), LAYOUT).lookup([b"h"]) == 0
    backend = KVLayout(LAYOUT.layers, BLOCK, "another backend")
    assert KVStore.open(tmp_path, rank_namespace("ns", 0), backend).lookup([b"h"]) == 0


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
    """Both connectors' scheduler halves over one directory, as an engine that starts ``later`` seconds from now."""

    def __init__(self, folder: Path, *, later: float = 60.0) -> None:
        from semkv.connectors.ec import ECScheduler

        extents = ExtentStore(folder / "kv", "kv", Bounds())
        extents.put_layout("engine", 0, json.dumps(LAYOUT.document()))
        settings = KVSettings(folder)
        self.kv = KVScheduler(settings, extents, lambda: "ns", engine="engine", world_size=1, block_size=BLOCK)
        self.fusion = FusionStore.open(folder / "fusion", "ns")
        self.ec = ECScheduler(ECSettings(folder), self.fusion, "ns", SharedPool(folder, 0))
        self.kv._adapters = self.ec._adapters = Adapters(folder, time.time() + later)

    def serve(self, one: Any) -> tuple[int, bool]:
        """What is found for a request; what is not is stored, as an engine would."""
        tokens = self.kv.matched_tokens(one, 0)
        self.ec.observe(one)
        identifier = one.mm_features[0].identifier
        encoded = self.ec.has(identifier)
        self.kv.admitted(one, [1, 2, 3], tokens or 0)
        self.ec.allocated(one, 0)
        new = SimpleNamespace(req_id=one.request_id, block_ids=([1, 2, 3],), num_computed_tokens=tokens)
        none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        todo = {one.request_id: one.num_tokens - (tokens or 0)}
        output = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=none, num_scheduled_tokens=todo)
        for plan in self.kv.build_step(output).captures:
            rows = np.ones((len(plan.block_hashes), 4), np.uint8)
            KVStore(self.kv._extents, rank_namespace("ns", 0), LAYOUT).save_rows(plan.block_hashes, rows)
        for key in self.ec.build_step().saves.values():
            self.fusion.save(FusionState.from_array(key, np.ones((2, 4), np.float32)))
        self.kv.finished(one)
        self.ec.finished(one)
        return tokens or 0, encoded


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
    while time.time() < halves.kv._adapters._before + 0.1:
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
    stored = halves.kv._extents.totals()[1]
    assert halves.serve(request("3", lora_request=one)) == MISSED
    assert halves.kv._extents.totals()[1] == stored
    assert halves.kv.counters.totals()["lora_skipped"] == 1
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
