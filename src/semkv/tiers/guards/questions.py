"""What a text asks for: its question word, what may or must be, what was or will be, and who is spoken of."""

from __future__ import annotations

import itertools

from semkv.tiers.guards.content import Pair, Side, akin
from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.marks import CHOICE, MODAL, PERSON, QUESTION, TENSE
from semkv.tiers.guards.order import participle
from semkv.tiers.guards.text import Token

_LOOSE = frozenset(("manner", "place"))  # "how can I buy" and "where can I buy" ask for much the same
_PAST, _FUTURE = frozenset(("past", "perfect")), frozenset(("future",))
_VERB = 5  # words of a question among which its verb stands
_QUESTION = 40  # tokens in which a question is looked for


def question(p: Pair) -> str | None:
    """Another question word: who, when, where, why, how, how many; or "what size" against "what color"."""
    if not p.lexicon.questions:
        return None
    first, second = _asked(p.a, p.lexicon), _asked(p.b, p.lexicon)
    if first and second and not first & second and not (first | second == _LOOSE and _own(p.a, p) and _own(p.b, p)):
        return "question word"
    if bool(first) != bool(second) and (first | second) != {"manner"} and _closed(p.b if first else p.a, p.lexicon):
        return "question word"
    one, other = _named(p.a, p.lexicon), _named(p.b, p.lexicon)
    if (one and _measured(second, p.b, one, p.lexicon)) or (other and _measured(first, p.a, other, p.lexicon)):
        return "question word"
    if one is None or other is None or akin(one, other, p.lexicon):
        return None
    return None if one.stem in p.b.stems or other.stem in p.a.stems else "question word"


def _asked(side: Side, lexicon: Lexicon) -> frozenset[str]:
    """What a text asks for; empty where that is open."""
    how, plain = lexicon.degree
    tokens = side.text.tokens[:_QUESTION]
    for i, token in enumerate(tokens):
        kind = lexicon.questions.get(token.word)
        if kind is None and token.word in lexicon.leads:
            continue
        if not kind:
            break
        if token.word == how and _degree(tokens, i + 1, lexicon):
            after = tokens[i + 1]
            classes = lexicon.tables.classes.get(after.stem, frozenset())
            found = {f"{kind} {c}" for c in classes} or {f"{kind} {after.stem}"}
            return frozenset(found if after.word in plain else found | {kind})
        return frozenset((kind,))
    return frozenset()


def _own(side: Side, p: Pair) -> bool:
    """Whether somebody asks for himself."""
    return any(word in p.lexicon.persons and p.lexicon.persons[word] not in p.lexicon.third for word in side.words)


def _closed(side: Side, lexicon: Lexicon) -> bool:
    """Whether yes or no is all that a text asks for."""
    return not side.marks & (QUESTION | CHOICE) and yes_or_no(side, lexicon)


def yes_or_no(side: Side, lexicon: Lexicon) -> bool:
    """Whether a text starts with an auxiliary: it may be answered by yes or no, or offer a choice."""
    first = side.text.tokens[0].word if side.text.tokens else ""
    return first in lexicon.tenses or first in lexicon.modals


def _measured(asked: frozenset[str], side: Side, named: Token, lexicon: Lexicon) -> bool:
    """Whether one asks "how many" and the other for a noun that does not measure that: "which birds"."""
    how, plain = lexicon.degree
    kinds = {kind.split()[1] for kind in asked if " " in kind}
    if not kinds or how not in side.words or side.words.isdisjoint(plain):
        return False
    return kinds.isdisjoint(map(str, lexicon.tables.classes.get(named.stem, ()))) and named.stem not in kinds


def _degree(tokens: tuple[Token, ...], i: int, lexicon: Lexicon) -> bool:
    """Whether "how" and the word at ``i`` are one question: "how old is", not "how children learn"."""
    after, beyond = (tokens[k].word if k < len(tokens) else "" for k in (i, i + 1))
    return after in lexicon.degree[1] or (after not in lexicon.function_words and beyond in lexicon.function_words)


def _named(side: Side, lexicon: Lexicon) -> Token | None:
    """The noun that a "what" or "which" asks for."""
    for token, after in itertools.pairwise(side.text.tokens) if side.marks & QUESTION else ():
        if lexicon.questions.get(token.word) == "":
            return None if after.word in lexicon.function_words or after.word in lexicon.open else after
    return None


def modality(p: Pair) -> str | None:
    """What may, should or must be, where no question word asks for more than yes or no."""
    first, second = _modal(p.a, p.lexicon), _modal(p.b, p.lexicon)
    return "modality" if first and second and first != second else None


def _modal(side: Side, lexicon: Lexicon) -> str:
    """The first auxiliary, but for a polite "can you"."""
    if not side.marks & MODAL or side.marks & QUESTION:
        return ""
    tokens = side.text.tokens
    for i, token in enumerate(tokens):
        if token.word in lexicon.modals and not token.name:
            polite = i == 0 and len(tokens) > 1 and tokens[1].word in lexicon.hearer
            return "" if polite else lexicon.modals[token.word]
    return ""


def tense(p: Pair) -> str | None:
    """What was against what will be, or what is where yes or no is asked for."""
    table = p.lexicon.tenses
    first, second = ({table[t.word] for t in s.text.tokens if t.marks & TENSE} for s in (p.a, p.b))
    if first == second:
        return "tense" if not first and _past_alone(p) else None
    for mine, other in ((first, second), (second, first)):
        if mine & _FUTURE and not other & _FUTURE and other & _PAST and not mine & _PAST:
            return "tense"
    if not (_closed(p.a, p.lexicon) and _closed(p.b, p.lexicon)):
        return None
    times = {table.get(s.text.tokens[0].word, "") for s in (p.a, p.b)}
    return "tense" if times == {"past", "present"} else None


def _past_alone(p: Pair) -> bool:
    """Whether a verb without an auxiliary is past in one text alone: "who rules Spain", "who ruled Spain"."""
    if p.only_a or p.only_b or p.a.words == p.b.words or (p.a.marks | p.b.marks) & MODAL:
        return False
    if not p.a.text.tokens or p.lexicon.questions.get(p.a.text.tokens[0].word) not in ("", "person"):
        return False
    apart = [
        pair for pair in zip(p.a.text.tokens[:_VERB], p.b.text.tokens, strict=False) if pair[0].word != pair[1].word
    ]
    return len(apart) == 1 and participle(apart[0][0], p.lexicon) != participle(apart[0][1], p.lexicon)


def person(p: Pair) -> str | None:
    """Another person: "he" and "she", "I" and "they"; "my" and "your" where nothing else says who speaks; or "I" and
    "you" in each other's place."""
    table, owners = p.lexicon.persons, p.lexicon.owners
    if not p.a.marks & p.b.marks & PERSON:
        return None
    said = [[table[t.word] for t in s.text.tokens if t.marks & PERSON] for s in (p.a, p.b)]
    if said[0] == said[1]:
        return None
    (first, third_a), (second, third_b) = ((set(found), set(found) & p.lexicon.third) for found in said)
    if max(len(third_a), len(third_b)) > 1 or not first or not second or first == second:
        return "person" if first and said[0] != said[1] and sorted(said[0]) == sorted(said[1]) else None
    if third_a != third_b and ((third_a and third_b) or first.isdisjoint(second)):
        return "person"
    mine, yours = ({table[word] for word in s.words & owners} for s in (p.a, p.b))
    others = (p.a.words | p.b.words) & table.keys() - owners
    return "person" if mine and yours and not mine & yours and not others else None
