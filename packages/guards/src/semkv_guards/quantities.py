"""Numbers, units, dates and times of day in a text, so that equal ones compare as equal however they are written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from semkv_guards.language import Language, Token, Unit

_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{2,3})+(?:\.\d+)?")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?")
_DEGREES = frozenset(("degree", "degrees", "°"))
_SCALES = {"c": "celsius", "f": "fahrenheit"}
_HOURS = range(1, 13)
_AFTERNOON = 13  # hours from which a clock needs no "pm"
_LONGEST = 30  # figures of a number; a longer one is compared as written
_CURRENCY = "$€£¥₹"
_DAY = 24 * 60
_DECADES = range(10, 100, 10)  # "the 80s"
_RANKS = ("st", "nd", "rd", "th")
_PARTS = ("a", "an", "of")  # words between a part and its unit
_LEFT_OUT = ("one", "first")  # numbers that another wording may leave out
_NEAR = 6  # words from a bound to the one that its quantity is measured from: "up to twenty four hours in advance"


class Quantity(NamedTuple):
    """A number as it stands, and what it measures."""

    raw: float | str
    dimension: str
    """Empty for a plain number."""
    value: float | str
    """In the dimension's base unit."""
    loose: bool = False
    """A "one" or a "first" that another wording may leave out."""


class Number(NamedTuple):
    """A number at its place."""

    end: int
    """Where it ends."""
    value: float | str
    """As it is written where its figures are none of arithmetic."""
    loose: bool = False
    """Whether another wording may leave it out."""


