"""Sampled answers: which requests are sent with temperature 0, and which sampled answers are kept.

Several people decide. A client's ``Cache-Control: max-age`` says that an answer of that age will do. A rule of the
operator's picks requests by model or prompt; for all others ``--default-temperature`` and ``--sampled`` count.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from semkv.errors import ConfigError
from semkv.latest import Latest
from semkv_gateway.http import Answer
from semkv_gateway.request_key import CanonicalRequest
from semkv_gateway.response_cache import Pattern
from semkv_gateway.settings import ServerSettings
from semkv_gateway.tenancy import Controls

log = logging.getLogger(__name__)

_REFUSING = 1024  # models of which it is remembered
_SHOWN = 100  # characters of a model's name
_UNKNOWN_FIELD = (400, 422)  # statuses of a server that does not take a field
_FORM = (
    "FIELD:PATTERN=keep or FIELD:PATTERN=draw, FIELD being prompt or model, such as model:o4-*=keep"
)


SampledRule = tuple[Pattern, bool]
"""Requests that are sent as they came, and whether their answers are kept as they are drawn."""


def parse_sampled_rule(text: str, key: str = "--sampled-rule") -> SampledRule:
    """Read ``FIELD:PATTERN=keep`` or ``FIELD:PATTERN=draw``.

    >>> parse_sampled_rule("model:o4-*=keep")
    (Pattern(name='model', pattern='o4-*'), True)
    """
    form = re.fullmatch(r"(prompt|model):(.+)=(keep|draw)", text, re.DOTALL)
    if form is None:
        raise ConfigError(key, text, _FORM)
    return Pattern(form[1], form[2]), form[3] == "keep"


class Sampling:
    """Decides for requests that leave their answers to chance.

    Args:
        steady: those that leave open how to draw are sent at temperature 0.
        keep: the others' answers are kept as they are drawn.
        rules: the first one that fits decides instead.
    """

    def __init__(self, *, steady: bool, keep: bool, rules: Sequence[SampledRule]) -> None:
        self._steady = steady
        self._keep = keep
        self._rules = rules
        self._refusing: Latest[tuple[str, str], None] = Latest(_REFUSING)

    @classmethod
    def of(cls, settings: ServerSettings) -> Sampling:
        """Raises `ConfigError` where a rule has another form."""
        return cls(
            steady=settings.default_temperature is not None,
            keep=settings.sampled,
            rules=[parse_sampled_rule(rule) for rule in settings.sampled_rules],
        )

    def settled(self, asked: CanonicalRequest, controls: Controls) -> CanonicalRequest:
        """The request as it is keyed and sent."""
        if not asked.sampled:
            return asked
        if self._steady and self._ruled(asked) is None and _model(asked) not in self._refusing:
            return asked.steady or self.as_drawn(asked, controls)
        return self.as_drawn(asked, controls)

    def as_drawn(self, asked: CanonicalRequest, controls: Controls) -> CanonicalRequest:
        """The request as it came. A client that names an age takes the answer to an earlier request."""
        ruled = self._ruled(asked)
        keep = self._keep if ruled is None else ruled
        return asked.kept if keep or controls.max_age_s is not None else asked

    def _ruled(self, asked: CanonicalRequest) -> bool | None:
        """Whether a rule keeps its answer; None where none fits."""
        fits = (keep for rule, keep in self._rules if rule.fits(asked.prompt, asked.model))
        return next(fits, None)

    def refuses(self, asked: CanonicalRequest) -> None:
        """Note that the upstream has refused a temperature of this request, and answered it without."""
        model = _model(asked)
        if model in self._refusing:
            return
        self._refusing[model] = None
        if len(self._refusing) == _REFUSING:  # a server that answers to any name fills no log
            return
        name = asked.model[:_SHOWN]
        log.warning(
            "the upstream takes no temperature for the model %r, so requests for it go on without. Their answers are"
            " drawn at random: --sampled-rule 'model:%s=keep' keeps them all the same",
            name,
            name,
        )


def _model(asked: CanonicalRequest) -> tuple[str, str]:
    return asked.endpoint, asked.model


def may_refuse(answer: Answer) -> bool:
    """Whether an answer is an error that may be about a field. The first of several is named, and in any words."""
    return answer.status in _UNKNOWN_FIELD


def names_temperature(answer: Answer) -> bool:
    """Whether it names the temperature. It may also repeat what a client wrote."""
    return b"temperature" in answer.body.lower()
