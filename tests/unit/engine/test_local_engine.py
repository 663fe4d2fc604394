"""The engine without a JVM: what it refuses, which batch it begins with, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import millstream as ms
from millstream.engine.disk_room import translate_full_disk
from millstream.engine.plan_log import PlanLog
from millstream.engine.source.offsets import SourceOffset
from millstream.errors import (
    ConfigError,
    CorruptionError,
    DiskFullError,
    FencedError,
    UserCodeError,
)
from millstream.pipeline.engine_choice import choose_engine
from millstream.views.runs.control_files import active_runs, stop_request_file
from millstream.views.state_store.sqlite_store import SqliteStateStore

SOURCE = Path(ms.__file__).parents[1]


def declare(folder, **options):
    app = ms.App("counts", log=folder, **options)
    clicks = app.topic("clicks", {"ad": str, "cost": int}, key="ad", partitions=2)
    clicks.stream().group_by("ad").agg(n=ms.count(), cost=ms.sum("cost")).view("ads")
    return app


def send(folder, first, end):
    with ms.connect(folder) as log:
        log.create_topic("clicks", partitions=2, exist_ok=True)
        with log.producer() as producer:
            for i in range(first, end):
                producer.send("clicks", {"ad": f"a{i % 7}", "cost": i}, key=f"a{i % 7}")


def rows(folder):
    with ms.view("ads", log=folder) as view:
        return {ad: (n, cost) for ad, n, cost in view.scan().select("ad", "n", "cost").rows()}


def expected(end):
    numbers = {f"a{key}": list(range(key, end, 7)) for key in range(min(7, end))}
    return {ad: (len(found), sum(found)) for ad, found in numbers.items()}


def run(app, **options):
    return app.run(engine="local", **{"until": "caught-up", **options})


def test_a_run_goes_on_where_the_last_one_ended_and_its_report_is_complete(tmp_path):
    send(tmp_path, 0, 50)
    report = run(declare(tmp_path), rows_per_batch=20)
    assert (report.reason, report.read, report.batches, report.ok) == ("caught-up", 50, 3, True)
    assert sum(report.lag.values()) == 0
    assert run(declare(tmp_path)).batches == 0
    send(tmp_path, 50, 80)
    assert run(declare(tmp_path), count=1, rows_per_batch=10).reason == "count"
    assert run(declare(tmp_path), until=lambda progress: progress.read > 0).reason == "condition"
    assert rows(tmp_path) == expected(80)
    assert active_runs(tmp_path / "apps" / "counts") == []


def test_a_batch_that_was_begun_is_repeated_as_it_was_planned(tmp_path):
    send(tmp_path, 0, 40)
    app = declare(tmp_path)
    run(app, rows_per_batch=10, count=20)
    plans = PlanLog(app.folder / "checkpoint")
    done = max(int(path.name) for path in (plans.checkpoint / "commits").iterdir())
    before = SourceOffset.from_json(plans.plan(done))
    one, two = before.topics["clicks"]
    # As a run that has died planned it: no run would end its batch there now.
    ends = {"clicks": (replace(one, offset=one.offset + 3), two)}
    plans.add(done + 1, replace(before, topics=ends).to_json())
    send(tmp_path, 40, 60)
    seen = []
    run(declare(tmp_path), on_progress=seen.append)
    assert [progress.batch_id for progress in seen] == [done + 1, done + 2]
    assert seen[0].read == 3
    assert rows(tmp_path) == expected(60)


def test_a_checkpoint_without_the_plan_before_is_refused(tmp_path):
    send(tmp_path, 0, 10)
    app = declare(tmp_path)
    run(app)
    (app.folder / "checkpoint" / "offsets" / "0").write_text("v1\n{}\n-")
    with pytest.raises(CorruptionError, match="Restore the checkpoint"):
        run(declare(tmp_path))


def test_a_request_to_stop_and_a_timeout_end_it_between_batches(tmp_path):
    send(tmp_path, 0, 10)
    app = declare(tmp_path)

    def stop(_progress):
        stop_request_file(app.folder).touch()

    assert run(app, until="stopped", on_progress=stop).reason == "stopped"
    assert not stop_request_file(app.folder).exists()
    assert run(declare(tmp_path), until="stopped", timeout="0.2 seconds").reason == "timeout"
    assert rows(tmp_path) == expected(10)


def test_records_that_arrive_while_it_waits_are_read(tmp_path):
    send(tmp_path, 0, 10)
    sent = []

    def send_more(progress):
        if not sent:
            sent.append(threading.Timer(0.2, send, (tmp_path, 10, 30)))
            sent[0].start()

    read = lambda progress: sum(n for n, _ in rows(tmp_path).values()) == 30  # noqa: E731
    assert run(declare(tmp_path), until=read, on_progress=send_more).reason == "condition"
    sent[0].join()
    assert rows(tmp_path) == expected(30)


def test_one_interrupt_lets_the_batch_end_and_a_second_does_not(tmp_path):
    send(tmp_path, 0, 10)
    app = declare(tmp_path)

    def interrupt(_progress):
        os.kill(os.getpid(), signal.SIGINT)

    assert run(app, until="stopped", on_progress=interrupt).reason == "stopped"
    assert rows(tmp_path) == expected(10)
    send(tmp_path, 10, 20)
    twice = []

    def read_slowly(table):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        twice.append(table.height)
        return table

    slow = ms.App("slow", log=tmp_path)
    clicks = slow.topic("clicks", {"ad": str, "cost": int}, key="ad", partitions=2)
    clicks.stream().map_frames(read_slowly, schema={"ad": pl.String}).view("seen", key="ad")
    assert run(slow, until="stopped").reason == "stopped"
    assert twice == []
    with SqliteStateStore(slow.folder / "views.db", readonly=True) as store:
        assert store.last_batch_id("slow", "main") is None
    assert (slow.folder / "checkpoint" / "offsets" / "0").exists()


def test_a_run_that_a_newer_one_replaced_is_refused(tmp_path):
    send(tmp_path, 0, 30)

    def replace(_progress):
        run(declare(tmp_path))

    with pytest.raises(FencedError):
        run(declare(tmp_path), rows_per_batch=10, on_progress=replace)
    assert rows(tmp_path) == expected(30)


def test_a_run_that_was_replaced_leaves_no_plan_behind(tmp_path):
    send(tmp_path, 0, 30)
    app = declare(tmp_path)

    def replace_run(_progress):
        with SqliteStateStore(app.folder / "views.db") as store:
            store.begin_run("counts", "main", store.checkpoint_id("counts", "main"))

    with pytest.raises(FencedError):
        run(app, rows_per_batch=10, on_progress=replace_run)
    assert [path.name for path in (app.folder / "checkpoint" / "offsets").iterdir()] == ["0"]
    run(declare(tmp_path))
    assert rows(tmp_path) == expected(30)


def test_an_idle_run_learns_that_it_was_replaced(tmp_path):
    send(tmp_path, 0, 30)
    app = declare(tmp_path)

    def replace_run(progress):
        if not any(progress.lag.values()):  # nothing comes after it
            with SqliteStateStore(app.folder / "views.db") as store:
                store.begin_run("counts", "main", store.checkpoint_id("counts", "main"))

    with pytest.raises(FencedError):
        run(app, until="stopped", on_progress=replace_run, timeout="5m")


def test_an_error_of_the_users_code_stops_it_with_nothing_of_the_batch(tmp_path):
    send(tmp_path, 0, 10)
    app = ms.App("failing", log=tmp_path, on_error="stop")
    clicks = app.topic("clicks", {"ad": str, "cost": int}, key="ad", partitions=2).stream()
    clicks.filter(pl.col("ad").str.to_integer() > 0).view("v", key="ad")
    with pytest.raises(UserCodeError):
        run(app)
    with SqliteStateStore(app.folder / "views.db", readonly=True) as store:
        assert store.last_batch_id("failing", "main") is None
    assert json.loads((app.folder / "failed.json").read_text())["kind"] == "UserCodeError"


@pytest.mark.parametrize("option", [{"master": "spark://h:7077"}, {"settings": {"a": "b"}}])
def test_what_only_spark_has_is_refused_before_anything_is_there(tmp_path, option):
    (name,) = option
    with pytest.raises(ConfigError, match=f"{name}=, which is for Spark"):
        run(declare(tmp_path), **option)
    assert not (tmp_path / "apps" / "counts" / "checkpoint").exists()


def test_the_engine_is_what_the_program_says_then_its_command_line_then_the_environment(
    monkeypatch,
):
    monkeypatch.setattr(sys, "argv", ["app.py"])
    monkeypatch.delenv("MILLSTREAM_ENGINE", raising=False)
    assert choose_engine(None) == "spark"
    monkeypatch.setenv("MILLSTREAM_ENGINE", "local")
    assert choose_engine(None) == "local"
    monkeypatch.setattr(sys, "argv", ["app.py", "--engine", "spark"])
    assert choose_engine(None) == "spark"
    assert choose_engine("local") == "local"
    monkeypatch.setattr(sys, "argv", ["app.py", "--engine=lokal"])
    with pytest.raises(
        ConfigError, match=r"--engine of app.py is 'lokal'.*Did you mean 'local'.*app\.run\(engine="
    ):
        choose_engine(None)
    assert choose_engine("spark") == "spark"
    monkeypatch.setattr(sys, "argv", ["app.py", "--engine"])
    with pytest.raises(ConfigError, match='Choose "spark" or "local"'):
        choose_engine(None)
    with pytest.raises(ConfigError, match="run's engine is 'flink'"):
        choose_engine("flink")


PROGRAM = """
import sys
class NotInstalled:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("pyspark", "py4j", "pandas", "cloudpickle"):
            raise ModuleNotFoundError(f"no {name}", name=name)
