"""What a reader says of pairs that are labeled different: streams whose pairs say the same have one answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import streams

from cache_helpers import WrittenEncoder
from semkv.guards import no_veto
from semkv_lab.quality import Asked, build_corpus

STREAM = [
    Asked("a", "1"),
    Asked("a~0.99", "2"),
    Asked("a~0.95", "3"),
    Asked("a~0.8", "5"),
    Asked("b", "4"),
    Asked("b~0.9", "4"),
]
CORPUS = build_corpus([(asked.group, asked.text) for asked in STREAM], WrittenEncoder(window=40), no_veto)


def test_a_pair_that_says_the_same_has_one_answer_and_all_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert streams.corrected([STREAM], CORPUS) == [STREAM], "nobody read these"
    read = {streams.digest("a", "a~0.99"): True, streams.digest("a~0.95", "a"): False}
    monkeypatch.setattr(streams, "VERDICTS", read)
    (found,) = streams.corrected([STREAM], CORPUS)
    answers = [asked.answer for asked in found]
    assert answers[0] == answers[1]
    assert len(set(answers)) == 4
    assert [asked.text for asked in found] == [asked.text for asked in STREAM]
