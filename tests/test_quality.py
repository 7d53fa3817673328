"""Pairs, streams, calibration and figures, by library and by command line."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from cache_helpers import WrittenEncoder
from semkv.cli import run
from semkv.errors import ConfigError, DatasetError
from semkv.guards import no_veto, veto
from semkv.tiers.bounded import Bounded
from semkv.tiers.policies import Calibrated, FixedThreshold
from semkv_lab.evaluate import fit
from semkv_lab.quality import TIER, Asked, Pair, Replay, build_corpus, clusters, judge, read_pairs, read_stream
from semkv_lab.streams import zipf

ENCODER = WrittenEncoder(window=40)


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
    assert read_pairs(tmp_path / "p.jsonl") == read_pairs(tmp_path / "p.jsonl.gz") == expected
    (tmp_path / "s.jsonl").write_text('{"text": "x", "cluster": 7}\n{"text": "y", "answer": "red", "group": "g"}\n')
    assert read_stream(tmp_path / "s.jsonl") == [Asked("x", "7"), Asked("y", "red", "g")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "line 2: not valid JSON"),
        ("[1]", "line 2: expected an object"),
        ('{"a": "x", "b": "y"}', "line 2: 'same' must be 0 or 1"),
        ('{"a": "x", "b": "y", "same": 2}', "line 2: 'same'"),
        ('{"a": 1, "b": "y", "same": 1}', "line 2: 'a' must be a text"),
        ('{"a": "x", "b": "y", "same": 1, "group": [1]}', "line 2: 'group'"),
        ('{"a": "\\ud800", "b": "y", "same": 1}', "line 2: not valid JSON .*surrogates not allowed"),
        ('{"a":' * 99_999, "line 2: not valid JSON"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"a": "x", "b": "y", "same": 1}\n' + line + "\n")
    with pytest.raises(DatasetError, match=said):
        read_pairs(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 99)[:-12])
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9\n")
    for name in ("empty.jsonl", "bad.jsonl.gz", "cut.jsonl.gz", "latin.jsonl", "none.jsonl"):
        with pytest.raises(DatasetError, match=name):
            read_pairs(tmp_path / name)
    (tmp_path / "s.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(DatasetError, match="'cluster' is missing"):
        read_stream(tmp_path / "s.jsonl")


def test_same_pairs_chain_into_clusters_within_their_group() -> None:
    pairs = [Pair("a", "b", True), Pair("b", "c", True), Pair("c", "d", False), Pair("a", "b", False, "other")]
    of = clusters(pairs)
    assert of["", "a"] == of["", "b"] == of["", "c"] != of["", "d"]
    assert len({of["other", "a"], of["other", "b"], of["", "a"]}) == 3


def test_a_replay_counts_what_the_cache_would_do() -> None:
    stream = [
        Asked(text, answer) for text, answer in [("x", "1"), ("x", "1"), ("x~0.95", "1"), ("x~0.96", "2"), ("y", "3")]
    ]
    corpus = build_corpus([(a.group, a.text) for a in stream], ENCODER, no_veto)
    replay = Replay(stream, corpus)
    outcome = replay.play(FixedThreshold({TIER: 0.9}))
    assert (outcome.exact, outcome.approximate, outcome.wrong, outcome.checks) == (1, 2, 1, 0)
    assert outcome.wrong_per_approximate == 0.5
    assert outcome.worst is None, "so short a stream says nothing"
    odd = [Asked("x", "1"), *[Asked("x", "2")] * 3, Asked("x~0.95", "1")]
    found = Replay(odd, corpus).play(FixedThreshold({TIER: 0.9}))  # a wrong exact hit is no approximate one
    assert (found.exact, found.approximate, found.wrong, found.wrong_exact) == (3, 1, 3, 3)
    assert found.wrong_per_approximate == 0.0
    strict = replay.play(FixedThreshold({TIER: 0.97}))
    assert (strict.hits, strict.wrong, strict.wrong_per_approximate) == (1, 0, None)
    grouped = [Asked("x", "1", "g"), Asked("x~0.95", "1", "h"), Asked("x", "1", "h")]
    corpus = build_corpus([(a.group, a.text) for a in grouped], ENCODER, no_veto)
    assert Replay(grouped, corpus).play(FixedThreshold({TIER: 0.9})).hits == 1, "groups are apart"


def test_a_checked_hit_is_stored() -> None:
    stream = [Asked("x", "1"), Asked("x~0.95", "2"), Asked("x~0.95", "2"), Asked("x~0.95", "2")]
    corpus = build_corpus([(a.group, a.text) for a in stream], ENCODER, no_veto)
    unchecked = Replay(stream, corpus).play(FixedThreshold({TIER: 0.9}))
    checked = Replay(stream, corpus).play(FixedThreshold({TIER: 0.9}), verify_rate=1.0)
    assert (unchecked.wrong, unchecked.exact) == (3, 0)
    assert (checked.wrong, checked.exact, checked.checks) == (1, 2, 1)


def test_a_guard_is_part_of_a_replay() -> None:
    stream = [Asked("is it left of the car", "1"), Asked("is it right of the car", "2")]

    class Same(WrittenEncoder):
        def encode(self, texts: object) -> np.ndarray:
            return np.stack([ENCODER.encode(["x"])[0] for _ in texts])  # type: ignore[attr-defined]

    for guard, wrong in ((no_veto, 1), (veto, 0)):
        corpus = build_corpus([(a.group, a.text) for a in stream], Same(), guard)
        assert Replay(stream, corpus).play(FixedThreshold({TIER: 0.9})).wrong == wrong


def test_a_fit_finds_the_curve_that_made_the_pairs() -> None:
    pairs = written_pairs(800)
    corpus = build_corpus(list(clusters(pairs)), ENCODER, no_veto)
    fitted = fit(pairs, corpus, "written", precision=0.9)
    assert fitted.simulated
    for score in (0.65, 0.75, 0.85, 0.95):
        near = [row for row in fitted.lookups if abs(row.score - score) < 0.03]
        risk = sum(fitted.calibration.risk(row.score, row.wording) for row in near) / len(near)
        assert risk == pytest.approx(1 - (score - 0.5) / 0.5, abs=0.15)
    assert fitted.calibration.weights["cosine"] <= 0.0
    assert fitted.calibration.limit == pytest.approx(0.1)
    judged = judge(pairs, corpus, Calibrated(fitted.calibration, frozenset([TIER]), FixedThreshold({})))
    assert judged.precision is not None
    assert judged.precision > 0.87


def test_a_fit_leaves_out_what_a_guard_objects_to() -> None:
    pairs = written_pairs(900)

    def guard(a: str, b: str) -> str | None:
        """Objects to every third pair, also where it errs."""
        return "useless" if int(a.split("~")[0].split()[-1]) % 3 == 0 else None

    fitted = fit(pairs, build_corpus(list(clusters(pairs)), ENCODER, guard), "written")
    kept = [pair for number, pair in enumerate(pairs) if number % 3]
    without = fit(kept, build_corpus(list(clusters(kept)), ENCODER, no_veto), "written")
    assert fitted.calibration.risk(0.8) == pytest.approx(without.calibration.risk(0.8), abs=0.1)
    assert len(fitted.lookups) < 1.3 * len(without.lookups)


def test_a_fit_weighs_the_wording_and_never_trusts_a_lower_cosine_more() -> None:
    random = Random(3)
    pairs = []
    for number in range(900):
        cosine, odd = random.uniform(0.7, 0.99), random.random() < 0.5
        same = random.random() < (0.1 if odd else 0.9) - 0.2 * (cosine - 0.7)
        pairs.append(Pair(f"topic {number}", f"topic {number}{' giraffe' * odd} ~{cosine:.4f}", same))
    fitted = fit(pairs, build_corpus(list(clusters(pairs)), ENCODER, no_veto), "written")
    assert fitted.losses["all features"] < fitted.losses["cosine alone"] - 0.02
    assert fitted.calibration.weights["unmatched"] > 0.5
    assert fitted.calibration.weights["cosine"] <= 0.0, "the pairs say otherwise, by chance of their making"
    assert fitted.calibration.weights["closeness"] <= 0.0


def test_a_fit_needs_pairs_of_both_kinds() -> None:
    few, many = written_pairs(5), written_pairs(30)
    with pytest.raises(DatasetError, match="at least 20 pairs"):
        fit(few, build_corpus(list(clusters(few)), ENCODER, no_veto), "written")
    with pytest.raises(ConfigError, match="--precision"):
        fit(many, build_corpus(list(clusters(many)), ENCODER, no_veto), "written", precision=1.0)


def test_pairs_through_a_policy_by_hand() -> None:
    pairs = [Pair("x", "x~0.99", True), Pair("y", "y~0.95", False), Pair("z", "z~0.8", True), Pair("u", "v", False)]
    corpus = build_corpus([("", t) for p in pairs for t in (p.a, p.b)], ENCODER, no_veto)
    judged = judge(pairs, corpus, FixedThreshold({TIER: 0.9}))
    assert (judged.precision, judged.recall, judged.false_positive_rate) == (0.5, 0.5, 0.5)
    assert judged.area == pytest.approx((1 + 1 / 2 + 2 / 3 + 2 / 4) / 4)


def test_the_bound_holds_on_a_drawn_stream_at_more_hits_than_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semkv.tiers.bounded.SystemRandom", lambda: Random(0))
    stream = zipf(written_pairs(500), 1, 4000)
    corpus = build_corpus([(a.group, a.text) for a in stream], ENCODER, no_veto)
    outcome = Replay(stream, corpus).play(Bounded(0.005), verify_rate=0.1)
    assert outcome.wrong_rate <= 0.005
    assert outcome.approximate > 20


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
            noise = {"a": f"what is a good {topic}", "b": f"what is a good {topic} teacher", "same": n % 2}
            file.write(json.dumps(noise) + "\n")
            same = {"a": f"how do I learn the {topic}", "b": f"how can I learn {topic}?", "same": 1}
            other = {"a": f"how do I tune the {topic}", "b": f"how do I tune the {topics[n - 1]}", "same": 0}
            file.write(f"{json.dumps(same)}\n{json.dumps(other)}\n")
    made = semkv("calibrate", "pairs.jsonl", "--out", "c.json", "--plot", "c.png")
    assert json.loads(made)["pairs"] == 36
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "stream.jsonl").open("w") as file:
        for topic in topics * 3:
            file.write(json.dumps({"text": f"how do I learn the {topic}", "cluster": topic}) + "\n")
            file.write(json.dumps({"text": f"how can I learn {topic}?", "cluster": topic}) + "\n")
    for policy in ("calibrated", "bounded"):
        extra = ["--calibration", "c.json"]
        done = semkv("eval-stream", "stream.jsonl", "--policy", policy, *extra, "--plot", f"{policy}.png")
        assert json.loads(done)["requests"] == 72
    semkv("eval-pairs", "pairs.jsonl", "--out", "p.json", "--plot", "p.svg")
    assert 0.0 <= json.loads((tmp_path / "p.json").read_text())["p_chr_auc"] <= 1.0
    with pytest.raises(DatasetError, match=r"none\.jsonl"):
        semkv("eval-pairs", "none.jsonl")
    with pytest.raises(ConfigError, match=r"--policy: 'lax'.*calibrated"):
        semkv("eval-pairs", "pairs.jsonl", "--policy", "lax")
    with pytest.raises(ConfigError, match="--plot"):
        semkv("eval-pairs", "pairs.jsonl", "--plot", "p.doc")
