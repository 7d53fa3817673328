"""Pairs, streams, calibration and figures, by library and by command line."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from pathlib import Path
from random import Random

import pytest

from cache_helpers import WrittenEncoder
from semkv.cli import run
from semkv.config import PolicyConfig
from semkv.errors import ConfigError, DatasetError
from semkv_lab.caches import Played, SemKV, ask_pair, pair_area, play
from semkv_lab.labels import Asked, Pair, clusters, fit, zipf
from semkv_lab.samples import read_rows
from semkv_lab.semantic import static_thresholds

ENCODER = WrittenEncoder(window=40)


def no_veto(_a: str, _b: str) -> None:
    """A guard that never objects."""


def written_pairs(count: int, seed: int = 0) -> list[Pair]:
    """Topics with a text at a drawn cosine: the nearer, the more often the same."""
    random = Random(seed)
    pairs = []
    for number in range(count):
        cosine = random.uniform(0.6, 0.999)
        same = random.random() < (cosine - 0.5) / 0.5
        pairs.append(Pair(f"topic {seed} {number}", f"topic {seed} {number}~{cosine:.4f}", same))
    return pairs


def test_rows_are_read_plain_and_packed(tmp_path: Path) -> None:
    rows = '{"a": "x", "b": "y", "same": 1, "cluster": "c"}\n\n{"a": "x", "b": "z", "same": false, "group": 3}\n'
    (tmp_path / "p.jsonl").write_text(rows)
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.write(rows)
    expected = [Pair("x", "y", True), Pair("x", "z", False, "3")]
    assert (
        read_rows(tmp_path / "p.jsonl", Pair)
        == read_rows(tmp_path / "p.jsonl.gz", Pair)
        == expected
    )
    (tmp_path / "s.jsonl").write_text(
        '{"text": "x", "cluster": 7}\n{"text": "y", "answer": "red", "group": "g"}\n'
    )
    assert read_rows(tmp_path / "s.jsonl", Asked) == [Asked("x", "7"), Asked("y", "red", "g")]


def test_same_pairs_chain_into_clusters_within_their_group() -> None:
    pairs = [
        Pair("a", "b", True),
        Pair("b", "c", True),
        Pair("c", "d", False),
        Pair("a", "b", False, "other"),
    ]
    of = clusters(pairs)
    assert of["", "a"] == of["", "b"] == of["", "c"] != of["", "d"]
    assert len({of["other", "a"], of["other", "b"], of["", "a"]}) == 3


def cached(policy: PolicyConfig, stream: list[Asked]) -> tuple[Played, SemKV]:
    """A stream through the whole cache under a policy."""
    with contextlib.closing(SemKV(ENCODER, policy)) as cache:
        return play(cache, stream), cache


def test_a_stream_counts_hits_of_both_kinds_and_wrong_ones() -> None:
    stream = [
        Asked(*row)
        for row in [("x", "1"), ("x", "1"), ("x~0.95", "1"), ("x~0.96", "2"), ("y", "3")]
    ]
    plain = PolicyConfig(similarity_threshold=0.9, guards=False)
    played, cache = cached(plain, stream)
    assert (played.hits, cache.approximate, played.wrong, cache.wrong_approximate) == (3, 2, 1, 1)
    assert (played.checks, played.within(0.25), played.within(0.2)) == (0, True, False), (
        "one of the first four is wrong"
    )
    played, cache = cached(plain, [Asked("x", "1"), *[Asked("x", "2")] * 3, Asked("x~0.95", "1")])
    assert (played.wrong, cache.approximate, cache.wrong_approximate) == (3, 1, 0), (
        "a wrong exact hit is none of these"
    )
    assert cached(PolicyConfig(similarity_threshold=0.97, guards=False), stream)[0].hits == 1
    apart = [Asked("x", "1", "g"), Asked("x~0.95", "1", "h"), Asked("x", "1", "h")]
    assert cached(plain, apart)[0].hits == 1, "groups never meet"
    checked, _ = cached(
        PolicyConfig(similarity_threshold=0.9, guards=False, verify_rate=1.0),
        [stream[0], *[Asked("x~0.95", "2")] * 3],
    )
    assert (checked.wrong, checked.checks) == (1, 1), "a checked hit is stored with its own answer"


def test_a_fit_finds_the_curve_that_made_the_pairs() -> None:
    pairs = written_pairs(800)
    fitted = fit(pairs, ENCODER, precision=0.9, guard=no_veto)
    assert fitted.simulated
    for score in (0.65, 0.75, 0.85, 0.95):
        near = [row for row in fitted.lookups if abs(row.score - score) < 0.03]
        risk = sum(fitted.calibration.risk(row.score, row.wording) for row in near) / len(near)
        assert risk == pytest.approx(1 - (score - 0.5) / 0.5, abs=0.15)
    assert fitted.calibration.weights["cosine"] <= 0.0
    assert fitted.calibration.limit == pytest.approx(0.1)


def test_a_fit_weighs_the_wording_and_never_trusts_a_lower_cosine_more() -> None:
    random = Random(3)
    pairs = []
    for number in range(900):
        cosine, odd = random.uniform(0.7, 0.99), random.random() < 0.5
        same = random.random() < (0.1 if odd else 0.9) - 0.2 * (cosine - 0.7)
        pairs.append(
            Pair(f"topic {number}", f"topic {number}{' giraffe' * odd} ~{cosine:.4f}", same)
        )
    fitted = fit(pairs, ENCODER, guard=no_veto)
    assert fitted.calibration.weights["unmatched"] > 0.5
    assert fitted.calibration.weights["cosine"] <= 0.0, (
        "the pairs say otherwise, by chance of their making"
    )
    assert fitted.calibration.weights["closeness"] <= 0.0


def test_a_fit_needs_enough_pairs_and_a_precision() -> None:
    with pytest.raises(DatasetError, match="at least 20 pairs"):
        fit(written_pairs(5), ENCODER)
    with pytest.raises(ConfigError, match="--precision"):
        fit(written_pairs(30), ENCODER, precision=1.0)


def test_pairs_by_hand() -> None:
    pairs = [
        Pair("x", "x~0.99", True),
        Pair("y", "y~0.95", False),
        Pair("z", "z~0.8", True),
        Pair("u", "v", False),
    ]
    with contextlib.closing(
        SemKV(ENCODER, PolicyConfig(similarity_threshold=0.9, guards=False))
    ) as cache:
        assert [ask_pair(cache, pair, str(n)) for n, pair in enumerate(pairs)] == [
            True,
            True,
            False,
            False,
        ]
        trust = [cache.confidence(pair.a, pair.b) for pair in pairs]
    area = pair_area(trust, [pair.same for pair in pairs])
    assert area == pytest.approx((1 + 1 / 2 + 2 / 3 + 2 / 4) / 4)


def test_a_fixed_cosine_and_the_cache_count_alike() -> None:
    stream = zipf(written_pairs(60), 0, 300)
    static = {threshold: counts for threshold, *counts in static_thresholds(stream, ENCODER)}
    played, _ = cached(PolicyConfig(similarity_threshold=0.9, guards=False), stream)
    assert static[0.9] == [played.hits, played.wrong]
    assert static[1.01][0] < played.hits < static[0.7][0]


def test_the_bound_holds_on_a_drawn_stream_at_more_hits_than_exact_ones() -> None:
    stream = zipf(written_pairs(500), 1, 3000)
    policy = PolicyConfig(policy="bounded", max_error_rate=0.005, guards=False)
    with contextlib.closing(SemKV(ENCODER, policy, seed=0)) as cache:
        assert play(cache, stream).within(0.005)
        assert cache.approximate > 20


def semkv(*args: str | Path) -> str:
    """What a command prints. In this process: torch is imported once."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run([str(arg) for arg in args])
    return out.getvalue()


