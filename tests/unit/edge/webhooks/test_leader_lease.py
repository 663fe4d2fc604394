"""Whose duty it is to deliver, on a folder; and what whoever is relieved leaves to the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import zlib

import pytest
from webhook_receiver import Receiver

import millstream as ms
from millstream.edge.webhooks.delivery import Delivery, Webhook
from millstream.edge.webhooks.leader_lease import FolderLease, file_name
from millstream.edge.webhooks.runner import WebhookRunner
from millstream.errors import ConfigError, UnknownTopicError
from millstream.log.files import DiskFiles
from millstream.log.lock_file import LockFile
from millstream.record import TopicPartition

HOLDS = """
import sys, time
from pathlib import Path
from millstream.edge.webhooks.leader_lease import FolderLease
duty = FolderLease(Path(sys.argv[1]), "g", "one")
print(duty.held, flush=True)
time.sleep(60)
"""


def test_one_holds_the_lease_of_a_group_and_a_topic_and_the_next_when_it_is_released(folder):
    first, second = (FolderLease(folder, "g", "one") for _ in range(2))
    assert (first.held, first.standby_reason) == (True, None)
    assert (
        second.standby_reason
        == f"Process {os.getpid()} delivers for group 'g'; on standby until it ends"
    )
    others = [FolderLease(folder, "g", "clicks"), FolderLease(folder, "h", "one")]
    assert all(other.held for other in others)
    second.poll(0)
    assert not second.held
    first.close()
    first.close()
    second.poll(0)
    assert (second.held, second.standby_reason) == (True, None)
    for duty in (second, *others):
        duty.close()


def test_death_frees_it(folder):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"True\n"
        duty = FolderLease(folder, "g", "one")
        assert f"Process {process.pid} " in duty.standby_reason
        process.send_signal(signal.SIGKILL)
        process.wait()
    duty.poll(0)
    assert duty.held
    duty.close()


def test_a_forked_child_does_not_keep_it(folder):
    duty = FolderLease(folder, "g", "one")
    lived, ends = os.pipe()
    child = os.fork()
    if not child:
        os.close(ends)
        os.read(lived, 1)  # until the parent has looked
        os._exit(0 if not duty.held else 1)
    # As its parent's death would: the handle is closed, and the lock not given up.
    os.close(lived)
    duty._lock.close_in_child()
    other = FolderLease(folder, "g", "one")
    while not other.held:  # until the child has come to closing its copy
        other.poll(0.01)
    other.close()
    os.close(ends)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_that_is_forked_while_a_lock_is_taken_does_not_keep_it_either(folder):
    locked = threading.Event()

    class SlowFiles(DiskFiles):
        def lock(self, path):
            handle = super().lock(path)
            locked.set()
            time.sleep(0.2)  # the fork comes now
            return handle

    folder.mkdir(parents=True, exist_ok=True)
    taken = []
    taker = threading.Thread(target=lambda: taken.append(LockFile(folder / "f", SlowFiles())))
    taker.start()
    assert locked.wait(60)
    lived, ends = os.pipe()
    child = os.fork()
    if not child:
        os.close(ends)
        os.read(lived, 1)
        os._exit(0)
    os.close(lived)
    taker.join()
    (lock,) = taken
    lock.close_in_child()  # as the parent's death would
    deadline = time.monotonic() + 60
    while True:  # until the child has come to closing its copy
        try:
            LockFile(folder / "f", DiskFiles()).release()
            break
        except BlockingIOError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    os.close(ends)
    assert os.waitpid(child, 0)[1] == 0


def test_names_of_files_are_possible_and_no_two_are_the_same():
    names = [("g", "t"), ("../g", "t"), ("g@t", "t"), ("g", "t@t"), ("", "t"), ("ä/" * 200, "t")]
    found = [file_name(*name) for name in names]
    assert len(set(found)) == len(names)
    assert all("/" not in name and len(name.encode()) < 255 for name in found)
    assert found[0] == "g@t.lock"


def test_where_nothing_can_be_locked_it_says_so(folder):
    (folder / "webhooks").write_text("no folder")
    with pytest.raises(ConfigError, match=r"let this process write to that folder"):
        FolderLease(folder, "g", "one")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"topic": "none"}, UnknownTopicError),
        ({"dead_letter_topic": "one"}, ConfigError),
        ({"url": "h"}, ConfigError),
        ({"group": ""}, ConfigError),
        ({"group": "g\udc80"}, ConfigError),
    ],
)
def test_what_cannot_work_is_reported_before_standby(folder, wrong, error):
    given = {"topic": "one", "url": "http://h/", "group": "g", "dead_letter_topic": "dead", **wrong}
    with pytest.raises(error):
        WebhookRunner(folder, Webhook(**given), on_leading=print, on_standby=print, report=print)
    assert not (folder / "webhooks").exists()


def worker(key, workers=2):
    return zlib.crc32(key.encode(), 0) % workers


# The next one begins at what was committed.


@pytest.mark.not_in_lane("thresholds", "one record is on its way there, not two")
@pytest.mark.parametrize("commit", [True, False], ids=["in order", "lost"])
def test_a_leader_that_is_revoked_in_order_delivers_what_others_have_overtaken_and_no_more(
    folder, commit
):
    slow = "a"
    quick = next(key for key in "bcdefgh" if worker(key) != worker(slow))
    with ms.connect(folder) as log, log.producer() as producer:
        for key in (slow, slow, quick, slow):
            producer.send("one", key, key=key).result()
    go = threading.Event()

    def answer(request):
        if request["millstream-offset"] == "0":
            go.wait(60)
        return 200

    with Receiver(answer) as it:
        delivery = Delivery(folder, Webhook("one", it.url, "g", "dead", workers=2), report=print)
        thread = threading.Thread(target=delivery.run)
        thread.start()
        it.wait(2)
        ended = threading.Thread(target=delivery.stop, kwargs={"commit": commit})
        ended.start()
        ended.join()
        go.set()
        thread.join()
    with ms.connect(folder) as log:
        committed = log.committed_offsets("g")[TopicPartition("one", 0)].offset
    offsets = sorted(request["millstream-offset"] for request in it.requests)
    assert (offsets, committed) == ((["0", "1", "2"], 3) if commit else (["0", "2"], 0))
