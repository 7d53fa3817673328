"""Numbers, units, dates and times of day in a text, so that equal ones compare as equal however they are written."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.text import Token

_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{2,3})+(?:\.\d+)?")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?")
_LONGEST = 30  # figures of a number; a longer one is compared as written
_ROMAN = {r: n for n, r in enumerate("ii iii iv v vi vii viii ix x xi xii xiii xiv xv xvi".split(), 2)}
_CURRENCY = "$€£¥₹"
_DAY = 24 * 60
_NEAR = 6  # words from a bound to the one that its quantity is measured from: "up to twenty four hours in advance"


class Quantity(NamedTuple):
    """A number as it stands, and what it measures."""

    raw: float | str
    dimension: str
    """Empty for a plain number."""
    value: float | str
    """In the dimension's base unit."""
    loose: bool
    """A "one" or a "first" that another wording may leave out."""


class Quantities(NamedTuple):
    """What a text measures."""

    found: tuple[Quantity, ...]
    bare: frozenset[str]
    """Units without a number, as dimension and factor."""
    words: frozenset[str]
    """The words that are part of these."""
    counted: frozenset[str]
    """Stems of what a plain number counts: "three rivers"."""
    ranked: frozenset[str]
    """Stems of what an ordinal ranks: "the third river"."""
    bounds: frozenset[str]
    """The sides of a quantity on which something lies, "inside" or "outside": "within 24 hours before"."""


def measure(tokens: Sequence[Token], lexicon: Lexicon) -> Quantities:
    """Every quantity of a text, in order."""
    found: list[Quantity] = []
    bare: set[str] = set()
    used: set[int] = set()
    counted: set[str] = set()
    ranked: set[str] = set()
    i = 0
    while i < len(tokens):
        word = tokens[i].word
        if word[0].isdigit() or word in lexicon.numbers or word in lexicon.multipliers:
            end, number = _number(tokens, i, lexicon)
            end, quantity = _united(tokens, i, end, number, lexicon)
            found.append(quantity)
            if not quantity.dimension and end < len(tokens) and tokens[end].stem not in lexicon.tables.dates:
                (ranked if tokens[end - 1].word in lexicon.ordinals else counted).add(tokens[end].stem)
            used.update(range(i - (i > 0 and tokens[i - 1].word in _CURRENCY), end))
            i = end
            continue
        roman = _ROMAN.get(word) if tokens[i].name and len(word) > 1 and i else None
        if roman is not None:
            found.append(Quantity(float(roman), "", float(roman), False))
            used.add(i)
        elif word in lexicon.units and len(word) > 1:
            dimension, factor = lexicon.units[word]
            bare.add(f"{dimension} {factor:g}")
            used.add(i)
        i += 1
    words = frozenset(tokens[k].word for k in used)
    return Quantities(
        tuple(found), frozenset(bare), words, frozenset(counted), frozenset(ranked), _bounds(tokens, lexicon)
    )


def _bounds(tokens: Sequence[Token], lexicon: Lexicon) -> frozenset[str]:
    """On which sides of its quantities that is of which a text speaks."""
    plain = lexicon.bounds.get("", {})
    found = set()
    for i, token in enumerate(tokens):
        if token.word in plain:
            after = [t.word for t in tokens[i + 1 : i + _NEAR]]
            if any(w[0].isdigit() or w in lexicon.numbers or w in lexicon.units for w in after[:2]):
                point = next((lexicon.bounded[w] for w in after[1:] if w in lexicon.bounded), "")
                found.add(lexicon.bounds[point][token.word])
    return frozenset(found)


def _number(tokens: Sequence[Token], i: int, lexicon: Lexicon) -> tuple[int, Quantity]:
    """The number that starts at ``i``, and where it ends: figures or words, with multipliers after it."""
    word = tokens[i].word
    if word[0].isdigit():
        value = _figures(word)
        end, loose = i + 1, False
        if isinstance(value, str) or (i and tokens[i - 1].name and tokens[i - 1].word.isalpha() and "." in word):
            return end, Quantity(word, "", word, False)
    else:
        value, end, loose = lexicon.numbers.get(word, 1.0), i + (word in lexicon.numbers), word in ("one", "first")
    total = 0.0
    while end < len(tokens):
        after = tokens[end].word
        if after in lexicon.multipliers:
            factor = lexicon.multipliers[after]
            value, loose = value * factor, False
            if factor >= 1000:
                total, value = total + value, 0.0
        elif word[0].isdigit() or not _adds(value, after, tokens, end, lexicon):
            break
        else:
            end += after == "and"
            value, loose = value + lexicon.numbers[tokens[end].word], False
        end += 1
    total += value
    return end, Quantity(total, "", total, loose)


