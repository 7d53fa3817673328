"""What a rule is: a check of two texts that carries its reason and its cases."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from semkv_guards.pairs import Pair

Check = Callable[[Pair], str | None]
"""Says why two texts must not stand in for each other, or None where it has no objection. Linear in the texts."""
Case = tuple[str, str]
"""Two texts."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One kind of difference that makes another question of a similar text."""

    name: str
    """The name of its function."""
    why: str
    """The docstring of its function."""
    reasons: tuple[str, ...]
    """What it may say."""
    tables: tuple[str, ...]
    """The tables of a language without which it never objects; none for a rule that needs no words."""
    vetoes: tuple[Case, ...]
    """Pairs that it vetoes, and no rule before it."""
    allows: tuple[Case, ...]
    """Similar pairs to which no rule objects."""
    check: Check


def rule(
    *,
    reasons: tuple[str, ...],
    tables: tuple[str, ...] = (),
    vetoes: tuple[Case, ...],
    allows: tuple[Case, ...],
) -> Callable[[Check], Rule]:
    """Make a rule of a function; its fields are those of `Rule`."""

    def made(check: Check) -> Rule:
        return Rule(
            name=check.__name__,
            why=inspect.getdoc(check) or "",
            reasons=reasons,
            tables=tables,
            vetoes=vetoes,
            allows=allows,
            check=check,
        )

    return made
