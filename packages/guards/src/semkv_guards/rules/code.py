"""Rules over identifiers, flags, paths, versions and operators."""

from __future__ import annotations

import re
from collections.abc import Iterable

from semkv_guards.pairs import Pair
from semkv_guards.rules.rule import rule
from semkv_guards.text import CAMEL, Text

_SIGNS = re.compile(r"[\W_]+")
_NUMBERED = re.compile(r"[A-Za-z][\w.-]*\d|[a-z][\w.-]*/")
_HUMPED = re.compile(r"[A-Za-z][\w.-]*[A-Z]")
_FILE = re.compile(r".*\w\.([a-z]\w{0,4})")
_TURNED = str.maketrans("+-", "-+")  # "UTC+2", "UTC-2"


@rule(
    reasons=("code",),
    vetoes=(
        ("What is foo(1)?", "What is foo(2)?"),
        ("Read setup.py", "Read setup.cfg"),
    ),
    allows=(("What does foo() return?", "What does foo() give back?"),),
)
def unshared_code(pair: Pair) -> str | None:
    """An identifier, flag, path or version is in one text only."""
    return "code" if _lacks_code(pair.a, pair.b) or _lacks_code(pair.b, pair.a) else None


def _lacks_code(mine: Text, other: Text) -> bool:
    return any(found not in other.spelled and found not in other.words for found in mine.code)


@rule(
    reasons=("code",),
    vetoes=(
        ("What does userId mean in this schema?", "What does userID mean in this schema?"),
        ("What is 10:00 UTC+2 in Rome?", "What is 10:00 UTC-2 in Rome?"),
    ),
    allows=(
        ("What does userId mean in this schema?", "What is the meaning of userId in this schema?"),
    ),
)
def recased_code(pair: Pair) -> str | None:
    """An identifier is written with other capitals, or a sign is turned: "userId", "userID"; "UTC+2", "UTC-2"."""
    left = pair.a.spelled - pair.b.spelled
    right = pair.b.spelled - pair.a.spelled
    if not _folded_camels(left).isdisjoint(_folded_camels(right)):
        return "code"
    turned = (word.translate(_TURNED) for word in left)
    return None if pair.b.spelled.isdisjoint(turned) else "code"


def _folded_camels(words: Iterable[str]) -> set[str]:
    return {word.casefold() for word in words if CAMEL.fullmatch(word)}


@rule(
    reasons=("code",),
    tables=("naming", "extensions"),
    vetoes=(
        ("Restart the server db01", "Restart the server db-01"),
        ("Open Report.pdf", "Open report.pdf"),
    ),
    allows=(("Is my Wi-Fi slow?", "Is my wifi slow?"),),
)
def respelled_code(pair: Pair) -> str | None:
    """An identifier or file has other signs, or letters of another case: "web01", "web-01"; "feature/login"."""
    apart = pair.a.spelled ^ pair.b.spelled
    if not apart:
        return None
    exact = pair.a.cased is not None and pair.b.cased is not None
    if exact and _is_recased_file(apart, pair):
        return "code"
    identifiers = [word for word in apart if _NUMBERED.match(word) or _HUMPED.match(word)]
    if not identifiers or pair.language.naming.isdisjoint(pair.words):
        return None
    in_a = _spellings(pair.a)
    in_b = _spellings(pair.b)
    for word in identifiers:
        theirs = (in_a if word in pair.b.spelled else in_b).get(_bare(word))
        if theirs is not None and _is_respelled(word, theirs, pair, exact=exact):
            return "code"
    return None


def _is_recased_file(apart: Iterable[str], pair: Pair) -> bool:
    """Whether the name of a file is written with other capitals."""
    both = pair.a.spelled & pair.b.spelled
    for word in apart:
        file = _FILE.fullmatch(word)
        if file and file[1] in pair.language.extensions and word.casefold() in both:
            return True
    return False


def _spellings(text: Text) -> dict[str, set[str]]:
    """By letters and figures the words of a text as they are written, folded."""
    found: dict[str, set[str]] = {}
    for word in text.spelled:
        found.setdefault(_bare(word), set()).add(word.casefold())
    return found


def _is_respelled(word: str, theirs: set[str], pair: Pair, *, exact: bool) -> bool:
    """Whether an identifier is another one than the same letters and figures in the other text.

    ``exact``: the case of both texts is no way of typing.
    """
    if pair.language.stem(_bare(word)) in pair.language.known:  # "Wi-Fi", "wifi"
        return False
    case_counts = exact and ("." in word or not _HUMPED.match(word))
    return case_counts or word.casefold() not in theirs


def _bare(word: str) -> str:
    return _SIGNS.sub("", word).casefold()


@rule(
    reasons=("code",),
    vetoes=(
        ("Is a == b?", "Is a = b?"),
        ("Is x > 5 or x < 3?", "Is x < 5 or x > 3?"),
    ),
    allows=(("What is 12 * 4?", "What is 12*4?"),),
)
def operators(pair: Pair) -> str | None:
    """The texts have other signs of arithmetic, comparison or shells, or the same in another order."""
    first = pair.a.operators
    second = pair.b.operators
    if not first or not second:
        return None
    same_words = [t.stem for t in pair.a.without_articles] == [
        t.stem for t in pair.b.without_articles
    ]
    differ = first != second if same_words else sorted(first) != sorted(second)
    return "code" if differ else None
