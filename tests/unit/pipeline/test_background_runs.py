import subprocess
import sys
import threading
import time

import polars as pl
import pytest

import millstream as ms
from millstream.errors import ConfigError, FencedError, UserCodeError
from millstream.views.runs.control_files import active_runs, stop_request_file

PATIENCE_S = 120


def app_over(log, name="ads", window="1 minute"):
    app = ms.App(name, log=log)
    topic = app.topic("clicks", {"ad": str, "n": int})
    topic.stream().window(ms.tumbling(window), by="ad").emit("update").agg(n=ms.sum("n")).view(
        "sums"
    )
    return app


def send(log, rows):
    with ms.connect(log) as opened, opened.producer() as producer:
        for row in rows:
            producer.send("clicks", row)


def wait_until(condition):
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends, "it did not come in time"
        time.sleep(0.02)


def test_an_app_runs_beside_the_program_and_says_how_it_stands(tmp_path):
    app = app_over(tmp_path)
    assert (app.status.state, app.status.views) == ("not started", {})
    running = app.start()
    assert (running.status.state, running.status.engine) == ("running", "local")
    send(tmp_path, [{"ad": "a", "n": 1}] * 3)
    wait_until(lambda: app.status.read == 3)
    assert app.status.views["sums"] == 1
    status = app.stop()
    assert status.state == "stopped"
    assert sum(status.position["clicks"].values()) == 3
    assert running.report.reason == "stopped"
    assert not active_runs(app.folder)
    assert not stop_request_file(app.folder).exists()
    assert app.stop().state == "stopped"  # again: nothing happens


def test_a_start_takes_the_place_of_the_run_before_also_of_another_object(tmp_path):
    first, second = app_over(tmp_path), app_over(tmp_path)
    running = first.start()
    again = first.start()
    other = second.start()
    assert [one.is_alive for one in (running, again, other)] == [False, False, True]
    assert (running.status.error, again.status.error) == (None, None)
    assert len(active_runs(first.folder)) == 1
    assert first.status.state == "running"  # whoever started it
    first.stop()
    assert not other.is_alive


def test_a_mistake_of_the_declaration_is_raised_where_the_app_is_started(tmp_path):
    app_over(tmp_path).run(until="caught-up", engine="local")
    send(tmp_path, [{"ad": "a", "n": 1}])
    app_over(tmp_path).run(until="caught-up", engine="local")
    changed = app_over(tmp_path, window="2 minutes")
    with pytest.raises(ConfigError, match="not the one that the state"):
        changed.start()
    assert changed.status.state == "failed"
    assert "not the one that the state" in changed.status.error
    assert changed.stop().state == "failed"  # it was told
    with pytest.raises(ConfigError, match="no view and no other output"):
        ms.App("empty", log=tmp_path).start()
    with pytest.raises(ConfigError, match="show="):
        app_over(tmp_path, "shown").start(show=True)


def test_a_later_failure_is_raised_once_and_stays_in_the_status(tmp_path):
    app = ms.App("fails", log=tmp_path, on_error="stop")
    stream = app.topic("clicks", {"ad": str, "n": int}).stream()
    stream.with_columns(share=pl.col("ad").cast(pl.Int64)).view("shares", key="ad")
    running = app.start()
    send(tmp_path, [{"ad": "a", "n": 1}])
    wait_until(lambda: not running.is_alive)
    status = app.status
    assert status.state == "failed"
    assert "step 'with_columns(share)' failed" in status.error
    with pytest.raises(UserCodeError, match="with_columns"):
        app.stop()
    assert app.stop() == running.stop()
    assert running.wait(1)


def test_a_start_after_a_failure_begins_anew(tmp_path):
    app = ms.App("fails", log=tmp_path, on_error="stop")
    broken = [True]

    def halve(frame):
        if broken[0] and frame.height:
            raise ValueError("broken")
        return frame.with_columns(half=pl.col("n") / 2)

    app.topic("clicks", {"ad": str, "n": int}).stream().map_frames(halve).view("halves", key="ad")
    running = app.start()
    send(tmp_path, [{"ad": "a", "n": 1}])
    wait_until(lambda: not running.is_alive)
    broken[0] = False
    again = app.start()
    wait_until(lambda: app.status.views.get("halves") == 1)
    again.stop()


def test_a_run_that_another_one_replaces_ends_and_says_why(tmp_path):
    app = app_over(tmp_path)
    running = app.start()
    app_over(tmp_path).run(until="caught-up", engine="local")
    wait_until(lambda: not running.is_alive)
    assert "was replaced by run 2" in app.status.error
    with pytest.raises(FencedError):
        app.stop()
    assert app.stop().state == "failed"


def test_the_status_can_be_asked_at_any_moment_of_a_start(tmp_path):
    app = app_over(tmp_path)
    seen, ended = [], threading.Event()

    def ask():
        while not ended.is_set():
            seen.append(app.status.state)

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(3):
        app.start()
        app.stop()
    ended.set()
    asking.join()
    assert {"not started", "starting", "running", "stopped"} <= {*seen, "running"}
    assert "failed" not in seen


def test_wait_ends_with_the_run(tmp_path):
    app = app_over(tmp_path)
    running = app.start()
    assert not running.wait(0.05)
    running.stop()
    caught_up = app.start(until="caught-up")
    assert caught_up.wait(PATIENCE_S)
    assert caught_up.report.reason == "caught-up"


def test_an_app_that_is_started_leaves_no_thread_behind(tmp_path):
    before = threading.active_count()
    app_over(tmp_path).start().stop()
    assert threading.active_count() <= before


PROGRAM = """
import millstream as ms
app = ms.App("ads", log={log!r})
app.topic("clicks", {{"ad": str, "n": int}}).stream().view("latest", key="ad")
app.start()
"""


def test_the_end_of_the_process_ends_the_run_and_leaves_nothing(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(log=str(tmp_path))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "apps" / "ads"
    assert not [*folder.glob("running-*.json")]
    assert not (folder / "failed.json").exists()
