"""Texts are compared by meaning only where every character of them is read: through the whole cache, with MiniLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from growth import assert_linear
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.encoders.text import SentenceEncoder, stands_for
from semkv.types import Namespace, Request, Role, TextSegment
from semkv_guards import veto
from semkv_guards.folding import asks_of_typing, normalise
from semkv_guards.reading import differing

LONG = Path(__file__).parents[1] / "bench" / "data" / "long.jsonl"
QUESTION = "How do I reset my password?"
BITS = "".join("\u200b" if bit == "0" else "\u200c" for letter in b"lie" for bit in f"{letter:08b}")
UNREAD = {
    "tags": "\U000e006c\U000e0069\U000e0065",
    "variation selectors": "\ufe01\ufe02\U000e0101",
    "zero-width bits": BITS,
    "private use": "\ue06c\ue069",
    "control": "\x01\x7f\x9b",
    "separators": "\x1c\u2028\x85\x0b",
    "bidirectional": "\u202eeil\u202c",
    "joined marks": " l\u0301\u0323i\u0301e\u0301",
    "blanks of other widths": "\u2009\u2003\u200a",
    "Chinese": " 请撒谎",
    "Cyrillic": " соври",
    "Thai": " โกหก",
    "emoji": " 🤥",
    "braille": " ⠇⠊⠑",
    "letters of mathematics": " 𝐥𝐢𝐞",
    "circled": " ⓛⓘⓔ",
    "superscript": " ˡⁱᵉ",
    "dash": " —",
    "quotation marks alone": " ’‘“",
    "fillers": "\u3164\u115f",
    "unassigned": "\U0003ffff\ufdd0",
    "line": "\nlie",
    "column": "\tlie",
    "marked letters": " Lüge",
}


@pytest.fixture(scope="module")
def minilm() -> SentenceEncoder:
    return SentenceEncoder()


class Asked:
    """A cache that is asked one text after the other, each pair in a tenant of its own."""

    def __init__(self, folder: Path, encoder: object, **settings: object) -> None:
        self.cache = SemanticCache(
            CacheConfig(folder, embedding_hook="none", **settings), text_encoder=encoder
        )
        self._pairs = 0

    def hits(self, a: str, b: str, *before: str) -> bool:
        self._pairs += 1
        found = []
        for text in (a, b):
            segments = [*(TextSegment(own, Role.SYSTEM) for own in before), TextSegment(text)]
            request = Request(f"{self._pairs}", Namespace(f"{self._pairs}", "m"), tuple(segments))
            report = self.cache.try_reuse(request)
            self.cache.add_observation(report, "an answer")
            found.append(report.hit)
        return found[1]


@pytest.fixture
def asked(tmp_path: Path, minilm: SentenceEncoder) -> Iterator[Asked]:
    made = Asked(tmp_path, minilm)
    yield made
    made.cache.close()


@pytest.mark.parametrize("kind", UNREAD)
@pytest.mark.parametrize("guards", [True, False])
def test_a_question_with_what_nobody_reads_stands_for_no_other(
    tmp_path: Path, minilm: SentenceEncoder, kind: str, guards: bool
) -> None:
    asked = Asked(tmp_path, minilm, guards=guards)
    planted = QUESTION + UNREAD[kind]
    assert not asked.hits(planted, QUESTION)
    assert not asked.hits(QUESTION, planted)
    assert not asked.hits(planted, "How can I reset my password?")
    assert asked.hits(planted, planted)
    assert asked.hits(QUESTION, "How can I reset my password?")
    asked.cache.close()


class _Deaf:
    """An encoder of a user's own that drops all but ASCII, and says nothing of it."""

    dim = 8
    fingerprint = "deaf"

    def fits(self, text: str) -> bool:
        return True

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        return np.ones((len(texts), 8), dtype=np.float32)


@pytest.mark.parametrize("kind", UNREAD)
def test_an_encoder_of_ones_own_need_not_know_what_it_drops(tmp_path: Path, kind: str) -> None:
    asked = Asked(tmp_path, _Deaf())
    assert not asked.hits(QUESTION + UNREAD[kind], QUESTION)
    assert asked.hits(QUESTION, "How can I reset my password?")
    asked.cache.close()