class Quantities:
    """What a text measures."""

    def __init__(self, tokens: Sequence[Token], language: Language) -> None:
        self._tokens = tokens
        self._language = language
        self._written = [*(t.word for t in tokens), "", "", "", ""]
        self.found: list[Quantity] = []
        self.bare: set[str] = set()
        """Units without a number, as dimension and factor."""
        self.words: set[str] = set()
        """The words that are part of these."""
        self.after: list[tuple[Quantity, Token]] = []
        """Quantities with the word after each number, a unit or what is counted ("three rivers")."""
        self.ranked: set[str] = set()
        """Stems of what an ordinal ranks: "the third river"."""
        self.bounds: set[str] = set()
        """The sides of a quantity on which something lies, "inside" or "outside": "within 24 hours before"."""
        self._read()

    @property
    def counted(self) -> set[str]:
        """Stems of what a plain number counts."""
        return {token.stem for quantity, token in self.after if not quantity.dimension}

    def _read(self) -> None:
        language = self._language
        end = 0
        for i, token in enumerate(self._tokens):
            word = token.word
            if word in language.bounds:
                self._add_bound(i)
            if i < end:
                continue
            if word[0].isdigit() or word in language.numbers or word in language.multipliers:
                end = self._add_quantity(i)
            elif len(word) > 1 and (word in language.all_units or "/" in word):
                end, unit = self._unit(i)
                if unit:
                    dimension, factor = unit
                    self.bare.add(f"{dimension} {factor:g}")

    def _add_bound(self, i: int) -> None:
        """Note on which side of a quantity that is of which the text speaks, by the word at ``i``."""
        language = self._language
        after = self._written[i + 1 : i + _NEAR]
        if not any(map(self._is_measure, after[:2])):
            return
        counts_back = not language.before.isdisjoint(after[1:])
        sides = language.bounds_before if counts_back else language.bounds
        self.bounds.add(sides[self._written[i]])

    def _is_measure(self, word: str) -> bool:
        language = self._language
        return word[:1].isdigit() or word in language.numbers or word in language.all_units

    def _add_quantity(self, i: int) -> int:
        """Note the quantity that starts at ``i``, and what it counts or ranks; returns where it ends."""
        end, quantity = self._quantity(i)
        self.found.append(quantity)
        has_currency = self._written[i - 1] in _CURRENCY
        self.words.update(self._written[i - has_currency : end])
        is_counting = end < len(self._tokens) and not quantity.dimension
        last = end if is_counting else end - 1
        if last <= i or self._tokens[last].word in self._language.senses:
            return end
        if self._tokens[last - 1].word not in self._language.ordinals:
            self.after.append((quantity, self._tokens[last]))
        elif last == end:
            self.ranked.add(self._tokens[end].stem)
        return end

    def _quantity(self, i: int) -> tuple[int, Quantity]:
        """The quantity that starts at ``i``, and where it ends."""
        language = self._language
        past = self._past(i)
        number = Number(i + 3, past) if past else self._number(i)
        after = self._written[number.end]
        raw = number.value
        if isinstance(raw, str):
            hours = _hours(raw)
            if hours is not None and after in language.clock:
                raw = hours
            elif hours is not None and int(raw.partition(":")[0]) >= _AFTERNOON:
                return number.end, _time_of_day(hours, 60 * hours)
            else:
                return number.end, _plain(raw)
        if after in language.clock and raw <= 24:
            minutes = round((raw % 12 + language.clock[after]) * 60) % _DAY
            return number.end + 1, _time_of_day(raw, minutes)
        if after in _RANKS:
            return number.end + 1, _plain(raw)
        if after == "s" and (raw >= 100 or raw in _DECADES):
            return number.end + 1, Quantity(raw=raw, dimension="span", value=raw)
        end, unit = self._unit_of(i, number.end, raw)
        if unit is None:
            return end, self._without_unit(i, number, raw)
        dimension, factor = unit
        return end, Quantity(
            raw=raw,
            dimension=dimension,
            value=_nine_figures(raw * factor),
            loose=number.loose or raw == 1,
        )

    def _without_unit(self, i: int, number: Number, raw: float) -> Quantity:
        """The quantity of a number at ``i`` that has no unit. "1.10" may be a version, which is not 1.1."""
        word = self._written[i]
        if number.end == i + 1 and "." in word and word[0].isdigit() and word.endswith("0"):
            return _plain(word)
        return Quantity(raw=raw, dimension="", value=raw, loose=number.loose)

    def _past(self, i: int) -> str:
        """The time of day that starts at ``i`` with a part of an hour: "quarter past six"; "" where none does."""
        numbers = self._language.numbers
        word, after = self._written[i : i + 2]
        beyond = self._written[i + 2]
        part = numbers.get(word, 1.0)
        hour = numbers.get(beyond, float(beyond) if beyond.isdecimal() else 0.0)
        if not 0 < part < 1 or after not in self._language.past or hour not in _HOURS:
            return ""
        hours, minutes = divmod(60 * (hour + self._language.past[after] * part), 60)
        return f"{hours or 12:g}:{minutes:02g}"

    def _number(self, i: int) -> Number:
        """The number that starts at ``i``: figures or words, with multipliers after it."""
        language = self._language
        word = self._written[i]
        end = i + 1
        in_figures = word[0].isdigit()
        if in_figures:
            figures = _figures(word)
            if isinstance(figures, str) or self._is_version(i):
                return Number(end, word)
            value = figures
        else:
            value = language.numbers.get(word, 1.0)
            end = i + (word in language.numbers)
        total = 0.0
        loose = word in _LEFT_OUT
        while after := self._written[end]:
            if after in language.multipliers:
                factor = language.multipliers[after]
                value *= factor
                if factor >= 1000:
                    total += value
                    value = 0.0
            else:
                is_joined = after == "and" and value >= 100
                following = self._written[end + 1] if is_joined else after
                step = language.numbers.get(following, 0.0)
                if in_figures or not 1 <= step < _room(value):
                    break
                value += step
                end += is_joined
            end += 1
            loose = False
        return Number(end, total + value, loose)

    def _is_version(self, i: int) -> bool:
        """Whether figures with a point stand behind a name: "Python 3.10"."""
        if not i or "." not in self._written[i]:
            return False
        return self._tokens[i - 1].name and self._written[i - 1].isalpha()

    def _unit_of(self, start: int, end: int, raw: float) -> tuple[int, Unit | None]:
        """The unit of a number, before it or after it, and where the quantity ends."""
        units = self._language.all_units
        before = self._written[start - 1]
        if before in _CURRENCY and before in units:
            return end, units[before]
        beyond = self._written[end + 1]
        if self._written[end] in _PARTS and raw < 1 and beyond in units:  # "half a mile"
            return end + 2, units[beyond]
        return self._unit(end)

    def _unit(self, i: int) -> tuple[int, Unit | None]:
        """The unit at ``i`` and where it ends: "km", "km/h", "metres per second", "degrees C"."""
        language = self._language
        word = self._written[i]
        after = self._written[i + 1]
        scale = _SCALES.get(after, after)
        if word in _DEGREES and scale in _SCALES.values():
            return i + 2, language.all_units.get(scale)
        unit = language.unit(word)
        if unit is None:
            return i, None
        beyond = self._written[i + 2]
        if after == language.per and beyond in language.all_units:
            compound = language.unit(f"{word}/{beyond}")
            if compound and compound[0] in language.compounds:
                return i + 3, compound
        return i + 1, unit


