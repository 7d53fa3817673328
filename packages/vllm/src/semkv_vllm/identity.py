"""The namespace of a model in the stores: a digest of everything that shapes its KV blocks and encoder outputs.

vLLM calls for a reset when the weights may have changed. From then on an engine has a namespace of its own. vLLM calls
only the KV connector, which calls the encoder-cache connector of the same engine (`FOLLOWERS`): both have their
scheduler halves in one thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from semkv_stores.digests import digest, weight_files, weights_digest
from semkv_stores.errors import StoreError
from semkv_stores.files import read_bytes, replace_text
from semkv_vllm.configuration import (
    UnknownError,
    code,
    configuration,
    environment,
    files_in,
    hardware,
    plain,
    versions,
)

log = logging.getLogger("semkv.connectors")


def engine_name(vllm_config: Any, engine_id: object) -> str:
    """One name for all processes of this run of an engine; an ``engine_id`` may be several engines'."""
    replica = getattr(vllm_config.parallel_config, "data_parallel_index", 0)
    return f"{engine_id} {vllm_config.instance_id} {replica}"


def namespace_digest(*facts: dict[str, object]) -> str:
    return digest("namespace", *(json.dumps(f, sort_keys=True) for f in facts))


def model_facts(vllm_config: Any, cache_dir: Path) -> dict[str, object]:
    """What both stores must tell apart, as JSON values: all but what `configuration` knows to be harmless.

    Reads a local checkpoint in full the first time (`cached_weights_digest`).

    Raises:
        UnknownError: what the engine computes with cannot be told for certain.
    """
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise UnknownError(
            "a trainer may exchange the weights of a running engine, and vLLM tells connectors of no such exchange; "
            "leave out --weight-transfer-config"
        )
    model = vllm_config.model_config
    load = vllm_config.load_config
    speculative = vllm_config.speculative_config
    started = begun(vllm_config)
    facts: dict[str, object] = {
        "code": code(),
        "configuration": configuration(vllm_config, without=["cache_config"]),  # of KV only
        "environment": environment(),
        "generation": plain(model.try_get_generation_config()),  # Llama 4 computes by it
        "hardware": hardware(),
        "versions": versions(),
        "weights": weights_identity(model, load, cache_dir, started),
    }
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        facts["draft"] = weights_identity(
            draft, speculative.draft_load_config or load, cache_dir, started
        )
    for file in files_in(facts):
        check_settled([file], started)
    return facts


def kv_facts(vllm_config: Any, kv_cache_config: Any) -> dict[str, object]:
    """What only the KV blocks depend on. NONE_HASH is added once the engine has set it (`hash_facts`).

    Raises:
        UnknownError: as `model_facts`.
    """
    return {
        "cache": configuration(vllm_config.cache_config),
        "groups": [
            [repr(g.kv_cache_spec), list(g.layer_names)] for g in kv_cache_config.kv_cache_groups
        ],
        "model_runner": bool(vllm_config.use_v2_model_runner),
    }


def nobody_elses() -> dict[str, object]:
    """Facts of an engine whose own are unknown: what it computes is found by nobody else, through other tiers too."""
    return {"unknown": uuid.uuid4().hex}


