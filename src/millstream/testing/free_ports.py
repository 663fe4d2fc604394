"""Ports for servers that cannot be asked to take a free one themselves.

A port that was just closed is free for anybody. The system gives such ports to connections and to servers
that listen on port 0, of which a run of the tests makes thousands. So those here are outside the range that
it gives from: only another caller of this function can take one before its server does.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_EPHEMERAL_DEFAULT = (32768, 60999)  # Linux's
_UNPRIVILEGED = 1024
_TRIES = 1000


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return distinct ports of a host that nobody listens on, and that the system gives to nobody.

    Raises:
        OSError: none was found.
    """
    with ExitStack() as held:
        ports: list[int] = []
        for port in _candidates():
            probe = held.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind((host, port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise OSError(f"No {count} free ports of {host} outside {_ephemeral_range()} were found.")


def _candidates() -> Iterator[int]:
    first, last = _ephemeral_range()
    below, above = range(_UNPRIVILEGED, first), range(last + 1, 1 << 16)
    outside = max(below, above, key=len) or range(_UNPRIVILEGED, 1 << 16)
    # Seeded by the system: processes that look at the same time find different ones.
    chooser = random.SystemRandom()
    for _ in range(_TRIES):
        yield chooser.choice(outside)


def _ephemeral_range() -> tuple[int, int]:
    try:
        first, last = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return _EPHEMERAL_DEFAULT
    return first, last
