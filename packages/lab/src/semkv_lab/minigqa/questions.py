"""Questions about a scene: what is asked, the one answer that the picture gives, and the words.

A `Program` says what is asked, free of wording; ``kinds.toml`` has several wordings of each kind, so that a program has
paraphrases. An object is only ever named by a phrase that fits one object of the scene, and nothing is asked that the
picture leaves open: no relation along an axis where two centres lie close together, no "what is left of" with two
candidates.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType

from semkv_lab.minigqa.scenes import (
    COLORS,
    GROUNDS,
    OPPOSITE,
    RELATIONS,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    relation_holds,
    side_of,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of question, as ``kinds.toml`` describes it."""

    weight: float
    types: tuple[str, ...]
    full: tuple[str, ...]
    wordings: tuple[str, ...]


def _read_kinds() -> dict[str, Kind]:
    data = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text(encoding="utf-8"))
    return {
        name: Kind(row["weight"], tuple(row["types"]), tuple(row["full"]), tuple(row["wordings"]))
        for name, row in data.items()
    }


KINDS: Mapping[str, Kind] = MappingProxyType(_read_kinds())
WEIGHTS: Mapping[str, float] = MappingProxyType({name: kind.weight for name, kind in KINDS.items()})

NOUN = "object"
"""What an object is called when its shape is not said."""

_TRIES = 12
_SHORT = {"to the left of": "left", "to the right of": "right", "above": "above", "below": "below"}
_OTHER_SIDE = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}


@dataclass(frozen=True, slots=True)
class Ref:
    """A phrase for an object: ``index`` in the scene (-1: nothing there fits), and the parts that are said."""

    index: int
    shape: str = ""
    color: str = ""
    size: str = ""

    @property
    def text(self) -> str:
        return " ".join(part for part in (self.size, self.color, self.shape or NOUN) if part)

    def fits(self, thing: Thing) -> bool:
        return self.shape in ("", thing.shape) and self.color in ("", thing.color) and self.size in ("", thing.size)


@dataclass(frozen=True, slots=True)
class Program:
    """What is asked, and the answer.

    Attributes:
        kind: a key of `KINDS`.
        answer: one word, as in GQA.
        a: the object the question is about, where there is one.
        b: the second object.
        value: the attribute value, relation, axis or place that is asked about; empty where the kind has none.
        other: the second alternative of a choice.
    """

    kind: str
    answer: str
    a: Ref | None = None
    b: Ref | None = None
    value: str = ""
    other: str = ""


_PHRASES = (
    ("shape",), ("shape", "color"), ("color",), ("shape", "size"), ("color", "size"), ("shape", "color", "size"),
)  # fmt: skip


def references(scene: Scene, index: int, without: str = "") -> list[Ref]:
    """Every phrase that names object ``index`` and no other, not using the attribute ``without``."""
    thing = scene.things[index]
    phrases = (
        Ref(index, **{name: attribute(thing, name) for name in names}) for names in _PHRASES if without not in names
    )
    return [ref for ref in phrases if sum(ref.fits(t) for t in scene.things) == 1]


def attribute(thing: Thing, name: str) -> str:
    """The object's ``color``, ``shape`` or ``size``. Raises `KeyError` on another name."""
    return {"color": thing.color, "shape": thing.shape, "size": thing.size}[name]


def only_neighbour(scene: Scene, target: int, relation: str) -> int | None:
    """The one object in ``relation`` to ``target``, where every other is clearly not; else None."""
    found = None
    for i in range(len(scene.things)):
        if i == target:
            continue
        truth = relation_holds(scene, i, relation, target)
        if truth is None or (truth and found is not None):
            return None
        if truth:
            found = i
    return found


def short_relation(relation: str) -> str:
    """A relation as a one-word answer: ``left``, ``right``, ``above`` or ``below``."""
    return _SHORT[relation]


def opposite_side(side: str) -> str:
    """``left`` for ``right``, ``top`` for ``bottom``, and back."""
    return _OTHER_SIDE[side]


def yes_no(truth: bool) -> str:
    return "yes" if truth else "no"


_SLOT = re.compile(r"\{(\w+)\}")


def plural(phrase: str) -> str:
    return phrase + ("es" if phrase.endswith("s") else "s")


def with_article(phrase: str) -> str:
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def fill(template: str, program: Program) -> str:
    """A template with the program's words in its slots."""
    return _SLOT.sub(lambda match: slot_text(match.group(1), program), template)


