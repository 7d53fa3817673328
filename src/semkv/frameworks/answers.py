"""Answers to chat requests, for a framework that asks before and keeps afterwards.

A chat request is two things: its last question, which may be compared by meaning, and everything else, which must be
equal: earlier messages, model, tools, sampling. What is not understood is compared as a whole, or not cached.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from semkv.cache import SemanticCache
from semkv.types import Namespace, Request, ReuseReport, TextSegment

logger = logging.getLogger("semkv")

OPEN_LOOKUPS = 4096
"""Misses whose answers are awaited. An older one is looked up again when its answer comes."""

WHOLE_ENDINGS = frozenset(
    "stop stop_sequence end_turn eos_token complete completed tool_use tool_calls function_call".split()
)
"""Reasons of an answer's end that say that it is whole; case does not count."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

_CALLS = frozenset({"tool_call", "tool_use", "function_call"})
_USERS = frozenset({"user", "human"})
_WHOLE_PROMPT = "the whole prompt"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request of a framework.

    Attributes:
        scope: hex SHA-256 of everything but the question.
        question: what is compared by meaning; a constant where the whole request must be equal.
    """

    scope: str
    question: str


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What was found.

    Attributes:
        answer: the text that `AnswerCache.keep` was given.
        provenance: ``text:exact``, ``text:normalised`` or ``text:semantic``.
        score: the least cosine of what matched, in [-1, 1]; 1.0 for an equal text.
        hit_id: names the hit for `SemanticCache.report_wrong`.
    """

    answer: str
    provenance: str
    score: float
    hit_id: str

    @property
    def note(self) -> dict[str, Any]:
        """What a framework may attach to the answer."""
        return {
            "provenance": self.provenance,
            "score": round(self.score, 4),
            "hit_id": self.hit_id,
        }


def fault_is_miss(work: Callable[_P, _T | None]) -> Callable[_P, _T | None]:
    """The same work, whose exceptions are a line in the log and None."""

    @functools.wraps(work)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return work(*args, **kwargs)
        except Exception as error:
            logger.warning("answer cache: %s: %r: taken for a miss", work.__name__, error)
            return None

    return guarded


def ends_whole(metadata: Any) -> bool:
    """Whether metadata of an answer give a reason of its end, and every reason in them says that it is whole.

    >>> ends_whole({"stopReason": "end_turn"}), ends_whole({"finish_reason": "length"}), ends_whole({})
    (True, False, False)
    """
    reasons = list(_reasons_in(metadata))
    return bool(reasons) and all(
        isinstance(reason, str) and reason.lower() in WHOLE_ENDINGS for reason in reasons
    )


def _reasons_in(metadata: Any) -> Iterator[Any]:
    if hasattr(metadata, "model_dump"):
        metadata = metadata.model_dump()
    if isinstance(metadata, list | tuple):
        for item in metadata:
            yield from _reasons_in(item)
    if not isinstance(metadata, Mapping):
        return
    for name, value in metadata.items():
        word = str(name).lower()
        is_stop_token = word == "stop_reason" and metadata.get("finish_reason")  # of vLLM
        is_reason = word.endswith("reason") or word == "status"
        if is_reason and value is not None and not is_stop_token:
            yield value
        yield from _reasons_in(value)


