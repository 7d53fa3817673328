"""Settings, each stated once: field, type, default, description. The command line is made from these classes.

The line that a class's docstring has for a field is the flag's help. pydantic reads every value, whether it comes from
a flag, a variable ``SEMKV_<FLAG>``, a file, a preset, a program, or a connector's extra config. A wrong one is a
`ConfigError` that names the key, the value and what is allowed.
"""

# The command line reads the annotations of inherited fields: they must be values, not texts.

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from cyclopts import Parameter

from semkv import plug
from semkv.errors import ConfigError
from semkv.types import CacheMode, EmbeddingLayer, PolicyName, Scope, TierChoice
from semkv_stores.settings import (
    COSINE,
    NOT_NEGATIVE,
    POSITIVE,
    SOME_SHARE,
    Allowed,
    Needs,
    check,
    default_cache_dir,
)

IMAGE_ROOT_VARIABLES = ("SEMANTIC_CACHE_IMAGE_ROOT", "GQA_IMAGE_ROOT", "LLAVA_IMAGE_ROOT")

OWN_POLICY = Allowed(
    f"one of {', '.join(PolicyName)}, or {plug.FORM}",
    lambda name: name in list(PolicyName) or plug.is_path(name),
)

CALIBRATED = Needs(
    "--policy calibrated or bounded",
    lambda given: given.policy not in (PolicyName.FIXED, PolicyName.JUDGE),
)
BOUNDED = Needs(
    "--policy bounded",
    lambda given: given.policy == PolicyName.BOUNDED or plug.is_path(given.policy),
)
JUDGED = Needs(
    "--policy bounded (--policy judge has a judge anyway)",
    lambda given: given.policy == PolicyName.BOUNDED,
)
JUDGING = Needs(
    "--judge or --policy judge",
    lambda given: given.judges or plug.is_path(given.policy),
)
FOUND = Needs(
    "near-repeats (no --no-semantic, no --mode off)",
    lambda given: given.finds_near_repeats,
)
SERVED = Needs(
    "near-repeats that are served (no --no-semantic, --mode live)",
    lambda given: given.serves_near_repeats,
)

BUNDLED = "bundled"
"""The judge that comes with semkv, by the name of ``--judge-model``."""

JUDGE_NAME = Allowed(
    "bundled, in small letters, or the name of a served model that does not read like it",
    lambda name: name == BUNDLED or _letters(name) not in (BUNDLED, "bundle"),
)


def _letters(name: str) -> str:
    """A name as its small letters alone."""
    return "".join(filter(str.isalpha, name.casefold()))


# ---------------------------------------------------------------------- the cache's settings

NEAR = Parameter(group="Near-repeats")
BOUNDS = Parameter(group="Bounds")


def switch(name: str, *negative: str) -> Parameter:
    """The parameter of a switch with its own words for off."""
    return Parameter(name=f"--{name}", negative=tuple(f"--{word}" for word in negative))


