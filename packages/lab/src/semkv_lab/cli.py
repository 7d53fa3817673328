"""The commands that this package adds to ``semkv``; nothing heavy is imported before a command needs it."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from semkv.command_line import command_line
from semkv.config import PolicyConfig
from semkv.errors import ConfigError, DatasetError
from semkv.user_files import parse_json
from semkv_lab.console import keep_apart, make_console, try_to_write, write_json
from semkv_lab.settings import FLAT, RunSettings, SemanticFlags, SweepFlags, fill_from_preset

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def _examples(text: str) -> str:
    return f"Examples:\n\n```\n{text.strip(chr(10))}\n```"


run = command_line(
    fill_from_preset,
    help_epilogue=_examples("""
  semkv run --baseline --max-samples 128
      the bundled model on its own questions, compared with vLLM's prefix cache
  semkv run --preset qwen3-vl-2b --dataset-root /data/gqa --cache-mode dry-run
      report what would hit, send every request unchanged
  semkv run --model facebook/opt-125m --dataset prompts.jsonl --chunk-source full
      prompts of your own
"""),
)


@run.default
def _run(
    *,
    settings: Annotated[RunSettings | None, FLAT] = None,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative="")] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative="")] = False,
) -> None:
    """Print a line for each sample, then what was saved and at what accuracy.

    Args:
        quiet: No line for each sample.
        verbose: vLLM's own log, too.
    """
    from semkv_lab.run import execute

    summary = execute(settings or RunSettings(), quiet=quiet, verbose=verbose)
    if summary["interrupted"]:
        sys.exit(EXIT_INTERRUPTED)


sweep = command_line(
    help_epilogue=_examples("""
  semkv sweep --specs my.toml --log-file a/sweep.csv --samples-dir a --resume
      every experiment of the file, each in its own process, one row each.
      --resume continues a stopped sweep
  CUDA_VISIBLE_DEVICES=1 semkv sweep --specs my.toml --log-file b/sweep.csv \\
      --samples-dir b --only large
      some experiments on another GPU, with their own log; semkv report
      takes several logs
  semkv sweep --specs my.toml --log-file a/sweep.csv --samples-dir a \\
      --ray 10.0.0.5:6379
      one log, the experiments on all machines of a Ray cluster; --ray local
      for the GPUs of this machine
""")
)


@sweep.default
def _sweep(*, flags: Annotated[SweepFlags, FLAT]) -> None:
    """A failed experiment is a row with its error. Ctrl-C leaves a log that --resume goes on with."""
    from semkv_lab.sweep import run_sweep

    if run_sweep(flags, make_console()):
        sys.exit(EXIT_FAILED)


report = command_line(
    help_epilogue=_examples("""
  semkv report runs/a/sweep.csv runs/b/sweep.csv --out both.html
      one page of two sweeps, without other files
  semkv report runs/a/sweep.csv --out a.md
      Markdown, with the figures in the folder a
""")
)


@report.default
def _report(
    *logs: Annotated[Path, Parameter(required=True)],
    out: Path = Path("report.html"),
) -> None:
    """A page named .md is Markdown, any other HTML.

    Args:
        logs: sweep.csv or sweep.jsonl, one or several sweeps together.
        out: The page.
    """
    from semkv_lab.report import write_report

    write_report(logs, out)
    print(out)


calibrate = command_line(
    help_epilogue=_examples("""
  semkv calibrate pairs.jsonl --out c.json
      from rows such as
      {"a": "Where is Rome?", "b": "In which country is Rome?", "same": 1}
""")
)


@calibrate.default
def _calibrate(
    pairs: Path,
    /,
    *,
    out: Path,
    precision: float = 0.95,
    index_encoder: str = PolicyConfig.index_encoder,
) -> None:
    """Fit the chance of a wrong answer from labeled pairs, by cosine and wording, where no guard objects.

    Args:
        pairs: JSONL of a, b, same (0 or 1), and optionally group; .gz too.
        out: The calibration, for --calibration.
        precision: Least chance of a right answer for a match.
        index_encoder: Sentence encoder: id or directory.
    """
    _check_output(out, PAIRS=pairs)
    from semkv_lab.semantic import calibrate

    _write(calibrate(pairs, out, index_encoder, precision), None)


eval_pairs = command_line(
    help_epilogue=_examples("""
  semkv eval-pairs pairs.jsonl --policy calibrated --calibration c.json
      measure a calibration, on pairs that it was not made from
