"""Labels of answers, by which an operator removes them: from rules, and from the header of a trusted proxy.

The header's labels are part of a request's key, so that no answer is served to a request that names others: what is
removed by a label is all that was ever served under it. A rule looks at prompt and model alone, which are in the key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from semkv.errors import ConfigError
from semkv.tiers.freshness import Pattern, Subject

MOST = 16  # labels in one header
_TAG = re.compile(r"[\w.:/@+-]{1,64}", re.ASCII)
_ALLOWED = "1 to 64 letters, digits or _.:/@+-"
_FORM = f"FIELD:PATTERN=TAG, FIELD being prompt or model and TAG {_ALLOWED}, such as prompt:*weather*=weather"


class BadTags(ValueError):  # noqa: N818
    """A header that does not hold labels."""


@dataclass(frozen=True, slots=True)
class TagRule(Pattern):
    """A label for the answers that a pattern picks."""

    tag: str


def parse_tag_rule(text: str, key: str = "--tag-rule") -> TagRule:
    """Read ``FIELD:PATTERN=TAG``.

    >>> parse_tag_rule("model:*-news=news").tag
    'news'

    Raises:
        ConfigError: the text has another form.
    """
    form = re.fullmatch(r"(prompt|model):(.+)=([^=]*)", text, re.DOTALL)
    if form is None or not _TAG.fullmatch(form[3]):
        raise ConfigError(key, text, _FORM)
    try:
        return TagRule(form[1], form[2], form[3])
    except re.error:
        raise ConfigError(key, text, _FORM) from None


def tags_by(rules: Sequence[TagRule], prompt: str, model: str) -> tuple[str, ...]:
    """The labels that rules give an answer."""
    subject = Subject(prompt, model)
    return tuple(rule.tag for rule in rules if rule.fits(subject))


def read_tags(header: str) -> tuple[str, ...]:
    """The labels in a header, separated by commas: each once, sorted.

    Raises:
        BadTags: too many, or one of another form. An answer without them could not be removed by them.
    """
    tags = sorted({part for piece in header.split(",") if (part := piece.strip())})
    if len(tags) > MOST or not all(map(_TAG.fullmatch, tags)):
        raise BadTags(f"at most {MOST} labels of {_ALLOWED}")
    return tuple(tags)
