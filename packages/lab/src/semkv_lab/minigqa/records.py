"""Questions and scenes as GQA writes them: question records and scene graphs.

The schema is that of GQA's ``val_balanced_questions.json`` and ``val_sceneGraphs.json`` (Hudson and Manning, "GQA: A
New Dataset for Real-World Visual Reasoning and Compositional Question Answering", CVPR 2019).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from semkv_lab.minigqa.program import NOUN, Program, Ref
from semkv_lab.minigqa.scene import RELATIONS, WIDTH, Scene, relation_holds
from semkv_lab.minigqa.surfaces import fill, slot_ref, slot_text

Step = dict[str, Any]
"""``{"operation": str, "dependencies": list[int], "argument": str}``."""

TYPES: Mapping[str, tuple[str, str, str, str | None]] = MappingProxyType(
    {
        "query_color": ("query", "attr", "directOf", "color"),
        "query_shape": ("query", "cat", "categoryAttr", "shape"),
        "query_size": ("query", "attr", "how", "size"),
        "position_query": ("query", "attr", "positionQuery", "position"),
        "rel_query_shape": ("query", "rel", "categoryRelS", "shape"),
        "rel_query_color": ("query", "attr", "directOf", "color"),
        "ground_query": ("query", "global", "place", "ground"),
        "exist": ("verify", "obj", "exist", None),
        "rel_exist": ("verify", "rel", "existRelS", None),
        "rel_verify": ("verify", "rel", "relVerify", None),
        "verify_color": ("verify", "attr", "verifyAttr", None),
        "verify_shape": ("verify", "cat", "verifyCat", None),
        "verify_size": ("verify", "attr", "verifyAttr", None),
        "position_verify": ("verify", "attr", "positionVerify", None),
        "ground_verify": ("verify", "global", "placeVerify", None),
        "choose_color": ("choose", "attr", "chooseAttr", "color"),
        "choose_shape": ("choose", "cat", "chooseCat", "shape"),
        "choose_size": ("choose", "attr", "chooseAttr", "size"),
        "position_choose": ("choose", "attr", "positionChoose", "position"),
        "rel_choose": ("choose", "rel", "chooseRel", None),
        "ground_choose": ("choose", "global", "placeChoose", "ground"),
        "exist_and": ("logical", "obj", "existAnd", None),
        "exist_or": ("logical", "obj", "existOr", None),
        "verify_both": ("logical", "attr", "verifyAttrAnd", None),
        "same_color": ("compare", "attr", "twoSame", None),
        "different_color": ("compare", "attr", "twoDifferent", None),
        "same_size": ("compare", "attr", "twoSame", None),
        "same_shape": ("compare", "attr", "twoSame", None),
        "compare_size": ("compare", "attr", "comparativeChoose", "shape"),
    }
)
"""Kind to GQA's structural, semantic and detailed types, and the global answer group (None for yes or no)."""

_FULL: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "query_color": ("The {a} is {answer}.", ""),
        "query_shape": ("The {a} is a {answer}.", ""),
        "query_size": ("The {a} is {answer}.", ""),
        "position_query": ("The {a} is on the {answer} side of the picture.", ""),
        "rel_query_shape": ("The {answer} is {value} the {b}.", ""),
        "rel_query_color": ("The object {value} the {b} is {answer}.", ""),
        "ground_query": ("The ground is covered with {answer}.", ""),
        "exist": ("Yes, there is {an_a}.", "No, there is no {a}."),
        "rel_exist": ("Yes, there is {an_a} {value} the {b}.", "No, there is no {a} {value} the {b}."),
        "rel_verify": ("Yes, the {a} is {value} the {b}.", "No, the {a} is not {value} the {b}."),
        "verify_color": ("Yes, the {a} is {value}.", "No, the {a} is not {value}."),
        "verify_shape": ("Yes, the {a} is a {value}.", "No, the {a} is not a {value}."),
        "verify_size": ("Yes, the {a} is {value}.", "No, the {a} is not {value}."),
        "position_verify": ("Yes, the {a} is on the {value} side.", "No, the {a} is not on the {value} side."),
        "ground_verify": ("Yes, {value} covers the ground.", "No, {value} does not cover the ground."),
        "choose_color": ("The {a} is {answer}.", ""),
        "choose_shape": ("The {a} is a {answer}.", ""),
        "choose_size": ("The {a} is {answer}.", ""),
        "position_choose": ("The {a} is on the {answer} side of the picture.", ""),
        "rel_choose": ("The {a} is {chosen} the {b}.", ""),
        "ground_choose": ("The ground is covered with {answer}.", ""),
        "exist_and": ("Yes, there are both {an_a} and {an_b}.", "No, there are not both {an_a} and {an_b}."),
        "exist_or": ("Yes, there is {an_a} or {an_b}.", "No, there is neither {an_a} nor {an_b}."),
        "verify_both": ("Yes, the {a} is {value} and {other}.", "No, the {a} is not {value} and {other}."),
        "same_color": ("Yes, the {a} and the {b} have one color.", "No, the {a} and the {b} have different colors."),
        "different_color": (
            "Yes, the {a} and the {b} have different colors.",
            "No, the {a} and the {b} have one color.",
        ),
        "same_size": ("Yes, the {a} is as large as the {b}.", "No, the {a} and the {b} have different sizes."),
        "same_shape": ("Yes, the {a} and the {b} have one shape.", "No, the {a} and the {b} have different shapes."),
        "compare_size": ("The {answer} is {value}.", ""),
    }
)

