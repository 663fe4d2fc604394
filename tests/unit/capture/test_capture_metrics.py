"""What a capture and an apply that run say at /metrics and /readyz: the numbers of their databases."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import threading
import time
import urllib.error
import urllib.request

import pytest
from metrics_text import figures

import millstream as ms
from millstream.capture.last_status import STALLED_S, LastStatus
from millstream.capture.run import CaptureStatus
from millstream.cli import apply as apply_command
from millstream.cli import capture as capture_command

WAIT_S = 60


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def answer(port, path):
    """Return the text of a server's answer; None while it does not respond."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as found:
            return found.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()
    except OSError:
        return None


class Watching:
    """Runs a command's loop in this thread, which takes signals; another looks until what it waits for is there."""

    def __init__(self, monkeypatch):
        # Each reading is new: a test does not wait for a text to be made again.
        monkeypatch.setattr("millstream.metrics.exposition.CPU_SHARE_MAX", 1)
        for module in (capture_command, apply_command):
            monkeypatch.setattr(module, "Exposition", every_time(module.Exposition))

    def until(self, run, wanted):
        """Return what /readyz and /metrics say once ``wanted`` holds of both; the loop has ended then, by SIGTERM."""
        port, seen = closed_port(), []

        def look():
            deadline_s = time.monotonic() + WAIT_S
            while time.monotonic() < deadline_s:
                found = answer(port, "/readyz"), answer(port, "/metrics")
                if None not in found and wanted(*found):
                    seen.append(found)
                    break
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

        looking = threading.Thread(target=look)
        before = signal.signal(
            signal.SIGTERM, lambda *_: None
        )  # one that comes too late is harmless
        looking.start()
        try:
            run(f"127.0.0.1:{port}")
        finally:
            looking.join()
            signal.signal(signal.SIGTERM, before)
        assert seen, "never had it"
        return seen[0]


def every_time(exposition):
    return lambda *args: exposition(*args, cpu_share_max=1)


@pytest.fixture
def watching(monkeypatch):
    return Watching(monkeypatch)


@pytest.fixture
def shop(tmp_path):
    """A database whose 30 rows are to be captured."""
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, n INT)")
        db.executemany("INSERT INTO t (n) VALUES (?)", [(n,) for n in range(30)])
    return f"sqlite:///{path}"


def capturing(url, log):
    found = ms.capture(url, to=log, name="shop")
    found.source._heartbeat_s = 0.02
    return found


def value(text, metric):
    return figures(text).get((f"millstream_{metric}", "capture=shop"))


def test_a_capture_and_an_apply_count_what_their_databases_have(tmp_path, watching, shop):
    log = tmp_path / "log"

    def idle(ready, text):
        return ready == "ready\n" and value(text, "capture_lag_seconds") == 0

    def capture(metrics):
        capture_command._run(capturing(shop, log), "stopped", metrics)

    _, text = watching.until(capture, idle)
    assert value(text, "capture_snapshot_rows_total") == 30
    assert value(text, "capture_changes_total") == 0
    with sqlite3.connect(shop.removeprefix("sqlite:///")) as db:
        db.execute("UPDATE t SET n = -1 WHERE id <= 4")
    _, text = watching.until(
        capture, lambda *found: idle(*found) and value(found[1], "capture_changes_total") > 0
    )
    assert value(text, "capture_changes_total") == 4  # and rows of all runs
    assert value(text, "capture_snapshot_rows_total") == 30
    assert value(text, "capture_retrying") == value(text, "capture_alarm") == 0
    assert abs(value(text, "capture_last_write_timestamp_seconds") - time.time()) < WAIT_S

    def apply(metrics):
        copy = ms.apply("shop", f"sqlite:///{tmp_path}/copy.db", log=log)
        apply_command._run(copy, "stopped", metrics)

    _, text = watching.until(
        apply, lambda ready, text: ready == "ready\n" and value(text, "apply_lag_seconds") == 0
    )
    assert value(text, "apply_changes_total") == 34
    assert value(text, "apply_done_ratio") == 1
    assert value(text, "apply_retrying") == 0
    with sqlite3.connect(tmp_path / "copy.db") as db:
        assert db.execute("SELECT count(*), sum(n = -1) FROM t").fetchone() == (30, 4)


def test_one_whose_log_does_not_respond_is_not_ready_and_counts_as_such(watching, shop):
    away = f"kafka://127.0.0.1:{closed_port()}?timeout=1+second"

    def capture(metrics):
        capture_command._run(capturing(shop, away), "stopped", metrics)

    def retries(ready, text):  # what is read first may be older
        return "tries again" in ready and value(text, "capture_retrying") == 1

    ready, text = watching.until(capture, retries)
    assert "It tries again: no broker responded" in ready
    assert value(text, "capture_changes_total") is None  # not known, and not 0


def test_a_status_that_is_the_last_one_for_too_long_is_no_good_one():
    now_s = [1000.0]
    last = LastStatus(lambda: now_s[0])
    assert "has not begun" in last.why_not_ready()
    assert last.read().durable_s == 1000.0
    last.add(CaptureStatus("idle", lag_s=7.0))
    assert last.why_not_ready() is None
    assert last.read().lag_s == 0
    now_s[0] += STALLED_S
    assert last.why_not_ready() is None
    now_s[0] += 1
    assert "301 s" in last.why_not_ready()
    last.add(CaptureStatus("retrying", lag_s=7.0, problem="no route"))
    assert "no route" in last.why_not_ready()
    assert last.read().durable_s == 1000.0, "a try makes nothing durable"
    last.add(CaptureStatus("streaming", lag_s=7.0))
    assert last.why_not_ready() is None
    assert last.read().lag_s == 7.0


def test_what_is_said_while_nothing_was_durable_yet_is_no_number():
    last = LastStatus(lambda: 5.0)
    last.add(CaptureStatus("retrying", problem="no route"))
    assert last.read().status is None
    last.add(CaptureStatus("streaming", 30, 4))
    last.add(CaptureStatus("retrying", problem="no route"))
    assert last.read().status.changes == 4
