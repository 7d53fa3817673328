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
    loose: bool = False
    """A "one" or a "first" that another wording may leave out."""


class Quantities:
    """What a text measures."""

    def __init__(self, tokens: Sequence[Token], language: Language) -> None:
        self._tokens = tokens
        self._language = language
        self._written = written = [*(t.word for t in tokens), "", "", "", ""]
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
        end = 0
        for i, token in enumerate(tokens):
            word = token.word
            if word in language.bounds:
                self._bound(i)
            if i < end:
                continue
            if word[0].isdigit() or word in language.numbers or word in language.multipliers:
                end, quantity = self._quantity(i)
                self.found.append(quantity)
                self.words.update(written[i - (written[i - 1] in _CURRENCY) : end])
                last = end if end < len(tokens) and not quantity.dimension else end - 1
                if last > i and tokens[last].word not in language.senses:
                    if tokens[last - 1].word not in language.ordinals:
                        self.after.append((quantity, tokens[last]))
                    elif last == end:
                        self.ranked.add(tokens[end].stem)
            elif len(word) > 1 and (word in language.all_units or "/" in word):
                end, unit = self._unit(i)
                self.bare |= {f"{unit[0]} {unit[1]:g}"} if unit else set()

    @property
    def counted(self) -> set[str]:
        """Stems of what a plain number counts."""
        return {token.stem for quantity, token in self.after if not quantity.dimension}

    def _bound(self, i: int) -> None:
        """Note on which side of a quantity that is of which the text speaks, by the word at ``i``."""
        language = self._language
        after = self._written[i + 1 : i + _NEAR]
        if any(
            w[:1].isdigit() or w in language.numbers or w in language.all_units for w in after[:2]
        ):
            back = not language.before.isdisjoint(after[1:])
            self.bounds.add((language.bounds_before if back else language.bounds)[self._written[i]])

    def _quantity(self, i: int) -> tuple[int, Quantity]:
        """The quantity that starts at ``i``, and where it ends."""
        clock = self._past(i)
        end, raw, loose = (i + 3, clock, False) if clock else self._number(i)
        language, after = self._language, self._written[end]
        if isinstance(raw, str) and _CLOCK.fullmatch(raw):
            hours, minutes = (int(part) for part in raw.split(":")[:2])
            if after in language.clock:
                raw = hours + minutes / 60
            elif hours > 12:
                return end, Quantity(hours + minutes / 60, "clock", hours * 60.0 + minutes)
        if isinstance(raw, str):
            return end, Quantity(raw, "", raw)
        if after in language.clock and raw <= 24:
            return end + 1, Quantity(
                raw, "clock", round((raw % 12 + language.clock[after]) * 60) % _DAY
            )
        if after in ("st", "nd", "rd", "th"):
            return end + 1, Quantity(raw, "", raw)
        if after == "s" and (raw >= 100 or raw in range(10, 100, 10)):
            return end + 1, Quantity(raw, "span", raw)
        unit = (
            language.all_units.get(self._written[i - 1])
            if self._written[i - 1] in _CURRENCY
            else None
        )
        if (
            unit is None
            and after in ("a", "an", "of")
            and raw < 1
            and self._written[end + 1] in language.all_units
        ):
            end, unit = end + 2, language.all_units[self._written[end + 1]]
        elif unit is None:
            end, unit = self._unit(end)
        if unit is None:
            return end, Quantity(raw, "", raw, loose)
        return end, Quantity(raw, unit[0], _nine_figures(raw * unit[1]), loose or raw == 1)

    def _past(self, i: int) -> str:
        """The time of day that starts at ``i`` with a part of an hour: "quarter past six"; "" where none does."""
        numbers = self._language.numbers
        (word, after, beyond) = self._written[i : i + 3]
        part = numbers.get(word, 1.0)
        hour = numbers.get(beyond, float(beyond) if beyond.isdecimal() else 0.0)
        if not 0 < part < 1 or after not in self._language.past or hour not in _HOURS:
            return ""
        hours, minutes = divmod(60 * (hour + self._language.past[after] * part), 60)
        return f"{hours or 12:g}:{minutes:02g}"

    def _number(self, i: int) -> tuple[int, float | str, bool]:
        """Where the number that starts at ``i`` ends, its value, and whether another wording may leave it out: figures
        or words, with multipliers after it."""
        language = self._language
        word = self._written[i]
        end = i + 1
        if word[0].isdigit():
            figures = _figures(word)
            version = (
                i and self._tokens[i - 1].name and self._written[i - 1].isalpha() and "." in word
            )
            if isinstance(figures, str) or version:
                return end, word, False
            value = figures
        else:
            value = language.numbers.get(word, 1.0)
            end = i + (word in language.numbers)
        total, loose = 0.0, word in ("one", "first")
        while after := self._written[end]:
            if after in language.multipliers:
                factor = language.multipliers[after]
                value *= factor
                if factor >= 1000:
                    total, value = total + value, 0.0
            else:
                joined = after == "and" and value >= 100
                step = language.numbers.get(self._written[end + 1] if joined else after, 0.0)
                room = (
                    100
                    if value and value % 100 == 0
                    else 10
                    if value >= 20 and value % 10 == 0
                    else 0
                )
                if word[0].isdigit() or not 1 <= step < room:
                    break
                value, end = value + step, end + joined
            end, loose = end + 1, False
        return end, total + value, loose

    def _unit(self, i: int) -> tuple[int, Unit | None]:
        """The unit at ``i`` and where it ends: "km", "km/h", "metres per second", "degrees C"."""
        language = self._language
        (word, after, beyond) = self._written[i : i + 3]
        if word in _DEGREES and _SCALES.get(after, after) in _SCALES.values():
            return i + 2, language.all_units.get(_SCALES.get(after, after))
        unit = language.unit(word)
        if unit is None:
            return i, None
        compound = (
            language.unit(f"{word}/{beyond}")
            if after == language.per and beyond in language.all_units
            else None
        )
        return (
            (i + 3, compound) if compound and compound[0] in language.compounds else (i + 1, unit)
        )


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
    first, second = (Counter(map(_measure, x.found)) for x in (a, b))
    if first != second:
        left = _without(a.found, Counter(second), _measure)
        right = _without(b.found, first, _measure)
        if all(len({bool(q.dimension) for q in side}) == 2 for side in (left, right)):
            return "number"  # "2 pills every 4 hours", "4 pills every 2 hours"
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
