"""A small shop: brokers, apps, a webhook, a capture and a copy that run, and that get into every trouble there is an
alert for. Nothing here makes figures up: each trouble is caused, and what serves /metrics is what users run.

Three things are made, as a test cannot ask a machine for them: ``os.fdatasync`` is slow, or fails, for one broker's
files; what a database keeps for a capture is said to be too much; and the state of a job on Spark is said to grow.
"""

from __future__ import annotations

import errno
import os
import socket
import sqlite3
import subprocess
import threading
import time
import urllib.parse
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from broker.broker_process import InProcess
from broker.raw_client import RawClient
from webhook_receiver import Receiver

import millstream as ms
from millstream.capture.apply.metrics import apply_figures
from millstream.capture.last_status import LastStatus
from millstream.capture.metrics import capture_figures
from millstream.cli.broker import _exposition as broker_exposition
from millstream.edge.webhooks.delivery import Webhook
from millstream.edge.webhooks.retry_policy import RetryPolicy
from millstream.edge.webhooks.runner import WebhookRunner
from millstream.engine.local_run import LocalRun
from millstream.errors import ConfigError
from millstream.metrics.exposition import Exposition
from millstream.metrics.server import serve_metrics
from millstream.record import TopicPartition
from millstream.views.runs.failure import record_failure
from millstream.views.server.server import serve

DISK_BYTES = 64 << 20
HOUR = timedelta(hours=1)
CONNECTIONS_MAX = 8
HEARTBEAT_S = 4.0  # for so long a capture's last change stays its last one: several scrapes


class SlowDisk:
    """``os.fdatasync``, but of files below some folders it is slow, or fails."""

    def __init__(self, monkeypatch):
        self.slow, self.failing = set(), set()
        self._real = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self)

    def __call__(self, handle):
        path = str(Path(f"/proc/self/fd/{handle}").readlink())
        if any(path.startswith(str(folder)) for folder in self.failing):
            raise OSError(errno.EIO, "Input/output error")
        if any(path.startswith(str(folder)) for folder in self.slow):
            time.sleep(0.7)
        self._real(handle)


