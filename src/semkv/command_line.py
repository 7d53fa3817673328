"""The command line: an application made from classes of settings, whose values may come from variables and a file."""

# The command line reads the annotations of inherited fields: they must be values, not texts.

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin

from cyclopts import App, Parameter, Token
from cyclopts.exceptions import CycloptsError, UnusedCliTokensError

from semkv.errors import ConfigError, DatasetError, SemkvError
from semkv.user_files import read_toml
from semkv_stores.settings import typed

if TYPE_CHECKING:
    from cyclopts import Argument, ArgumentCollection

_S = TypeVar("_S")

# What may stand in the environment though it is no flag of a command (the last three are none inside vLLM), and what
# Kubernetes puts there for every Service.
_OTHERS = (
    "SEMKV_SECRET",
    "SEMKV_ADMIN_KEY",
    "SEMKV_JUDGE_KEY",
    "SEMKV_CONFIG",
    "SEMKV_HOST",
    "SEMKV_PORT",
    "SEMKV_WORKERS",
)
_KUBERNETES = re.compile(
    r"SEMKV_(\w+_)?(SERVICE_HOST|SERVICE_PORT|PORT_\d+_(TCP|UDP|SCTP))\w*=.*|SEMKV_(\w+_)?PORT=\w+://.*",
    re.DOTALL,
)


class Environment:
    """A source of flags for the command line: variables ``SEMKV_<FLAG>``, and the TOML file that ``--config`` names,
    else ``SEMKV_CONFIG``. A flag overrides a variable, a variable the file.

    Commas separate lists in a variable. Keys of the file are flags without their dashes. A list gives a flag several
    times, and so does a table, as ``NAME=VALUE``; a value that is a table stands as ``name=value name=value``. An
    unknown name is an error, which leaves out the value: it may be a secret.

    Args:
        variables: the environment.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def __call__(
        self, app: App, commands: tuple[str, ...], arguments: "ArgumentCollection"
    ) -> None:
        # Without the negative names: a variable SEMKV_NO_SALT=0 would be hard to read.
        flags = {
            name.removeprefix("--"): argument
            for argument in arguments
            for name in argument.names
            if argument.parse and name.startswith("--") and name not in argument.negatives
        }
        own = flags.pop("config", None)
        self._give_variables(flags)
        key = "SEMKV_CONFIG"
        file = self._variables.get(key, "")
        if own and own.tokens:
            key = "--config"
            file = own.tokens[-1].value
        if file:
            _give_file(flags, key, file)

    def _give_variables(self, flags: Mapping[str, "Argument"]) -> None:
        known = {
            f"SEMKV_{flag.replace('-', '_').upper()}": argument for flag, argument in flags.items()
        }
        for name, text in self._variables.items():
            is_ours = name.startswith("SEMKV_") and not _KUBERNETES.fullmatch(f"{name}={text}")
            if not is_ours or not text.strip():
                continue
            if name in known:
                several = get_origin(known[name].hint) is tuple
                words = [word.strip() for word in (text.split(",") if several else [text])]
                _give(known[name], filter(None, words), name, "environment")
            elif name not in _OTHERS:
                raise ConfigError("environment", name, {*known, *_OTHERS})


def _give_file(flags: Mapping[str, "Argument"], key: str, file: str) -> None:
    """Give flags what a TOML file has; ``key`` is the flag or variable that names the file."""
    try:
        given = read_toml(Path(file).expanduser())
    except (DatasetError, RuntimeError) as error:  # or there is no home directory
        raise ConfigError(key, file, f"a TOML file that can be read ({error})") from None
    for name, value in given.items():
        if name not in flags:
            raise ConfigError(file, name, flags)
        repeats = get_origin(flags[name].hint) is tuple
        _give(flags[name], _words(value) if repeats else [str(value)], f"{file}: {name}", file)


def _words(value: object) -> list[str]:
    """What a value of a file gives a flag that may be repeated."""
    if isinstance(value, dict):
        return [f"{name}={' '.join(_words(inner))}" for name, inner in value.items()]
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _give(argument: "Argument", words: Iterable[str], keyword: str, source: str) -> None:
    """Give a flag what it has from no other source. Raises `ConfigError` where one source gives it by two names."""
    given = argument.tokens[0] if argument.tokens else None
    if given is not None and given.source == source:
        raise ConfigError(
            source, keyword, f"one name for {argument.name}, which {given.keyword} gives already"
        )
    for index, word in enumerate(words if given is None else ()):
        argument.append(
            Token(
                keyword=keyword,
                value=word,
                source=source,
                index=index,
            )
        )


def _name_sources(app: App, commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
    """Make the settings once, so that an error can name the variable or the place in a file that a value came from."""
    try:
        for argument in arguments.filter_by(has_tree_tokens=True):
            argument.convert()  # what is made is checked when all is bound
    except ConfigError as error:
        given = [a.tokens[0] for a in arguments if a.tokens and a.name == error.key]
        key = (given and given[0].keyword) or error.key
        raise ConfigError(key, error.value, error.allowed) from None


def _read(kind: Any, tokens: Sequence[Token]) -> Any:
    """The words of a flag as its type."""
    words = [token.value for token in tokens]
    return typed(
        tokens[0].keyword or "an argument", words if get_origin(kind) is tuple else words[-1], kind
    )


def command_line(
    *sources: Callable[[App, tuple[str, ...], "ArgumentCollection"], None], **options: Any
) -> App:
    """An application or a command whose parser raises instead of printing; `setting_error` makes it our words.

    Args:
        sources: give what was not given on the command line, the first ones first; such as `Environment`.
        options: of `cyclopts.App`.
    """
    plain: dict[str, Any] = {
        "help_format": "markdown",
        "help_flags": "--help",
        "version_flags": (),
    }
    raising: dict[str, Any] = {
        "result_action": "return_value",
        "exit_on_error": False,
        "print_error": False,
    }
    reading = Parameter(
        converter=_read,
        negative_iterable=(),
        allow_repeating=True,
    )
    return App(
        config=(*sources, _name_sources),
        default_parameter=reading,
        **{**plain, **raising, **options},
    )


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
        return SemkvError(
            f"not expected: {' '.join(error.unused_tokens or ())}; --help names the options"
        )
    token = getattr(error, "token", None)
    kind = getattr(error, "target_type", None)
    if token is not None and kind is not None:
        try:
            typed(token.keyword or "", token.value, kind)
        except ConfigError as ours:
            return ours
    text = str(error)
    return SemkvError(text if text.endswith("...") else text.removesuffix("."))