FUSION = Parameter(
    name=("--enable-fusion-cache", "--fusion-cache"), negative="--disable-fusion-cache"
)
LAYERS = Parameter(
    name=("--embedding-layer", "--embedding-layers"),
    n_tokens=1,
    negative="--no-embedding-layer",
)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Who decides whether a similar text's answer may be given.

    Attributes:
        similarity_threshold: Least cosine of a similar text. At 1 even an equal vector may fall short (float32).
        index_encoder: Sentence encoder of the text tiers: id or directory.
        policy: What decides on an approximate match: fixed, calibrated, bounded, judge (a model decides below the
            threshold), or package.module:Factory.
        max_error_rate: Wrong approximate answers per request that the bounded policy allows.
        calibration: A file of `semkv calibrate`: the curve of the calibrated policy, the prior of the bounded one.
        verify_rate: Share of approximate hits whose unchanged request is also run, to compare; by default 0.1 for the
            bounded policy and 0 for the others.
        judge: With the bounded policy, let a model judge pairs that the policy would refuse.
        judge_model: The model that judges pairs in doubt: bundled (small, part of semkv, in this process) or a model of
            a server; by default the request's own.
        judge_threshold: Least cosine of a pair that a model judges.
        guards: Rules that veto an approximate match: another number, unit, date, negation, direction, name, code or
            word order.
    """

    similarity_threshold: Annotated[float, COSINE, FOUND, NEAR] = 0.92
    index_encoder: Annotated[str, FOUND, NEAR] = "all-MiniLM-L6-v2"
    policy: Annotated[str, OWN_POLICY, FOUND, NEAR] = PolicyName.FIXED
    max_error_rate: Annotated[float, SOME_SHARE, BOUNDED, FOUND, NEAR] = 0.01
    calibration: Annotated[Path | None, CALIBRATED, FOUND, NEAR] = None
    verify_rate: Annotated[float | None, COSINE, SERVED, NEAR] = None
    judge: Annotated[bool, Parameter(negative=""), JUDGED, SERVED, NEAR] = False
    judge_model: Annotated[str, JUDGE_NAME, JUDGING, SERVED, NEAR] = ""
    judge_threshold: Annotated[float, COSINE, JUDGING, SERVED, NEAR] = 0.75
    guards: Annotated[bool, switch("guards", "no-guards", "disable-guards"), FOUND, NEAR] = True

    def __post_init__(self) -> None:
        check(self)
        if self.policy in list(PolicyName):
            object.__setattr__(self, "policy", PolicyName(self.policy))
        if self.policy is PolicyName.CALIBRATED and self.calibration is None:
            raise ConfigError(
                "--calibration",
                None,
                "a file that `semkv calibrate` wrote, for --policy calibrated",
            )
        if self.policy is PolicyName.JUDGE and self.judge_threshold >= self.similarity_threshold:
            raise ConfigError(
                "--judge-threshold",
                self.judge_threshold,
                f"less than --similarity-threshold, which is {self.similarity_threshold:g}",
            )

    @property
    def finds_near_repeats(self) -> bool:
        """Whether similar texts are looked for, as far as other settings say. In a sweep some runs may look for none
        and have the settings of the others, so only a gateway's settings say no."""
        return True

    @property
    def serves_near_repeats(self) -> bool:
        """The same of giving what was found."""
        return True

    @property
    def judges(self) -> bool:
        """Whether a model is shown pairs in doubt."""
        return self.judge or self.policy == PolicyName.JUDGE

    @property
    def judges_itself(self) -> bool:
        """Whether the model that judges runs in this process."""
        return self.judges and self.judge_model == BUNDLED

    @property
    def checked_share(self) -> float:
        """The share of approximate hits to check, with the policy's default filled in."""
        if self.verify_rate is not None:
            return self.verify_rate
        return 0.1 if self.policy is PolicyName.BOUNDED else 0.0


