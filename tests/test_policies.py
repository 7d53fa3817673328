"""The policies: what they accept, what they learn, what they keep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random, SystemRandom

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_helpers import Bench
from semkv.errors import ConfigError
from semkv.tiers.bounded import _COUNTS, BANDS, Bounded
from semkv.tiers.policies import Calibrated, Calibration, FixedThreshold, chance
from semkv.types import Entry, Exactness, Match, Namespace, PolicyName, Request, Score, TextSegment

TIER = "semantic_text"
WEIGHTS = {"cosine": -30.0, "closeness": 0.0, "unmatched": 1.0, "unshared": -2.0, "reordered": 0.5}
CURVE = Calibration("written", 24.0, WEIGHTS, 0.05)
AS_CAUTIOUS = Calibration("written", 25.5, {**dict.fromkeys(WEIGHTS, 0.0), "cosine": -30.0}, 0.05)
DONOR = Entry("d", Namespace(), (), "", "")


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which hits are checked is drawn alike in every run, so that no test fails by chance."""
    monkeypatch.setattr("semkv.tiers.bounded.SystemRandom", lambda: Random(0))


def asking(text: str = "a") -> Request:
    return Request("1", Namespace(), (TextSegment(text),))


def match(score: float, tier: str = TIER) -> Match:
    return Match(tier, "d", score, Exactness.APPROXIMATE)


def test_a_risk_is_logistic_and_below_the_least_cosine_no_wording_is_accepted() -> None:
    assert CURVE.risk(0.49) == 1.0, "below the floor nothing matches"
    assert CURVE.risk(0.8) == pytest.approx(0.5)
    assert CURVE.risk(0.9, wording=(2.0, 0.5, 1.0)) == pytest.approx(chance(-3.0 + 2.0 - 1.0 + 0.5))
    wordings = [
        (n, share, moved) for n in (0.0, 8.0) for share in (0.0, 1.0) for moved in (0.0, 1.0)
    ]
    assert min(CURVE.risk(CURVE.least - 0.001, wording=w) for w in wordings) > CURVE.limit
    assert min(CURVE.risk(CURVE.least + 0.001, wording=w) for w in wordings) < CURVE.limit
    assert replace(CURVE, bias=90.0).least == pytest.approx(1.0)
    assert replace(CURVE, bias=0.0).least == 0.5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "calibrate again"),
        ({"weights": {"cosine": -1.0}}, "weights of cosine, closeness"),
        ({"weights": WEIGHTS | {"cosine": 1.0}}, "does not rise"),
        ({"weights": WEIGHTS | {"unmatched": float("inf")}}, "Infinity is no number"),
        ({"weights": WEIGHTS | {"unmatched": "inf"}}, "finite"),
        ({"limit": 0.0}, "a limit between"),
        ({"limit": "high"}, "calibrate"),
    ],
)
def test_a_damaged_calibration_is_a_wrong_setting(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    file = tmp_path / "c.json"
    CURVE.save(file)
    assert Calibration.load(file) == CURVE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=said):
        Calibration.load(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="--calibration"):
        Calibration.load(file)
    with pytest.raises(ConfigError, match="can be read"):
        Calibration.load(tmp_path / "none")


def test_a_calibration_of_another_encoder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    replace(CURVE, fingerprint="another").save(file)
    for policy in (PolicyName.CALIBRATED, PolicyName.BOUNDED):
        with pytest.raises(ConfigError, match="this one is for another"):
            Bench(tmp_path, policy=policy, calibration=file)


SCORE = st.floats(0.5, 1.0)


@given(SCORE, SCORE, SCORE)
def test_a_match_is_accepted_where_each_of_its_scores_would_be(
    text: float, image: float, other: float
) -> None:
    policy = Calibrated(CURVE, frozenset([TIER, "embedding:other"]))
    scores = {TIER: text, "embedding:vision": image, "embedding:other": other}
    (tier, least), *others = sorted(scores.items(), key=lambda score: score[1])
    whole = replace(match(least, tier=tier), others=tuple(Score(*score) for score in others))
    alone = [
        policy.accept(asking(), DONOR, match(score, tier=name)).accept
        for name, score in scores.items()
    ]
    assert policy.accept(asking(), DONOR, whole).accept == all(alone)


def test_calibrated_weighs_the_wording() -> None:
    policy = Calibrated(CURVE, frozenset([TIER]))
    assert not policy.accept(asking(), DONOR, replace(match(0.9), wording=(1.0, 0.0, 0.0))).accept
    assert policy.accept(asking(), DONOR, replace(match(0.6), whole=False)).accept, (
        "fitted on whole prompts"
    )


def traffic(
    policy: Bounded, wrong: dict[float, float], *, requests: int, seed: int, verify: float = 0.1
) -> tuple[int, int]:
    """Requests at the scores given, each wrong with its own chance. Returns hits and wrong hits."""
    random = Random(seed)
    hits = bad = 0
    for number in range(requests):
        policy.arrived()
        score = random.choice(list(wrong))
        correct = random.random() >= wrong[score]
        decision = policy.accept(asking(str(number)), DONOR, match(score))
        if not decision.accept:
            policy.observe(match(score), correct=correct, served=None)
            continue
        hits += 1
        bad += not correct
        if random.random() < max(verify, decision.check):
            policy.observe(match(score), correct=correct, served=decision)
    return hits, bad


ROSY = Calibration("written", 0.0, {**WEIGHTS, "cosine": -7.0}, 0.05)


