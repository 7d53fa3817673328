"""The judge that comes with semkv: real weights on ONNX Runtime, in the library and at a gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway_helpers import NEAR, Pair, a_tenant, kind, said, wait_until
from semkv.cache import SemanticCache
from semkv.config import BUNDLED, CacheConfig, PolicyConfig
from semkv.encoders.pairs import FILE, TOKENS, PairClassifier
from semkv.errors import ConfigError
from semkv.types import Namespace, Request, ReuseReport, TextSegment
from semkv_gateway.settings import ServerSettings

ONE = "How do I bake sourdough bread at home?"
OTHER = "How can I bake a loaf of sourdough at home?"
TRAP = "How do I store sourdough bread at home?"


@pytest.fixture(scope="module")
def judge() -> PairClassifier:
    return PairClassifier()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ONE, OTHER),
        ("Where is my parcel?", "I want to know where my package is right now"),
        ("How long does milk keep?", "What is the shelf life of milk?"),
    ],
)
def test_it_says_yes_to_other_words(judge: PairClassifier, first: str, second: str) -> None:
    assert judge.serves_both(first, second) is True
    assert judge.chance(first, second) == judge.chance(second, first)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ONE, TRAP),
        ("How do I get insulin?", "How do I use insulin?"),
        ("How do I open an account?", "How do I close an account?"),
        ("How many calories are in rice?", "How many calories are in a cup of rice?"),
    ],
)
def test_it_says_no_to_traps(judge: PairClassifier, first: str, second: str) -> None:
    assert judge.serves_both(first, second) is False


def test_what_is_longer_than_it_learned_has_no_verdict(judge: PairClassifier) -> None:
    long = "red " * (TOKENS // 2)
    assert judge.serves_both(long, long) is None


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    file = tmp_path / "judge.safetensors"
    file.write_bytes(FILE.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"--judge-model: 'bundled' .*whole"):
        PairClassifier(file)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SemanticCache]:
    folder = tmp_path_factory.mktemp("bundled")
    with SemanticCache(
        CacheConfig(folder, similarity_threshold=0.95, policy="judge", judge_model=BUNDLED)
    ) as found:
        yield found


def look(cache: SemanticCache, tenant: str, *texts: str) -> ReuseReport:
    segments = tuple(map(TextSegment, texts))
    return cache.try_reuse(Request(texts[-1], Namespace(tenant), segments))


def test_a_yes_is_a_hit_at_once_and_remembered(cache: SemanticCache) -> None:
    cache.add_observation(look(cache, "a", ONE), "Flour and water.")
    before = cache.stats().judged.get("yes", 0)
    for _ in range(2):
        report = look(cache, "a", OTHER)
        assert report.donor_response == "Flour and water."
        assert report.plan.match is not None
        assert report.plan.match.judged
        assert report.doubt is None
    assert cache.stats().judged["yes"] == before + 1


def test_a_no_another_tenant_and_a_text_before_are_misses(cache: SemanticCache) -> None:
    cache.add_observation(look(cache, "b", ONE), "At 230 degrees.")
    assert not look(cache, "b", TRAP).plan.full
    assert not look(cache, "c", OTHER).plan.full
    translating = "Translate the question into German."
    cache.add_observation(look(cache, "d", translating, ONE), "Wie backe ich Brot?")
    assert not look(cache, "d", translating, OTHER).plan.full


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"judge-model: 'bundled' .*--judge or --policy judge"):
        PolicyConfig(judge_model=BUNDLED)
    with pytest.raises(ConfigError, match=r"judge-url: .*other than bundled"):
        ServerSettings(policy="judge", judge_model=BUNDLED, judge_url="http://127.0.0.1:1")


def test_a_gateway_asks_nobody_else(tmp_path: Path) -> None:
    settings = NEAR | {"similarity_threshold": 0.95, "policy": "judge", "judge_model": BUNDLED}
    with Pair(tmp_path, **settings) as pair:
        assert pair.app.gateway.judge is None
        me = a_tenant()
        before = pair.entries
        assert kind(pair.post(ONE, headers=me)) == "miss"
        wait_until(lambda: pair.entries > before)
        answer = pair.post(OTHER, headers=me)
        assert kind(answer) == "hit"
        assert " judged" in answer.headers["x-semkv"]
        assert said(answer) == f"You said: {ONE}"
        assert len(pair.upstream.calls) == 1
        pair.app.gateway.metrics.refresh()
        assert pair.metric('semkv_judged_total{outcome="yes"}') == 1
        assert pair.metric('semkv_tier_seconds_spent_total{tier="judge"}') > 0


def test_what_hits_without_a_judge_is_not_judged(cache: SemanticCache) -> None:
    """The cosine of a text with slips is below the threshold; once they are put right, it is not."""
    cache.add_observation(look(cache, "d", "How do I report a missed bin collection?"), "Call us.")
    before = dict(cache.stats().judged)
    report = look(cache, "d", "How do I report a missed bin colection?")
    assert report.donor_response == "Call us."
    assert cache.stats().judged == before