def slot_text(slot: str, program: Program) -> str:
    """The words for one slot. Raises `KeyError` on a slot the program has nothing for."""
    if slot == "value":
        return program.value
    if slot == "other":
        return program.other
    if slot == "answer":
        return program.answer
    if slot == "chosen":  # the relation that a one-word answer such as "left" stands for
        return program.value if program.answer in program.value.split() else program.other
    ref = slot_ref(slot, program)
    if ref is None:
        raise KeyError(slot)
    if slot in ("as", "bs"):
        return plural(ref.text)
    return with_article(ref.text) if slot.startswith("an_") else ref.text


def slot_ref(slot: str, program: Program) -> Ref | None:
    """The object that a slot names, or None for a slot of words."""
    return {"a": program.a, "an_a": program.a, "as": program.a, "b": program.b, "an_b": program.b}.get(slot)


def word(program: Program, rng: Random) -> str:
    """The question in one of its wordings; the plainest half of the time."""
    templates = KINDS[program.kind].wordings
    return fill(templates[0] if rng.random() < 0.5 else rng.choice(templates), program)


def wordings(program: Program) -> tuple[str, ...]:
    """The question in all of its wordings, the plainest first."""
    return tuple(fill(template, program) for template in KINDS[program.kind].wordings)


def change_case(text: str, rng: Random) -> str:
    """The same words in another case: all lower, all upper, or each word capitalised. Never the text itself."""
    changed = [c for c in (text.lower(), text.lower(), text.upper(), text.title()) if c != text]
    return rng.choice(changed)


def change_whitespace(text: str, rng: Random) -> str:
    """The same words with other white space: doubled spaces, a space before the mark, spaces at the ends, a tab."""
    words = text.split(" ")
    gap = rng.randrange(1, len(words))
    changed = (
        " ".join(words[:gap]) + "  " + " ".join(words[gap:]),
        "  ".join(words),
        f" {text}",
        f"{text} ",
        f"  {text}  ",
        " ".join(words[:gap]) + "\t" + " ".join(words[gap:]),
        f"{text[:-1]} ?" if text.endswith("?") else f"{text}\n",
    )
    return rng.choice(changed)


Asker = Callable[[Scene, Random], Program | None]


def ask(scene: Scene, rng: Random, kind: str) -> Program | None:
    """One question of a kind, or None where this draw found none (the scene may hold no such question)."""
    return _ASKERS[kind](scene, rng)


def ask_any(scene: Scene, rng: Random) -> Program:
    """One question of a kind drawn by weight."""
    while True:
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        program = ask(scene, rng, kind)
        if program is not None:
            return program


def _pick(scene: Scene, rng: Random, without: str = "") -> Ref | None:
    refs = references(scene, rng.randrange(len(scene.things)), without)
    return rng.choice(refs) if refs else None


def _pair(scene: Scene, rng: Random, without: str = "") -> tuple[Ref, Ref] | None:
    first, second = rng.sample(range(len(scene.things)), 2)
    a, b = references(scene, first, without), references(scene, second, without)
    return (rng.choice(a), rng.choice(b)) if a and b else None


_DOMAIN = {"color": COLORS, "shape": SHAPES, "size": SIZES}


def _wrong(scene: Scene, rng: Random, index: int, name: str) -> str:
    """A value the object does not have; half the time one that another object of the scene has."""
    own = attribute(scene.things[index], name)
    seen = [v for t in scene.things if (v := attribute(t, name)) != own]
    if seen and rng.random() < 0.5:
        return rng.choice(seen)
    return rng.choice([v for v in _DOMAIN[name] if v != own])


def _query(name: str) -> Asker:
    def asker(scene: Scene, rng: Random) -> Program | None:
        a = _pick(scene, rng, without=name)
        return None if a is None else Program(f"query_{name}", attribute(scene.things[a.index], name), a)

    return asker


def _verify(name: str) -> Asker:
    def asker(scene: Scene, rng: Random) -> Program | None:
        a = _pick(scene, rng, without=name)
        if a is None:
            return None
        truth = rng.random() < 0.5
        value = attribute(scene.things[a.index], name) if truth else _wrong(scene, rng, a.index, name)
        return Program(f"verify_{name}", yes_no(truth), a, value=value)

    return asker


