"""Words that stand in the place of others: a name, or a content word that is no kin of the one it replaces."""

from __future__ import annotations

from semkv.tiers.guards.content import MOST, Pair, Side, akin, content
from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.text import STOPS, Token

_PLACES = 3  # words that stand against one each
_BLOCK = 4  # words that stand against others in one place


def substitution(p: Pair) -> str | None:
    """A name where the other text has another or none; or a content word in the place of another that is no kin."""
    if min(len(p.only_a), len(p.only_b)) > MOST:
        return "substitution"
    left, right = ([t for t in own if t.stem not in p.converse | p.denied] for own in p.unmatched)
    names = [any(t.name for t in side) for side in (left, right)]
    if all(names) or (len(left) + len(right) == 1 and any(names)):
        return "entity"
    if not p.only_a or not p.only_b:
        return None
    mine, other = left + _again(p.only_a, p.a, p.b, p.lexicon), right + _again(p.only_b, p.b, p.a, p.lexicon)
    both = mine and other
    if bool(mine) != bool(other):  # "a work visa" and "a student visa"
        mine, other = mine or _attributes(p.only_a, p.lexicon), other or _attributes(p.only_b, p.lexicon)
    alone = len({t.stem for t in p.only_a}) == len({t.stem for t in p.only_b}) == 1
    near = 1 if left and right else 2
    pairs = set(zip(mine, other, strict=False)) if len(mine) == len(other) else set()
    apart = 0 < len(pairs) <= _PLACES and not any(akin(x, y, p.lexicon) for x, y in pairs)
    if apart and ((alone and both) or all(neighbours(x, y, p) >= near for x, y in pairs)):
        return "entity" if any(t.name for t in (*mine, *other)) else "substitution"
    return "substitution" if left and right and _block(p) else None


def _again(only: tuple[Token, ...], mine: Side, other: Side, lexicon: Lexicon) -> list[Token]:
    """Content words that the other text has as well, but not as often."""
    return [t for t in content(only, mine, lexicon) if t.stem in other.stems]


def _attributes(only: tuple[Token, ...], lexicon: Lexicon) -> list[Token]:
    return [t for t in only if t.word in lexicon.attributes or t.word in lexicon.speaker[0]]


def neighbours(x: Token, y: Token, p: Pair) -> int:
    """How many of the two words next to the last of one stand next to the last of the other as well."""
    first, second = (["", *[t.stem for t in s.spine], ""] for s in (p.a, p.b))
    i, j = len(first) - 1 - first[::-1].index(x.stem), len(second) - 1 - second[::-1].index(y.stem)
    return (first[i - 1] == second[j - 1]) + (first[i + 1] == second[j + 1])


def _block(p: Pair) -> bool:
    """Whether a few words in one place, and nothing else, stand against a few others: "wax", "candle oil"."""
    if len(p.only_a) + len(p.only_b) > _BLOCK:
        return False
    first, second = ([t for t in s.spine if t.word not in STOPS] for s in (p.a, p.b))
    low = 0
    while low < min(len(first), len(second)) and first[low].stem == second[low].stem:
        low += 1
    high = 0
    while high < min(len(first), len(second)) - low and first[-1 - high].stem == second[-1 - high].stem:
        high += 1
    return low + high > 1 and len(first) + len(second) - 2 * (low + high) <= _BLOCK
