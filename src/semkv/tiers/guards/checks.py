"""The guards. Each is a pure function of two texts taken apart, symmetric, and says why it objects or None."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from semkv.tiers.guards.content import MOST, Pair, Side, akin, content, unmatched
from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.order import reversed_order
from semkv.tiers.guards.quantities import differ
from semkv.tiers.guards.text import STOPS, Token

Check = Callable[[Pair], str | None]

_LOOSE = frozenset(("manner", "place"))  # "how can I buy" and "where can I buy" ask for much the same
_QUESTION = 40  # tokens in which a question is looked for
_TELLING = 14  # words of a text among which one tells its language
_NAMED = 4  # letters of a stem that a prefix may turn round


def code(p: Pair) -> str | None:
    """An identifier, flag, path, version or operator that the other text does not have."""
    for mine, other in ((p.a, p.b), (p.b, p.a)):
        if any(token not in other.text.spelled and token not in other.words for token in mine.text.code):
            return "code"
    return None


def language(p: Pair) -> str | None:
    """Other words, or in another order, where a text is not in the language whose words the guards know."""
    if not p.lexicon.telling or (_told(p.a, p.lexicon) and _told(p.b, p.lexicon)):
        return None
    first, second = ([t.word for t in s.text.tokens if t.word not in STOPS] for s in (p.a, p.b))
    return "language" if first != second else None


def _told(side: Side, lexicon: Lexicon) -> bool:
    found = [t.word for t in side.text.tokens if t.word[0].isalpha()]
    telling = sum(word in lexicon.telling for word in found) + (found[:1] != [] and found[0] in lexicon.telling_first)
    return telling >= len(found) / _TELLING


def quote(p: Pair) -> str | None:
    """Quoted words that the other text does not have, where it has other words instead."""
    if p.a.text.quotes == p.b.text.quotes:
        return None
    first, second = _unquoted(p.a, p.b), _unquoted(p.b, p.a)
    if first and (second or content(p.only_b, p.b, p.lexicon)):
        return "quote"
    return "quote" if second and content(p.only_a, p.a, p.lexicon) else None


def _unquoted(mine: Side, other: Side) -> bool:
    missing = mine.text.quotes - other.text.quotes
    if len(missing) > MOST:
        return True
    text = f" {' '.join(t.word for t in other.text.tokens if t.word not in STOPS)} "
    for quoted in missing:
        plain = " ".join(w for w in quoted.split() if w[0].isalnum())
        if f" {plain} " not in text and quoted.replace(" ", "") not in other.text.spelled:
            return True
    return False


def quantity(p: Pair) -> str | None:
    """Another number or unit."""
    return differ(p.a.quantities, p.b.quantities)


def date(p: Pair) -> str | None:
    """Another day, month, season or time of day."""
    if p.a.text.dates != p.b.text.dates:
        return "date"
    table = p.lexicon.tables.dates
    first, second = _dated(p.only_a, table), _dated(p.only_b, table)
    return "date" if any(second.get(name, senses) != senses for name, senses in first.items()) else None


def _dated(tokens: Iterable[Token], table: Mapping[str, tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for token in tokens:
        if token.word in table:
            name, sense = table[token.word]
            found.setdefault(name, set()).add(sense)
    return found


def negation(p: Pair) -> str | None:
    """Another number of denials, or one text denies with a verb what the other says."""
    (low_a, high_a), (low_b, high_b) = _denials(p.a, p.only_a, p.lexicon), _denials(p.b, p.only_b, p.lexicon)
    if low_a > high_b or low_b > high_a:
        return "negation"
    first, second = (any(t.stem in p.lexicon.tables.denials for t in only) for only in (p.only_a, p.only_b))
    if low_a == low_b and first != second:
        other = content(p.only_b, p.b, p.lexicon) if first else content(p.only_a, p.a, p.lexicon)
        return None if other else "negation"
    return None


def _denials(side: Side, only: tuple[Token, ...], lexicon: Lexicon) -> tuple[int, int]:
    """How often a text denies, at least and at most."""
    sure = sum(t.word in lexicon.negations or t.word.endswith("n't") for t in side.text.tokens)
    return sure, sure + sum(t.stem in lexicon.tables.denials or _negative(t.word, lexicon) for t in only)


def _negative(word: str, lexicon: Lexicon) -> bool:
    return len(word) > _NAMED and word.startswith(lexicon.tables.prefixes)


def groups(p: Pair) -> str | None:
    """Words whose presence must agree, sides and colors: one more or less tells one object from another."""
    for name, group in p.lexicon.groups.items():
        first, second = (sorted(group[t.word] for t in s.text.tokens if t.word in group) for s in (p.a, p.b))
        if first != second:
            return name
    return None


def choice(p: Pair) -> str | None:
    """A choice against a yes or no: "is it large or small?" and "is it large?"."""
    if not p.lexicon.choices or not all(_yes_or_no(side, p.lexicon) for side in (p.a, p.b)):
        return None
    first, second = (not p.lexicon.choices.isdisjoint(side.words) for side in (p.a, p.b))
    return "choice" if first != second else None


def sides(p: Pair) -> str | None:
    """Shared words in another order around a side: "left of the cone", where the cone moved, is another place."""
    group = p.lexicon.groups.get("direction", {})
    if p.a.words.isdisjoint(group) or p.b.words.isdisjoint(group):
        return None
    shared = {stem for stem, times in p.a.stems.items() if times == 1 and p.b.stems[stem] == 1}
    first, second = (_around(side.text.tokens, shared, group, p.lexicon) for side in (p.a, p.b))
    return "word order" if first != second else None


def _around(tokens: Iterable[Token], shared: set[str], group: Mapping[str, str], lexicon: Lexicon) -> list[str]:
    """The shared content words in order; sides that follow one another, as in a choice of two, are one."""
    found: list[str] = []
    for token in tokens:
        stem = "" if token.word in group else token.stem
        if stem and (stem not in shared or stem in lexicon.tables.quiet):
            continue
        if stem or not found or found[-1]:
            found.append(stem)
    return found


def opposites(p: Pair) -> str | None:
    """A word and its opposite, by table or by prefix. Where one text has both ("pros and cons") they prove nothing."""
    table = p.lexicon.tables.opposites
    mine, other = {t.stem for t in p.only_a}, {t.stem for t in p.only_b}
    reasons = {
        table[word][opposite]
        for word in mine & table.keys()
        for opposite in table[word].keys() & other
        if mine.isdisjoint(table[word]) and other.isdisjoint(table[opposite])
    }
    if reasons:
        return min(reasons)
    if _lessened(p.only_a, p.only_b, p.a, p.lexicon) or _lessened(p.only_b, p.only_a, p.b, p.lexicon):
        return "comparison"
    if min(len(p.only_a), len(p.only_b)) > MOST:
        return None
    if any(_contrary(x.word, y.word, p.lexicon) for x in p.only_a for y in p.only_b):
        return "antonym"
    return None


def _lessened(mine: tuple[Token, ...], other: tuple[Token, ...], side: Side, lexicon: Lexicon) -> bool:
    """Whether "less dense" or "as dense as" stands against "denser"."""
    words, endings = lexicon.lessening
    if not any(t.word in words for t in mine):
        return False
    bases = [t.word[: -len(e)] for t in other for e in endings if t.word.endswith(e)]
    return any(base in side.stems or lexicon.stem(base) in side.stems for base in bases)


def _contrary(x: str, y: str, lexicon: Lexicon) -> bool:
    """Whether two words are one stem with contrary prefixes: "encode" and "decode"."""
    if x[-3:] != y[-3:] or min(len(x), len(y)) < _NAMED:
        return False
    return any(
        a.startswith(p) and b.startswith(q) and a[len(p) :] == b[len(q) :] and len(a) - len(p) >= _NAMED - 1
        for p, q in lexicon.contraries
        for a, b in ((x, y), (y, x))
    )


def question(p: Pair) -> str | None:
    """Another question word: who, when, where, why, how, how many; or "what size" against "what color"."""
    if not p.lexicon.questions:
        return None
    first, second = _asked(p.a, p.lexicon), _asked(p.b, p.lexicon)
    if first and second and not first & second and first | second != _LOOSE:
        return "question word"
    if any("manner " in kind for kind in first ^ second) and _yes_or_no(p.b if first else p.a, p.lexicon):
        return "question word"
    one, other = _named(p.a, p.lexicon), _named(p.b, p.lexicon)
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


def _yes_or_no(side: Side, lexicon: Lexicon) -> bool:
    tokens = side.text.tokens
    return bool(tokens) and (tokens[0].word in lexicon.helpers or tokens[0].word in lexicon.by[1])


def _degree(tokens: tuple[Token, ...], i: int, lexicon: Lexicon) -> bool:
    """Whether "how" and the word at ``i`` are one question: "how old is", not "how children learn"."""
    after, beyond = (tokens[k].word if k < len(tokens) else "" for k in (i, i + 1))
    return after in lexicon.degree[1] or (after not in lexicon.function_words and beyond in lexicon.function_words)


def _named(side: Side, lexicon: Lexicon) -> Token | None:
    """The noun that a "what" or "which" asks for."""
    for token, after in zip(side.text.tokens, side.text.tokens[1:], strict=False):
        if lexicon.questions.get(token.word) == "":
            return None if after.word in lexicon.function_words or after.word in lexicon.open else after
    return None


def person(p: Pair) -> str | None:
    """Another person: "he" and "she"; "my" and "your" where nothing else says who speaks."""
    table = p.lexicon.persons
    first, second = ({table[t.word] for t in s.text.tokens if t.word in table} for s in (p.a, p.b))
    if first and second and first != second:
        return "person"
    owners, others = p.lexicon.owners
    mine, yours = ({owners[t.word] for t in s.text.tokens if t.word in owners} for s in (p.a, p.b))
    return "person" if mine and yours and not mine & yours and not (p.a.words | p.b.words) & others else None


def order(p: Pair) -> str | None:
    """Subject and object exchanged."""
    return "word order" if reversed_order(p.a.text.tokens, p.b.text.tokens, p.lexicon) else None


def substitution(p: Pair) -> str | None:
    """A name where the other text has another or none; or a content word in the place of another that is no kin."""
    if min(len(p.only_a), len(p.only_b)) > MOST:
        return "substitution"
    left, right = unmatched(p)
    names = [any(t.name for t in side) for side in (left, right)]
    if all(names) or (len(left) + len(right) == 1 and any(names)):
        return "entity"
    if len(left) == len(right) == 1 and _in_place(left[0], right[0], p):
        return "entity" if any(names) else "substitution"
    return None


def _in_place(x: Token, y: Token, p: Pair) -> bool:
    """Whether a word next to one stands next to the other as well."""
    first, second = (["", *(t.stem for t in s.text.tokens if t.word not in p.lexicon.articles), ""] for s in (p.a, p.b))
    i, j = first.index(x.stem), second.index(y.stem)
    return first[i - 1] == second[j - 1] or first[i + 1] == second[j + 1]


CHECKS: tuple[Check, ...] = (
    code, quote, quantity, date, negation, groups, choice, sides, opposites, question, person, order, substitution,
    language,
)  # fmt: skip
