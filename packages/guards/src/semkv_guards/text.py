"""A text as the guards see it: words with stems, numbers, code, quotations and operators. Linear in its length."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from semkv_guards.folding import LITERAL, one_style
from semkv_guards.language import Language, Token, token_of
from semkv_guards.quantities import Quantities

_LONGEST = 200  # characters of a chunk that is still looked into
_FLAG = 5  # characters of a flag with one hyphen; a longer one is a word with a stray hyphen
_EDGE = ".,;:!?\"“”„«»…‘'`*"
_BRACKETS = "()[]{}<>"
_SIGNS = frozenset("%°$€£¥₹")
# Kinds of signs in Unicode, and what is newer or private.
_SYMBOLS = frozenset(("So", "Sk", "Sm", "Sc", "Co", "Cn"))
_SKINS = frozenset(map(chr, range(0x1F3FB, 0x1F400)))
# Of the flags of England, Scotland and Wales.
_FLAG_LETTERS = frozenset(map(chr, range(0xE0020, 0xE0080)))
STOPS = frozenset(",;?")
"""Signs that are tokens, since a question may start after one."""
END = Token("?", "?", False)
_NONE: frozenset[str] = frozenset()

_BARE_POINT = re.compile(r"(?<![\w.,])(?=[.,]\d)")
"""Where a number has no figure before its point: ".5"."""
_PART = re.compile(r"\d+(?:[.,:]\d+)*|[^\W\d_]+(?:'[^\W\d_]+)*|[%°$€£¥₹]|[^\w\s]")
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
    | %[-+.\d]*[a-z]{1,2}                # a format
    """,
    re.VERBOSE,
)
CAMEL = re.compile(r"[a-z]{2,}[A-Z]\w*")
"""A word that is written "likeThis"."""
_DOTTED = re.compile(r"[\w-]{2,}(?:\.[\w-]+)*\.[a-z][\w-]+|\w\.[a-z][\w-]+")
_RATIO = re.compile(r"(\d[\d.,]*)?([^\W\d_]+/[^\W\d_]+)")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}")
_MARK = re.compile("[\"“„«`'‘]")
_QUOTES = re.compile(
    r"\"([^\"]{1,200})\"|“([^”]{1,200})”|„([^“”]{1,200})[“”]|«([^»]{1,200})»|`([^`]{1,200})`"
    r"|(?<!\w)['‘]([^'‘]{1,200})'(?!\w)"
)

_ONE_FORM = str.maketrans(
    {
        "→": "->",
        "⇒": "=>",
        "×": "*",
        "·": "*",
        "÷": "/",
        "−": "-",
        "–": "-",
        "≤": "<=",
        "≥": ">=",
        "≠": "!=",
    }
)
_SIZE = re.compile(r"\b([ckmd]?m)([²³])")
_POWER = re.compile(r"(?<=[\w)\]])[²³]")
_SUM = re.compile(r"(?<![\d.,])\d[\d.,]*+(?:\s*+[-+*/%^]{1,2}\s*+\d[\d.,]*+)+")
_OPERATOR = re.compile(r"[<>=*+^|~%&]|[-/](?![^\W\d])|\b(?:AND|X?OR|NOT)\b")
_INSIDE = re.compile(
    r"(?<=[\w)\]])(?:[<>]=?|[=!]=+|<>|=|[*^|~]{1,2}|\+|&&|->|=>|\.[*/^])(?=[\w(\[])"
)
_ALONE = re.compile(r"[<>=!+*/^%&|~:-]*[<>=+*/^%&|~-]|\.[*/^]")
# Stand alone by a habit of typing: marks with a blank before them, dashes, brackets.
_USUAL = re.compile(r"[.,?!…]+|[;:&=()\[\]]|-{1,3}|[–—]")
_FACE = re.compile(r"(?:(?<!\d)[:;=]['^-]?[()DPp3]|<3|\b[xX]D)$")
_TAG = re.compile(r"<.*>")
_CONNECTIVES = frozenset(("AND", "OR", "NOT", "XOR"))


def _in_ascii_forms(text: str) -> str:
    """A text with one form of each sign, the ASCII one where there is one."""
    return unicodedata.normalize("NFKC", _one_form(text)).replace("’", "'")


