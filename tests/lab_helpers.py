"""What the tests of the experiments share."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from semkv_lab.console import Listener
from semkv_lab.samples import SampleRecord
from semkv_lab.settings import RunSettings


def record(**values: Any) -> SampleRecord:
    """A right answer without a hit, but for ``values``."""
    base: dict[str, Any] = {
        "sample_id": "05515938", "image": "a", "question": "q", "text": "red", "answer": "red", "match": True,
        "provenance": "", "exactness": "", "applied": False, "score": None, "donor": "", "donor_answer": None,
        "statuses": {}, "latency_s": 0.032, "lookup_s": 0.002, "ttft_s": 0.03, "prompt_tokens": 10,
        "cached_tokens": 0, "loaded_tokens": 0, "prefix_tokens": 0,
    }  # fmt: skip
    return SampleRecord(**{**base, **values})


def quiet(settings: RunSettings) -> Listener:
    """Writes what the settings say, and prints nothing."""
    return Listener(Console(quiet=True), settings, quiet=True)
