"""What is misspelled is put right where that is certain, and an approximate hit is the same as without the slip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.types import Namespace, Request, TextSegment
from semkv_guards import veto
from semkv_guards.spelling import WORDS, alike, slips_alone

STORED = "What are the advantages of eating breakfast early?"


@pytest.mark.parametrize(
    ("typed", "other", "right"),
    [
        ("what is the captial of France?", "Which city is the capital of France?", "capital"),
        ("Is the goverment elected?", "Is the government elected?", "government"),
        ("Thier car is red", "Is their car red?", "Their"),
        ("Is it neccessary?", "Is it necessary?", "necessary?"),
        ("Is it untill Monday?", "When is it not until Monday?", "untill"),  # the last letter
        ("Is it untill Monday?", "Is it until Monday?", "until"),  # nothing else differs
        ("Is the website slwo today?", "Is the website slow today?", "slow"),
        ("Thsi shop is closed", "This shop is closed", "This"),
        ("Have you hve any?", "Have you have any?", "have"),
        ("Wha is compound interest?", "What is compound interest?", "What"),  # hardly a word
        ("I want to larn Spanish", "I want to learn Spanish", "learn"),
        ("Is it saf to drink?", "Is it safe to drink?", "safe"),
    ],
)
def test_a_slip_is_put_right_in_either_text(typed: str, other: str, right: str) -> None:
    mine, theirs = alike(typed, other)
    assert right in mine.split()
    assert theirs == other
    assert alike(other, typed) == (other, mine)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("Is inulin healthy?", "Is insulin healthy?"),  # a rare word
        ("What is a cation?", "What is a caution?"),
        ("What is the trail of tears?", "What is the trial of tears?"),
        ("how do i use venmo?", "how do i use venom?"),  # a brand
        ("Who is Thorne?", "Who is throne?"),  # a name
        ("Is metoprlol safe?", "Is metoprolol safe?"),  # a drug
        ("Is a tosat burnt?", "Is a toats burnt?"),  # neither is a word
        ("Is the frm new?", "Is the farm new?"),  # short
        ("What does captial() do?", "What does capital() do?"),  # code
        ("How do you spell goverment?", "How do you spell government?"),
        ("Is the chages table new?", "Is the charges table new?"),  # or "changes"
        ("How do I open a bwl file?", "How do I open a bowl file?"),  # an abbreviation
        ("Which orm is best for Django?", "Which form is best for Django?"),
        ("What does hodl mean?", "What does hold mean?"),  # slang
        ("Is it mmoral to lie?", "Is it moral to lie?"),  # or "immoral"
        ("How do I pay the brad?", "How do I pay the bread?"),  # a name
        ("Is grindr safe?", "Is Grinder safe?"),
        ("I work in slaes", "I work in sales now"),  # another word more, so too short a word
        ("Which dose is safe?", "Which does is safe?"),
        ("Is the wok new?", "Is the work new?"),  # short, and a word of some list
        ("soem rain", "some rain"),  # too few words
        ("Is nitrite toxic?", "Is nitrate toxic?"),
    ],
)
def test_what_may_be_another_word_stays(a: str, b: str) -> None:
    assert alike(a, b) == (a, b)
    assert alike(b, a) == (b, a)


def test_the_word_list_knows_every_slip_that_is_a_word() -> None:
    tables = WORDS.read_text(encoding="utf-8").split('"""')
    common, rare, frequent = (tables[place].split() for place in (1, 3, 5))
    assert common == sorted(set(common))
    assert rare == sorted(set(rare) - set(common))
    made = {slip for word in common for slip in slips_alone(word)}
    assert made.issuperset(rare)
    assert made & set(common)  # "trail", "trial"
    assert len(set(frequent)) == len(frequent)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[SemanticCache]:
    with SemanticCache(CacheConfig(tmp_path / "cache")) as made:
        yield made


def ask(cache: SemanticCache, text: str) -> str | None:
    report = cache.try_reuse(Request(text, Namespace(), (TextSegment(text),)))
    if not report.hit:
        cache.add_observation(report, text)
    return report.donor_response


def test_a_misspelled_question_gets_the_answer_and_a_misspelled_donor_gives_it(
    cache: SemanticCache,
) -> None:
    assert ask(cache, STORED) is None
    assert ask(cache, "What are the advnatages of eating breakfst early?") == STORED
    assert ask(cache, "What are the advnatages of eating dinner early?") is None
    assert ask(cache, "How do I descale the kitchne kettle?") is None
    assert ask(cache, "How do I descale the kitchen kettle?") == (
        "How do I descale the kitchne kettle?"
    )


def test_a_guard_judges_what_was_meant() -> None:
    assert veto("Is the goverment elected?", "Is the government not elected?") == "negation"
    assert veto("Should I alwyas pay?", "Should I always pay?") is None
    assert veto("Should I alwyas pay?", "Should I never pay?") == "negation"