class Text:
    """A text taken apart: what the guards compare."""

    def __init__(self, text: str, language: Language) -> None:
        plain = text if text.isascii() else _in_ascii_forms(text)
        plain = _BARE_POINT.sub("0", plain)
        pieces = plain.split()
        self.language = language
        self._case_is_style = (plain.isupper() or plain.istitle()) and one_style(plain)
        self._titled = self._case_is_style or _titled(pieces)
        self.is_small = plain.islower()
        """Whether it has no capital at all, which is a way of typing."""
        self._start = True  # of a sentence
        self._capitals: list[int] = []  # places of function words that are written like names
        self.code: set[str] = set()
        """Identifiers, flags, paths and versions; folded where their case may be a way of typing."""
        self.spelled: set[str] = set()
        """Chunks between blanks that are no plain words, as written and folded: where the code of the other text is
        looked for."""
        self.dates: set[str] = set()
        """Dates in figures whose order of day and month is open."""
        self.starts: set[str] = set()
        """Words whose capital is that of their sentence, folded."""
        self._cased: set[str] = set()
        self._read: list[Token] = []
        # A plain word has neither signs nor several capitals.
        odd = " ".join([piece for piece in pieces if not self._plain(piece)])
        _tell_letters(self._read, self._capitals, language)
        self.tokens = _phrased(self._read, language)
        self.without_articles = tuple([t for t in self.tokens if t.word not in language.articles])
        """The tokens but for articles."""
        self.words = frozenset([t.word for t in self.tokens])
        self.stems: Mapping[str, int] = Counter([t.stem for t in self.tokens])
        """How often each occurs."""
        self.quantities = Quantities(self.tokens, language)
        self.operators = (
            operators(plain, case_is_style=self._case_is_style) if _OPERATOR.search(odd) else ()
        )
        """Signs between operands."""
        self.symbols = "" if plain.isascii() else _symbols(plain)
        """Emojis and signs that are no words, in their order."""
        self.written = plain
        """As it is written, but for forms of one sign."""
        self.lone_signs = _lone_signs(pieces) if odd else _NONE
        """Signs that stand alone, but for marks, dashes, brackets and operators; faces, and tags."""
        self.quotes = _quoted(plain) if _MARK.search(odd) else _NONE

    @property
    def cased(self) -> set[str] | None:
        """Words with capitals that are no way of typing, as written; None where the case of the text says nothing."""
        return None if self._titled else self._cased

    @cached_property
    def content_stems(self) -> list[str]:
        """Its stems but for articles and auxiliaries."""
        auxiliaries = self.language.auxiliaries
        return [t.stem for t in self.without_articles if t.stem not in auxiliaries]

    @cached_property
    def starts_with_auxiliary(self) -> bool:
        """Whether it may be answered by yes or no, or offers a choice."""
        return bool(self.tokens) and self.language.is_auxiliary(self.tokens[0])

    @cached_property
    def asks_yes_or_no(self) -> bool:
        """Whether yes or no is all that it asks for."""
        return (
            self.starts_with_auxiliary
            and self.words.isdisjoint(self.language.choices)
            and self.words.isdisjoint(self.language.questions)
        )

    def _add(self, word: str, name: bool = False) -> None:
        found = token_of(word, name, self.language)
        if name and not found.name:
            self._capitals.append(len(self._read))
        self._read.append(found)

    def _add_initial(self, letter: str) -> None:
        """A letter before a name: the "A." of "A. Weber" is no article, and the "m." of "20 m." no initial."""
        word = letter.casefold()
        may_be_article = letter.isupper() or word not in self.language.all_units
        if may_be_article and word in self.language.function:
            word = f"{word}_"
        self._add(word, True)

    def _plain(self, chunk: str) -> bool:
        """Take apart what stands between two blanks, and say whether it is a plain word."""
        written = chunk[:-1] if chunk[-1] in ",.?!" else chunk
        if not written.isalpha() or not (len(written) == 1 or written[1:].islower()):
            self._mixed(chunk)
            return False
        word = written.casefold()
        capital = word != written
        if capital and self._start:
            self.starts.add(word)
        elif capital:
            self._cased.add(written)
        if chunk[1:] == ".":
            self._add_initial(written)
        else:
            self._add(word, capital and not self._start and not self._titled)
        if chunk[-1] in STOPS:
            self._add(chunk[-1])
        self._start = chunk[-1] in ".?!"
        return True

    def _mixed(self, chunk: str) -> None:
        core = chunk.strip(_EDGE)
        inner = core.strip(_BRACKETS + _EDGE)
        folded = inner.casefold()
        self.spelled |= {inner, folded}
        if len(core) > _LONGEST:
            self.code.add(folded)
        elif _DATE.fullmatch(core):
            self._date(core)
        elif is_code(core):
            literal = LITERAL.search(core) or ("[" in core and not self._case_is_style)
            cased = literal and not core.isalpha() and not _DOTTED.fullmatch(inner)
            self.code.add((inner if cased else folded) or core)
            self.spelled.add(core)
            self._add(folded or core)
        else:
            self._parts(chunk, folded)
        self._start = chunk[-1] in ".?!:" or (self._start and not core)

    def _date(self, core: str) -> None:
        parts = re.split(r"[-/.]", core)
        if len(parts[0]) == 4 and 1 <= int(parts[1]) <= 12:
            for word in (parts[2], f"month:{int(parts[1])}", parts[0]):
                self._add(word)
        else:
            self.dates.add("/".join(str(int(part)) for part in parts))

    def _parts(self, chunk: str, folded: str) -> None:
        """Take apart what is neither a plain word nor code: figures, signs, words with capitals inside."""
        parts = self._split(chunk, folded)
        for i, part in enumerate(parts):
            if part in STOPS:
                self._add(part)
            elif part == "-" and _is_sign(parts, i):
                self._add("minus")
            elif part[0].isalnum() or part in _SIGNS:
                self._alphanumeric(parts, i)

    def _split(self, chunk: str, folded: str) -> list[str]:
        if folded in self.language.clock:
            return [folded]
        compound = _RATIO.fullmatch(folded) if "/" in folded else None
        if compound and self.language.unit(compound[2]):
            return [part for part in compound.groups() if part]
        return _PART.findall(chunk)

    def _alphanumeric(self, parts: Sequence[str], i: int) -> None:
        part = parts[i]
        after = parts[i + 1] if i + 1 < len(parts) else ""
        is_letter = len(part) == 1
        if is_letter and self._is_affix(part.casefold(), parts[:i], after):
            self._add(f"{part.casefold()}_", True)
        elif is_letter and part.isupper() and after == ".":
            self._add_initial(part)
        else:
            self._part(part, after, first=self._start and i == 0)

    def _is_affix(self, letter: str, before: Sequence[str], after: str) -> bool:
        """Whether a letter that is a word or a unit elsewhere belongs to an identifier: "LN-5567A", "gate 12A"."""
        is_function = letter in self.language.function
        if not before:
            return is_function and after.isdigit()
        whole = [part for part in before if part not in "-(["]
        if not letter.isalpha() or after.isalnum() or not whole or not whole[-1].isdigit():
            return False
        if whole[0].isalpha() and whole[-1] == before[-1] and _SIGNS.isdisjoint(whole):
            return letter != "s"
        return is_function and letter not in self.language.all_units

    def _part(self, part: str, after: str, *, first: bool) -> None:
        bare = part.removesuffix("'s")
        if bare.casefold() != bare:
            if first and bare.istitle():
                self.starts.add(bare.casefold())
            else:
                self._cased.add(bare)
        name = part[0].isupper() and not self._titled and (part[1:].isupper() or not first)
        if part == "C" and after in ("+", "#"):
            self._add(f"c{after}", True)
            self.code.add(f"c{after}")
        elif part.endswith(("'s", "'S")):
            self._add(part[:-2].casefold(), name)
            self._add("'s")
        else:
            apart = None if self._case_is_style else self.language.capitals.get(part)
            self._add(apart or part.casefold(), name)


