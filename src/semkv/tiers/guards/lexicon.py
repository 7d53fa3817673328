"""What the guards know of a language: tables of words, and the stems that the tables are looked up by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from semkv.tiers.guards.marks import COMPARED, GERUND, MEASURE, SELF, stem_marks, word_marks

Unit = tuple[str, float]
"""A dimension and how many of its base units one of these is: ``("length", 1000.0)``."""
Phrase = tuple[list[str], list[str], str]
"""The words of a phrase after its first, the words that stand for it, and one that must be in the text; "" for none."""
_NONE: Mapping[str, str] = MappingProxyType({})
ROMAN: Mapping[str, int] = MappingProxyType(
    {roman: n for n, roman in enumerate("ii iii iv v vi vii viii ix x xi xii xiii xiv xv xvi".split(), 2)}
)
"""Numbers behind a name: "Henry VIII"."""
_SHORTEST = 3  # letters that a stem keeps
_LONGEST = 40  # no word of a language is longer; a longer one is taken as it is


def pairs(*lines: str) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Opposites written as ``"buy purchase / sell"``, several to a line with ``;`` between them."""
    found = []
    for line in lines:
        for entry in line.split(";"):
            left, _, right = entry.partition("/")
            if left.strip():
                found.append((tuple(left.split()), tuple(right.split())))
    return tuple(found)


def senses(*groups: str) -> Mapping[str, str]:
    """Words to the sense they stand for, the first word of their group."""
    return MappingProxyType({word: group.split()[0] for group in groups for word in group.split()})


