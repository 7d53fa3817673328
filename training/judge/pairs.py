"""Pairs of requests that one answer serves, or does not: generated, and the rows of ``bench/data`` that are not held
out. No text of the rows that are held out, or of a set that nobody may train on, is in a pair."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import phrases
import small
from intents import Intents

FILES = ("traps", "paraphrases", "added", "long")
_UNSEEN = (
    "unseen_first",
    "unseen_second",
    "unseen_third",
    "unseen_fourth",
    "unseen_fifth",
    "last_turns",
    "classes",
)
_DATA = Path(__file__).parents[2] / "bench/data"
_SAME = 0.45  # of the pairs of a source
_SHARES = {  # of all pairs, by their source
    "labeled": 0.14,  # rows of bench/data
    "exchanged": 0.06,  # a labeled text with another word
    "small": 0.10,  # a text of any source with one small word changed
    "single": 0.10,  # single intents
    "intents": 0.42,
    "phrases": 0.18,
}
_SHORT = 200  # characters of two texts to which phrases are added
_NEAR = 6  # places in a list up to which another entry is a near one
_LONG = 0.08  # of all pairs: among sentences
_PHRASE = 0.12  # of all pairs: with a phrase behind one text or both
_KEPT = 0.3  # of all pairs: with a word changed that does not change what is asked
_WORD = re.compile(r"\w+(?:'\w+)?")
_SMALL = frozenset(
    "the and for are can you does did was were has have had will would should could may might what which who how why"
    " when where this that these those our your their his her its with from into onto".split()
)
_LETTERS = re.compile(r"[a-z]{5,}")


class Labeled(NamedTuple):
    """Two requests, and whether one answer serves both."""

    a: str
    b: str
    same: bool


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked, as places in the lists of `phrases`."""

    frame: int
    verb: int
    thing: int
    other: int
    described: str
    tail: int
    is_action: bool


def labeled(*, held_out: bool) -> list[Labeled]:
    """The rows of ``bench/data`` that are held out, or the others."""
    found = []
    for name in FILES:
        for line in (_DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["held_out"] is held_out:
                same = row.get("same", name == "paraphrases")
                found.append(Labeled(row["a"], row["b"], same))
    return found


def held_out_texts() -> frozenset[str]:
    """The texts that no pair may have, as `_plain` writes them."""
    rows = labeled(held_out=True)
    for name in _UNSEEN:
        for line in (_DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows.append(Labeled(row["a"], row["b"], same=False))
    trained = {_plain(text) for row in labeled(held_out=False) for text in (row.a, row.b)}
    return frozenset(_plain(text) for row in rows for text in (row.a, row.b)) - trained


def _plain(text: str) -> str:
    return " ".join(_WORD.findall(text.lower()))


class Pairs:
    """Pairs without end, of all sources, in both orders, some with typing noise or as a sentence of a long text."""

    def __init__(self, rows: Sequence[Labeled], seed: int) -> None:
        self._random = Random(seed)  # noqa: S311
        self._rows = [[row for row in rows if row.same is same] for same in (False, True)]
        self._exchanged = Exchanged([text for row in rows for text in (row.a, row.b)])
        self._intents = Intents()
        self._held_out = held_out_texts()

    def batch(self, size: int) -> list[Labeled]:
        """So many pairs: short ones, or a quarter as many long ones."""
        is_long = self._random.random() < 4 * _LONG / (1 + 3 * _LONG)
        found: list[Labeled] = []
        while len(found) < (size // 4 if is_long else size):
            row = self._drawn()
            if not self._may_be_taught(row):
                continue
            if is_long:
                a, b = _among_sentences(row.a, row.b, self._random)
                row = Labeled(a, b, row.same)
            found.append(_typed(row, self._random))
        return found

    def _may_be_taught(self, row: Labeled) -> bool:
        return self._held_out.isdisjoint((_plain(row.a), _plain(row.b)))

    def _drawn(self) -> Labeled:
        (source,) = self._random.choices([*_SHARES], [*_SHARES.values()])
        row = self._small() if source == "small" else self._of(source)
        if row.same and self._random.random() < _KEPT:
            row = row._replace(b=small.kept(row.b, self._random))
        if self._random.random() < _PHRASE and len(row.a) + len(row.b) < _SHORT:
            return self._with_phrases(row)
        return row

    def _with_phrases(self, row: Labeled) -> Labeled:
        """The same phrase behind both texts, another behind each, or one behind one of them."""
        random = self._random
        a, phrase = small.with_phrase(row.a, random)
        if random.random() < 0.6:
            return row._replace(a=a, b=small.ending(row.b, phrase))
        other = small.with_phrase(row.b, random, but=phrase)[0] if random.random() < 0.5 else row.b
        return Labeled(a, other, same=False)

    def _of(self, source: str) -> Labeled:
        random = self._random
        same = random.random() < _SAME
        if source == "labeled":
            return random.choice(self._rows[same])
        if source == "exchanged":
            return self._exchanged.drawn(random.choice(self._rows[random.random() < 0.5]), random)
        if source == "single":
            return Labeled(*self._intents.single(random, same=same), same)
        if source == "intents":
            pair = self._intents.same(random) if same else self._intents.different(random)
            return Labeled(*pair, same)
        return generated(random, same=same)

    def _small(self) -> Labeled:
        """A trap by a small word, of a text or of two ways to ask it."""
        sources = ("labeled", "single", "intents", "phrases")
        row = self._of(self._random.choice(sources))
        changed = small.trap(row.b, self._random)
        if changed is None:
            return row
        first = row.a if row.same and self._random.random() < 0.4 else row.b
        return Labeled(first, changed, same=False)


class Exchanged:
    """Traps from texts: a word gives way to another that follows the same word in some text, a number to another."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._after: dict[str, list[str]] = defaultdict(list)
        for text in texts:
            for before, word in itertools.pairwise(_WORD.findall(text.lower())):
                self._after[before].append(word)

    def drawn(self, row: Labeled, random: Random) -> Labeled:
        """A text of a row against one in which one word is another; the row itself where there is none to exchange."""
        text = random.choice((row.a, row.b))
        words = list(_WORD.finditer(text))
        places = [
            (before, word)
            for before, word in itertools.pairwise(words)
            if word[0].islower() and len(word[0]) > 2 and word[0] not in _SMALL
        ]
        if not places:
            return row
        before, word = random.choice(places)
        others = [
            other for other in self._after[before[0].lower()] if _start(other) != _start(word[0])
        ]
        if not others:
            return row
        other = random.choice(others)
        return Labeled(text, text[: word.start()] + other + text[word.end() :], same=False)


def _start(word: str) -> str:
    """What two forms of a word have in common."""
    return word[:4]


def generated(random: Random, *, same: bool) -> Labeled:
    """A pair that lists and frames make."""
    asked = _drawn(random)
    other = asked if same else _changed(asked, random)
    a = _said(asked, random)
    b = _said(other, random)
    while same and a == b and random.random() < 0.9:
        b = _said(other, random)
    return Labeled(a, b, same)


def _drawn(random: Random) -> Asked:
    is_action = random.random() < 0.65
    frames = phrases.ACTION_FRAMES if is_action else phrases.THING_FRAMES
    thing = random.randrange(len(phrases.THINGS))
    return Asked(
        frame=random.randrange(len(frames)),
        verb=random.randrange(len(phrases.VERBS)),
        thing=thing,
        other=_other(thing, len(phrases.THINGS), random),
        described=random.choice(phrases.DESCRIBED) if random.random() < 0.3 else "",
        tail=random.randrange(len(phrases.TAILS)) if random.random() < 0.35 else -1,
        is_action=is_action,
    )


def _changed(asked: Asked, random: Random) -> Asked:
    """The same with one thing changed, or none that fits."""
    frames = phrases.ACTION_FRAMES if asked.is_action else phrases.THING_FRAMES
    ways: list[Callable[[], Asked]] = [
        lambda: replace(asked, thing=_other(asked.thing, len(phrases.THINGS), random)),
        lambda: replace(asked, described=_other_word(asked.described, random)),
    ]
    if asked.is_action:
        ways += [
            lambda: replace(asked, verb=_other(asked.verb, len(phrases.VERBS), random)),
            lambda: replace(asked, tail=_other_tail(asked.tail, random)),
        ]
    elif "{m}" in frames[asked.frame][0]:
        ways.append(lambda: replace(asked, other=_other(asked.other, len(phrases.THINGS), random)))
    if random.random() < 0.2:
        return replace(asked, frame=_other(asked.frame, len(frames), random))
    return random.choice(ways)()


def _other(place: int, count: int, random: Random) -> int:
    """Another place, most often a near one."""
    if random.random() < 0.7:
        near = [at for at in range(place - _NEAR, place + _NEAR + 1) if 0 <= at < count]
        return random.choice([at for at in near if at != place])
    return (place + random.randrange(1, count)) % count


def _other_word(word: str, random: Random) -> str:
    if word and random.random() < 0.3:
        return ""
    return random.choice([other for other in phrases.DESCRIBED if other != word])


def _other_tail(tail: int, random: Random) -> int:
    if tail < 0:
        return random.randrange(len(phrases.TAILS))
    return -1 if random.random() < 0.3 else _other(tail, len(phrases.TAILS), random)


def _said(asked: Asked, random: Random) -> str:
    """One of the ways to ask it."""
    thing = random.choice(phrases.THINGS[asked.thing])
    noun = f"{asked.described} {thing}".strip()
    if not asked.is_action:
        frame = random.choice(phrases.THING_FRAMES[asked.frame])
        text = frame.replace("{n}", noun).replace("{m}", random.choice(phrases.THINGS[asked.other]))
    else:
        verb = random.choice(phrases.VERBS[asked.verb])
        tail = f" {random.choice(phrases.TAILS[asked.tail])}" if asked.tail >= 0 else ""
        owner = random.choice(("my", "my", "the"))
        frame = random.choice(phrases.ACTION_FRAMES[asked.frame])
        text = frame.replace("{x}", f"{verb} {owner} {noun}{tail}")
    text = re.sub(r"\ba (?=[aeiouAEIOX])", "an ", text)
    return random.choice(phrases.POLITE).replace("{t}", text) if random.random() < 0.1 else text


def _among_sentences(a: str, b: str, random: Random) -> tuple[str, str]:
    """Both as a sentence of one long text."""
    around = random.sample(phrases.SENTENCES, random.randrange(2, 6))
    place = random.randrange(len(around) + 1)
    first, second = ([*around[:place], text, *around[place:]] for text in (a, b))
    return " ".join(first), " ".join(second)


def _typed(row: Labeled, random: Random) -> Labeled:
    """A row in one of its two orders, some with another way of typing, which does not change what is asked."""
    a, b = (row.a, row.b) if random.random() < 0.5 else (row.b, row.a)
    if random.random() < 0.1:
        b = a if row.same else b
    if random.random() < 0.12:
        a = _slipped(a, random)
    if random.random() < 0.12:
        b = _slipped(b, random)
    if random.random() < 0.08:
        a = a.lower()
    if random.random() < 0.08:
        b = b.rstrip("?.!")
    return Labeled(a, b, row.same)


def _slipped(text: str, random: Random) -> str:
    """A text with a letter of a word dropped, doubled, or two exchanged."""
    words = list(_LETTERS.finditer(text))
    if not words:
        return text
    word = random.choice(words)
    at = word.start() + random.randrange(1, len(word[0]) - 2)
    before = text[:at]
    after = text[at:]
    return before + random.choice((after[1:], after[0] + after, after[1] + after[0] + after[2:]))