def _lone_signs(pieces: Sequence[str]) -> frozenset[str]:
    found = set()
    last = len(pieces) - 1
    for place, piece in enumerate(pieces):
        core = piece.rstrip(".,?!")
        is_operator = 0 < place < last and _ALONE.fullmatch(piece)
        if any(map(str.isalnum, piece)):
            face = _FACE.search(core)
            found.add(face[0] if face else piece if _TAG.fullmatch(piece) else "")
        elif piece.isascii() and not is_operator and not _USUAL.fullmatch(piece):
            found.add(core)  # of the others none is read, or all that stand alone must be the same
    return frozenset(found - {""})


def is_code(core: str) -> bool:
    """Whether a chunk without the marks around it is an identifier, a flag, a path or a version."""
    if not core or core.isalpha():
        return bool(CAMEL.fullmatch(core))
    if core[0] in _SIGNS - {"%"} or not any(map(str.isalnum, core)):
        return False
    inner = core if "(" in core.lstrip("(") else core.strip(_BRACKETS)
    inner = inner.lstrip("([{<").strip(_EDGE)
    if not inner or inner.isalpha():
        return bool(CAMEL.fullmatch(inner))
    if inner[0] == "-" and inner[1:2] != "-" and len(inner) > _FLAG:
        return False
    return bool(_CODE.fullmatch(inner)) or bool(
        _DOTTED.fullmatch(inner) and not inner.replace(".", "").isdigit()
    )