@fault_is_miss
def chat_request(
    messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> ChatRequest | None:
    """Divide a request into its last question and the rest.

    Args:
        messages: JSON objects with ``role`` or ``type``, and ``content``: a text, or a list of parts.
        settings: all else that shapes the answer.

    Returns:
        The request; None where it holds what is no JSON, or a picture or file that is only named, since what stands
        behind the name may change.
    """
    if not messages or not all(_is_self_contained(message.get("content")) for message in messages):
        return None
    try:
        history = [dict(sorted(message.items())) for message in messages]
        question = _take_question(history[-1])
        given = dict(sorted(settings.items()))
        asked = {
            "messages": history,
            "settings": given,
            "compared": question is not None,
        }
        # Below these the order of names counts: a model is shown a tool's parameters in it.
        rest = json.dumps(asked, allow_nan=False)
    except (TypeError, ValueError):
        return None
    scope = hashlib.sha256(rest.encode()).hexdigest()
    return ChatRequest(scope, _WHOLE_PROMPT if question is None else question)


def _is_self_contained(content: Any) -> bool:
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(_is_self_contained_part(part) for part in content)


def _is_self_contained_part(part: Any) -> bool:
    """A text, a model's call of a tool, or a picture whose bytes stand in the request."""
    if isinstance(part, str):
        return True
    if not isinstance(part, Mapping):
        return False
    if part.get("type") in _CALLS:
        return True
    names = set(part) - {"type"}
    if part.get("type") == "text":
        return isinstance(part.get("text"), str)
    if part.get("type") == "image_url":
        picture = part.get("image_url")
        url = picture.get("url") if isinstance(picture, Mapping) else picture
        return isinstance(url, str) and url.startswith("data:")
    if part.get("type") == "image":
        return isinstance(part.get("base64"), str) and names <= {"base64", "mime_type"}
    return False


def _take_question(message: dict[str, Any]) -> str | None:
    """Take the text of a user's message out of it; None where it has none or several."""
    content = message.get("content")
    if message.get("role", message.get("type")) not in _USERS:
        return None
    if isinstance(content, str) and content.strip():
        message["content"] = None
        return content
    if not isinstance(content, list):
        return None
    parts = [dict(part) if isinstance(part, Mapping) else part for part in content]
    texts = [part for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != 1 or any(isinstance(part, str) for part in parts):
        return None
    question = str(texts[0]["text"])
    texts[0]["text"] = None
    message["content"] = parts
    return question if question.strip() else None


class AnswerCache:
    """Answers by chat request, over a `SemanticCache` with its tiers and guards. Any thread may call any method.

    A fault is a miss with a line in the log, and no exception. Policies that check answers (``bounded``) need the
    gateway or your own loop: a framework computes no answer a second time.

    Args:
        cache: where answers are kept; the caller closes it.
        tenant: requests of different tenants share nothing.
        lifetime_s: age in seconds above which an answer is not given; None for no limit.
    """

    def __init__(
        self, cache: SemanticCache, *, tenant: str = "", lifetime_s: float | None = None
    ) -> None:
        self._cache = cache
        self._tenant = tenant
        self._lifetime_s = lifetime_s
        self._tag = f"answers:{tenant}"
        self._open: OrderedDict[ChatRequest, ReuseReport] = OrderedDict()
        self._lock = threading.Lock()

    @fault_is_miss
    def find(self, asked: ChatRequest | None) -> StoredAnswer | None:
        """The answer to an equal or similar request; None on a miss. None asks for nothing."""
        if asked is None:
            return None
        report = self._look_up(asked)
        match = report.plan.match
        if match is None or not report.plan.full or report.donor_response is None:
            with self._lock:
                self._open[asked] = report.unchanged()  # a framework sends it as it is
                if len(self._open) > OPEN_LOOKUPS:
                    self._open.popitem(last=False)
            return None
        stored = json.loads(report.donor_response)
        until = stored["until"]
        if until is not None and time.time() > until:
            self._cache.invalidate(entry_id=match.entry_id)
            return None
        return StoredAnswer(
            answer=stored["answer"],
            provenance=report.provenance,
            score=match.score,
            hit_id=report.hit_id,
        )

    @fault_is_miss
    def keep(
        self, asked: ChatRequest | None, answer: str, *, lifetime_s: float | None = None
    ) -> None:
        """Keep an answer that was computed for exactly this request.

        Args:
            asked: the request; None keeps nothing.
            answer: any text.
            lifetime_s: instead of the cache's own.
        """
        if asked is None:
            return
        with self._lock:
            report = self._open.pop(asked, None)
        if report is None:
            report = self._look_up(asked).unchanged()
        limit = self._lifetime_s if lifetime_s is None else lifetime_s
        until = None if limit is None else time.time() + limit
        stored = json.dumps({"answer": answer, "until": until})
        self._cache.add_observation(report, stored, tags=(self._tag,))

    def clear(self) -> int:
        """Delete this tenant's answers; how many they were.

        Raises:
            StoreError: the catalog could not be written; nothing was deleted.
        """
        return self._cache.invalidate(tag=self._tag)

    def _look_up(self, asked: ChatRequest) -> ReuseReport:
        namespace = Namespace(tenant=self._tenant, model=asked.scope)
        segments = (TextSegment(asked.question),)
        return self._cache.try_reuse(Request(uuid.uuid4().hex, namespace, segments))