@dataclass(frozen=True, slots=True, eq=False)
class Lexicon:
    """The words of one language that the guards know. Every table may be empty: its guard then never objects.

    Words are written folded (lower case); tables of content words are looked up by stem, so one form of each is enough.

    Attributes:
        negations: words that deny.
        denials: words that may deny ("fail", "stop"): as good as a negation, and no negation is needed beside them.
        numbers: number words, to values; ordinals too.
        ordinals: number words, and endings of figures, that rank.
        multipliers: words that multiply the number before them ("hundred", "dozen", "k").
        units: words and symbols of units, to dimension and factor.
        ambiguous: dimensions that may be one of several units ("pounds").
        per: the word between the two parts of a compound unit.
        clock: words after a number that make it a time of day, to the hours they add.
        past: words between a part of an hour and the hour, to the side of it ("quarter past six").
        dates: by name, the words of a calendar that exclude one another, each mapped to its sense.
        shifts: words that alone make another time of one ("the year after the war").
        groups: by name, words whose presence must agree ("left", "red"), each mapped to its sense.
        opposites: by the name of the veto, pairs of opposite words; a veto needs one on each side.
        denying: prefixes as good as a denial ("unsafe").
        contraries: pairs of prefixes that make opposites of one stem ("en" and "de", "" and "un").
        synonyms: classes of words that may stand in for each other, separated by blanks.
        phrases: phrases to the one word that stands for them.
        beside: phrases to a word without which a text does not mean that by them ("what is it short for").
        telling: frequent words that tell a text in this language, none that another one with these letters has too.
        function_words: words that carry no content by themselves.
        fillers: content words that a rewording adds or drops freely.
        attributes: fillers that tell one thing from another before its noun ("work visa").
        relations: function words that tie a subject to an object, so that an exchange around them matters.
        choices: words between the alternatives of a choice ("or").
        symmetric: words that allow the exchange ("and", "or").
        questions: question words to what they ask for; "" where they may ask for anything.
        degree: the question word that makes a question of the next adjective ("how old"), and adjectives after which
            it never asks for the manner ("how much").
        open: nouns after which "what" still asks for anything ("what kind").
        leads: words that may stand before the question word of a question ("tell me").
        capitals: words that are names when written in capitals, with the word to take for them.
        twofold: words that are a name with a capital and another word without ("Polish").
        acronyms: words that are short for something when written in capitals ("AIDS").
        vowels: letters of which every word has one; what has none is an abbreviation, however it is typed.
        spelling: words of questions about letters, to which capitals matter.
        lessening: words that turn a comparison round ("less"), and the endings of a comparative.
        demonyms: endings that make an adjective of a name.
        natives: adjectives and peoples of countries; each has the stem of its country.
        peoples: those that are peoples alone, and as good as their country ("Germans").
        persons: words for a person to a sense; ``third`` are the senses of persons spoken of, ``owners`` the words of
            the others that stand before what belongs to them ("my").
        speaker: words for the one who speaks, as subject and as object.
        owns: the word between an owner and what belongs to him.
        hearer: words for the one who is asked ("can you").
        modals: auxiliaries to what they say: may, should, must.
        tenses: auxiliaries to their time: past, perfect, present, future.
        pivots: words around which the order of the others tells who is which ("than").
        helpers: auxiliaries that a question for the object needs and one for the subject does not ("did").
        bounds: words before a quantity to the side of it that they mean, "inside" or "outside"; by the word after it,
            "" for any other: "up to a day" is inside, "up to a day before" outside.
        bounded: words after a quantity that say from where it is measured, to the word by which ``bounds`` has them.
        joints: prepositions that a compound noun does without: "the end of the day".
        relatives: words that start a clause about what stands before it ("that").
        particles: verbs, with the words after them that make another verb of each ("look up").
        spots: words for a place, before which a preposition makes no other verb ("stand up there").
        ways: words before a place or a person to the way they point, there or from there.
        articles: words left out when neighbours are compared.
        by: the word before the agent of a passive, the forms of its auxiliary, and the endings of a gerund, which
            is no agent.
        participles: endings of the participle of a passive.
        spellings: letters within a word to others that they are written as.
        suffixes: steps of endings that a stem loses, each with what takes its place; the first that fits is taken.
        irregular: forms to their stems.
    """

    negations: frozenset[str]
    numbers: Mapping[str, float] = field(default_factory=dict)
    ordinals: frozenset[str] = frozenset()
    multipliers: Mapping[str, float] = field(default_factory=dict)
    units: Mapping[str, Unit] = field(default_factory=dict)
    ambiguous: Mapping[str, tuple[Unit, ...]] = field(default_factory=dict)
    per: str = ""
    clock: Mapping[str, int] = field(default_factory=dict)
    past: Mapping[str, int] = field(default_factory=dict)
    dates: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    shifts: frozenset[str] = frozenset()
    groups: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    opposites: Mapping[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = field(default_factory=dict)
    contraries: tuple[tuple[str, str], ...] = ()
    denying: tuple[str, ...] = ()
    denials: frozenset[str] = frozenset()
    synonyms: tuple[str, ...] = ()
    phrases: Mapping[str, str] = field(default_factory=lambda: _NONE)
    beside: Mapping[str, str] = field(default_factory=lambda: _NONE)
    telling: frozenset[str] = frozenset()
    function_words: frozenset[str] = frozenset()
    fillers: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    relations: frozenset[str] = frozenset()
    symmetric: frozenset[str] = frozenset()
    questions: Mapping[str, str] = field(default_factory=lambda: _NONE)
    degree: tuple[str, frozenset[str]] = ("", frozenset())
    open: frozenset[str] = frozenset()
    leads: frozenset[str] = frozenset()
    capitals: Mapping[str, str] = field(default_factory=lambda: _NONE)
    twofold: frozenset[str] = frozenset()
    acronyms: frozenset[str] = frozenset()
    vowels: str = ""
    spelling: frozenset[str] = frozenset()
    lessening: tuple[frozenset[str], tuple[str, ...]] = (frozenset(), ())
    demonyms: frozenset[str] = frozenset()
    natives: frozenset[str] = frozenset()
    peoples: frozenset[str] = frozenset()
    persons: Mapping[str, str] = field(default_factory=lambda: _NONE)
    third: frozenset[str] = frozenset()
    owners: frozenset[str] = frozenset()
    speaker: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    owns: str = ""
    hearer: frozenset[str] = frozenset()
    modals: Mapping[str, str] = field(default_factory=lambda: _NONE)
    tenses: Mapping[str, str] = field(default_factory=lambda: _NONE)
    pivots: frozenset[str] = frozenset()
    helpers: frozenset[str] = frozenset()
    bounds: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    bounded: Mapping[str, str] = field(default_factory=lambda: _NONE)
    joints: frozenset[str] = frozenset()
    relatives: frozenset[str] = frozenset()
    particles: Mapping[str, frozenset[str]] = field(default_factory=dict)
    spots: frozenset[str] = frozenset()
    ways: Mapping[str, str] = field(default_factory=lambda: _NONE)
    articles: frozenset[str] = frozenset()
    choices: frozenset[str] = frozenset()
    by: tuple[str, frozenset[str], tuple[str, ...]] = ("", frozenset(), ())
    participles: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    suffixes: tuple[tuple[tuple[str, str], ...], ...] = ()
    irregular: Mapping[str, str] = field(default_factory=lambda: _NONE)
    tables: Tables = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", Tables.of(self))

    def stem(self, word: str) -> str:
        """What the forms of a word have in common."""
        return word if len(word) > _LONGEST else _stem(word, self)

    def marks(self, word: str, stem: str) -> int:
        """In which tables a word stands (`semkv.tiers.guards.marks`)."""
        found = self.tables.word_marks.get(word, 0) | self.tables.stem_marks.get(stem, 0)
        if word[0].isdigit() or "/" in word:
            found |= MEASURE
        if word.endswith(self.lessening[1]):
            found |= COMPARED
        if word.endswith(self.by[2]):
            found |= GERUND
        acts = word.partition("'")[0] in self.speaker[0] or word in self.speaker[1]
        return found | SELF if acts else found

    def unit(self, word: str) -> Unit | None:
        """A unit, or a compound one: "km/h"."""
        if "/" not in word:
            return self.units.get(word)
        over, _, under = word.partition("/")
        if word in self.symmetric or over not in self.units or under not in self.units:
            return self.units.get(word)
        (one, times), (other, parts) = self.units[over], self.units[under]
        return (f"{one}/{other}", times / parts)


@dataclass(frozen=True, slots=True)
class Tables:
    """The lexicon's tables by stem, made once."""

    opposites: Mapping[str, Mapping[str, str]]
    classes: Mapping[str, frozenset[int]]
    denials: frozenset[str]
    relations: frozenset[str]
    symmetric: frozenset[str]
    quiet: frozenset[str]
    phrases: Mapping[str, Mapping[str, list[Phrase]]]
    word_marks: Mapping[str, int]
    stem_marks: Mapping[str, int]
    dates: Mapping[str, tuple[str, str]]
    known: frozenset[str]
    pivots: frozenset[str]
    particles: Mapping[str, frozenset[str]]
    compounds: frozenset[str]
    joints: frozenset[str]

    @classmethod
    def of(cls, lexicon: Lexicon) -> Tables:
        opposites, classes = _opposites(lexicon), _classes(lexicon)
        said = {*lexicon.fillers, *lexicon.function_words, *lexicon.numbers, *lexicon.multipliers, *lexicon.units}
        said.update(word for table in (lexicon.dates, lexicon.groups) for group in table.values() for word in group)
        denials = frozenset(_stem(word, lexicon) for word in lexicon.denials)
        known = frozenset((*opposites, *classes, *(_stem(word, lexicon) for word in said)))
        particles = {_stem(verb, lexicon): after for verb, after in lexicon.particles.items()}
        pivots = frozenset(lexicon.groups.get("direction", _NONE)) | lexicon.pivots
        dates = _dates(lexicon)
        measures = (*lexicon.numbers, *lexicon.multipliers, *lexicon.units, *ROMAN)
        return cls(
            opposites=opposites,
            classes=classes,
            denials=denials,
            relations=frozenset(_stem(word, lexicon) for word in lexicon.relations),
            symmetric=frozenset(_stem(word, lexicon) for word in lexicon.symmetric),
            quiet=frozenset(_stem(word, lexicon) for word in lexicon.fillers | lexicon.function_words),
            phrases=_phrases(lexicon),
            word_marks=word_marks(lexicon, measures, dates, pivots),
            stem_marks=stem_marks(denials, particles, known, opposites, classes),
            dates=dates,
            known=known,
            pivots=pivots,
            particles=particles,
            joints=frozenset(_stem(word, lexicon) for word in lexicon.joints),
            compounds=frozenset(dimension for dimension, _ in lexicon.units.values() if "/" in dimension),
        )


def _opposites(lexicon: Lexicon) -> Mapping[str, Mapping[str, str]]:
    """Stem to the stems that oppose it, each with the name of the veto."""
    found: dict[str, dict[str, str]] = {}
    for name, entries in lexicon.opposites.items():
        for left, right in entries:
            for a in left:
                for b in right:
                    first, second = _stem(a, lexicon), _stem(b, lexicon)
                    found.setdefault(first, {}).setdefault(second, name)
                    found.setdefault(second, {}).setdefault(first, name)
    return found


def _classes(lexicon: Lexicon) -> Mapping[str, frozenset[int]]:
    found: dict[str, set[int]] = {}
    for number, group in enumerate(lexicon.synonyms):
        for word in group.split():
            found.setdefault(_stem(word, lexicon), set()).add(number)
    return {word: frozenset(numbers) for word, numbers in found.items()}


def _dates(lexicon: Lexicon) -> Mapping[str, tuple[str, str]]:
    """Words of the calendar to the name of their group and their sense; ``month:5`` is the fifth month."""
    found = {word: (name, sense) for name, group in lexicon.dates.items() for word, sense in group.items()}
    months = dict.fromkeys(lexicon.dates.get("month", _NONE).values())
    return found | {f"month:{number}": ("month", sense) for number, sense in enumerate(months, 1)}


def _phrases(lexicon: Lexicon) -> Mapping[str, Mapping[str, list[Phrase]]]:
    """By their first and second word ("" where there is none), longest first."""
    found: dict[str, dict[str, list[Phrase]]] = {}
    for phrase, instead in sorted(lexicon.phrases.items(), key=lambda entry: -len(entry[0].split())):
        first, *rest = phrase.split()
        entry = (rest, instead.split(), lexicon.beside.get(phrase, ""))
        found.setdefault(first, {}).setdefault(rest[0] if rest else "", []).append(entry)
    return found


@lru_cache(maxsize=16384)
def _stem(word: str, lexicon: Lexicon) -> str:
    if word in lexicon.irregular:
        return lexicon.irregular[word]
    for letters, others in lexicon.spellings:
        word = word.replace(letters, others)
    for step in lexicon.suffixes:
        for ending, instead in step:
            if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST:
                word = word[: len(word) - len(ending)] + instead
                break
    if len(word) > _SHORTEST and word[-1] == "e":
        word = word[:-1]
    if len(word) > _SHORTEST and word[-1] == word[-2] and word[-1] not in "aeiousz":
        word = word[:-1]
    if len(word) > _SHORTEST and word[-1] == "i":
        word = f"{word[:-1]}y"  # "movie" as "movies"
    return lexicon.irregular.get(word, word)


def forget_stems() -> None:
    """Drop the stems that are remembered."""
    _stem.cache_clear()


def merged(*tables: Iterable[str]) -> frozenset[str]:
    """Several blank-separated lists as one set."""
    return frozenset(word for table in tables for line in table for word in line.split())