@pytest.mark.parametrize(
    ("bound", "calibration", "wrong", "least"),
    [
        (0.01, None, {0.99: 0.001, 0.93: 0.05, 0.7: 0.8}, 150),
        (0.002, None, {0.99: 0.001, 0.93: 0.05, 0.7: 0.8}, 150),
        (
            0.01,
            ROSY,
            {0.99: 0.5, 0.93: 0.5, 0.7: 0.5},
            0,
        ),  # the calibration is wrong about everything
    ],
)
def test_the_bound_holds(
    bound: float, calibration: Calibration | None, wrong: dict[float, float], least: int
) -> None:
    for seed in range(4):
        policy = Bounded(bound, calibration, frozenset([TIER]))
        hits, bad = traffic(policy, wrong, requests=4000, seed=seed)
        assert bad <= bound * 4000
        assert hits >= least


def test_the_bound_holds_against_traps_that_come_when_most_of_the_budget_is_left() -> None:
    """And at every moment: a policy that samples finds a part of them only."""
    over = 0
    for seed in range(10):
        policy = Bounded(0.02)
        traffic(policy, {0.99: 0.0}, requests=9000, seed=seed)
        bad = 0
        for number in range(2000):
            policy.arrived()
            decision = policy.accept(asking(f"trap {number}"), DONOR, match(0.99))
            if decision.accept:
                bad += 1
                if decision.check:
                    policy.observe(match(0.99), correct=False, served=decision)
        assert bad > 0
        over += bad > 0.02 * 9000
    assert over <= 2, "in twenty runs one on average at most, in ten hardly three"


def test_a_text_that_is_served_again_is_checked() -> None:
    policy = Bounded(0.02)
    traffic(policy, {0.99: 0.0}, requests=9000, seed=0)
    first, second = (
        {policy.accept(asking(f"{n}!"), DONOR, match(0.99)).check for n in range(50)}
        for _ in range(2)
    )
    assert (first, second) == ({0.0, 1.0}, {1.0})


def test_a_check_that_never_returns_counts_as_a_wrong_answer() -> None:
    policy = Bounded(0.01)
    traffic(policy, {0.99: 0.0}, requests=1500, seed=0)
    served = 0
    for number in range(1000):
        policy.arrived()
        served += policy.accept(asking(f"more {number}"), DONOR, match(0.99)).accept
    assert 0 < served <= 0.01 * 2500


def test_matches_by_text_and_image_are_learned_apart_from_those_by_one() -> None:
    image = (Score("embedding:vision", 0.99),)
    alone, both = match(0.98), replace(match(0.98), others=image)
    turned = replace(match(0.99, tier="embedding:vision"), others=(Score(TIER, 0.98),))
    policy = Bounded(0.01, CURVE, frozenset([TIER]))
    for _ in range(2000):
        policy.arrived()
        policy.observe(alone, correct=True, served=None)
    first, second = (policy.accept(asking(), DONOR, one) for one in (alone, both))
    assert first.accept
    assert second.risk is not None
    assert first.risk is not None
    assert second.risk > first.risk, (
        "nothing is known of these yet, and the image may be wrong as well"
    )
    for _ in range(2000):
        policy.arrived()
        policy.observe(turned, correct=False, served=None)
    assert not policy.accept(asking(), DONOR, both).accept, (
        "which of the scores is the least is no difference"
    )
    assert policy.accept(asking(), DONOR, alone).accept


def test_what_was_learned_is_taken_up_again() -> None:
    policy = Bounded(0.01)
    traffic(policy, {0.99: 0.0, 0.8: 0.9}, requests=1500, seed=0)
    kept = json.loads(json.dumps(policy.state()))
    other = Bounded(0.01)
    other.restore(kept)
    assert other.state() == kept
    assert not other.accept(asking(), DONOR, match(0.99)).accept, "a budget must not be spent twice"
    for _ in range(101):
        other.arrived()
    assert other.accept(asking(), DONOR, match(0.99)).accept
    assert not other.accept(asking(), DONOR, match(0.8)).accept


def test_hits_are_checked_until_the_budget_has_room_for_a_sample() -> None:
    shares = []
    for requests in (4000, 9000):
        policy = Bounded(0.01)
        traffic(policy, {0.99: 0.0}, requests=requests, seed=0)
        checked = 0
        for number in range(300):
            decision = policy.accept(asking(f"more {number}"), DONOR, match(0.99))
            checked += bool(decision.check)
            policy.observe(
                match(0.99), correct=True, served=decision
            )  # gives back what the hit might have cost
        shares.append(checked / 300)
    assert shares[0] == 1.0
    assert 0.1 < shares[1] < 0.4


def test_each_start_draws_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semkv.tiers.bounded.SystemRandom", SystemRandom)
    assert len({tuple(Bounded(0.01)._random.random() for _ in range(3)) for _ in range(5)}) == 5


@pytest.mark.parametrize(
    "damage",
    [
        {"bands": "others"},
        {"requests": -1},
        {"arms": [{"key": ["a", "b", True]}]},
        {"arms": 3},
        {
            "arms": [
                {"key": [str(n), "b", True], **dict.fromkeys(_COUNTS, [0.0] * BANDS)}
                for n in range(2000)
            ]
        },
    ],
)
def test_a_damaged_state_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Bounded(0.01).restore({**Bounded(0.01).state(), **damage})


@pytest.mark.parametrize(
    ("score", "same_words", "accepted"),
    [(0.92, False, True), (0.9, True, True), (0.9, False, False)],
)
def test_below_the_threshold_the_words_must_be_the_same(
    score: float, same_words: bool, accepted: bool
) -> None:
    policy = FixedThreshold(0.92)
    found = replace(match(score), same_words=same_words)
    assert policy.accept(asking(), DONOR, found).accept is accepted
    assert policy.floor == pytest.approx(0.88)
