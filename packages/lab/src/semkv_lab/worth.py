"""What each tier cost and saved in a run, at the rates of the run's own misses.

A hit saves the difference between its own time to the first token and that of a miss with as many prompt tokens and
images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from semkv.account import Account, Typical, name_of
from semkv.engines import EngineResult
from semkv.types import ReuseReport, Status

KV = "kv_cache"
FUSION = "fusion"

Figures = dict[str, Any]


class Savings:
    """Tells an account what the hits of a run saved."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._misses = Typical()

    def note(self, report: ReuseReport, result: EngineResult) -> None:
        """The engine has answered what a lookup made of a request."""
        seconds = result.latency_s if result.ttft_s is None else result.ttft_s
        size = (result.prompt_tokens, len(report.request.media))
        tier = _credited(report, result)
        if not tier:
            self._misses.measured(seconds, *size)
            self._account.missed(seconds)
            return
        usual = self._misses.seconds(*size)
        if usual is not None:
            self._account.saved(tier, usual - seconds, counts=tier not in report.left_out)


def _credited(report: ReuseReport, result: EngineResult) -> str:
    """The tier that saved something; empty for a miss. The engine alone has the prefix of a byte-equal prompt."""
    match = report.plan.match
    if match is not None and report.rewritten:
        return name_of(match.tier)
    if result.kv is Status.HIT:
        return KV
    return FUSION if result.fusion is Status.HIT else ""


def worth(account: Account) -> Figures:
    """For a summary: the account by tier, and the engine's seconds that were saved in sum."""
    tiers = {name: asdict(figures) for name, figures in account.figures().items()}
    return {"tiers": tiers, "gpu_s": sum(row["saved_s"] for row in tiers.values())}


COLUMNS = ("tier", "asked", "hits", "spent", "saved", "left out by auto", "with hits")


def rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each tier of a summary, and one for the sum."""
    tiers = found.get("tiers", {})
    made: list[tuple[str, ...]] = [
        (
            name,
            str(row["asked"] or "-"),
            str(row["hits"]),
            _ms(row["spent_s"]),
            _ms(row["saved_s"]),
            str(row["left_out"]),
            str(row["lost_hits"]),
        )
        for name, row in tiers.items()
    ]
    if made:
        spent = sum(row["spent_s"] for row in tiers.values())
        made.append(("in sum", "", "", _ms(spent), _ms(found["gpu_s"]), "", ""))
    return made


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
