"""Cold answers that an earlier run left: a sweep computes them once and not with every experiment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semkv import keys
from semkv.errors import DatasetError
from semkv.types import Request
from semkv_lab.datasets import Sample
from semkv_lab.datasets.base import read_json, read_jsonl
from semkv_lab.metrics import Cold
from semkv_lab.outputs import SETTINGS

if TYPE_CHECKING:
    from semkv_lab.settings import RunSettings

# What a cold answer, its time or its cached tokens depend on; the model itself is in `asked`.
_SAME = ("engine", "tenant", "max_model_len", "max_tokens", "instruction", "trace.kind", "trace.seed", "trace.exponent",
         "data.shuffle_seed")  # fmt: skip


def asked(request: Request) -> str:
    """Digest of all that an engine is asked: model, tenant, texts and the bytes of pictures."""
    return keys.digest(
        "asked", keys.namespace_key(request.namespace), keys.chain_keys(request.segments, normalised=False)[-1]
    )


def read_cold(path: Path, samples: Sequence[Sample], settings: RunSettings) -> dict[str, Cold]:
    """The cold answers in a file of ``--samples-out``, by sample id.

    Raises:
        DatasetError: the file lacks a sample, has another question or answer under its id, or was made with settings
            under which cold answers differ.
    """
    _check_settings(path.with_name(path.name + SETTINGS), settings.to_json())
    found: dict[str, tuple[str, Any, Cold]] = {}
    for number, row in read_jsonl(path):
        if row.get("cold"):
            try:
                found[str(row["sample_id"])] = (str(row["question"]), row["answer"], Cold.from_json(row["cold"]))
            except (KeyError, TypeError, ValueError) as error:
                raise DatasetError(f"{path}, line {number}: no sample of a run ({error})") from error
    for sample in samples:
        if sample.sample_id not in found:
            raise DatasetError(f"{path} has no cold answer for sample {sample.sample_id}: run it with --baseline")
        question, answer, _ = found[sample.sample_id]
        if question != sample.question:
            raise DatasetError(f"{path}: sample {sample.sample_id} is another question there")
        if answer != sample.answer:
            raise DatasetError(
                f"{path}: sample {sample.sample_id} expects {answer!r} there, and {sample.answer!r} in the data set"
            )
    return {sample.sample_id: found[sample.sample_id][2] for sample in samples}


def check_asked(path: Path, cold: Mapping[str, Cold], requests: Sequence[Request]) -> None:
    """Refuse cold answers to something else than these requests.

    Raises:
        DatasetError: names the sample.
    """
    for request in requests:
        if cold[request.request_id].asked != asked(request):
            raise DatasetError(
                f"{path}: sample {request.request_id} was asked of another model, or with another text or picture: run "
                "it with --baseline again"
            )


def _check_settings(path: Path, now: Mapping[str, Any]) -> None:
    header = read_json(path)
    before = header.get("settings") if isinstance(header, dict) else None
    if not isinstance(before, dict):
        raise DatasetError(f"{path}: no settings of a run")
    for name in _SAME:
        there, here = _at(before, name), _at(now, name)
        if there != here:
            was, now_is = json.dumps(there), json.dumps(here)
            raise DatasetError(f"{path}: {name} was {was} when the cold answers were given, and is {now_is} now")


def _at(settings: Any, name: str) -> Any:
    for key in name.split("."):
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings
