"""A run: the same samples cold and cached, one record a sample.

A cold pass, when asked for, goes first, on an engine of its own with vLLM's prefix cache alone, which is closed before
the cached pass starts; with ``--engine transformers`` each sample is answered cold and cached in turn, so that both
meet the same load. The cached pass asks the tiers, sends the canonical prompt, and tells the cache what came back.

- ``live`` sends the canonical prompt.
- ``dry-run`` looks up and records, but sends each request unchanged; exact caches (KV blocks, encoder outputs) stay
  on, since they cannot change an answer.
- ``off`` uses nothing of ours.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from semkv import plug
from semkv.cache import CacheStats, SemanticCache
from semkv.engines.base import Engine, EnginePrompt, EngineResult, MediaError
from semkv.errors import DatasetError, EngineError, SemkvError
from semkv.stores.cachedir import prepare
from semkv.stores.files import described
from semkv.types import CacheMode, MediaSegment, Namespace, Plan, Request, ReuseReport, Role, Status, TextSegment
from semkv_lab.console import (
    SAMPLES_OUT,
    SUMMARY_OUT,
    ConsoleListener,
    Listener,
    make_console,
    print_summary,
    run_header,
    try_to_write,
    write_json,
    writing,
)
from semkv_lab.datasets import load_samples
from semkv_lab.metrics import Figures, summarise
from semkv_lab.records import Cold, SampleRecord, answers_match
from semkv_lab.results import read_samples
from semkv_lab.samples import RequestBuilder, Sample, arrange, asked, label_answers
from semkv_lab.settings import Reuse, RunSettings

if TYPE_CHECKING:
    from semkv_lab.reuse import TransformersEngine

_COMMON = ("color", "material", "shape")  # GQA's evaluation script has them too
NOISE_SAMPLES = 32  # cold samples that are asked twice: 32 more answers, whatever the length of the run
_GIVE_UP_AFTER = 3  # samples that fail before one succeeded: the set-up is wrong, not a sample


@dataclass
class Progress:
    """A run and what it has so far; complete at any moment, so an interrupt loses nothing."""

    settings: RunSettings
    samples: Sequence[Sample]
    listener: Listener
    records: list[SampleRecord] = field(default_factory=list)
    cold: dict[str, Cold] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    interrupted: bool = False
    skipped: tuple[str, ...] = ()


@contextmanager
def stop_between_samples() -> Iterator[threading.Event]:
    """The first Ctrl-C inside the block is an event: the sample at hand finishes, so that records, file and engine
    agree. The second one raises KeyboardInterrupt, and so does the end of the block after a first."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
    if stop.is_set():
        raise KeyboardInterrupt


def _each(stage: str, answer: Callable[[Sample], None], done: Sized, progress: Progress) -> None:
    """Hand every sample to ``answer``, count those the engine fails on, stop between samples when asked to."""
    progress.listener.stage(stage, len(progress.samples))
    with stop_between_samples() as stop:
        for sample in progress.samples:
            if stop.is_set():
                break
            try:
                answer(sample)
            except Exception as e:
                own = plug.is_path(progress.settings.engine) and not isinstance(e, SemkvError)  # may raise anything
                if not own and not isinstance(e, EngineError):
                    raise
                progress.listener.failed(sample, e)
                progress.faults["failed samples"] += 1
                if not done and progress.faults["failed samples"] >= _GIVE_UP_AFTER:
                    raise


