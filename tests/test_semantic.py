"""``semkv bench semantic``: the command on small data, with the real encoder; what it counts, names and refuses."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from command_line import invoke
from semkv.encoders.text import SentenceEncoder
from semkv_guards import veto
from semkv_lab import caches, semantic
from semkv_lab.caches import play
from semkv_lab.labels import KINDS, Asked, Pair
from semkv_lab.settings import SemanticFlags

DATA = Path(__file__).parents[1] / "bench" / "data"
PEERS = {"gptcache": ("gptcache", "faiss", "sqlalchemy"), "redisvl": ("redisvl",)}


@pytest.fixture
def _few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 60th row and every trap that passes; of small files every eighth row. Fewer conversations."""
    monkeypatch.setattr(semantic, "CONVERSATIONS", 40)
    folder = tmp_path / "bench" / "data"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for file in DATA.glob("*.jsonl"):
        rows = file.read_text().splitlines()
        kept = rows[:: 60 if len(rows) > 500 else 8]
        if file.name == "traps.jsonl":
            kept += [
                row for row in rows if veto(json.loads(row)["a"], json.loads(row)["b"]) is None
            ]
        (folder / file.name).write_text("\n".join(kept) + "\n")


def bench(*arguments: str | Path, out: Path) -> tuple[dict[str, Any], str]:
    """The JSON and what is printed."""
    done = invoke(["bench", "semantic", *map(str, arguments), "--out", str(out)])
    assert done.exit_code == 0, done.output
    return json.loads(out.read_text()), done.stdout


@pytest.mark.usefixtures("_few_rows")
def test_every_cache_on_every_part(tmp_path: Path) -> None:
    flags = ["--parts", "pairs", "traps", "streams", "turns", "--requests", "40", "--seeds", "1"]
    found, said = bench(*flags, out=tmp_path / "f.json")
    rules = ["cosine 0.92", "vcache rule 0.01", "krites 0.92"]
    ours = [*rules, "semkv fixed 0.92", "semkv calibrated 0.95", "semkv bounded 0.01"]
    for rows in (
        found["pairs"],
        found["traps"]["caches"],
        found["turns"],
        found["streams"]["zipf"]["caches"],
    ):
        assert [name for name in rows if name.split()[0] not in PEERS] == ours
    pairs = found["pairs"]
    for row in pairs.values():
        same, different = row["same that hit"], row["different that hit"]
        assert row["precision"]["count"] == same["count"]
        assert (
            row["precision"]["of"] == row["hit_rate"]["count"] == same["count"] + different["count"]
        )
        assert row["different where 80% hit"]["of"] == different["of"]
        assert 0 <= row["p_chr_auc"] <= 1
    ours, plain = (
        pairs[name]["different where 80% hit"]["count"]
        for name in ("semkv fixed 0.92", "cosine 0.92")
    )
    assert ours < plain, "guards rank traps last"
    assert pairs["cosine 0.92"]["different that hit"]["share"] > 0.3
    assert (
        pairs["semkv fixed 0.92"]["different that hit"]["share"]
        < pairs["cosine 0.92"]["different that hit"]["share"]
    )
    assert (
        found["turns"]["cosine 0.92"]["reworded last turns"]["wrong"] == semantic.CONVERSATIONS - 1
    )
    semkv = found["turns"]["semkv fixed 0.92"]
    assert (semkv["equal last turns"]["hits"], semkv["reworded last turns"]["wrong"]) == (0, 0)
    for result in found["streams"].values():
        for row in result["caches"].values():
            assert [one["requests"] for one in row["streams"]] == result["requests"]
            assert row["lookup"]["calls"] == sum(result["requests"])
            low, high = row["wrong_per_request"]["interval"]
            assert low <= row["wrong_per_request"]["share"] <= high
    assert found["machine"]["versions"]["numpy"]
    for name, modules in PEERS.items():
        if not all(map(importlib.util.find_spec, modules)):
            assert f"{name}: not installed: pip install" in said or f"{name}: not measured" in said


