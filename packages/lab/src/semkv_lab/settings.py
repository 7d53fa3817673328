"""Settings of a run: what the user gave, filled in from a preset, checked before anything heavy starts."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from semkv.config import (
    IMAGE_ROOT_VARIABLES,
    CacheConfig,
    check_threshold,
    default_cache_dir,
    parse_choice,
    parse_embedding_layer,
)
from semkv.errors import ConfigError
from semkv.presets import DEFAULT_PRESET, Preset, get_preset
from semkv.types import CacheMode, EmbeddingLayer, MatchPolicy, PolicyName, Scope
from semkv_lab.console import SETTINGS, keep_apart
from semkv_lab.datasets import DATASETS
from semkv_lab.flags import RunFlags
from semkv_lab.requests import ZIPF_EXPONENT, ChunkSource, Trace, TraceKind
from semkv_lab.samples import GQA_REPO, DatasetOptions

_LARGEST = 10**18
ENGINES = ("vllm", "scripted", "labels")

_T = TypeVar("_T")
# Layers that a built-in hook cannot fill are dropped from a preset when the user names that hook.
_HOOK_LAYERS = {"none": frozenset[str](), "prompt": frozenset({"prompt"}), "vision": frozenset({"vision"})}


@dataclass(frozen=True)
class RunSettings:
    """Everything a run needs, resolved and checked.

    Attributes:
        cache: settings of the tiers and stores.
        dataset, data: which samples.
        preset: the preset's name; empty when ``--model`` was given without one.
        model, revision, trust_remote_code, max_model_len, max_tokens, tenant, engine: what answers.
        instruction: appended to every question.
        chunk_source, chunk_window: what the tiers match on.
        trace: in which order and how often the samples are asked.
        baseline: answer every sample with vLLM's own prefix cache alone first.
        baseline_from: take those answers from an earlier run's samples file instead.
        purge: empty the cache folders before the run.
        samples_out, summary_out: files to write.
    """

    preset: str
    model: str
    revision: str | None
    trust_remote_code: bool
    max_model_len: int | None
    max_tokens: int
    tenant: str
    engine: str
    instruction: str
    dataset: str
    data: DatasetOptions
    chunk_source: ChunkSource
    chunk_window: int
    cache: CacheConfig
    trace: Trace
    baseline: bool
    baseline_from: Path | None
    purge: bool
    samples_out: Path | None
    summary_out: Path | None

    def to_json(self) -> dict[str, Any]:
        """The settings as plain values, for the header of a results file."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def default_data_dir() -> Path:
    """Where drawn and unpacked data goes: beside the default cache directory."""
    return Path("~/.cache/semkv-data").expanduser()


def resolve(flags: RunFlags) -> RunSettings:
    """Fill in what was not given, from the preset and then from defaults.

    ``--model`` without ``--preset`` starts from an empty preset: no layers, GQA as the data set.

    Raises:
        ConfigError: a value is not allowed; the message names the flag, the value and what is allowed.
    """
    _check_values(flags)
    preset_name = flags.preset or ("" if flags.model else DEFAULT_PRESET)
    preset = get_preset(preset_name) if preset_name else Preset(model=str(flags.model))
    dataset = _dataset(flags, preset)
    layers, hook = _layers(flags, preset)
    settings = RunSettings(
        preset=preset_name,
        model=flags.model or preset.model,
        revision=flags.revision,
        trust_remote_code=_or(flags.trust_remote_code, preset.trust_remote_code),
        max_model_len=_positive("--max-model-len", _or(flags.max_model_len, preset.max_model_len)),
        max_tokens=_positive("--max-tokens", _or(flags.max_tokens, preset.max_tokens)) or 1,
        tenant=flags.tenant or "",
        engine=_one_of("--engine", flags.engine or ENGINES[0], ENGINES),
        instruction=preset.instruction if dataset == "gqa" else "",
        dataset=dataset,
        data=DatasetOptions(
            data_dir=flags.data_dir or default_data_dir(),
            root=_existing("--dataset-root", flags.dataset_root),
            config=flags.dataset_config or "",
            split=flags.split or "",
            max_samples=flags.max_samples,
            shuffle_seed=flags.shuffle_seed,
            repo=flags.dataset_repo or GQA_REPO,
        ),
        chunk_source=parse_choice("--chunk-source", flags.chunk_source or ChunkSource.QUESTION, ChunkSource),
        chunk_window=_not_negative("--chunk-window", flags.chunk_window or 0),
        cache=_cache(flags, preset, layers, hook),
        trace=_trace(flags),
        baseline=flags.baseline or flags.baseline_from is not None,
        baseline_from=_existing("--baseline-from", flags.baseline_from),
        purge=flags.purge,
        samples_out=_writable("--samples-out", flags.samples_out),
        summary_out=_writable("--summary-out", flags.summary_out),
    )
    check_files(settings)
    return settings


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold a text: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_values(flags: RunFlags) -> None:
    for field, value in vars(flags).items():
        key = "--" + field.replace("_", "-")
        if isinstance(value, int) and abs(value) >= _LARGEST:
            raise ConfigError(key, f"{str(value)[:20]}...", "a whole number of less than 19 digits")
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not is_unicode(text):
                raise ConfigError(key, text, "a text in valid Unicode")


