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
from semkv.engines import EnginePrompt, EngineResult, MediaError, load_image
from semkv.errors import ConfigError, DatasetError, EngineError
from semkv.types import MediaSegment, Request, ReuseReport, Status, TextSegment
from semkv_lab.console import figures, print_summary, sample_line
from semkv_lab.metrics import Figures
from semkv_lab.run import execute, run
from semkv_lab.samples import ImageRef, Sample, SampleRecord
from semkv_lab.scripted_engine import ScriptedEngine
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


@dataclass
class Scripted(ScriptedEngine):
    """Fails on some questions, and is interrupted at one."""

    fails: tuple[str, ...] = ()
    interrupt: str = ""

    def generate(self, prompt: EnginePrompt) -> EngineResult:
        text = question(prompt)
        if text == self.interrupt:
            raise KeyboardInterrupt
        if text in self.fails:
            raise EngineError("prompt too long")
        return super().generate(prompt)


def question(prompt: EnginePrompt) -> str:
    last = prompt.segments[-1]
    assert isinstance(last, TextSegment)
    return last.text


def settings(tmp_path: Path, **flags: Any) -> RunSettings:
    return resolve(
        **{"preset": "opt-125m", "engine": "scripted", "cache_dir": tmp_path / "cache", **flags}
    )


def go(
    samples: Sequence[Sample],
    chosen: RunSettings,
    engine: ScriptedEngine | None = None,
    cold: ScriptedEngine | None = None,
    cache: ExactCache | None = None,
    baseline: Path | None = None,
) -> tuple[list[SampleRecord], Figures]:
    """A run that prints nothing and writes what its settings say."""
    engine = engine or Scripted(store=set())
    with closing(quiet(chosen)) as listener:
        return run(
            chosen,
            samples,
            lambda _, attach: engine if attach or cold is None else cold,
            lambda s: cache or ExactCache(s),
            listener,
            baseline,
        )


def picture(path: Path, color: str) -> Path:
    Image.new("RGB", (4, 4), color).save(path)
    return path


CAR = Sample("1", "What color is the car?", "red")
CAR_AGAIN = Sample("2", "what  color is the car?", "red")
SKY = Sample("3", "What is in the sky above us?", "bird")
ANSWERS = {CAR.question: "Red.", CAR_AGAIN.question: "blue", SKY.question: "plane"}


@pytest.fixture
def shown(tmp_path: Path) -> Sample:
    return Sample(
        "1", "What is it?", "red", images=(ImageRef("a", picture(tmp_path / "a.png", "red")),)
    )


def test_a_live_run_sends_the_donors_prompt(tmp_path: Path, shown: Sample) -> None:
    engine = Scripted(ANSWERS, store=set(), block_size=2)
    records, summary = go([CAR, CAR_AGAIN, SKY], settings(tmp_path), engine)
    assert [question(p) for p in engine.prompts] == [CAR.question, CAR.question, SKY.question]
    assert [r.provenance for r in records] == ["", "text:normalised", ""]
    assert [r.match for r in records] == [True, True, False]
    assert [r.applied for r in records] == [False, True, False]
    assert (summary["samples"], summary["hits"]) == (3, 1)
    assert summary["accuracy_on_hits"]["value"] == 1.0
    assert engine.closed
    again = replace(shown, sample_id="2", question="what  is it?")
    _, record = go([replace(shown, entailed=("2",)), again], settings(tmp_path))[0]
    assert (record.donor_question, record.donor_image, record.applied) == ("What is it?", "a", True)


def test_a_dry_run_reports_but_sends_the_request_unchanged(tmp_path: Path) -> None:
    chosen = settings(tmp_path, cache_mode="dry-run")
    engine, cache = Scripted(ANSWERS, store=set()), ExactCache(chosen)
    (_, second), summary = go([CAR, CAR_AGAIN], chosen, engine, cache=cache)
    assert question(engine.prompts[1]) == CAR_AGAIN.question
    assert (second.hit, second.applied, second.donor_question) == (True, False, CAR.question)
    # What is recorded belongs to what was computed: the request's own text.
    report, response = cache.observed[1]
    assert (report.plan.segments, response) == ((TextSegment(CAR_AGAIN.question),), "blue")
    assert summary["donor_agreement"]["value"] == 0.0


def test_off_uses_nothing_of_ours(tmp_path: Path) -> None:
    attached = []

    def engine(_: RunSettings, attach: bool) -> ScriptedEngine:
        attached.append(attach)
        return Scripted(ANSWERS)

    chosen = settings(tmp_path, cache_mode="off")
    records, _ = run(
        chosen, [CAR, CAR_AGAIN], engine, lambda _: pytest.fail("no cache is made"), quiet(chosen)
    )
    assert attached == [False]
    assert [(r.hit, r.statuses) for r in records] == [
        (False, {"kv_cache": Status.SKIP, "fusion": Status.SKIP})
    ] * 2


