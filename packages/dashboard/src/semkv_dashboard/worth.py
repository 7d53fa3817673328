"""What was saved, for the pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from semkv_dashboard.names import DIGITS
from semkv_stores.ledger import OTHERS, Ledger, Saved, Sums

_SHOWN = 20  # models, and as many tenants


def worth_of(ledger: Ledger, days: int) -> dict[str, Any]:
    """What all processes on a directory have saved: by tier, day, model, and first digits of a tenant. Blocks.

    Raises:
        StoreError: the file cannot be read.
    """
    by = {name: ledger.by(name, days) for name in ("day", "model", "tenant")}
    tenants = {name[:DIGITS]: saved for name, saved in by["tenant"].items()}
    return {
        "days": days,
        "tiers": _as_json(ledger.tiers(days)),
        "day": _as_json(by["day"]),
        "model": _as_json(_first(by["model"])),
        "tenant": _as_json(_first(tenants)),
    }


def _as_json(figures: Mapping[str, Sums]) -> dict[str, dict[str, Any]]:
    return {name: asdict(sums) for name, sums in figures.items()}


def _first(figures: Mapping[str, Saved]) -> dict[str, Saved]:
    """The first ones, and the sum of all others."""
    names = [name for name in figures if name != OTHERS][:_SHOWN]
    found = {name: figures[name] for name in names}
    rest = Saved()
    for name in figures.keys() - set(names):
        rest.add(figures[name])
    return found | ({OTHERS: rest} if rest != Saved() else {})
