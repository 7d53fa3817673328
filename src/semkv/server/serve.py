"""Runs the gateway: uvicorn with uvloop and httptools, bounded heads of requests, one process or several."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess

import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from semkv import __version__
from semkv.errors import ConfigError, SemkvError
from semkv.server.app import FULL, app_of
from semkv.server.asgi import busy_answer
from semkv.server.logs import set_up_logs
from semkv.server.metrics import FOLDER
from semkv.server.settings import LogFormat, LogLevel, ServerSettings, admin_key, secret_of
from semkv.types import CacheMode, PolicyName

log = logging.getLogger(__name__)

_DRAIN_S = 20  # how long open requests may go on after a signal to stop
_HEAD_BYTES = 64 * 1024  # of a request's line and headers, in addition to the first piece that comes in
_HEAD_S = 60.0  # for a head to come, also the first of a connection
_FILES = 256  # open beside those of connections
_SPARE = 32  # connections beyond the bound, for operators' routes alone
_MOST = 20_000  # connections, however many files may be open

_CANNOT_START = 2  # exit code of a worker that said why
_PAUSE_S = 1.0  # before a worker that ended is started again
_LOOK_S = 0.2  # between two looks whether a signal came

_spawn = multiprocessing.get_context("spawn")  # a fork would have another process's locks
_BUSY = busy_answer("connections").body
_TURNED_AWAY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
)


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds: on the bytes of a request's head and the time it takes, for which httptools would
    wait without end, and on connections.

    Attributes:
        most: connections; beyond them only operators' routes are answered, and after `_SPARE` more nothing is.
        turned_away: called for a connection that is not answered at all.
    """

    most = sys.maxsize
    turned_away: Callable[[], None] = staticmethod(lambda: None)
    _beyond = False
    _waiting: TimerHandle | None = None
    _message, _in_head, _head_bytes = 0, False, 0  # number of the message that is read, and whether it is its head

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._beyond = len(self.connections) > self.most
        if len(self.connections) > self.most + _SPARE:
            self.turned_away()
            transport.write(_TURNED_AWAY)
            transport.close()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        """For a head; an answer that is on its way is not cut off."""
        self._waiting = self.loop.call_later(_HEAD_S, self._waited)

    def _waited(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self._wait()

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def data_received(self, data: bytes) -> None:
        before = self._message
        super().data_received(data)
        idle = self.cycle is not None and self.cycle.response_complete  # some bytes have ended uvicorn's own wait
        if self._waiting is None and (self._in_head or idle) and self.parser is not None:
            self._wait()
        if self._in_head and before == self._message and self.parser is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        self._message, self._in_head, self._head_bytes = self._message + 1, True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._wait_no_more()
        if self._beyond and len(self.connections) > self.most:
            self.scope["extensions"] = {FULL: {}}
        super().on_headers_complete()


def raise_file_limit() -> int:
    """Let this process open as many files as it may; how many connections that is enough for, two files each."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # such as on macOS, where there is a limit beside these
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        files = hard
    most = _MOST if files == resource.RLIM_INFINITY else (files - _FILES) // 2 - _SPARE
    return min(_MOST, max(_SPARE, most))


def listening(host: str, port: int, key: str = "--port") -> socket.socket:
    """A socket for a host's IPv4 address, or for the IPv6 address that is given. It takes no connections yet.

    Raises:
        SemkvError: the port is in use or not allowed, or the host is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.socket(family)
    except OSError as error:  # without IPv6
        raise _not_listening(host, port, error, key) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
    except (OSError, UnicodeError, TypeError) as error:  # the last for a name that is no text
        sock.close()
        raise _not_listening(host, port, error, key) from error
    return sock


def _not_listening(host: str, port: int, error: Exception, key: str = "--port") -> SemkvError:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return SemkvError(f"{key}: {port} is in use; name another")
    key, value = (key, str(port)) if number == errno.EACCES else ("--host", host)
    return SemkvError(f"{key}: {value} cannot be listened on ({getattr(error, 'strerror', '') or error})")


def described(settings: ServerSettings, environment: Mapping[str, str], address: str) -> str:
    """One line of what was started."""
    numbers: dict[str, float] = {
        PolicyName.FIXED: settings.similarity_threshold,
        PolicyName.BOUNDED: settings.max_error_rate,
    }
    number = f" {numbers[settings.policy]:g}" if settings.policy in numbers else ""
    near = f"{'counted' if settings.mode == CacheMode.DRY_RUN else 'on'} ({settings.policy}{number})"
    if settings.cache_config() is None:
        near = "off"
    upstream = re.sub("//[^/]*@", "//", settings.upstream)  # names and passwords stay out of logs
    port = f"port {settings.admin_port}, " if settings.admin_port else ""
    dashboard = f"at {port}/semkv" if admin_key(environment) else "off: set SEMKV_ADMIN_KEY"
    return (
        f"semkv {__version__} on http://{address}: upstream {upstream}, cache in {settings.cache_dir}, "
        f"near-repeats {near}, dashboard {dashboard}"
    )


def run_server(
    settings: ServerSettings,
    environment: Mapping[str, str],
    *,
    host: str,
    port: int,
    workers: int,
    log_level: LogLevel,
    log_format: LogFormat,
) -> None:
    """Serve until a signal to stop; then no new connections, and open requests have 20 seconds.

    Several workers are processes that take connections from the same sockets. One that ends is started again.

    Raises:
        ConfigError: a setting does not fit.
        StoreError: a store cannot be opened.
        SemkvError: the address cannot be listened on, or a worker does not start.
    """
    set_up_logs(log_level, log_format)
    if workers > 1 and settings.store == "memory":
        raise ConfigError("--workers", workers, "1 with --store memory: workers share answers through a store")
    if settings.admin_port and settings.admin_port == port:
        raise ConfigError("--admin-port", port, "another port than --port")
    sockets = [listening(host, port)]  # before the encoder is loaded, which takes seconds
    if settings.admin_port:
        sockets.append(listening(host, settings.admin_port, "--admin-port"))
    name, bound = sockets[0].getsockname()[:2]
    said = described(settings, environment, f"[{name}]:{bound}" if ":" in name else f"{name}:{bound}")
    work = partial(
        _serve, settings, dict(environment), sockets, workers=workers, log_level=log_level, log_format=log_format
    )
    if workers == 1:
        work(said)
        return
    log.info("%s, %d workers", said, workers)
    secret_of(settings, environment)  # made by one process
    run_workers(workers, work, sockets)


def _serve(
    settings: ServerSettings,
    environment: Mapping[str, str],
    sockets: list[socket.socket],
    said: str = "",
    *,
    workers: int,
    log_level: LogLevel,
    log_format: LogFormat,
) -> None:
    """Serve on some sockets with one process, which is one of ``workers``. ``said``: logged when all is loaded."""
    set_up_logs(log_level, log_format)
    connections = raise_file_limit()
    # transformers imports torch's compiler, which imports triton, which lists what it leaks when the process ends.
    # Nothing is compiled here.
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
    app = app_of(settings, environment, workers)
    turned_away = partial(app.gateway.metrics.turned_away, "connections")
    bounded = type("Bounded", (Protocol,), {"most": connections, "turned_away": staticmethod(turned_away)})
    gc.collect()
    gc.freeze()  # what was loaded stays: with torch half a million objects, at which a collection looks half a second
    if said:
        log.info(said)
    host, port = sockets[0].getsockname()[:2]
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            loop="uvloop",
            http=bounded,
            access_log=False,
            log_config=None,
            proxy_headers=False,  # the client's address decides whose tenant header is believed
            server_header=False,
            date_header=False,
            backlog=4096,
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets)
    except OSError as error:
        if server.started:
            raise
        raise _not_listening(host, port, error) from error  # another process was faster