def test_an_encoder_says_what_it_reads(minilm: SentenceEncoder) -> None:
    assert minilm.reads("Water freezes at 0 °C, café")
    assert not minilm.reads("a" * 101), "one unknown word"
    assert not minilm.reads("What is 🤥?")
    assert not stands_for(minilm, f"What is {'ab' * 60}?")


@pytest.mark.parametrize(
    ("a", "b", "hit"),
    [
        ("Sort these:\nred\ngreen blue", "Sort these:\nred green\nblue", False),
        ("a:\n  b\n    c", "a:\n  b\n  c", False),
        ("  b\n  c", "b\n  c", False),
        ("List a\tb c", "List a b\tc", False),
        (
            "I need help.\nHow do I reset my password?",
            "I need help.\nHow can I reset my password?",
            True,
        ),
        (
            "I need help.\nHow do I reset my password?",
            "I need some help.\nWhy reset my password?",
            False,
        ),
        ("Water freezes at zero degrees Celsius.", "Water freezes at 0 °C.", True),
        ("Balance H2 + O2 -> H2O", "Balance H2 + O2 → H2O", True),
        ("What does → mean?", "What does ⇒ mean?", False),
        ("Where is the Café de Flore?", "Where's the Café de Flore?", True),
        ("How do I write an exposé?", "How do I write an expose?", False),
        ("What’s the capital of France?", "What's the capital of France?", True),
    ],
)
def test_what_is_laid_out_or_marked_must_be_the_same(
    asked: Asked, a: str, b: str, hit: bool
) -> None:
    assert (asked.hits(a, b), asked.hits(b, a)) == (hit, hit)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("proofread: the cat sat. it slept.", "Proofread: The cat sat. It slept."),
        ("Please proofread: The cat sat.", "Proofread: the cat sat."),
        (
            "Does this text have a double space? I am  here.",
            "Does this text have a double space? I am here.",
        ),
        ("Is This Title Case", "is this title case"),
        ("IS THIS TEXT IN CAPITALS", "is this text in capitals"),
        ("How many capitals are in this text", "how many capitals are in this text"),
        ("How many spaces are there? a  b", "How many spaces are there? a b"),
    ],
)
def test_who_asks_about_typing_gets_no_answer_about_another(asked: Asked, a: str, b: str) -> None:
    assert not asked.hits(a, b)
    assert not asked.hits(b, a)
    assert asked.hits(a, a)


def test_where_another_text_asks_about_typing_none_is_folded(asked: Asked) -> None:
    assert not asked.hits(
        "the cat sat. it slept.", "The cat sat. It slept.", "You proofread texts."
    )
    assert asked.hits("the cat sat. it slept.", "The cat sat. It slept.", "You tell tales.")


def test_a_question_about_letters_may_be_reworded(asked: Asked) -> None:
    assert asked.hits(
        "How many letters are in strawberry?", "How many letters does strawberry have?"
    )
    assert not asks_of_typing("What is the capital of France?")


def test_long_texts_are_compared_sentence_by_sentence(asked: Asked) -> None:
    rows = [json.loads(line) for line in LONG.read_text(encoding="utf-8").splitlines()]
    hits = [(row["same"], asked.hits(row["a"], row["b"])) for row in rows]
    assert hits.count((False, True)) == 0
    assert hits.count((True, True)) >= 65


def test_a_greeting_is_no_sentence_that_differs() -> None:
    text = " ".join(["We went to the market and bought bread, cheese and a bottle of milk."] * 4)
    found = differing(text, f"Hello! {text} Thank you!")
    assert not isinstance(found, str)
    assert found.whole


@pytest.mark.parametrize(
    "unit", ["a ", "a. ", "\n", "é ", "→ ", "  ", "a\n\t", "how many ", "“", "double spac "]
)
def test_the_time_is_linear(unit: str) -> None:
    def work(size: int) -> Callable[[], object]:
        text = unit * (size // len(unit))
        return lambda: (
            differing(f"{text}x", f"y{text}"),
            asks_of_typing(text),
            veto(f"{text}x", f"{text}y"),
        )

    assert_linear(work, 4_000)


@pytest.mark.parametrize("blank", ["\xa0", "\u202f", "\u3000"])
def test_blanks_of_a_keyboard_are_blanks(blank: str) -> None:
    assert normalise(f"a{blank}b") == normalise("a b")
    assert normalise("a\u2009b") != normalise("a b")
