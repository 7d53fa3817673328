"""Guards: words that turn a similar sentence into a different question.

Sentence embeddings place a sentence and its reversal almost on the same spot: "left of" against "right of" has a cosine
of 0.99 with all-MiniLM-L6-v2. A guard looks at the words instead. It is a pure function of two texts, costs some
tenths of a millisecond, and can only veto a match, never make one. A language is one file in ``words``, a rule one
function in ``rules``.
"""

from __future__ import annotations

from semkv_guards.guard import Guard, said_otherwise, unread, veto
from semkv_guards.language import Language
from semkv_guards.rules.registry import REASONS, RULES
from semkv_guards.wordings import MOST_UNMATCHED, Wording, misspelled, same_words, wording

__all__ = [
    "MOST_UNMATCHED",
    "REASONS",
    "RULES",
    "Guard",
    "Language",
    "Wording",
    "misspelled",
    "said_otherwise",
    "same_words",
    "unread",
    "veto",
    "wording",
]
