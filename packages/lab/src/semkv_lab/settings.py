"""Settings of a run. What is not given comes from the preset, then from the defaults."""
# The command line reads the annotations of fields: they must be values, not texts.

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Argument, ArgumentCollection, Parameter, Token

from semkv import plug
from semkv.command_line import parse
from semkv.config import (
    DEFAULT_PRESET,
    IMAGE_ROOT_VARIABLES,
    NEAR,
    CacheConfig,
    PolicyConfig,
    get_preset,
)
from semkv.errors import ConfigError
from semkv_lab.console import keep_apart
from semkv_lab.datasets import DATASETS
from semkv_lab.samples import ChunkSource, DatasetOptions
from semkv_stores.settings import (
    COSINE,
    EXISTS,
    NO_FOLDER,
    NOT_NEGATIVE,
    POSITIVE,
    SOME_SHARE,
    Allowed,
    Needs,
    check,
)

ENGINES = ("labels", "scripted", "transformers", "vllm")
ENGINE = Allowed(
    f"one of {', '.join(ENGINES)}, or {plug.FORM}",
    lambda name: name in ENGINES or plug.is_path(name),
)
BLENDING = Needs("--reuse blend", lambda given: given.reuse == "blend")
PARTS = Needs("no --board, which has parts of its own", lambda given: given.board is None)
ON_RAY = Needs("--ray", lambda given: given.ray)
MODEL = Parameter(group="Model")
MATCHED = Parameter(group="What the tiers match on")
DATA = Parameter(group="Data")
RESULTS = Parameter(group="Results")
FLAT = Parameter(name="*")
SWITCH = Parameter(negative="")
MANY = Parameter(consume_multiple=True)

# Layers that a built-in hook cannot fill are dropped from a preset when the user names that hook.
_HOOK_LAYERS = {
    "none": frozenset[str](),
    "prompt": frozenset({"prompt"}),
    "vision": frozenset({"vision"}),
}


Match = Literal["all", "any"]
Board = Literal["fow-cache"]
Reuse = Literal["inputs", "prefix", "literal", "blend"]
"""What is used of a donor; see `semkv_lab.reuse`."""


