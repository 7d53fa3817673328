"""Ports for servers that are started as processes of their own."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port of this machine that nobody listens on.

    It lies below those that systems give to outgoing connections: nothing takes it before the server does, or while the
    server is down between two starts, but another test that draws the same one of 20,000.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
