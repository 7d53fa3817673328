"""Questions and scenes as GQA writes them: question records and scene graphs.

The schema is that of GQA's ``val_balanced_questions.json`` and ``val_sceneGraphs.json`` (Hudson and Manning, "GQA: A
New Dataset for Real-World Visual Reasoning and Compositional Question Answering", CVPR 2019).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from semkv_lab.minigqa.questions import KINDS, NOUN, Program, Ref, axis_of, fill, slot_ref, slots
from semkv_lab.minigqa.scenes import RELATIONS, WIDTH, Scene, relation_holds

Step = dict[str, Any]
"""``{"operation": str, "dependencies": list[int], "argument": str}``."""

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
        template: the wording of `questions.KINDS`, for the annotations.
        text: the question as it is asked; the template filled, or a variant of it in case or white space.
        object_ids: the scene graph's id of each object of the scene, by index.
        equivalent: ids of the image's questions with the same program, this one included.
        entailed: ids of the image's questions whose answers follow from this one's.
    """
    steps = semantic(program, object_ids)
    kind = KINDS[program.kind]
    structural, meaning, detailed, *group = kind.types
    full = kind.full[-1 if program.answer == "no" else 0]
    return {
        "semantic": steps,
        "entailed": list(entailed),
        "equivalent": list(equivalent),
        "question": text,
        "imageId": image_id,
        "isBalanced": True,
        "groups": {"global": group[0] if group else None, "local": _local_group(program)},
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
    done: list[Step] = []
    kind, a, b = program.kind, program.a, program.b
    task, _, name = kind.partition("_")
    choice = f"{program.value}|{program.other}"

    def add(operation: str, argument: str, *dependencies: int) -> int:
        done.append({"operation": operation, "dependencies": list(dependencies), "argument": argument})
        return len(done) - 1

    def one(ref: Ref) -> str:
        return f"({object_ids[ref.index] if ref.index >= 0 else '-'})"

    def narrow(ref: Ref, at: int) -> int:
        if ref.color:
            at = add("filter color", ref.color, at)
        return add("filter size", ref.size, at) if ref.size else at

    def select(ref: Ref) -> int:
        return narrow(ref, add("select", f"{ref.shape or NOUN} {one(ref)}"))

    def value(task: str, what: str, at: int) -> int:
        if task == "query":
            return add("query", what, at)
        return add(f"{task} {what}", program.value if task == "verify" else choice, at)

    if task == "ground":
        value(name, "location", add("select", "scene"))
    elif a is None:
        raise ValueError(f"a {kind} program names no object")
    elif kind.startswith(("rel_query", "rel_exist")) and b is not None:
        noun = (a.shape or NOUN) if name == "exist" else "_"
        at = add("relate", f"{noun},{program.value},s {one(a)}", select(b))
        if name == "exist":
            add("exist", "?", narrow(a, at))
        else:
            add("query", _GQA_NAME[name.removeprefix("query_")], at)
    elif task == "exist":
        at = add("exist", "?", select(a))
        if b is not None:
            add(name, "", at, add("exist", "?", select(b)))
    elif b is not None:
        both = select(a), select(b)
        if task == "rel":
            relation = program.value if name == "verify" else choice
            add(f"{name} rel", f"{b.shape or NOUN},{relation},o {one(b)}", *both)
        else:
            add(f"choose {program.value}" if kind == "compare_size" else kind.replace("_", " "), "", *both)
    elif task == "position":
        value(name, axis_of(program), select(a))
    elif name == "both":
        at = select(a)
        add("and", "", add("verify color", program.value, at), add("verify size", program.other, at))
    else:
        value(task, _GQA_NAME[name], select(a))
    return done


def _local_group(program: Program) -> str:
    number = list(KINDS).index(program.kind)
    subject = program.a.text if program.a and program.a.text != NOUN else program.b.text if program.b else "ground"
    values = "_".join(v for v in (program.value, program.other) if v) or program.kind.rsplit("_", 1)[-1]
    return f"{number:02d}-{subject}_{values}".replace(" ", "-")


def _annotation(template: str, program: Program, object_ids: Sequence[str]) -> dict[str, str]:
    """Word spans of the phrases: ``"3"`` or ``"3:5"`` (end excluded), counted between spaces, to the object's id."""
    spans: dict[str, str] = {}
    words, at = slots(program), 0
    for token in template.split(" "):
        slot = _SLOT.search(token)
        end = at + (len(words[slot[1]].split(" ")) if slot else 1)
        ref = slot_ref(slot[1], program) if slot else None
        if slot and ref is not None and ref.index >= 0:
            start = at + slot[1].startswith("an_")
            spans[str(start) if end - start == 1 else f"{start}:{end}"] = object_ids[ref.index]
        at = end
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
    task, _, name = kind.partition("_")
    if task == "ground":
        return frozenset({("ground",)})
    if a is None:
        return frozenset()
    if kind in ("rel_verify", "rel_choose") and b is not None:
        axis = "x" if program.value in ("to the left of", "to the right of") else "y"
        return frozenset({("rel", axis, *sorted((str(a.index), str(b.index))))})
    if task == "position":
        return frozenset({(axis_of(program), str(a.index))})
    if kind == "verify_both":
        return frozenset({("color", str(a.index)), ("size", str(a.index))})
    return frozenset({(name, str(a.index))} if task in ("query", "verify", "choose") else ())
