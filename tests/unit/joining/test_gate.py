"""The door at which guests come: one that cannot be let in does not shut it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from millstream.joining.gate import GATE_NAME, Gate
from millstream.log.writer import LogWriter


def came_in(folder: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as guest:
        guest.settimeout(30)
        guest.connect(str(folder / GATE_NAME))
        return bool(guest.recv(1))


def test_a_guest_for_whom_there_is_no_thread_leaves_the_gate_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(tmp_path)
    with LogWriter(tmp_path, background=False, gate=gate) as writer:
        gate.open(writer)
        start = threading.Thread.start

        def fail_once(thread: threading.Thread) -> None:
            monkeypatch.undo()
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", fail_once)
        assert not came_in(tmp_path)
        assert threading.Thread.start is start
        assert came_in(tmp_path)
        gate.close()
