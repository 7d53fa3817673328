"""Guards over what is written rather than said: code, quotations, case, numbers, units and dates."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from semkv_guards.language import Language, Token, Words
from semkv_guards.pairs import MOST, Pair
from semkv_guards.quantities import Quantity, differ
from semkv_guards.text import CAMEL, STOPS, Text

_WILD = frozenset("%*_^~|\\")  # signs of patterns
_SIGNS = re.compile(r"[\W_]+")
_NUMBERED = re.compile(r"[A-Za-z][\w.-]*\d|[a-z][\w.-]*/")
_HUMPED = re.compile(r"[A-Za-z][\w.-]*[A-Z]")
_FILE = re.compile(r".*\w\.([a-z]\w{0,4})")
_TURNED = str.maketrans("+-", "-+")  # "UTC+2", "UTC-2"
_SYMBOL = 2  # letters of a chemical symbol


def code(p: Pair) -> str | None:
    """An identifier, flag, path or version that the other text does not have, or writes otherwise ("userId", "userID");
    or other operators."""
    for mine, other in ((p.a, p.b), (p.b, p.a)):
        if any(found not in other.spelled and found not in other.words for found in mine.code):
            return "code"
    left, right = p.a.spelled - p.b.spelled, p.b.spelled - p.a.spelled
    humped = [{word.casefold() for word in own if CAMEL.fullmatch(word)} for own in (left, right)]
    if not humped[0].isdisjoint(humped[1]) or not p.b.spelled.isdisjoint(
        word.translate(_TURNED) for word in left
    ):
        return "code"
    if (left or right) and _respelled(p):
        return "code"
    a, b = p.a.operators, p.b.operators
    same = [t.stem for t in p.a.without_articles] == [t.stem for t in p.b.without_articles]
    return "code" if a and b and (a != b if same else sorted(a) != sorted(b)) else None


def _respelled(p: Pair) -> bool:
    """Whether an identifier has other signs or letters of another case: "web01", "web-01"; "feature/login"."""
    exact = p.a.cased is not None and p.b.cased is not None
    apart = p.a.spelled ^ p.b.spelled
    files = [
        word
        for word in apart
        if (file := _FILE.fullmatch(word)) and file[1] in p.language.extensions
    ]
    if exact and any(word.casefold() in p.a.spelled & p.b.spelled for word in files):
        return True
    found = [word for word in apart if _NUMBERED.match(word) or _HUMPED.match(word)]
    if not found or p.language.naming.isdisjoint(p.words):
        return False
    bare: tuple[dict[str, set[str]], ...] = ({}, {})
    for spellings, text in zip(bare, (p.b, p.a), strict=True):
        for word in text.spelled:
            spellings.setdefault(_bare(word), set()).add(word.casefold())
    theirs = ((word, bare[word in p.b.spelled].get(_bare(word))) for word in found)
    return any(
        others is not None
        and ((exact and ("." in word or not _HUMPED.match(word))) or word.casefold() not in others)
        and p.language.stem(_bare(word)) not in p.language.known  # "Wi-Fi", "wifi"
        for word, others in theirs
    )


def _bare(word: str) -> str:
    return _SIGNS.sub("", word).casefold()


def symbol(p: Pair) -> str | None:
    """Other emojis or signs: encoders read all of them as one unknown word."""
    return "symbol" if p.a.symbols and p.b.symbols and p.a.symbols != p.b.symbols else None


def quote(p: Pair) -> str | None:
    """Quoted words that the other text does not have, where it has other words instead."""
    wild = [
        {quoted for quoted in text.quotes if not _WILD.isdisjoint(quoted)} for text in (p.a, p.b)
    ]
    if all(wild) and wild[0] != wild[1]:
        return "quote"
    first, second = _unquoted(p.a, p.b), _unquoted(p.b, p.a)
    left, right = p.content
    return "quote" if (first and second) or (first and right) or (second and left) else None


def _unquoted(mine: Text, other: Text) -> bool:
    missing = mine.quotes - other.quotes
    text = f" {' '.join(t.word for t in other.tokens if t.word not in STOPS)} "
    plain = (" ".join(w for w in quoted.split() if w[0].isalnum()) for quoted in missing)
    return len(missing) > MOST or any(
        f" {words} " not in text and quoted.replace(" ", "") not in other.spelled
        for quoted, words in zip(missing, plain, strict=True)
    )


def case(p: Pair) -> str | None:
    """Other letters, beyond the case of typing: a word in capitals and the same one small; a name and the word that it
    is when small; any capital where letters are asked about.
    """
    first, second = p.a.cased, p.b.cased
    if p.a.starts != p.b.starts and _another_start(p):
        return "case"
    if first == second or first is None or second is None:
        return None
    spelling = p.language.spelling
    asked = not (spelling.isdisjoint(p.a.words) or spelling.isdisjoint(p.b.words))
    named, coded = (
        _named(p.a, words, p) & _named(p.b, words, p)
        for words in (p.language.naming, p.language.coding)
    )
    small = _small_acronyms(p.a, p.b, p), _small_acronyms(p.b, p.a, p)
    for written in first ^ second:
        mine, other = (p.a, p.b) if written in first else (p.b, p.a)
        word = written.casefold()
        pronoun = len(word) == 1 and word in p.language.persons
        typed = small[mine is p.b] and not asked and written.isupper()
        if (
            not typed
            and word in mine.words
            and word in other.words
            and word not in other.starts
            and not pronoun
        ):
            theirs = {w for w in other.cased or () if w.casefold() == word}
            if not theirs and any(t.word == word and not t.name for t in other.tokens):
                theirs = {word}
            exact = asked or word in coded or (word in named and (other.cased or other.starts))
            if any(exact or _apart(written, their, other, p) for their in theirs):
                return "case"
    return None


def _another_start(p: Pair) -> bool:
    """Whether a capital at the start is all that tells a name from a word: "Polish tips", "polish tips"."""
    apart, function = p.a.starts ^ p.b.starts, p.language.function
    apart &= p.language.twofold | p.language.homographs
    if not apart or [t.word for t in p.a.tokens] != [t.word for t in p.b.tokens]:
        return False
    said = function - p.language.tenses.keys()  # "will it", "will was"
    names = (
        y.word not in said or x.word not in function
        for x, y in itertools.pairwise(p.a.tokens)
        if x.word in apart
    )
    return any(names)


def _named(text: Text, naming: Words, p: Pair) -> set[str]:
    """The words that are identifiers by a word before them: "the branch Prod", "deploy to Prod"."""
    joints = p.language.ways.keys() - p.language.joints
    without_articles = (
        [t.word for t in text.without_articles if t.word not in joints]
        if naming & text.words
        else []
    )
    return {y for x, y in itertools.pairwise(without_articles) if x in naming}


def _small_acronyms(mine: Text, other: Text, p: Pair) -> bool:
    """Whether a text writes small what can only be an acronym: it may do so with others, "tcp and udp"."""
    sure = (w.casefold() for w in mine.cased or () if len(w) > 1 and w.isupper() and w.isalpha())
    written = {w.casefold() for w in other.cased or ()}
    vowels = p.language.vowels
    return any(
        vowels and set(w).isdisjoint(vowels) and w in other.words and w not in written for w in sure
    )


def _apart(written: str, their: str, other: Text, p: Pair) -> bool:
    """Whether a word with capitals is another one than the same word as the other text writes it."""
    if not their.islower():
        word = p.language.stem(their.casefold())
        return their.casefold() in p.language.twofold or (
            len(their) == _SYMBOL and word not in p.language.classes
        )
    if their in other.quantities.words:
        return False
    if not written.isascii() and len(written) == 1:  # "Ω" and "ω"
        return True
    if written.isupper() and len(written) > 1:
        return not p.language.vowels or not set(their).isdisjoint(p.language.vowels)
    return their in p.language.twofold and bool(other.cased or other.starts)


def quantity(p: Pair) -> str | None:
    """Another number or unit, or the same number of something else."""
    a, b = p.a.quantities, p.b.quantities
    reason = differ(a, b, p.language, converse=bool(p.converse))
    if reason or not a.after or not b.after:
        return reason
    mine, other = (_counted(text, only, p) for text, only, _, _ in p.views)
    if len(mine) > MOST or len(other) > MOST:
        return None
    quiet = p.language.stop_stems
    apart = (
        q.raw == r.raw
        and not (q.dimension and r.dimension)
        and not (x.stem in quiet and y.stem in quiet)
        and not p.akin(x, y)
        for q, x in mine
        for r, y in other
    )
    return "unit" if any(apart) else None


def _counted(text: Text, only: Sequence[Token], p: Pair) -> list[tuple[Quantity, Token]]:
    """Quantities with what they count, where that is in this text alone."""
    stems = {t.stem for t in only if t.word not in p.language.function and t.word[0].isalpha()}
    return [(quantity, token) for quantity, token in text.quantities.after if token.stem in stems]


def date(p: Pair) -> str | None:
    """Another day, month, season or time of day."""
    if p.a.dates != p.b.dates:
        return "date"
    alone = [t.word for only in p.only for t in only]
    if len(alone) == 1 and alone[0] in p.language.shifts:
        return "date"
    first, second = (
        {p.language.senses[t.word] for t in only if t.word in p.language.senses} for only in p.only
    )
    both = {name for name, _ in first} & {name for name, _ in second}
    return "date" if any(name in both for name, _ in first ^ second) else None


def narrower(p: Pair) -> str | None:
    """The same question of less: one text names a bound, a rate or a time, and the other has nothing in its place."""
    language = p.language
    for text, only, other, others in p.views:
        if not only or (
            language.per not in text.words and language.narrow.isdisjoint([t.word for t in only])
        ):
            continue
        if all(t.word in language.stop_words for t in others):
            befores = ["", *[t.word for t in text.tokens]]
            alone = [
                (before, t.word)
                for before, t in zip(befores, text.tokens, strict=False)
                if t in only
            ]
            if any(_narrows(before, word, other, language) for before, word in alone[:MOST]):
                return "quantity"
    return None


def _narrows(before: str, word: str, other: Text, language: Language) -> bool:
    """Whether a word and the one before it make a question narrower than the ``other`` text is."""
    if before == language.per or word in language.narrowing:
        return True
    kind, _ = language.senses.get(word, ("", ""))
    which, _ = language.senses.get(before, ("", ""))
    if which == "which" and (kind or word in language.all_units):  # "next week"
        return language.senses[before] != language.senses.get("this")
    if word in language.twofold or word in language.verbs:  # "may", "fall"
        return False
    clock = any(quantity.dimension == "clock" for quantity in other.quantities.found)
    return kind in language.narrowing_times and not clock