# -- several processes -------------------------------------------------------------------------------------------------


def run_workers(count: int, work: Callable[[], None], sockets: Sequence[socket.socket] = ()) -> None:
    """Do ``work``, which must be picklable, in ``count`` processes; one that ends is started again. SIGINT and SIGTERM
    end all, and so does the end of this process. ``sockets``: closed when all shall end, so that nobody waits at them.

    Raises:
        SemkvError: a worker cannot start, and none runs that was started before it.
    """
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    # Each would take all cores for its encoder.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    running: dict[SpawnProcess, float] = {}  # and when it was started
    # Workers map these files: on a full disk the kernel kills who writes to a new page.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="semkv-figures-", dir=memory) as folder:
        os.environ[FOLDER] = folder
        try:
            while not stopping.is_set():
                running |= {_start_worker(work): time.monotonic() for _ in range(count - len(running))}
                if not wait([worker.sentinel for worker in running], _LOOK_S):
                    continue
                for worker in [worker for worker in running if worker.exitcode is not None]:
                    begun = running.pop(worker)
                    mark_process_dead(worker.pid, folder)  # type: ignore[no-untyped-call]
                    if worker.exitcode == _CANNOT_START and not any(at < begun - _PAUSE_S for at in running.values()):
                        raise SemkvError("a worker cannot start; its message is above")
                    if not stopping.is_set():
                        log.warning("worker %s ended (%s); another is started", worker.pid, worker.exitcode)
                stopping.wait(_PAUSE_S)
        finally:
            for listener in sockets:
                listener.close()
            for worker in running:
                worker.terminate()
            until = time.monotonic() + _DRAIN_S + _PAUSE_S
            for worker in running:
                worker.join(max(0.0, until - time.monotonic()))
                worker.kill()  # one that hangs
                worker.join()


def _start_worker(work: Callable[[], None]) -> SpawnProcess:
    worker = _spawn.Process(target=_run_worker, args=(work,))
    worker.start()
    return worker


def _run_worker(work: Callable[[], None]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work()
    except SemkvError as error:
        print(f"semkv: {error}", file=sys.stderr)
        sys.exit(_CANNOT_START)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(os.environ[FOLDER], ignore_errors=True)  # it cannot any more
    os.kill(os.getpid(), signal.SIGTERM)
