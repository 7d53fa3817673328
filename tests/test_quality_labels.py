"""What a reader says of wrong hits: pairs are joined by it, and counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import quality_labels as labels

from cache_helpers import WrittenEncoder
from semkv.guards import no_veto
from semkv.tiers.policies import FixedThreshold
from semkv_lab.quality import TIER, Asked, build_corpus

STREAM = [
    Asked("a", "1"),
    Asked("a~0.99", "2"),
    Asked("a~0.95", "3"),
    Asked("a~0.8", "5"),
    Asked("b", "4"),
    Asked("b~0.9", "4"),
]
CORPUS = build_corpus([(asked.group, asked.text) for asked in STREAM], WrittenEncoder(window=40), no_veto)


def policy() -> FixedThreshold:
    return FixedThreshold({TIER: 0.9})


def test_wrong_hits_are_named_by_their_texts() -> None:
    assert list(labels.wrong_hits([STREAM, STREAM[:2]], CORPUS, policy)) == [
        ("a~0.99", "a"),
        ("a~0.95", "a"),
        ("a~0.99", "a"),
    ]


def test_a_pair_that_says_the_same_has_one_answer_and_all_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert labels.corrected([STREAM], CORPUS) == [STREAM], "nobody read these"
    read = {labels.digest("a~0.99", "a"): True, labels.digest("a", "a~0.95"): False}
    monkeypatch.setattr(labels, "VERDICTS", read)
    (found,) = labels.corrected([STREAM], CORPUS)
    answers = [asked.answer for asked in found]
    assert answers[0] == answers[1]
    assert len(set(answers)) == 4
    assert [asked.text for asked in found] == [asked.text for asked in STREAM]
    assert list(labels.wrong_hits([found], CORPUS, policy)) == [("a~0.95", "a")]
