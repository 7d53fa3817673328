"""Rules over numbers, units and what is counted."""

from __future__ import annotations

import itertools

from semkv_guards.language import Token
from semkv_guards.pairs import MOST, Pair, Tokens
from semkv_guards.quantities import Quantity, differ
from semkv_guards.rules.rule import rule
from semkv_guards.text import Text


@rule(
    reasons=("number", "unit", "comparison"),
    vetoes=(
        ("How do I cook two eggs?", "How do I cook three eggs?"),
        ("How fast is 36 km/h?", "How fast is 36 metres per second?"),
        ("Can I take .5 mg?", "Can I take 5 mg?"),
        ("Is version 1.10 newer?", "Is version 1.1 newer?"),
        ("What if less than 5 come?", "What if at most 5 come?"),
        ("Is it covered up to age 26?", "Is it covered from age 26?"),
    ),
    allows=(("How fast is 36 km/h?", "How fast is 10 metres per second?"),),
)
def quantity(pair: Pair) -> str | None:
    """Another number, another unit, or the other side of a bound."""
    return differ(pair.a.quantities, pair.b.quantities, pair.language, converse=bool(pair.converse))


@rule(
    reasons=("unit",),
    vetoes=(
        ("How much is 100 CAD worth?", "How much is 100 AUD worth?"),
        ("Is 30 C hot?", "Is 30 F hot?"),
    ),
    allows=(("How do I store 3 pictures?", "How do I store 3 photos?"),),
)
def counted_thing(pair: Pair) -> str | None:
    """The same number counts something else."""
    if not pair.a.quantities.after or not pair.b.quantities.after:
        return None
    mine = _counted(pair.a, pair.only[0])
    other = _counted(pair.b, pair.only[1])
    if len(mine) > MOST or len(other) > MOST:
        return None
    stop_stems = pair.language.stop_stems
    for (number, thing), (other_number, other_thing) in itertools.product(mine, other):
        if number.raw != other_number.raw or (number.dimension and other_number.dimension):
            continue
        has_content = not {thing.stem, other_thing.stem} <= stop_stems
        if has_content and not pair.akin(thing, other_thing):
            return "unit"
    return None


def _counted(text: Text, only: Tokens) -> list[tuple[Quantity, Token]]:
    """Quantities with what they count, where that is in this text alone."""
    stems = {t.stem for t in only if text.language.may_be_content(t)}
    return [(number, thing) for number, thing in text.quantities.after if thing.stem in stems]
