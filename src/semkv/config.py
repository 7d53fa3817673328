"""Settings, each stated once: field, type, default, description. The command line is made from these classes.

The line that a class's docstring has for a field is the flag's help. A wrong value is a `ConfigError` that names the
key, the value and what is allowed, wherever it comes from: a flag, a variable ``SEMKV_<FLAG>``, a file, a preset, a
program, or a connector's extra config.
"""

# The command line reads the annotations of inherited fields: they must be values, not texts.

import math
import os
import tomllib
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cyclopts import App, Parameter, Token
from cyclopts.exceptions import CycloptsError, UnusedCliTokensError

from semkv import plug
from semkv.errors import ConfigError, SemkvError
from semkv.types import DEFAULT_LAYER_THRESHOLD, CacheMode, EmbeddingLayer, MatchPolicy, PolicyName, Scope

if TYPE_CHECKING:
    from cyclopts import Argument, ArgumentCollection

IMAGE_ROOT_VARIABLES = ("SEMANTIC_CACHE_IMAGE_ROOT", "GQA_IMAGE_ROOT", "LLAVA_IMAGE_ROOT")

_E = TypeVar("_E", bound=StrEnum)
_S = TypeVar("_S")


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which values of a setting's type are allowed, as an annotation; None always is."""

    text: str
    test: Callable[[Any], bool]


POSITIVE = Allowed("a positive number", lambda n: n > 0)
NOT_NEGATIVE = Allowed("0 or a positive number", lambda n: n >= 0)
COSINE = Allowed("a number from 0 to 1", lambda n: 0.0 <= n <= 1.0)
SHARE = Allowed("a share from 0 to below 1", lambda n: 0.0 <= n < 1.0)
SOME_SHARE = Allowed("a share above 0 and below 1, such as 0.01", lambda n: 0.0 < n < 1.0)
EXISTS = Allowed("a file or folder that exists", Path.exists)
OWN_POLICY = Allowed(
    f"one of {', '.join(PolicyName)}, or {plug.FORM}", lambda name: name in list(PolicyName) or plug.is_path(name)
)
NO_FOLDER = Allowed("a file, not a folder", lambda path: not path.is_dir())
_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}


def default_cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """``SEMKV_CACHE_DIR``, else ``~/.cache/semkv``.

    Raises:
        ConfigError: it is no path.
    """
    return _path("SEMKV_CACHE_DIR", environment.get("SEMKV_CACHE_DIR") or "~/.cache/semkv")


def parse_choice(key: str, value: str, kind: type[_E]) -> _E:
    """Turn a word into a member of ``kind``, or say what the words are."""
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(key, value, [str(m) for m in kind]) from None


def parse_embedding_layer(spec: str | EmbeddingLayer, key: str = "--embedding-layer") -> EmbeddingLayer:
    """Read ``NAME:DIM[:THRESHOLD]``, for example ``prompt:384:0.8``; a layer is checked in the same way."""
    form = "NAME:DIM[:THRESHOLD] such as prompt:384:0.8"
    parts = [str(part) for part in astuple(spec)] if isinstance(spec, EmbeddingLayer) else spec.split(":")
    if len(parts) not in (2, 3) or not parts[0] or not parts[0].isprintable():
        raise ConfigError(key, spec, form)
    try:
        dim = int(parts[1])
        threshold = float(parts[2]) if len(parts) == 3 else DEFAULT_LAYER_THRESHOLD
    except ValueError:
        raise ConfigError(key, spec, form) from None
    if dim < 1:
        raise ConfigError(key, spec, "a positive dimension")
    if not 0.0 <= threshold <= 1.0:
        raise ConfigError(key, spec, "a threshold from 0 to 1")
    return EmbeddingLayer(parts[0], dim, threshold)


def typed(key: str, value: Any, kind: Any) -> Any:
    """A value of the type that a setting is declared with: bool, int, float (finite), str, a `StrEnum`, `Path`,
    `EmbeddingLayer`, a dict, a tuple of these, or one of them or None.

    What a flag takes as text may be text here as well: the words of an enum, a path (``~`` is the home directory), a
    layer as ``NAME:DIM[:THRESHOLD]``. Numbers and switches may not: ``"false"`` would be true.

    Raises:
        ConfigError: it is none, and cannot be read as one.
    """
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (k for k in get_args(kind) if k is not types.NoneType)
        return None if value is None else typed(key, value, kind)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, kind) and kind is not EmbeddingLayer:
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple | list):
            raise ConfigError(key, value, "a list")
        return tuple(typed(key, item, get_args(kind)[0]) for item in value)
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ConfigError(key, value, "an object")
        return dict(value)
    if issubclass(kind, StrEnum):
        return parse_choice(key, value, kind)
    if kind is EmbeddingLayer and isinstance(value, str | EmbeddingLayer):
        return parse_embedding_layer(value, key)
    if kind is Path and isinstance(value, str | Path):
        return _path(key, value)
    if isinstance(value, bool):  # a number to Python
        if kind is bool:
            return value
    elif kind is str and isinstance(value, str):
        return value
    elif kind is int and isinstance(value, Integral):
        return int(value)
    elif kind is float and isinstance(value, Real):
        return _finite(key, value)
    raise ConfigError(key, value, _WORDS.get(kind, f"a value of type {kind.__name__}"))


