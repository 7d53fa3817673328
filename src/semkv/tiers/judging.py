"""What a judge is shown of a lookup's doubt, and how its answer is read."""

from __future__ import annotations

from semkv.types import ReuseReport, TextSegment
from semkv_guards.judge import messages, one_token, verdict

__all__ = ["one_token", "shown", "verdict"]


def shown(report: ReuseReport) -> list[dict[str, str]] | None:
    """The messages of a chat that shows a doubt; None where there is none, or it must not be shown."""
    if report.doubt is None:
        return None
    texts = [part.text for part in report.request.segments if isinstance(part, TextSegment)]
    question = report.request.question
    if texts[-1:] != [question]:  # a text behind the question may change what it asks
        return None
    return messages(texts[:-1], question, report.doubt[1].question)
