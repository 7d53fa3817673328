"""What a judge is shown of a lookup's doubt, and how its answer is read."""

from __future__ import annotations

from semkv.types import Request, ReuseReport, TextSegment
from semkv_guards.judge import messages, one_token, verdict

__all__ = ["one_token", "shown", "texts_of", "verdict"]


def shown(report: ReuseReport) -> list[dict[str, str]] | None:
    """The messages of a chat that shows a doubt; None where there is none, or it must not be shown."""
    if report.doubt is None:
        return None
    texts = texts_of(report.request)
    question = report.request.question
    if texts[-1:] != [question]:  # a text behind the question may change what it asks
        return None
    return messages(texts[:-1], question, report.doubt[1].question)


def texts_of(request: Request) -> list[str]:
    """The texts of a request, in their order."""
    return [part.text for part in request.segments if isinstance(part, TextSegment)]
