"""The flags of the commands, each stated once: name, type, default and help.

The command line and the spec of a sweep are made from these classes. Nothing heavy is imported here.
"""

# ruff: noqa: RUF009 (flag, required and switch make fields)

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from semkv.errors import ConfigError

_Command = TypeVar("_Command", bound=Callable[..., None])


def flag(help: str, default: Any = None, *, name: str = "", metavar: str | None = None) -> Any:  # noqa: A002
    """A field that is a flag with a value; its own name makes the flag's unless one is given."""
    option = typer.Option(*([name] if name else []), help=help, metavar=metavar)
    return field(default=default, metadata={"option": option})


def required(help: str) -> Any:  # noqa: A002
    """A field that is a flag which must be given."""
    return field(metadata={"option": typer.Option(help=help)})


def switch(help: str) -> Any:  # noqa: A002
    """A field that is a flag without a value."""
    return field(default=False, metadata={"option": help})


def takes(kind: type) -> Callable[[_Command], _Command]:
    """Lets a command take one dataclass of flags: on the command line its fields stand in that parameter's place."""

    def parameters() -> list[inspect.Parameter]:
        found, hints = [], get_type_hints(kind)
        for f in fields(kind):
            option, hint = f.metadata["option"], hints[f.name]
            if isinstance(option, str):
                option = typer.Option("--" + f.name.replace("_", "-"), help=option)
            hint = list[str] | None if "tuple" in str(hint) else hint
            default = f.default if f.default is not MISSING else inspect.Parameter.empty
            found.append(_parameter(f.name, Annotated[hint, option], default))
        return found

    def decorate(command: _Command) -> _Command:
        hints = get_type_hints(command, include_extras=True)
        own = inspect.signature(command).parameters.values()
        (place,) = [p.name for p in own if hints[p.name] is kind]
        every = []
        for p in own:
            every += parameters() if p.name == place else [_parameter(p.name, hints[p.name], p.default)]

        @wraps(command)
        def call(**given: Any) -> None:
            values = {f.name: given.pop(f.name) for f in fields(kind)}
            values = {name: tuple(v) or None if isinstance(v, list) else v for name, v in values.items()}
            command(**given, **{place: kind(**values)})

        call.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in every}
        return call  # type: ignore[return-value]

    return decorate


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


