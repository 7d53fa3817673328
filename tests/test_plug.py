"""Parts of the user's own: every example does what it says, a fault in one is a counted miss, a wrong one is named."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_models
from cache_helpers import Bench, line
from command_line import Result, invoke, read_lines, write_questions
from gateway_helpers import Pair, said
from semkv import (
    CacheConfig,
    ConfigError,
    EnginePrompt,
    EngineResult,
    FusionEngine,
    MediaSegment,
    Namespace,
    Request,
    SemanticCache,
    Status,
    StoreError,
    TextSegment,
    media_id,
)
from semkv.index import Neighbour, Row
from semkv.tiers.policies import build_policy
from semkv_gateway.responses.opening import open_store
from semkv_gateway.responses.store import MemoryStore, StoredResponse
from semkv_lab.scripted_engine import ScriptedEngine
from semkv_lab.settings import RunSettings, resolve

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run(folder: Path, *words: object) -> tuple[Result, list[dict[str, Any]]]:
    """``semkv run`` with these words, and the samples it writes."""
    out = folder / "samples.jsonl"
    command = [
        "run",
        "--preset",
        "opt-125m",
        "--cache-dir",
        folder / "cache",
        "--samples-out",
        out,
        *words,
    ]
    result = invoke([str(word) for word in command], columns=500)
    return result, read_lines(out) if out.exists() else []


def request(question: str, tenant: str = "", *media: MediaSegment) -> Request:
    return Request("r", Namespace(tenant, "model"), (*media, TextSegment(question)))


# -- data set and policy ------------------------------------------------------------------------------------------


def test_a_data_set_and_a_policy_of_ones_own_run_from_the_command_line(tmp_path: Path) -> None:
    own = [
        "--dataset",
        "numbers_dataset:load",
        "--policy",
        "word_order_policy:SameWords",
        "--engine",
        "labels",
    ]
    for least, hits in (("1", {"text:normalised"}), ("0.4", {"text:normalised", "text:semantic"})):
        result, rows = run(
            tmp_path, *own, "--max-samples", 12, "--similarity-threshold", least, "--purge"
        )
        assert result.exit_code == 0, result.output
        assert [row["sample_id"] for row in rows[:4]] == ["2+2-0", "2+2-1", "2+2-2", "2+3-0"]
        assert {row["provenance"] for row in rows} - {""} == hits
        assert all(row["match"] for row in rows)


# -- engines ------------------------------------------------------------------------------------------------------


def test_transformers_as_an_engine(tmp_path: Path, checkpoint: tiny_models.Checkpoint) -> None:
    from transformers_engine import TransformersEngine

    model, engine = checkpoint("llama"), "transformers_engine:TransformersEngine"
    beginning = "The tree stands left of the car, and the dog lies right of it. "
    questions = [
        beginning + end
        for end in ("What color is the car?", "What color is the dog?", "Is there a tree?")
    ]
    data = write_questions(tmp_path / "q.jsonl", *questions, questions[0])
    more = ["--disable-semantic-cache", "--max-tokens", 6, "--model", model]
    result, rows = run(tmp_path, "--engine", engine, "--dataset", data, *more)
    assert result.exit_code == 0, result.output
    settings = resolve(model=str(model), engine=engine)
    for row in rows:
        prompt = EnginePrompt((TextSegment(row["question"]),), max_tokens=6)
        fresh = TransformersEngine(settings, False).generate(prompt)
        assert (fresh.cached_tokens, fresh.text) == (0, row["text"])
    assert rows[0]["cached_tokens"] == 0
    assert all(row["prefix_tokens"] > 10 for row in rows[1:])
    assert rows[3]["provenance"] == "text:exact"
    shared = TransformersEngine(settings, True)
    asked = [EnginePrompt((TextSegment(questions[0]),), tenant) for tenant in ("one", "two", "one")]
    assert [shared.generate(prompt).cached_tokens > 0 for prompt in asked] == [False, False, True]


class Moody(ScriptedEngine):
    def __init__(self, settings: RunSettings, attach: bool) -> None:
        super().__init__()

    def generate(self, prompt: EnginePrompt) -> EngineResult:
        if "dog" in prompt.segments[-1].text:  # type: ignore[union-attr]
            raise ZeroDivisionError("no mood")
        return super().generate(prompt)


def test_an_engine_that_raises_anything_fails_that_sample(tmp_path: Path) -> None:
    data = write_questions(tmp_path / "q.jsonl", "Is it a cat?", "Is it a dog?", "Is it a bird?")
    result, rows = run(
        tmp_path, "--engine", f"{__name__}:Moody", "--dataset", data, "--disable-semantic-cache"
    )
    assert result.exit_code == 0, result.output
    assert "no mood" in result.output
    assert [row["question"] for row in rows] == ["Is it a cat?", "Is it a bird?"]


def seen(folder: Path, seed: int) -> MediaSegment:
    file = folder / f"{seed}.png"
    tiny_models.picture(seed).save(file)
    return MediaSegment(media_id(file.read_bytes()), file, str(seed))


def test_a_fusion_provider_of_ones_own(
    tmp_path: Path, checkpoint: tiny_models.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from llava_fusion import LlavaEngine, make
    from transformers import LlavaForConditionalGeneration

    encoded: list[Any] = []
    encode = LlavaForConditionalGeneration.get_image_features
    monkeypatch.setattr(
        LlavaForConditionalGeneration,
        "get_image_features",
        lambda *a, **k: (encoded.append(a), encode(*a, **k))[1],
    )
    one, two = seen(tmp_path, 1), seen(tmp_path, 2)
    settings = resolve(
        model=str(checkpoint("llava")), cache_dir=tmp_path / "cache", enable_fusion_cache=True
    )

    def ask(engine: Any, *media: MediaSegment, tenant: str = "") -> tuple[str, Status, int]:
        encoded.clear()
        result = engine.generate(
            EnginePrompt((*media, TextSegment("what color is the car?")), tenant, max_tokens=8)
        )
        return result.text, result.fusion, len(encoded)

    plain = make(settings, False)
    (first, _, _), (second, _, _), (both, _, _) = (
        ask(plain, one),
        ask(plain, two),
        ask(plain, one, two),
    )
    assert len({first, second, both}) == 3
    engine = make(settings, True)
    assert ask(engine, one) == (first, Status.MISS, 1)
    assert ask(engine, one) == (first, Status.HIT, 0)
    assert ask(engine, one, two) == (both, Status.MISS, 1)
    engine.close()
    again = make(settings, True)  # as after a restart
    assert ask(again, two) == (second, Status.HIT, 0)
    assert ask(again, one, two) == (both, Status.HIT, 0)
    assert ask(again, one, tenant="other") == (first, Status.MISS, 1)
    again.close()
    stats = json.loads(invoke(["stats", "--cache-dir", str(tmp_path / "cache"), "--json"]).stdout)
    assert [use["items"] for use in stats["stores"] if use["store"] == "fusion"] == [3]

    class Faulty(LlavaEngine):
        def inject(self, media: MediaSegment, tensor: np.ndarray) -> None:
            raise RuntimeError("no room")

        def capture(self, media: MediaSegment) -> np.ndarray:
            return np.zeros(3, dtype=np.int64)

    model = Faulty(settings.model)
    faulty = FusionEngine(model, model, tmp_path / "cache" / "fusion")
    assert ask(faulty, one) == (first, Status.MISS, 1)
    assert faulty.faults == {"inject": 1, "capture": 1}
    faulty.close()
    last = make(settings, True)
    assert ask(last, one) == (first, Status.HIT, 0)  # what was there is untouched
    assert torch.is_grad_enabled()
    with pytest.raises(
        ConfigError,
        match=r"provider: 'object' is not allowed; expected a semkv.FusionProvider with fingerprint, capture, inject",
    ):
        FusionEngine(model, object(), tmp_path)  # type: ignore[arg-type]


# -- index --------------------------------------------------------------------------------------------------------


def story(bench: Bench) -> list[str]:
    """What some requests find, over a restart and an invalidation."""
    bench.ask("color", "car")
    bench.ask("shape", "car")
    first = bench.entry
    asked = [("color~0.95", "car"), ("shape~0.95", "car"), ("color", "car~0.95")]
    found = [line(bench.look(*words)) for words in asked]
    bench.reopen()
    found.append(line(bench.look("color~0.95", "car", tenant="other")))
    found.append(line(bench.look("color~0.95", "car")))
    bench.cache.invalidate(entry_id=first)
    found.append(line(bench.look("shape~0.95", "car")))
    assert bench.cache.stats().faults == {}
    bench.cache.close()
    return found


def test_an_index_of_ones_own_finds_what_the_built_in_one_finds(tmp_path: Path) -> None:
    from numpy_index import NumpyIndex

    own, built_in = (
        story(Bench(tmp_path / "own", index=NumpyIndex)),
        story(Bench(tmp_path / "built in")),
    )
    assert own == built_in
    assert sum("hit" in one for one in own) == 4


class Liar:
    """Finds whatever it has in every partition, with scores that are no numbers, or far too good."""

    wrong = float("nan")

    def __init__(self, dim: int) -> None:
        self.all: list[str] = []

    def extend(self, rows: Iterable[Row]) -> None:
        self.all += [row.item for row in rows]

    def remove(self, items: Iterable[str]) -> None: ...

    def search(self, partition: str, vector: np.ndarray, k: int = 1) -> list[Neighbour]:
        return [*(Neighbour(item, self.wrong) for item in self.all), Neighbour("unknown", 1.0)]

    def score(self, item: str, vector: np.ndarray) -> float:
        return self.wrong


class Broken(Liar):
    def _fail(self, *_: Any) -> Any:
        raise RuntimeError("index lost")

    extend = remove = search = score = _fail


def test_an_index_that_errs_or_breaks_costs_hits_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in (Liar, Broken):
        bench = Bench(tmp_path / index.__name__, index=index)
        bench.ask("color", "car")
        assert not bench.look("color~0.95", "car").hit
        assert bench.look("color", "car").provenance == "text:exact"
        assert bool(bench.cache.stats().faults.get("index")) is (index is Broken)
        if index is Liar:
            monkeypatch.setattr(Liar, "wrong", 2.0)
            assert bench.look("color~0.95", "car").plan.match.score == 1.0  # type: ignore[union-attr]
            assert not bench.look("color~0.95", "car", tenant="other").hit
        bench.cache.close()
    with pytest.raises(
        ConfigError,
        match=r"index: 'object' is not allowed; expected a semkv.Index with extend, rem",
    ):
        Bench(tmp_path / "nothing", index=nothing)


# -- tiers --------------------------------------------------------------------------------------------------------


def test_a_tier_of_ones_own(tmp_path: Path) -> None:
    from word_set_tier import WordSet

    def opened() -> SemanticCache:
        return SemanticCache(CacheConfig(tmp_path / "cache", semantic=False), tiers=[WordSet()])

    car, tree = (MediaSegment(media_id(name.encode()), name=name) for name in ("car", "tree"))
    with opened() as cache:
        report = cache.try_reuse(request("Tell me the color of the car", "", car))
        assert line(report) == "exact_text=miss, semantic_text=skip, word_set=miss"
        entry = cache.add_observation(report, "red")
    with opened() as cache:  # as after a restart
        asked = "Please tell me the color of the car"
        found = cache.try_reuse(request(asked, "", car))
        assert (found.provenance, found.donor_response) == ("word_set", "red")
        assert found.plan.segments[-1] == TextSegment("Tell me the color of the car")
        assert line(found) == "exact_text=miss, semantic_text=skip, word_set=hit"
        assert not cache.try_reuse(request(asked, "", tree)).hit
        assert not cache.try_reuse(request(asked, "another tenant", car)).hit
        cache.add_observation(cache.try_reuse(request("Is the cat left of the dog?")), "yes")
        assert not cache.try_reuse(request("Is the dog left of the cat?")).hit  # a guard refuses it
        assert sum(cache.stats().vetoes.values()) == 1
        assert cache.stats().faults == {}
        assert cache.invalidate(entry_id=entry) == 1
        assert not cache.try_reuse(request(asked, "", car)).hit


class Failing:
    name = "failing"
    where = "keys"

    def keys(self, request: Request) -> list[str]:
        if self.where == "keys":
            raise RuntimeError("no keys")
        return ["all"]

    def score(self, request: Request, donor: Any) -> float:
        raise RuntimeError("no score")


def test_a_tier_that_breaks_costs_hits_only(tmp_path: Path) -> None:
    from word_set_tier import WordSet

    failing, config = Failing(), CacheConfig(tmp_path, semantic=False)
    with SemanticCache(config, tiers=[failing, WordSet()]) as cache:
        assert cache.add_observation(cache.try_reuse(request("the color please")), "red")
        assert cache.stats().faults == {"failing": 2}
        failing.where = "score"
        cache.add_observation(cache.try_reuse(request("the shape please")), "round")
        assert cache.try_reuse(request("please the shape")).provenance == "word_set"
        assert cache.try_reuse(request("the color please")).provenance == "text:exact"
        assert cache.stats().faults == {"failing": 3}
    with pytest.raises(
        ConfigError, match=r"tiers: 'word_set' is not allowed; expected names that differ"
    ):
        SemanticCache(config, tiers=[WordSet(), WordSet()])
    with pytest.raises(
        ConfigError,
        match=r"tiers: 'object' is not allowed; expected a semkv.Tier with name, keys, s",
    ):
        SemanticCache(config, tiers=[object()])  # type: ignore[list-item]


# -- store --------------------------------------------------------------------------------------------------------


def test_a_store_of_ones_own_behind_a_gateway(tmp_path: Path) -> None:
    for expected in ("miss", "hit"):
        with Pair(tmp_path, store="compressed_store:open_compressed", semantic=False) as pair:
            answer = pair.post("What color is the sky?")
            assert answer.headers["x-semkv"].split()[0] == expected
            assert "sky" in said(answer)
            pair.settle()
    assert (tmp_path / "compressed.sqlite").stat().st_size > 0


class Confused(MemoryStore):
    """Gives every answer to everybody, or breaks."""

    latest: StoredResponse | None = None

    def put(self, response: StoredResponse, since: str = "") -> bool:
        Confused.latest = response
        return True

    def get(self, key: str) -> StoredResponse | None:
        if self.latest is None:
            raise KeyError(key)
        return self.latest


def confused(default: Path, max_bytes: int) -> Confused:
    return Confused()


def test_a_store_that_errs_or_breaks_costs_hits_only(tmp_path: Path) -> None:
    Confused.latest = StoredResponse("another", "tenant", "model", b"{}", time.time())
    with Pair(tmp_path, store=f"{__name__}:confused", semantic=False) as pair:
        for text in ("first", "second", "third"):
            answer = pair.post(text)
            assert answer.status_code == 200
            assert answer.headers["x-semkv"].split()[0] == "miss"
            assert text in said(answer)
            pair.settle()
    store = open_store(f"{__name__}:confused", tmp_path / "db")
    assert store is not None
    with pytest.raises(StoreError, match="an answer of another key"):
        store.get("not the latest")
    Confused.latest = None
    with pytest.raises(StoreError, match="get: KeyError"):
        store.get("any")


# -- what is wrong is named ---------------------------------------------------------------------------------------


def nothing(*_: Any) -> object:
    return object()


def broken(*_: Any) -> None:
    raise RuntimeError("no license")


def leaving(*_: Any) -> None:
    sys.exit(0)


@pytest.mark.parametrize(
    ("flag", "path", "said"),
    [
        (
            "--policy",
            "fixd",
            "'fixd' is not allowed; expected one of fixed, calibrated, bounded, judge, or package.module:F",
        ),
        (
            "--policy",
            "no_such:Policy",
            "No module named 'no_such'); PYTHONPATH=. finds modules of this folder",
        ),
        ("--policy", f"{__name__}:nothing", "expected a semkv.Decider with learns, floor"),
        ("--engine", f"{__name__}:gone", "has no attribute 'gone'"),
        (
            "--engine",
            f"{__name__}:nothing",
            "expected a semkv.Engine with accepts_images, generate",
        ),
        (
            "--engine",
            f"{__name__}:broken",
            "a factory that takes the RunSettings, bool (RuntimeError('no license'))",
        ),
        (
            "--engine",
            f"{__name__}:leaving",
            "a factory that takes the RunSettings, bool (SystemExit(0))",
        ),
        (
            "--dataset",
            f"{__name__}:nothing",
            "a function that returns a list of semkv_lab.samples.Sample",
        ),
        ("--embedding-hook", "nothing", "or package.module:Factory"),
    ],
)
def test_a_wrong_part_is_named_with_key_and_value(
    tmp_path: Path, flag: str, path: str, said: str
) -> None:
    usual: dict[str, Any] = {
        "--dataset": write_questions(tmp_path / "q.jsonl", "What?"),
        "--engine": "scripted",
    }
    usual |= {"--embedding-layer": "prompt:384", "--embedding-hook": "prompt", flag: path}
    result, _ = run(tmp_path, *(word for pair in usual.items() for word in pair))
    assert result.exit_code == 2
    assert f"{flag}: '{path}' is not allowed" in result.stderr
    assert said in result.stderr


def test_a_wrong_store_or_policy_is_named_before_a_gateway_starts(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--store: .*a semkv_gateway\.ResponseStore with get, put, invalidate"
    ):
        open_store(f"{__name__}:nothing", tmp_path / "db")
    with pytest.raises(ConfigError, match="no license"):
        build_policy(CacheConfig(tmp_path, policy=f"{__name__}:broken"), "")
    with pytest.raises(ConfigError, match="decider: 'object' is not allowed; expected a semkv"):
        SemanticCache(CacheConfig(tmp_path, semantic=False), decider=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(file.stem for file in EXAMPLES.glob("*.py")))
def test_every_example_is_short_and_tested(name: str) -> None:
    assert importlib.import_module(name).__doc__
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 120
    assert name in Path(__file__).read_text(encoding="utf-8")
