"""The guards veto what changes a question, and let a rewording pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv.tiers.guards import veto

CHANGED = [
    ("Is the red cube to the left of the ball?", "Is the red cube to the right of the ball?", "direction"),
    ("What is above the star?", "What is below the star?", "height"),
    ("Is there a car?", "Is there no car?", "negation"),
    ("Does the pump start?", "Why doesn't the pump start?", "negation"),
    ("How do I cook two eggs?", "How do I cook three eggs?", "number"),
    ("What happened in 1912?", "What happened in 1921?", "number"),
    ("Convert 5 kg to pounds", "Convert 50 kg to pounds", "number"),
    ("Is the ball red?", "Is the ball blue?", "color"),
    ("What is larger, the ring or the cross?", "What is smaller, the ring or the cross?", "comparison"),
    ("Do the ring and the cross have the same size?", "Do the ring and the cross have different sizes?", "sameness"),
    ("Can a dog eat a cat?", "Can a cat eat a dog?", "word order"),
    ("How do I enable logging?", "How do I disable logging?", "switch"),
    ("Is the small heart red?", "Is the large heart red?", "size"),
]

SAME = [
    ("What color is the cube?", "What is the color of the cube?"),
    ("Is there a ball?", "Do you see a ball in the picture?"),
    ("Is it two o'clock?", "is it 2 o'clock"),
    ("What is to the left of the red star?", "Which object is to the left of the red star?"),
    ("How big is the cone?", "HOW  BIG is the cone?"),
]


@pytest.mark.parametrize(("a", "b", "reason"), CHANGED)
def test_a_changed_question_is_vetoed_and_says_why(a: str, b: str, reason: str) -> None:
    assert veto(a, b) == reason
    assert veto(b, a) == reason


@pytest.mark.parametrize(("a", "b"), SAME)
def test_a_rewording_passes(a: str, b: str) -> None:
    assert veto(a, b) is None


@given(st.text())
def test_a_text_never_vetoes_itself(text: str) -> None:
    assert veto(text, text) is None
    assert veto(text, f"  {text.upper()} ") in (None, "negation", "number", "word order")


@given(st.text(), st.text())
def test_a_veto_does_not_depend_on_which_text_came_first(a: str, b: str) -> None:
    assert veto(a, b) == veto(b, a)
