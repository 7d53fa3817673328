"""The ``semkv run`` command that repeats an experiment, from the settings its row holds."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from semkv_lab.html.log import listed

# Settings by the flag that gives them; all take a value.
_VALUES = {
    "--preset": ("preset",), "--model": ("model",), "--revision": ("revision",), "--max-model-len": ("max_model_len",),
    "--max-tokens": ("max_tokens",), "--engine": ("engine",), "--tenant": ("tenant",), "--dataset": ("dataset",),
    "--dataset-root": ("data", "root"), "--dataset-config": ("data", "config"), "--dataset-repo": ("data", "repo"),
    "--split": ("data", "split"), "--max-samples": ("data", "max_samples"),
    "--shuffle-seed": ("data", "shuffle_seed"), "--chunk-source": ("chunk_source",),
    "--chunk-window": ("chunk_window",), "--similarity-threshold": ("cache", "similarity_threshold"),
    "--embedding-hook": ("cache", "embedding_hook"), "--vision-encoder": ("cache", "vision_encoder"),
    "--index-encoder": ("cache", "index_encoder"), "--match": ("cache", "match"), "--scope": ("cache", "scope"),
    "--cache-mode": ("cache", "mode"), "--policy": ("cache", "policy"),
    "--max-error-rate": ("cache", "max_error_rate"), "--calibration": ("cache", "calibration"),
    "--verify-rate": ("cache", "verify_rate"), "--max-entries": ("cache", "max_entries"),
    "--trace": ("trace", "kind"), "--trace-seed": ("trace", "seed"), "--trace-requests": ("trace", "requests"),
    "--trace-exponent": ("trace", "exponent"),
}  # fmt: skip
_SWITCHES = {
    "--disable-semantic-cache": "semantic", "--disable-exact-cache": "exact", "--disable-normalised-hits": "normalised",
    "--disable-guards": "guards",
}  # fmt: skip
_DEFAULTS: Mapping[str, Any] = {
    "--engine": "vllm", "--dataset-repo": "lmms-lab/GQA", "--chunk-source": "question", "--chunk-window": 0,
    "--index-encoder": "all-MiniLM-L6-v2", "--match": "all", "--scope": "media", "--cache-mode": "live",
    "--policy": "fixed", "--max-error-rate": 0.01, "--max-entries": 100_000,
    "--trace": "in-order", "--trace-seed": 0, "--trace-exponent": 0.99,
}  # fmt: skip
_MEDIA_BYTES = 4 << 30  # by default


def run_command(settings: Mapping[str, Any]) -> str:
    """A command line with every setting that is not a default; folders of caches and results are left to the user."""
    return shlex.join(["semkv", "run", *_flags(settings)])


def _flags(settings: Mapping[str, Any]) -> Iterator[str]:
    cache = settings.get("cache")
    cache = cache if isinstance(cache, Mapping) else {}
    preset = settings.get("preset")
    for flag, path in _VALUES.items():
        value = _at(settings, path)
        if value in (None, "") or value == _DEFAULTS.get(flag) or (preset and flag in ("--model", "--vision-encoder")):
            continue
        yield from (flag, str(value))
    for layer in listed(cache.get("embedding_layers")):
        if isinstance(layer, Mapping):
            yield from ("--embedding-layer", f"{layer.get('name')}:{layer.get('dim')}:{layer.get('threshold')}")
    for flag, off in _SWITCHES.items():
        if cache.get(off) is False:
            yield flag
    if "fusion" in cache:
        yield "--enable-fusion-cache" if cache["fusion"] else "--disable-fusion-cache"
    if cache.get("max_cached_blocks"):
        yield from ("--max-cached-blocks", str(cache["max_cached_blocks"]))
    media = cache.get("max_media_bytes")
    if isinstance(media, int) and media != _MEDIA_BYTES:
        yield from ("--media-mib", str(media >> 20))
    if settings.get("trust_remote_code") and not preset:
        yield "--trust-remote-code"
    if settings.get("baseline"):
        yield "--baseline"


def _at(settings: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = settings
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