@dataclass(frozen=True)
class RunSettings:
    """Everything that ``semkv run`` needs.

    Attributes:
        preset: minigqa (the default without a model), opt-125m, qwen3-vl-2b, internvl3.5-2b or qwen2.5-vl-7b: fills in
            what is not given.
        model: A checkpoint's directory, or a hub id. Without a preset: no layers, and GQA as the data set.
        revision: Revision of a hub id.
        trust_remote_code: Run model code that the checkpoint brings.
        max_model_len: Longest prompt plus answer, in tokens.
        max_tokens: Longest answer, in tokens; by default the preset's, then 16.
        engine: vllm; transformers: plain and slow, to compare --reuse; scripted: no model, for trying settings;
            labels: the data set's own answers; or package.module:Factory.
        reuse: What a hit uses: inputs (semkv: the donor's prompt is sent); or, to compare, with --engine transformers:
            prefix (a prefix cache alone), literal (the donor's KV under the request's own tokens), blend (KV of shared
            tokens, a part computed again).
        blend_share: Share of the shared tokens that blend computes again.
        match: all (text and image must match) or any (one layer decides, without guards).
        tenant: Partitions every cache; tenants share nothing.
        dataset: minigqa, minigqa-text, gqa, jsonl, a .jsonl file, or package.module:Factory; by default the
            preset's.
        chunk_source: What L1 compares: question, semantic, group, combined or full.
        chunk_window: Match on the first N characters only; 0 for all.
        strict: Stop where an image has no file, instead of leaving its samples out.
        baseline: Run the samples without semkv first: vLLM with its own caches alone.
        purge: Empty the cache first; touches nothing that semkv did not write.
        samples_out: Write a JSON object for each sample to this file.
        summary_out: Write settings, versions and figures to this JSON file.
    """

    preset: Annotated[str, MODEL] = ""
    model: Annotated[str, MODEL] = ""
    revision: Annotated[str | None, MODEL] = None
    trust_remote_code: Annotated[bool, MODEL] = False
    max_model_len: Annotated[int | None, POSITIVE, MODEL] = None
    max_tokens: Annotated[int, POSITIVE, MODEL] = 16
    engine: Annotated[str, ENGINE, MODEL] = "vllm"
    reuse: Annotated[Reuse, MODEL] = "inputs"
    blend_share: Annotated[float, COSINE, BLENDING, MODEL] = 0.15
    match: Annotated[Match, NEAR] = "all"
    tenant: str = ""
    dataset: Annotated[str, DATA] = "gqa"
    chunk_source: Annotated[ChunkSource, MATCHED] = "question"
    chunk_window: Annotated[int, NOT_NEGATIVE, MATCHED] = 0
    data: Annotated[DatasetOptions, FLAT] = field(default_factory=DatasetOptions)
    cache: Annotated[CacheConfig, FLAT] = field(default_factory=CacheConfig)
    strict: Annotated[bool, DATA] = False
    baseline: Annotated[bool, RESULTS] = False
    purge: bool = False
    samples_out: Annotated[Path | None, NO_FOLDER, RESULTS] = None
    summary_out: Annotated[Path | None, NO_FOLDER, RESULTS] = None

    def __post_init__(self) -> None:
        check(self)
        refuse_judge(self.cache)
        if not (
            self.dataset in DATASETS
            or self.dataset.endswith(".jsonl")
            or plug.is_path(self.dataset)
        ):
            raise ConfigError(
                "--dataset", self.dataset, [*DATASETS, "a file that ends in .jsonl", plug.FORM]
            )
        if self.reuse != "inputs" and self.engine != "transformers":
            raise ConfigError(
                "--reuse", self.reuse, "inputs, or another one with --engine transformers"
            )
        for key, path in (
            ("--calibration", self.cache.calibration),
            ("--dataset-root", self.data.root),
        ):
            if path is not None and not path.exists():
                raise ConfigError(key, str(path), EXISTS.text)
        roots = [
            Path(os.environ[name]).expanduser()
            for name in IMAGE_ROOT_VARIABLES
            if os.environ.get(name, "").strip()
        ]
        if self.data.root is not None and (self.data.root / "images").is_dir():
            roots.append(self.data.root / "images")
        object.__setattr__(self, "cache", replace(self.cache, image_roots=tuple(roots)))
        outputs = {"--samples-out": self.samples_out, "--summary-out": self.summary_out}
        dataset = Path(self.dataset) if self.dataset.endswith(".jsonl") else None
        read = {
            "--dataset": dataset,
            "--dataset-root": self.data.root,
            "--calibration": self.cache.calibration,
        }
        keep_apart(outputs, read)

    @property
    def instruction(self) -> str:
        """Appended to every question."""
        return get_preset(self.preset).instruction if self.preset and self.dataset == "gqa" else ""

    def to_json(self) -> dict[str, Any]:
        """The settings as plain values, for the header of a results file."""
        values = asdict(self) | {"instruction": self.instruction}
        plain: dict[str, Any] = json.loads(json.dumps(values, default=str))  # paths become texts
        return plain


def refuse_judge(flags: PolicyConfig) -> None:
    """Raises `ConfigError` where a policy needs a judge that a gateway alone asks."""
    if flags.judges and not flags.judges_itself:
        raise ConfigError(
            "--policy",
            str(flags.policy),
            "one without a judge, which only a gateway asks, or --judge-model bundled",
        )


def fill_from_preset(
    app: App,
    commands: tuple[str, ...],
    arguments: ArgumentCollection,
) -> None:
    """A source of flags: the preset's, for what is not given."""
    flags = {name: argument for argument in arguments for name in argument.names}
    for name in ("--preset", "--model"):
        # "$UNSET" is not given.
        flags[name].tokens[:] = [token for token in flags[name].tokens if token.value]
    name = _preset_name(flags)
    if not name:
        return
    values = _preset_values(name, flags["--embedding-hook"])
    for key, value in values.items():
        argument = flags[f"--{key.replace('_', '-')}"]
        if argument.tokens or value is None:
            continue
        for index, part in enumerate(value if isinstance(value, list | tuple) else [value]):
            argument.append(
                Token(
                    keyword=argument.name,
                    value=str(part),
                    source=f"preset {name}",
                    index=index,
                )
            )


def _preset_name(flags: Mapping[str, Argument]) -> str:
    """The preset that is named, else the default's; empty where a model is named without one."""
    if given := flags["--preset"].tokens:
        return given[0].value
    return "" if flags["--model"].tokens else DEFAULT_PRESET


def _preset_values(name: str, hook: Argument) -> dict[str, Any]:
    """The flags of a preset. Layers that a given hook cannot fill are left out."""
    preset = get_preset(name)
    values = {
        item.name: getattr(preset, item.name)
        for item in fields(preset)
        if item.name != "instruction"
    }
    values["preset"] = name
    values["enable_fusion_cache"] = values.pop("fusion")
    fillable = _HOOK_LAYERS.get(hook.tokens[0].value) if hook.tokens else None
    if fillable is not None:
        values["embedding_layers"] = [
            one for one in preset.embedding_layers if one.split(":")[0] in fillable
        ]
    return values


