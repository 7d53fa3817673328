"""A run: the same samples without and with the cache, one record a sample.

A cold pass, when asked for, goes first, on an engine of its own with vLLM's prefix cache alone, which is closed before
the cached pass starts. The cached pass asks the tiers, sends the canonical prompt, and tells the cache what came back.

- ``live`` sends the canonical prompt.
- ``dry-run`` looks up and records, but sends each request unchanged; exact caches (KV blocks, encoder outputs) stay
  on, since they cannot change an answer.
- ``off`` uses nothing of ours.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from semkv import plug
from semkv.cache import CacheStats, SemanticCache
from semkv.engines import Engine, EnginePrompt, EngineResult, MediaError
from semkv.errors import DatasetError, EngineError, SemkvError
from semkv.stores.maintenance import prepare
from semkv.types import (
    CacheMode,
    MediaSegment,
    Namespace,
    Plan,
    ReuseReport,
    Role,
    Status,
    TextSegment,
)
from semkv_lab.best_layer import BestLayerCache
from semkv_lab.console import (
    SAMPLES_OUT,
    SUMMARY_OUT,
    Listener,
    make_console,
    print_summary,
    run_header,
    try_to_write,
    write_json,
)
from semkv_lab.datasets import load_samples
from semkv_lab.inputs import inputs
from semkv_lab.metrics import Figures, summarise
from semkv_lab.samples import (
    Cold,
    RequestBuilder,
    Sample,
    SampleRecord,
    answers_match,
    arrange,
    asked,
    label_answers,
    read_rows,
)
from semkv_lab.settings import RunSettings
from semkv_lab.worth import Savings, worth
from semkv_stores.files import described

if TYPE_CHECKING:
    from semkv_lab.reuse import TransformersEngine

_COMMON = ("color", "material", "shape")  # GQA's evaluation script has them too
NOISE_SAMPLES = (
    32  # cold samples that are asked twice: 32 more answers, whatever the length of the run
)
_GIVE_UP_AFTER = 3  # samples that fail before one succeeded: the set-up is wrong, not a sample


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
    """
    cache = make_cache(settings) if settings.cache.mode is not CacheMode.OFF else None
    runner = _Runner(
        settings=settings,
        samples=samples,
        _make_engine=make_engine,
        _listener=listener,
        _cache=cache,
    )
    interrupted = False
    try:
        runner.run(baseline)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        stats = cache.stats() if cache is not None else CacheStats()
        found = worth(cache.account) if cache is not None else {}
        if cache is not None:
            cache.close()
    summary = summarise(
        runner.records,
        list(runner.cold.values()),
        bytes_on_disk=bytes_on_disk(settings),
        interrupted=interrupted,
        skipped=runner.skipped,
        worth=found,
        refused=stats.refused + sum(stats.vetoes.values()),
        faults={**runner.faults, **{f"cache fault: {kind}": n for kind, n in stats.faults.items()}},
    )
    return runner.records, summary


@dataclass
class _Runner:
    """A run and what it has so far; complete at any moment, so an interrupt loses nothing."""

    settings: RunSettings
    samples: Sequence[Sample]
    _make_engine: EngineFactory
    _listener: Listener
    _cache: SemanticCache | None
    records: list[SampleRecord] = field(default_factory=list)
    cold: dict[str, Cold] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)
    _failed: set[str] = field(default_factory=set)
    _savings: Savings | None = None

    def __post_init__(self) -> None:
        if self._cache is not None:
            self._savings = Savings(self._cache.account)

    def run(self, baseline: Path | None) -> None:
        if self.settings.baseline and baseline is None:
            with self._started(attach=False) as (engine, builder):
                self._each("without semkv", partial(self._answer_cold, engine, builder), self.cold)
        with self._started(attach=self._cache is not None) as (engine, builder):
            if baseline is not None:
                self.cold |= read_cold(baseline, self.samples, builder)
            self._each("with semkv", partial(self._answer, engine, builder), self.records)

    @contextmanager
    def _started(self, attach: bool) -> Iterator[tuple[Engine, RequestBuilder]]:
        settings = self.settings
        with self._listener.console.status("starting the engine"):
            made = self._make_engine(settings, attach)
        with closing(made) as engine:
            if engine.accepts_images:
                self._leave_out()
            builder = RequestBuilder(
                namespace=Namespace(settings.tenant, engine.fingerprint()),
                images=engine.accepts_images,
                chunk_source=settings.chunk_source,
                chunk_window=settings.chunk_window,
                instruction=settings.instruction,
            )
            yield engine, builder

    def _leave_out(self) -> None:
        """Drop the samples that lack an image file."""
        lacking = [s for s in self.samples if not s.complete]
        self.skipped += [s.sample_id for s in lacking]
        self.samples = [s for s in self.samples if s.complete]
        if lacking and (self.settings.strict or not self.samples):
            missing = {
                image.name: image for s in lacking for image in s.images if image.path is None
            }
            first = missing[min(missing)]
            where = first.sought or f"the data set {self.settings.dataset} names no file for it"
            raise DatasetError(
                f"images without a file: {len(missing)}, such as {first.name!r}: {where}"
            )

    def _each(
        self,
        stage: str,
        answer: Callable[[Sample], None],
        done: Collection[Any],
    ) -> None:
        """Hand every sample to ``answer``, and count those the engine fails on."""
        alike = 0
        for sample in self._listener.track(self.samples, stage):
            try:
                answer(sample)
            except Exception as e:
                # May raise anything.
                own = plug.is_path(self.settings.engine) and not isinstance(e, SemkvError)
                if not own and not isinstance(e, EngineError):
                    raise
                self._failed.add(sample.sample_id)
                self.faults["failed samples"] = len(self._failed)
                self._listener.say(f"[{sample.sample_id}] failed | {e}")
                # An image that cannot be read is that sample's fault.
                alike += not isinstance(e, MediaError)
                if not done and alike >= _GIVE_UP_AFTER:
                    raise

    def _answer_cold(self, engine: Engine, builder: RequestBuilder, sample: Sample) -> None:
        """Answer without semkv. `NOISE_SAMPLES`, evenly spread, are asked a second time under a tenant, and so a cache
        salt, of their own: vLLM computes all of the prompt again, and what it keeps of that serves nobody else."""
        request = builder.build(sample)
        prompt = self._prompt(request.segments)
        result, again = engine.generate(prompt), None
        if sample.sample_id in self._twice:
            again = engine.generate(
                replace(prompt, tenant=f"{self.settings.tenant} noise floor {sample.sample_id}")
            )
        self.cold[sample.sample_id] = Cold(
            image=sample.image_name,
            match=_match(result.text, sample),
            again_text=again.text if again else None,
            again_token_ids=again.token_ids if again else None,
            asked=asked(request),
            text=result.text,
            latency_s=result.latency_s,
            ttft_s=result.ttft_s,
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            token_ids=result.token_ids,
        )

    @cached_property
    def _twice(self) -> set[str]:
        spacing = max(1, len(self.samples) // NOISE_SAMPLES)
        return {s.sample_id for s in self.samples[::spacing][:NOISE_SAMPLES]}

    def _answer(self, engine: Engine, builder: RequestBuilder, sample: Sample) -> None:
        request = builder.build(sample)
        if self._cache is not None:
            report = self._cache.try_reuse(request)
        else:
            report = ReuseReport(request, Plan(request.segments), {})
        report, result = self._ask(report, engine)
        after_s = self._tell(report, result, engine)
        report = report.with_status(kv_cache=result.kv, fusion=result.fusion)
        match = report.plan.match
        donor_question, donor_image = _donor_inputs(report)
        record = SampleRecord(
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
            cold=self.cold.get(sample.sample_id),
            valid=_among(result.text, sample.valid, sample),
            plausible=_among(result.text, sample.plausible, sample),
            sample_id=sample.sample_id,
            question=sample.question,
            answer=sample.answer,
            variant=sample.variant,
            entailed=sample.entailed,
            group=sample.group,
            types=sample.types,
            text=result.text,
            token_ids=result.token_ids,
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            loaded_tokens=result.loaded_tokens,
            prefix_tokens=result.prefix_tokens,
            finish_reason=result.finish_reason,
        )
        self._listener.write(record)
        self.records.append(record)
        self._listener.show(record)

    def _ask(self, report: ReuseReport, engine: Engine) -> tuple[ReuseReport, EngineResult]:
        """The answer, and what was sent for it.

        Where the donor's image is gone, a fault inside the cache, the request goes out as it came.
        """
        try:
            return report, self._send(report, engine)
        except MediaError:
            if not report.plan.substituted:
                raise
        self.faults["donor image lost"] += 1
        missed = {
            tier: Status.MISS if s is Status.HIT else s for tier, s in report.statuses.items()
        }
        report = replace(report, plan=Plan(report.request.segments), statuses=missed)
        return report, self._send(report, engine)

    def _tell(self, report: ReuseReport, result: EngineResult, engine: Engine) -> float:
        """Tell the cache what came back, and check a hit where that is due; returns the seconds that it took.

        What foreign KV made of a prompt is recorded nowhere, and no policy learns from it.
        """
        start = time.perf_counter()
        cache = self._cache
        if self._savings is not None:
            self._savings.note(report, result)
        if cache is not None and (self.settings.reuse == "inputs" or not report.plan.substituted):
            cache.add_observation(report, result.text, metadata=self._metadata(result))
            if report.plan.substituted and cache.should_check(report):
                self._check(report, result.text, engine, cache)
        return time.perf_counter() - start

    def _send(self, report: ReuseReport, engine: Engine) -> EngineResult:
        sent = self._prompt(report.plan.segments)
        if self.settings.reuse == "inputs" or not report.plan.substituted:
            return engine.generate(sent)
        return cast("TransformersEngine", engine).reuse(self._prompt(report.request.segments), sent)

    def _check(
        self, report: ReuseReport, answer: str, engine: Engine, cache: SemanticCache
    ) -> None:
        """Answer the unchanged request of an approximate hit as well, and hand in whether the two answers agree."""
        own = report.unchanged()
        result = engine.generate(self._prompt(own.plan.segments))
        cache.checked(report.hit_id, cache.same_answer(result.text, answer))
        cache.add_observation(own, result.text, metadata=self._metadata(result))

    def _metadata(self, result: EngineResult) -> dict[str, str]:
        model = Path(self.settings.model)
        return {
            "finish_reason": result.finish_reason,
            "model": model.name if model.is_dir() else self.settings.model,
        }

    def _prompt(self, segments: tuple[Any, ...]) -> EnginePrompt:
        return EnginePrompt(
            segments,
            tenant=self.settings.tenant,
            max_tokens=self.settings.max_tokens,
        )


def _donor_inputs(report: ReuseReport) -> tuple[str, str]:
    """The donor's question and its first image's name, as far as they stand in (or would, in dry-run mode)."""
    if report.plan.match is None:
        return "", ""
    plan = report.proposed or report.plan
    donor = plan.segments[: plan.substituted]
    questions = [s.text for s in donor if isinstance(s, TextSegment) and s.role is Role.QUESTION]
    images = [s.name for s in donor if isinstance(s, MediaSegment)]
    return questions[-1] if questions else "", images[0] if images else ""


def _match(text: str, sample: Sample) -> bool | None:
    return None if sample.answer is None else answers_match(text, sample.answer)


def _among(
    text: str,
    choices: Sequence[str],
    sample: Sample,
) -> bool | None:
    """Whether an answer is one of GQA's choices; what two objects have in common is one of three words."""
    if not choices:
        return None
    common = bool(sample.types) and "Common" in sample.types[2]
    return any(answers_match(text, choice) for choice in (_COMMON if common else choices))


def bytes_on_disk(settings: RunSettings) -> int:
    """Bytes of all files below the cache folders, but for those that other processes take away meanwhile."""
    folders = [
        f for f in (settings.cache.cache_dir, settings.cache.fusion_cache_dir) if f is not None
    ]
    files = {file.resolve() for folder in folders for file in folder.rglob("*")}
    return sum(status.st_size for _, status in described(files))


def read_cold(
    path: Path,
    samples: Sequence[Sample],
    builder: RequestBuilder,
) -> dict[str, Cold]:
    """The cold answers in a file of ``--samples-out``, by sample id."""
    there = {
        record.sample_id: record.cold for record in read_rows(path, SampleRecord, cut_off=True)
    }
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
    settings: RunSettings,
    *,
    quiet: bool = False,
    verbose: bool = False,
    baseline: Path | None = None,
) -> Figures:
    """Run, print and write what the settings ask for; ``baseline`` as in `run`."""
    started = datetime.now(UTC)
    if not verbose:
        os.environ.setdefault("TQDM_DISABLE", "1")  # other libraries' bars; ours stays
    if settings.engine in ("vllm", "transformers"):
        from semkv_lab.vllm_engine import check_model, set_environment

        # Before a data set is loaded, which may be a download.
        check_model(settings.model, settings.revision)
        set_environment(verbose=verbose)  # before the cache's encoders import torch
    for key, path in ((SAMPLES_OUT, settings.samples_out), (SUMMARY_OUT, settings.summary_out)):
        if path is not None:
            try_to_write(key, path)
    loaded = load_samples(settings.dataset, settings.data)
    made_from = inputs(settings, loaded) if settings.summary_out is not None else []
    samples = arrange(loaded, settings.data)
    if settings.cache.mode is not CacheMode.OFF:
        prepare(settings.cache, purge=settings.purge)
    console = make_console()
    with closing(Listener(console, settings, quiet=quiet)) as listener:
        make = partial(make_engine, samples=samples, verbose=verbose)
        _, summary = run(settings, samples, make, make_cache, listener, baseline)
        if not summary["interrupted"]:
            listener.write()  # of a run without records, too
    print_summary(console, summary, settings)
    if settings.summary_out is not None:
        seconds = round(time.time() - started.timestamp(), 1)
        found = {
            **run_header(settings),
            "started": started.isoformat(timespec="seconds"),
            "seconds": seconds,
            "inputs": [asdict(one) for one in made_from],
            "summary": summary,
        }
        write_json(SUMMARY_OUT, settings.summary_out, found)
    return summary


