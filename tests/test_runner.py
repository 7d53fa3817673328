"""A run, with a scripted engine: what is sent, what is recorded, and what the figures say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from lab_helpers import quiet, record
from semkv import keys
from semkv.cache import CacheStats, SemanticCache
from semkv.engines import EnginePrompt, EngineResult, MediaError, load_image, system_text, user_parts
from semkv.engines.scripted import ScriptedEngine
from semkv.errors import ConfigError, DatasetError, EngineError
from semkv.types import MediaSegment, Request, ReuseReport, Role, Status, TextSegment
from semkv_lab.console import figures, print_summary, sample_line
from semkv_lab.metrics import Figures
from semkv_lab.run import execute, run
from semkv_lab.samples import ImageRef, Sample, SampleRecord
from semkv_lab.settings import RunSettings, resolve


class ExactCache(SemanticCache):
    """The exact text tier alone, which needs no encoder; notes what it is told."""

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(replace(settings.cache, semantic=False))
        self.observed: list[tuple[ReuseReport, str]] = []
        self.closed = False

    def add_observation(self, report: ReuseReport, response: str, **options: Any) -> Any:
        self.observed.append((report, response))
        return super().add_observation(report, response, **options)

    def close(self) -> None:
        self.closed = True
        super().close()


def settings(tmp_path: Path, **flags: Any) -> RunSettings:
    flags = {"preset": "opt-125m", "engine": "scripted", "cache_dir": tmp_path / "cache", **flags}
    return resolve(**flags)


def go(
    samples: Sequence[Sample],
    chosen: RunSettings,
    engine: ScriptedEngine | None = None,
    cold: ScriptedEngine | None = None,
    cache: ExactCache | None = None,
    listener: Any = None,
    baseline: Path | None = None,
) -> tuple[list[SampleRecord], Figures]:
    engine = engine or ScriptedEngine(store=set())
    return run(
        chosen,
        samples,
        lambda _, attach: engine if attach or cold is None else cold,
        lambda s: cache or ExactCache(s),
        listener or quiet(chosen),
        baseline,
    )


CAR = Sample("1", "What color is the car?", "red")
CAR_AGAIN = Sample("2", "what  color is the car?", "red")
SKY = Sample("3", "What is in the sky above us?", "bird")
ANSWERS = {"What color is the car?": "Red.", "what  color is the car?": "blue", "What is in the sky above us?": "plane"}


def test_a_live_run_sends_the_donors_prompt(tmp_path: Path) -> None:
    engine = ScriptedEngine(ANSWERS, store=set(), block_size=2)
    records, summary = go([CAR, CAR_AGAIN, SKY], settings(tmp_path), engine)
    assert [p.segments[0] for p in engine.prompts] == [
        TextSegment("What color is the car?"),
        TextSegment("What color is the car?"),
        TextSegment("What is in the sky above us?"),
    ]
    assert [r.provenance for r in records] == ["", "text:normalised", ""]
    assert [r.match for r in records] == [True, True, False]
    assert [r.applied for r in records] == [False, True, False]
    assert (summary["samples"], summary["hits"]) == (3, 1)
    assert summary["accuracy_on_hits"]["value"] == 1.0
    assert engine.closed


def test_a_dry_run_reports_but_sends_the_request_unchanged(tmp_path: Path) -> None:
    chosen = settings(tmp_path, cache_mode="dry-run")
    engine, cache = ScriptedEngine(ANSWERS, store=set()), ExactCache(chosen)
    records, summary = go([CAR, CAR_AGAIN], chosen, engine, cache=cache)
    assert engine.prompts[1].segments == (TextSegment("what  color is the car?"),)
    assert records[1].hit
    assert not records[1].applied
    # What is recorded belongs to what was computed: the request's own text.
    report, response = cache.observed[1]
    assert (report.plan.segments, response) == ((TextSegment("what  color is the car?"),), "blue")
    assert summary["donor_agreement"]["value"] == 0.0


def test_off_uses_nothing_of_ours(tmp_path: Path) -> None:
    attached = []
    chosen = settings(tmp_path, cache_mode="off")
    records, _ = run(
        chosen,
        [CAR, CAR_AGAIN],
        lambda _, attach: attached.append(attach) or ScriptedEngine(ANSWERS),  # type: ignore[func-returns-value]
        lambda _: pytest.fail("no cache is made"),
        quiet(chosen),
    )
    assert attached == [False]
    assert [(r.hit, r.statuses) for r in records] == [(False, {"kv_cache": Status.SKIP, "fusion": Status.SKIP})] * 2


def test_the_cold_pass_goes_first_on_an_engine_of_its_own(tmp_path: Path) -> None:
    cold, engine = ScriptedEngine(ANSWERS, block_size=2), ScriptedEngine(ANSWERS, store=set(), block_size=2)
    chosen = settings(tmp_path, baseline=True)
    records, summary = go([CAR, CAR_AGAIN], chosen, engine, cold)
    assert cold.closed
    # Each is asked twice, for the noise floor, the second time where nothing is cached.
    assert [p.segments[0] for p in cold.prompts[1:3]] == [TextSegment(CAR.question), TextSegment(CAR_AGAIN.question)]
    assert len({p.cache_salt for p in cold.prompts}) == 3
    assert records[1].cold is not None
    assert records[1].cold.text == "blue"
    assert (summary["noise_floor"]["tokens"]["n"], summary["noise_floor"]["tokens"]["value"]) == (2, 0.0)
    compared = summary["against_cold"]
    assert (compared["agreement"]["n"], compared["agreement"]["value"]) == (1, 0.0)
    assert compared["identical_tokens"]["n"] == 1  # the miss; the normalised hit is not a byte-equal prompt
    # The cold run computed 2 x 5 tokens, the cached run 5 + 1.
    assert (summary["tokens"]["baseline_computed"], summary["tokens"]["computed"], summary["tokens"]["beyond"]) == (
        10,
        6,
        4,
    )
    console = Console(record=True, width=120, quiet=False, file=(tmp_path / "x").open("w"))
    print_summary(console, summary, chosen)
    assert "4 tokens (40.0% of what it left to compute)" in console.export_text()


def test_a_record_names_what_stood_in(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", "red")
    sample = Sample("1", "What is it?", "red", images=(ImageRef("a", path),), entailed=("2",))
    again = replace(sample, sample_id="2", question="what  is it?", entailed=())
    for mode in ("live", "dry-run"):
        chosen = settings(tmp_path, cache_mode=mode, cache_dir=tmp_path / mode)
        (first, second), _ = go([sample, again], chosen, ScriptedEngine(ANSWERS, store=set()))
        assert (first.donor_question, first.donor_image, first.entailed) == ("", "", ("2",))
        assert (second.donor_question, second.donor_image) == ("What is it?", "a")
        assert second.applied is (mode == "live")


def picture(path: Path, color: str) -> Path:
    Image.new("RGB", (4, 4), color).save(path)
    return path


def test_a_lost_donor_image_is_a_counted_miss(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", "red")
    sample = Sample("1", "What is it?", images=(ImageRef("a", path),))

    class LosesTheImage(ExactCache):
        def stats(self) -> CacheStats:
            return replace(super().stats(), refused=2, faults={"encoder": 1})

        def try_reuse(self, request: Request) -> ReuseReport:
            report = super().try_reuse(request)
            if not report.hit:
                return report
            gone = tuple(replace(s, source=None) if isinstance(s, MediaSegment) else s for s in report.plan.segments)
            return replace(report, plan=replace(report.plan, segments=gone))

    chosen = settings(tmp_path)
    engine = ScriptedEngine(store=set(), check_media=True)
    records, summary = go([sample, replace(sample, sample_id="2")], chosen, engine, cache=LosesTheImage(chosen))
    assert summary["faults"] == {"donor image lost": 1, "cache fault: encoder": 1}
    assert summary["refused"] == 2
    assert [r.hit for r in records] == [False, False]
    assert records[1].statuses["exact_text"] is Status.MISS
    assert records[0].text == records[1].text


def test_samples_without_an_image_file_are_left_out_and_listed(tmp_path: Path) -> None:
    samples = [Sample(str(i), "q", images=(ImageRef(f"n{i}", None),)) for i in range(3)]
    samples.insert(1, Sample("whole", "q"))
    records, summary = go(samples, settings(tmp_path, baseline=True), ScriptedEngine())
    assert [r.sample_id for r in records] == ["whole"]
    assert summary["skipped"] == ["0", "1", "2"]
    assert ("left out, no image file", "3: 0, 1, 2") in figures(summary)
    engine, lacking = ScriptedEngine(), [s for s in samples if s.images]
    with pytest.raises(DatasetError, match=r"3 images have no file \(the first is 'n0'\)"):
        go(lacking, settings(tmp_path), engine)
    assert engine.closed
    records, _ = go(lacking, settings(tmp_path), ScriptedEngine(accepts_images=False))
    assert len(records) == 3
    with pytest.raises(DatasetError, match=r"3 images have no file"):
        go(samples, settings(tmp_path, strict=True), ScriptedEngine())


def test_gqas_annotations_reach_records_and_summary(tmp_path: Path) -> None:
    common = ("query", "obj", "twoCommon")
    samples = [
        Sample("1", "what color", "red", types=("query", "attr", "x"), group="c", valid=("red",), plausible=("blue",)),
        Sample("2", "in common", "red", types=common, valid=("red",), plausible=("red",)),
        Sample("3", "what", "blue"),
    ]
    records, summary = go(samples, settings(tmp_path), ScriptedEngine(answer=lambda _: "Red"))
    assert [(r.valid, r.plausible) for r in records] == [(True, False), (False, False), (None, None)]
    assert records[1].types == common
    gqa = summary["gqa"]
    assert (gqa["validity"]["value"], gqa["plausibility"]["value"], gqa["distribution"]) == (0.5, 0.0, 0.0)


@dataclass
class Failing(ScriptedEngine):
    """Fails on some questions, or is interrupted at one."""

    fails: frozenset[str] = frozenset()
    interrupt: str = ""

    def generate(self, prompt: EnginePrompt) -> EngineResult:
        question = prompt.segments[-1]
        assert isinstance(question, TextSegment)
        if question.text == self.interrupt:
            raise KeyboardInterrupt
        if question.text in self.fails:
            raise EngineError("prompt too long")
        return super().generate(prompt)


def test_a_failing_sample_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    engine = Failing(ANSWERS, fails=frozenset({CAR_AGAIN.question}), store=set())
    records, summary = go([CAR, CAR_AGAIN, SKY], settings(tmp_path, cache_mode="dry-run"), engine)
    assert [r.sample_id for r in records] == ["1", "3"]
    assert summary["faults"]["failed samples"] == 1


def test_an_interrupt_keeps_what_was_answered(tmp_path: Path) -> None:
    engine = Failing(ANSWERS, interrupt=SKY.question, store=set())
    chosen = settings(tmp_path, samples_out=tmp_path / "out" / "samples.jsonl")
    cache = ExactCache(chosen)
    with closing(quiet(chosen)) as listener:
        records, summary = go([CAR, CAR_AGAIN, SKY, CAR], chosen, engine, cache=cache, listener=listener)
    assert summary["interrupted"]
    assert len(records) == summary["samples"] == 2
    assert engine.closed
    assert cache.closed
    lines = (tmp_path / "out" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["sample_id"] for line in lines] == ["1", "2"]


# --- cold answers of an earlier run


def test_a_baseline_of_an_earlier_run_is_taken_where_the_same_is_asked(tmp_path: Path) -> None:
    sample = Sample("1", "What is it?", "red", images=(ImageRef("a", picture(tmp_path / "a.png", "red")),))
    path = tmp_path / "cold.jsonl"
    chosen = settings(tmp_path, samples_out=path, baseline=True)
    with closing(quiet(chosen)) as listener:
        go([sample, SKY], chosen, listener=listener)
    cold = ScriptedEngine()
    records, _ = go([replace(sample, answer="blue"), SKY], settings(tmp_path), cold=cold, baseline=path)
    assert not cold.prompts
    assert all(r.cold is not None and r.cold.text == r.text for r in records)
    assert records[0].cold is not None
    assert records[0].cold.match is False  # judged by the label of now

    def refused(engine: ScriptedEngine | None = None, **fields: Any) -> None:
        with pytest.raises(DatasetError, match=r"cold\.jsonl has no cold answer for sample (1|9) "):
            go([replace(sample, **fields)], settings(tmp_path), engine, baseline=path)

    refused(question="Where is it?")
    refused(context="It is dark.")
    refused(sample_id="9")
    refused(ScriptedEngine(store=set(), name="other weights"))
    picture(tmp_path / "a.png", "blue")
    refused()


# --- what a run prints and writes


def test_the_line_of_a_sample() -> None:
    statuses = {"exact_text": Status.MISS, "embedding:prompt": Status.HIT, "kv_cache": Status.HIT}
    assert sample_line(record(provenance="embedding:prompt", statuses=statuses)) == (
        "[05515938] hit (embedding:prompt) | latency=0.032s | answer match=True | exact_text=miss, "
        "embedding:prompt=hit, kv_cache=hit"
    )
    assert sample_line(record(match=None, statuses={"exact_text": Status.MISS})) == (
        "[05515938] miss | latency=0.032s | exact_text=miss"
    )


def test_samples_and_settings_are_written(tmp_path: Path) -> None:
    path = tmp_path / "s\udcff.jsonl"  # a name that is no Unicode
    chosen = settings(tmp_path, samples_out=path, baseline=True)
    with closing(quiet(chosen)) as listener:
        go([CAR, CAR_AGAIN], chosen, ScriptedEngine(ANSWERS, store=set()), ScriptedEngine(ANSWERS), listener=listener)
    first, second = (json.loads(x) for x in path.read_text(encoding="utf-8").splitlines())
    assert first["hit"] is False
    assert (second["hit"], second["provenance"], second["cold"]["text"]) == (True, "text:normalised", "blue")
    header = json.loads(path.with_name(path.name + ".settings.json").read_text(encoding="utf-8"))
    assert header["settings"]["model"] == "facebook/opt-125m"
    assert header["settings"]["cache"]["mode"] == "live"
    assert header["settings"]["samples_out"] == str(path)


def test_an_earlier_file_stays_until_there_is_something_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text("of an earlier run\n", encoding="utf-8")
    chosen = settings(tmp_path, samples_out=path)
    failing = Failing(fails=frozenset({"q"}), store=set())
    with closing(quiet(chosen)) as listener, pytest.raises(EngineError, match="prompt too long"):
        go([Sample(str(i), "q") for i in range(9)], chosen, failing, listener=listener)
    assert failing.closed
    assert path.read_text(encoding="utf-8") == "of an earlier run\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"samples_out": "a.jsonl", "dataset": "a.jsonl"}, "--samples-out: .* another file than that of --dataset"),
        ({"samples_out": "link.jsonl", "dataset": "a.jsonl"}, "--samples-out: .* another file than that of --dataset"),
        ({"samples_out": "new", "summary_out": "./new"}, "--samples-out: .* another file than that of --summary-out"),
        ({"samples_out": "new", "summary_out": "new.settings.json"}, "than that of the settings beside --samples-out"),
    ],
)
def test_no_output_is_an_input_or_another_output(
    tmp_path: Path, flags: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"question": "q"}\n', encoding="utf-8")
    Path("link.jsonl").symlink_to("a.jsonl")
    values: dict[str, Any] = {k: v if k == "dataset" else Path(v) for k, v in flags.items()}
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, **values)


@pytest.mark.parametrize("flag", ["samples_out", "summary_out"])
def test_what_cannot_be_written_is_said_before_the_run(tmp_path: Path, flag: str) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "d.jsonl").write_text("no data set", encoding="utf-8")
    values: dict[str, Any] = {flag: tmp_path / "a file" / "out", "dataset": str(tmp_path / "d.jsonl")}
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}: .* a file that can be written"):
        execute(settings(tmp_path, **values))


# --- engines


def test_an_image_must_be_what_its_id_says(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", "red")
    media = MediaSegment(keys.media_id(path.read_bytes()), path, "a")
    assert load_image(media).size == (4, 4)
    with pytest.raises(MediaError, match="no file is known for image a"):
        load_image(replace(media, source=None))
    picture(path, "blue")
    with pytest.raises(MediaError, match="changed"):
        load_image(media)
    path.write_bytes(b"no image")
    with pytest.raises(MediaError, match="not a readable image"):
        load_image(MediaSegment(keys.media_id(b"no image"), path))
    path.unlink()
    with pytest.raises(MediaError, match="cannot be read"):
        load_image(media)


def test_the_user_turn_keeps_prompt_order() -> None:
    media = MediaSegment("0" * 64)
    segments = (TextSegment("S", Role.SYSTEM), media, TextSegment("C", Role.CONTEXT), TextSegment("Q"))
    assert system_text(segments) == "S"
    assert user_parts(segments) == [media, "C\nQ"]