def test_the_cold_pass_goes_first_on_an_engine_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "s\udcff.jsonl"  # a name that is no Unicode
    cold, engine = Scripted(ANSWERS, block_size=2), Scripted(ANSWERS, store=set(), block_size=2)
    chosen = settings(tmp_path, baseline=True, samples_out=path)
    _, summary = go([CAR, CAR_AGAIN], chosen, engine, cold)
    assert cold.closed
    # Each is asked twice, for the noise floor, the second time where nothing is cached.
    assert [question(p) for p in cold.prompts[1:3]] == [CAR.question, CAR_AGAIN.question]
    assert len({p.cache_salt for p in cold.prompts}) == 3
    assert (summary["noise_floor"]["tokens"]["n"], summary["noise_floor"]["tokens"]["value"]) == (
        2,
        0.0,
    )
    compared = summary["against_cold"]
    assert (compared["agreement"]["n"], compared["agreement"]["value"]) == (1, 0.0)
    assert (
        compared["identical_tokens"]["n"] == 1
    )  # the miss; the normalised hit is not a byte-equal prompt
    # The cold run computed 2 x 5 tokens, the cached run 5 + 1.
    tokens = summary["tokens"]
    assert (tokens["baseline_computed"], tokens["computed"], tokens["beyond"]) == (10, 6, 4)
    console = Console(record=True, width=120, quiet=False, file=(tmp_path / "x").open("w"))
    print_summary(console, summary, chosen)
    assert "4 tokens (40.0% of what it left to compute)" in console.export_text()

    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first["hit"] is False
    assert (second["hit"], second["provenance"], second["cold"]["text"]) == (
        True,
        "text:normalised",
        "blue",
    )


def test_a_lost_donor_image_is_a_counted_miss(tmp_path: Path, shown: Sample) -> None:
    class LosesTheImage(ExactCache):
        def stats(self) -> CacheStats:
            return replace(super().stats(), refused=2, faults={"encoder": 1})

        def try_reuse(self, request: Request) -> ReuseReport:
            report = super().try_reuse(request)
            if not report.hit:
                return report
            gone = tuple(
                replace(s, source=None) if isinstance(s, MediaSegment) else s
                for s in report.plan.segments
            )
            return replace(report, plan=replace(report.plan, segments=gone))

    chosen = settings(tmp_path)
    engine, cache = Scripted(store=set(), check_media=True), LosesTheImage(chosen)
    records, summary = go([shown, replace(shown, sample_id="2")], chosen, engine, cache=cache)
    assert summary["faults"] == {"donor image lost": 1, "cache fault: encoder": 1}
    assert summary["refused"] == 2
    assert [r.hit for r in records] == [False, False]
    assert records[1].statuses["exact_text"] is Status.MISS
    assert records[0].text == records[1].text


def test_samples_without_an_image_file_are_left_out_and_listed(tmp_path: Path) -> None:
    lacking = [Sample(str(i), "q", images=(ImageRef(f"n{i}", None),)) for i in range(3)]
    samples = [lacking[0], Sample("whole", "q"), *lacking[1:]]
    records, summary = go(samples, settings(tmp_path, baseline=True), Scripted())
    assert [r.sample_id for r in records] == ["whole"]
    assert summary["skipped"] == ["0", "1", "2"]
    assert ("left out, no image file", "3: 0, 1, 2") in figures(summary)
    assert len(go(lacking, settings(tmp_path), Scripted(accepts_images=False))[0]) == 3
    for asked, strict in ((lacking, False), (samples, True)):
        engine = Scripted()
        with pytest.raises(
            DatasetError, match=r"images without a file: 3, such as 'n0': the data set .* names no"
        ):
            go(asked, settings(tmp_path, strict=strict), engine)
        assert engine.closed


def test_gqas_annotations_reach_records_and_summary(tmp_path: Path) -> None:
    query = ("query", "attr", "x")
    samples = [
        Sample(
            "1", "what color", "red", types=query, group="c", valid=("red",), plausible=("blue",)
        ),
        Sample("3", "what", "blue"),
    ]
    records, summary = go(samples, settings(tmp_path), Scripted(answer=lambda _: "Red"))
    assert [(r.types, r.valid, r.plausible) for r in records] == [
        (query, True, False),
        ((), None, None),
    ]
    gqa = summary["gqa"]
    assert (gqa["validity"]["value"], gqa["plausibility"]["value"], gqa["distribution"]) == (
        1.0,
        0.0,
        0.0,
    )


def test_a_failing_sample_is_counted_and_an_interrupt_keeps_what_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Scripted(ANSWERS, fails=(SKY.question,), interrupt="stop", store=set())
    chosen = settings(tmp_path, samples_out=tmp_path / "samples.jsonl")
    cache = ExactCache(chosen)
    records, summary = go(
        [CAR, SKY, CAR_AGAIN, Sample("4", "stop"), CAR], chosen, engine, cache=cache
    )
    assert summary["faults"]["failed samples"] == 1
    assert summary["interrupted"]
    assert [r.sample_id for r in records] == ["1", "2"]
    assert engine.closed
    assert cache.closed
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["sample_id"] for line in lines] == ["1", "2"]

    def interrupted(_: SampleRecord) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SampleRecord, "to_json", interrupted)
    assert go([CAR], chosen)[0] == [], "what has no line is not summed up"