def _plain(raw: float | str) -> Quantity:
    return Quantity(raw=raw, dimension="", value=raw)


def _time_of_day(hours: float, minutes: float) -> Quantity:
    return Quantity(raw=hours, dimension="clock", value=round(minutes))


def _hours(figures: str) -> float | None:
    """The hours of a clock: 3.5 for "3:30"; None where figures are no clock."""
    if not _CLOCK.fullmatch(figures):
        return None
    hours, minutes = map(int, figures.split(":")[:2])
    return hours + minutes / 60


def _room(value: float) -> int:
    """What a number word may add must be less: nothing, but after "hundred" up to 99 and after "twenty" up to 9."""
    if value and value % 100 == 0:
        return 100
    return 10 if value >= 20 and value % 10 == 0 else 0


def _figures(word: str) -> float | str:
    if len(word) > _LONGEST or _CLOCK.fullmatch(word):
        return word
    try:
        return float(word.replace(",", "" if _THOUSANDS.fullmatch(word) else "."))
    except ValueError:
        return word


def _nine_figures(value: float) -> float:
    """So that 1.1 km is 1,100 m."""
    return float(f"{value:.9g}")


def differ(
    a: Quantities, b: Quantities, language: Language, *, converse: bool = False
) -> str | None:
    """``number`` or ``unit`` where two texts measure different things; ``converse``: they do so from the other side."""
    reason = _differ_in_value(a, b, language)
    if reason is not None:
        return reason
    if not converse and a.bounds and b.bounds and a.bounds.isdisjoint(b.bounds):
        return "comparison"
    if a.counted & b.ranked - a.ranked or b.counted & a.ranked - b.ranked:
        return "number"
    return "unit" if a.bare - b.bare and b.bare - a.bare else None


def _differ_in_value(a: Quantities, b: Quantities, language: Language) -> str | None:
    first = Counter(map(_measure, a.found))
    second = Counter(map(_measure, b.found))
    if first == second:
        return None
    only_a = _without(a.found, Counter(second), _measure)
    only_b = _without(b.found, first, _measure)
    if _is_mixed(only_a) and _is_mixed(only_b):
        return "number"  # "2 pills every 4 hours", "4 pills every 2 hours"
    left = _unmet(only_a, only_b, language)
    right = _unmet(only_b, only_a, language)
    has_clock = any(q.dimension == "clock" for q in (*left, *right))
    if left and not has_clock and Counter(q.raw for q in left) == Counter(q.raw for q in right):
        return "unit"
    must_agree = any(not q.loose for q in (*left, *right))
    return "number" if must_agree or (left and right) else None


def _is_mixed(found: Sequence[Quantity]) -> bool:
    """Whether there are plain numbers and some with a unit."""
    return len({bool(quantity.dimension) for quantity in found}) == 2


def _measure(q: Quantity) -> tuple[str, float | str]:
    return q.dimension, q.value


def _without(
    found: Sequence[Quantity], other: Counter[Any], key: Callable[[Quantity], Any]
) -> list[Quantity]:
    """The quantities beyond those of the other text."""
    rest = []
    for q in found:
        if other[key(q)] > 0:
            other[key(q)] -= 1
        else:
            rest.append(q)
    return rest


def _unmet(
    found: Sequence[Quantity], other: Sequence[Quantity], language: Language
) -> list[Quantity]:
    """What is left once a number with a unit (never a share: 5 is no 5%) has met the same number without one in the
    other text, or with a unit that may be the same."""
    bare = Counter((q.raw, not q.dimension) for q in other if q.dimension != "percent")
    readings = {reading for q in other for reading in _readings(q, language)}
    left = _without(found, bare, lambda q: q.dimension != "percent" and (q.raw, bool(q.dimension)))
    return [q for q in left if readings.isdisjoint(_readings(q, language))]


def _readings(q: Quantity, language: Language) -> set[tuple[str, float | str]]:
    """What a quantity may be: itself, or one of several where its unit is ambiguous."""
    found = {_measure(q)}
    if not isinstance(q.raw, str):
        units = [
            language.all_units[word]
            for word, name in language.ambiguous.items()
            if name == q.dimension
        ]
        found |= {(dimension, _nine_figures(q.raw * factor)) for dimension, factor in units}
    return found
