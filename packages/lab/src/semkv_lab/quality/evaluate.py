"""What ``semkv calibrate``, ``eval-pairs`` and ``eval-stream`` do, from files to JSON values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from semkv.encoders.text import SentenceEncoder
from semkv.guards import no_veto, veto
from semkv.tiers.checking import wilson
from semkv.tiers.policies import Decider, build_policy
from semkv_lab.quality.calibrate import Fit, fit
from semkv_lab.quality.corpus import Corpus, Item, build_corpus
from semkv_lab.quality.judge import Judgement, judge
from semkv_lab.quality.replay import Outcome, Replay
from semkv_lab.quality.rows import clusters, read_pairs, read_stream
from semkv_lab.settings import QualityFlags

Tick = Callable[[int], None]


@contextmanager
def progress() -> Iterator[Callable[[str, int], Tick]]:
    """Bars on stderr: call what is yielded with a name and a total, and the result with each step."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:

        def start(name: str, total: int) -> Tick:
            bar = bars.add_task(name, total=total)
            return lambda steps: bars.advance(bar, steps)

        yield start


def calibrate_file(path: Path, encoder_name: str, precision: float) -> tuple[Fit, dict[str, Any]]:
    """Fit a calibration from a file of pairs.

    Returns:
        The fit, and what to print.

    Raises:
        ConfigError, DatasetError: a setting or the file is at fault.
    """
    pairs = read_pairs(path)
    encoder = SentenceEncoder(encoder_name)
    items = list(clusters(pairs))
    with progress() as start:
        corpus = build_corpus(items, encoder, veto, start("encoding", len(items)))
        fitted = fit(pairs, corpus, encoder.fingerprint, precision=precision, tick=start("looking up", 5))
    curve = fitted.calibration
    summary = {
        "pairs": len(pairs),
        "same": sum(pair.same for pair in pairs),
        "texts": len(items),
        "fitted_from": "lookups among the texts" if fitted.simulated else "the pairs as they are",
        "lookups": len(fitted.lookups),
        "log_loss": {name: round(loss, 5) for name, loss in fitted.losses.items()},
        "precision": precision,
        "limit": curve.limit,
        "least_cosine": round(curve.least, 4),
        "weights": {"bias": curve.bias, **curve.weights},
        "vetoes_that_may_be_overruled": dict(curve.vetoes),
    }
    return fitted, summary


def _prepare(flags: QualityFlags, items: list[Item], start: Callable[[str, int], Tick]) -> tuple[Corpus, Decider]:
    config = flags.config()
    encoder = SentenceEncoder(config.index_encoder)
    policy = build_policy(config, encoder.fingerprint if config.calibration else "")
    distinct = list(dict.fromkeys(items))
    guard = veto if config.guards else no_veto
    return build_corpus(distinct, encoder, guard, start("encoding", len(distinct))), policy


def eval_pairs(path: Path, flags: QualityFlags) -> tuple[Judgement, dict[str, Any]]:
    """Send labelled pairs through a policy. Raises `ConfigError` and `DatasetError`."""
    config = flags.config()
    pairs = read_pairs(path)
    items = [(pair.group, text) for pair in pairs for text in (pair.a, pair.b)]
    with progress() as start:
        corpus, policy = _prepare(flags, items, start)
        judged = judge(
            pairs,
            corpus,
            policy,
            verify_rate=config.checked_share,
            seed=flags.seed,
            tick=start("judging", len(pairs)),
        )
    return judged, {
        **flags.header(),
        "pairs": judged.pairs,
        "same": judged.same,
        "accepted": judged.accepted,
        "right": judged.right,
        "vetoed": judged.vetoed,
        "precision": _short(judged.precision),
        "recall": _short(judged.recall),
        "false_positive_rate": _short(judged.false_positive_rate),
        "p_chr_auc": _short(judged.area),
    }


def eval_stream(path: Path, flags: QualityFlags) -> tuple[Outcome, dict[str, Any]]:
    """Play a stream through a policy. Raises `ConfigError` and `DatasetError`."""
    config = flags.config()
    stream = read_stream(path)
    with progress() as start:
        corpus, policy = _prepare(flags, [(asked.group, asked.text) for asked in stream], start)
        outcome = Replay(stream, corpus).play(
            policy, verify_rate=config.checked_share, seed=flags.seed, tick=start("replaying", len(stream))
        )
    low, high = wilson(outcome.wrong, outcome.requests)
    return outcome, {
        **flags.header(),
        "verify_rate": config.checked_share,
        "requests": outcome.requests,
        "hits": outcome.hits,
        "exact_hits": outcome.exact,
        "approximate_hits": outcome.approximate,
        "overruled_vetoes": outcome.overruled,
        "checks": outcome.checks,
        "wrong": outcome.wrong,
        "wrong_exact_hits": outcome.wrong_exact,
        "hit_rate": _short(outcome.hit_rate),
        "wrong_per_request": _short(outcome.wrong_rate),
        "wrong_per_request_95": [_short(low), _short(high)],
        "wrong_per_approximate_hit": _short(outcome.wrong_per_approximate),
        "wrong_per_request_at_worst": _short(outcome.worst),
        "along_the_stream": [{"requests": n, "hits": h, "wrong": w} for n, h, w in outcome.curve],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
