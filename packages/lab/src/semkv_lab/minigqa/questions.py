"""Questions about a scene: what is asked, the one answer that the picture gives, and the words.

A `Program` says what is asked, free of wording; ``kinds.toml`` has several wordings of each kind, so that a program has
paraphrases. An object is only ever named by a phrase that fits one object of the scene, and nothing is asked that the
picture leaves open: no relation along an axis where two centres lie close together, no "what is left of" with two
candidates. A draw may find no such question; it gives None then.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from pathlib import Path
from random import Random

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
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of question, as ``kinds.toml`` describes it."""

    weight: float
    group: str
    wordings: Sequence[str]


KINDS: Mapping[str, Kind] = {
    name: Kind(**row)
    for name, row in tomllib.loads(
        Path(__file__).with_name("kinds.toml").read_text(encoding="utf-8")
    ).items()
}
WEIGHTS: Mapping[str, float] = {name: kind.weight for name, kind in KINDS.items()}

NOUN = "object"
"""What an object is called when its shape is not said."""

_TRIES = 12
_ONE_WORD = {
    "to the left of": "left",
    "to the right of": "right",
    "above": "above",
    "below": "below",
}
_OTHER_SIDE = {
    "left": "right",
    "right": "left",
    "top": "bottom",
    "bottom": "top",
}
_DOMAIN = {
    "color": COLORS,
    "shape": SHAPES,
    "size": SIZES,
}


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
        return (
            self.shape in ("", thing.shape)
            and self.color in ("", thing.color)
            and self.size in ("", thing.size)
        )

    def fitting(self, scene: Scene) -> list[int]:
        """The objects that the phrase fits."""
        return [i for i, thing in enumerate(scene.things) if self.fits(thing)]


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
    answer: str = ""
    a: Ref | None = None
    b: Ref | None = None
    value: str = ""
    other: str = ""


_PHRASES = (
    ("shape",), ("shape", "color"), ("color",), ("shape", "size"), ("color", "size"), ("shape", "color", "size"),
)  # fmt: skip


def references(
    scene: Scene,
    index: int,
    without: str = "",
) -> list[Ref]:
    """Every phrase that names object ``index`` and no other, not using the attribute ``without``."""
    thing = scene.things[index]
    said = [names for names in _PHRASES if without not in names]
    phrases = [Ref(index, **{name: getattr(thing, name) for name in names}) for names in said]
    return [ref for ref in phrases if len(ref.fitting(scene)) == 1]


def axis_of(program: Program) -> str:
    """``hposition`` or ``vposition``: the axis of a question about a place."""
    return "vposition" if program.value in ("top", "bottom") else "hposition"


def yes_no(truth: bool) -> str:
    return "yes" if truth else "no"


# -- words ------------------------------------------------------------


def fill(template: str, program: Program) -> str:
    """A template with the program's words in its slots. Raises `KeyError` on a slot the program has nothing for."""
    words = {"value": program.value, "other": program.other}
    for name, ref in (("a", program.a), ("b", program.b)):
        if ref is not None:
            text = ref.text
            words |= {name: text, f"{name}s": text + ("es" if text.endswith("s") else "s")}
            words[f"an_{name}"] = f"{'an' if text[0] in 'aeiou' else 'a'} {text}"
    return template.format_map(words)


def word(program: Program, rng: Random) -> str:
    """The question in one of its wordings; the plainest half of the time."""
    return fill(draw_wording(program, rng), program)


def draw_wording(program: Program, rng: Random) -> str:
    templates = KINDS[program.kind].wordings
    return templates[0] if rng.random() < 0.5 else rng.choice(templates)


def change_case(text: str, rng: Random) -> str:
    """The same words in another case: all lower, all upper, or each word capitalised. Never the text itself."""
    return rng.choice(
        [c for c in (text.lower(), text.lower(), text.upper(), text.title()) if c != text]
    )


def change_whitespace(text: str, rng: Random) -> str:
    """The same words with other white space: doubled spaces, a space before the mark, spaces at the ends, a tab."""
    words = text.split(" ")
    gap = rng.randrange(1, len(words))
    before, after = " ".join(words[:gap]), " ".join(words[gap:])
    changed = (
        f"{before}  {after}",
        "  ".join(words),
        f" {text}",
        f"{text} ",
        f"  {text}  ",
        f"{before}\t{after}",
        f"{text[:-1]} ?" if text.endswith("?") else f"{text}\n",
    )
    return rng.choice(changed)


# -- what a program's words mean in a scene ------------------------------------------------------------