def _path(key: str, value: str | Path) -> Path:
    if not str(value).strip() or "\0" in str(value):
        raise ConfigError(key, value, "a path")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ConfigError(key, value, "a path below a home directory that there is") from None


def _finite(key: str, value: Real) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(key, value, "a finite number")
    return number


@cache
def _declared(kind: Any) -> dict[str, tuple[str, Any, tuple[Any, ...]]]:
    """By field: its flag, its type, and what else its annotation says."""
    hints, annotated = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    found: dict[str, tuple[str, Any, tuple[Any, ...]]] = {}
    for item in fields(kind):
        extras = getattr(annotated[item.name], "__metadata__", ())
        names = [name for extra in extras if isinstance(extra, Parameter) for name in extra.name or ()]
        found[item.name] = (names[0] if names else "--" + item.name.replace("_", "-"), hints[item.name], extras)
    return found


def flag(kind: type, name: str) -> str:
    """The flag of a field."""
    return _declared(kind)[name][0]


def check(settings: Any, *, flags: bool = True) -> None:
    """Hold every field of a frozen dataclass against its type and the `Allowed` of its annotation.

    Call it first in ``__post_init__``. What may be given as text becomes what it says, as in `typed`.

    Args:
        settings: the dataclass.
        flags: whether errors name the flag; else the field.

    Raises:
        ConfigError: a value does not fit.
    """
    for name, (option, kind, extras) in _declared(cast("Hashable", type(settings))).items():
        key = option if flags else name
        value = typed(key, getattr(settings, name), kind)
        for extra in extras:
            if isinstance(extra, Allowed) and value is not None and not extra.test(value):
                raise ConfigError(key, value, extra.text)
        object.__setattr__(settings, name, value)


