"""Experiments with semkv: data sets, runs, metrics, sweeps, reports, and how far approximate hits can be trusted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load"]


def load(path: str | Path) -> pd.DataFrame:
    """Results as a pandas table: a row for each sample of ``--samples-out``, or each experiment of a sweep's log.

    Nested values become columns with dots, such as ``statuses.exact_text``, ``cold.ttft_s``, ``settings.cache.policy``
    and ``summary.hit_share.value``. Times are in seconds. Needs the extra ``pandas``.

    Raises:
        DatasetError: it is neither, or cannot be read; names file and line.
        ImportError: pandas is not installed.
    """
    from semkv_lab.results import load_table  # `import semkv_lab` stays light

    return load_table(Path(path))
