"""The namespace of a model in the stores: a digest of everything that shapes its KV blocks and encoder outputs.

A reset is vLLM's word for weights that may be others from now on; then an engine goes on under a namespace of its own.
vLLM tells the KV connector only, which passes the word on to the encoder-cache connector of the same engine
(`FOLLOWERS`): both have their scheduler halves in one thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from semkv_stores.digests import digest, weight_files, weights_digest
from semkv_stores.files import replace_text

log = logging.getLogger("semkv.connectors")

_MEDIA = (  # settings of vLLM's media processor that shape pixels, placeholders or the encoder's arithmetic
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_encoder_tp_mode",
    "interleave_mm_strings",
)
_LORA = ("max_lora_rank", "lora_dtype", "fully_sharded_loras", "enable_tower_connector_lora")


def engine_name(vllm_config: Any, engine_id: object) -> str:
    """One name for all processes of this run of an engine; an ``engine_id`` may be several engines'."""
    replica = getattr(vllm_config.parallel_config, "data_parallel_index", 0)
    return f"{engine_id} {vllm_config.instance_id} {replica}"


def namespace_digest(*facts: dict[str, object]) -> str:
    return digest("namespace", *(json.dumps(f, sort_keys=True, default=str) for f in facts))


def model_facts(vllm_config: Any, cache_dir: Path) -> dict[str, object]:
    """What both stores must tell apart, as JSON values.

    Reads a local checkpoint in full the first time (`cached_weights_digest`).
    """
    import vllm
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    speculative, lora = vllm_config.speculative_config, vllm_config.lora_config
    try:
        device = str(current_platform.get_device_name())
    except (NotImplementedError, RuntimeError):
        device = ""
    media = getattr(model, "multimodal_config", None)
    facts: dict[str, object] = {
        "vllm": vllm.__version__,
        "device": [current_platform.device_type, platform.machine(), device],
        "model": str(model.model),
        "revision": str(model.revision),
        "weights": weights_identity(vllm_config, cache_dir),
        "config": digest(model.hf_config.to_json_string(use_diff=False)),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "speculative": None if speculative is None else [str(speculative.method), str(speculative.model)],
        "media": {key: repr(getattr(media, key, None)) for key in _MEDIA},
    }
    if lora is not None:  # how adapters are applied; which one, is in each request's keys
        facts["lora"] = [repr(getattr(lora, key, None)) for key in _LORA]
    return facts


def kv_facts(vllm_config: Any, kv_cache_config: Any) -> dict[str, object]:
    """What only the KV blocks depend on. NONE_HASH is added once the engine has set it (`hash_facts`)."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    return {
        "cache": {key: str(value) for key, value in vars(cache).items() if "dtype" in key or "mamba" in key},
        "block_size": cache.block_size,
        "groups": [[repr(g.kv_cache_spec), list(g.layer_names)] for g in kv_cache_config.kv_cache_groups],
        "attention": repr(vllm_config.attention_config),
        "context_parallel": [parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size],
        "model_runner": bool(vllm_config.use_v2_model_runner),
    }


def row_layout(offloading: Any) -> dict[str, object]:
    """How a row of host memory is made up, for the head of every block file; ``offloading`` is vLLM's
    OffloadingConfig."""
    return {
        "bytes_per_block": offloading.worker_kv_bytes_per_block,
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "groups": [[g.group_id, g.tokens_per_block, list(g.layer_names)] for g in offloading.groups],
        "ranks": [offloading.parallel.tp_size, offloading.parallel.pp_size],
        "one_copy": offloading.replicated_layout,
        "kv_cache_layout": str(offloading.kv_cache_layout),
    }


def hash_facts(vllm_config: Any) -> dict[str, object]:
    """Algorithm and seed of vLLM's block hashes; available once the engine core is up."""
    from vllm.v1.core import kv_cache_utils

    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if "xxhash" in algorithm and "PYTHONHASHSEED" not in os.environ:
        log.warning(
            "semkv: %s seeds its block hashes at random, so nothing stored is found after a restart; "
            "set PYTHONHASHSEED, or use --prefix-caching-hash-algo sha256_cbor",
            algorithm,
        )
    return {"hash": algorithm, "none_hash": bytes(getattr(kv_cache_utils, "NONE_HASH", b"")).hex()}


# ---------------------------------------------------------------------- weights


