"""Questions about a scene: what is asked, and the one answer that the picture gives.

A `Program` says what is asked, free of wording; `surfaces.py` words it and `records.py` writes it in GQA's schema. An
object is only ever named by a phrase that fits one object of the scene, and nothing is asked that the picture leaves
open: no relation along an axis where two centres lie close together, no "what is left of" with two candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType

from semkv_lab.minigqa.program import (
    Program,
    Ref,
    attribute,
    only_neighbour,
    opposite_side,
    references,
    short_relation,
    yes_no,
)
from semkv_lab.minigqa.scene import (
    COLORS,
    GROUNDS,
    OPPOSITE,
    RELATIONS,
    SHAPES,
    SIZES,
    Scene,
    relation_holds,
    side_of,
)

Asker = Callable[[Scene, Random], Program | None]


def ask(scene: Scene, rng: Random, kind: str) -> Program | None:
    """One question of a kind, or None where this draw found none (the scene may hold no such question)."""
    return KINDS[kind](scene, rng)


def ask_any(scene: Scene, rng: Random, weights: Mapping[str, float]) -> Program:
    """One question of a kind drawn by weight. Kinds that every scene can answer must be among the weights."""
    kinds = list(weights)
    while True:
        kind = rng.choices(kinds, [weights[k] for k in kinds])[0]
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


_TRIES = 12


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


def _relation_verify(scene: Scene, rng: Random) -> Program | None:
    pair = _pair(scene, rng)
    if pair is None:
        return None
    relation = rng.choice(RELATIONS)
    truth = relation_holds(scene, pair[0].index, relation, pair[1].index)
    return None if truth is None else Program("rel_verify", yes_no(truth), *pair, value=relation)


def _relation_choose(scene: Scene, rng: Random) -> Program | None:
    pair = _pair(scene, rng)
    if pair is None:
        return None
    relation = rng.choice(RELATIONS)
    truth = relation_holds(scene, pair[0].index, relation, pair[1].index)
    if truth is None:
        return None
    opposite = OPPOSITE[relation]
    return Program("rel_choose", short_relation(relation if truth else opposite), *pair, value=relation, other=opposite)


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

KINDS: Mapping[str, Asker] = MappingProxyType(
    {
        "query_color": _query("color"),
        "query_shape": _query("shape"),
        "query_size": _query("size"),
        "position_query": _position("position_query", ("hposition",)),
        "rel_query_shape": _relation_query("shape"),
        "rel_query_color": _relation_query("color"),
        "ground_query": _ground_query,
        "exist": _exist,
        "rel_exist": _relation_exist,
        "rel_verify": _relation_verify,
        "verify_color": _verify("color"),
        "verify_shape": _verify("shape"),
        "verify_size": _verify("size"),
        "position_verify": _position("position_verify", _BOTH_AXES),
        "ground_verify": _ground_verify,
        "choose_color": _choose("color"),
        "choose_shape": _choose("shape"),
        "choose_size": _choose("size"),
        "position_choose": _position("position_choose", _BOTH_AXES),
        "rel_choose": _relation_choose,
        "ground_choose": _ground_choose,
        "exist_and": _exist_two("exist_and", lambda p, q: p and q),
        "exist_or": _exist_two("exist_or", lambda p, q: p or q),
        "verify_both": _verify_both,
        "same_color": _same("color", "same_color"),
        "different_color": _same("color", "different_color", same=False),
        "same_size": _same("size", "same_size"),
        "same_shape": _same("shape", "same_shape"),
        "compare_size": _larger,
    }
)
"""Every kind of question, by name."""

WEIGHTS: Mapping[str, float] = MappingProxyType(
    {
        "query_color": 14.0,
        "query_shape": 10.0,
        "query_size": 6.0,
        "position_query": 4.0,
        "rel_query_shape": 9.0,
        "rel_query_color": 5.0,
        "ground_query": 2.0,
        "exist": 7.0,
        "rel_exist": 5.0,
        "rel_verify": 6.0,
        "verify_color": 4.0,
        "verify_shape": 3.0,
        "verify_size": 2.0,
        "position_verify": 2.0,
        "ground_verify": 0.5,
        "choose_color": 3.0,
        "choose_shape": 3.0,
        "choose_size": 2.0,
        "position_choose": 2.0,
        "rel_choose": 4.0,
        "ground_choose": 0.5,
        "exist_and": 4.0,
        "exist_or": 4.0,
        "verify_both": 3.0,
        "same_color": 2.0,
        "different_color": 2.0,
        "same_size": 1.5,
        "same_shape": 1.5,
        "compare_size": 2.0,
    }
)
"""How often each kind is asked: about half are open queries, as in GQA's balanced split, then verify, choose, logical
and compare questions."""