def test_samples_that_fail_in_both_passes_stop_neither(tmp_path: Path, shown: Sample) -> None:
    class CannotRead(Scripted):
        def generate(self, prompt: EnginePrompt) -> EngineResult:
            if any(isinstance(segment, MediaSegment) for segment in prompt.segments):
                raise MediaError("not a readable image")
            return super().generate(prompt)

    bad = [replace(shown, sample_id=f"image {n}") for n in range(4)] + [
        replace(SKY, sample_id=f"{n}") for n in "45"
    ]
    engines = [CannotRead(fails=(SKY.question,), store=store) for store in (set(), None)]
    gone = replace(shown, sample_id="gone", images=(ImageRef("b", tmp_path / "gone.png"),))
    records, summary = go(
        [*bad, gone, CAR, replace(SKY, sample_id="6")], settings(tmp_path, baseline=True), *engines
    )
    assert [r.sample_id for r in records] == [CAR.sample_id]
    assert summary["faults"]["failed samples"] == 8


def test_an_earlier_file_stays_until_there_is_something_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text("of an earlier run\n", encoding="utf-8")
    failing = Scripted(fails=("q",), store=set())
    with pytest.raises(EngineError, match="prompt too long"):
        go([Sample(str(i), "q") for i in range(9)], settings(tmp_path, samples_out=path), failing)
    assert failing.closed
    assert path.read_text(encoding="utf-8") == "of an earlier run\n"


def test_a_baseline_of_an_earlier_run_is_taken_where_the_same_is_asked(
    tmp_path: Path, shown: Sample
) -> None:
    path, cold = tmp_path / "cold.jsonl", Scripted()
    go([shown, SKY], settings(tmp_path, samples_out=path, baseline=True))
    records, _ = go(
        [replace(shown, answer="blue"), SKY], settings(tmp_path), cold=cold, baseline=path
    )
    assert not cold.prompts
    assert all(r.cold is not None and r.cold.text == r.text for r in records)
    assert records[0].cold is not None
    assert records[0].cold.match is False  # judged by the label of now

    def refused(engine: ScriptedEngine | None = None, **fields: Any) -> None:
        with pytest.raises(DatasetError, match=r"cold\.jsonl has no cold answer for sample (1|9) "):
            go([replace(shown, **fields)], settings(tmp_path), engine, baseline=path)

    refused(question="Where is it?")
    refused(context="It is dark.")
    refused(sample_id="9")
    refused(Scripted(store=set(), name="other weights"))
    picture(tmp_path / "a.png", "blue")
    refused()


def test_the_line_of_a_sample() -> None:
    statuses = {"exact_text": Status.MISS, "embedding:prompt": Status.HIT, "kv_cache": Status.HIT}
    assert sample_line(record(provenance="embedding:prompt", statuses=statuses)) == (
        "[05515938] hit (embedding:prompt) | latency=0.032s | answer match=True | exact_text=miss, "
        "embedding:prompt=hit, kv_cache=hit"
    )
    assert sample_line(record(match=None, statuses={"exact_text": Status.MISS})) == (
        "[05515938] miss | latency=0.032s | exact_text=miss"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"samples_out": "a.jsonl"}, "--samples-out: .* another file than that of --dataset"),
        ({"samples_out": "link.jsonl"}, "--samples-out: .* another file than that of --dataset"),
        (
            {"samples_out": "new", "summary_out": "./new"},
            "--samples-out: .* another file than that of --summary-out",
        ),
        ({"samples_out": "a file/out"}, "--samples-out: .* a place that can be written"),
        ({"summary_out": "a file/out"}, "--summary-out: .* a place that can be written"),
    ],
)
def test_an_output_is_no_input_no_other_output_and_can_be_written(
    tmp_path: Path, flags: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("no data set", encoding="utf-8")
    Path("link.jsonl").symlink_to("a.jsonl")
    Path("a file").touch()
    with pytest.raises(ConfigError, match=message):
        execute(
            settings(
                tmp_path, dataset="a.jsonl", **{name: Path(value) for name, value in flags.items()}
            )
        )


def test_an_image_must_be_what_its_id_says(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", "red")
    media = MediaSegment(keys.media_id(path.read_bytes()), path, "a")
    assert load_image(media).size == (4, 4)

    def refused(message: str, shown: MediaSegment = media) -> None:
        with pytest.raises(MediaError, match=message):
            load_image(shown)

    refused("no file is known for image a", replace(media, source=None))
    picture(path, "blue")
    refused("changed")
    path.write_bytes(b"no image")
    refused("not a readable image", MediaSegment(keys.media_id(b"no image"), path))
    path.unlink()
    refused("cannot be read")