def weights_identity(vllm_config: Any, cache_dir: Path) -> str:
    """What tells a model's weights apart.

    A local checkpoint by its bytes, dummy weights by configuration and seed, a hub model by its commit. A hub model
    whose commit is unknown goes by its name alone, with a warning.
    """
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    if "dummy" in load_format.lower():
        return digest("dummy", model.hf_config.to_json_string(use_diff=False), str(model.seed))
    path = Path(model.model)
    if path.exists():
        return cached_weights_digest(path, cache_dir / "weights")
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if not commit:
        log.warning("semkv: the revision of %s is unknown; pass --revision so that new weights are told apart", path)
    return digest("hub", str(model.model), str(commit))


def cached_weights_digest(model: Path, cache_dir: Path) -> str:
    """`keys.weights_digest`, computed once per state of the files (their names, sizes and times in nanoseconds).

    Among the times is that of the last change of the inode, which a copy that keeps the other times cannot keep.

    A file that cannot be written costs time at the next start and nothing else.
    """
    files = weight_files(model) if model.is_dir() else [model]
    state = [[str(p), (s := p.stat()).st_size, s.st_mtime_ns, s.st_ctime_ns] for p in files]
    note = cache_dir / (digest("path", str(model.resolve())) + ".json")
    try:
        known = json.loads(note.read_text())
        if known["files"] == state:
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not noted yet, or the note is damaged
    if model.is_dir():
        value = weights_digest(model)
    else:
        with model.open("rb") as f:
            value = hashlib.file_digest(f, "sha256").hexdigest()
    try:
        cache_dir.mkdir(0o700, parents=True, exist_ok=True)
        replace_text(note, json.dumps({"files": state, "digest": value}), private=True)
    except OSError as error:
        log.warning("semkv: cannot note the digest of %s (%s)", model, error)
    return value


# ---------------------------------------------------------------------- other weights from now on

FOLLOWERS: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Whose ``reset`` is called when the weights of an engine (by vLLM's ``instance_id``) may be others."""


def may_have_changed(engine: str) -> bool:
    """The weights of ``engine`` may be others from now on; whether its follower knows."""
    try:
        if (follower := FOLLOWERS.get(engine)) is not None:
            follower.reset()
    except Exception:
        log.warning("semkv: a connector could not be told of other weights", exc_info=True)
        return False
    return True


def namespace_after(namespace: str) -> str:
    """A namespace that nobody else has, for what an engine computes from now on."""
    return digest("after reset", namespace, uuid.uuid4().hex)


# ---------------------------------------------------------------------- LoRA adapters
#
# vLLM's block hashes and media identifiers know an adapter by its name, in later versions by its path too; either may
# come to mean other weights. Here an adapter goes by the digest of its files. Which weights the engine holds cannot be
# asked, so an adapter is known only while its files are as they were before the engine started: then whatever the
# engine has read of them is what they say. Any other adapter's requests are left alone.

_CLOCK_S = 1.0  # file systems keep times by a coarser clock


class Adapters:
    """The adapters of one engine. For one thread."""

    def __init__(self, cache_dir: Path, started: float | None = None) -> None:
        """``started``: no adapter can have been loaded before, in seconds since the epoch; now by default."""
        self._notes = cache_dir / "weights"
        self._before = (time.time() if started is None else started) - _CLOCK_S
        self._known: dict[tuple[str, int], str] = {}
        self._refused: set[tuple[str, int]] = set()

    def identity(self, lora_request: Any) -> str | None:
        """A digest of the adapter's weights; empty for no adapter, None where they are not known for certain."""
        if lora_request is None:
            return ""
        key = (str(lora_request.lora_name), int(lora_request.lora_int_id))
        if key in self._refused:
            return None
        path = Path(lora_request.lora_path)
        try:
            value = self._digest(path) if path.is_dir() else ""
        except OSError as error:
            log.warning("semkv: cannot read the adapter %s (%s)", path, error)
            value = ""
        if not value or self._known.setdefault(key, value) != value:
            log.warning("semkv: nothing is kept for adapter %s: %s is no directory older than the engine", key[0], path)
            self._refused.add(key)  # for good: the engine may hold what was there before
            return None
        return digest("lora", value, repr(getattr(lora_request, "is_3d_lora_weight", False)))

    def _digest(self, path: Path) -> str:
        """Of the files' bytes; empty where one was changed, or put there, since the engine started."""
        if max(place.lstat().st_ctime for place in _places(path)) >= self._before:
            return ""
        return cached_weights_digest(path, self._notes)


def _places(path: Path) -> Iterator[Path]:
    """The directory, what is in it, and the links that lead there: a change of any of them changes its time."""
    yield from (place for place in (path.absolute(), *path.absolute().parents) if place.is_symlink())
    yield path.resolve()
    for place in path.resolve().rglob("*"):
        yield place
        if place.is_symlink():
            yield place.resolve()
