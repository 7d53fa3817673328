"""What the guards know of a language: the tables of one data file, and the stems by which they are looked up.

``words/en.toml`` says in its head what each table means and how it is written.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
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
TELLING = 14
"""Words of a text among which one tells its language."""
KNOWN = 0.6
"""Share of the words that are known where none tells it."""
_SHORTEST = 3  # letters that a stem keeps
_DOUBLED = "aeiousz"  # letters that stay double at the end of a stem
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
        sides = entry.split("=", 1)
        sense = sides[0].strip() if len(sides) > 1 else entry.split()[0]
        members = sides[-1].strip()
        for word in members.split(between):
            found[" ".join(word.split())] = sense
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
        columns = [part.strip() for part in f"{entry} ".split(" / ")]
        dimension, base = columns[0].split()[:2]
        factor = float(base)
        for name in columns[1].split():
            found |= dict.fromkeys((name, f"{name}s"), (dimension, factor))
            for prefix, (_, times) in prefixes.items():
                unit = (dimension, factor * times)
                found |= dict.fromkeys((f"{prefix}{name}", f"{prefix}{name}s"), unit)
        symbol = columns[2]
        for prefix in columns[3].split():
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
    harmless_before: Words
    harmless_behind: Words
    harmless_phrases: Words
    manner: Endings
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
    kindred_relations: Entries
    kindred_of_forms: Entries
    recipients: Words
    returning: Words
    amounts: Words
    of: str
    stranded: Words
    light_verbs: Words
    kindred_verbs: Entries
    singling: Words
    adding: Words
    narrowing: Words
    narrowing_times: Words
    open: Words
    leads: Words
    asked: Words
    some: Words
    helpers: Words
    hearer: Words
    third: Words
    thirds: Words
    somebody: Words
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
    free: str
    infinitive: str
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

    placed: Words
    placed_otherwise: Words
    placed_near: Words
    placed_phrases: Entries
    documents: Words
    pieces: Words
    together: Words
    together_between: Words
    labels: Words

    units: Mapping[str, Numbers]

    def __init__(self, text: str, source: str = "language") -> None:
        vars(self).update(_tables(text, source))
        self._irregular = {**self.verbs, **self.forms, **self.nations}
        self._endings = [(tuple(ending for ending, _ in step), step) for step in self.suffixes]
        self._derive_values()
        self._derive_classes()
        self._derive_grammar()
        self._derive_verbs()
        self._derive_known()

    def _derive_values(self) -> None:
        self.all_units = _prefixed(self)
        for name, table in self.units.items():
            self.all_units |= {word: (name, times) for word, times in table.items()}
        self.compounds = {dimension for dimension, _ in self.all_units.values() if "/" in dimension}
        """Dimensions of compound units."""
        self.senses: dict[str, tuple[str, str]] = {}
        """Words of the calendar with their table and sense."""
        for name, senses in self.dates.items():
            self.senses |= {word: (name, sense) for word, sense in senses.items()}
        months = dict.fromkeys(self.dates.get("month", {}).values())
        for number, month in enumerate(months, 1):
            self.senses[f"month:{number}"] = ("month", month)
        self.narrow = self.narrowing | self.senses.keys()

    def _derive_classes(self) -> None:
        self.grouped = set().union(*self.groups.values())
        """Words whose presence must agree."""
        self.groupings = self.stems(self.grouped)
        self.classes: dict[str, set[int]] = {}
        """By stem, the classes of synonyms that have it."""
        for number, group in enumerate(self.synonyms):
            for stem in self.stems(group.split()):
                self.classes.setdefault(stem, set()).add(number)
        self.opposed: dict[str, dict[str, str]] = {}
        """By stem, its opposites with the reason of the veto."""
        for name, pairs in self.opposites.items():
            for left, right in pairs:
                self._add_opposites(name, self.stems(left.split()), self.stems(right.split()))

    def _add_opposites(self, name: str, left: Words, right: Words) -> None:
        for one, other in itertools.product(left, right):
            self.opposed.setdefault(one, {}).setdefault(other, name)
            self.opposed.setdefault(other, {}).setdefault(one, name)

    def _derive_grammar(self) -> None:
        self.stop_words = self.function | {",", ";", "?"}
        self.stop_stems = self.stems(self.fillers | self.function)
        self.movable = self.stop_stems | self.groupings | self.stems(self.adverbs)
        """Stems of words that may stand anywhere."""
        self.mention_stems = self.stems((*self.mentions, *self.sayings))
        self.harmless_before_stems = self.stems(self.harmless_before)
        self.harmless_behind_stems = self.stems(self.harmless_behind)
        self.harmless_phrase_stems = self.stems(self.harmless_phrases)
        self.relation_stems = self.stems(self.relations)
        self.kindred = _kindred(self.kindred_relations, str)
        """By small word between two others, those that may stand in for it there, and itself."""
        self.kindred_with_forms = _kindred((*self.kindred_relations, *self.kindred_of_forms), str)
        """The same before another form of the word behind it."""
        self.symmetric_stems = self.stems(self.symmetric)
        self.joint_stems = self.stems(self.joints)
        self.around = self.groups.get("direction", {}).keys() | self.pivots
        """Words around which the order of the others tells who is which."""
        others = (
            self.persons,
            self.somebody,
            self.articles,
            self.negations,
            self.lessening,
            self.numbers,
        )
        verbs = (self.tenses, self.modals, self.helpers, {self.owns})
        self.small_words = self.function.difference(*others, *verbs)
        """Words without content between two others, but for those that have rules of their own."""
        self.timing = self.clauses | self.shifts
        """Words before a clause or a time."""
        self.alone = self.articles | self.persons.keys()
        """Words of one letter, among others."""
        self.parting = self.ways.keys() | self.questions.keys() | self.relatives | self.clauses
        """Words that part a subject from a verb of another clause."""
        linking = (self.relations, self.symmetric, self.choices, self.clauses, self.focusing)
        self.between = self.function.difference(*linking)
        """Function words that may stand between a subject and its verb."""
        self.subjects = [
            self._subjects(self.speaker, self.spoken),
            self._subjects(self.third, self.thirds),
        ]
        """For the speaker and for third persons, whether a word is a subject."""
        self.open_questions = {word for word, kind in self.questions.items() if not kind}
        self.starts: dict[str, list[tuple[list[str], list[str]]]] = {}
        """By their first word the phrases, the longest first, each with the words in its place."""
        for phrase in sorted(self.phrases, key=lambda phrase: -len(phrase.split())):
            words = phrase.split()
            self.starts.setdefault(words[0], []).append((words, self.phrases[phrase].split()))

    def _subjects(self, subjects: Words, objects: Words) -> dict[str, bool]:
        """Whether a word is a subject: "he", "he'll"; not "him"."""
        contracted = {word for word in self.function if word.partition("'")[0] in subjects}
        return dict.fromkeys(objects, False) | dict.fromkeys(subjects | contracted, True)

    def _derive_verbs(self) -> None:
        self.denial_stems = self.stems(self.denials)
        self.particles_of = {
            self.stem(verb): frozenset(words.split()) for verb, words in self.particles
        }
        """By stem of a verb the words after it that make another verb of it."""
        self.light_verb_stems = self.stems(self.light_verbs)
        self.kindred_verb_stems = _kindred(self.kindred_verbs, self.stem)
        self.being = self.stems(self.passive & self.tenses.keys())
        self.auxiliaries = self.being | self.stems((*self.tenses, *self.modals))
        self.unhelped = (self.auxiliaries | {self.owns}) - self.stems(self.helpers)
        strongest = [*self.modals.values()][-1:]
        moods = {**self.modals, **self.moods}
        self.strongest = {word for word, mood in moods.items() if mood in strongest}
        """Words for what must be, or is denied by itself."""

    def _derive_known(self) -> None:
        self.related = self.stems((*self.senses, *self.all_units)) | self.classes.keys()
        """Stems of words that may have kin with another first letter."""
        values = (*self.numbers, *self.multipliers, *self.all_units, *self.senses, *self.grouped)
        self.known = self.stems((*self.fillers, *self.function, *values))
        """Stems of all words that a table has."""
        self.known |= self.opposed.keys() | self.classes.keys()

    def is_of(self, words: Sequence[str]) -> bool:
        """Whether words in small letters are a text in this language: one in fourteen is frequent in it, or most are in
        a table."""
        telling = sum(word in self.telling for word in words)
        if telling >= max(1, len(words) / TELLING):
            return True
        known = sum(self.stem(word) in self.known for word in words)
        return known >= KNOWN * len(words)

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

    def are_kindred_verbs(self, stem: str, other: str) -> bool:
        """Whether two verbs may stand in for each other where one of them has little content."""
        return other in self.kindred_verb_stems.get(stem, ())

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
            if word.endswith(endings):  # most words have none
                word = _without_ending(word, step)
        word = _without_last_letter(word)
        return self._irregular.get(word, word)

    def unit(self, word: str) -> Unit | None:
        """A unit, or a compound one: "km/h"."""
        units = self.all_units
        over, under = word.split("/", 1) if "/" in word else (word, "")
        if word in self.symmetric or over not in units or under not in units:
            return units.get(word)
        dimension, factor = units[over]
        other_dimension, parts = units[under]
        return f"{dimension}/{other_dimension}", factor / parts


def _without_ending(word: str, step: Pairs) -> str:
    """A word with the first ending that fits replaced."""
    for ending, instead in step:
        if word.endswith(ending):
            bare = word[: len(word) - len(ending)]
            if instead == ending or len(bare) >= _SHORTEST:
                return bare + instead
    return word


def _without_last_letter(word: str) -> str:
    """Without a silent "e" and one of two equal consonants; "movi" is "movy", as of "movies"."""
    if len(word) > _SHORTEST and word[-1] == "e":
        word = word[:-1]
    if len(word) > _SHORTEST and word[-1] == word[-2] and word[-1] not in _DOUBLED:
        word = word[:-1]
    if len(word) > _SHORTEST and word[-1] == "i":
        word = f"{word[:-1]}y"
    return word


def _kindred(entries: Entries, key: Callable[[str], str]) -> dict[str, set[str]]:
    """By word, or by its stem, those that stand with it in an entry, and itself."""
    found: dict[str, set[str]] = {}
    for entry in entries:
        words = set(map(key, entry.split()))
        for word in words:
            found.setdefault(word, set()).update(words)
    return found


def token_of(word: str, name: bool, language: Language) -> Token:
    """A word with its stem."""
    return Token(word, language.stem(word), name and word not in language.function)


@cache
def languages() -> tuple[Language, ...]:
    """The languages that have a file in ``words``, English first."""
    files = sorted(WORDS.glob("*.toml"), key=lambda file: (file.stem != "en", file.stem))
    return tuple(Language(file.read_text(encoding="utf-8"), file.name) for file in files)