def test_pairs_and_a_stream_of_ones_own(tmp_path: Path) -> None:
    topics = "piano violin guitar drums flute harp cello oboe trumpet tuba banjo organ".split()
    rows = []
    for n, topic in enumerate(topics * 3):
        verb = ("learn", "buy", "sell")[n // len(topics)]
        rows.append(
            {"a": f"how do I {verb} the {topic}", "b": f"how can I {verb} a {topic}?", "same": 1}
        )
        other = f"what is a good {topic} stand to {verb}"
        rows.append({"a": f"what is a good {topic} to {verb}", "b": other, "same": n % 2})
    pairs, stream = tmp_path / "p.jsonl", tmp_path / "s.jsonl"
    pairs.write_text("\n".join(map(json.dumps, rows)))
    stream.write_text(
        "\n".join(json.dumps({"text": row["a"], "cluster": n}) for n, row in [*enumerate(rows)] * 2)
    )
    flags = [
        "--parts",
        "pairs",
        "streams",
        "--pairs",
        pairs,
        "--stream",
        stream,
        "--requests",
        "50",
    ]
    flags += ["--caches", "cosine", "bounded", "--max-error-rate", "0.1", "0.2"]
    found, said = bench(*flags, out=tmp_path / "f.json")
    assert list(found["pairs"]) == ["cosine 0.92", "semkv bounded 0.1", "semkv bounded 0.2"]
    assert found["streams"]["own"]["requests"] == [2 * len(rows)]
    assert found["streams"]["own"]["caches"]["cosine 0.92"]["hit_rate"] >= 0.5
    assert "not installed" not in said
    again, _ = bench(*flags, out=tmp_path / "g.json")
    for part in ("pairs", "streams"):
        assert _without_times(again[part]) == _without_times(found[part]), (
            "seeds decide all but times"
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("requests", [1, 7, 101])
def test_a_stream_has_as_many_requests_as_asked_for(kind: str, requests: int) -> None:
    pairs = [Pair(f"a {n}", f"b {n}", same) for n in range(200) for same in (True, False)]
    assert len(KINDS[kind](pairs, 0, requests)) == requests


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(one) for key, one in value.items() if key != "lookup"}
    return value


def test_images_need_no_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(semantic, "SCENES", 1)
    found, _ = bench("--parts", "images", out=tmp_path / "f.json")
    images = found["images"]
    assert images["semkv"]["copies"]["all"]["share"] > 0.8
    assert images["semkv"]["changes"]["all"]["share"] < 0.1
    assert images["semkv without guards"]["changes"]["all"]["share"] > 0.5


def test_a_peer_that_fails_at_its_first_request_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TooNew(caches.Cosine):
        def __init__(self, encoder: Any) -> None:
            super().__init__(encoder, 0.9)

        def store(self, asked: Asked) -> None:
            raise TypeError("its database is too new")

    monkeypatch.setattr(caches, "GPTCache", TooNew)
    bench = semantic.Bench(SemanticFlags(caches=("gptcache", "cosine")), tmp_path)
    assert len(bench.makers) == 1
    assert bench.absent == ["gptcache: not measured: its database is too new"]


def test_redisvl_keeps_groups_apart_whatever_their_names() -> None:
    pytest.importorskip("redisvl", reason="needs RedisVL: pip install redisvl")
    if "REDIS_URL" not in os.environ:
        pytest.skip("REDIS_URL names no Redis server with the search module")
    stream = [Asked("one", group, group) for group in ("a, b", "a", "A", "a, b")]
    played = play(caches.RedisVL(SentenceEncoder(), 0.9), stream)
    assert (played.hits, played.wrong) == (1, 0)


def test_vcaches_rule_uses_a_text_only_after_it_was_right_often_enough() -> None:
    encoder = SentenceEncoder()
    right = [Asked("How do I learn the piano?", "1"), Asked("How can I learn the piano?", "1")] * 40
    assert play(caches.VCache(encoder, 0.1, 0), right[:7]).hits == 0
    assert play(caches.VCache(encoder, 0.1, 0), right).hits > 5
    wrong = [Asked("How do I learn the piano?", str(n)) for n in range(40)]
    assert play(caches.VCache(encoder, 0.01, 0), wrong).hits == 0


def test_krites_lets_a_judged_text_have_the_curated_answer() -> None:
    cache = caches.Krites(SentenceEncoder(), 0.95)
    cache._CURATED = 1
    near, other = "How can I learn to play the piano?", "How long does it take to learn the piano?"
    play(cache, [Asked("How do I learn the piano?", "1"), Asked(near, "1"), Asked(other, "2")])
    assert len(cache._judged) == 2
    played = play(cache, [Asked(near, "1"), Asked(other, "2"), Asked(near, "1")])
    assert (played.hits, played.wrong) == (3, 0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--parts", "none"], "pairs, traps, streams"),
        (["--caches", "mine"], "gptcache"),
        (["--requests", "0"], "a positive number"),
        (["--max-error-rate", "0.01", "2"], "a share above 0 and below 1"),
        (["--parts", "pairs", "pairs"], "each once"),
        (["--parts", "traps"], "bench/data/traps.jsonl is not here"),
        (["--board", "mine"], "fow-cache"),
        (["--out", "a file/f.json"], "a place that can be written"),
        (["--pairs", "none.jsonl"], "none.jsonl: No such file"),
        (["--pairs", "same.jsonl", "--caches", "cosine"], "same.jsonl: each half of the clusters"),
    ],
)
def test_a_wrong_flag_is_named_with_what_is_allowed(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    (tmp_path / "same.jsonl").write_text('{"a": "x", "b": "y", "same": 1}\n')
    done = invoke(["bench", "semantic", *flags])
    assert done.exit_code not in (0, 1)
    assert said in done.output
    assert "Traceback" not in done.output