_GQA_NAME = {"shape": "name", "color": "color", "size": "size"}
_SLOT = re.compile(r"\{(\w+)\}")


def question_record(
    program: Program,
    template: str,
    text: str,
    *,
    image_id: str,
    object_ids: Sequence[str],
    equivalent: Sequence[str],
    entailed: Sequence[str],
) -> dict[str, Any]:
    """One question in GQA's schema.

    Args:
        template: the wording of `surfaces.SURFACES`, for the annotations.
        text: the question as it is asked; the template filled, or a variant of it in case or white space.
        object_ids: the scene graph's id of each object of the scene, by index.
        equivalent: ids of the image's questions with the same program, this one included.
        entailed: ids of the image's questions whose answers follow from this one's.
    """
    steps = semantic(program, object_ids)
    structural, meaning, detailed, group = TYPES[program.kind]
    yes, no = _FULL[program.kind]
    full = no if program.answer == "no" and no else yes
    return {
        "semantic": steps,
        "entailed": list(entailed),
        "equivalent": list(equivalent),
        "question": text,
        "imageId": image_id,
        "isBalanced": True,
        "groups": {"global": group, "local": _local_group(program)},
        "answer": program.answer,
        "semanticStr": semantic_str(steps),
        "annotations": {
            "answer": _answer_annotation(program, object_ids),
            "question": _annotation(template, program, object_ids),
            "fullAnswer": _annotation(full, program, object_ids),
        },
        "types": {"detailed": detailed, "semantic": meaning, "structural": structural},
        "fullAnswer": fill(full, program),
    }


def semantic_str(steps: Sequence[Step]) -> str:
    """GQA's one-line form: ``select: cube (7)->query: color [0]``."""
    return "->".join(
        f"{s['operation']}: {s['argument']}" + (f" {s['dependencies']}" if s["dependencies"] else "") for s in steps
    )


def semantic(program: Program, object_ids: Sequence[str]) -> list[Step]:
    """The program as GQA's operations."""
    steps = _Steps(object_ids)
    kind, a, b = program.kind, program.a, program.b
    if kind.startswith("ground"):
        steps.add_task(kind.removeprefix("ground_"), "location", program, steps.add("select", "scene"))
    elif kind.startswith(("rel_query", "rel_exist")) and a is not None and b is not None:
        steps.add_related(program, a, b)
    elif a is None:
        raise ValueError(f"a {kind} program names no object")
    elif b is None:
        steps.add_single(program, steps.select(a))
    else:
        steps.add_pair(program, a, b)
    return steps.done


class _Steps:
    """Steps as they are appended; every method that adds returns the number of its last step."""

    def __init__(self, object_ids: Sequence[str]) -> None:
        self._object_ids = object_ids
        self.done: list[Step] = []

    def add(self, operation: str, argument: str, *dependencies: int) -> int:
        self.done.append({"operation": operation, "dependencies": list(dependencies), "argument": argument})
        return len(self.done) - 1

    def select(self, ref: Ref) -> int:
        return self._narrow(ref, self.add("select", f"{ref.shape or NOUN} ({self._id(ref)})"))

    def add_task(self, task: str, what: str, program: Program, at: int) -> int:
        """``query``, ``verify`` or ``choose`` of one property."""
        if task == "query":
            return self.add("query", what, at)
        return self.add(f"{task} {what}", program.value if task == "verify" else f"{program.value}|{program.other}", at)

    def add_related(self, program: Program, a: Ref, b: Ref) -> int:
        """What stands in a relation to ``b``: whether such an ``a`` is there, or a property of the only one."""
        exists = program.kind == "rel_exist"
        noun = a.shape or NOUN if exists else "_"
        found = self.add("relate", f"{noun},{program.value},s ({self._id(a)})", self.select(b))
        if exists:
            return self.add("exist", "?", self._narrow(a, found))
        return self.add("query", _GQA_NAME[program.kind.removeprefix("rel_query_")], found)

    def add_single(self, program: Program, at: int) -> int:
        task, _, name = program.kind.partition("_")
        if task == "exist":
            return self.add("exist", "?", at)
        if task == "position":
            axis = "vposition" if program.value in ("top", "bottom") else "hposition"
            return self.add_task(name, axis, program, at)
        if name == "both":
            color = self.add("verify color", program.value, at)
            return self.add("and", "", color, self.add("verify size", program.other, at))
        return self.add_task(task, _GQA_NAME[name], program, at)

    def add_pair(self, program: Program, a: Ref, b: Ref) -> int:
        kind, first = program.kind, self.select(a)
        if kind in ("exist_and", "exist_or"):
            there = self.add("exist", "?", first)
            return self.add(kind.removeprefix("exist_"), "", there, self.add("exist", "?", self.select(b)))
        second = self.select(b)
        if kind.startswith("rel_"):
            task = kind.removeprefix("rel_")
            relation = program.value if task == "verify" else f"{program.value}|{program.other}"
            return self.add(f"{task} rel", f"{b.shape or NOUN},{relation},o ({self._id(b)})", first, second)
        operation = f"choose {program.value}" if kind == "compare_size" else kind.replace("_", " ")
        return self.add(operation, "", first, second)

    def _id(self, ref: Ref) -> str:
        return self._object_ids[ref.index] if ref.index >= 0 else "-"

    def _narrow(self, ref: Ref, at: int) -> int:
        if ref.color:
            at = self.add("filter color", ref.color, at)
        return self.add("filter size", ref.size, at) if ref.size else at