def restate(scene: Scene, program: Program) -> Program | None:
    """The program with the objects and the answer that its words have in ``scene``.

    None where the words make no fair question there: a phrase fits no object or two, a choice offers no true
    alternative, a relation is not clear.
    """
    if program.kind in ("exist", "exist_and", "exist_or", "rel_exist"):
        return _existence(scene, program)
    a, b = _the_one(scene, program.a), _the_one(scene, program.b)
    if program.b is not None and b is None:
        return None
    if program.kind.startswith("rel_query") and b is not None:
        a = _only_neighbour(scene, b.index, program.value)
    if (program.a is not None and a is None) or (a and b and a.index == b.index):
        return None
    answer = _answer(scene, program, a, b)
    return None if answer is None else replace(program, answer=answer, a=a, b=b)


def _the_one(scene: Scene, ref: Ref | None) -> Ref | None:
    found = ref.fitting(scene) if ref is not None else []
    return replace(ref, index=found[0]) if ref is not None and len(found) == 1 else None


def _only_neighbour(scene: Scene, target: int, relation: str) -> Ref | None:
    """The one object in ``relation`` to ``target``, where every other is clearly not; else None."""
    truths = {
        i: relation_holds(scene, i, relation, target)
        for i in range(len(scene.things))
        if i != target
    }
    found = [i for i, truth in truths.items() if truth]
    return Ref(found[0]) if len(found) == 1 and None not in truths.values() else None


def split(kind: str) -> tuple[str, str]:
    """Task and name of a kind: ``("rel", "verify")``."""
    task = kind.split("_", 1)[0]
    return task, kind[len(task) + 1 :]


def _answer(
    scene: Scene,
    program: Program,
    a: Ref | None,
    b: Ref | None,
) -> str | None:
    task, name = split(program.kind)
    if a is None:
        return _judged(name, scene.ground, program)
    first = scene.things[a.index]
    if program.kind.startswith("rel_query"):
        return str(getattr(first, name.removeprefix("query_")))
    if b is not None:
        return _answer_of_two(scene, program, a, b)
    if program.kind == "verify_both":
        return yes_no((first.color, first.size) == (program.value, program.other))
    if task == "position":
        side = side_of(scene, a.index, axis_of(program))
        return None if side is None else _judged(name, side, program)
    return _judged(task, getattr(first, name), program)


def _answer_of_two(
    scene: Scene,
    program: Program,
    a: Ref,
    b: Ref,
) -> str | None:
    task, name = split(program.kind)
    if task == "rel":
        truth = relation_holds(scene, a.index, program.value, b.index)
        if truth is None:
            return None
        if name == "verify":
            return yes_no(truth)
        return _ONE_WORD[program.value if truth else OPPOSITE[program.value]]
    first = scene.things[a.index]
    second = scene.things[b.index]
    if program.kind != "compare_size":
        return yes_no((getattr(first, name) == getattr(second, name)) == (task == "same"))
    if first.size == second.size or first.shape == second.shape:
        return None
    asked = {"larger": "large", "smaller": "small"}[program.value]
    return first.shape if first.size == asked else second.shape


def _judged(task: str, own: str, program: Program) -> str | None:
    """The answer where the true value is ``own``; None to a choice that does not offer it."""
    if task == "verify":
        return yes_no(own == program.value)
    return None if task == "choose" and own not in (program.value, program.other) else own


def _existence(scene: Scene, program: Program) -> Program | None:
    a = program.a
    b = program.b
    assert a is not None
    found = a.fitting(scene)
    others: list[int] = []
    if program.kind == "rel_exist":
        b = _the_one(scene, b)
        if b is None or b.index in found:
            return None
        sides = {i: relation_holds(scene, i, program.value, b.index) for i in found}
        if None in sides.values():
            return None
        found = [i for i, holds in sides.items() if holds]
    elif b is not None:
        others = b.fitting(scene)
        if set(found) & set(others):
            return None
        b = replace(b, index=_first(others))
    truth = _is_there(program.kind, found, others)
    return replace(program, answer=yes_no(truth), a=replace(a, index=_first(found)), b=b)


def _first(found: Sequence[int]) -> int:
    return found[0] if found else -1


def _is_there(
    kind: str,
    found: Sequence[int],
    others: Sequence[int],
) -> bool:
    if kind == "exist_and":
        return bool(found and others)
    if kind == "exist_or":
        return bool(found or others)
    return bool(found)


# -- drawing a question; every draw stands in an order that earlier data depends on ------------------------------------

Asker = Callable[[Scene, Random], Program | None]


