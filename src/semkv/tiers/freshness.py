"""Which answers are kept, and for how long."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

from semkv.errors import ConfigError

FOREVER = float("inf")
_FORM = "FIELD:PATTERN=TTL[,stale=S][,jitter=SHARE], FIELD being prompt, model or tag, such as tag:news=5m"
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long an answer may be served.

    Attributes:
        ttl_s: seconds until it is stale; infinity for ever; 0: it is not kept at all.
        stale_s: seconds after that in which it is still served while a fresh one is fetched.
        jitter: share of ``ttl_s``, of which up to all is taken off at random, so that what came together does not go
            together.

    Raises:
        ConfigError: a negative or undefined time, or a jitter that is no share.
    """

    ttl_s: float = FOREVER
    stale_s: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ttl_s", "stale_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(name, getattr(self, name), "0 or more seconds")
        if not 0.0 <= self.jitter < 1.0:
            raise ConfigError("jitter", self.jitter, "a share from 0 to below 1")

    def draw(self) -> float:
        """Seconds that one answer lives, jitter taken off."""
        return self.ttl_s * (1.0 - self.jitter * random.random()) if self.jitter else self.ttl_s  # noqa: S311


@dataclass(frozen=True, slots=True)
class Subject:
    """What a rule may look at."""

    prompt: str
    model: str
    tags: tuple[str, ...] = ()


Rule = Callable[[Subject], Lifetime | None]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Picks answers by their prompt, their model or one of their tags; case does not count.

    Attributes:
        name: ``prompt``, ``model`` or ``tag``.
        pattern: a glob over the whole of it. A regular expression may take minutes over a text, a glob does not.
    """

    name: str
    pattern: str

    def fits(self, subject: Subject) -> bool:
        """Whether it picks this answer."""
        values = subject.tags if self.name == "tag" else (subject.prompt if self.name == "prompt" else subject.model,)
        return any(fnmatchcase(value.casefold(), self.pattern.casefold()) for value in values)


@dataclass(frozen=True, slots=True)
class PatternRule(Pattern):
    """A lifetime for the answers that a pattern picks."""

    lifetime: Lifetime

    def __call__(self, subject: Subject) -> Lifetime | None:
        return self.lifetime if self.fits(subject) else None


@dataclass(frozen=True, slots=True)
class Freshness:
    """The first rule that has a lifetime for an answer decides, else the default. `parse_rule` reads them from text."""

    default: Lifetime = Lifetime()
    rules: Sequence[Rule] = ()

    def lifetime(self, subject: Subject) -> Lifetime:
        """Of one answer. What a rule of the user's own raises is the caller's to handle."""
        for rule in self.rules:
            found = rule(subject)
            if found is not None:
                return found
        return self.default


def parse_rule(text: str, key: str = "--ttl-rule") -> PatternRule:
    """Read ``FIELD:PATTERN=TTL[,stale=S][,jitter=SHARE]``.

    Times are seconds, or end in s, m, h or d; ``inf`` is for ever.

    >>> parse_rule("prompt:*weather*=5m,stale=60").lifetime
    Lifetime(ttl_s=300.0, stale_s=60.0, jitter=0.0)

    Raises:
        ConfigError: the text has another form.
    """
    form = re.fullmatch(
        r"(prompt|model|tag):(.+?)=(\w+(?:\.\d+)?)((?:,(?:stale=[\w.]+|jitter=[\d.]+))*)", text, re.DOTALL
    )
    if form is None:
        raise ConfigError(key, text, _FORM)
    name, pattern, ttl, options = form.groups()
    try:
        lifetime = Lifetime(_seconds(ttl))
        for option in options.split(",")[1:]:
            word, _, value = option.partition("=")
            if word == "stale":
                lifetime = replace(lifetime, stale_s=_seconds(value))
            else:
                lifetime = replace(lifetime, jitter=float(value))
        return PatternRule(name, pattern, lifetime)
    except ValueError:
        raise ConfigError(key, text, _FORM) from None


def _seconds(text: str) -> float:
    if text == "inf":
        return FOREVER
    number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
    if unit not in _UNITS:
        raise ValueError(text)
    return float(number) * _UNITS[unit]


class Answerable(Protocol):
    """What an answer is kept by; `server.request_key.CanonicalRequest` is one."""

    @property
    def key(self) -> str: ...
    @property
    def partition(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def sampled(self) -> bool: ...
    def refusal(self, payload: bytes, status: int) -> str:
        """Why an answer must not be kept, in a word or two; empty for a complete one."""
        ...
