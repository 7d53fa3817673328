"""Puts a run together: data, cache, engines, console. What ``semkv run`` calls."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from semkv.engines.base import Engine
from semkv.stores.cachedir import prepare
from semkv.types import CacheMode
from semkv_lab.datasets import Sample, load_samples
from semkv_lab.metrics import Summary
from semkv_lab.outputs import try_to_write
from semkv_lab.report import (
    SAMPLES_OUT,
    SUMMARY_OUT,
    console_listener,
    make_console,
    print_summary,
    write_summary,
)
from semkv_lab.runner import EngineFactory, run
from semkv_lab.settings import RunSettings
from semkv_lab.traces import arrange

if TYPE_CHECKING:
    from semkv.cache import SemanticCache


def execute(settings: RunSettings, *, quiet: bool = False, verbose: bool = False) -> Summary:
    """Run, print and write what the settings ask for.

    Raises:
        SemkvError: a setting, a file or the engine is at fault; nothing was lost.
    """
    if not verbose:
        os.environ.setdefault("TQDM_DISABLE", "1")  # other libraries' bars; ours stays
    if settings.engine == "vllm":
        from semkv.engines.checkpoint import check_model
        from semkv.engines.vllm import set_environment

        check_model(settings.model, settings.revision)  # before a data set is loaded, which may be a download
        set_environment(verbose=verbose)  # before the cache's encoders import torch
    for key, path in ((SAMPLES_OUT, settings.samples_out), (SUMMARY_OUT, settings.summary_out)):
        if path is not None:
            try_to_write(key, path)
    samples = arrange(load_samples(settings.dataset, settings.data), settings.trace)
    if settings.cache.mode is not CacheMode.OFF:
        prepare(settings.cache, purge=settings.purge)
    console = make_console()
    with console_listener(console, settings, quiet=quiet) as listener:
        _, summary = run(settings, samples, engine_factory(samples, verbose), make_cache, listener)
        if not summary.interrupted:
            listener.finish()
    print_summary(console, summary, settings)
    if settings.summary_out is not None:
        write_summary(settings.summary_out, settings, summary)
    return summary


def samples_images(samples: list[Sample]) -> int:
    """The most images in one sample."""
    return max((len(s.images) for s in samples), default=0)


def engine_factory(samples: list[Sample], verbose: bool = False) -> EngineFactory:
    """Makes engines of the kind that the settings name."""

    def make(settings: RunSettings, attach: bool) -> Engine:
        if settings.engine == "scripted":
            from semkv.engines.scripted import ScriptedEngine

            return ScriptedEngine(name=settings.model)
        if settings.engine == "labels":
            from semkv.engines.scripted import ScriptedEngine
            from semkv_lab.requests import label_answers

            answers = label_answers(samples, settings.instruction)
            return ScriptedEngine(answer=answers, name="labels", store=set() if attach else None)
        from semkv.engines.vllm import ConnectorOptions, VllmEngine, VllmOptions

        cache = settings.cache
        connectors = ConnectorOptions(
            cache_dir=cache.cache_dir,
            fusion_cache_dir=cache.fusion_cache_dir,
            fusion=cache.fusion,
            max_blocks=cache.max_cached_blocks,
        )
        return VllmEngine(
            VllmOptions(
                model=settings.model,
                revision=settings.revision,
                trust_remote_code=settings.trust_remote_code,
                max_model_len=settings.max_model_len,
                max_images=samples_images(samples),
                connectors=connectors if attach else None,
                verbose=verbose,
            )
        )

    return make


def make_cache(settings: RunSettings) -> SemanticCache:
    """The semantic cache of a run."""
    from semkv.cache import SemanticCache

    return SemanticCache(settings.cache)
