"""What the guards know of a language: the tables of one data file, and the stems by which they are looked up.

``words/en.toml`` says in its head what each table means and how it is written.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

Words = frozenset[str]
Senses = Mapping[str, str]
Phrases = Mapping[str, str]
Numbers = Mapping[str, float]
Pairs = tuple[tuple[str, str], ...]
Steps = tuple[Pairs, ...]
Entries = tuple[str, ...]
Endings = tuple[str, ...]
Unit = tuple[str, float]
"""A dimension and how many of its base units one of these is: ``("length", 1000.0)``."""

WORDS = Path(__file__).parent / "words"
_SHORTEST = 3  # letters that a stem keeps
_LONGEST = 40  # no word of a language is longer; a longer one is taken as it is


class Token(NamedTuple):
    """One word, number or sign."""

    word: str
    """Folded."""
    stem: str
    name: bool
    """Looks like a name: a capital inside a sentence, or several."""


def _entries(text: str) -> Entries:
    return tuple(" ".join(entry.split()) for entry in text.split(";") if entry.strip())


def _senses(text: str, between: str | None = None) -> dict[str, str]:
    """``may = may can; must``: words, or phrases with slashes ``between``, to their sense, or the first of them."""
    found: dict[str, str] = {}
    for entry in _entries(text):
        sense, equals, words = (part.strip() for part in entry.partition("="))
        if not equals:
            sense, words = entry.split()[0], entry
        found.update((" ".join(word.split()), sense) for word in words.split(between))
    return found


def _pairs(text: str) -> Pairs:
    """``en/de; /un``, or ``grey=gray`` with blanks between: two sides each."""
    entries = text.split() if "=" in text else _entries(text)
    sides = (entry.partition("=" if "=" in entry else "/") for entry in entries)
    return tuple((left.strip(), right.strip()) for left, _, right in sides)


_READ: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "Words": lambda text: frozenset(text.split()),
    "Senses": _senses,
    "Phrases": lambda text: _senses(text, "/"),
    "Numbers": lambda text: {word: float(value) for word, value in _senses(text).items()},
    "Pairs": _pairs,
    "Steps": lambda text: tuple(map(_pairs, _entries(text))),
    "Entries": _entries,
    "Endings": lambda text: tuple(text.split()),
}


def _tables(text: str, source: str) -> dict[str, Any]:
    """The tables of a file by name, each read as its annotation in `Language` says; empty where the file has none."""
    kinds: dict[str, str] = Language.__annotations__
    found: dict[str, Any] = {}
    for section, table in tomllib.loads(text).items():
        found |= {section: table} if section in kinds else table
    if unknown := found.keys() - kinds:
        raise ValueError(
            f"{source}: no guard knows {', '.join(sorted(unknown))}; the tables are {', '.join(kinds)}"
        )
    read: dict[str, Any] = {}
    for name, kind in kinds.items():
        one = _READ[kind.removeprefix("Mapping[str, ").removesuffix("]")]
        if kind.startswith("Mapping"):
            read[name] = {key: one(value) for key, value in found.get(name, {}).items()}
        else:
            read[name] = one(found.get(name, ""))
    return read


def _prefixed(t: Language) -> dict[str, Unit]:
    """Every prefix with every unit; of the symbols those that are used."""
    prefixes = {name: (letter, float(times)) for name, letter, times in map(str.split, t.prefixes)}
    found: dict[str, Unit] = {}
    for entry in t.prefixed:
        measure, names, symbol, taken = (part.strip() for part in f"{entry} ".split(" / "))
        dimension = measure.split()[0]
        factor = float(measure.split()[1])
        for name in names.split():
            for prefix, (_, times) in (("", ("", 1.0)), *prefixes.items()):
                found |= dict.fromkeys(
                    (f"{prefix}{name}", f"{prefix}{name}s"), (dimension, factor * times)
                )
        for prefix in taken.split():
            letter, times = prefixes[prefix]
            found[letter + symbol] = (dimension, factor * times)
        if symbol in t.symbols:
            found[symbol] = (dimension, factor)
    return found


class Language:
    """One language's words, by word or by stem as the guards ask for them.

    The annotations are the tables of its file; every table may be missing, and its guard then never objects.

    Args:
        text: a data file as it is written.
        source: names it in errors.

    Raises:
        ValueError: the file has a table that no guard knows.
    """

    suffixes: Steps
    spellings: Pairs
    verbs: Senses
    forms: Senses
    nations: Senses
    past_endings: Endings
    gerund: Endings
    degrees: Pairs
    endings: Pairs
    vowels: str

    fillers: Words
    attributes: Words
    adverbs: Words
    synonyms: Entries
    phrases: Phrases
    contraries: Words
    particles: Pairs
    twofold: Words
    homographs: Words
    capitals: Senses
    greetings: Entries
    spelling: Words
    typing: Entries
    typing_units: Words
    counted: Entries
    mentions: Words
    sayings: Words
    counting: Words
    naming: Words
    coding: Words
    extensions: Words
    lookalikes: Words

    opposites: Mapping[str, Pairs]
    groups: Mapping[str, Senses]
    dates: Mapping[str, Senses]

    function: Words
    telling: Words
    negations: Words
    denials: Words
    relations: Words
    symmetric: Words
    choices: Words
    articles: Words
    joints: Words
    relatives: Words
    clauses: Words
    shifts: Words
    narrowing: Words
    narrowing_times: Words
    open: Words
    leads: Words
    asked: Words
    helpers: Words
    hearer: Words
    third: Words
    thirds: Words
    owners: Words
    questions: Senses
    how: str
    how_much: Words
    persons: Senses
    speaker: Words
    spoken: Words
    owns: str
    modals: Senses
    advice: Words
    moods: Senses
    mild: Words
    tenses: Senses
    ways: Senses
    pivots: Words
    focusing: Words
    lessening: Words
    by: str
    passive: Words

    numbers: Numbers
    ordinals: Words
    multipliers: Numbers
    bounds: Senses
    bounds_before: Senses
    before: Words
    clock: Numbers
    past: Numbers
    per: str
    ambiguous: Senses
    prefixes: Entries
    prefixed: Entries
    symbols: Words
    units: Mapping[str, Numbers]

    def __init__(self, text: str, source: str = "language") -> None:
        vars(self).update(_tables(text, source))
        self._irregular = {**self.verbs, **self.forms, **self.nations}
        self._endings = [(tuple(ending for ending, _ in step), step) for step in self.suffixes]
        self.all_units = _prefixed(self)
        self.all_units |= {
            word: (name, times)
            for name, table in self.units.items()
            for word, times in table.items()
        }
        self.compounds = {dimension for dimension, _ in self.all_units.values() if "/" in dimension}
        self.senses = {
            word: (name, sense)
            for name, table in self.dates.items()
            for word, sense in table.items()
        }
        months = dict.fromkeys(self.dates.get("month", {}).values())
        self.senses |= {
            f"month:{number}": ("month", sense) for number, sense in enumerate(months, 1)
        }
        self.grouped = {word for table in self.groups.values() for word in table}
        self.groupings = self.stems(self.grouped)
        self.around = self.groups.get("direction", {}).keys() | self.pivots
        self.alone = self.articles | self.persons.keys()
        self.parting = self.ways.keys() | self.questions.keys() | self.relatives | self.clauses
        self.between = (
            self.function
            - self.relations
            - self.symmetric
            - self.choices
            - self.clauses
            - self.focusing
        )
        sides = ((self.speaker, self.spoken), (self.third, self.thirds))
        self.subjects = [
            dict.fromkeys(objects, False)
            | {
                word: True
                for word in subjects | self.function
                if word.partition("'")[0] in subjects
            }
            for subjects, objects in sides
        ]
        """For the speaker and for third persons, whether a word is a subject."""
        self.stop_stems = self.stems(self.fillers | self.function)
        self.movable = self.stop_stems | self.groupings | self.stems(self.adverbs)
        self.mention_stems = self.stems((*self.mentions, *self.sayings))
        self.relation_stems, self.symmetric_stems, self.joint_stems, self.denial_stems = map(
            self.stems, (self.relations, self.symmetric, self.joints, self.denials)
        )
        self.particles_of = {
            self.stem(verb): frozenset(words.split()) for verb, words in self.particles
        }
        self.classes: dict[str, set[int]] = {}
        for number, group in enumerate(self.synonyms):
            for stem in self.stems(group.split()):
                self.classes.setdefault(stem, set()).add(number)
        self.opposed: dict[str, dict[str, str]] = {}
        for name, pairs in self.opposites.items():
            for left, right in pairs:
                for one in self.stems(left.split()):
                    for other in self.stems(right.split()):
                        self.opposed.setdefault(one, {}).setdefault(other, name)
                        self.opposed.setdefault(other, {}).setdefault(one, name)
        self.narrow = self.narrowing | self.senses.keys()
        said = (*self.numbers, *self.multipliers, *self.all_units, *self.senses, *self.grouped)
        self.being = self.stems(self.passive & self.tenses.keys())
        self.auxiliaries = self.being | self.stems((*self.tenses, *self.modals))
        self.unhelped = (self.auxiliaries | {self.owns}) - self.stems(self.helpers)
        strongest = [*self.modals.values()][-1:]
        self.strongest = {
            word for word, mood in {**self.modals, **self.moods}.items() if mood in strongest
        }
        """Words for what must be, or is denied by itself."""
        self.open_questions = {word for word, kind in self.questions.items() if not kind}
        self.stop_words = self.function | {",", ";", "?"}
        self.related = self.stems((*self.senses, *self.all_units)) | self.classes.keys()
        self.known = self.stems((*self.fillers, *self.function, *said))
        self.known |= self.opposed.keys() | self.classes.keys()
        self.starts: dict[str, list[tuple[list[str], list[str]]]] = {}
        """By their first word the phrases, the longest first, each with the words in its place."""
        for phrase, instead in sorted(
            self.phrases.items(), key=lambda entry: -len(entry[0].split())
        ):
            words = phrase.split()
            self.starts.setdefault(words[0], []).append((words, instead.split()))

    def is_past(self, token: Token) -> bool:
        """Whether a word may be a past or its participle."""
        if token.word in self.tenses:
            return self.tenses[token.word] == "past"
        if token.word == token.stem or token.word.endswith(self.gerund):
            return False
        return token.word.endswith(self.past_endings) or (
            token.word in self.verbs and token.word[-1] != "s"
        )

    def is_auxiliary(self, token: Token) -> bool:
        """Whether a word says when, or what may or must be."""
        return token.word in self.tenses or token.word in self.modals

    def may_be_content(self, token: Token) -> bool:
        """Whether a word may be a verb or a noun."""
        return token.word[0].isalpha() and token.word not in self.function

    def are_synonyms(self, stem: str, other: str) -> bool:
        """Whether two stems are in one class of synonyms."""
        classes = self.classes.get(stem)
        return classes is not None and not classes.isdisjoint(self.classes.get(other, ()))

    def mean_the_same(self, word: str, other: str) -> bool:
        """Whether two words are one unit, or one day, month or the like."""
        unit = self.all_units.get(word)
        if unit is not None and unit == self.all_units.get(other):
            return True
        sense = self.senses.get(word)
        return sense is not None and sense == self.senses.get(other)

    def stems(self, words: Iterable[str]) -> frozenset[str]:
        """The stems of some words."""
        return frozenset(map(self.stem, words))

    def stem(self, word: str) -> str:
        """What the forms of a word have in common."""
        if word in self._irregular or len(word) > _LONGEST:
            return self._irregular.get(word, word)
        for letters, others in self.spellings:
            word = word.replace(letters, others)
        for endings, step in self._endings:
            for ending, instead in step if word.endswith(endings) else ():  # most words have none
                if word.endswith(ending) and (
                    instead == ending or len(word) - len(ending) >= _SHORTEST
                ):
                    word = word[: len(word) - len(ending)] + instead
                    break
        if len(word) > _SHORTEST and word[-1] == "e":
            word = word[:-1]
        if len(word) > _SHORTEST and word[-1] == word[-2] and word[-1] not in "aeiousz":
            word = word[:-1]
        if len(word) > _SHORTEST and word[-1] == "i":
            word = f"{word[:-1]}y"  # "movie" as "movies"
        return self._irregular.get(word, word)

    def unit(self, word: str) -> Unit | None:
        """A unit, or a compound one: "km/h"."""
        over, _, under = word.partition("/")
        if (
            not under
            or word in self.symmetric
            or over not in self.all_units
            or under not in self.all_units
        ):
            return self.all_units.get(word)
        (one, times) = self.all_units[over]
        (other, parts) = self.all_units[under]
        return (f"{one}/{other}", times / parts)


def token_of(word: str, name: bool, language: Language) -> Token:
    """A word with its stem."""
    return Token(word, language.stem(word), name and word not in language.function)


@cache
def languages() -> tuple[Language, ...]:
    """The languages that have a file in ``words``, English first."""
    files = sorted(WORDS.glob("*.toml"), key=lambda file: (file.stem != "en", file.stem))
    return tuple(Language(file.read_text(encoding="utf-8"), file.name) for file in files)
