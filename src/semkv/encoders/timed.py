"""A sentence encoder with a time limit, which encodes in one pass the texts that wait together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from semkv.niceness import set_niceness
from semkv_guards.reading import is_read

if TYPE_CHECKING:
    from semkv.encoders.text import Matrix, TextEncoder

logger = logging.getLogger("semkv")

_PASS = 16  # texts from which a pass takes no further call
_LATE = 3  # passes in a row that take too long, after which nobody waits for a while
_PAUSE_S = 10.0
_NICE = (
    5  # a third of an ordinary thread's share of a core, so that an event loop beside it goes on
)


class EncoderLateError(TimeoutError):
    """The encoder does not answer in time. The text that was asked for is not to blame."""


@dataclass(slots=True)
class _Call:
    texts: list[str]
    rows: Future[Matrix] = field(default_factory=Future)


class TimedEncoder:
    """Runs an encoder in a thread of its own. Any thread may call any method.

    A call waits at most ``limit_s``, then it raises `EncoderLateError`. While a pass takes longer, and for ten
    seconds after three such passes in a row, calls raise it at once. What a late pass brings is not lost where the
    encoder remembers its texts, as `SentenceEncoder` does.
    """

    def __init__(self, encoder: TextEncoder, limit_s: float) -> None:
        self._encoder = encoder
        self._limit_s = limit_s
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._began: float | None = None  # the pass that runs
        self._late = 0  # passes in a row that took too long
        self._closed_until = 0.0  # nobody waits before that
        self._told = False
        self._thread = threading.Thread(
            target=self._work,
            name="semkv-encoder",
            daemon=True,
        )
        self._thread.start()

    @property
    def dim(self) -> int:
        return self._encoder.dim

    @property
    def fingerprint(self) -> str:
        return self._encoder.fingerprint

    def fits(self, text: str) -> bool:
        return self._encoder.fits(text)

    def reads(self, text: str) -> bool:
        reads: Callable[[str], bool] = getattr(self._encoder, "reads", is_read)
        return reads(text)

    def forget(self) -> None:
        """Let the encoder drop the texts that it remembers, where it remembers any."""
        getattr(self._encoder, "forget", lambda: None)()

    def encode(self, texts: Sequence[str]) -> Matrix:
        if self._away():
            raise EncoderLateError("the sentence encoder is late")
        call = _Call(list(texts))
        self._calls.put(call)
        try:
            rows = call.rows.result(self._limit_s)
        except TimeoutError as error:
            if not call.rows.cancel() and call.rows.done():
                raise  # the encoder's own
            self._tell()
            raise EncoderLateError(f"no vector within {self._limit_s:g} s") from error
        return rows

    def close(self) -> None:
        """Stop the thread after the pass that runs; one that hangs is left behind."""
        self._calls.put(None)

    def _away(self) -> bool:
        now = time.monotonic()
        began = self._began
        return now < self._closed_until or (began is not None and now - began > self._limit_s)

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "The sentence encoder takes longer than %g s. Nobody waits for it, and texts are not compared, until"
                " it answers in time again. Exact matches go on.",
                self._limit_s,
            )

    def _work(self) -> None:
        set_niceness(_NICE)
        while calls := self._next():
            waiting = [call for call in calls if call.rows.set_running_or_notify_cancel()]
            if waiting:
                self._began = time.monotonic()
                self._run(waiting)
                self._ended(time.monotonic() - self._began)

    def _next(self) -> list[_Call]:
        """The calls of the next pass; none at the end."""
        calls: list[_Call] = []
        call = self._calls.get()
        try:
            while call is not None:
                calls.append(call)
                if sum(len(one.texts) for one in calls) >= _PASS:
                    break
                call = self._calls.get_nowait()
            else:
                if calls:
                    self._calls.put(None)  # this pass, then the end
        except Empty:
            pass
        return calls

    def _run(self, calls: list[_Call]) -> None:
        texts = list(dict.fromkeys(text for call in calls for text in call.texts))
        try:
            rows = self._encoder.encode(texts)
            place = {text: row for row, text in enumerate(texts)}
            for call in calls:
                call.rows.set_result(rows[[place[text] for text in call.texts]])
        except BaseException as error:
            if len(calls) == 1:
                raised = error if isinstance(error, Exception) else RuntimeError(repr(error))
                calls[0].rows.set_exception(raised)
                return
            for call in calls:  # one text may be to blame, and is no matter of the others
                if not call.rows.done():
                    self._run([call])

    def _ended(self, seconds: float) -> None:
        self._began = None
        if seconds <= self._limit_s:
            self._late = 0
            self._told = False
            return
        self._late += 1
        if self._late >= _LATE:
            self._closed_until = time.monotonic() + _PAUSE_S