@contextmanager
def small_disk(folder):
    """Mount a small file system until the block ends; where that is not allowed, the test is skipped."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def in_thread(run, stop):
    """Run something in a thread until the block ends; what it raises comes out then."""
    failed = []

    def guarded():
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join(60)
        assert not thread.is_alive()
        if failed:
            raise failed[0]


@dataclass
class TroubledShop:
    """``ports`` are those to scrape. :meth:`trouble` causes everything, and :meth:`mend` ends it."""

    disk: Path
    syncs: SlowDisk
    stack: ExitStack
    ports: list[int] = field(default_factory=list)
    alarm: str = ""
    grows_since_s: float | None = None

    def __post_init__(self):
        self.data = self.disk / "data"
        self.now = datetime.now(UTC)
        self.broker = self.stack.enter_context(
            InProcess(self.data, connections_max=CONNECTIONS_MAX)
        )
        self.ports.append(self._serve(broker_exposition(self.broker.serving, self.data)))
        self.log = self.stack.enter_context(ms.connect(self.data))
        self._start_spare(0)
        self._declare_apps()
        self._start_groups()
        self.ports.append(self._serve(Exposition({"spark": self._read_state}, cpu_share_max=1)))
        self.ports.append(
            self._port(self.stack.enter_context(serve(self.data, listen="127.0.0.1:0")).url)
        )
        self._start_webhook()
        self._start_capture()
        traffic, self._over = threading.Event(), threading.Event()
        self.stack.enter_context(in_thread(lambda: self._produce_until(traffic), traffic.set))

    # ── what runs ────────────────────────────────────────────────────────────────────────────

    def _serve(self, exposition, port=0):
        return self._port(self.stack.enter_context(serve_metrics(f"127.0.0.1:{port}", exposition)))

    @staticmethod
    def _port(url):
        return urllib.parse.urlsplit(url).port

    def _read_state(self, readings):
        grown_s = 0.0 if self.grows_since_s is None else time.monotonic() - self.grows_since_s
        readings.add("step_state_bytes", 2e9 * 2 ** (grown_s / 3), app="spark", step="minutes")

    def _start_spare(self, port):
        """Start a broker of its own, which will fail."""
        self.spare_stack, folder = self.stack.enter_context(ExitStack()), self.disk / "spare"
        spare = self.spare_stack.enter_context(InProcess(folder))
        exposition = broker_exposition(spare.serving, folder)
        url = self.spare_stack.enter_context(serve_metrics(f"127.0.0.1:{port}", exposition))
        self.spare_log = self.spare_stack.enter_context(ms.connect(folder))
        self.spare_log.create_topic("spare", exist_ok=True)
        if not port:
            self.ports.append(self._port(url))

    def _produce_until(self, ended):
        """Keep the main broker's disk busy."""
        self.log.create_topic("traffic")
        with self.log.producer() as producer:
            while not ended.wait(0.2):
                producer.send("traffic", {"n": 1}).result(timeout=60)
                with suppress(OSError, AssertionError), RawClient(self.broker.address) as client:
                    client.request("Metadata", 1, {"topics": []})  # refused, if there are too many

    def _app(self, name, minutes="1 minute"):
        app = ms.App(name, log=self.data)
        fields = {"ad": str, "at": datetime}
        stream = app.topic(f"{name}-in", fields).stream(
            time="at", watermark=ms.watermark("1 second")
        )
        stream.window(ms.tumbling(minutes), by="ad", name="minutes").agg(n=ms.count()).view(
            "minutes"
        )
        return app

    def _run(self, app):
        app.folder.mkdir(parents=True, exist_ok=True)
        with record_failure(app.folder):
            LocalRun(app.plan(), self.data, app.folder, app.folder / "views.db").run()

    def _declare_apps(self):
        """``busy`` runs, ``behind`` does not, ``edited`` will be run after it was edited."""
        self.apps = {name: self._app(name) for name in ("busy", "behind", "edited")}
        for name, app in self.apps.items():
            self.log.create_topic(f"{name}-in", partitions=2)
            for partition in (0, 1):
                self.send(f"{name}-in", partition, self.now - HOUR, 50)
            self._run(app)

    def send(self, topic, partition, at, count=1, *, values=None, age=timedelta()):
        timestamp_ms = int((time.time() - age.total_seconds()) * 1000)
        rows = values or [{"ad": "a", "at": at.isoformat()} for _ in range(count)]
        with self.log.producer() as producer:
            for row in rows:
                sent = producer.send(topic, row, partition=partition, timestamp_ms=timestamp_ms)
                if age:  # a batch of its own, and so a segment that retention removes
                    sent.result(timeout=60)

    def _start_groups(self):
        """Two topics whose records are an hour old; in one they are to go soon, in the other they go now."""
        for topic in ("soon", "gone"):
            self.log.create_topic(topic, settings={"segment.bytes": "1"})
            self.send(topic, 0, self.now, 4, age=HOUR)
            self._read(topic)

    def _read(self, topic):
        with self.log.consumer(
            topic, group=f"of-{topic}", follow=False, commit="manual"
        ) as consumer:
            list(consumer)
            consumer.commit()

    def _start_webhook(self):
        self.answer = 200
        receiver = self.stack.enter_context(Receiver(lambda _: self.answer))
        for topic in ("hooks", "undelivered"):
            self.log.create_topic(topic)
        what = Webhook(
            "hooks", receiver.url, "hook", "undelivered", retry_policy=RetryPolicy(attempts_max=1)
        )
        quiet = {"on_leading": lambda: None, "on_standby": lambda _: None, "report": lambda _: None}
        runner = WebhookRunner(self.data, what, **quiet)
        self.ports.append(
            self._serve(Exposition({"webhook": runner.read_metrics}, cpu_share_max=1))
        )
        self.stack.enter_context(in_thread(runner.run, runner.request_stop))

    def _start_capture(self):
        self.database = self.disk / "shop.db"
        with sqlite3.connect(self.database) as db:
            db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, n INT)")
            db.execute("INSERT INTO t (n) VALUES (1)")
        capturing = ms.capture(f"sqlite:///{self.database}", to=self.data, name="shop")
        capturing.source._heartbeat_s = 0.05
        capturing.run(until="caught-up")  # the snapshot is there, and the triggers are
        capturing.source._heartbeat_s = HEARTBEAT_S
        copy = ms.apply("shop", f"sqlite:///{self.disk / 'copy.db'}", log=self.data)
        target = copy.target

        def slow_target():
            found = target()
            found.batch_s = (
                HEARTBEAT_S  # so long it waits before it says that there is nothing more
            )
            return found

        copy.target = slow_target
        said, applied = LastStatus(), LastStatus()
        lag = lambda: replace(capturing.source_lag, alarm=self.alarm)  # noqa: E731
        for source in (capture_figures("shop", said, lag), apply_figures("shop", applied)):
            self.ports.append(self._serve(Exposition({"shop": source}, cpu_share_max=1)))
        self.stack.enter_context(
            in_thread(lambda: capturing.run(on_status=said.add), capturing.stop)
        )
        self.stack.enter_context(in_thread(lambda: copy.run(on_status=applied.add), copy.stop))

    # ── what happens to it ───────────────────────────────────────────────────────────────────

    def trouble(self):
        """Let everything happen at once."""
        self._fail_spare()
        # One partition goes on for an hour, the other one stands still.
        self.send("busy-in", 0, self.now, 50)
        self._run(self.apps["busy"])
        # Records that have waited for an hour, and an app that cannot run.
        self.send("behind-in", 0, self.now, age=HOUR)
        with pytest.raises(ConfigError):
            self._run(self._app("edited", "2 minutes"))
        broken = self.apps["busy"].folder.parent / "broken"
        broken.mkdir()
        (broken / "views.db").write_bytes(b"no database" * 1000)
        # Groups that have read nothing since.
        for topic, minutes in (("soon", 70), ("gone", 50)):
            self.send(topic, 0, self.now, 4, age=HOUR)
            self.log.alter_topic(topic, settings={"retention.ms": str(minutes * 60_000)})
        for _ in range(10):  # one removes a share of what is too old
            self.broker.run_maintenance()
        self.alarm, self.answer = "the server keeps too much", 400
        self.grows_since_s = time.monotonic()
        self.go_on()
        self.syncs.slow.add(
            next(self.data.rglob("traffic*"))
        )  # what else is done meanwhile is not slow
        (self.disk / "filler").write_bytes(bytes(int(0.93 * DISK_BYTES) - self._used()))

    def go_on(self):
        """Do again what alerts count within a time, or what is over once it has been caught up with.

        Late and bad events, a record for the webhook, a change of an hour ago, and too many connections.
        """
        self.send("busy-in", 1, self.now - 2 * HOUR, 40)
        self.send("busy-in", 0, self.now, values=[b"no JSON"])
        self._run(self.apps["busy"])
        self.send("hooks", 0, self.now)
        with sqlite3.connect(self.database) as db:
            db.execute("UPDATE t SET n = n + 1")
            db.execute("UPDATE _millstream_changes SET at_ms = at_ms - 1000000 WHERE tbl = 't'")
        host, _, port = self.broker.address.rpartition(":")
        with ExitStack() as clients:
            for _ in range(3 * CONNECTIONS_MAX):
                clients.enter_context(socket.create_connection((host, int(port)), timeout=60))
            time.sleep(0.2)

    def _used(self):
        found = os.statvfs(self.disk)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def _fail_spare(self):
        self.syncs.failing.add(self.disk / "spare")
        with pytest.raises(ms.MillstreamError), self.spare_log.producer() as producer:
            producer.send("spare", {"n": 1}).result(timeout=60)

    def stop_spare(self):
        """End the broker whose disk has failed, as its command does by itself."""
        self.spare_stack.close()

    def mend(self):
        """Do what each alert says."""
        (self.disk / "filler").unlink()
        self.syncs.slow.clear()
        self.syncs.failing.clear()
        self._start_spare(self.ports[1])
        self.send("busy-in", 1, self.now, 50)
        for app in self.apps.values():
            self._run(app)
        broken = self.apps["busy"].folder.parent / "broken"
        (broken / "views.db").unlink()
        broken.rmdir()
        self._read("soon")
        self.log.commit_offsets(
            "of-gone", {TopicPartition("gone", 0): self.log.end_offsets("gone")[0]}
        )
        self.alarm, self.answer, self.grows_since_s = "", 200, None
