"""``semkv run`` and ``semkv demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUN_EXAMPLES = """\b
Examples:
  semkv run
      the bundled model on its own questions, on CPU or GPU
  semkv run --baseline --max-samples 128
      the same, compared with vLLM's prefix cache alone
  semkv run --preset qwen3-vl-2b --dataset-root /data/gqa --cache-mode dry-run
      look up and report, send every request unchanged
  semkv run --model facebook/opt-125m --dataset prompts.jsonl --chunk-source full
      prompts of your own
  semkv run --embedding-layer prompt:384:0.9 --embedding-hook prompt
      one layer of the embedding tier, with a threshold of its own
"""


def run(
    preset: Annotated[
        str | None,
        typer.Option(
            help="minigqa (default), opt-125m, qwen3-vl-2b, internvl3.5-2b or qwen2.5-vl-7b: fills in whatever is not "
            "given here."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A checkpoint's directory, or a hub id.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub id.")] = None,
    trust_remote_code: Annotated[
        bool | None,
        typer.Option("--trust-remote-code/--no-trust-remote-code", help="Run model code that the checkpoint brings."),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus answer, in tokens.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="vllm (default); scripted: no model, for trying settings; labels: the data set's own answers."
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Partitions every cache; tenants share nothing.")] = None,
    dataset: Annotated[str | None, typer.Option(help="minigqa, gqa, gqa-text, jsonl, or a .jsonl file.")] = None,
    dataset_root: Annotated[
        Path | None,
        typer.Option(help="Folder (or .jsonl file) with the data; for GQA also GQA_ROOT."),
    ] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Such as val_balanced_instructions.")] = None,
    dataset_repo: Annotated[str | None, typer.Option(help="Hub id of GQA (lmms-lab/GQA).")] = None,
    split: Annotated[str | None, typer.Option(help="train, val, testdev ...")] = None,
    max_samples: Annotated[int | None, typer.Option(help="At most so many samples.")] = None,
    shuffle_seed: Annotated[int | None, typer.Option(help="Shuffle with this seed before cutting.")] = None,
    chunk_source: Annotated[
        str | None,
        typer.Option(help="What the tiers match on: question (default), semantic, group, combined, full."),
    ] = None,
    chunk_window: Annotated[int | None, typer.Option(help="Match on the first N characters only (0: all).")] = None,
    similarity_threshold: Annotated[float | None, typer.Option(help="Least cosine of the semantic text tier.")] = None,
    embedding_layer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:DIM[:THRESHOLD]",
            help="A layer of the embedding tier, such as prompt:384:0.8; may be repeated.",
        ),
    ] = None,
    embedding_hook: Annotated[
        str | None,
        typer.Option(help="none, prompt, vision, prompt_vision, or package.module:Factory."),
    ] = None,
    vision_encoder: Annotated[str | None, typer.Option(help="Tower behind the vision layer: id or directory.")] = None,
    index_encoder: Annotated[
        str | None, typer.Option(help="Sentence encoder of the text tiers: id or directory.")
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(help="all (default): text and image must match. any: one layer decides."),
    ] = None,
    scope: Annotated[
        str | None,
        typer.Option(help="media (default): text matches on the same image only. any."),
    ] = None,
    disable_semantic_cache: Annotated[
        bool,
        typer.Option("--disable-semantic-cache", help="Without the semantic text tier."),
    ] = False,
    disable_guards: Annotated[
        bool, typer.Option("--disable-guards", help="Let the score alone decide, whatever words changed.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(help="Who has the last word on an approximate match: fixed (default), calibrated, bounded."),
    ] = None,
    max_error_rate: Annotated[
        float | None, typer.Option(help="Wrong approximate answers per request that --policy bounded allows (0.01).")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="What `semkv calibrate` wrote.")] = None,
    verify_rate: Annotated[
        float | None,
        typer.Option(help="Share of approximate hits that are also answered unchanged and compared (bounded: 0.1)."),
    ] = None,
    disable_exact_cache: Annotated[
        bool, typer.Option("--disable-exact-cache", help="Without the exact text tier.")
    ] = False,
    disable_normalised_hits: Annotated[
        bool,
        typer.Option(
            "--disable-normalised-hits",
            help="Only byte-equal texts are the same. A question, or a few sentences of a context, that differ in "
            "typing are similar at most: other tiers that are on still find them, mostly at a cosine near 1, where "
            "threshold, guards and policy let them.",
        ),
    ] = False,
    cache_mode: Annotated[
        str | None,
        typer.Option(help="live (default), dry-run: look up but send requests unchanged, off: nothing of ours."),
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where the cache lives (SEMKV_CACHE_DIR or ~/.cache/semkv).")
    ] = None,
    enable_fusion_cache: Annotated[
        bool | None,
        typer.Option("--enable-fusion-cache/--disable-fusion-cache", help="Keep the vision encoder's outputs."),
    ] = None,
    fusion_cache_dir: Annotated[Path | None, typer.Option(help="Keep them elsewhere than under --cache-dir.")] = None,
    max_cached_blocks: Annotated[
        int | None, typer.Option(help="Bound on stored KV blocks (0: by bytes alone).")
    ] = None,
    max_entries: Annotated[
        int | None,
        typer.Option(help="Bound on entries in the catalog (100,000); the least recently used go first."),
    ] = None,
    media_mib: Annotated[int | None, typer.Option(help="Bound on stored images (4096).")] = None,
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Empty the cache first; touches nothing semkv did not write."),
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where drawn and unpacked data goes (~/.cache/semkv-data).")
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option("--baseline", help="Run the samples with vLLM's prefix cache alone first."),
    ] = False,
    baseline_from: Annotated[
        Path | None, typer.Option(help="Take the baseline from a --samples-out of an earlier run with --baseline.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="Order of the requests: in-order (default), shuffled, zipf (over images), sessions."),
    ] = None,
    trace_seed: Annotated[int | None, typer.Option(help="Seed of the trace's draws.")] = None,
    trace_requests: Annotated[int | None, typer.Option(help="So many requests, samples repeating as need be.")] = None,
    trace_exponent: Annotated[float | None, typer.Option(help="Exponent of --trace zipf (0.99).")] = None,
    samples_out: Annotated[Path | None, typer.Option(help="Write a JSON object a sample to this file.")] = None,
    summary_out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line a sample.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="vLLM's own log, too.")] = False,
) -> None:
    """Answer a data set through the cache, and measure it.

    Prints a line a sample, then what was saved and at what accuracy.
    """
    from semkv_lab.execute import execute
    from semkv_lab.settings import RunFlags, resolve

    flags = RunFlags(
        preset=preset,
        model=model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        max_model_len=max_model_len,
        max_tokens=max_tokens,
        engine=engine,
        tenant=tenant,
        dataset=dataset,
        dataset_root=dataset_root,
        dataset_config=dataset_config,
        dataset_repo=dataset_repo,
        split=split,
        max_samples=max_samples,
        shuffle_seed=shuffle_seed,
        chunk_source=chunk_source,
        chunk_window=chunk_window,
        similarity_threshold=similarity_threshold,
        embedding_layers=tuple(embedding_layer) if embedding_layer else None,
        embedding_hook=embedding_hook,
        vision_encoder=vision_encoder,
        index_encoder=index_encoder,
        match=match,
        scope=scope,
        disable_semantic_cache=disable_semantic_cache,
        disable_guards=disable_guards,
        policy=policy,
        max_error_rate=max_error_rate,
        calibration=calibration,
        verify_rate=verify_rate,
        disable_exact_cache=disable_exact_cache,
        disable_normalised_hits=disable_normalised_hits,
        cache_mode=cache_mode,
        cache_dir=cache_dir,
        fusion_cache=enable_fusion_cache,
        fusion_cache_dir=fusion_cache_dir,
        max_cached_blocks=max_cached_blocks,
        max_entries=max_entries,
        media_mib=media_mib,
        purge=purge,
        data_dir=data_dir,
        trace=trace,
        trace_seed=trace_seed,
        trace_requests=trace_requests,
        trace_exponent=trace_exponent,
        baseline=baseline,
        baseline_from=baseline_from,
        samples_out=samples_out,
        summary_out=summary_out,
    )
    summary = execute(resolve(flags), quiet=quiet, verbose=verbose)
    if summary.interrupted:
        from semkv.cli import EXIT_INTERRUPTED

        raise typer.Exit(EXIT_INTERRUPTED)


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where everything goes.")] = Path("runs/demo"),
    samples: Annotated[int, typer.Option(min=1, help="How many questions.")] = 256,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="vLLM's own log, too.")] = False,
) -> None:
    """Answer drawn visual questions three times, and compare.

    With vLLM alone; with an empty cache; and in a new process, which finds on disk what the one before left.
    """
    from semkv_lab.demo import run_demo

    run_demo(directory, samples=samples, verbose=verbose)