def _choose(name: str) -> Asker:
    def asker(scene: Scene, rng: Random) -> Program | None:
        a = _pick(scene, rng, without=name)
        if a is None:
            return None
        own = attribute(scene.things[a.index], name)
        pair = [own, _wrong(scene, rng, a.index, name)]
        rng.shuffle(pair)
        return Program(f"choose_{name}", own, a, value=pair[0], other=pair[1])

    return asker


def _verify_both(scene: Scene, rng: Random) -> Program | None:
    a = _pick(scene, rng, without="color")
    if a is None or a.size:
        return None
    thing = scene.things[a.index]
    truth = rng.random() < 0.5
    color, size = thing.color, thing.size
    if not truth:
        wrong = rng.choice(("color", "size", "both"))
        color = color if wrong == "size" else _wrong(scene, rng, a.index, "color")
        size = size if wrong == "color" else _wrong(scene, rng, a.index, "size")
    return Program("verify_both", yes_no(truth), a, value=color, other=size)


def _maybe_there(scene: Scene, rng: Random, truth: bool) -> Ref | None:
    """A phrase that fits some object, or one that fits none though half the time each of its words fits something."""
    use_color, use_shape = rng.choice(((True, True), (True, True), (False, True), (True, False)))
    for _ in range(_TRIES):
        ref = _some_phrase(scene, rng, use_color, use_shape, truth)
        if ref is not None:
            return ref
    return None


def _some_phrase(scene: Scene, rng: Random, use_color: bool, use_shape: bool, truth: bool) -> Ref | None:
    if truth:
        thing = rng.choice(scene.things)
        shape, color = thing.shape, thing.color
    elif rng.random() < 0.5:
        shape, color = rng.choice(scene.things).shape, rng.choice(scene.things).color
    else:
        shape, color = rng.choice(SHAPES), rng.choice(COLORS)
    ref = Ref(-1, shape if use_shape else "", color if use_color else "")
    fitting = [i for i, t in enumerate(scene.things) if ref.fits(t)]
    if bool(fitting) != truth:
        return None
    return Ref(fitting[0], ref.shape, ref.color) if fitting else ref


def _exist(scene: Scene, rng: Random) -> Program | None:
    truth = rng.random() < 0.5
    a = _maybe_there(scene, rng, truth)
    return None if a is None else Program("exist", yes_no(truth), a)


def _exist_two(kind: str, holds: Callable[[bool, bool], bool]) -> Asker:
    def asker(scene: Scene, rng: Random) -> Program | None:
        truth = rng.random() < 0.5
        cases = [(p, q) for p in (True, False) for q in (True, False) if holds(p, q) == truth]
        first, second = rng.choice(cases)
        for _ in range(_TRIES):
            a, b = _maybe_there(scene, rng, first), _maybe_there(scene, rng, second)
            if a is None or b is None or a.text == b.text or any(a.fits(t) and b.fits(t) for t in scene.things):
                continue
            return Program(kind, yes_no(truth), a, b)
        return None

    return asker


def _same(name: str, kind: str, *, same: bool = True) -> Asker:
    """Asked only where the scene holds both an equal and an unequal pair, so that either answer is as likely."""

    def asker(scene: Scene, rng: Random) -> Program | None:
        truth = rng.random() < 0.5
        pairs: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for i, first in enumerate(scene.things):
            for j, second in enumerate(scene.things):
                if i != j:
                    pairs[attribute(first, name) == attribute(second, name)].append((i, j))
        if not pairs[True] or not pairs[False]:
            return None
        i, j = rng.choice(pairs[truth == same])
        a, b = references(scene, i, without=name), references(scene, j, without=name)
        return Program(kind, yes_no(truth), rng.choice(a), rng.choice(b)) if a and b else None

    return asker


def _larger(scene: Scene, rng: Random) -> Program | None:
    for _ in range(_TRIES):
        pair = _pair(scene, rng, without="size")
        if pair is None or not (pair[0].shape and pair[1].shape):
            continue
        a, b = pair
        first, second = scene.things[a.index], scene.things[b.index]
        if first.size != second.size and first.shape != second.shape:
            break
    else:
        return None
    value = rng.choice(("larger", "smaller"))
    wanted = "large" if value == "larger" else "small"
    return Program("compare_size", first.shape if first.size == wanted else second.shape, a, b, value=value)