def resolve(given: Mapping[str, Any] | None = None, /, **flags: Any) -> RunSettings:
    """The settings that flags of ``semkv run`` make, named with ``-`` or ``_``; None is not given."""
    words: dict[str, list[str]] = {}
    for key, value in {**(given or {}), **flags}.items():
        # Of two names the last one counts.
        option = "--" + key.replace("_", "-").replace("-layers", "-layer")
        items = (
            value if option == "--embedding-layer" and isinstance(value, list | tuple) else [value]
        )
        if not all(isinstance(item, str | int | float | Path | None) for item in items):
            raise ConfigError(option, value, "a string, a number, true or false")
        none = [] if value is None else ["--no-embedding-layer"]
        words[option] = [f"{option}={item}" for item in items if item is not None] or none
    return parse(RunSettings, list(chain(*words.values())), fill_from_preset)


SEMANTIC_PARTS = ("pairs", "traps", "streams", "turns", "images")
CACHES = (
    "cosine",
    "vcache",
    "krites",
    "gptcache",
    "redisvl",
    "fixed",
    "calibrated",
    "bounded",
    "bounded-uncalibrated",
    "judge",
    "judge-bundled",
    "bounded-judge",
)


def _each(known: tuple[str, ...]) -> Allowed:
    text = f"of {', '.join(known)}, each once"
    return Allowed(text, lambda given: {*given} <= {*known} and len({*given}) == len(given))


_SHARES = Allowed(SOME_SHARE.text, lambda given: bool(given) and all(map(SOME_SHARE.test, given)))


@dataclass(frozen=True)
class SemanticFlags:
    """Flags of ``semkv bench semantic``.

    Attributes:
        parts: What to measure: pairs, traps, streams, turns (multi-turn), images.
        caches: Which caches: cosine (a plain threshold), vcache and krites (two papers' rules), gptcache, redisvl, and
            semkv's policies fixed, calibrated, bounded, bounded-uncalibrated; judge-bundled with semkv's own judge;
            judge and bounded-judge with a scripted one that knows the answers and errs at known rates.
        pairs: Labeled pairs of your own: JSONL of a, b, same (0 or 1), and group where there is one; .gz too. Half of
            their clusters ask, the other half fits the calibration. By default the held-out rows of bench/data ask.
        stream: A stream of your own instead of generated ones: JSONL of text and cluster in the order of requests.
        requests: Most requests of a stream, and of the one that warms up.
        seeds: Streams of each kind.
        board: Instead of the parts, a board of somebody else: fow-cache (pip install fow-cache).
        max_error_rate: Bounds of vcache and of the bounded policy; may be repeated.
        out: Write machine, versions, settings and raw counts to this JSON file.
    """

    parts: Annotated[tuple[str, ...], _each(SEMANTIC_PARTS), PARTS, MANY] = SEMANTIC_PARTS
    caches: Annotated[tuple[str, ...], _each(CACHES), MANY] = CACHES[:-4]
    pairs: Path | None = None
    stream: Path | None = None
    requests: Annotated[int, POSITIVE] = 2000
    seeds: Annotated[int, POSITIVE] = 2
    board: Board | None = None
    max_error_rate: Annotated[tuple[float, ...], _SHARES, MANY] = (PolicyConfig.max_error_rate,)
    out: Path | None = None

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class SweepFlags:
    """Flags of ``semkv sweep``.

    Attributes:
        specs: Experiments in JSON or TOML: defaults, and a list with a name each.
        log_file: CSV with a row for each experiment; JSON lines are written next to it.
        samples_dir: For a samples file and the output of each experiment.
        resume: Go on with this log: skip what it has, and try again what failed.
        purge_cache_between_runs: Empty the cache even where the spec names one.
        only: Run only this experiment; may be repeated.
        ray: Run experiments at once on a Ray cluster: its address, or local for one on this machine.
        ray_cpus: CPU cores of each experiment there; one GPU besides, where the cluster has any.
    """

    specs: Path
    log_file: Path
    samples_dir: Path
    resume: Annotated[bool, SWITCH] = False
    purge_cache_between_runs: Annotated[bool, SWITCH] = False
    only: tuple[str, ...] = ()
    ray: str = ""
    ray_cpus: Annotated[int, POSITIVE, ON_RAY] = 1

    def __post_init__(self) -> None:
        check(self)
