"""One forward pass for what several threads ask at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semkv.types import Vector

    Run = Callable[[list[str]], list[Vector]]


@dataclass(eq=False, slots=True)
class _Ticket:
    """What one thread asked for."""

    texts: Sequence[str]
    answered: threading.Event = field(default_factory=threading.Event)
    vectors: dict[str, Vector] | None = None
    error: Exception | None = None


class Batcher:
    """Runs one batch at a time; what is asked for meanwhile makes up the next.

    There is no timer: a thread that finds nothing running starts at once, and the first that waits runs the next
    batch, for all that wait by then. A text that several ask for is run once.

    Args:
        run: the vectors of texts, in order; called by one thread at a time.
        most: texts of one batch; a single caller's are never split.
    """

    def __init__(self, run: Run, *, most: int = 32) -> None:
        self._run, self._most = run, most
        self._waiting: list[_Ticket] = []
        self._running = False
        self._lock = threading.Lock()

    def __call__(self, texts: Sequence[str]) -> dict[str, Vector]:
        """Vectors by text; raises what ``run`` raised for these texts."""
        own = _Ticket(texts)
        with self._lock:
            self._waiting.append(own)
            leads, self._running = not self._running, True
        if not leads:
            own.answered.wait()
        if own.vectors is None and own.error is None:  # first in the queue
            self._lead()
        if own.error is not None:
            raise own.error
        assert own.vectors is not None
        return own.vectors

    def _lead(self) -> None:
        with self._lock:
            batch = [self._waiting.pop(0)]
            count = len(batch[0].texts)
            while self._waiting and count + len(self._waiting[0].texts) <= self._most:
                batch.append(self._waiting.pop(0))
                count += len(batch[-1].texts)
        try:
            self._answer(batch)
        finally:
            with self._lock:
                self._running = bool(self._waiting)
                if self._waiting:
                    self._waiting[0].answered.set()
            for ticket in batch:
                if ticket.vectors is None and ticket.error is None:  # interrupted
                    ticket.error = RuntimeError("the thread that ran the batch was stopped")
                ticket.answered.set()

    def _answer(self, batch: Sequence[_Ticket]) -> None:
        texts = list(dict.fromkeys(text for ticket in batch for text in ticket.texts))
        try:
            found = dict(zip(texts, self._run(texts), strict=True))
        except Exception as error:
            if len(batch) == 1:
                batch[0].error = error
                return
            for ticket in batch:  # one text that cannot be encoded is no fault of the others
                self._answer([ticket])
            return
        for ticket in batch:
            ticket.vectors = {text: found[text] for text in ticket.texts}
