"""A text as the guards see it: words with stems, the code and the quotations in it. One pass, linear in its length."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

from semkv.keys import LITERAL, one_style
from semkv.tiers.guards.lexicon import Lexicon, forget_stems
from semkv.tiers.guards.marks import PHRASE
from semkv.tiers.guards.operators import DATE, OPERATOR, folded, operators

_KEPT = 24  # characters of a word or chunk that stays taken apart
_LONGEST = 200  # characters of a chunk that is still looked into
_PART = re.compile(r"\d+(?:[.,:]\d+)*|[^\W\d_]+(?:'[^\W\d_]+)*|[%°$€£¥₹]|[^\w\s]")
_EDGE = ".,;:!?\"“”„«»…‘'`*"
_BRACKETS = "()[]{}<>"
_SIGNS = "%°$€£¥₹"
_ENDS = ",.?!"  # signs after a plain word
STOPS = frozenset(",;?")
"""Signs that are tokens, since a question may start after one."""
_NO_WORDS: frozenset[str] = frozenset()
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
    marks: int = 0
    """The tables in which it stands."""


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
    plain = text if text.isascii() else unicodedata.normalize("NFKC", folded(text)).replace("’", "'")
    typed = (plain.isupper() or plain.istitle()) and one_style(plain)
    chunks = plain.split()
    titled = typed or _titled(chunks)
    tokens: list[Token] = []
    telling: list[_Chunk] = []
    capitals: set[int] = set()
    start = True
    for word in chunks:
        chunk = (_taken if len(word) <= _KEPT else _Chunk)(word, start, titled, typed, lexicon)
        start = chunk.last
        if chunk.telling:
            capitals.update([len(tokens) + i for i in chunk.capitals])
            telling.append(chunk)
        tokens += chunk.tokens
    if capitals:
        _lettered(tokens, capitals, lexicon)
    odd = " ".join([chunk.odd for chunk in telling if chunk.odd])
    return Text(
        tuple(_phrased(tokens, capitals, lexicon)),
        _union([chunk.code for chunk in telling]),
        _union([chunk.spelled for chunk in telling]),
        operators(plain, typed=typed) if OPERATOR.search(odd) else (),
        _quoted(plain) if _MARK.search(odd) else _NO_WORDS,
        _union([chunk.dates for chunk in telling]),
        None if titled else _union([chunk.cased for chunk in telling]),
        _union([chunk.starts for chunk in telling]),
    )


def _union(sets: list[frozenset[str]]) -> frozenset[str]:
    return _NO_WORDS.union(*sets) if sets else _NO_WORDS


@lru_cache(maxsize=16384)
def _remembered(word: str, name: bool, lexicon: Lexicon) -> Token:
    stem = lexicon.stem(word)
    return Token(word, stem, name and word not in lexicon.function_words, lexicon.marks(word, stem))


def _token(word: str, name: bool, lexicon: Lexicon) -> Token:
    return (_remembered if len(word) <= _KEPT else _remembered.__wrapped__)(word, name, lexicon)


class _Chunk:
    """What stands between two blanks, taken apart: words, code and dates.

    Args:
        chunk: the chunk.
        start: whether it starts a sentence.
        titled: whether its capitals say nothing.
        typed: whether the text is in capitals or Title Case.
    """

    __slots__ = (
        "_lexicon", "_start", "_titled", "_typed", "capitals", "cased", "code", "dates", "last", "odd", "spelled",
        "starts", "telling", "tokens",
    )  # fmt: skip

    def __init__(self, chunk: str, start: bool, titled: bool, typed: bool, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._typed = typed
        self._titled = titled
        self._start = start
        self.last = False
        """Whether a sentence starts after it."""
        self.tokens: list[Token] = []
        self.capitals: list[int] = []
        """Places of function words that are written like names."""
        self.cased = self.starts = self.code = self.spelled = self.dates = _NO_WORDS
        self.odd = ""
        """The chunk, unless it is a plain word: all that has signs or several capitals."""
        if chunk.isalpha() and (chunk.islower() or chunk[1:].islower()):
            self._word(chunk)
        elif chunk[-1] in _ENDS and chunk[:-1].isalpha() and chunk[1:-1].islower():
            self._word(chunk[:-1])
            if chunk[-1] in STOPS:
                self._add(chunk[-1])
            self.last = chunk[-1] != ","
        else:
            self.odd = chunk
            self._mixed(chunk)
        self.telling = bool(self.odd or self.cased or self.starts)
        """Whether there is more to it than its tokens."""

    def _add(self, word: str, name: bool = False) -> None:
        token = _token(word, name, self._lexicon)
        if name and not token.name:
            self.capitals.append(len(self.tokens))
        self.tokens.append(token)

    def _word(self, chunk: str) -> None:
        word = chunk.casefold()
        if word == chunk:
            self._add(word)
        elif self._start:
            self.starts = frozenset((word,))
            self._add(word)
        else:
            self.cased = frozenset((chunk,))
            self._add(word, not self._titled)

    def _mixed(self, chunk: str) -> None:
        core = chunk.strip(_EDGE)
        inner = core.strip(_BRACKETS + _EDGE)
        folded = inner.casefold()
        self.spelled = frozenset((inner, folded))
        if len(core) > _LONGEST:
            self.code = frozenset((folded,))
        elif DATE.fullmatch(core):
            self._date(core)
        elif is_code(core):
            cased = (
                (LITERAL.search(core) or ("[" in core and not self._typed))
                and not core.isalpha()
                and not _DOTTED.fullmatch(inner)
            )
            self.code = frozenset(((inner if cased else folded) or core,))
            self.spelled |= {core}
            self._add(folded or core)
        else:
            self._parts(chunk, folded)
        self.last = chunk[-1] in ".?!:" or (self._start and not core)

    def _date(self, core: str) -> None:
        parts = re.split(r"[-/.]", core)
        if len(parts[0]) == 4 and 1 <= int(parts[1]) <= 12:
            for word in (parts[2], f"month:{int(parts[1])}", parts[0]):
                self._add(word)
        else:
            self.dates = frozenset(("/".join(str(int(part)) for part in parts),))

    def _parts(self, chunk: str, folded: str) -> None:
        compound = _RATIO.fullmatch(folded) if "/" in folded else None
        if folded in self._lexicon.clock:
            parts = [folded]
        elif compound and self._lexicon.unit(compound[2]):
            parts = [part for part in compound.groups() if part]
        else:
            parts = _PART.findall(chunk)
        for i, part in enumerate(parts):
            if part in STOPS:
                self._add(part)
            elif part[0].isalnum() or part in _SIGNS:
                self._case(part.removesuffix("'s"), first=i == 0)
                name = part[0].isupper() and not self._titled and (part[1:].isupper() or not (self._start and i == 0))
                follow = parts[i + 1] if i + 1 < len(parts) else ""
                if part == "C" and follow in ("+", "#"):
                    self._add(f"c{follow}", True)
                    self.code |= {f"c{follow}"}
                elif part.endswith(("'s", "'S")):
                    self._add(part[:-2].casefold(), name)
                    self._add("'s")
                else:
                    apart = None if self._typed else self._lexicon.capitals.get(part)
                    self._add(apart or part.casefold(), name)

    def _case(self, part: str, *, first: bool) -> None:
        word = part.casefold()
        if word == part:
            return
        if first and self._start and part.istitle():
            self.starts |= {word}
        else:
            self.cased |= {part}


_taken = lru_cache(maxsize=8192)(_Chunk)


def forget_words() -> None:
    """Drop the words and chunks that are taken apart."""
    _taken.cache_clear()
    _remembered.cache_clear()
    forget_stems()


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
    heads = [chunk[0] for chunk in chunks[1:30]]
    capitals = sum(map(str.isupper, heads))
    return capitals > 2 and 3 * capitals > 2 * sum(map(str.isalpha, heads))


def _lettered(tokens: list[Token], capitals: Collection[int], lexicon: Lexicon) -> None:
    """Tell the letter from the article where letters stand for things: "if A implies B"."""
    if any(t.name and len(t.word) == 1 for t in tokens):
        for i in capitals:
            word, before = tokens[i].word, tokens[i - 1].word if i else ""
            spelled = len(before) == 1 and before.isalpha()  # "U.S.A."
            if len(word) == 1 and word in lexicon.articles and not spelled:
                tokens[i] = _token(f"{word}_", True, lexicon)


def _phrased(tokens: list[Token], capitals: Collection[int], lexicon: Lexicon) -> list[Token]:
    """Tokens with every phrase of the lexicon replaced by what stands for it."""
    phrases = lexicon.tables.phrases
    found: list[Token] = []
    done = 0
    for i in [i for i, token in enumerate(tokens) if token.marks & PHRASE]:
        if i < done:
            continue
        seconds = phrases[tokens[i].word]
        following = tokens[i + 1].word if i + 1 < len(tokens) else ""
        for rest, instead, beside in (*seconds.get(following, ()), *seconds.get("", ())):
            if [t.word for t in tokens[i + 1 : i + 1 + len(rest)]] == rest and (
                not beside or any(t.word == beside for t in tokens)
            ):
                name = tokens[i].name or i in capitals
                found += tokens[done:i]
                found += [_token(part, name, lexicon) for part in instead]
                done = i + 1 + len(rest)
                break
    return found + tokens[done:] if done else tokens


def _quoted(text: str) -> frozenset[str]:
    found = (next(filter(None, m.groups())) for m in _QUOTES.finditer(text.replace('""', '"')))
    return frozenset(" ".join(_PART.findall(content.casefold())) for content in found)
