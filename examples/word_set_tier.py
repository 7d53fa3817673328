"""A tier of your own: texts with the same words in any order. It stores nothing itself: its keys lie in the catalog.

    cache = SemanticCache(config, tiers=[WordSet()])

A donor has the same tenant, model, images and context; guards and policy may still refuse it.
"""

import re

from semkv import Entry, Request

FILLERS = {"please", "the", "a", "an", "is", "tell", "me"}


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower())) - FILLERS


class WordSet:
    """Finds earlier texts with the same words."""

    name = "word_set"  # its status in reports, and the provenance of its hits

    def keys(self, request: Request) -> list[str]:
        return [" ".join(sorted(words(request.chunk_text)))]

    def score(self, request: Request, donor: Entry) -> float:
        return 1.0 if words(request.chunk_text) == words(donor.chunk_text) else 0.0
