"""The operator's rules: which requests bypass the cache, which answers are not kept, who gets no near-repeats.

    --skip-rule 'text:*passport*'        a request with such a text in it is neither looked up nor kept
    --skip-rule 'tool:*'                 nor is one that offers a tool
    --skip-rule 'answer:*cannot help*'   an answer with such a text in it is not kept
    --near-rule 'tenant:3fa9c1d2=off'    this tenant gets equal answers only
    --near-rule 'model:*-coder=0.97'     questions to this model must be nearer than others

``prompt`` is the last turn of a user, ``text`` any text of a request.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from semkv.errors import ConfigError
from semkv_gateway import strict_json
from semkv_gateway.request_key import CanonicalRequest
from semkv_gateway.response_cache import Pattern
from semkv_gateway.routes import texts_in
from semkv_gateway.settings import ServerSettings
from semkv_gateway.tenancy import TagRule, parse_tag_rule

TAG_DIGITS = 8
"""Digits of a tenant's digest that operators see, and by which a rule names a tenant."""

OFF = 2.0
"""A least cosine that no text reaches."""

_ANSWER = "answer"
_OF_REQUESTS = "text|prompt|model|tag|tenant|tool"
_SKIP_FORM = "FIELD:PATTERN, FIELD being text, prompt, model, tag, tenant, tool or answer, such as text:*passport*"
_NEAR_FORM = (
    "FIELD:PATTERN=off or FIELD:PATTERN=COSINE, FIELD being text, prompt, model, tag, tenant or tool, the cosine from"
    " --similarity-threshold to 1, such as model:*-coder=0.97"
)


NearRule = tuple[Pattern, float]
"""Picks requests, and the least cosine of a near-repeat for them."""


class Rules:
    """What the operator's rules say of a request and of an answer.

    Args:
        skip: picks requests that pass.
        skip_answers: picks texts of answers that are not kept.
        near: the first one that fits decides.
        labels: give tags.
    """

    def __init__(
        self,
        *,
        skip: Sequence[Pattern] = (),
        skip_answers: Sequence[Pattern] = (),
        near: Sequence[NearRule] = (),
        labels: Sequence[TagRule] = (),
    ) -> None:
        self._labels = labels
        self._skip = skip
        self._skip_answers = skip_answers
        self._near = near

    @classmethod
    def of(cls, settings: ServerSettings) -> Rules:
        """Raises `ConfigError` where a rule has another form."""
        patterns = [parse_skip_rule(rule) for rule in settings.skip_rules]
        least = settings.similarity_threshold
        return cls(
            skip=[pattern for pattern in patterns if pattern.name != _ANSWER],
            skip_answers=[pattern for pattern in patterns if pattern.name == _ANSWER],
            near=[parse_near_rule(rule, least) for rule in settings.near_rules],
            labels=[parse_tag_rule(rule) for rule in settings.tag_rules],
        )

    def skips(self, request: CanonicalRequest) -> bool:
        """Whether a request passes."""
        return any(self._picks(pattern, request) for pattern in self._skip)

    def keeps(self, payload: bytes, *, verbatim: bool) -> bool:
        """Whether an answer may be kept. What cannot be read has no texts to look at, as a stream that
        could not be put together."""
        if not self._skip_answers:
            return True
        if verbatim:
            return False
        try:
            texts = list(texts_in(strict_json.read(payload)))
        except (ValueError, RecursionError):
            return False
        return not any(pattern.matches(texts) for pattern in self._skip_answers)

    def tags(self, request: CanonicalRequest) -> list[str]:
        """The labels of an answer: those that its request came with, and those that rules give. A request with texts
        that are not read may be about anything, so it gets every label."""
        found = set(request.tags)
        for pattern, tag in self._labels:
            unread = pattern.name == "prompt" and request.has_unread_texts
            if unread or pattern.fits(request.prompt, request.model):
                found.add(tag)
        return sorted(found)

    def least_cosine(self, request: CanonicalRequest) -> float:
        """The least cosine of a near-repeat; `OFF` where there is to be none, 0 where no rule says anything. A request
        that passes may be a donor from a time before the rule."""
        if self.skips(request):
            return OFF
        fits = (least for pattern, least in self._near if self._picks(pattern, request))
        return next(fits, 0.0)

    def _picks(self, pattern: Pattern, request: CanonicalRequest) -> bool:
        if pattern.name in ("text", "prompt"):
            texts = request.texts
            if pattern.name == "prompt":
                texts = itertools.chain([request.prompt], request.last_turn)
            return request.has_unread_texts or pattern.matches(texts)
        if pattern.name == "tool":
            return pattern.matches(request.tools)
        if pattern.name == "tenant":
            return pattern.matches([request.partition[:TAG_DIGITS]])
        return pattern.fits("", request.model, self.tags(request))


def parse_skip_rule(text: str, key: str = "--skip-rule") -> Pattern:
    """Read ``FIELD:PATTERN``. Raises `ConfigError` where the text has another form.

    >>> parse_skip_rule("text:*passport*")
    Pattern(name='text', pattern='*passport*')
    """
    form = re.fullmatch(rf"({_OF_REQUESTS}|{_ANSWER}):(.+)", text, re.DOTALL)
    if form is None:
        raise ConfigError(key, text, _SKIP_FORM)
    return Pattern(form[1], form[2])


def parse_near_rule(text: str, threshold: float, key: str = "--near-rule") -> NearRule:
    """Read ``FIELD:PATTERN=off`` or ``FIELD:PATTERN=COSINE``. Raises `ConfigError` where the text has another form.

    >>> parse_near_rule("model:*-coder=0.97", 0.92)
    (Pattern(name='model', pattern='*-coder'), 0.97)
    """
    form = re.fullmatch(rf"({_OF_REQUESTS}):(.+)=(off|[\d.]+)", text, re.DOTALL)
    if form is None:
        raise ConfigError(key, text, _NEAR_FORM)
    try:
        least = OFF if form[3] == "off" else float(form[3])
    except ValueError:
        raise ConfigError(key, text, _NEAR_FORM) from None
    if least != OFF and not threshold <= least <= 1.0:
        raise ConfigError(key, text, _NEAR_FORM)
    return Pattern(form[1], form[2]), least