def ask(scene: Scene, rng: Random, kind: str) -> Program | None:
    """One question of a kind, or None where this draw found none (the scene may hold no such question)."""
    drawn = _ASKERS[kind](scene, rng)
    return None if drawn is None else restate(scene, drawn)


def ask_any(scene: Scene, rng: Random) -> Program:
    """One question of a kind drawn by weight."""
    while True:
        program = ask(scene, rng, rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0])
        if program is not None:
            return program


def _pick(
    scene: Scene,
    rng: Random,
    without: str = "",
) -> Ref | None:
    refs = references(scene, rng.randrange(len(scene.things)), without)
    return rng.choice(refs) if refs else None


def _pair(
    scene: Scene, rng: Random, pair: Sequence[int], without: str = ""
) -> tuple[Ref, Ref] | None:
    a, b = (references(scene, index, without) for index in pair)
    return (rng.choice(a), rng.choice(b)) if a and b else None


def _two(scene: Scene, rng: Random) -> list[int]:
    return rng.sample(range(len(scene.things)), 2)


def _wrong(
    scene: Scene,
    rng: Random,
    index: int,
    name: str,
) -> str:
    """A value the object does not have; half the time one that another object of the scene has."""
    own = getattr(scene.things[index], name)
    seen = [v for t in scene.things if (v := getattr(t, name)) != own]
    if seen and rng.random() < 0.5:
        return str(rng.choice(seen))
    return rng.choice([v for v in _DOMAIN[name] if v != own])


def _value(
    rng: Random,
    kind: str,
    task: str,
    a: Ref | None,
    own: str,
    wrong: Callable[[], str],
) -> Program:
    """``query``, ``verify`` or ``choose`` of a value: of an object, of its place, of the ground."""
    if task == "query":
        return Program(kind, a=a)
    if task == "verify":
        return Program(
            kind,
            a=a,
            value=own if rng.random() < 0.5 else wrong(),
        )
    pair = [own, wrong()]
    rng.shuffle(pair)
    return Program(
        kind,
        a=a,
        value=pair[0],
        other=pair[1],
    )


def _attribute(task: str, name: str) -> Asker:
    def asker(scene: Scene, rng: Random) -> Program | None:
        a = _pick(scene, rng, without=name)
        if a is None:
            return None
        own = getattr(scene.things[a.index], name)
        return _value(
            rng, f"{task}_{name}", task, a, own, lambda: _wrong(scene, rng, a.index, name)
        )

    return asker


def _position(task: str) -> Asker:
    axes = ("hposition",) if task == "query" else ("hposition", "vposition")

    def asker(scene: Scene, rng: Random) -> Program | None:
        a = _pick(scene, rng)
        side = side_of(scene, a.index, rng.choice(axes)) if a else None
        if side is None:
            return None
        other = _OTHER_SIDE[side]
        return _value(rng, f"position_{task}", task, a, side, lambda: other)

    return asker


def _ground(task: str) -> Asker:
    def asker(scene: Scene, rng: Random) -> Program | None:
        others = [g for g in GROUNDS if g != scene.ground]
        return _value(rng, f"ground_{task}", task, None, scene.ground, lambda: rng.choice(others))

    return asker


def _verify_both(scene: Scene, rng: Random) -> Program | None:
    a = _pick(scene, rng, without="color")
    if a is None or a.size:
        return None
    color = scene.things[a.index].color
    size = scene.things[a.index].size
    if rng.random() >= 0.5:
        wrong = rng.choice(("color", "size", "both"))
        color = color if wrong == "size" else _wrong(scene, rng, a.index, "color")
        size = size if wrong == "color" else _wrong(scene, rng, a.index, "size")
    return Program(
        "verify_both",
        a=a,
        value=color,
        other=size,
    )


def _maybe_there(scene: Scene, rng: Random, truth: bool) -> Ref | None:
    """A phrase that fits some object, or one that fits none though half the time each of its words fits something."""
    both = (True, True)
    use_color, use_shape = rng.choice((both, both, (False, True), (True, False)))
    for _ in range(_TRIES):
        if truth:
            thing = rng.choice(scene.things)
            shape, color = thing.shape, thing.color
        elif rng.random() < 0.5:
            shape = rng.choice(scene.things).shape
            color = rng.choice(scene.things).color
        else:
            shape, color = rng.choice(SHAPES), rng.choice(COLORS)
        ref = Ref(-1, shape if use_shape else "", color if use_color else "")
        if bool(ref.fitting(scene)) == truth:
            return ref
    return None


def _exist(scene: Scene, rng: Random) -> Program | None:
    a = _maybe_there(scene, rng, rng.random() < 0.5)
    return None if a is None else Program("exist", a=a)