def check_files(settings: RunSettings) -> None:
    """Refuse settings that write over what they read.

    Raises:
        ConfigError: names the two settings.
    """
    dataset = Path(settings.dataset) if settings.dataset.endswith(".jsonl") else None
    samples = settings.samples_out
    keep_apart(
        {
            "--samples-out": samples,
            "--summary-out": settings.summary_out,
            "the settings beside --samples-out": samples and samples.with_name(samples.name + SETTINGS),
        },
        {
            "--dataset": dataset,
            "--dataset-root": settings.data.root,
            "--baseline-from": settings.baseline_from,
            "--calibration": settings.cache.calibration,
        },
    )


def _trace(flags: RunFlags) -> Trace:
    return Trace(
        kind=parse_choice("--trace", flags.trace or TraceKind.IN_ORDER, TraceKind),
        seed=flags.trace_seed or 0,
        requests=flags.trace_requests,
        exponent=_or(flags.trace_exponent, ZIPF_EXPONENT),
    )


def _cache(flags: RunFlags, preset: Preset, layers: tuple[EmbeddingLayer, ...], hook: str) -> CacheConfig:
    config = CacheConfig(
        cache_dir=flags.cache_dir or default_cache_dir(),
        fusion_cache_dir=flags.fusion_cache_dir,
        mode=parse_choice("--cache-mode", flags.cache_mode or CacheMode.LIVE, CacheMode),
        match=parse_choice("--match", flags.match or MatchPolicy.ALL, MatchPolicy),
        scope=parse_choice("--scope", flags.scope or Scope.MEDIA, Scope),
        guards=not flags.disable_guards,
        policy=parse_choice("--policy", flags.policy or PolicyName.FIXED, PolicyName),
        max_error_rate=_or(flags.max_error_rate, 0.01),
        calibration=_existing("--calibration", flags.calibration),
        verify_rate=flags.verify_rate,
        exact=not flags.disable_exact_cache,
        normalised=not flags.disable_normalised_hits,
        semantic=not flags.disable_semantic_cache,
        fusion=_or(flags.enable_fusion_cache, preset.fusion),
        similarity_threshold=check_threshold(
            "--similarity-threshold", _or(flags.similarity_threshold, preset.similarity_threshold)
        ),
        embedding_layers=layers,
        embedding_hook=hook,
        vision_encoder=_or(flags.vision_encoder, preset.vision_encoder),
        image_roots=_image_roots(flags),
        max_cached_blocks=flags.max_cached_blocks or 0,
        max_entries=_or(flags.max_entries, CacheConfig.max_entries),
        max_media_bytes=_or(_positive("--media-mib", flags.media_mib), CacheConfig.max_media_bytes >> 20) << 20,
    )
    return replace(config, index_encoder=flags.index_encoder) if flags.index_encoder else config


def _layers(flags: RunFlags, preset: Preset) -> tuple[tuple[EmbeddingLayer, ...], str]:
    hook = _or(flags.embedding_hook, preset.embedding_hook)
    if flags.embedding_layer is not None:
        return tuple(parse_embedding_layer(spec) for spec in flags.embedding_layer), hook
    layers = tuple(parse_embedding_layer(spec) for spec in preset.embedding_layers)
    return tuple(layer for layer in layers if layer.name in _HOOK_LAYERS.get(hook, {layer.name})), hook


def _dataset(flags: RunFlags, preset: Preset) -> str:
    name = flags.dataset or preset.dataset
    if name not in DATASETS and not name.endswith(".jsonl"):
        raise ConfigError("--dataset", name, [*DATASETS, "a file that ends in .jsonl"])
    return name


def _image_roots(flags: RunFlags) -> tuple[Path, ...]:
    roots = [Path(os.environ[name]) for name in IMAGE_ROOT_VARIABLES if os.environ.get(name)]
    if flags.dataset_root is not None and (flags.dataset_root / "images").is_dir():
        roots.append(flags.dataset_root / "images")
    return tuple(roots)


def _or(given: _T | None, default: _T) -> _T:
    return default if given is None else given


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(key, value, allowed)
    return value


def _positive(key: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(key, value, "a positive number")
    return value


def _not_negative(key: str, value: int) -> int:
    if value < 0:
        raise ConfigError(key, value, "0 or a positive number")
    return value


def _existing(key: str, path: Path | None) -> Path | None:
    if path is not None and not path.exists():
        raise ConfigError(key, str(path), "a file or folder that exists")
    return path


def _writable(key: str, path: Path | None) -> Path | None:
    if path is not None and path.is_dir():
        raise ConfigError(key, str(path), "a file, not a folder")
    return path
