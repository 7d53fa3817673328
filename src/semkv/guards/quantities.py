"""Numbers, units, dates and times of day in a text, so that equal ones compare as equal however they are written."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from semkv.guards.language import Language, Token, Unit

_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{2,3})+(?:\.\d+)?")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?")
_DEGREES = frozenset(("degree", "degrees", "°"))
_SCALES = {"c": "celsius", "f": "fahrenheit"}
_HOURS = range(1, 13)
_LONGEST = 30  # figures of a number; a longer one is compared as written
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
    after: tuple[tuple[Quantity, Token], ...]
    """Quantities with the word after each number, a unit or what is counted."""
    ranked: frozenset[str]
    """Stems of what an ordinal ranks: "the third river"."""
    bounds: frozenset[str]
    """The sides of a quantity on which something lies, "inside" or "outside": "within 24 hours before"."""


_NO_WORDS: frozenset[str] = frozenset()
NOTHING = Quantities((), _NO_WORDS, _NO_WORDS, _NO_WORDS, (), _NO_WORDS, _NO_WORDS)


def measure(tokens: Sequence[Token], language: Language) -> Quantities:
    """Every quantity of a text, in order."""
    starts = [i for i, t in enumerate(tokens) if t.word in language.measures or t.word[0].isdigit() or "/" in t.word]
    if not starts:
        return NOTHING
    found: list[Quantity] = []
    after: list[tuple[Quantity, Token]] = []
    bare: set[str] = set()
    used: set[int] = set()
    counted: set[str] = set()
    ranked: set[str] = set()
    end = 0
    for i in starts:
        if i < end:
            continue
        word = tokens[i].word
        if word[0].isdigit() or word in language.numbers or word in language.multipliers:
            end, number = _number(tokens, i, language)
            end, quantity = _united(tokens, i, end, number, language)
            found.append(quantity)
            last = end if end < len(tokens) and not quantity.dimension else end - 1
            dated = tokens[last].word in language.senses
            ordinal = tokens[end - 1].word in language.ordinals
            if last > i and not dated and tokens[last - 1].word not in language.ordinals:
                after.append((quantity, tokens[last]))
            if last == end and not dated:
                (ranked if ordinal else counted).add(tokens[end].stem)
            used.update(range(i - (i > 0 and tokens[i - 1].word in _CURRENCY), end))
        elif word in language.roman and tokens[i].name and i:
            found.append(Quantity(language.roman[word], "", language.roman[word], False))
            used.add(i)
        elif len(word) > 1 and word not in language.roman:
            end, unit = _unit(tokens, i, language)
            bare |= {f"{unit[0]} {unit[1]:g}"} if unit else set()
    words = frozenset([tokens[k].word for k in used])
    bounds = _bounds(tokens, language)
    return Quantities(tuple(found), frozenset(bare), words, frozenset(counted), tuple(after), frozenset(ranked), bounds)


def _bounds(tokens: Sequence[Token], language: Language) -> frozenset[str]:
    """On which sides of its quantities that is of which a text speaks."""
    found = set()
    for i in [i for i, token in enumerate(tokens) if token.word in language.bounds]:
        after = [t.word for t in tokens[i + 1 : i + _NEAR]]
        if any(w[0].isdigit() or w in language.numbers or w in language.all_units for w in after[:2]):
            back = not language.before.isdisjoint(after[1:])
            found.add((language.bounds_before if back else language.bounds)[tokens[i].word])
    return frozenset(found)


def _number(tokens: Sequence[Token], i: int, language: Language) -> tuple[int, Quantity]:
    """The number that starts at ``i``, and where it ends: figures or words, with multipliers after it."""
    word = tokens[i].word
    clock = _past(tokens, i, language)
    if clock:
        return i + 3, Quantity(clock, "", clock, False)
    if word[0].isdigit():
        value = _figures(word)
        end, loose = i + 1, False
        if isinstance(value, str) or (i and tokens[i - 1].name and tokens[i - 1].word.isalpha() and "." in word):
            return end, Quantity(word, "", word, False)
    else:
        value, end, loose = language.numbers.get(word, 1.0), i + (word in language.numbers), word in ("one", "first")
    total = 0.0
    while end < len(tokens):
        after = tokens[end].word
        if after in language.multipliers:
            factor = language.multipliers[after]
            value, loose = value * factor, False
            if factor >= 1000:
                total, value = total + value, 0.0
        elif word[0].isdigit() or not _adds(value, after, tokens, end, language):
            break
        else:
            end += after == "and"
            value, loose = value + language.numbers[tokens[end].word], False
        end += 1
    total += value
    return end, Quantity(total, "", total, loose)


def _past(tokens: Sequence[Token], i: int, language: Language) -> str:
    """The time of day that starts at ``i`` with a part of an hour: "quarter past six"; "" where none does."""
    part, after = language.numbers.get(tokens[i].word, 1.0), _word(tokens, i + 1)
    if not 0 < part < 1 or after not in language.past:
        return ""
    beyond = _word(tokens, i + 2)
    hour = language.numbers.get(beyond, float(beyond) if beyond.isdecimal() and len(beyond) < 3 else 0.0)
    if hour not in _HOURS:
        return ""
    hours, minutes = divmod(60 * (hour + language.past[after] * part), 60)
    return f"{hours or 12:g}:{minutes:02g}"


def _word(tokens: Sequence[Token], i: int) -> str:
    """The word at ``i``, "" after the last."""
    return tokens[i].word if i < len(tokens) else ""


def _adds(value: float, after: str, tokens: Sequence[Token], end: int, language: Language) -> bool:
    """Whether the next number word goes on with this number: "twenty one", "a hundred and five", "two thirds"."""
    if after == "and":
        after = tokens[end + 1].word if end + 1 < len(tokens) and value >= 100 else ""
    step = language.numbers.get(after, 0.0)
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


def _united(tokens: Sequence[Token], i: int, end: int, number: Quantity, language: Language) -> tuple[int, Quantity]:
    """The number with the unit around it, and where both end."""
    after = _word(tokens, end)
    raw = number.raw
    if isinstance(raw, str) and _CLOCK.fullmatch(raw):
        hours, minutes = (int(part) for part in raw.split(":")[:2])
        raw = hours + minutes / 60
        if hours > 12 and after not in language.clock:
            return end, Quantity(raw, "clock", hours * 60.0 + minutes, False)
    if isinstance(raw, str):
        return end, number
    if after in language.clock and raw <= 24:
        hour = raw % 12 + language.clock[after]
        return end + 1, Quantity(raw, "clock", round(hour * 60) % _DAY, False)
    if after in ("st", "nd", "rd", "th"):
        return end + 1, Quantity(raw, "", raw, False)
    if after == "s" and (raw >= 100 or raw in range(10, 100, 10)):
        return end + 1, Quantity(raw, "span", raw, False)
    if i and tokens[i - 1].word in _CURRENCY:
        unit: Unit | None = language.all_units.get(tokens[i - 1].word)
    elif (
        after in ("a", "an", "of") and raw < 1 and end + 1 < len(tokens) and tokens[end + 1].word in language.all_units
    ):
        end, unit = end + 2, language.all_units[tokens[end + 1].word]
    else:
        end, unit = _unit(tokens, end, language)
    if unit is None:
        return end, number
    dimension, factor = unit
    return end, Quantity(raw, dimension, _rounded(raw * factor), number.loose or raw == 1)


def _unit(tokens: Sequence[Token], i: int, language: Language) -> tuple[int, Unit | None]:
    """The unit at ``i`` and where it ends: "km", "km/h", "metres per second", "degrees C"."""
    word = _word(tokens, i)
    if word in _DEGREES:
        after = _word(tokens, i + 1)
        scale = _SCALES.get(after, after)
        if scale in _SCALES.values() and scale in language.all_units:
            return i + 2, language.all_units[scale]
    unit = language.unit(word)
    if unit is None:
        return i, None
    beyond = _word(tokens, i + 2)
    if beyond in language.all_units and tokens[i + 1].word == language.per:
        compound = language.unit(f"{word}/{beyond}")
        if compound is not None and compound[0] in language.compounds:
            return i + 3, compound
    return i + 1, unit


def _rounded(value: float) -> float:
    """Nine figures: 1.1 km is 1,100 m."""
    return float(f"{value:.9g}") if math.isfinite(value) else value


def differ(a: Quantities, b: Quantities, language: Language, *, converse: bool = False) -> str | None:
    """``number`` or ``unit`` where two texts measure different things; ``converse``: they do so from the other side."""
    if a == b:
        return None
    first = Counter((q.dimension, q.value) for q in a.found)
    second = Counter((q.dimension, q.value) for q in b.found)
    if first != second:
        left = _without(a.found, second)
        right = _without(b.found, first)
        left, right = _unmet(left, right, language), _unmet(right, left, language)
        measured = all(q.dimension != "clock" for q in (*left, *right))
        if left and measured and Counter(q.raw for q in left) == Counter(q.raw for q in right):
            return "unit"
        if any(not q.loose for q in left) or any(not q.loose for q in right) or (left and right):
            return "number"
    if not converse and a.bounds and b.bounds and a.bounds.isdisjoint(b.bounds):
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


def _unmet(found: Sequence[Quantity], other: Sequence[Quantity], language: Language) -> list[Quantity]:
    """What is left once a number with a unit has met the same number without one in the other text, or with a unit that
    may be the same."""
    left = Counter((q.raw, not q.dimension) for q in other)
    readings = {reading for q in other for reading in _readings(q, language)}
    rest = []
    for q in found:
        key = (q.raw, bool(q.dimension))
        if left[key] > 0:
            left[key] -= 1
        elif readings.isdisjoint(_readings(q, language)):
            rest.append(q)
    return rest


def _readings(q: Quantity, language: Language) -> set[tuple[str, float | str]]:
    """What a quantity may be: itself, or one of several where its unit is ambiguous."""
    found = {(q.dimension, q.value)}
    if not isinstance(q.raw, str):
        units = [language.all_units[word] for word, name in language.ambiguous.items() if name == q.dimension]
        found |= {(dimension, _rounded(q.raw * factor)) for dimension, factor in units}
    return found