def _exist_two(kind: str, holds: Callable[[bool, bool], bool]) -> Asker:
    def asker(scene: Scene, rng: Random) -> Program | None:
        truth = rng.random() < 0.5
        both = product((True, False), repeat=2)
        first, second = rng.choice([there for there in both if holds(*there) == truth])
        for _ in range(_TRIES):
            a = _maybe_there(scene, rng, first)
            b = _maybe_there(scene, rng, second)
            if a is not None and b is not None and _are_apart(scene, a, b):
                return Program(kind, a=a, b=b)
        return None

    return asker


def _are_apart(scene: Scene, a: Ref, b: Ref) -> bool:
    """Whether two phrases are different ones, and fit no object both."""
    return a.text != b.text and not set(a.fitting(scene)) & set(b.fitting(scene))


def _same(kind: str) -> Asker:
    """Asked only where the scene holds both an equal and an unequal pair, so that either answer is as likely."""

    name = kind.partition("_")[2]

    def asker(scene: Scene, rng: Random) -> Program | None:
        truth = rng.random() < 0.5
        pairs: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for (i, first), (j, second) in permutations(enumerate(scene.things), 2):
            pairs[getattr(first, name) == getattr(second, name)].append((i, j))
        if not pairs[True] or not pairs[False]:
            return None
        pair = _pair(scene, rng, rng.choice(pairs[truth == kind.startswith("same")]), without=name)
        return Program(kind, "", *pair) if pair else None

    return asker


def _larger(scene: Scene, rng: Random) -> Program | None:
    for _ in range(_TRIES):
        pair = _pair(scene, rng, _two(scene, rng), without="size")
        if pair is None or not (pair[0].shape and pair[1].shape):
            continue
        first, second = (scene.things[ref.index] for ref in pair)
        if first.size != second.size and first.shape != second.shape:
            return Program("compare_size", "", *pair, value=rng.choice(("larger", "smaller")))
    return None


def _relation(kind: str) -> Asker:
    def asker(scene: Scene, rng: Random) -> Program | None:
        pair = _pair(scene, rng, _two(scene, rng))
        if pair is None:
            return None
        relation = rng.choice(RELATIONS)
        other = OPPOSITE[relation] if kind == "rel_choose" else ""
        return Program(
            kind,
            "",
            *pair,
            value=relation,
            other=other,
        )

    return asker


def _relation_query(name: str) -> Asker:
    def asker(scene: Scene, rng: Random) -> Program | None:
        cases = [(i, relation) for i in range(len(scene.things)) for relation in RELATIONS]
        rng.shuffle(cases)
        found = next((case for case in cases if _only_neighbour(scene, *case) is not None), None)
        refs = references(scene, found[0]) if found else []
        if found is None or not refs:
            return None
        return Program(
            kind=f"rel_query_{name}",
            answer="",
            a=Ref(-1),
            b=rng.choice(refs),
            value=found[1],
        )

    return asker


def _relation_exist(scene: Scene, rng: Random) -> Program | None:
    """Whether something that is in the picture, or is not, stands on one side of a named object."""
    truth = rng.random() < 0.5
    there = truth or rng.random() < 0.7
    for _ in range(_TRIES):
        a = _maybe_there(scene, rng, there)
        b = _pick(scene, rng)
        relation = rng.choice(RELATIONS)
        if a is None or b is None or not a.shape:
            continue
        program = restate(
            scene,
            Program(
                kind="rel_exist",
                answer="",
                a=a,
                b=b,
                value=relation,
            ),
        )
        if program is not None and program.answer == yes_no(truth):
            return program
    return None


_TASKS = ("query", "verify", "choose")
_ASKERS: Mapping[str, Asker] = {
    **{f"{task}_{name}": _attribute(task, name) for task in _TASKS for name in _DOMAIN},
    **{f"position_{task}": _position(task) for task in _TASKS},
    **{f"ground_{task}": _ground(task) for task in _TASKS},
    "exist": _exist,
    "exist_and": _exist_two("exist_and", lambda p, q: p and q),
    "exist_or": _exist_two("exist_or", lambda p, q: p or q),
    **{f"rel_query_{name}": _relation_query(name) for name in ("shape", "color")},
    "rel_exist": _relation_exist,
    **{kind: _relation(kind) for kind in ("rel_verify", "rel_choose")},
    "verify_both": _verify_both,
    **{kind: _same(kind) for kind in ("same_color", "different_color", "same_size", "same_shape")},
    "compare_size": _larger,
}
