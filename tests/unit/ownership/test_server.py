"""The owner's server: a connection that cannot be accepted does not stop it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from millstream.log.writer import LogWriter
from millstream.ownership.server import SOCKET_NAME, OwnerServer


def is_served(folder: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(str(folder / SOCKET_NAME))
        return bool(client.recv(1))


def test_a_session_without_a_thread_does_not_stop_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = OwnerServer(tmp_path)
    with LogWriter(tmp_path, background=False, server=server) as writer:
        server.open(writer)
        start = threading.Thread.start

        def fail_once(thread: threading.Thread) -> None:
            monkeypatch.undo()
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", fail_once)
        assert not is_served(tmp_path)
        assert threading.Thread.start is start
        assert is_served(tmp_path)
        server.close()
