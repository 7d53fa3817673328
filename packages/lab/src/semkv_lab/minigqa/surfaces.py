"""Wordings: several surface templates for each kind of question, so that one program has paraphrases.

A template is a sentence with slots: ``{a}`` and ``{b}`` are phrases with no article, ``{an_a}`` puts "a" or "an" before
the phrase, ``{as}`` is its plural, ``{value}`` and ``{other}`` are words. Where slots stand at word borders only, so
the words of a slot can be found again for GQA's annotations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from types import MappingProxyType

from semkv_lab.minigqa.program import Program, Ref

_SLOT = re.compile(r"\{(\w+)\}")

SURFACES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "query_color": (
            "What color is the {a}?",
            "What is the color of the {a}?",
            "Which color is the {a}?",
            "What color does the {a} have?",
        ),
        "query_shape": (
            "What is the {a}?",
            "What kind of thing is the {a}?",
            "What shape is the {a}?",
            "Which shape does the {a} have?",
        ),
        "query_size": (
            "What size is the {a}?",
            "How big is the {a}?",
            "How large is the {a}?",
            "What is the size of the {a}?",
        ),
        "position_query": (
            "On which side of the picture is the {a}?",
            "On which side of the image is the {a}?",
            "Which side of the picture is the {a} on?",
        ),
        "rel_query_shape": (
            "What is {value} the {b}?",
            "Which shape is {value} the {b}?",
            "What is the object {value} the {b}?",
            "What is it that is {value} the {b}?",
        ),
        "rel_query_color": (
            "What color is the object {value} the {b}?",
            "What is the color of the object {value} the {b}?",
            "Which color is the object that is {value} the {b}?",
        ),
        "ground_query": (
            "What covers the ground?",
            "What is the ground covered with?",
            "Which kind of ground is it?",
        ),
        "exist": (
            "Is there {an_a} in the picture?",
            "Is there {an_a}?",
            "Are there any {as}?",
            "Do you see {an_a}?",
            "Do you see any {as} in the picture?",
        ),
        "rel_exist": (
            "Is there {an_a} {value} the {b}?",
            "Do you see {an_a} {value} the {b}?",
            "Are there any {as} {value} the {b}?",
        ),
        "rel_verify": (
            "Is the {a} {value} the {b}?",
            "Is it true that the {a} is {value} the {b}?",
            "Do you see the {a} {value} the {b}?",
        ),
        "verify_color": (
            "Is the {a} {value}?",
            "Does the {a} look {value}?",
            "Is the color of the {a} {value}?",
        ),
        "verify_shape": (
            "Is the {a} a {value}?",
            "Is the shape of the {a} a {value}?",
            "Does the {a} look like a {value}?",
        ),
        "verify_size": ("Is the {a} {value}?", "Does the {a} look {value}?", "Is the size of the {a} {value}?"),
        "position_verify": (
            "Is the {a} on the {value} side of the picture?",
            "Is the {a} on the {value} side of the image?",
            "Is the {a} in the {value} half of the picture?",
        ),
        "ground_verify": ("Is the ground covered with {value}?", "Is there {value} on the ground?"),
        "choose_color": (
            "Is the {a} {value} or {other}?",
            "What color is the {a}, {value} or {other}?",
            "Which color is the {a}, {value} or {other}?",
        ),
        "choose_shape": (
            "Is the {a} a {value} or a {other}?",
            "What is the {a}, a {value} or a {other}?",
            "Which shape is the {a}, a {value} or a {other}?",
        ),
        "choose_size": (
            "Is the {a} {value} or {other}?",
            "What size is the {a}, {value} or {other}?",
            "Does the {a} look {value} or {other}?",
        ),
        "position_choose": (
            "Is the {a} on the {value} or on the {other} side of the picture?",
            "Is the {a} on the {value} or {other} side of the image?",
            "Is the {a} in the {value} or in the {other} half of the picture?",
        ),
        "rel_choose": (
            "Is the {a} {value} or {other} the {b}?",
            "Where is the {a}, {value} or {other} the {b}?",
            "Is it {value} or {other} the {b} that you see the {a}?",
        ),
        "ground_choose": (
            "Is the ground covered with {value} or with {other}?",
            "What covers the ground, {value} or {other}?",
        ),
        "exist_and": (
            "Are there both {an_a} and {an_b}?",
            "Are there both {an_a} and {an_b} in the picture?",
            "Is there {an_a} and also {an_b}?",
        ),
        "exist_or": (
            "Is there {an_a} or {an_b}?",
            "Is there either {an_a} or {an_b} in the picture?",
            "Do you see {an_a} or {an_b}?",
        ),
        "verify_both": (
            "Is the {a} both {value} and {other}?",
            "Does the {a} look {value} and {other}?",
            "Is the {a} {other} and {value}?",
        ),
        "same_color": (
            "Do the {a} and the {b} have the same color?",
            "Is the color of the {a} the same as the color of the {b}?",
            "Are the {a} and the {b} of the same color?",
        ),
        "different_color": (
            "Do the {a} and the {b} have different colors?",
            "Is the color of the {a} different from the color of the {b}?",
            "Are the {a} and the {b} of different colors?",
        ),
        "same_size": (
            "Do the {a} and the {b} have the same size?",
            "Is the size of the {a} the same as the size of the {b}?",
            "Are the {a} and the {b} of the same size?",
        ),
        "same_shape": (
            "Do the {a} and the {b} have the same shape?",
            "Is the shape of the {a} the same as the shape of the {b}?",
            "Are the {a} and the {b} of the same shape?",
        ),
        "compare_size": (
            "Which is {value}, the {a} or the {b}?",
            "What is {value}, the {a} or the {b}?",
            "Which one is {value}, the {a} or the {b}?",
        ),
    }
)
"""Kind of question to its wordings; the first is the plainest."""


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
    templates = SURFACES[program.kind]
    return fill(templates[0] if rng.random() < 0.5 else rng.choice(templates), program)


def wordings(program: Program) -> tuple[str, ...]:
    """The question in all of its wordings, the plainest first."""
    return tuple(fill(template, program) for template in SURFACES[program.kind])


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