""")
)


@eval_pairs.default
def _eval_pairs(
    pairs: Path,
    /,
    *,
    flags: Annotated[PolicyConfig | None, FLAT] = None,
    out: Path | None = None,
) -> None:
    """Precision of a policy on labeled pairs, and how many of each kind hit.

    Args:
        pairs: JSONL of a, b, same (0 or 1), and optionally group; .gz too.
        out: Write the JSON here instead of printing it.
    """
    flags = flags or PolicyConfig()
    _check_output(out, PAIRS=pairs, calibration=flags.calibration)
    from semkv_lab.semantic import eval_pairs

    _write(eval_pairs(pairs, flags), out)


eval_stream = command_line(
    help_epilogue=_examples("""
  semkv eval-stream requests.jsonl --policy bounded --max-error-rate 0.005
      rows such as {"text": "Where is Rome?", "cluster": "rome"};
      texts of one cluster have one answer
""")
)


@eval_stream.default
def _eval_stream(
    requests: Path,
    /,
    *,
    flags: Annotated[PolicyConfig | None, FLAT] = None,
    out: Path | None = None,
) -> None:
    """Hits and wrong answers of a policy along a stream.

    No engine is needed: the stream says which requests have the same answer.

    Args:
        requests: JSONL of text and cluster in the order of requests, and optionally group.
        out: Write the JSON here instead of printing it.
    """
    flags = flags or PolicyConfig()
    _check_output(out, REQUESTS=requests, calibration=flags.calibration)
    from semkv_lab.semantic import eval_stream

    _write(eval_stream(requests, flags), out)


bench = command_line(name="bench", help="Benchmarks that anyone can rerun.")


@bench.command(
    name="connector",
    help_epilogue=_examples("""
  semkv bench connector --connector SemKVConnector --connector ExampleConnector
      semkv's and one of vLLM's
  semkv bench connector --connector MyConnector --extra '{"folder": "$DIR"}'
      your own, which vLLM loads by a plugin
"""),
)
def _bench_connector(
    *,
    connector: tuple[str, ...] = ("SemKVConnector",),
    only: tuple[str, ...] = (),
    extra: str | None = None,
    out: Path | None = None,
) -> None:
    """Whether a KV connector of vLLM ever changes an answer; needs vLLM and a CPU.

    Each case says pass, fail, or cannot with the reason. The exit status is 1 where one failed.

    Args:
        connector: Its name in vLLM; several are compared.
        only: Cases, by default all.
        extra: Its kv_connector_extra_config as JSON; $DIR in it is an empty folder.
        out: Write versions, settings and verdicts to this JSON file.
    """
    from semkv_lab import conformance

    _check_output(out)
    settings = None if extra is None else _json_object("--extra", extra)
    found = conformance.run(
        connector, only or tuple(conformance.CASES), settings, lambda line: print(line, flush=True)
    )
    print("\n" + conformance.table(found))
    if out is not None:
        _write(found, out)
    if any(
        case["verdict"] == "fail"
        for cases in found["connectors"].values()
        for case in cases.values()
    ):
        sys.exit(EXIT_FAILED)


@bench.command(
    name="semantic",
    help_epilogue=_examples("""
  semkv bench semantic --out found.json
      every cache that is installed, on the project's own traps and paraphrases; minutes on two cores
  semkv bench semantic --parts pairs streams --pairs mine.jsonl --seeds 5
      on labeled pairs of your own: half of them ask
  semkv bench semantic --parts streams --stream requests.jsonl --caches cosine bounded --max-error-rate 0.005
      one stream of your own, two caches
"""),
)
def _bench_semantic(*, flags: Annotated[SemanticFlags | None, FLAT] = None) -> None:
    """Hits and wrong answers of semantic caches on labeled data: semkv by policy, a plain threshold, and peers.

    All caches get the same vectors, and nothing is downloaded but the encoder. A peer that is not installed is named
    with the command that installs it. Intervals are 95%.
    """
    flags = flags or SemanticFlags()
    _check_output(flags.out, pairs=flags.pairs, stream=flags.stream)
    from semkv_lab import semantic

    semantic.run(flags, make_console())


def _write(found: dict[str, Any], out: Path | None) -> None:
    if out is None:
        print(json.dumps(found, indent=1))
    else:
        write_json("--out", out, found)


def _json_object(flag: str, text: str) -> dict[str, Any]:
    """What a flag gives as JSON."""
    try:
        found = parse_json(text, flag)
    except DatasetError as error:
        raise ConfigError(flag, text, f"a JSON object ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(flag, text, "a JSON object")
    return found


def _check_output(out: Path | None, **inputs: Path | None) -> None:
    """Fail before the work, not after it."""
    keep_apart({"--out": out}, inputs)
    if out is not None:
        try_to_write("--out", out)