def _local_group(program: Program) -> str:
    number = list(TYPES).index(program.kind)
    subject = program.a.text if program.a and program.a.text != NOUN else program.b.text if program.b else "ground"
    values = "_".join(v for v in (program.value, program.other) if v) or program.kind.rsplit("_", 1)[-1]
    return f"{number:02d}-{subject}_{values}".replace(" ", "-")


def _annotation(template: str, program: Program, object_ids: Sequence[str]) -> dict[str, str]:
    """Word spans of the phrases: ``"3"`` or ``"3:5"`` (end excluded), counted between spaces, to the object's id."""
    spans: dict[str, str] = {}
    at = 0
    for token in template.split(" "):
        slot = _SLOT.search(token)
        if slot is None:
            at += 1
            continue
        words = len(slot_text(slot.group(1), program).split(" "))
        ref = slot_ref(slot.group(1), program)
        if ref is not None and ref.index >= 0:
            start = at + slot.group(1).startswith("an_")
            spans[str(start) if at + words - start == 1 else f"{start}:{at + words}"] = object_ids[ref.index]
        at += words
    return spans


def _answer_annotation(program: Program, object_ids: Sequence[str]) -> dict[str, str]:
    """The object an answer names: the only word of the answer, where the answer is an object's name."""
    if program.kind == "compare_size" and program.a and program.b:
        chosen = program.a if program.a.shape == program.answer else program.b
        return {"0": object_ids[chosen.index]}
    if program.kind in ("query_shape", "choose_shape", "rel_query_shape") and program.a:
        return {"0": object_ids[program.a.index]}
    return {}


def scene_graph(scene: Scene, object_ids: Sequence[str], *, scale: float = 1.0, shift: int = 0) -> dict[str, Any]:
    """The scene in GQA's scene graph schema, boxes in pixels of a picture that was scaled and then shifted."""
    objects = {}
    for i, thing in enumerate(scene.things):
        relations = [
            {"name": relation, "object": object_ids[j]}
            for j in range(len(scene.things))
            if j != i
            for relation in RELATIONS
            if relation_holds(scene, i, relation, j)
        ]
        objects[object_ids[i]] = {
            "name": thing.shape,
            "x": round((thing.x - thing.radius) * scale) + shift,
            "y": round((thing.y - thing.radius) * scale) + shift,
            "w": round(2 * thing.radius * scale),
            "h": round(2 * thing.radius * scale),
            "attributes": [thing.color, thing.size],
            "relations": relations,
        }
    side = round(WIDTH * scale)
    return {"width": side, "height": side, "location": scene.ground, "objects": objects}


Fact = tuple[str, ...]


def settles(program: Program) -> frozenset[Fact]:
    """The facts of the scene that the question and its answer together state."""
    if program.kind.startswith(("verify", "ground_verify")) and program.answer != "yes":
        return frozenset()
    return needs(program)


def needs(program: Program) -> frozenset[Fact]:
    """The facts from which the question can be answered; empty where no single question states them."""
    kind, a, b = program.kind, program.a, program.b
    if kind in ("rel_verify", "rel_choose") and a and b:
        axis = "x" if program.value in ("to the left of", "to the right of") else "y"
        return frozenset({("rel", axis, *sorted((str(a.index), str(b.index))))})
    if kind.startswith("ground"):
        return frozenset({("ground",)})
    if kind.startswith("position") and a:
        return frozenset({("vposition" if program.value in ("top", "bottom") else "hposition", str(a.index))})
    if kind == "verify_both" and a:
        return frozenset({("color", str(a.index)), ("size", str(a.index))})
    task, _, name = kind.partition("_")
    if task in ("query", "verify", "choose") and a:
        return frozenset({(name, str(a.index))})
    return frozenset()
