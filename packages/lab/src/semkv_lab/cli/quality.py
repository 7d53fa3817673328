"""``semkv calibrate``, ``semkv eval-pairs`` and ``semkv eval-stream``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

CALIBRATE_EXAMPLES = """\b
Examples:
  semkv calibrate pairs.jsonl --out c.json --plot c.png
      from rows such as {"a": "Where is Rome?", "b": "In which country is Rome?", "same": 1}
"""
PAIRS_EXAMPLES = """\b
Examples:
  semkv eval-pairs pairs.jsonl --similarity-threshold 0.95
      the fixed policy at another threshold
  semkv eval-pairs pairs.jsonl --policy calibrated --calibration c.json
      what a calibration does, on pairs that it was not made from
"""
STREAM_EXAMPLES = """\b
Examples:
  semkv eval-stream requests.jsonl --policy bounded --max-error-rate 0.005 --plot s.png
      rows such as {"text": "Where is Rome?", "cluster": "rome"}: texts of one cluster have one answer
"""

_Pairs = Annotated[
    Path,
    typer.Argument(metavar="PAIRS", help="JSONL of a, b, same (0 or 1), and group where there is one; .gz too."),
]
_Encoder = Annotated[str, typer.Option(help="Sentence encoder: id or directory.")]
_Policy = Annotated[str, typer.Option(help="fixed, calibrated or bounded.")]
_Threshold = Annotated[float, typer.Option(help="Least cosine of the fixed policy.")]
_Bound = Annotated[float, typer.Option(help="Wrong approximate answers per request that the bounded policy allows.")]
_Calibration = Annotated[Path | None, typer.Option(help="What `semkv calibrate` wrote.")]
_Verify = Annotated[
    float | None, typer.Option(help="Share of approximate hits to check (bounded: 0.1; fixed, calibrated: 0).")
]
_NoGuards = Annotated[bool, typer.Option("--disable-guards", help="Without guards.")]
_Seed = Annotated[int, typer.Option(help="Of the sample that is checked.")]
_Out = Annotated[Path | None, typer.Option(help="Write the JSON here instead of printing it.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw a figure (.png, .svg, .pdf).")]


def calibrate(
    pairs: _Pairs,
    out: Annotated[Path, typer.Option(help="The calibration, for --calibration.")],
    precision: Annotated[float, typer.Option(help="Least chance of a right answer for a match.")] = 0.95,
    index_encoder: _Encoder = "all-MiniLM-L6-v2",
    plot: _Plot = None,
) -> None:
    """Fit the chance of a wrong answer from labelled pairs.

    It goes by cosine, wording and veto.
    """
    from semkv_lab.outputs import keep_apart
    from semkv_lab.quality.evaluate import calibrate_file
    from semkv_lab.quality.figures import check_plot, plot_fit

    check_plot(plot)
    _check_out("--out", out)
    keep_apart({"--out": out, "--plot": plot}, {"PAIRS": pairs})
    fitted, summary = calibrate_file(pairs, index_encoder, precision)
    fitted.calibration.save(out)
    if plot is not None:
        plot_fit(fitted, plot)
    typer.echo(json.dumps(summary, indent=1))


def eval_pairs(
    file: _Pairs,
    policy: _Policy = "fixed",
    similarity_threshold: _Threshold = 0.92,
    max_error_rate: _Bound = 0.01,
    calibration: _Calibration = None,
    verify_rate: _Verify = None,
    disable_guards: _NoGuards = False,
    index_encoder: _Encoder = "all-MiniLM-L6-v2",
    seed: _Seed = 0,
    out: _Out = None,
    plot: _Plot = None,
) -> None:
    """Precision and recall of a policy on labelled pairs."""
    from semkv_lab.outputs import keep_apart
    from semkv_lab.quality.evaluate import QualityFlags
    from semkv_lab.quality.evaluate import eval_pairs as evaluate
    from semkv_lab.quality.figures import check_plot, plot_pairs

    check_plot(plot)
    _check_out("--out", out)
    keep_apart({"--out": out, "--plot": plot}, {"PAIRS": file, "--calibration": calibration})
    flags = QualityFlags(
        policy=policy,
        similarity_threshold=similarity_threshold,
        max_error_rate=max_error_rate,
        calibration=calibration,
        verify_rate=verify_rate,
        index_encoder=index_encoder,
        guards=not disable_guards,
        seed=seed,
    )
    judged, summary = evaluate(file, flags)
    if plot is not None:
        plot_pairs(judged, plot)
    _write(summary, out)


def eval_stream(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="REQUESTS", help="JSONL of text and cluster in the order of requests, group where there is one."
        ),
    ],
    policy: _Policy = "fixed",
    similarity_threshold: _Threshold = 0.92,
    max_error_rate: _Bound = 0.01,
    calibration: _Calibration = None,
    verify_rate: _Verify = None,
    disable_guards: _NoGuards = False,
    index_encoder: _Encoder = "all-MiniLM-L6-v2",
    seed: _Seed = 0,
    out: _Out = None,
    plot: _Plot = None,
) -> None:
    """Hits and wrong answers of a policy along a stream.

    No engine is needed: the stream says which requests have the same answer.
    """
    from semkv_lab.outputs import keep_apart
    from semkv_lab.quality.evaluate import QualityFlags
    from semkv_lab.quality.evaluate import eval_stream as evaluate
    from semkv_lab.quality.figures import check_plot, plot_stream

    check_plot(plot)
    _check_out("--out", out)
    keep_apart({"--out": out, "--plot": plot}, {"REQUESTS": file, "--calibration": calibration})
    flags = QualityFlags(
        policy=policy,
        similarity_threshold=similarity_threshold,
        max_error_rate=max_error_rate,
        calibration=calibration,
        verify_rate=verify_rate,
        index_encoder=index_encoder,
        guards=not disable_guards,
        seed=seed,
    )
    outcome, summary = evaluate(file, flags)
    if plot is not None:
        plot_stream(outcome, max_error_rate if policy == "bounded" else None, plot)
    _write(summary, out)


def _check_out(key: str, path: Path | None) -> None:
    from semkv.errors import ConfigError

    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(key, str(path), "a file in a folder that exists")


def _write(summary: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(summary, indent=1)
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")
