"""A text as the guards see it: words with stems, the code and the quotations in it. One pass, linear in its length."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from semkv.keys import LITERAL, one_style
from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.operators import DATE, folded, operators

_KEPT = 40  # characters of a word whose token is remembered
_LONGEST = 200  # characters of a chunk that is still looked into
_PART = re.compile(r"\d+(?:[.,:]\d+)*|[^\W\d_]+(?:'[^\W\d_]+)*|[%°$€£¥₹]|[^\w\s]")
_EDGE = ".,;:!?\"“”„«»…‘'`*"
_BRACKETS = "()[]{}<>"
_SIGNS = "%°$€£¥₹"
_ENDS = ",.?!"  # signs after a plain word
STOPS = frozenset(",;?")
"""Signs that are tokens, since a question may start after one."""
_CODE = re.compile(
    r"""
    --?[a-zA-Z][\w-]*=?\S*              # a flag
    | \S*(?:://|::|->|=>|\\|\+\+|\w--)\S*
    | [~.]{0,2}/\S+                     # a path
    | [\w.%+-]+@[\w.-]+                 # an address
    | [a-z_][\w.]*\((?!e?s\))\S*        # a call
    | \#(?=\S*\d)\S+
    | \S*[_@=|^~\[\]{}<>]\S*
    | \S*/\S*/\S*
    | [vV]\d+(?:\.\d+)*                 # versions
    | \d+(?:\.\d+){2,}
    """,
    re.VERBOSE,
)
_CAMEL = re.compile(r"[a-z]{2,}[A-Z]\w*")
_DOTTED = re.compile(r"[\w-]{2,}(?:\.[\w-]+)*\.[a-z][\w-]+|\w\.[a-z][\w-]+")
_RATIO = re.compile(r"(\d[\d.,]*)?([^\W\d_]+/[^\W\d_]+)")
_QUOTES = re.compile(
    r"\"([^\"]{1,200})\"|“([^”]{1,200})”|„([^“”]{1,200})[“”]|«([^»]{1,200})»|`([^`]{1,200})`"
    r"|(?<!\w)['‘]([^'‘]{1,200})'(?!\w)"
)
_MARK = re.compile("[\"“„«`'‘]")
_FLAG = 5  # characters of a flag with one hyphen; a longer one is a word with a stray hyphen


class Token(NamedTuple):
    """One word, number or sign."""

    word: str
    """Folded."""
    stem: str
    name: bool
    """Looks like a name: a capital inside a sentence, or several."""
    measures: bool = False
    """May be part of a quantity: a figure, a number word or a unit."""


class Text(NamedTuple):
    """What the guards compare."""

    tokens: tuple[Token, ...]
    code: frozenset[str]
    """Identifiers, flags, paths and versions; folded where their case may be a way of typing."""
    spelled: frozenset[str]
    """Chunks between blanks that are no plain words, as written and folded: where the code of the other text is looked
    for."""
    operators: tuple[str, ...]
    """Signs between operands."""
    quotes: frozenset[str]
    dates: frozenset[str]
    """Dates in figures whose order of day and month is open."""
    cased: frozenset[str] | None
    """Words with capitals that are no way of typing, as written; None where the case of the text says nothing."""
    starts: frozenset[str]
    """Words whose capital is that of their sentence, folded."""


def read(text: str, lexicon: Lexicon) -> Text:
    """Take a text apart."""
    plain = unicodedata.normalize("NFKC", folded(text)).replace("’", "'")
    typed = one_style(plain) and not plain.islower()
    reader = _Reader(plain.split(), lexicon, typed=typed)
    words = _phrased(reader.words, lexicon)
    tokens = tuple([(_known if len(word) <= _KEPT else _token)(word, name, lexicon) for word, name in words])
    return Text(
        tokens,
        frozenset(reader.code),
        frozenset(reader.spelled),
        operators(plain, typed=typed),
        _quoted(plain),
        frozenset(reader.dates),
        reader.cased_words(),
        frozenset(reader.starts),
    )


def _token(word: str, name: bool, lexicon: Lexicon) -> Token:
    measures = word[0].isdigit() or "/" in word or word in lexicon.tables.measures
    return Token(word, lexicon.stem(word), name and word not in lexicon.function_words, measures)


_known = lru_cache(maxsize=16384)(_token)


class _Reader:
    """Sorts the chunks of a text: words, code and dates. ``typed``: capitals or Title Case are its way of typing."""

    def __init__(self, chunks: Sequence[str], lexicon: Lexicon, *, typed: bool) -> None:
        self._lexicon = lexicon
        self._typed = typed
        self._titled = typed or _titled(chunks)
        self._start = True
        self._cased: set[str] = set()
        self.starts: set[str] = set()
        self.words: list[tuple[str, bool]] = []
        self.code: set[str] = set()
        self.spelled: set[str] = set()
        self.dates: set[str] = set()
        for chunk in chunks:
            if chunk.isascii() and chunk.isalpha() and chunk.islower():
                self.words.append((chunk, False))
                self._start = False
            elif chunk.isalpha() and chunk[1:].islower():
                self._word(chunk)
                self._start = False
            elif chunk[-1] in _ENDS and chunk[:-1].isalpha() and chunk[1:-1].islower():
                self._word(chunk[:-1])
                if chunk[-1] in STOPS:
                    self.words.append((chunk[-1], False))
                self._start = chunk[-1] != ","
            else:
                self._mixed(chunk)

    def cased_words(self) -> frozenset[str] | None:
        return None if self._titled else frozenset(self._cased)

    def _word(self, chunk: str) -> None:
        word = chunk.casefold()
        if word == chunk:
            self.words.append((word, False))
        elif self._start:
            self.starts.add(word)
            self.words.append((word, False))
        else:
            self._cased.add(chunk)
            self.words.append((word, not self._titled))

    def _mixed(self, chunk: str) -> None:
        core = chunk.strip(_EDGE)
        inner = core.strip(_BRACKETS + _EDGE)
        folded = inner.casefold()
        self.spelled.add(inner)
        self.spelled.add(folded)
        if len(core) > _LONGEST:
            self.code.add(folded)
        elif DATE.fullmatch(core):
            self._date(core)
        elif is_code(core):
            cased = (
                (LITERAL.search(core) or ("[" in core and not self._typed))
                and not core.isalpha()
                and not _DOTTED.fullmatch(inner)
            )
            self.code.add((inner if cased else folded) or core)
            self.spelled.add(core)
            self.words.append((folded or core, False))
        else:
            self._parts(chunk, folded)
        self._start = chunk[-1] in ".?!:" or (self._start and not core)

    def _date(self, core: str) -> None:
        parts = re.split(r"[-/.]", core)
        if len(parts[0]) == 4 and 1 <= int(parts[1]) <= 12:
            self.words += [(parts[2], False), (f"month:{int(parts[1])}", False), (parts[0], False)]
        else:
            self.dates.add("/".join(str(int(part)) for part in parts))

    def _parts(self, chunk: str, folded: str) -> None:
        compound = _RATIO.fullmatch(folded)
        if folded in self._lexicon.clock:
            parts = [folded]
        elif compound and self._lexicon.unit(compound[2]):
            parts = [part for part in compound.groups() if part]
        else:
            parts = _PART.findall(chunk)
        for i, part in enumerate(parts):
            if part in STOPS:
                self.words.append((part, False))
            elif part[0].isalnum() or part in _SIGNS:
                self._case(part.removesuffix("'s"), first=i == 0)
                name = part[0].isupper() and not self._titled and (part[1:].isupper() or not (self._start and i == 0))
                follow = parts[i + 1] if i + 1 < len(parts) else ""
                if part == "C" and follow in ("+", "#"):
                    self.words.append((f"c{follow}", True))
                    self.code.add(f"c{follow}")
                elif part.endswith(("'s", "'S")):
                    self.words += [(part[:-2].casefold(), name), ("'s", False)]
                else:
                    apart = None if self._typed else self._lexicon.capitals.get(part)
                    self.words.append((apart or part.casefold(), name))

    def _case(self, part: str, *, first: bool) -> None:
        word = part.casefold()
        if word == part:
            return
        if first and self._start and part.istitle():
            self.starts.add(word)
        else:
            self._cased.add(part)


def is_code(core: str) -> bool:
    """Whether a chunk without the marks around it is an identifier, a flag, a path or a version."""
    if not core or core.isalpha():
        return bool(_CAMEL.fullmatch(core))
    if core[0] in _SIGNS or not any(map(str.isalnum, core)):
        return False
    if core[0].isdigit() and not core[-1].isalpha() and core.count(".") < 2:
        return False
    inner = core if "(" in core.lstrip("(") else core.strip(_BRACKETS)
    inner = inner.lstrip("([{<").strip(_EDGE)
    if not inner or inner.isalpha():
        return bool(_CAMEL.fullmatch(inner))
    if inner[0] == "-" and inner[1:2] != "-" and len(inner) > _FLAG:
        return False
    return bool(_CODE.fullmatch(inner)) or bool(_DOTTED.fullmatch(inner) and not inner.replace(".", "").isdigit())


def _titled(chunks: Sequence[str]) -> bool:
    """Whether capitals say nothing here: A Title Like This, OR SHOUTING."""
    heads = [chunk[0] for chunk in chunks[1:30] if chunk[0].isalpha()]
    return len(heads) > 2 and 3 * sum(map(str.isupper, heads)) > 2 * len(heads)


def _phrased(words: list[tuple[str, bool]], lexicon: Lexicon) -> list[tuple[str, bool]]:
    """Words with every phrase of the lexicon replaced by what stands for it."""
    phrases = lexicon.tables.phrases
    found: list[tuple[str, bool]] = []
    skip = 0
    for i, (word, name) in enumerate(words):
        if skip:
            skip -= 1
            continue
        if word not in phrases:
            if word:
                found.append((word, name))
            continue
        following = words[i + 1][0] if i + 1 < len(words) else ""
        for rest, instead in (*phrases[word].get(following, ()), *phrases[word].get("", ())):
            if [w for w, _ in words[i + 1 : i + 1 + len(rest)]] == rest:
                found += [(part, name) for part in instead]
                skip = len(rest)
                break
        else:
            found.append((word, name))
    return found


def _quoted(text: str) -> frozenset[str]:
    if not _MARK.search(text):
        return frozenset()
    found = (next(filter(None, m.groups())) for m in _QUOTES.finditer(text.replace('""', '"')))
    return frozenset(" ".join(_PART.findall(content.casefold())) for content in found)
