"""Sharing state again among Spark partitions, and stopping from outside, on a real Spark."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import millstream as ms
from millstream import testing
from millstream.engine import rescale as rescaling
from millstream.engine.job_metadata import load_job_metadata
from millstream.views.runs.control_files import active_runs
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.store_location import STATE_STORE_FILE

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    user: str
    at: datetime


def rows(count, *, start=0):
    return [
        {"user": f"u{i % 37}", "at": (START + timedelta(seconds=i)).isoformat()}
        for i in range(start, start + count)
    ]


def counted(log):
    app = ms.App("counts", log=log, buckets=4)
    events = app.topic("events", Event, key="user", partitions=3)
    stream = events.stream(time="at", watermark=ms.watermark("1 minute", idle=None))
    stream.window(ms.tumbling("1 day"), by="user").emit("update").agg(n=ms.count()).view("days")
    stream.window(ms.tumbling("5 minutes"), by="user").agg(n=ms.count()).view("minutes")
    return app


def send(folder, events):
    with ms.connect(folder) as log:
        if "events" not in log.topics():
            log.create_topic("events", partitions=3)
        with log.producer() as producer:
            for event in events:
                producer.send("events", event, key=event["user"])


def view(folder, name):
    with ms.view(name, log=folder) as found:
        return found.scan()


def test_after_a_rescale_the_answers_are_those_of_an_uninterrupted_run(spark, tmp_path, in_workers):
    events = rows(3000)
    send(tmp_path, events[:1200])
    counted(tmp_path).run(until="caught-up", rows_per_batch=500)
    app_folder = tmp_path / "apps" / "counts"

    for buckets, partitions, upto in ((16, 4, 2100), (3, 1, 3000)):
        before = load_job_metadata("counts", app_folder / STATE_STORE_FILE)
        done = rescaling.rescale("counts", app_folder, partitions, buckets=buckets)
        assert (done.partitions_before, done.partitions) == (before.partitions, partitions)
        assert (done.buckets_before, done.buckets) == (before.bucket_count, buckets)
        send(tmp_path, events[upto - 900 : upto])
        counted(tmp_path).run(until="caught-up", rows_per_batch=500)
    assert load_job_metadata("counts", app_folder / STATE_STORE_FILE).partitions == 1

    wanted = testing.run(counted("unused"), {"events": events})
    for name in ("days", "minutes"):
        assert view(tmp_path, name).equals(wanted[name])


KILLED = """
import sys
from pathlib import Path
from test_rescale import counted

counted(Path(sys.argv[1])).run(until="caught-up", rows_per_batch=100)
"""


@pytest.mark.long
def test_kills_between_rescales_change_no_answer(tmp_path):
    events = rows(3000)
    send(tmp_path, events)
    app_folder = tmp_path / "apps" / "counts"
    for number, buckets in enumerate((16, 1, 7)):
        _run_until_killed(tmp_path, batches=3 * number + 2)
        rescaling.rescale("counts", app_folder, buckets=buckets)
    _run_until_killed(tmp_path, batches=None)

    wanted = testing.run(counted("unused"), {"events": events})
    for name in ("days", "minutes"):
        key = [column for column in wanted[name].columns if column != "n"]
        assert view(tmp_path, name).sort(key).equals(wanted[name].sort(key))


def _run_until_killed(folder, batches):
    """Run the app in a process of its own; kill it and all it has started once so many batches are committed."""
    here = Path(__file__).parent
    running = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(here)},
        start_new_session=True,
    )
    try:
        while running.poll() is None and not _has_batches(folder / "apps" / "counts", batches):
            time.sleep(0.02)
        assert running.poll() == (0 if batches is None else None)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def _has_batches(app_folder, batches):
    try:
        with SqliteStateStore(app_folder / "views.db", readonly=True) as store:
            last = store.last_batch_id("counts")
            return batches is not None and last is not None and last + 1 >= batches
    except ms.ConfigError:  # there is no store yet
        return False


APP = """
import millstream as ms
from dataclasses import dataclass

@dataclass
class Event:
    user: str

app = ms.App("stopped", log="data")
app.topic("events", Event, partitions=1).stream().view("seen", key="user")
"""


def test_a_running_app_is_stopped_from_outside(tmp_path):
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    with ms.connect(tmp_path / "data") as log:
        log.create_topic("events")
        with log.producer() as producer:
            producer.send("events", {"user": "a"})
    command = [sys.executable, "-m", "millstream"]
    running = subprocess.Popen(
        [*command, "run", "app.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    app_folder = tmp_path / "data" / "apps" / "stopped"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not _has_read(app_folder):
        assert running.poll() is None
        time.sleep(0.1)
    assert len(active_runs(app_folder)) == 1
    stopped = subprocess.run(
        [*command, "stop", "stopped"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert stopped.stdout == "stopped has stopped\n"
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert "stopped: stopped after 1 batch" in out
    shutil.rmtree(app_folder)


def _has_read(app_folder):
    try:
        with SqliteStateStore(app_folder / "views.db", readonly=True) as store:
            return store.last_batch_id("stopped") == 0
    except ms.ConfigError:  # there is no store yet
        return False