@dataclass(frozen=True)
class LookupConfig(PolicyConfig):
    """Which earlier requests are looked for: in a program, ``semkv run`` and ``semkv serve`` alike.

    Attributes:
        cache_dir: Where the cache lives; SEMKV_CACHE_DIR or ~/.cache/semkv.
        mode: live; dry-run (count near-repeats, serve none of them); or off.
        tiers: all; or auto, which asks a tier that costs more than it saves for one request in 32 only.
        semantic: Find similar texts (tier L1).
        normalised: Texts that differ only in typing (spaces, a sentence's first letter, Unicode form) are the same.
            Without it they are near-repeats like others, mostly at a cosine near 1: threshold, guards and policy
            decide.
        encoder_device: Where the sentence encoder runs: cpu, or cuda, which takes room beside the engine.
        embedding_layers: A layer of the embedding tier (L2), such as prompt:384:0.8; may be repeated.
        embedding_hook: Fills the embedding layers: none, prompt, vision, prompt_vision, or package.module:Factory.
        vision_encoder: Encoder of the vision layer: id or directory of a vision tower, or small (needs no weights); by
            default CLIP if it is there, else small.
        max_entries: Most entries in the catalog; the least recently used go first.
        media_mib: Most MiB of stored images; the least recently used go first, and their entries serve only requests
            that bring the same image.
    """

    cache_dir: Path = field(default_factory=default_cache_dir)
    mode: Annotated[CacheMode, Parameter(name=("--cache-mode", "--mode")), NEAR] = CacheMode.LIVE
    tiers: Annotated[TierChoice, NEAR] = TierChoice.ALL
    semantic: Annotated[bool, switch("semantic", "no-semantic", "disable-semantic-cache"), NEAR] = (
        True
    )
    normalised: Annotated[
        bool, switch("normalised", "no-normalised", "disable-normalised-hits"), FOUND, NEAR
    ] = True
    encoder_device: Annotated[Literal["cpu", "cuda"], FOUND, NEAR] = "cpu"
    embedding_layers: Annotated[tuple[EmbeddingLayer, ...], LAYERS, FOUND, NEAR] = ()
    embedding_hook: Annotated[str, FOUND, NEAR] = "none"
    vision_encoder: Annotated[str, FOUND, NEAR] = ""
    max_entries: Annotated[int, POSITIVE, BOUNDS] = 100_000
    media_mib: Annotated[int, POSITIVE, BOUNDS] = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [layer.name for layer in self.embedding_layers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("--embedding-layer", name, "each layer once")
        if names and self.embedding_hook == "none":
            raise ConfigError(
                "--embedding-hook",
                "none",
                f"a hook that fills {', '.join(names)}, such as prompt_vision",
            )


@dataclass(frozen=True)
class CacheConfig(LookupConfig):
    """Everything `SemanticCache` needs to know.

    Attributes:
        fusion_cache_dir: Fusion states elsewhere than under the cache directory.
        scope: media (text matches on the same image only) or any.
        exact: Find equal texts (tier L0.5).
        fusion: Keep the vision encoder's outputs (tier L1.5).
        max_cached_blocks: Most stored KV blocks; 0 for a bound by bytes only.
        image_roots: Folders searched for ``<name>.jpg`` or ``.png`` when a media segment has no file of its own.
    """

    fusion_cache_dir: Path | None = None
    scope: Annotated[Scope, NEAR] = Scope.MEDIA
    exact: Annotated[bool, switch("exact", "no-exact", "disable-exact-cache"), NEAR] = True
    fusion: Annotated[bool, FUSION] = False
    max_cached_blocks: Annotated[int, NOT_NEGATIVE, BOUNDS] = 0
    image_roots: Annotated[tuple[Path, ...], Parameter(parse=False)] = ()


# ---------------------------------------------------------------------- presets: what is not given on the command line

DEFAULT_PRESET = "minigqa"
MINIGQA_VLM = Path(__file__).parent / "assets" / "minigqa-vlm"

# What lmms-eval appends to every GQA question; without it a chat model answers in sentences.
GQA_INSTRUCTION = "Answer the question using a single word or phrase."


@dataclass(frozen=True, slots=True)
class Preset:
    """Recommended settings for one model, named as the flags of ``semkv run``; ``instruction`` is appended to every
    question: it is part of the prompt, not of the text that the tiers match on."""

    model: str
    trust_remote_code: bool = False
    embedding_layers: tuple[str, ...] = ()
    embedding_hook: str = "none"
    vision_encoder: str = ""
    similarity_threshold: float = 0.92
    fusion: bool = False
    dataset: str = "gqa"
    instruction: str = ""
    max_model_len: int | None = None
    max_tokens: int = 16


_VLM = Preset(
    model="Qwen/Qwen3-VL-2B-Instruct",
    embedding_layers=("prompt:384:0.8", "vision:512:0.82"),
    embedding_hook="prompt_vision",
    fusion=True,
    instruction=GQA_INSTRUCTION,
    max_model_len=8192,
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "minigqa": Preset(
            model=str(MINIGQA_VLM),
            embedding_layers=("prompt:384:0.92", "vision:6912:0.7"),  # as docs/quality.md measures
            embedding_hook="prompt_vision",
            vision_encoder=str(MINIGQA_VLM),
            fusion=True,
            dataset="minigqa",
            max_model_len=512,
            max_tokens=8,
        ),
        "opt-125m": Preset(
            model="facebook/opt-125m",
            dataset="gqa",
            max_model_len=2048,
        ),
        "qwen3-vl-2b": _VLM,
        "internvl3.5-2b": replace(
            _VLM, model="OpenGVLab/InternVL3_5-2B-Instruct", trust_remote_code=True
        ),
        "qwen2.5-vl-7b": replace(_VLM, model="Qwen/Qwen2.5-VL-7B-Instruct"),
    }
)


def get_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError("--preset", name, PRESETS) from None
