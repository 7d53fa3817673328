"""Prices of tokens by model: what an answer costs, in whatever currency the prices are in."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache

from semkv.errors import ConfigError
from semkv_gateway.response_cache import Pattern

_MILLION = 1_000_000
_KNOWN = 1024  # models whose price is remembered
_LONGEST = 100  # characters of their names: a client may send some megabytes
PRICE_FORM = (
    "MODEL=input=PRICE output=PRICE, per million tokens, such as gpt-4o*=input=2.5 output=10; in a file a table, "
    '[price] with "gpt-4o*" = { input = 2.5, output = 10 }'
)
_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
_PRICE = re.compile(
    rf"(.+?)=((?:input|output)={_NUMBER}(?:\s+(?:input|output)={_NUMBER})?)", re.DOTALL
)

PriceRule = tuple[Pattern, float, float]
"""Which models, and what a token of the prompt and one of the answer costs."""


def parse_price(text: str, key: str = "--price") -> PriceRule:
    """Read ``MODEL=input=PRICE output=PRICE``; a price that is left out is 0.

    >>> parse_price("gpt-4o*=input=2.5 output=10")
    (Pattern(name='model', pattern='gpt-4o*'), 2.5e-06, 1e-05)

    Raises:
        ConfigError: the text has another form.
    """
    form = _PRICE.fullmatch(text.strip())
    if form is None:
        raise ConfigError(key, text, PRICE_FORM)
    pairs = [pair.split("=") for pair in form[2].split()]
    prices = {name: float(price) / _MILLION for name, price in pairs}
    if len(prices) < len(pairs) or not all(map(math.isfinite, prices.values())):
        raise ConfigError(key, text, PRICE_FORM)
    pattern = Pattern("model", form[1].strip())
    return pattern, prices.get("input", 0.0), prices.get("output", 0.0)


def is_price(text: str) -> bool:
    """Whether it has the form of a price."""
    try:
        parse_price(text)
    except ConfigError:
        return False
    return True


class Prices:
    """What tokens cost; of several rules the first one that fits a model decides."""

    def __init__(self, rules: Sequence[PriceRule]) -> None:
        self._rules = rules
        self._of = lru_cache(_KNOWN)(self._find)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def _find(self, model: str) -> tuple[float, float]:
        fits = (
            (input_price, output_price)
            for rule, input_price, output_price in self._rules
            if rule.fits("", model)
        )
        return next(fits, (0.0, 0.0))

    def money(self, model: str, input_tokens: int, output_tokens: int) -> float:
        """What an answer costs; 0 for a model without a price."""
        of = self._of if len(model) <= _LONGEST else self._find
        input_price, output_price = of(model)
        return input_tokens * input_price + output_tokens * output_price
