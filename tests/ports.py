"""Ports for servers that are started as processes of their own."""

from __future__ import annotations

import random
import socket

_DRAWN: list[socket.socket] = []
"""Of each port that was given away, its twin for datagrams: no server takes it, nor another test while it is ours."""


def free_port() -> int:
    """A port of this machine that nobody listens on.

    It lies below those that systems give to outgoing connections: nothing takes it before the server does, or while the
    server is down between two starts. No other test draws it before this process ends.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        twin = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
                twin.bind(("127.0.0.1", port))
            except OSError:
                twin.close()
                continue
        _DRAWN.append(twin)
        return port