def _cold_answers(engine: Engine, builder: RequestBuilder, progress: Progress) -> Callable[[Sample], None]:
    """Answers a sample with the engine's own prefix cache alone, adding to ``progress.cold``.

    `NOISE_SAMPLES` of them, evenly spread, are asked a second time under a tenant, and so a cache salt, of their own:
    vLLM computes all of the prompt again, and what it keeps of that serves nobody else.
    """
    settings, samples = progress.settings, progress.samples
    spacing = max(1, len(samples) // NOISE_SAMPLES)
    twice = {s.sample_id for s in samples[::spacing][:NOISE_SAMPLES]}

    def answer(sample: Sample) -> None:
        request = builder.build(sample)
        prompt = _prompt(request.segments, settings)
        result = engine.generate(prompt)
        again = None
        if sample.sample_id in twice:
            again = engine.generate(replace(prompt, tenant=f"{settings.tenant} noise floor {sample.sample_id}"))
        progress.cold[sample.sample_id] = Cold(
            image=sample.image_name,
            match=_match(result.text, sample),
            again_text=again.text if again else None,
            again_token_ids=again.token_ids if again else None,
            asked=asked(request),
            **_copied(result, "text latency_s ttft_s prompt_tokens cached_tokens token_ids"),
        )

    return answer


def _copied(source: object, names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names.split()}


def _answer(
    sample: Sample, request: Request, engine: Engine, cache: SemanticCache | None, progress: Progress
) -> SampleRecord:
    settings = progress.settings
    report = cache.try_reuse(request) if cache is not None else ReuseReport(request, Plan(request.segments), {})
    try:
        result = _send(report, engine, settings)
    except MediaError:
        if not report.plan.substituted:
            raise
        # The donor's image is gone: a fault inside the cache, so the request goes out as it came.
        progress.faults["donor image lost"] += 1
        missed = {tier: Status.MISS if s is Status.HIT else s for tier, s in report.statuses.items()}
        report = replace(report, plan=Plan(request.segments), statuses=missed)
        result = engine.generate(_prompt(request.segments, settings))
    start = time.perf_counter()
    # What foreign KV made of a prompt is recorded nowhere, and no policy learns from it.
    if cache is not None and (settings.reuse is Reuse.INPUTS or not report.plan.substituted):
        cache.add_observation(report, result.text, metadata=_metadata(result, settings))
        if report.plan.substituted and cache.should_check(report):
            _check(report, result.text, engine, cache, settings)
    after_s = time.perf_counter() - start
    report = report.with_status(kv_cache=result.kv, fusion=result.fusion)
    match = report.plan.match
    donor_question, donor_image = _donor_inputs(report)
    return SampleRecord(
        image=sample.image_name,
        match=_match(result.text, sample),
        provenance=report.provenance,
        exactness=str(match.exactness) if match else "",
        applied=report.plan.substituted > 0,
        score=match.score if match else None,
        donor=match.entry_id if match else "",
        donor_answer=report.donor_response,
        donor_question=donor_question,
        donor_image=donor_image,
        statuses=dict(report.statuses),
        latency_s=report.lookup_s + result.latency_s,
        lookup_s=report.lookup_s,
        after_s=after_s,
        ttft_s=None if result.ttft_s is None else report.lookup_s + result.ttft_s,
        cold=progress.cold.get(sample.sample_id),
        valid=_among(result.text, sample.valid, sample),
        plausible=_among(result.text, sample.plausible, sample),
        image_file=str(sample.images[0].path or "") if sample.images else "",
        **_copied(sample, "sample_id question answer variant entailed group types full_answer"),
        **_copied(result, "text token_ids prompt_tokens cached_tokens loaded_tokens prefix_tokens finish_reason"),
    )


def _send(report: ReuseReport, engine: Engine, settings: RunSettings) -> EngineResult:
    sent = _prompt(report.plan.segments, settings)
    if settings.reuse is Reuse.INPUTS or not report.plan.substituted:
        return engine.generate(sent)
    return cast("TransformersEngine", engine).reuse(_prompt(report.request.segments, settings), sent)


def _check(report: ReuseReport, answer: str, engine: Engine, cache: SemanticCache, settings: RunSettings) -> None:
    """Answer the unchanged request of an approximate hit as well, and hand in whether the two answers agree."""
    own = report.unchanged()
    result = engine.generate(_prompt(own.plan.segments, settings))
    cache.checked(report.hit_id, cache.same_answer(result.text, answer))
    cache.add_observation(own, result.text, metadata=_metadata(result, settings))


def _metadata(result: EngineResult, settings: RunSettings) -> dict[str, str]:
    model = Path(settings.model)
    return {"finish_reason": result.finish_reason, "model": model.name if model.is_dir() else settings.model}


def _donor_inputs(report: ReuseReport) -> tuple[str, str]:
    """The donor's question and its first image's name, as far as they stand in (or would, in dry-run mode)."""
    if report.plan.match is None:
        return "", ""
    plan = report.proposed or report.plan
    donor = plan.segments[: plan.substituted]
    questions = [s.text for s in donor if isinstance(s, TextSegment) and s.role is Role.QUESTION]
    images = [s.name for s in donor if isinstance(s, MediaSegment)]
    return questions[-1] if questions else "", images[0] if images else ""


def _prompt(segments: tuple[Any, ...], settings: RunSettings) -> EnginePrompt:
    return EnginePrompt(segments, tenant=settings.tenant, max_tokens=settings.max_tokens)


def _match(text: str, sample: Sample) -> bool | None:
    return None if sample.answer is None else answers_match(text, sample.answer)


def _among(text: str, choices: Sequence[str], sample: Sample) -> bool | None:
    """Whether an answer is one of GQA's choices; what two objects have in common is one of three words."""
    if not choices:
        return None
    common = bool(sample.types) and "Common" in sample.types[2]
    return any(answers_match(text, choice) for choice in (_COMMON if common else choices))


def leave_out(progress: Progress) -> None:
    """Drop the samples that lack an image file."""
    lacking = [s for s in progress.samples if not s.complete]
    if not lacking:
        return
    progress.skipped = tuple(s.sample_id for s in lacking)
    progress.samples = [s for s in progress.samples if s.complete]
    if progress.settings.strict or not progress.samples:
        missing = sorted({image.name for s in lacking for image in s.images if image.path is None})
        raise DatasetError(
            f"{len(missing)} images have no file (the first is {missing[0]!r}): put them under the data set's images/ "
            "folder, or name the folder in GQA_IMAGE_ROOT"
        )


EngineFactory = Callable[[RunSettings, bool], Engine]
"""Makes an engine; the flag says whether our connectors are attached."""


def run(
    settings: RunSettings,
    samples: Sequence[Sample],
    make_engine: EngineFactory,
    make_cache: Callable[[RunSettings], SemanticCache],
    listener: Listener,
    baseline: Path | None = None,
) -> tuple[list[SampleRecord], Figures]:
    """Run both passes and sum up. An interrupt (Ctrl-C) ends the pass; what was answered is kept and summed up.

    Args:
        baseline: a file of samples with cold answers, in place of a cold pass.

    Raises:
        SemkvError: a setting, a file or the engine is at fault.
    """
    progress = Progress(settings, samples, listener)
    cache = make_cache(settings) if settings.cache.mode is not CacheMode.OFF else None

    def answer_cold(ask: Callable[[Sample], None]) -> None:
        def answer(sample: Sample) -> None:
            ask(sample)
            listener.cold(sample, progress.cold[sample.sample_id])

        _each("cold", answer, progress.cold, progress)

    def answer_cached(engine: Engine, builder: RequestBuilder, cold: Callable[[Sample], None] | None) -> None:
        def answer(sample: Sample) -> None:
            if cold is not None:
                cold(sample)
            record = _answer(sample, builder.build(sample), engine, cache, progress)
            progress.records.append(record)
            listener.record(record)

        _each("cached", answer, progress.records, progress)

    @contextmanager
    def started(attach: bool) -> Iterator[tuple[Engine, RequestBuilder]]:
        listener.stage("start", 0)
        with closing(make_engine(settings, attach)) as engine:
            if engine.accepts_images:
                leave_out(progress)
            yield (
                engine,
                RequestBuilder(
                    namespace=Namespace(settings.tenant, engine.fingerprint()),
                    chunk_source=settings.chunk_source,
                    chunk_window=settings.chunk_window,
                    instruction=settings.instruction,
                    images=engine.accepts_images,
                ),
            )

    try:
        if settings.baseline and not settings.in_turn and baseline is None:
            with started(attach=False) as beside:
                answer_cold(_cold_answers(*beside, progress))
        with ExitStack() as engines:
            engine, builder = engines.enter_context(started(attach=cache is not None))
            cold = None
            if baseline is not None:
                progress.cold.update(read_cold(baseline, progress.samples, builder))
            elif settings.in_turn:
                cold = _cold_answers(*engines.enter_context(started(attach=False)), progress)
            answer_cached(engine, builder, cold)
    except KeyboardInterrupt:
        progress.interrupted = True
    finally:
        stats = cache.stats() if cache is not None else CacheStats()
        if cache is not None:
            cache.close()
    summary = summarise(
        progress.records,
        list(progress.cold.values()),
        bytes_on_disk=bytes_on_disk(settings),
        interrupted=progress.interrupted,
        skipped=progress.skipped,
        refused=stats.refused + sum(stats.vetoes.values()),
        faults={**progress.faults, **{f"cache fault: {kind}": n for kind, n in stats.faults.items()}},
    )
    return progress.records, summary


def bytes_on_disk(settings: RunSettings) -> int:
    """Bytes of all files below the cache folders, but for those that other processes take away meanwhile."""
    folders = [f for f in (settings.cache.cache_dir, settings.cache.fusion_cache_dir) if f is not None]
    files = {Path(place, name).resolve() for folder in folders for place, _, names in os.walk(folder) for name in names}
    return sum(status.st_size for _, status in described(files))


# -- cold answers of an earlier run ------------------------------------------------------------


def read_cold(path: Path, samples: Sequence[Sample], builder: RequestBuilder) -> dict[str, Cold]:
    """The cold answers in a file of ``--samples-out``, by sample id."""
    there = {record.sample_id: record.cold for record in read_samples(path)}
    found = {}
    for sample in samples:
        cold = there.get(sample.sample_id)
        if cold is None or cold.asked != asked(builder.build(sample)):
            raise DatasetError(
                f"{path} has no cold answer for sample {sample.sample_id} with this model, text and picture: begin "
                "another log"
            )
        found[sample.sample_id] = replace(cold, match=_match(cold.text, sample))
    return found


# -- what `semkv run` does ------------------------------------------------------------


def execute(
    settings: RunSettings, *, quiet: bool = False, verbose: bool = False, baseline: Path | None = None
) -> Figures:
    """Run, print and write what the settings ask for; ``baseline`` as in `run`.

    Raises:
        SemkvError: a setting, a file or the engine is at fault; nothing was lost.
    """
    if not verbose:
        os.environ.setdefault("TQDM_DISABLE", "1")  # other libraries' bars; ours stays
    if settings.engine in ("vllm", "transformers"):
        from semkv.engines.vllm import check_model, set_environment

        check_model(settings.model, settings.revision)  # before a data set is loaded, which may be a download
        set_environment(verbose=verbose)  # before the cache's encoders import torch
    for key, path in ((SAMPLES_OUT, settings.samples_out), (SUMMARY_OUT, settings.summary_out)):
        if path is not None:
            try_to_write(key, path)
    samples = arrange(load_samples(settings.dataset, settings.data), settings.trace)
    if settings.cache.mode is not CacheMode.OFF:
        prepare(settings.cache, purge=settings.purge)
    console = make_console()
    with ConsoleListener(console, settings, quiet=quiet) as listener:
        _, summary = run(
            settings, samples, engine_factory(samples, verbose), lambda s: SemanticCache(s.cache), listener, baseline
        )
        if not summary["interrupted"]:
            listener.finish()
    print_summary(console, summary, settings)
    if settings.summary_out is not None:
        with writing(SUMMARY_OUT, settings.summary_out):
            write_json(settings.summary_out, {**run_header(settings), "summary": summary})
    return summary


def engine_factory(samples: list[Sample], verbose: bool = False) -> EngineFactory:
    """Makes engines of the kind that the settings name; one of the user's own as an `EngineFactory` is called."""

    def make(settings: RunSettings, attach: bool) -> Engine:
        if plug.is_path(settings.engine):
            engine = plug.load("--engine", settings.engine, settings, attach)
            own: Engine = plug.require("--engine", engine, Engine, settings.engine)
            return own
        if settings.engine in ("scripted", "labels"):
            from semkv.engines.scripted import ScriptedEngine

            if settings.engine == "scripted":
                return ScriptedEngine(name=settings.model)
            answers = label_answers(samples, settings.instruction)
            return ScriptedEngine(answer=answers, name="labels", store=set() if attach else None)
        if settings.engine == "transformers":
            from semkv_lab.reuse import TransformersEngine

            return TransformersEngine(settings, attach)
        from semkv.engines.vllm import ConnectorOptions, VllmEngine, VllmOptions

        cache = settings.cache
        stores = _copied(cache, "cache_dir fusion_cache_dir fusion")
        options = VllmOptions(
            **_copied(settings, "model revision trust_remote_code max_model_len"),
            max_images=max((len(s.images) for s in samples), default=0),
            connectors=ConnectorOptions(**stores, max_blocks=cache.max_cached_blocks) if attach else None,
            verbose=verbose,
        )
        return VllmEngine(options)

    return make
