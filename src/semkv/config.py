"""Settings, each stated once: field, type, default, description. The command line is made from these classes.

The line that a class's docstring has for a field is the flag's help. pydantic reads every value, whether it comes from
a flag, a variable ``SEMKV_<FLAG>``, a file, a preset, a program, or a connector's extra config. A wrong one is a
`ConfigError` that names the key, the value and what is allowed.
"""

# The command line reads the annotations of inherited fields: they must be values, not texts.

import os
import re
import tomllib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_origin, get_type_hints

from cyclopts import App, Parameter, Token
from cyclopts.exceptions import CycloptsError, UnusedCliTokensError

from semkv import plug
from semkv.errors import ConfigError, SemkvError
from semkv.types import CacheMode, EmbeddingLayer, MatchPolicy, PolicyName, Scope

if TYPE_CHECKING:
    from cyclopts import Argument, ArgumentCollection
    from pydantic import TypeAdapter

IMAGE_ROOT_VARIABLES = ("SEMANTIC_CACHE_IMAGE_ROOT", "GQA_IMAGE_ROOT", "LLAVA_IMAGE_ROOT")

_S = TypeVar("_S")


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which values of a setting's type are allowed, as an annotation; None always is. ``each``: the test is for each
    item of a tuple."""

    text: str
    test: Callable[[Any], object]
    each: bool = False


POSITIVE = Allowed("a positive number", lambda n: n > 0)
NOT_NEGATIVE = Allowed("0 or a positive number", lambda n: n >= 0)
COSINE = Allowed("a number from 0 to 1", lambda n: 0.0 <= n <= 1.0)
SOME_SHARE = Allowed("a share above 0 and below 1, such as 0.01", lambda n: 0.0 < n < 1.0)
EXISTS = Allowed("a file or folder that exists", Path.exists)
OWN_POLICY = Allowed(
    f"one of {', '.join(PolicyName)}, or {plug.FORM}", lambda name: name in list(PolicyName) or plug.is_path(name)
)
NO_FOLDER = Allowed("a file, not a folder", lambda path: not path.is_dir())


def default_cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """``SEMKV_CACHE_DIR``, else ``~/.cache/semkv``.

    Raises:
        ConfigError: it is no path.
    """
    found: Path = typed("SEMKV_CACHE_DIR", environment.get("SEMKV_CACHE_DIR") or "~/.cache/semkv", Path)
    return found


def typed(key: str, value: Any, kind: Any) -> Any:
    """A value as the type that a setting is declared with; text is read as what it says, ``~`` as the home directory.

    Raises:
        ConfigError: it cannot be read as one.
    """
    from pydantic import ValidationError

    try:
        found = _reader(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        allowed = first["msg"].removeprefix("Input should be ").partition(", unable")[0]
        raise ConfigError(key, first["input"], allowed) from None
    if isinstance(found, Path):
        if not str(value).strip() or "\0" in str(value):
            raise ConfigError(key, value, "a path")
        try:
            return found.expanduser()
        except RuntimeError:
            raise ConfigError(key, value, "a path below a home directory that there is") from None
    return found


@cache
def _reader(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import InstanceOf, TypeAdapter

    if is_dataclass(kind):  # it has checked itself
        return TypeAdapter(InstanceOf[kind])
    return TypeAdapter(kind, config={"allow_inf_nan": False})


@cache
def _declared(kind: Any) -> dict[str, tuple[str, Any, list[Allowed]]]:
    """By field: its flag, its type, and what is allowed of it."""
    hints, annotated = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    found: dict[str, tuple[str, Any, list[Allowed]]] = {}
    for item in fields(kind):
        extras = getattr(annotated[item.name], "__metadata__", ())
        names = [name for extra in extras if isinstance(extra, Parameter) for name in extra.name or ()]
        option = names[0] if names else "--" + item.name.replace("_", "-")
        found[item.name] = option, hints[item.name], [extra for extra in extras if isinstance(extra, Allowed)]
    return found


def check(settings: Any, *, flags: bool = True) -> None:
    """Read every field of a frozen dataclass as its type (`typed`), and hold it against its `Allowed`.

    Call it first in ``__post_init__``.

    Args:
        settings: the dataclass.
        flags: whether errors name the flag; else the field.

    Raises:
        ConfigError: a value does not fit.
    """
    for name, (option, kind, limits) in _declared(cast("Hashable", type(settings))).items():
        key = option if flags else name
        value = typed(key, getattr(settings, name), kind)
        for limit in limits:
            for item in value if limit.each else (value,):
                if item is not None and not limit.test(item):
                    raise ConfigError(key, item, limit.text)
        object.__setattr__(settings, name, value)


# ---------------------------------------------------------------------- the command line


# What may stand in the environment though it is no flag of a command (the last three are none inside vLLM), and what
# Kubernetes puts there for every Service.
_OTHERS = ("SEMKV_SECRET", "SEMKV_ADMIN_KEY", "SEMKV_CONFIG", "SEMKV_HOST", "SEMKV_PORT", "SEMKV_WORKERS")
_KUBERNETES = re.compile(
    r"SEMKV_(\w+_)?(SERVICE_HOST|SERVICE_PORT|PORT_\d+_(TCP|UDP|SCTP))\w*=.*|SEMKV_(\w+_)?PORT=\w+://.*", re.DOTALL
)


class Environment:
    """A source of flags for the command line: variables ``SEMKV_<FLAG>``, and the TOML file that ``--config`` names,
    else ``SEMKV_CONFIG``. A flag overrides a variable, a variable the file.

    Commas separate lists in a variable. Keys of the file are flags without their dashes; a list gives a flag several
    times. An unknown name is an error, which leaves out the value: it may be a secret.

    Args:
        variables: the environment.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def __call__(self, app: App, commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
        flags = {
            name.removeprefix("--"): argument
            for argument in arguments
            for name in argument.names
            if argument.parse and name.startswith("--") and name not in argument.negatives  # NO_SALT=0 were a riddle
        }
        own = flags.pop("config", None)
        known = {f"SEMKV_{flag.replace('-', '_').upper()}": argument for flag, argument in flags.items()}
        for name, text in self._variables.items():
            if not name.startswith("SEMKV_") or not text.strip() or _KUBERNETES.fullmatch(f"{name}={text}"):
                continue
            if name not in known:
                if name in _OTHERS:
                    continue
                raise ConfigError("environment", name, {*known, *_OTHERS})
            words = text.split(",") if get_origin(known[name].hint) is tuple else [text]
            _give(known[name], [word.strip() for word in words if word.strip()], name, "environment")
        key, file = "SEMKV_CONFIG", self._variables.get("SEMKV_CONFIG", "")
        if own and own.tokens:
            key, file = "--config", own.tokens[-1].value
        try:
            given = tomllib.loads(Path(file).expanduser().read_text("utf-8")) if file else {}
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(key, file, f"a TOML file ({error})") from None
        for key, value in given.items():
            if key not in flags:
                raise ConfigError(file, key, flags)
            several = isinstance(value, list) and get_origin(flags[key].hint) is tuple
            _give(flags[key], map(str, value if several else [value]), f"{file}: {key}", file)


def _give(argument: "Argument", words: Iterable[str], keyword: str, source: str) -> None:
    """Give a flag what it has from no other source. Raises `ConfigError` where one source gives it by two names."""
    given = argument.tokens[0] if argument.tokens else None
    if given is not None and given.source == source:
        raise ConfigError(source, keyword, f"one name for {argument.name}, which {given.keyword} gives already")
    for index, word in enumerate(words if given is None else ()):
        argument.append(Token(keyword=keyword, value=word, source=source, index=index))


def _name_sources(app: App, commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
    """Make the settings once, so that an error can name the variable or the place in a file that a value came from."""
    try:
        for argument in arguments.filter_by(has_tree_tokens=True):
            argument.convert_and_validate()
    except ConfigError as error:
        given = [a.tokens[0] for a in arguments if a.tokens and a.name == error.key]
        key = (given and given[0].keyword) or error.key
        raise ConfigError(key, error.value, error.allowed) from None


def _read(kind: Any, tokens: Sequence[Token]) -> Any:
    """The words of a flag as its type."""
    words = [token.value for token in tokens]
    return typed(tokens[0].keyword or "an argument", words if get_origin(kind) is tuple else words[-1], kind)


def command_line(*sources: Callable[[App, tuple[str, ...], "ArgumentCollection"], None], **options: Any) -> App:
    """An application or a command whose parser raises instead of printing; `setting_error` makes it our words.

    Args:
        sources: give what was not given on the command line, the first ones first; such as `Environment`.
        options: of `cyclopts.App`.
    """
    plain: dict[str, Any] = {"help_format": "markdown", "help_flags": "--help", "version_flags": ()}
    raising: dict[str, Any] = {"result_action": "return_value", "exit_on_error": False, "print_error": False}
    reading = Parameter(converter=_read, negative_iterable=(), allow_repeating=True)
    return App(config=(*sources, _name_sources), default_parameter=reading, **{**plain, **raising, **options})


def parse(kind: type[_S], arguments: Sequence[str], *sources: Any) -> _S:
    """Settings from arguments, and from sources for those that are not given.

    Raises:
        ConfigError: a value does not fit.
    """

    def made(*, settings: Any = None) -> Any:
        return settings or kind()

    made.__annotations__["settings"] = Annotated[kind | None, Parameter(name="*")]
    app = command_line(*sources)
    app.default(made)
    try:
        found: _S = app(list(arguments))
    except CycloptsError as error:
        raise setting_error(error) from None
    return found


def setting_error(error: CycloptsError) -> SemkvError:
    """What the command line's parser refused, in our words."""
    if isinstance(error, UnusedCliTokensError):
        return SemkvError(f"not expected: {' '.join(error.unused_tokens or ())}; --help names the options")
    token, kind = getattr(error, "token", None), getattr(error, "target_type", None)
    if token is not None and kind is not None:
        try:
            typed(token.keyword or "", token.value, kind)
        except ConfigError as ours:
            return ours
    text = str(error)
    return SemkvError(text if text.endswith("...") else text.removesuffix("."))


# ---------------------------------------------------------------------- the cache's settings

NEAR = Parameter(group="Near-repeats")
BOUNDS = Parameter(group="Bounds")


def switch(name: str, *negative: str) -> Parameter:
    """The parameter of a switch with its own words for off."""
    return Parameter(name=f"--{name}", negative=tuple(f"--{word}" for word in negative))


FUSION = Parameter(name=("--enable-fusion-cache", "--fusion-cache"), negative="--disable-fusion-cache")
LAYERS = Parameter(name=("--embedding-layer", "--embedding-layers"), n_tokens=1, negative="--no-embedding-layer")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Who decides whether a similar text's answer may be given.

    Attributes:
        similarity_threshold: Least cosine of a similar text. At 1 even an equal vector may fall short: cosines are
            float32, good to a millionth.
        index_encoder: Sentence encoder of the text tiers: id or directory.
        policy: Who has the last word on an approximate match: fixed, calibrated, bounded, or package.module:Factory.
        max_error_rate: Wrong approximate answers per request that the bounded policy allows.
        calibration: A file that `semkv calibrate` wrote: the curve of the calibrated policy, the prior of the bounded
            one.
        verify_rate: Share of approximate hits whose unchanged request is also run, to compare; by default 0.1 for the
            bounded policy and 0 for the others.
        guards: Words may veto an approximate match: a changed number, unit, date, negation, direction, name, code or
            word order.
    """

    similarity_threshold: Annotated[float, COSINE, NEAR] = 0.92
    index_encoder: Annotated[str, NEAR] = "all-MiniLM-L6-v2"
    policy: Annotated[str, OWN_POLICY, NEAR] = PolicyName.FIXED
    max_error_rate: Annotated[float, SOME_SHARE, NEAR] = 0.01
    calibration: Annotated[Path | None, NEAR] = None
    verify_rate: Annotated[float | None, COSINE, NEAR] = None
    guards: Annotated[bool, switch("guards", "no-guards", "disable-guards"), NEAR] = True

    def __post_init__(self) -> None:
        check(self)
        if self.policy in list(PolicyName):
            object.__setattr__(self, "policy", PolicyName(self.policy))
        if self.policy is PolicyName.CALIBRATED and self.calibration is None:
            raise ConfigError("--calibration", None, "a file that `semkv calibrate` wrote, for --policy calibrated")
        if self.policy is PolicyName.FIXED and self.calibration is not None:
            raise ConfigError("--calibration", str(self.calibration), "given with another --policy than fixed")

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
        mode: live, dry-run (look up and report, change nothing) or off.
        semantic: Find similar texts (tier L1).
        normalised: Texts that differ only in typing (spaces, a sentence's first letter, Unicode form) are the same.
            Without it they are near-repeats like others, mostly at a cosine near 1: threshold, guards and policy
            decide.
        embedding_layers: A layer of the embedding tier (L2), such as prompt:384:0.8; may be repeated.
        embedding_hook: Fills the embedding layers: none, prompt, vision, prompt_vision, or package.module:Factory.
        vision_encoder: Vision tower behind the vision layer: id or directory; empty takes CLIP where present.
        max_entries: Most entries in the catalog; the least recently used go first.
        media_mib: Most MiB of stored images; the least recently used go first, and their entries serve only requests
            that bring the same image.
    """

    cache_dir: Path = field(default_factory=default_cache_dir)
    mode: Annotated[CacheMode, Parameter(name=("--cache-mode", "--mode")), NEAR] = CacheMode.LIVE
    semantic: Annotated[bool, switch("semantic", "no-semantic", "disable-semantic-cache"), NEAR] = True
    normalised: Annotated[bool, switch("normalised", "no-normalised", "disable-normalised-hits"), NEAR] = True
    embedding_layers: Annotated[tuple[EmbeddingLayer, ...], LAYERS, NEAR] = ()
    embedding_hook: Annotated[str, NEAR] = "none"
    vision_encoder: Annotated[str, NEAR] = ""
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
                "--embedding-hook", "none", f"a hook that fills {', '.join(names)}, such as prompt_vision"
            )


@dataclass(frozen=True)
class CacheConfig(LookupConfig):
    """Everything `SemanticCache` needs to know.

    Attributes:
        fusion_cache_dir: Fusion states elsewhere than under the cache directory.
        match: all (text and image must match) or any (one layer decides, without guards).
        scope: media (text matches on the same image only) or any.
        exact: Find equal texts (tier L0.5).
        fusion: Keep the vision encoder's outputs (tier L1.5).
        max_cached_blocks: Most stored KV blocks; 0 for a bound by bytes only.
        image_roots: Folders searched for ``<name>.jpg`` or ``.png`` when a media segment has no file of its own.
    """

    fusion_cache_dir: Path | None = None
    match: Annotated[MatchPolicy, NEAR] = MatchPolicy.ALL
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
        "opt-125m": Preset(model="facebook/opt-125m", dataset="gqa", max_model_len=2048),
        "qwen3-vl-2b": _VLM,
        "internvl3.5-2b": replace(_VLM, model="OpenGVLab/InternVL3_5-2B-Instruct", trust_remote_code=True),
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
