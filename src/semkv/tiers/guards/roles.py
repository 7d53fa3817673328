"""Who acts and who owns, where that is the speaker or stands before what is owned."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from semkv.tiers.guards.content import Pair, Side
from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.marks import OWNS, SELF, SPEAKER
from semkv.tiers.guards.order import participle
from semkv.tiers.guards.text import STOPS, Token

_REACH = 4  # words from a subject to its verb: "I have not yet been asked"

_Acts = tuple[dict[str, str], set[str]]


def exchanged(p: Pair) -> bool:
    """Whether the speaker does in one text what is done to him in the other, or what somebody does there whom he does
    it to; or an owner has another of two things: "my neighbour's tree fell on my fence"."""
    if _owned(p):
        return True
    if not (p.a.marks | p.b.marks) & SPEAKER:
        return False
    first, second = _acts(p.a.spine, p.lexicon), _acts(p.b.spine, p.lexicon)
    return _turned(p.a, first, p.b, second, p.lexicon) or _turned(p.b, second, p.a, first, p.lexicon)


def _turned(mine: Side, acted: _Acts, other: Side, others: _Acts, lexicon: Lexicon) -> bool:
    """Whether the speaker acts in the first text alone, and is acted on or replaced in the other."""
    acts, suffers = acted
    own = acts.keys() - suffers - others[0].keys()
    if not own:
        return False
    if own & others[1]:
        return True
    tokens = mine.text.tokens
    first = next(i for i, t in enumerate(tokens) if t.stem in own)
    objects = {t.stem for t in tokens[first:]} - {t.stem for t in tokens[:first]} - others[0].keys()
    return any(
        x.stem in own and acts[x.stem] == y.stem and _subject(other.spine[max(0, i - _REACH) : i], lexicon) in objects
        for i, (x, y) in enumerate(itertools.pairwise(other.spine))
    )


def _acts(spine: Sequence[Token], lexicon: Lexicon) -> _Acts:
    """Verbs of which the speaker is the subject, each with the word after it, and verbs of which he is the object."""
    subjects, objects = lexicon.speaker
    acts: dict[str, str] = {}
    suffers: set[str] = set()
    for i in [i for i, token in enumerate(spine) if token.marks & SELF]:
        token = spine[i]
        if token.word.partition("'")[0] in subjects:
            start = i + 1
            while start < len(spine) and spine[start].stem in lexicon.tables.joints:  # "I in Canada send"
                start += 2
            k = next((k for k in range(start, min(start + _REACH, len(spine))) if _verb(spine[k], lexicon)), None)
            if k is None or any(t.word in STOPS or t.word in lexicon.ways for t in spine[start:k]):
                continue
            if spine[k - 1].word in lexicon.by[1] and participle(spine[k], lexicon):
                suffers.add(spine[k].stem)
            else:
                acts.setdefault(spine[k].stem, spine[k + 1].stem if k + 1 < len(spine) else "")
        elif i and token.word in objects and _verb(spine[i - 1], lexicon):
            suffers.add(spine[i - 1].stem)
    return acts, suffers


def _verb(token: Token, lexicon: Lexicon) -> bool:
    return token.word[0].isalpha() and token.word not in lexicon.function_words


def _subject(tokens: Sequence[Token], lexicon: Lexicon) -> str:
    """The word before a verb and its auxiliaries; "" where something else stands between them."""
    helpers = lexicon.tenses.keys() | lexicon.modals.keys() | lexicon.negations
    found = next((t for t in reversed(tokens) if t.word not in helpers), None)
    return found.stem if found is not None and _verb(found, lexicon) else ""


def _owned(p: Pair) -> bool:
    """Whether an owner has one thing in one text and another in the other, and both texts speak of both."""
    if not p.a.marks & p.b.marks & OWNS:
        return False
    first, second = _owners(p.a, p.lexicon), _owners(p.b, p.lexicon)
    both = p.a.stems.keys() & p.b.stems.keys()
    return any(
        things & both and second[owner] & both and things.isdisjoint(second[owner])
        for owner, things in first.items()
        if owner in second
    )


def _owners(side: Side, lexicon: Lexicon) -> dict[str, set[str]]:
    """Owners with the words for what they own: "Ann's old dog"."""
    tokens = side.text.tokens
    found: dict[str, set[str]] = {}
    for i, token in enumerate(tokens):
        if token.word == lexicon.owns and i and _verb(tokens[i - 1], lexicon):
            things = itertools.takewhile(lambda t: _verb(t, lexicon), tokens[i + 1 : i + 1 + _REACH])
            found.setdefault(tokens[i - 1].stem, set()).update(t.stem for t in things)
    return {owner: things for owner, things in found.items() if things}
