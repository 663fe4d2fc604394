"""The job on Spark: the kernels' answers, one commit, restarts, refusals and drained stops."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, FencedError, UserCodeError
from millstream.spark.runtime.session import stop_session
from millstream.views.state_store.sqlite_store import SqliteStateStore

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    id: str
    at: datetime
    ad: int
    kind: str


def rows(count, *, start=0):
    """Make events half a second apart, every fifth sent twice, every seventh 100 s late."""
    made = []
    for i in range(start, start + count):
        at = START + timedelta(seconds=i / 2 - (100 if i % 7 == 0 else 0))
        event = {"id": f"e{i}", "at": at.isoformat(), "ad": i % 11, "kind": "ic"[i % 3 == 0]}
        made += [event] * (2 if i % 5 == 0 else 1)
    return made


def two_stages(log, name="two", **options):
    app = ms.App(name, log=log, **options)
    events = app.topic("events", Event, key="ad", partitions=3)
    stream = events.stream(time="at", watermark=ms.watermark("2 minutes", idle=None))
    once = stream.window(ms.tumbling("1 minute"), by=["id", "ad", "kind"]).agg(copies=ms.count())
    by_ad = once.window(ms.tumbling("1 minute"), by="ad").emit("update")
    by_ad.agg(n=ms.count(), clicks=ms.count(pl.col("kind") == "c")).with_columns(
        rate=pl.col("clicks") / pl.col("n")
    ).view("by_ad")
    stream.window(ms.tumbling("1 hour")).emit("update").agg(n=ms.count()).view("by_hour")
    return app


def send(folder, events):
    with ms.connect(folder) as log:
        if "events" not in log.topics():
            log.create_topic("events", partitions=3)
        with log.producer() as producer:
            for event in events:
                producer.send("events", event, key=str(event["ad"]))


def view(app, name):
    with SqliteStateStore(app.folder / "views.db", readonly=True) as store:
        found = store.scan(name)
    return found.sort(found.columns)


def expected(events, name="by_ad"):
    out = testing.run(two_stages("unused"), {"events": events})[name]
    return out.sort(out.columns)


@pytest.mark.quick
def test_spark_gives_the_kernels_answers_in_one_batch_and_in_many(spark, tmp_path):
    events = rows(600)
    for batches in (1, 5):
        out = testing.run(two_stages("unused"), {"events": events}, batches=batches, engine="spark")
        assert out["by_ad"].sort(out["by_ad"].columns).equals(expected(events))
        assert out["by_hour"].equals(expected(events, "by_hour"))
        assert out.ledger["batch_id"].n_unique() >= batches
    # What a job sets for its own query is not for those of the program.
    assert spark.conf.get("spark.sql.codegen.wholeStage") == "true"


def test_a_second_run_goes_on_where_the_first_stopped(spark, tmp_path):
    app = two_stages(tmp_path)
    send(tmp_path, rows(300))
    first = app.run(until="caught-up")
    assert (first.read, first.reason) == (360, "caught-up")
    assert sum(first.lag.values()) == 0
    assert app.run(until="caught-up").batches == 0
    send(tmp_path, rows(300, start=300))
    assert two_stages(tmp_path).run(until="caught-up").read == 360
    assert view(app, "by_ad").equals(expected(rows(600)))
    # The history of both runs is in the store, each batch once, with its phases and steps.
    with SqliteStateStore(app.folder / "views.db", readonly=True) as store:
        batches = store.batches(app.name)
    assert [one["batch_id"] for one in batches] == [*range(len(batches))]
    assert sum(one["read"] for one in batches) == 720
    assert len({one["run"] for one in batches}) == 2
    assert batches[0]["phases"].keys() >= {"plan", "read", "stages", "collect"}
    assert sum(one["steps"]["events"].get("worked", 0) for one in batches) > 0
    assert batches[-1]["state"]
    assert batches[-1]["ends"].keys() == {"events"}


def test_the_checkpoint_is_on_this_machine_where_another_file_system_is_the_default(
    spark, tmp_path
):
    app = two_stages(tmp_path / "log")
    spark.conf.set("fs.defaultFS", "hdfs://127.0.0.1:1")  # as on YARN; nothing listens there
    try:
        for events in (rows(20), rows(20, start=20)):
            send(tmp_path / "log", events)
            app.run(until="caught-up")
    finally:
        spark.conf.unset("fs.defaultFS")
    assert (app.folder / "checkpoint" / "commits").is_dir()
    assert view(app, "by_hour")["n"].sum() == len(rows(40))


def test_native_steps_and_streams_given_out_are_spark_dataframes(spark, tmp_path):
    from pyspark.sql import functions as F

    @dataclass
    class Shouted:
        at: datetime
        ad: int
        loud: str

    def shout(frame):
        assert frame.isStreaming
        return frame.where("ad < 5").select("at", "ad", F.upper("kind").alias("loud"))

    app = ms.App("native", log=tmp_path)
    stream = app.topic("events", Event, key="ad", partitions=3).stream(time="at")
    loud = stream.spark(shout, schema=Shouted)
    loud.window(ms.tumbling("1 hour"), by="loud").emit("update").agg(n=ms.count()).view("loud")
    events = rows(200)
    send(tmp_path, events)
    app.run(until="caught-up")
    wanted = {"I": 0, "C": 0}
    for event in events:
        wanted[event["kind"].upper()] += event["ad"] < 5
    counts = view(app, "loud").group_by("loud").agg(pl.col("n").sum())
    assert dict(counts.iter_rows()) == wanted

    seen = []
    frame = stream.filter(pl.col("kind") == "c").select("id", "at").to_spark()
    query = (
        frame.writeStream.foreachBatch(lambda df, _: seen.extend(df.collect()))
        .trigger(availableNow=True)
        .option("checkpointLocation", str(tmp_path / "own-checkpoint"))
        .start()
    )
    query.awaitTermination()
    stop_session(frame.sparkSession)  # what to_spark started; the fixture's own use goes on
    assert sorted(row.id for row in seen) == sorted(e["id"] for e in events if e["kind"] == "c")


def test_a_failing_expression_stops_the_job_with_the_users_error_and_commits_nothing(
    spark, tmp_path
):
    app = ms.App("failing", log=tmp_path)
    stream = app.topic("events", Event, key="ad", partitions=3).stream(time="at")
    number = pl.col("kind").str.to_integer()
    parsed = stream.with_columns(number=number, name="parse kind", on_error="stop")
    parsed.window(ms.tumbling("1 hour"), by="number").agg(n=ms.count()).view("out")
    send(tmp_path, rows(10))
    with pytest.raises(UserCodeError, match="step 'parse kind' failed") as caught:
        app.run(until="caught-up")
    assert "java" not in str(caught.value)
    assert caught.value.step == "parse kind"
    assert view(app, "out").is_empty()


def test_a_changed_pipeline_is_refused_before_it_touches_the_state(spark, tmp_path):
    send(tmp_path, rows(50))
    two_stages(tmp_path).run(until="caught-up")
    app = ms.App("two", log=tmp_path)
    stream = app.topic("events", Event, key="ad", partitions=3).stream(time="at")
    stream.window(ms.tumbling("5 minutes"), by="ad").agg(n=ms.count()).view("other")
    with pytest.raises(ConfigError, match=r"The program is not the one.*is no longer there"):
        app.run(until="caught-up")
    with pytest.raises(ConfigError, match="2 buckets and the app asks for 8"):
        two_stages(tmp_path, buckets=8).run(until="caught-up")


def test_a_deleted_checkpoint_is_refused_while_its_views_are_there(spark, tmp_path):
    send(tmp_path, rows(50))
    app = two_stages(tmp_path)
    app.run(until="caught-up")
    shutil.rmtree(app.folder / "checkpoint")
    with pytest.raises(ConfigError, match="checkpoint"):
        app.run(until="caught-up")
    shutil.rmtree(app.folder)
    app.run(until="caught-up")
    assert view(app, "by_hour").equals(expected(rows(50), "by_hour"))


def test_a_checkpoint_that_is_older_than_the_views_is_refused(spark, tmp_path):
    app = two_stages(tmp_path)
    send(tmp_path, rows(50))
    app.run(until="caught-up")
    shutil.copytree(app.folder / "checkpoint", tmp_path / "backup")
    send(tmp_path, rows(50, start=50))
    app.run(until="caught-up")
    shutil.rmtree(app.folder / "checkpoint")
    shutil.copytree(tmp_path / "backup", app.folder / "checkpoint")
    with pytest.raises(ConfigError, match="older than they are"):
        app.run(until="caught-up")


def test_views_that_are_missing_beside_a_checkpoint_that_has_gone_on_are_refused(spark, tmp_path):
    app = two_stages(tmp_path)
    send(tmp_path, rows(50))
    app.run(until="caught-up")
    for path in app.folder.glob("views.db*"):
        path.unlink()
    with pytest.raises(ConfigError, match="the views hold no batch"):
        two_stages(tmp_path).run(until="caught-up")


def test_an_older_run_is_fenced_off_by_a_newer_one(spark, tmp_path):
    send(tmp_path, rows(50))
    app = two_stages(tmp_path)

    def usurp(progress):
        with SqliteStateStore(app.folder / "views.db") as store:
            identity = (app.folder / "checkpoint" / "millstream-checkpoint-id").read_text()
            store.begin_run("two", "main", identity)

    with pytest.raises(FencedError):
        app.run(until="caught-up", rows_per_batch=20, on_progress=usurp)


def test_a_condition_or_a_timeout_ends_the_run_after_the_batch_at_work(spark, tmp_path):
    send(tmp_path, rows(100))
    app = two_stages(tmp_path)
    report = app.run(until=lambda progress: progress.batch_id == 1, rows_per_batch=30)
    assert report.reason == "condition"
    assert report.batches >= 2
    assert app.run(timeout="0 seconds").reason == "timeout"
    app.run(until="caught-up")
    assert view(app, "by_ad").equals(expected(rows(100)))


def test_a_dead_record_is_kept_with_its_place_and_reason(spark, tmp_path):
    send(tmp_path, rows(20))
    with ms.connect(tmp_path) as log, log.producer() as producer:
        producer.send("events", b"no json", partition=1)
    app = two_stages(tmp_path)
    report = app.run(until="caught-up")
    assert report.dead == 1
    dead = view(app, "dead_letters").to_dicts()
    assert [(d["topic"], d["partition"], d["value"]) for d in dead] == [("events", 1, b"no json")]


PROGRAM = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, {tests!r})
    from test_job import two_stages
    def tell(progress):
        print("batch", progress.batch_id, flush=True)
    report = two_stages({folder!r}).run(until={until!r}, rows_per_batch=40, on_progress=tell)
    print("ended", report.reason, flush=True)
    """
)


def start_program(folder, until):
    source = PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder), until=until)
    return subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def lines_until(process, wanted):
    for line in process.stdout:
        if line.startswith(wanted):
            return line
    raise AssertionError(f"ended without {wanted!r}: exit code {process.wait()}")


def test_ctrl_c_lets_the_batch_finish_and_the_next_run_goes_on(spark, tmp_path):
    send(tmp_path, rows(100))
    with start_program(tmp_path, "stopped") as process:
        lines_until(process, "batch")
        os.killpg(process.pid, signal.SIGINT)
        assert "stopped" in lines_until(process, "ended")
    assert process.returncode == 0
    app = two_stages(tmp_path)
    app.run(until="caught-up")
    assert view(app, "by_ad").equals(expected(rows(100)))
