"""Cold answers that an earlier run left: a sweep computes them once and not with every experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from semkv.errors import DatasetError
from semkv.experiments.datasets import Sample
from semkv.experiments.datasets.base import read_jsonl
from semkv.experiments.metrics import Cold


def read_cold(path: Path, samples: Sequence[Sample]) -> dict[str, Cold]:
    """The cold answers in a file of ``--samples-out``, by sample id.

    Raises:
        DatasetError: the file lacks a sample, or has other questions under its id.
    """
    found: dict[str, tuple[str, Cold]] = {}
    for number, row in read_jsonl(path):
        if row.get("cold"):
            try:
                found[str(row["sample_id"])] = (str(row["question"]), Cold.from_json(row["cold"]))
            except (KeyError, TypeError, ValueError) as error:
                raise DatasetError(f"{path}, line {number}: no sample of a run ({error})") from error
    for sample in samples:
        if sample.sample_id not in found:
            raise DatasetError(f"{path} has no cold answer for sample {sample.sample_id}: run it with --baseline")
        if found[sample.sample_id][0] != sample.question:
            raise DatasetError(f"{path}: sample {sample.sample_id} is another question there")
    return {sample.sample_id: found[sample.sample_id][1] for sample in samples}
