"""Marks: one bit for each table of a lexicon in which a word stands, so that one `&` tells a guard that it has no work.

A text's marks are those of its words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semkv.tiers.guards.lexicon import Lexicon

(
    MEASURE, NEGATION, DENIAL, GROUP, DATE, QUESTION, CHOICE, PERSON, SPEAKER, OWNER, OWNS, MODAL, TENSE, PIVOT,
    BOUND, TELLING, BY, AUXILIARY, LESSENING, COMPARED, WAY, PARTICLE, SHIFT, KNOWN,
    OPPOSED, SELF, PHRASE, SYNONYM, GERUND, NATIVE,
) = (1 << i for i in range(30))  # fmt: skip


def word_marks(
    lexicon: Lexicon, measures: Iterable[str], dates: Iterable[str], pivots: Iterable[str]
) -> dict[str, int]:
    """The marks of every word that stands in a table by itself."""
    tables: tuple[tuple[int, Iterable[str]], ...] = (
        (MEASURE, measures),
        (NEGATION, lexicon.negations),
        (GROUP, [word for group in lexicon.groups.values() for word in group]),
        (DATE, dates),
        (QUESTION, lexicon.questions),
        (CHOICE, lexicon.choices),
        (PERSON, lexicon.persons),
        (SPEAKER, lexicon.speaker[0]),
        (OWNER, lexicon.owners),
        (OWNS, (lexicon.owns,)),
        (MODAL, lexicon.modals),
        (TENSE, lexicon.tenses),
        (PIVOT, pivots),
        (BOUND, lexicon.bounds.get("", ())),
        (TELLING, lexicon.telling),
        (BY, (lexicon.by[0],)),
        (AUXILIARY, lexicon.by[1]),
        (LESSENING, lexicon.lessening[0]),
        (WAY, lexicon.ways),
        (SHIFT, lexicon.shifts),
        (NATIVE, lexicon.natives),
        (PHRASE, [phrase.split()[0] for phrase in lexicon.phrases]),
    )
    return _collected(tables)


def stem_marks(
    denials: Iterable[str],
    particles: Iterable[str],
    known: Iterable[str],
    opposed: Iterable[str],
    synonyms: Iterable[str],
) -> dict[str, int]:
    """The marks of every stem that stands in a table."""
    tables = ((DENIAL, denials), (PARTICLE, particles), (KNOWN, known), (OPPOSED, opposed), (SYNONYM, synonyms))
    return _collected(tables)


def _collected(tables: Iterable[tuple[int, Iterable[str]]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for mark, words in tables:
        for word in words:
            found[word] = found.get(word, 0) | mark
    return found
