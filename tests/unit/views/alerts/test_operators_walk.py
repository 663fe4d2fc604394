"""`millstream alert` as an operator runs it: real processes, killed at the worst moment, and a receiver with its own troubles."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from webhook_receiver import Receiver

import millstream as ms
from millstream.errors import RetriableError
from millstream.views.alerts.sender import TargetSender
from millstream.views.alerts.targets import AlertMessage

RULES = """
[tell.chat]
webhook = "{url}"

[tell.pager]
command = ["/bin/sh", "-c", "echo $MILLSTREAM_ALERT_ID >> {paged}"]

[[rule]]
name = "disk"
metric = "log_disk_free_bytes"
{limit}
tell = ["chat", "pager"]
"""


class Walk:
    """A log, a receiver that does what is in ``script``, one entry for each request, and one process at a time."""

    def __init__(self, folder):
        self.folder, self.receiver, self.script, self.process = folder, None, [], None
        (folder / "data").mkdir()
        self.paged = folder / "paged"

    def answer(self, _request):
        happens = self.script.pop(0) if self.script else 200
        if happens == "killed":
            os.kill(self.process.pid, signal.SIGKILL)
            return 200  # it was told, and could not note it
        return happens

    def start(self, limit):
        rules = self.folder / "rules.toml"
        rules.write_text(RULES.format(url=self.receiver.url, paged=self.paged, limit=limit))
        options = ["--log", str(self.folder / "data"), "--every", "100 milliseconds"]
        command = [sys.executable, "-m", "millstream", "alert", str(rules), *options]
        self.process = subprocess.Popen(command)

    def end(self):
        self.process.terminate()
        assert self.process.wait(60) == 0

    def told(self, count):
        """Return kind and id of what came, once it is so much."""
        found = [json.loads(one["body"]) for one in self.receiver.wait(count)]
        return [(one["kind"], one["id"]) for one in found]


@contextmanager
def walking(folder):
    walk = Walk(folder)
    with Receiver(walk.answer) as walk.receiver:
        try:
            yield walk
        finally:
            if walk.process is not None and walk.process.poll() is None:
                walk.process.kill()
                walk.process.wait()


@pytest.mark.long
def test_an_alert_is_told_by_whichever_process_lives_and_known_as_the_same(tmp_path):
    with walking(tmp_path) as walk:
        walk.script = ["killed", 500]
        walk.start("above = 0")
        assert walk.process.wait(60) == -signal.SIGKILL
        walk.start("above = 0")  # told again, refused, and told once more after its wait
        (first, second, third) = walk.told(3)
        assert first == second == third
        assert first[0] == "firing"
        walk.end()
        walk.start("below = 0")
        kinds = [kind for kind, _ in walk.told(4)]
        walk.end()
        assert kinds == ["firing"] * 3 + ["resolved"]
        paged = walk.paged.read_text().split()
    assert [one.rpartition("/")[2] for one in paged] == ["firing", "resolved"]
    assert len(walk.receiver.requests) == 4


def test_a_receiver_that_sends_a_byte_now_and_then_is_given_up():
    """Every byte comes within the time limit of a socket, and the response has no end."""
    ended = threading.Event()

    def dribble(listener):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not ended.wait(0.01):
                connection.sendall(b"x")

    message = AlertMessage("shop/behind/1/firing", "firing", "behind", "shop", "Behind", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=dribble, args=(listener,))
        thread.start()
        target = ms.tell_webhook(f"http://127.0.0.1:{listener.getsockname()[1]}/x")
        sender = TargetSender(send_max_s=0.2)
        try:
            with pytest.raises(RetriableError, match=r"did not respond within 0\.2 s"):
                sender.send(target, message)
            with pytest.raises(RetriableError, match="still not"):
                sender.send(target, message)
        finally:
            ended.set()
            thread.join()
