"""Runs the gateway: uvicorn with uvloop and httptools, bounded heads of requests, one process or several."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from asyncio import Transport
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httptools
import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from semkv import __version__
from semkv.errors import ConfigError, SemkvError
from semkv_gateway.app import FULL, App, app_of
from semkv_gateway.http import busy_answer
from semkv_gateway.logs import set_up_logs
from semkv_gateway.metrics import FOLDER
from semkv_gateway.settings import ServerSettings, admin_key, secret_of

log = logging.getLogger(__name__)

_ENDING_S = 5  # for open requests to end once the gateway has asked them to
_BEAT_S = 1  # between two signs of life of a worker's event loop
_SILENT = 60  # looks for one, two a second, that find none until a worker is replaced
_UNREAD_S = 30  # in which a client reads `_UNREAD_BYTES` of what waits for it, or is cut
_UNREAD_BYTES = 30 * 1024
_CLOSING_S = 15  # for a worker to close its stores after that
_START_S = (
    120  # for a worker to load its encoder, after SIGHUP before the one that it replaces ends
)
# Of a request that are no body, in addition to the first piece that comes in.
_HEAD_BYTES = 64 * 1024
_HEAD_S = 60  # for a head to come, also the first of a connection
_FILES = 256  # open in addition to those of connections
_SPARE = 32  # connections beyond the bound, only for operators' routes
_HERE = {"localhost", "127.0.0.1", "0.0.0.0"}  # noqa: S104
_HERE_6 = {"localhost", "::1", "::"}
_MOST = 20_000  # connections, however many files may be open

_BUSY = busy_answer("connections").body
_TURNED_AWAY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
)


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on the number of connections, on the bytes of a request's head, on the time in
    which the head must come (httptools would wait without end), and on the time in which a client must read. A request
    that asks for another protocol, as Java's client does, is answered as if it did not ask.

    Attributes:
        most: connections; beyond them only operators' routes are answered, and after `_SPARE` more nothing is.
        turned_away: called for a connection that is not answered at all.
        cut: called for a connection whose client does not read.
        stopping: called for every connection when the server begins to stop.
    """

    most = sys.maxsize
    turned_away: Callable[[], None] = staticmethod(lambda: None)
    cut: Callable[[], None] = staticmethod(lambda: None)
    stopping: Callable[[], None] = staticmethod(lambda: None)
    _looking: asyncio.TimerHandle | None = None  # whether the client reads
    _beyond = False
    _loose_bytes = 0  # bytes since a request began, or since its body went on

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._beyond = len(self.connections) > self.most
        if len(self.connections) > self.most + _SPARE:
            self.turned_away()
            transport.write(_TURNED_AWAY)
            transport.close()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                _HEAD_S, self.timeout_keep_alive_handler
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()  # uvicorn leaves it, and with it all of this, after a reset
        self._look_no_more()
        super().connection_lost(exc)

    def _end_timer(self) -> None:
        """End the wait for a request's head, or for the next request."""
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def shutdown(self) -> None:
        super().shutdown()
        self.stopping()

    # -- clients that do not read -------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_no_more()
        self._look_later()

    def resume_writing(self) -> None:
        self._look_no_more()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """What the client has not read for so long would keep a closed connection for ever."""
        if self.transport.get_write_buffer_size():
            self._cut()
        else:
            super().timeout_keep_alive_handler()

    def _look_later(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._looking = self.loop.call_later(_UNREAD_S, self._look, waiting)

    def _look(self, waited: int) -> None:
        if waited - self.transport.get_write_buffer_size() < _UNREAD_BYTES:
            self._cut()
        else:
            self._look_later()

    def _look_no_more(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _cut(self) -> None:
        self.cut()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._loose_bytes += len(data)
        try:
            while data:
                data = self._read(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        else:
            if self._loose_bytes > _HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")

    def _read(self, data: bytes) -> bytes:
        """Let httptools read; what it has to read next. Of a request for another protocol it reads no body, so such a
        head is read again without that wish."""
        parser = self.parser
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if parser.get_method() == b"CONNECT":  # this is no proxy
                raise httptools.HttpParserError from None
            first = b"%s %s HTTP/%s" % (
                parser.get_method(),
                self.url,
                parser.get_http_version().encode(),
            )
            # After ``Connection: close`` that one reads no more.
            self.parser = httptools.HttpRequestParser(self)
            lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            return b"\r\n".join([first, *lines, b"", data[upgrade.args[0] :]])
        return b""

    def on_message_begin(self) -> None:
        self._loose_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._end_timer()
        if self._beyond and len(self.connections) > self.most:
            self.scope["extensions"] = {FULL: {}}
        super().on_headers_complete()
        self.headers = []  # trailers, which follow the body, are no headers of this request

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()


def raise_file_limit() -> int:
    """Let this process open as many files as it may; how many connections that is enough for, two files each."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Such as on macOS, where there is a limit beside these.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        files = hard
    most = _MOST if files == resource.RLIM_INFINITY else (files - _FILES) // 2 - _SPARE
    return min(_MOST, max(_SPARE, most))


def listening(host: str, port: int) -> socket.socket:
    """A socket for a host's IPv4 address, or for the IPv6 address that is given. It takes no connections yet."""
    sock = None
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ":" in host:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
    except (OSError, UnicodeError, TypeError) as error:  # the last for a name that is no text
        if sock is not None:
            sock.close()
        why = getattr(error, "strerror", None) or error
        raise SemkvError(
            f"--port {port}, --host {host}: cannot listen there ({why}); name another"
        ) from error
    return sock


def described(settings: ServerSettings, address: str) -> str:
    """One line of what was started."""
    near = "off" if settings.cache_config() is None else f"{settings.mode} ({settings.policy})"
    dashboard = "at /semkv" if admin_key(os.environ) else "off: set SEMKV_ADMIN_KEY"
    upstream = ", ".join(settings.upstreams)
    return (
        f"semkv {__version__} on http://{address}: upstream {upstream}, cache in {settings.cache_dir}, "
        f"near-repeats {near}, dashboard {dashboard}"
    )


def leads_to(url: str, name: str, port: int) -> bool:
    """Whether a URL leads to the gateway itself, which listens at this address and port."""
    there = urlsplit(url)
    at = there.port or (443 if there.scheme == "https" else 80)
    return at == port and any(
        {there.hostname, name} <= family for family in (_HERE, _HERE_6, {name})
    )


def run_server(
    settings: ServerSettings, *, host: str, port: int, workers: int, drain_timeout: float = 20.0
) -> None:
    """Serve until a signal to stop. Then no new connections are taken, and open requests have ``drain_timeout`` seconds
    until they are ended with an error.

    Several workers are processes that take connections from the same sockets. One that ends or hangs is replaced.
    """
    set_up_logs()
    if workers > 1 and settings.store == "memory":
        raise ConfigError(
            "--workers", workers, "1 with --store memory: workers share answers through a store"
        )
    sockets = [listening(host, port)]  # before the encoder is loaded, which takes seconds
    name, bound = sockets[0].getsockname()[:2]
    address = f"[{name}]:{bound}" if ":" in name else f"{name}:{bound}"
    for url in settings.upstreams:
        if leads_to(url, name, bound):
            raise ConfigError(
                "--upstream", url, "another server than this one: every request would come back"
            )
    said = described(settings, address)
    if workers == 1:
        app = _load(settings, drain_timeout)
        log.info(said)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(_config(app, drain_timeout)).run(sockets)
        return
    log.info("%s, %d workers", said, workers)
    secret_of(settings, os.environ)  # made by one process
    # Each would take all cores for its encoder.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    # Workers map these files: on a full disk the kernel kills who writes to a new page.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="semkv-figures-", dir=memory) as folder:
        os.environ[FOLDER] = folder
        work = partial(_load_worker, settings, drain_timeout, workers)
        config = _config(work, drain_timeout, workers=workers, factory=True, callback_notify=_beat)
        supervisor = Workers(config, sockets)
        supervisor.run()
        if supervisor.failed:
            raise SemkvError("a worker cannot start; its message is above")


def _config(app: Any, drain_timeout: float, **more: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=Protocol,
        ws="none",
        access_log=False,
        log_config=None,
        proxy_headers=False,  # a tenant header is believed by the client's own address
        server_header=False,
        date_header=False,
        backlog=4096,
        timeout_keep_alive=_HEAD_S,
        timeout_graceful_shutdown=math.ceil(drain_timeout + _ENDING_S),
        timeout_notify=_BEAT_S,
        timeout_worker_healthcheck=_START_S,
        **more,
    )


def _load(settings: ServerSettings, drain_timeout: float, workers: int = 1) -> App:
    """The application with all that it needs in memory."""
    # transformers imports torch's compiler, which imports triton, which prints what it leaks when the process ends.
    # Nothing is compiled here.
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
    Protocol.most = raise_file_limit()
    app = app_of(settings, os.environ, workers)
    gateway = app.gateway
    Protocol.turned_away = gateway.metrics.turned_away.labels("connections").inc
    Protocol.cut = gateway.metrics.turned_away.labels("unread").inc
    Protocol.stopping = staticmethod(partial(gateway.stop_soon, drain_timeout))
    gc.collect()
    gc.freeze()  # what was loaded stays: with torch half a million objects, at which a collection looks half a second
    return app


# -- several processes -------------------------------------------------------------------------------------------------


class Workers(Multiprocess):
    """uvicorn's supervisor, which replaces a worker that ends, or whose event loop gives no sign of life. When all end,
    nobody waits at the sockets."""

    failed = False  # a worker could not start, and no other serves
    # By process: its latest sign of life, looks since then.
    _beats: ClassVar[dict[int | None, tuple[int, int]]] = {}

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket]) -> None:
        super().__init__(config, sockets)
        # Uvicorn notes them, and looks when no worker is being replaced.
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
        ):
            signal.signal(number, lambda *_: self.should_exit.set())

    def restart_all(self) -> None:
        before = [process.pid for process in self.processes]
        super().restart_all()
        for pid in set(before).difference(process.pid for process in self.processes):
            mark_process_dead(pid, os.environ[FOLDER])  # type: ignore[no-untyped-call]

    def keep_subprocess_alive(self) -> None:
        """uvicorn's own asks a thread of each worker, which answers also where the event loop hangs, and waits a minute
        for one that died before it answered."""
        for at, process in enumerate(self.processes):
            if process.exitcode is None and self._hangs(process.pid):
                log.error("worker %s does not respond and is killed", process.pid)
                process.kill()
                process.join()
            if process.exitcode is None or self.should_exit.is_set():
                continue
            mark_process_dead(process.pid, os.environ[FOLDER])  # type: ignore[no-untyped-call]
            others = [other for other in self.processes if other is not process]
            if process.exitcode == STARTUP_FAILURE and not any(
                other.is_ready(timeout=1) for other in others
            ):
                self.failed = True
                self.should_exit.set()
                continue
            log.warning("worker %s ended (%s); another is started", process.pid, process.exitcode)
            self.processes[at] = Process(self.config, self.sockets)
            self.processes[at].start()

    def _hangs(self, pid: int | None) -> bool:
        """Whether a worker that answered before has stopped to answer. Clocks may jump, so tries are counted."""
        try:
            latest = _beat_file(pid).stat().st_mtime_ns
        except OSError:  # it is starting
            return False
        known, looks = self._beats.get(pid, (0, 0))
        self._beats[pid] = (latest, looks + 1 if latest == known else 0)
        return self._beats[pid][1] > _SILENT

    def terminate_all(self) -> None:
        for listener in self.sockets:
            listener.close()
        super().terminate_all()

    def join_all(self) -> None:
        """One that hangs does not keep the others' end."""
        until = time.monotonic() + (self.config.timeout_graceful_shutdown or 0) + _CLOSING_S
        for process in self.processes:
            process.process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                log.error("worker %s does not end and is killed", process.pid)
                process.kill()
        super().join_all()


async def _beat() -> None:
    """A worker's sign of life, from its event loop."""
    _beat_file(os.getpid()).touch()


def _beat_file(pid: int | None) -> Path:
    return Path(os.environ[FOLDER]) / f"{pid}.beat"


def _load_worker(settings: ServerSettings, drain_timeout: float, workers: int) -> App:
    set_up_logs()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        return _load(settings, drain_timeout, workers)
    except SemkvError as error:
        print(f"semkv: {error}", file=sys.stderr)
        sys.exit(STARTUP_FAILURE)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # The parent, which would do it, has ended.
    shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
