"""Ports that are free and that the system gives to nobody."""

from __future__ import annotations

import socket

from millstream.testing import free_ports as module
from millstream.testing.free_ports import free_ports


def test_ports_are_distinct_and_outside_the_range_of_the_system() -> None:
    first, last = module._ephemeral_range()
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert not any(first <= port <= last for port in ports)


def test_a_port_where_somebody_listens_is_not_given(monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        (other,) = free_ports(1)
        monkeypatch.setattr(module, "_candidates", lambda: iter([port, other]))
        assert free_ports(1) == [other]
