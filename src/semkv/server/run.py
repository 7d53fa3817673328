"""Runs the gateway: uvicorn with uvloop and httptools, logs as JSON lines on standard error."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

import uvicorn

from semkv.errors import ConfigError
from semkv.server.assemble import app_of
from semkv.server.settings import ServerSettings

_DRAIN_S = 20  # how long open requests may go on after a signal to stop


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
    uvicorn.run(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_config=None,
        proxy_headers=False,  # the client's address decides whose tenant header is believed
        server_header=False,
        date_header=False,
        backlog=4096,
        timeout_graceful_shutdown=_DRAIN_S,
    )
