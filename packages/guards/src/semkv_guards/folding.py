"""What differs in typing only: `normalise` folds it, unless a text asks about typing itself."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from semkv_guards.language import languages

# One sign, and what must stand around it: a search steps over all other characters, which is three times as fast.
_SIGNS = r"`\\{}<>=_|~^\"“”„«»"
_CODE = (
    rf"(?<=[{_SIGNS}])|(?<=\w[(\[])|(?<=:)(?=:|//)|(?<=[a-z][A-Z])|(?<=\w\w\.)(?=\w\w)|"
    r"(?<![^\s].)(?:(?<=-)-?[A-Za-z]|(?<=/)\w|(?<=\.)\.?/\w)|(?<=\d)[kKmMgGbBtT]\b"
)
_SIGNS += r"(\[:A-Z./\d'‘\-"
LITERAL = re.compile(rf"[{_SIGNS}](?:{_CODE}|(?<=['‘])(?<!\w.)[^\n]{{1,200}}['’](?!\w))")
"""What keeps its case throughout: code, paths, flags, addresses, quotations. Takes up to 1 us a character."""
_BLANKS = " \xa0\u202f\u3000"
"""Blanks that a keyboard or a word processor puts in: a model reads the others as signs of their own."""
_BLANK = f"[{_BLANKS}]"
_AROUND = f"{_BLANKS}\t\n"
_LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_KEPT = re.compile(  # an apostrophe stands between two letters, a quotation mark does not
    rf"[{_SIGNS}’‚「『《‹＂＇](?:{_CODE}|(?<=['‘’‚])(?:(?<![A-Za-zÀ-ɏ].)|(?![A-Za-zÀ-ɏ]))|(?<=[「『《‹＂＇]))"
)
_TABLE = re.compile(rf"{_BLANK}{_BLANK}{_BLANK}(?<=\S...)")
# characters in one search, which holds Python's lock; most that a match looks ahead
_WINDOW = 1 << 14
_AHEAD = 4
_CRLF = re.compile(r"(?<!\r)\r\n")
# But for one space in a line, and for two at its end: in Markdown they break it.
_GAP = re.compile(
    rf"{_BLANK}(?<=\S.)(?!(?<= ) [{_LINE_ENDS}])(?:{_BLANK}*(?=[{_LINE_ENDS}])|({_BLANK}|(?<! )))"
)
# Sentences that begin with a word.
_STARTS = re.compile(r"[A-Z](?:(?<=^.)|(?<=[.?!] .))(?=[a-z'’]*(?:[ ,.:;?!]|\Z))")
_ENDS = (". ", "? ", "! ", *_LINE_ENDS)
_COUNTED = 30  # characters between a word for a count and what is counted
_HEAD_LETTERS = 4  # of a word: enough to see that most texts do not ask about typing
_HEAD = re.compile(rf"\b\w{{1,{_HEAD_LETTERS}}}")
_SAMPLE = 2000  # characters of a text that show its language
_STYLED = 2  # words from which a text in capitals, or in Title Case, is taken for a way of typing
_LETTERS = "０-９Ａ-Ｚａ-ｚﬀ-ﬆ"  # full-width letters and digits, ligatures
# One alone may be what is asked about.
_WIDE = re.compile(rf"(?<=[\w\u0300-\u036f])[{_LETTERS}]|[{_LETTERS}](?=\w)")
_WORD = re.compile(rf"[0-9A-Za-z{_LETTERS}]+")


def normalise(text: str) -> str:
    """Fold what does not change a question's meaning: double blanks, the case of typing, Unicode form, width.

    Case is folded at the start of a sentence, and throughout where a text of several words is in one style: all small,
    and in a language with a file in ``words`` ALL CAPITALS, Each Word Capitalised. Within a sentence it stays, since
    ``HELLO`` has other letters than ``hello``, and so does that of a word that is a name with a capital and another
    word without (``Polish``). Of signs and lone letters the width stays, and lines stay lines, with their indents,
    tabs and two blanks at their end; CRLF is a line end like another. From its first sentence with code, a path, an
    address, a quotation or a table on a text stays as written, and up to there all but the case of typing. Linear in
    the text, and idempotent.
    """
    if "\r\n" in text:
        text = _CRLF.sub("\n", text)
    text = _stripped(text)
    if (kept := _first_kept(text)) is not None:
        before = max(text.rfind(end, 0, kept) for end in _ENDS) + 1
        return _STARTS.sub(_small, text[:before]) + text[before:]
    if not text.isascii():
        text = _nfc(_one_width(_nfc(text)))
    text = _GAP.sub(_folded_gap, text)
    if not one_style(text) or not (text.islower() or _is_style_only(text.lower())):
        return _STARTS.sub(_small, text)
    return text.lower() if text.isascii() else _nfc(text.lower())


def _stripped(text: str) -> str:
    """Without blanks and line ends around it; the indent of its first line stays where others follow."""
    text = text.rstrip(_AROUND)
    start = text.lstrip(_AROUND)
    indent = len(text) - len(start)
    line = text.rfind("\n", 0, indent) + 1
    return text[line:] if "\n" in start else start


def _first_kept(text: str) -> int | None:
    """Where the first code, quotation or table starts."""
    for start in range(0, len(text), _WINDOW):
        end = start + _WINDOW
        found = [kind.search(text, start, end + _AHEAD) for kind in (_KEPT, _TABLE)]
        if places := [match.start() for match in found if match and match.start() < end]:
            return min(places)
    return None


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _small(start: re.Match[str]) -> str:
    word = _WORD.match(start.string, start.start())
    return start[0] if word and word[0].lower() in _twofold() else start[0].lower()


def _is_style_only(small: str) -> bool:
    """Whether a text in one style says the same in small letters: its language is known, in which no word of it is also
    a name. "Die Spinnen" and "die spinnen" are two things."""
    if not _twofold().isdisjoint(small.split()):
        return False
    words = _WORD.findall(small[:_SAMPLE])
    return any(language.is_of(words) for language in languages())


@cache
def _twofold() -> frozenset[str]:
    """Words that are a name with a capital and another word without, of the languages that the guards know."""
    return frozenset().union(*(language.twofold | language.homographs for language in languages()))


def _folded_gap(gap: re.Match[str]) -> str:
    return " " if gap.lastindex else ""


def one_style(text: str) -> bool:
    """Whether the case of a text is a way of typing: all small, ALL CAPITALS, Each Word Capitalised."""
    if text.islower() or text.isupper():
        return len(text.split(None, _STYLED)) >= _STYLED
    words = text.split()
    return len(words) >= _STYLED and text.istitle()


def _one_width(text: str) -> str:
    """Full-width words and ligatures in plain letters, unless a word stands there in both."""
    words = set(_WORD.findall(_nfc(text.lower())))
    if any(unicodedata.normalize("NFKC", word) in words for word in words if not word.isascii()):
        return text
    return _WIDE.sub(lambda letter: unicodedata.normalize("NFKC", letter[0]), text)


def asks_of_typing(text: str) -> bool:
    """Whether a text asks about the way in which it, or one beside it, is typed: of that nothing may be folded."""
    folded = text.casefold()
    heads, phrases = _typing()
    if heads.isdisjoint(_HEAD.findall(folded)):
        return False
    return any(start in folded and asked.search(folded) for start, asked in phrases)


@cache
def _typing() -> tuple[frozenset[str], list[tuple[str, re.Pattern[str]]]]:
    """How the longest words begin of the phrases with which a text asks about typing, and each phrase's start with all
    of it."""
    heads: set[str] = set()
    phrases = []
    for language in languages():
        for phrase in language.typing:
            start = phrase.rstrip("*")
            end = "" if phrase.endswith("*") else r"\b"
            phrases.append((start, re.compile(rf"\b{re.escape(start)}{end}")))
            heads.add(max(re.findall(r"\w+", start), key=len)[:_HEAD_LETTERS])
        units = "|".join(map(re.escape, sorted(language.typing_units)))
        for count in language.counted:
            between = rf"[^.?!\n]{{0,{_COUNTED}}}"
            phrases.append((count, re.compile(rf"\b{re.escape(count)}\b{between}\b(?:{units})\b")))
        heads |= {word[:_HEAD_LETTERS] for word in language.typing_units}
    return frozenset(heads), phrases


def retyped(a: str, b: str) -> bool:
    """Whether two texts differ in typing: a word of both is written in two ways, but for the capital of the first word
    and the mark after the last; or all words are the same."""
    first, second = _spelled(a), _spelled(b)
    if [*first] == [*second]:
        return True
    for word in first.keys() & second.keys():
        mine, theirs = first[word], second[word]
        if set(mine) != set(theirs) or (len(mine) == len(theirs) and mine != theirs):
            return True
    return False


def _spelled(text: str) -> dict[str, list[str]]:
    """The chunks of a text as they are written, by their letters and figures."""
    chunks = text.strip().rstrip(".?!").split()
    found: dict[str, list[str]] = {}
    for place, chunk in enumerate(chunks):
        word = "".join(filter(str.isalnum, chunk)).casefold()
        found.setdefault(word, []).append(chunk if place else chunk.casefold())
    return found
