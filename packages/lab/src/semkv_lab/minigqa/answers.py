"""What a question means in another scene: the same words, asked of another picture."""

from __future__ import annotations

from dataclasses import replace

from semkv_lab.minigqa.program import (
    Program,
    Ref,
    attribute,
    only_neighbour,
    opposite_side,
    short_relation,
    yes_no,
)
from semkv_lab.minigqa.scene import OPPOSITE, Scene, relation_holds, side_of


def restate(scene: Scene, program: Program) -> Program | None:
    """The program with the objects and the answer that its words have in ``scene``.

    None where the words no longer make a fair question there: a phrase fits no object or two, a choice offers no true
    alternative, a relation is not clear.
    """
    if program.kind.startswith("ground"):
        return _ground(scene, program)
    if program.kind in ("exist", "exist_and", "exist_or", "rel_exist"):
        return _existence(scene, program)
    a = _the_one(scene, program.a) if program.kind not in ("rel_query_shape", "rel_query_color") else None
    b = _the_one(scene, program.b)
    if (a is None and not program.kind.startswith("rel_query")) or (b is None and program.b is not None):
        return None
    if program.kind.startswith("rel_"):
        return _relation(scene, program, a, b)
    if b is not None and a is not None:
        return _comparison(scene, program, a, b)
    return None if a is None else _single(scene, program, a)


def _fitting(scene: Scene, ref: Ref | None) -> list[int]:
    return [] if ref is None else [i for i, thing in enumerate(scene.things) if ref.fits(thing)]


def _the_one(scene: Scene, ref: Ref | None) -> Ref | None:
    found = _fitting(scene, ref)
    return replace(ref, index=found[0]) if ref is not None and len(found) == 1 else None


def _ground(scene: Scene, program: Program) -> Program | None:
    if program.kind == "ground_verify":
        return replace(program, answer=yes_no(scene.ground == program.value))
    if program.kind == "ground_choose" and scene.ground not in (program.value, program.other):
        return None
    return replace(program, answer=scene.ground)


def _existence(scene: Scene, program: Program) -> Program | None:
    found = _fitting(scene, program.a)
    if program.kind == "rel_exist":
        b = _the_one(scene, program.b)
        if b is None or b.index in found:
            return None
        sides = {i: relation_holds(scene, i, program.value, b.index) for i in found}
        if None in sides.values():
            return None
        found = [i for i, holds in sides.items() if holds]
        return replace(program, answer=yes_no(bool(found)), a=_first(program.a, found), b=b)
    others = _fitting(scene, program.b)
    if program.kind == "exist":
        truth = bool(found)
    else:
        if set(found) & set(others):
            return None
        truth = bool(found and others) if program.kind == "exist_and" else bool(found or others)
    return replace(program, answer=yes_no(truth), a=_first(program.a, found), b=_first(program.b, others))


def _first(ref: Ref | None, found: list[int]) -> Ref | None:
    return None if ref is None else replace(ref, index=found[0] if found else -1)


def _relation(scene: Scene, program: Program, a: Ref | None, b: Ref | None) -> Program | None:
    if b is None:
        return None
    if a is None:
        found = only_neighbour(scene, b.index, program.value)
        if found is None:
            return None
        name = program.kind.removeprefix("rel_query_")
        return replace(program, answer=attribute(scene.things[found], name), a=Ref(found), b=b)
    truth = relation_holds(scene, a.index, program.value, b.index)
    if truth is None or a.index == b.index:
        return None
    chosen = program.value if truth else OPPOSITE[program.value]
    answer = yes_no(truth) if program.kind == "rel_verify" else short_relation(chosen)
    return replace(program, answer=answer, a=a, b=b)


def _comparison(scene: Scene, program: Program, a: Ref, b: Ref) -> Program | None:
    if a.index == b.index:
        return None
    first, second = scene.things[a.index], scene.things[b.index]
    if program.kind == "compare_size":
        if first.size == second.size or first.shape == second.shape:
            return None
        wanted = "large" if program.value == "larger" else "small"
        return replace(program, answer=first.shape if first.size == wanted else second.shape, a=a, b=b)
    same, name = program.kind.split("_")
    equal = attribute(first, name) == attribute(second, name)
    return replace(program, answer=yes_no(equal == (same == "same")), a=a, b=b)


def _single(scene: Scene, program: Program, a: Ref) -> Program | None:
    task, name = program.kind.split("_")
    if task == "position":
        axis = "vposition" if program.value in ("top", "bottom") else "hposition"
        side = side_of(scene, a.index, axis)
        if side is None or (name == "choose" and opposite_side(program.value) != program.other):
            return None
        return replace(program, answer=yes_no(side == program.value) if name == "verify" else side, a=a)
    thing = scene.things[a.index]
    if name == "both":
        return replace(program, answer=yes_no((thing.color, thing.size) == (program.value, program.other)), a=a)
    own = attribute(thing, name)
    if task == "verify":
        return replace(program, answer=yes_no(own == program.value), a=a)
    if task == "choose" and own not in (program.value, program.other):
        return None
    return replace(program, answer=own, a=a)