@dataclass(frozen=True)
class RunFlags:
    """``semkv run`` as it was given; None means not given. Field names are the flags' own, ``-`` as ``_``."""

    preset: str | None = flag(
        "minigqa (default), opt-125m, qwen3-vl-2b, internvl3.5-2b or qwen2.5-vl-7b: fills in whatever is not "
        "given here."
    )
    model: str | None = flag("A checkpoint's directory, or a hub id.")
    revision: str | None = flag("Revision of a hub id.")
    trust_remote_code: bool | None = flag(
        "Run model code that the checkpoint brings.", name="--trust-remote-code/--no-trust-remote-code"
    )
    max_model_len: int | None = flag("Longest prompt plus answer, in tokens.")
    max_tokens: int | None = flag("Longest answer, in tokens.")
    engine: str | None = flag(
        "vllm (default); scripted: no model, for trying settings; labels: the data set's own answers."
    )
    tenant: str | None = flag("Partitions every cache; tenants share nothing.")
    dataset: str | None = flag("minigqa, gqa, gqa-text, jsonl, or a .jsonl file.")
    dataset_root: Path | None = flag("Folder (or .jsonl file) with the data; for GQA also GQA_ROOT.")
    dataset_config: str | None = flag("Such as val_balanced_instructions.")
    dataset_repo: str | None = flag("Hub id of GQA (lmms-lab/GQA).")
    split: str | None = flag("train, val, testdev ...")
    max_samples: int | None = flag("At most so many samples.")
    shuffle_seed: int | None = flag("Shuffle with this seed before cutting.")
    chunk_source: str | None = flag("What the tiers match on: question (default), semantic, group, combined, full.")
    chunk_window: int | None = flag("Match on the first N characters only (0: all).")
    similarity_threshold: float | None = flag("Least cosine of the semantic text tier.")
    embedding_layer: tuple[str, ...] | None = flag(
        "A layer of the embedding tier, such as prompt:384:0.8; may be repeated.", metavar="NAME:DIM[:THRESHOLD]"
    )
    embedding_hook: str | None = flag("none, prompt, vision, prompt_vision, or package.module:Factory.")
    vision_encoder: str | None = flag("Tower behind the vision layer: id or directory.")
    index_encoder: str | None = flag("Sentence encoder of the text tiers: id or directory.")
    match: str | None = flag("all (default): text and image must match. any: one layer decides.")
    scope: str | None = flag("media (default): text matches on the same image only. any.")
    disable_semantic_cache: bool = switch("Without the semantic text tier.")
    disable_guards: bool = switch("Let the score alone decide, whatever words changed.")
    policy: str | None = flag("Who has the last word on an approximate match: fixed (default), calibrated, bounded.")
    max_error_rate: float | None = flag("Wrong approximate answers per request that --policy bounded allows (0.01).")
    calibration: Path | None = flag("What `semkv calibrate` wrote.")
    verify_rate: float | None = flag(
        "Share of approximate hits that are also answered unchanged and compared (bounded: 0.1)."
    )
    disable_exact_cache: bool = switch("Without the exact text tier.")
    disable_normalised_hits: bool = switch(
        "Only byte-equal texts are the same. A question, or a few sentences of a context, that differ in "
        "typing are similar at most: other tiers that are on still find them, mostly at a cosine near 1, "
        "where threshold, guards and policy let them."
    )
    cache_mode: str | None = flag("live (default), dry-run: look up but send requests unchanged, off: nothing of ours.")
    cache_dir: Path | None = flag("Where the cache lives (SEMKV_CACHE_DIR or ~/.cache/semkv).")
    enable_fusion_cache: bool | None = flag(
        "Keep the vision encoder's outputs.", name="--enable-fusion-cache/--disable-fusion-cache"
    )
    fusion_cache_dir: Path | None = flag("Keep them elsewhere than under --cache-dir.")
    max_cached_blocks: int | None = flag("Bound on stored KV blocks (0: by bytes alone).")
    max_entries: int | None = flag("Bound on entries in the catalog (100,000); the least recently used go first.")
    media_mib: int | None = flag("Bound on stored images (4096).")
    purge: bool = switch("Empty the cache first; touches nothing semkv did not write.")
    data_dir: Path | None = flag("Where drawn and unpacked data goes (~/.cache/semkv-data).")
    baseline: bool = switch("Run the samples with vLLM's prefix cache alone first.")
    baseline_from: Path | None = flag("Take the baseline from a --samples-out of an earlier run with --baseline.")
    trace: str | None = flag("Order of the requests: in-order (default), shuffled, zipf (over images), sessions.")
    trace_seed: int | None = flag("Seed of the trace's draws.")
    trace_requests: int | None = flag("So many requests, samples repeating as need be.")
    trace_exponent: float | None = flag("Exponent of --trace zipf (0.99).")
    samples_out: Path | None = flag("Write a JSON object a sample to this file.")
    summary_out: Path | None = flag("Write the figures to this JSON file.")


@dataclass(frozen=True)
class SweepFlags:
    """``semkv sweep``."""

    specs: Path = required("Experiments in JSON or TOML: defaults, and a list with a name each.")
    log_file: Path = required("CSV with a row an experiment; JSON lines are written beside it.")
    samples_dir: Path = required("For a samples file and the output of each experiment.")
    resume: bool = switch("Go on with this log; skip what it has.")
    retry_failed: bool = switch("With --resume: run again what failed.")
    purge_cache_between_runs: bool = switch("Empty the cache even where the spec names one.")
    only: tuple[str, ...] | None = flag("Run this experiment alone; may be repeated.", metavar="NAME")
    executor: str = flag("local: one after the other. ray: over a cluster.", "local")
    ray_address: str | None = flag("Of a running Ray cluster, such as auto.")

    def __post_init__(self) -> None:
        if self.retry_failed and not self.resume:
            raise ConfigError("--retry-failed", True, "--resume beside it")


@dataclass(frozen=True)
class QualityFlags:
    """What ``semkv eval-pairs`` and ``semkv eval-stream`` share."""

    policy: str = flag("fixed, calibrated or bounded.", "fixed")
    similarity_threshold: float = flag("Least cosine of the fixed policy.", 0.92)
    max_error_rate: float = flag("Wrong approximate answers per request that the bounded policy allows.", 0.01)
    calibration: Path | None = flag("What `semkv calibrate` wrote.")
    verify_rate: float | None = flag("Share of approximate hits to check (bounded: 0.1; fixed, calibrated: 0).")
    disable_guards: bool = switch("Without guards.")
    index_encoder: str = flag("Sentence encoder: id or directory.", "all-MiniLM-L6-v2")
    seed: int = flag("Of the sample that is checked.", 0)