def row_layout(offloading: Any) -> dict[str, object]:
    """How a row of host memory is made up, for the head of every block file; ``offloading`` is vLLM's
    OffloadingConfig."""
    return {
        "bytes_per_block": offloading.worker_kv_bytes_per_block,
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "groups": [
            [g.group_id, g.tokens_per_block, list(g.layer_names)] for g in offloading.groups
        ],
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


_FROM_THE_MODEL = frozenset(  # load formats that read weights from nowhere but the model's folder, file or repository
    "auto bitsandbytes fastsafetensors gguf hf instanttensor mistral npcache pt runai_streamer runai_streamer_sharded "
    "safetensors sharded_state".split()
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CLOCK_S = 1.0  # file systems keep times by a coarser clock


def begun(vllm_config: Any) -> float:
    """A moment before which the engine has read no weights, in seconds since the epoch: vLLM names a configuration by
    the nanosecond in which it was made. Where it does not, the start of this process."""
    name = str(vllm_config.instance_id)
    made = int(name) / 1e9 if name.isdecimal() else 0.0
    if 1e9 < made <= time.time():
        return made
    import psutil  # type: ignore[import-untyped]

    return float(psutil.Process().create_time())


def weights_identity(model: Any, load: Any, cache_dir: Path, started: float) -> str:
    """What tells a model's weights apart, of a ``ModelConfig`` and a ``LoadConfig`` of vLLM's.

    A local checkpoint by its bytes, dummy weights by configuration and seed, a hub model by its commit.

    Raises:
        UnknownError: they come from elsewhere, or may have been exchanged since the engine started.
    """
    load_format = str(load.load_format)
    if load_format == "dummy":
        return digest("dummy", model.hf_config.to_json_string(use_diff=False), str(model.seed))
    if load_format not in _FROM_THE_MODEL:
        raise UnknownError(
            f"load format {load_format} may read weights from anywhere; use --load-format auto"
        )
    path = Path(str(model.model_weights or model.model))
    if "://" in str(model.model_weights or model.model):
        raise UnknownError(
            f"what lies at {model.model_weights or model.model} may change; serve a copy on the disk"
        )
    _check_code(model, local=path.exists())
    if path.exists():
        value = cached_weights_digest(path, cache_dir / "weights")
        check_settled(_checkpoint_places(path), started)
        return value
    commit = str(getattr(model.hf_config, "_commit_hash", None) or model.revision)
    if not _COMMIT.fullmatch(commit):
        raise UnknownError(f"the commit of {path} is not known; pass it as --revision")
    if (
        now := _commit_in_cache(str(path), str(model.revision or "main"), load.download_dir)
    ) not in ("", commit):
        raise UnknownError(
            f"{path} came to be {now[:12]} while the engine started; start it again, or pass --revision"
        )
    return digest("hub", str(path), commit)


def _check_code(model: Any, *, local: bool) -> None:
    """Raise an `UnknownError` where code from a hub shapes the model and is not pinned. The code in a local folder, and
    that of a hub model's own commit, is among the weights."""
    code = getattr(model.hf_config, "auto_map", None)
    if not model.trust_remote_code or not isinstance(code, dict):
        return
    elsewhere = any("--" in str(place) for place in code.values())
    if (elsewhere or (model.code_revision and not local)) and not _COMMIT.fullmatch(
        str(model.code_revision)
    ):
        raise UnknownError(
            f"{model.model} runs code from a hub; pass its commit as --code-revision"
        )


def _commit_in_cache(repository: str, revision: str, download_dir: str | None) -> str:
    """Which commit a branch of a hub repository was when it was last asked for; empty where that is not noted."""
    from huggingface_hub import constants, file_download

    root = Path(download_dir or constants.HF_HUB_CACHE)
    folder = file_download.repo_folder_name(repo_id=repository, repo_type="model")
    try:
        return (root / folder / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        return ""


def check_settled(places: Iterable[Path], started: float) -> None:
    """Raise an `UnknownError` where one of some places was changed, or put there, since the engine started or just
    before: the engine may have read what was there earlier."""
    for place in places:
        if place.lstat().st_ctime >= started - _CLOCK_S:
            raise UnknownError(
                f"{place} was changed when the engine started or later; start it again"
            )


def _checkpoint_places(model: Path) -> set[Path]:
    """The files of a checkpoint, their folders, and the links that lead there."""
    root = model.resolve()
    files = weight_files(root) if root.is_dir() else [root]
    folders = {folder for file in files for folder in file.parents if folder.is_relative_to(root)}
    return {*_links(model), root, *folders, *files, *(file.resolve() for file in files)}


def cached_weights_digest(model: Path, cache_dir: Path) -> str:
    """`keys.weights_digest`, computed once per state of the files (their names, sizes and times in nanoseconds).

    Among the times is that of the last change of the inode, which a copy that keeps the other times cannot keep.

    A file that cannot be written costs time at the next start and nothing else.
    """
    files = weight_files(model) if model.is_dir() else [model]
    state = [[str(p), (s := p.stat()).st_size, s.st_mtime_ns, s.st_ctime_ns] for p in files]
    note = cache_dir / (digest("path", str(model.resolve())) + ".json")
    try:
        known = json.loads(read_bytes(note))
        if known["files"] == state:
            return str(known["digest"])
    except (OSError, StoreError, ValueError, KeyError, TypeError):
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
        log.warning(
            "semkv: a connector could not be called after a change of weights", exc_info=True
        )
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
            log.warning(
                "semkv: nothing is kept for adapter %s: %s is no directory older than the engine",
                key[0],
                path,
            )
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
    yield from _links(path)
    yield path.resolve()
    for place in path.resolve().rglob("*"):
        yield place
        if place.is_symlink():
            yield place.resolve()


def _links(path: Path) -> Iterator[Path]:
    yield from (
        place for place in (path.absolute(), *path.absolute().parents) if place.is_symlink()
    )