def _relation(kind: str) -> Asker:
    def asker(scene: Scene, rng: Random) -> Program | None:
        pair = _pair(scene, rng)
        if pair is None:
            return None
        relation = rng.choice(RELATIONS)
        truth = relation_holds(scene, pair[0].index, relation, pair[1].index)
        if truth is None:
            return None
        if kind == "rel_verify":
            return Program(kind, yes_no(truth), *pair, value=relation)
        opposite = OPPOSITE[relation]
        return Program(kind, short_relation(relation if truth else opposite), *pair, value=relation, other=opposite)

    return asker


def _relation_query(name: str) -> Asker:
    def asker(scene: Scene, rng: Random) -> Program | None:
        cases = [(i, relation) for i in range(len(scene.things)) for relation in RELATIONS]
        rng.shuffle(cases)
        for target, relation in cases:
            found = only_neighbour(scene, target, relation)
            if found is not None:
                break
        else:
            return None
        refs = references(scene, target)
        if not refs:
            return None
        b = rng.choice(refs)
        return Program(f"rel_query_{name}", attribute(scene.things[found], name), Ref(found), b, value=relation)

    return asker


def _relation_exist(scene: Scene, rng: Random) -> Program | None:
    """Whether something that is in the picture, or is not, stands on one side of a named object."""
    truth = rng.random() < 0.5
    there = truth or rng.random() < 0.7
    for _ in range(_TRIES):
        a, b, relation = _maybe_there(scene, rng, there), _pick(scene, rng), rng.choice(RELATIONS)
        if a is None or b is None or not a.shape or a.fits(scene.things[b.index]):
            continue
        sides = {i: relation_holds(scene, i, relation, b.index) for i, t in enumerate(scene.things) if a.fits(t)}
        if None in sides.values() or any(sides.values()) != truth:
            continue
        index = next((i for i, holds in sides.items() if holds), -1)
        return Program("rel_exist", yes_no(truth), Ref(index, a.shape, a.color), b, value=relation)
    return None


def _position(kind: str, axes: tuple[str, ...]) -> Asker:
    def asker(scene: Scene, rng: Random) -> Program | None:
        a = _pick(scene, rng)
        side = side_of(scene, a.index, rng.choice(axes)) if a else None
        if a is None or side is None:
            return None
        if kind == "position_query":
            return Program(kind, side, a)
        if kind == "position_verify":
            truth = rng.random() < 0.5
            return Program(kind, yes_no(truth), a, value=side if truth else opposite_side(side))
        pair = [side, opposite_side(side)]
        rng.shuffle(pair)
        return Program(kind, side, a, value=pair[0], other=pair[1])

    return asker


def _ground_query(scene: Scene, rng: Random) -> Program:
    return Program("ground_query", scene.ground)


def _ground_verify(scene: Scene, rng: Random) -> Program:
    truth = rng.random() < 0.5
    value = scene.ground if truth else rng.choice([g for g in GROUNDS if g != scene.ground])
    return Program("ground_verify", yes_no(truth), value=value)


def _ground_choose(scene: Scene, rng: Random) -> Program:
    pair = [scene.ground, rng.choice([g for g in GROUNDS if g != scene.ground])]
    rng.shuffle(pair)
    return Program("ground_choose", scene.ground, value=pair[0], other=pair[1])


_BOTH_AXES = ("hposition", "vposition")
_ASKERS: Mapping[str, Asker] = {
    **{f"query_{name}": _query(name) for name in _DOMAIN},
    **{f"verify_{name}": _verify(name) for name in _DOMAIN},
    **{f"choose_{name}": _choose(name) for name in _DOMAIN},
    "position_query": _position("position_query", ("hposition",)),
    "position_verify": _position("position_verify", _BOTH_AXES),
    "position_choose": _position("position_choose", _BOTH_AXES),
    "ground_query": _ground_query,
    "ground_verify": _ground_verify,
    "ground_choose": _ground_choose,
    "exist": _exist,
    "exist_and": _exist_two("exist_and", lambda p, q: p and q),
    "exist_or": _exist_two("exist_or", lambda p, q: p or q),
    "rel_query_shape": _relation_query("shape"),
    "rel_query_color": _relation_query("color"),
    "rel_exist": _relation_exist,
    "rel_verify": _relation("rel_verify"),
    "rel_choose": _relation("rel_choose"),
    "verify_both": _verify_both,
    "same_color": _same("color", "same_color"),
    "different_color": _same("color", "different_color", same=False),
    "same_size": _same("size", "same_size"),
    "same_shape": _same("shape", "same_shape"),
    "compare_size": _larger,
}