sys.meta_path.insert(0, NotInstalled())
import polars as pl
import millstream as ms
app = ms.App("counts", log=sys.argv[1])
clicks = app.topic("clicks", {"ad": str, "cost": int}, key="ad", partitions=2).stream()
clicks.filter(pl.col("cost") >= 0).group_by("ad").agg(n=ms.count(), cost=ms.sum("cost")).view("ads")
print(app.run(until="caught-up"))
"""


def test_it_needs_neither_pyspark_nor_java(tmp_path):
    send(tmp_path, 0, 20)
    (tmp_path / "program.py").write_text(PROGRAM)
    program = [sys.executable, tmp_path / "program.py", tmp_path]
    environment = {"PATH": "/nowhere", "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run(
        [*program, "--engine", "local"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "read 20 events" in ended.stdout
    assert rows(tmp_path) == expected(20)
    on_spark = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert on_spark.returncode != 0
    assert 'engine="local"' in on_spark.stderr


def test_a_full_disk_is_told_in_a_sentence_and_other_errors_of_files_stay_as_they_are(tmp_path):
    with (
        pytest.raises(
            DiskFullError,
            match=r"/dev/full could not be written.*Make room on the disk, then run again",
        ),
        translate_full_disk(Path("/dev/full")),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")
    with pytest.raises(FileNotFoundError), translate_full_disk(tmp_path):
        (tmp_path / "gone").read_bytes()