class Variables:
    """A source of flags for the command line: ``SEMKV_<FLAG>`` for a setting that was not given. Commas separate lists.

    Args:
        kind: whose settings. Other flags of the command, such as a port, are none of them.
        environment: the variables.
    """

    def __init__(self, kind: type, environment: Mapping[str, str]) -> None:
        self._flags = {option for option, _, _ in _declared(cast("Hashable", kind)).values()}
        self._environment = environment

    def __call__(self, app: App, commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
        for argument in arguments:
            if argument.name in self._flags and argument.parse and not argument.tokens:
                for name in argument.names:
                    if name not in argument.negatives:  # SEMKV_NO_SALT=0 would be a riddle
                        self._read(f"SEMKV_{name.lstrip('-').replace('-', '_').upper()}", argument)

    def _read(self, variable: str, argument: "Argument") -> None:
        text = self._environment.get(variable, "")
        for i, part in enumerate(text.split(",") if argument.token_count()[1] else [text]):
            if part.strip():
                argument.append(Token(keyword=variable, value=part.strip(), source="environment", index=i))


class ConfigFile:
    """A source of flags for the command line: the TOML file that ``--config`` names, else ``SEMKV_CONFIG``. Keys are
    flags without their dashes; a list gives a flag several times. Name this source last: the ones before override it.

    Args:
        environment: the variables.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def __call__(self, app: App, commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
        flags = {
            name.removeprefix("--"): argument
            for argument in arguments
            for name in argument.names
            if argument.parse and name.startswith("--") and name not in argument.negatives
        }
        own = flags.pop("config", None)
        file = own.tokens[-1].value if own and own.tokens else self._environment.get("SEMKV_CONFIG", "")
        if not file:
            return
        used: dict[str, str] = {}  # what was taken from the file: by flag, its place in the file
        for key, value in _toml(file).items():
            if key not in flags:
                raise ConfigError(file, key, flags)  # without the value, which may be a secret
            argument, place = flags[key], f"{file}: {key}"
            several = isinstance(value, list) and argument.token_count()[1]
            items = value if several else [value]
            if any(isinstance(item, list | dict) for item in items):
                raise ConfigError(place, value, "a value, or a list of values where a flag may be repeated")
            if argument.name in used:
                raise ConfigError(place, value, f"one name of a flag, where {used[argument.name]} says the same")
            if not argument.tokens:
                used[argument.name] = place
                for i, item in enumerate(items):
                    text = str(item).lower() if isinstance(item, bool) else str(item)
                    argument.append(Token(keyword=place, value=text, source=file, index=i))
        try:  # what is only seen when all settings are there
            for argument in arguments.filter_by(has_tree_tokens=True):
                argument.convert_and_validate()
        except ConfigError as error:
            raise ConfigError(used.get(error.key, error.key), error.value, error.allowed) from None


def _toml(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).expanduser().read_text("utf-8"))
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError("--config", file, f"a TOML file ({error})") from None


def _strict(app: App, commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
    """Refuse what the parser would read in its own way: 7.5 and ``none`` as numbers, an empty text as a path."""
    for argument in arguments:
        kinds = get_args(argument.hint) or (argument.hint,)
        for token in argument.tokens:
            key = token.keyword or argument.name
            if Path in kinds and not token.value.strip():
                raise ConfigError(key, token.value, "a path")
            for kind in (int, float):
                if kind in kinds and not _is_number(token.value, kind):
                    raise ConfigError(key, token.value, _WORDS[kind])


def _is_number(text: str, kind: type[int] | type[float]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def command_line(*sources: Callable[[App, tuple[str, ...], "ArgumentCollection"], None], **options: Any) -> App:
    """An application or a command whose parser raises instead of printing; `setting_error` makes it our words.

    Args:
        sources: give what was not given on the command line, the first ones first; such as `Variables`.
        options: of `cyclopts.App`.
    """
    plain: dict[str, Any] = {"help_format": "markdown", "help_flags": "--help", "version_flags": ()}
    raising: dict[str, Any] = {"result_action": "return_value", "exit_on_error": False, "print_error": False}
    plain_lists = Parameter(negative_iterable=(), allow_repeating=True)
    return App(config=(*sources, _strict), default_parameter=plain_lists, **{**plain, **raising, **options})


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
    token, target = getattr(error, "token", None), getattr(error, "target_type", None)
    if isinstance(error, UnusedCliTokensError):
        return SemkvError(f"not expected: {' '.join(error.unused_tokens or ())}")
    if token is None or target is None:
        text = str(error)
        return SemkvError(text if text.endswith("...") else text.removesuffix("."))
    if isinstance(target, type) and issubclass(target, StrEnum):
        return ConfigError(token.keyword or "", token.value, [str(member) for member in target])
    kinds = [kind for kind in get_args(target) if kind is not types.NoneType] or [target]
    allowed = _WORDS.get(kinds[0], f"a value of type {getattr(kinds[0], '__name__', kinds[0])}")
    return ConfigError(token.keyword or "", token.value, allowed)


NEAR = Parameter(group="Near-repeats")
BOUNDS = Parameter(group="Bounds")


def _layers(_: Any, tokens: Sequence[Token]) -> tuple[EmbeddingLayer, ...]:
    return tuple(parse_embedding_layer(token.value) for token in tokens)


def switch(name: str, *negative: str) -> Parameter:
    """The parameter of a switch with its own words for off."""
    return Parameter(name=f"--{name}", negative=tuple(f"--{word}" for word in negative))


FUSION = Parameter(name=("--enable-fusion-cache", "--fusion-cache"), negative="--disable-fusion-cache")
LAYERS = Parameter(
    name=("--embedding-layer", "--embedding-layers"), n_tokens=1, negative="--no-embedding-layer", converter=_layers
)


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
        context_edit_share: How many of a context's sentences may be reworded for it still to be similar, as a share;
            one always may.
    """

    fusion_cache_dir: Path | None = None
    match: Annotated[MatchPolicy, NEAR] = MatchPolicy.ALL
    scope: Annotated[Scope, NEAR] = Scope.MEDIA
    exact: Annotated[bool, switch("exact", "no-exact", "disable-exact-cache"), NEAR] = True
    fusion: Annotated[bool, FUSION] = False
    max_cached_blocks: Annotated[int, NOT_NEGATIVE, BOUNDS] = 0
    image_roots: Annotated[tuple[Path, ...], Parameter(parse=False)] = ()
    context_edit_share: Annotated[float, SHARE, Parameter(parse=False)] = 0.1
