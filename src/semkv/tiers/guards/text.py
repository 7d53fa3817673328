"""A text as the guards see it: words with stems, the code and the quotations in it. One pass, linear in its length."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from semkv.tiers.guards.lexicon import Lexicon

_KEPT = 40  # characters of a word whose token is remembered
_LONGEST = 200  # characters of a chunk that is still looked into
_PART = re.compile(r"\d+(?:[.,:]\d+)*|[^\W\d_]+(?:'[^\W\d_]+)*|[%°$€£¥₹]|[^\w\s]")
_EDGE = ".,;:!?\"“”„«»…‘'`*"
_BRACKETS = "()[]{}<>"
_SIGNS = "%°$€£¥₹"
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
    | [-+*/%=<>!&|^~?:.]{1,3}           # operators
    """,
    re.VERBOSE,
)
_CAMEL = re.compile(r"[a-z]{2,}[A-Z]\w*")
_DOTTED = re.compile(r"[\w-]{2,}(?:\.[\w-]+)*\.[a-z][\w-]+|\w\.[a-z][\w-]+")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}")
_QUOTES = re.compile(
    r"\"([^\"]{1,200})\"|“([^”]{1,200})”|„([^“”]{1,200})[“”]|«([^»]{1,200})»|`([^`]{1,200})`"
    r"|(?<!\w)['‘]([^'‘]{1,200})'(?!\w)"
)
_NO_CODE = frozenset("- – — & / + . ... , : ; ? ! ?? ??? !! ?! -- * ~ =".split())
_FLAG = 5  # characters of a flag with one hyphen; a longer one is a word with a stray hyphen


class Token(NamedTuple):
    """One word, number or sign."""

    word: str
    """Folded."""
    stem: str
    name: bool
    """Looks like a name: a capital inside a sentence, or several."""


class Text(NamedTuple):
    """What the guards compare."""

    tokens: tuple[Token, ...]
    code: frozenset[str]
    """Identifiers, flags, paths, versions and operators, folded."""
    spelled: frozenset[str]
    """Chunks between blanks that are no plain words, folded: where the code of the other text is looked for."""
    quotes: frozenset[str]
    dates: frozenset[str]
    """Dates in figures whose order of day and month is open."""


def read(text: str, lexicon: Lexicon) -> Text:
    """Take a text apart."""
    plain = unicodedata.normalize("NFKC", text).replace("’", "'")
    reader = _Reader(plain.split(), lexicon)
    words = _phrased(reader.words, lexicon)
    tokens = tuple([(_known if len(word) <= _KEPT else _token)(word, name, lexicon) for word, name in words])
    return Text(tokens, frozenset(reader.code), frozenset(reader.spelled), _quoted(plain), frozenset(reader.dates))


def _token(word: str, name: bool, lexicon: Lexicon) -> Token:
    return Token(word, lexicon.stem(word), name and word not in lexicon.function_words)


_known = lru_cache(maxsize=16384)(_token)


class _Reader:
    """Sorts the chunks of a text: words, code and dates."""

    def __init__(self, chunks: Sequence[str], lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._titled = _titled(chunks)
        self._start = True
        self.words: list[tuple[str, bool]] = []
        self.code: set[str] = set()
        self.spelled: set[str] = set()
        self.dates: set[str] = set()
        for chunk in chunks:
            if chunk.isalpha() and chunk[1:].islower():
                self.words.append((chunk.casefold(), chunk[0].isupper() and not self._start and not self._titled))
                self._start = False
            else:
                self._mixed(chunk)

    def _mixed(self, chunk: str) -> None:
        core = chunk.strip(_EDGE)
        folded = core.strip(_BRACKETS + _EDGE).casefold()
        self.spelled.add(folded)
        if len(core) > _LONGEST:
            self.code.add(folded)
        elif _DATE.fullmatch(core):
            self._date(core)
        elif is_code(core):
            self.code.add(folded or core)
            self.spelled.add(folded or core)
            self.words.append((folded or core, False))
        else:
            self._parts(chunk)
        self._start = chunk[-1] in ".?!:" or (self._start and not core)

    def _date(self, core: str) -> None:
        parts = re.split(r"[-/.]", core)
        if len(parts[0]) == 4 and 1 <= int(parts[1]) <= 12:
            self.words += [(parts[2], False), (f"month:{int(parts[1])}", False), (parts[0], False)]
        else:
            self.dates.add("/".join(str(int(part)) for part in parts))

    def _parts(self, chunk: str) -> None:
        parts = _PART.findall(chunk)
        for i, part in enumerate(parts):
            if part in STOPS:
                self.words.append((part, False))
            elif part[0].isalnum() or part in _SIGNS:
                name = part[0].isupper() and not self._titled and (part[1:].isupper() or not (self._start and i == 0))
                follow = parts[i + 1] if i + 1 < len(parts) else ""
                if part == "C" and follow in ("+", "#"):
                    self.words.append((f"c{follow}", True))
                    self.code.add(f"c{follow}")
                elif part.endswith(("'s", "'S")):
                    self.words += [(part[:-2].casefold(), name), ("'s", False)]
                else:
                    self.words.append((self._lexicon.capitals.get(part) or part.casefold(), name))


def is_code(core: str) -> bool:
    """Whether a chunk without the marks around it is an identifier, a flag, a path, a version or an operator."""
    if core.isalpha():
        return bool(_CAMEL.fullmatch(core))
    if not core or core in _NO_CODE or core[0] in _SIGNS:
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
    words = [chunk for chunk in chunks[1:30] if chunk[0].isalpha()]
    return len(words) > 2 and 3 * sum(word[0].isupper() for word in words) > 2 * len(words)


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
        for rest, instead in phrases[word]:
            if [w for w, _ in words[i + 1 : i + 1 + len(rest)]] == rest:
                found += [(part, name) for part in instead]
                skip = len(rest)
                break
        else:
            found.append((word, name))
    return found


def _quoted(text: str) -> frozenset[str]:
    if not any(mark in text for mark in "\"“„«`'‘"):
        return frozenset()
    found = (next(filter(None, m.groups())) for m in _QUOTES.finditer(text.replace('""', '"')))
    return frozenset(" ".join(_PART.findall(content.casefold())) for content in found)