def _adds(value: float, after: str, tokens: Sequence[Token], end: int, lexicon: Lexicon) -> bool:
    """Whether the next number word goes on with this number: "twenty one", "a hundred and five", "two thirds"."""
    if after == "and":
        after = tokens[end + 1].word if end + 1 < len(tokens) and value >= 100 else ""
    step = lexicon.numbers.get(after, 0.0)
    return 1 <= step < 100 and value >= 20 and value % 10 == 0 and (step < 10 or value % 100 == 0)


def _figures(word: str) -> float | str:
    if len(word) > _LONGEST:
        return word
    if _CLOCK.fullmatch(word):
        return word
    if _THOUSANDS.fullmatch(word):
        return float(word.replace(",", ""))
    try:
        return float(word.replace(",", "."))
    except ValueError:
        return word


def _united(tokens: Sequence[Token], i: int, end: int, number: Quantity, lexicon: Lexicon) -> tuple[int, Quantity]:
    """The number with the unit around it, and where both end."""
    after = tokens[end].word if end < len(tokens) else ""
    raw = number.raw
    if isinstance(raw, str) and _CLOCK.fullmatch(raw):
        hours, minutes = (int(part) for part in raw.split(":")[:2])
        raw = hours + minutes / 60
        if hours > 12 and after not in lexicon.clock:
            return end, Quantity(raw, "clock", hours * 60.0 + minutes, False)
    if isinstance(raw, str):
        return end, number
    if after in lexicon.clock and raw <= 24:
        hour = raw % 12 + lexicon.clock[after]
        return end + 1, Quantity(raw, "clock", round(hour * 60) % _DAY, False)
    if after in ("st", "nd", "rd", "th"):
        return end + 1, Quantity(raw, "", raw, False)
    if after == "s" and (raw >= 100 or raw in range(10, 100, 10)):
        return end + 1, Quantity(raw, "span", raw, False)
    if i and tokens[i - 1].word in _CURRENCY:
        after, end = tokens[i - 1].word, end - 1
    elif after in ("a", "an", "of") and raw < 1 and end + 1 < len(tokens) and tokens[end + 1].word in lexicon.units:
        after, end = tokens[end + 1].word, end + 1
    elif after in ("degree", "degrees", "°") and end + 1 < len(tokens):
        scale = {"c": "celsius", "f": "fahrenheit"}.get(tokens[end + 1].word, tokens[end + 1].word)
        if scale in ("celsius", "fahrenheit"):
            after, end = scale, end + 1
    if after not in lexicon.units:
        return end, number
    dimension, factor = lexicon.units[after]
    return end + 1, Quantity(raw, dimension, _rounded(raw * factor), number.loose or raw == 1)


def _rounded(value: float) -> float:
    """Nine figures: 1.1 km is 1,100 m."""
    return float(f"{value:.9g}") if math.isfinite(value) else value


def differ(a: Quantities, b: Quantities) -> str | None:
    """``number`` or ``unit`` where two texts measure different things."""
    first = Counter((q.dimension, q.value) for q in a.found)
    second = Counter((q.dimension, q.value) for q in b.found)
    if first != second:
        left = _without(a.found, second)
        right = _without(b.found, first)
        left, right = _unmet(left, right), _unmet(right, left)
        measured = all(q.dimension != "clock" for q in (*left, *right))
        if left and measured and Counter(q.raw for q in left) == Counter(q.raw for q in right):
            return "unit"
        if any(not q.loose for q in left) or any(not q.loose for q in right) or (left and right):
            return "number"
    if a.bounds and b.bounds and a.bounds.isdisjoint(b.bounds):
        return "comparison"
    if a.counted & b.ranked - a.ranked or b.counted & a.ranked - b.ranked:
        return "number"
    return "unit" if a.bare - b.bare and b.bare - a.bare else None


def _without(found: Sequence[Quantity], other: Counter[tuple[str, float | str]]) -> list[Quantity]:
    left = Counter(other)
    rest = []
    for q in found:
        key = (q.dimension, q.value)
        if left[key] > 0:
            left[key] -= 1
        else:
            rest.append(q)
    return rest


def _unmet(found: Sequence[Quantity], other: Sequence[Quantity]) -> list[Quantity]:
    """What is left once a number with a unit has met the same number without one in the other text."""
    left = Counter((q.raw, not q.dimension) for q in other)
    rest = []
    for q in found:
        key = (q.raw, bool(q.dimension))
        if left[key] > 0:
            left[key] -= 1
        else:
            rest.append(q)
    return rest
