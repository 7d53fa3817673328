"""What in a text is only a way of typing it: folded here, so that two texts that differ in nothing else are equal."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from functools import cache
from pathlib import Path

# One sign, and what must stand around it: a search steps over all other characters, which is three times as fast.
_SIGNS = r"`\\{}<>=_|~^\"“”„«»"
_CODE = (
    rf"(?<=[{_SIGNS}])|(?<=\w[(\[])|(?<=:)(?=:|//)|(?<=[a-z][A-Z])|(?<=\w\w\.)(?=\w\w)|"
    r"(?<![^\s].)(?:(?<=-)-?[A-Za-z]|(?<=/)\w|(?<=\.)\.?/\w)|(?<=\d)[kKmMgGbBtT]\b"
)
_SIGNS += r"(\[:A-Z./\d'‘\-"
LITERAL = re.compile(rf"[{_SIGNS}](?:{_CODE}|(?<=['‘])(?<!\w.)[^\n]{{1,200}}['’](?!\w))")
"""What keeps its case throughout: code, paths, flags, addresses, quotations. Takes up to 1 us a character."""
_BLANK = "[ \xa0\u2000-\u200a\u202f\u205f\u3000]"
_LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_KEPT = re.compile(  # an apostrophe stands between two letters, a quotation mark does not
    rf"[{_SIGNS}’‚「『《‹＂＇](?:{_CODE}|(?<=['‘’‚])(?:(?<![A-Za-zÀ-ɏ].)|(?![A-Za-zÀ-ɏ]))|(?<=[「『《‹＂＇]))"
)
_TABLE = re.compile(rf"{_BLANK}{_BLANK}{_BLANK}(?<=\S...)")
_WINDOW, _AHEAD = 1 << 14, 4  # characters in one search, which holds Python's lock; most that a match looks ahead
_CRLF = re.compile(r"(?<!\r)\r\n")
_GAP = re.compile(rf"{_BLANK}(?<=\S.)(?:{_BLANK}*(?=[{_LINE_ENDS}])|({_BLANK}|(?<! )))")  # but for one space in a line
_STARTS = re.compile(r"[A-Z](?:(?<=^.)|(?<=[.?!] .))(?=[a-z'’]*(?:[ ,.:;?!]|\Z))")  # sentences that begin with a word
_ENDS = (". ", "? ", "! ", *_LINE_ENDS)
_STYLED = 2  # words from which a text in capitals, or in Title Case, is taken for a way of typing
_LETTERS = "０-９Ａ-Ｚａ-ｚﬀ-ﬆ"  # full-width letters and digits, ligatures
_WIDE = re.compile(rf"(?<=[\w\u0300-\u036f])[{_LETTERS}]|[{_LETTERS}](?=\w)")  # one alone may be what is asked about
_WORD = re.compile(rf"[0-9A-Za-z{_LETTERS}]+")


def normalise(text: str) -> str:
    """Fold what does not change a question's meaning: double blanks, the case of typing, Unicode form, width.

    Case is folded at the start of a sentence, and throughout where a text of several words is in one style: all
    small, ALL CAPITALS, Each Word Capitalised. Within a sentence it stays, since ``HELLO`` has other letters than
    ``hello``, and so does that of a word that is a name with a capital and another word without (``Polish``). Of
    signs and lone letters the width stays, and lines stay lines, with their indents and tabs; CRLF is a line end
    like another. From its first sentence with code, a path, an address, a quotation or a table on a text stays as
    written, and up to there all but the case of typing. Linear in the text, and idempotent.
    """
    text = text.strip()
    if "\r\n" in text:
        text = _CRLF.sub("\n", text)
    if (kept := _first_kept(text)) is not None:
        before = max(text.rfind(end, 0, kept) for end in _ENDS) + 1
        return _STARTS.sub(_small, text[:before]) + text[before:]
    if not text.isascii():
        text = _nfc(_one_width(_nfc(text)))
    text = _GAP.sub(_folded_gap, text)
    if not one_style(text) or (not text.islower() and not _twofold().isdisjoint(text.lower().split())):
        return _STARTS.sub(_small, text)
    return text.lower() if text.isascii() else _nfc(text.lower())


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


@cache
def _twofold() -> frozenset[str]:
    """Words that are a name with a capital and another word without, of the languages that the guards know."""
    files = (Path(__file__).parent / "words").glob("*.toml")
    tables = [tomllib.loads(file.read_text(encoding="utf-8")).get("content", {}) for file in files]
    return frozenset(" ".join(table.get(name, "") for table in tables for name in ("twofold", "homographs")).split())


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
