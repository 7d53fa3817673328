"""What a question asks, free of wording: phrases for objects, and programs that are made of them."""

from __future__ import annotations

from dataclasses import dataclass

from semkv_lab.minigqa.scene import Scene, Thing, relation_holds

NOUN = "object"
"""What an object is called when its shape is not said."""

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
        kind: a key of `questions.KINDS`.
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


def references(scene: Scene, index: int, without: str = "") -> list[Ref]:
    """Every phrase that names object ``index`` and no other, not using the attribute ``without``."""
    thing = scene.things[index]
    found = []
    for use_shape, use_color, use_size in _PHRASES:
        if (use_shape and without == "shape") or (use_color and without == "color") or (use_size and without == "size"):
            continue
        ref = Ref(
            index, thing.shape if use_shape else "", thing.color if use_color else "", thing.size if use_size else ""
        )
        if sum(ref.fits(t) for t in scene.things) == 1:
            found.append(ref)
    return found


_PHRASES = (
    (True, False, False),
    (True, True, False),
    (False, True, False),
    (True, False, True),
    (False, True, True),
    (True, True, True),
)


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
