"""Spacing of marks is folded where one reading is left: no word changes, and what a blank tells apart stays apart."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semkv.keys import normalise


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Who will be the next president of US ?", "Who will be the next president of US?"),
        ("WHO IS THE PRESIDENT OF THE US ?", "who is the president of the us?"),
        ("Which is the best pasta in\u00a0Bangalore\u202f?", "Which is the best pasta in Bangalore?"),
        ("I'm scared of death.What do I do?", "I'm scared of death. What do I do?"),
        ("Do you love me?Why is that?", "Do you love me? Why is that?"),
        ("She left without a reason,how do I go on?", "She left without a reason, how do I go on?"),
        ("SHE LEFT WITHOUT A REASON,HOW DO I GO ON?", "she left without a reason, how do i go on?"),
        ("With no head for the stage , what can I do?", "With no head for the stage, what can I do?"),
    ],
)
def test_spacing_that_says_nothing_is_folded(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # numbers, times, ratios
        ("What is 3 .5 of the US?", "What is 3.5 of the US?"),
        ("Is it 1, 000 or 1,000?", "Is it 1,000 or 1,000?"),
        ("Is it the 2 , 3 or 4?", "Is it the 2, 3 or 4?"),
        ("Mix the men 2 : 1", "Mix the men 2: 1"),
        ("Is the train at 9 :30 ?", "Is the train at 9 :30?"),
        ("What is next after the 58 ?", "What is next after the 58?"),
        # the mark is a word of its own
        ("How to undo git add .", "How to undo git add."),
        ("What does she mean when she sends ?", "What does she mean when she sends?"),
        ("What comes of clicking ?", "What comes of clicking?"),
        ("What does my phone show in the ?", "What does my phone show in the?"),
        ("What is the opposite of ?", "What is the opposite of?"),
        ("Is the use of and ?", "Is the use of and?"),
        ("Should I use , when listing?", "Should I use, when listing?"),
        ("Mon Tue Wed ?", "Mon Tue Wed?"),
        ("Explain the use of nil ?", "Explain the use of nil?"),
        ("What is the factorial of five !", "What is the factorial of five!"),
        ("What is the sign of the US ?", "What is the sign of the US?"),
        ("Correct this: how is the weather in Rome ?", "Correct this: how is the weather in Rome?"),
        ("Is the comma right in the house , but", "Is the comma right in the house, but"),
        ("How long is the text in Rome ?", "How long is the text in Rome?"),
        # code, names of files, paths, addresses, flags, quotations
        ("What is the .net ?", "What is the .net?"),
        ("What is the node.js ?", "What is the node.js?"),
        ("What does errors.Is in Go do?", "What does errors. Is in Go do?"),
        ("What does items.Where in Go do?", "What does items. Where in Go do?"),
        ("Who owns love.What", "Who owns love. What"),
        ("Who owns example.what is it", "Who owns example. what is it"),
        ("Open read.me in the house ?", "Open read.me in the house?"),
        ("Is a == b in the loop ?", "Is a == b in the loop?"),
        ("What is a ? b : c", "What is a? b: c"),
        ("Is (the ,x) of the list ?", "Is (the ,x) of the list?"),
        ("Is it ! important", "Is it! important"),
        ("Do ls -l in the house ?", "Do ls -l in the house?"),
        ("Is fmap . fmap a functor?", "Is fmap. fmap a functor?"),
        ("Who said 'in the house ?'", "Who said 'in the house?'"),
        ('Who said "in the house ?"', 'Who said "in the house?"'),
        ("Where is a,b,what is c?", "Where is a, b, what is c?"),
        ("Is it who,what or where?", "Is it who, what or where?"),
        ("Is it who,what is it?", "Is it who, what is it?"),
        # ellipsis, doubled marks
        ("Death.What is it?", "Death. What is it?"),
        ("Wait...What is it?", "Wait... What is it?"),
        ("Where is it in the house ??", "Where is it in the house??"),
        ("Where is it in the house . . ?", "Where is it in the house . .?"),
        # words and lines
        ("Is he a there fore runner?", "Is he a therefore runner?"),
        ("Let's eat grandma", "Let's eat, grandma"),
        ("Where is\n it in the house ?", "Where is\n it in the house?"),
        ("Where is\tit in the house ?", "Where is\tit in the house?"),
    ],
)
def test_a_blank_that_may_mean_something_is_kept(one: str, other: str) -> None:
    assert normalise(one) != normalise(other)


CHUNKS = st.sampled_from(
    [
        *"who What why How is are the a of in US Rome death reason use Java ls git add to and sends clicking".split(),
        *"five nil 3 1,000 2:1 3.5 9:30 .net node.js ... ! ? . , ; : ?? (x) `y` x.y death.What so,how love?Why".split(),
        *["word", "'quote'", "\n", "\t"],
    ]
)
TEXTS = st.lists(st.tuples(CHUNKS, st.sampled_from(["", " ", " ", "  "])), max_size=12).map(
    lambda parts: "".join(chunk + blank for chunk, blank in parts)
)


@given(TEXTS)
@example("death.What is it?")
@example("Death.What is it?")
@example("Hi. Death.What is it?")
@settings(max_examples=400, deadline=None)
def test_nothing_but_blanks_around_marks_and_case_changes(text: str) -> None:
    folded = normalise(text)
    assert "".join(folded.split()).casefold() == "".join(text.split()).casefold()
    assert re.findall(r"\w+", folded.casefold()) == re.findall(r"\w+", text.casefold()), "no words join or part"
    assert normalise(folded) == folded


@given(TEXTS, st.sampled_from('`\\{}<>=_|~^"“:;/()[]+*@#$%&\n\t'))
@settings(max_examples=400, deadline=None)
def test_a_text_with_a_sign_of_code_or_a_second_line_keeps_its_spacing(text: str, sign: str) -> None:
    for whole in (f"a{sign}b {text}", f"{text} a{sign}b"):
        assert [c.casefold() for c in normalise(whole).split()] == whole.casefold().split()


@given(TEXTS)
@settings(max_examples=400, deadline=None)
def test_only_a_comma_or_the_last_question_mark_moves_and_only_to_a_word(text: str) -> None:
    before, after = text.casefold().split(), normalise(text).casefold().split()
    moved = [(a, b) for a, b in pairwise(before) if a + b in after and a + b not in before]
    assert all(b in (",", "?") and a.isalpha() and len(a) > 1 for a, b in moved)