def test_the_commands_from_file_to_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    topics = "piano violin guitar drums flute harp cello oboe trumpet tuba banjo organ".split()
    with (tmp_path / "pairs.jsonl").open("w") as file:
        for n, topic in enumerate(topics):
            noise = {
                "a": f"what is a good {topic}",
                "b": f"what is a really good {topic}",
                "same": n % 2,
            }
            file.write(json.dumps(noise) + "\n")
            same = {"a": f"how do I learn the {topic}", "b": f"how can I learn {topic}?", "same": 1}
            other = {
                "a": f"how do I tune the {topic}",
                "b": f"how do I tune the {topics[n - 1]}",
                "same": 0,
            }
            file.write(f"{json.dumps(same)}\n{json.dumps(other)}\n")
    made = semkv("calibrate", "pairs.jsonl", "--out", "c.json")
    assert json.loads(made)["pairs"] == 36
    with (tmp_path / "stream.jsonl").open("w") as file:
        for topic in topics * 3:
            file.write(json.dumps({"text": f"how do I learn the {topic}", "cluster": topic}) + "\n")
            file.write(json.dumps({"text": f"how can I learn {topic}?", "cluster": topic}) + "\n")
    for policy in ("calibrated", "bounded"):
        extra = ["--calibration", "c.json"]
        done = semkv("eval-stream", "stream.jsonl", "--policy", policy, *extra)
        assert json.loads(done)["requests"] == 72
    semkv("eval-pairs", "pairs.jsonl", "--out", "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["precision"]["of"] > 0
    with pytest.raises(DatasetError, match=r"none\.jsonl"):
        semkv("eval-pairs", "none.jsonl")
    with pytest.raises(ConfigError, match=r"--policy: 'lax'.*calibrated"):
        semkv("eval-pairs", "pairs.jsonl", "--policy", "lax")
    for place in ("c.json/p.json", ".", "stream.jsonl", "/dev/full"):
        with pytest.raises(ConfigError, match="--out"):
            semkv("eval-stream", "stream.jsonl", "--out", place)
    with pytest.raises(ConfigError, match=r"--out.*No space left"):
        semkv("calibrate", "pairs.jsonl", "--out", "/dev/full")