def make_cache(settings: RunSettings) -> SemanticCache:
    """The cache that ``--match`` names."""
    if settings.match == "all":
        return SemanticCache(settings.cache)
    return BestLayerCache(settings.cache)


def make_engine(
    settings: RunSettings, attach: bool, samples: Sequence[Sample], verbose: bool = False
) -> Engine:
    """An engine of the kind that the settings name; one of the user's own gets the settings and ``attach``."""
    if plug.is_path(settings.engine):
        engine = plug.load("--engine", settings.engine, settings, attach)
        own: Engine = plug.require("--engine", engine, Engine, settings.engine)
        return own
    if settings.engine in ("scripted", "labels"):
        from semkv_lab.scripted_engine import ScriptedEngine

        if settings.engine == "scripted":
            return ScriptedEngine(name=settings.model)
        answers = label_answers(samples, settings.instruction)
        return ScriptedEngine(
            answer=answers,
            name="labels",
            store=set() if attach else None,
        )
    if settings.engine == "transformers":
        from semkv_lab.reuse import TransformersEngine

        return TransformersEngine(settings, attach)
    from semkv_lab.vllm_engine import ConnectorOptions, VllmEngine, VllmOptions

    cache = settings.cache
    stores = ConnectorOptions(
        cache_dir=cache.cache_dir,
        fusion_cache_dir=cache.fusion_cache_dir,
        fusion=cache.fusion,
        max_blocks=cache.max_cached_blocks,
    )
    options = VllmOptions(
        model=settings.model,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        max_model_len=settings.max_model_len,
        max_images=max((len(s.images) for s in samples), default=0),
        connectors=stores if attach else None,
        verbose=verbose,
    )
    return VllmEngine(options)