def _is_sign(parts: Sequence[str], i: int) -> bool:
    """Whether a hyphen is the sign of a number, as in "-5", "(-$5" and "3*-2", and neither a dash nor a range."""
    after = "".join(parts[i + 1 : i + 3]).lstrip("$€£¥₹")
    return after[:1].isdigit() and (
        i == 0 or not (parts[i - 1][-1].isalnum() or parts[i - 1] in ("-", ".", "%"))
    )


def _titled(pieces: Sequence[str]) -> bool:
    """Whether capitals say nothing here: A Title Like This, OR SHOUTING."""
    heads = [piece[0] for piece in pieces[1:30]]
    capitals = sum(map(str.isupper, heads))
    return capitals > 2 and 3 * capitals > 2 * sum(map(str.isalpha, heads))


def _tell_letters(tokens: list[Token], capitals: Iterable[int], language: Language) -> None:
    """Tell the letter from the article where letters stand for things: "if A implies B", "divide a by b"."""
    for i, (x, between, y) in enumerate(zip(tokens, tokens[1:], tokens[2:], strict=False)):
        is_tied = between.word in STOPS or between.stem in language.relation_stems
        if is_tied and len(y.word) == 1 and _is_lone_article(x, language):
            tokens[i] = token_of(f"{x.word}_", True, language)
    if not any(t.name and len(t.word) == 1 for t in tokens):
        return
    for i in capitals:
        before = tokens[i - 1].word if i else ""
        is_spelled = len(before) == 1 and before.isalpha()  # "U.S.A."
        if not is_spelled and _is_lone_article(tokens[i], language):
            tokens[i] = token_of(f"{tokens[i].word}_", True, language)


def _is_lone_article(token: Token, language: Language) -> bool:
    return len(token.word) == 1 and token.word in language.articles


def _phrased(tokens: list[Token], language: Language) -> tuple[Token, ...]:
    """Tokens with every phrase of the language replaced by what is read in its place."""
    found: list[Token] = []
    done = 0
    words = [t.word for t in tokens]
    for i in [i for i, word in enumerate(words) if word in language.starts]:
        for phrase, instead in language.starts[words[i]] if i >= done else ():
            if words[i : i + len(phrase)] == phrase:
                found += tokens[done:i]
                found += [token_of(part, tokens[i].name, language) for part in instead]
                done = i + len(phrase)
                break
    return tuple(found + tokens[done:] if done else tokens)


def _quoted(text: str) -> frozenset[str]:
    found = (next(filter(None, m.groups())) for m in _QUOTES.finditer(text.replace('""', '"')))
    return frozenset(" ".join(_PART.findall(content.casefold())) for content in found)


def _symbols(text: str) -> str:
    """Its emojis and signs in their order, repeated ones once, whatever their skin; two letters are a flag."""
    signs = (
        sign for sign in text if not sign.isascii() and sign not in _SIGNS and sign not in _SKINS
    )
    kept = (
        sign for sign in signs if unicodedata.category(sign) in _SYMBOLS or sign in _FLAG_LETTERS
    )
    return "".join(sign for sign, _ in itertools.groupby(kept))


def _one_form(text: str) -> str:
    """A text with one form of every sign, powers as "x^2" and sizes as "sqm"."""
    text = _SIZE.sub(lambda found: ("sq" if found[2] == "²" else "cb") + found[1], text)
    return _POWER.sub(lambda found: "^2" if found[0] == "²" else "^3", text).translate(_ONE_FORM)


def operators(text: str, *, case_is_style: bool) -> tuple[str, ...]:
    """Signs of arithmetic, comparison and shells; figures with a sign between them are one with their operands."""
    sums = [_without_blanks(found) for found in _SUM.findall(text) if not _DATE.match(found)]
    chunks = _SUM.sub(" 0 ", text).split() or [""]
    inside = [sign for chunk in chunks for sign in _INSIDE.findall(chunk)]
    alone = list(filter(_ALONE.fullmatch, map(_without_marks, chunks[1:])))
    connectives = [word for word in chunks[1:] if word in _CONNECTIVES and not case_is_style]
    signs = [*inside, *alone, *connectives]
    return (*sums, *("!=" if sign == "<>" else sign for sign in signs))


def _without_blanks(figures: str) -> str:
    return "".join(figures.split()).rstrip(".,")


def _without_marks(chunk: str) -> str:
    return chunk if _ALONE.fullmatch(chunk) else chunk.strip(".,:;?!'\"`()")
