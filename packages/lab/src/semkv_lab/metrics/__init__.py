"""Figures of a run, computed from its sample records. Pure functions, no input or output.

Every figure that may vary from draw to draw comes with a 95% interval, drawn over images (`intervals`).
"""

from semkv_lab.metrics.compare import (
    AgainstCold,
    NoiseFloor,
    Saved,
    Tokens,
    against_cold,
    noise_floor,
    saved,
    tokens,
)
from semkv_lab.metrics.intervals import Estimate, Times, mean, median, share, times
from semkv_lab.metrics.quality import (
    ChrArea,
    accuracy,
    accuracy_on_hits,
    chr_area,
    chr_curve,
    cold_accuracy,
    consistency,
    given,
    stands_for,
    wrong_hit,
    wrong_hit_share,
)
from semkv_lab.metrics.records import HUGE, Cold, SampleRecord, answers_match, normalise_answer
from semkv_lab.metrics.summary import Summary, TierRow, count_statuses, summarise

__all__ = [
    "HUGE",
    "AgainstCold",
    "ChrArea",
    "Cold",
    "Estimate",
    "NoiseFloor",
    "SampleRecord",
    "Saved",
    "Summary",
    "TierRow",
    "Times",
    "Tokens",
    "accuracy",
    "accuracy_on_hits",
    "against_cold",
    "answers_match",
    "chr_area",
    "chr_curve",
    "cold_accuracy",
    "consistency",
    "count_statuses",
    "given",
    "mean",
    "median",
    "noise_floor",
    "normalise_answer",
    "saved",
    "share",
    "stands_for",
    "summarise",
    "times",
    "tokens",
    "wrong_hit",
    "wrong_hit_share",
]
