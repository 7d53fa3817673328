"""A thread that calls a method again and again."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

logger = logging.getLogger("semkv")


class Every(threading.Thread):
    """Calls a method every so many seconds, until it is stopped or the method's object is no longer referenced. What
    the method raises is logged."""

    def __init__(
        self,
        seconds: float,
        method: Callable[[], object],
        name: str,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._seconds = seconds
        self._method = weakref.WeakMethod(method)
        self._stopping = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stopping.wait(self._seconds):
            method = self._method()
            if method is None:
                return
            try:
                method()
            except Exception:
                logger.exception("%s failed", self.name)
            del method

    def stop(self, timeout_s: float | None = None) -> None:
        """Wait for the call that goes on."""
        self._stopping.set()
        self.join(timeout_s)
