"""Runs the gateway: uvicorn with uvloop and httptools, bounded heads of requests, JSON lines on standard error."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from semkv.errors import ConfigError
from semkv.server.assemble import app_of
from semkv.server.settings import ServerSettings

_DRAIN_S = 20  # how long open requests may go on after a signal to stop
_HEAD = 64 * 1024  # bytes of a request's line and headers, beside the first piece that comes in
_HEAD_S = 30.0  # from a connection, or a request's first byte, to the end of its head


class Protocol(HttpToolsProtocol):
    """uvicorn's, but a request's head is bounded, in bytes and time: httptools would wait for one without end."""

    _message, _in_head, _head = 0, False, 0  # which message is read, whether its head, and how many bytes of that
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(_HEAD_S, self._head_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _head_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # sent ahead of an answer that still goes out
            self._expect_head()
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        before, idle = self._message, self.timeout_keep_alive_task
        super().data_received(data)
        if idle is not None and before == self._message:  # bytes that begin nothing have stopped uvicorn's timer
            self._expect_head()
        if self._in_head and before == self._message and self.parser is not None:
            self._head += len(data)
            if self._head > _HEAD:
                self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        self._message, self._in_head, self._head = self._message + 1, True, 0
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()


class JsonLines(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logs(level: str) -> None:
    """JSON lines on standard error.

    Raises:
        ConfigError: no such level.
    """
    names = ("debug", "info", "warning", "error")
    if level not in names:
        raise ConfigError("--log-level", level, names)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "sentence_transformers", "faiss"):
        logging.getLogger(noisy).setLevel("WARNING")


def run_server(
    settings: ServerSettings, environment: Mapping[str, str], *, host: str, port: int, log_level: str
) -> None:
    """Serve until a signal to stop; then no new connections, and open requests have 20 seconds.

    Raises:
        ConfigError: a setting does not fit.
        StoreError: a store cannot be opened.
    """
    set_up_logs(log_level)
    app = app_of(settings, environment)
    gc.collect()
    gc.freeze()  # what was loaded stays: with torch half a million objects, at which a collection looks half a second
    uvicorn.run(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=Protocol,
        access_log=False,
        log_config=None,
        proxy_headers=False,  # the client's address decides whose tenant header is believed
        server_header=False,
        date_header=False,
        backlog=4096,
        timeout_graceful_shutdown=_DRAIN_S,
    )
