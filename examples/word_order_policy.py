"""A policy of your own: which approximate matches may be used. It is not asked about exact ones.

    PYTHONPATH=examples semkv run --engine labels --policy word_order_policy:SameWords

``semkv serve`` takes it too; a program gives the object: ``SemanticCache(config, decider=SameWords(config))``.
"""

from semkv import CacheConfig, Decider, Decision, Entry, Match, Request


class SameWords(Decider):
    """Accepts a donor that has at least as many of the request's words as the threshold says."""

    floor = 0.8  # least cosine of a similar question that is worth a look

    def __init__(self, config: CacheConfig) -> None:
        self.least = config.similarity_threshold

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
        own, other = set(request.question.lower().split()), set(donor.question.lower().split())
        share = len(own & other) / max(1, len(own | other))
        return Decision(share >= self.least, f"{share:.2f} of the words")
