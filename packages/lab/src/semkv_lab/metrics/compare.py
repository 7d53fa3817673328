"""A run compared with the same samples run cold: on vLLM with its own prefix cache and encoder cache alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from semkv_lab.metrics.intervals import Estimate, mean, median, share
from semkv_lab.metrics.quality import accuracy, cold_accuracy, consistency
from semkv_lab.metrics.records import Cold, SampleRecord, answers_match


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens of all samples, and where those that were not computed came from.

    ``beyond`` is what our caches saved over vLLM's own prefix cache: tokens the baseline computed less tokens this
    run computed. None without a baseline.
    """

    prompt: int
    computed: int
    not_computed: int
    from_store: int
    from_prefix_cache: int
    baseline_prompt: int | None = None
    baseline_computed: int | None = None
    baseline_not_computed: int | None = None
    beyond: int | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """What a request saved over vLLM's prefix cache and encoder cache: cold less cached, sample by sample.

    The lookup is paid for in the times, recording and checks are not: they come after the answer (``after_s`` of a
    record). Negative where the cache costs more than it saves.

    Attributes:
        tokens: mean of computed prompt tokens saved a request.
        latency_s: mean seconds saved a request; ``latency_p50_s`` the median.
        ttft_s: mean seconds saved to the first token.
    """

    tokens: Estimate
    latency_s: Estimate
    latency_p50_s: Estimate
    ttft_s: Estimate


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """What differs when the same prompt is asked twice on the baseline engine, no cache of ours near.

    The first time it is answered as the cold pass goes, prefix cache and all; the second time under a cache salt of its
    own, so that vLLM computes all of it again. A difference from the cold answers below these shares says nothing.

    Attributes:
        answers: share of prompts whose two answers differ (`answers_match`).
        tokens: share of prompts whose generated tokens differ.
    """

    answers: Estimate
    tokens: Estimate


@dataclass(frozen=True, slots=True)
class AgainstCold:
    """Hits compared with the same samples run cold.

    Attributes:
        accuracy_on_hits, cold_accuracy_on_hits: on the same samples.
        agreement: share of hits whose answer equals the cold one (`answers_match`); ``agreement_all`` of all samples.
        identical_tokens: share of all samples that sent their own prompt or a byte-equal one, whose tokens equal the
            cold run's one by one.
        wrong_hits: hits that answer wrongly where the cold run was right.
        gained_hits: hits that answer rightly where the cold run was wrong.
        speedup: median of cold latency over cached latency, sample by sample, over hits.
        consistency: GQA's, of the cold answers.
    """

    n: int
    accuracy_on_hits: Estimate
    cold_accuracy_on_hits: Estimate
    agreement: Estimate
    agreement_all: Estimate
    identical_tokens: Estimate
    wrong_hits: int
    gained_hits: int
    speedup: Estimate
    consistency: Estimate


def tokens(records: Sequence[SampleRecord]) -> Tokens:
    """Prompt tokens, split by where they came from."""
    prompt, computed = sum(r.prompt_tokens for r in records), sum(r.computed_tokens for r in records)
    cold = [r.cold for r in records if r.cold is not None]
    parts: dict[str, int] = {}
    if cold and len(cold) == len(records):
        cold_prompt, cold_computed = sum(c.prompt_tokens for c in cold), sum(c.computed_tokens for c in cold)
        parts = {
            "baseline_prompt": cold_prompt,
            "baseline_computed": cold_computed,
            "baseline_not_computed": cold_prompt - cold_computed,
            "beyond": cold_computed - computed,
        }
    return Tokens(
        prompt=prompt,
        computed=computed,
        not_computed=prompt - computed,
        from_store=sum(r.loaded_tokens or 0 for r in records),
        from_prefix_cache=sum(r.prefix_tokens for r in records),
        **parts,
    )


def saved(records: Iterable[SampleRecord]) -> Saved | None:
    """What the records saved over their cold selves; None where none has one."""
    pairs = [(r, r.cold) for r in records if r.cold is not None]
    if not pairs:
        return None
    seconds = [(r.image, c.latency_s - r.latency_s) for r, c in pairs]
    return Saved(
        tokens=mean([(r.image, c.computed_tokens - r.computed_tokens) for r, c in pairs]),
        latency_s=mean(seconds),
        latency_p50_s=median(seconds),
        ttft_s=mean(
            [(r.image, c.ttft_s - r.ttft_s) for r, c in pairs if c.ttft_s is not None and r.ttft_s is not None]
        ),
    )


def noise_floor(cold: Iterable[Cold]) -> NoiseFloor | None:
    """The noise floor over the cold samples that were asked twice; None where none was."""
    twice = [(c, c.again_text) for c in cold if c.again_text is not None]
    if not twice:
        return None
    return NoiseFloor(
        answers=share([(c.image, not answers_match(c.text, again)) for c, again in twice]),
        tokens=share([(c.image, c.token_ids != c.again_token_ids) for c, _ in twice]),
    )


def against_cold(records: Sequence[SampleRecord]) -> AgainstCold | None:
    """Hits against the same samples run cold; None without a baseline."""
    pairs = [(r, r.cold) for r in records if r.cold is not None]
    if not pairs:
        return None
    hits = [(r, c) for r, c in pairs if r.hit and r.applied]
    exact = [(r, c) for r, c in pairs if not r.applied or r.exactness == "exact"]
    judged = [(r.match, c.match) for r, c in hits if r.match is not None and c.match is not None]
    return AgainstCold(
        n=len(hits),
        accuracy_on_hits=accuracy(r for r, _ in hits),
        cold_accuracy_on_hits=cold_accuracy(c for _, c in hits),
        agreement=share([(r.image, answers_match(r.text, c.text)) for r, c in hits]),
        agreement_all=share([(r.image, answers_match(r.text, c.text)) for r, c in pairs]),
        identical_tokens=share([(r.image, r.token_ids == c.token_ids) for r, c in exact]),
        wrong_hits=sum(not now and before for now, before in judged),
        gained_hits=sum(now and not before for now, before in judged),
        speedup=median([(r.image, c.latency_s / r.latency_s) for r, c in hits if r.latency_s > 0]),
        consistency=consistency(records, cold=True),
    )
