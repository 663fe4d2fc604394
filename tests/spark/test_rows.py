"""Rows on Spark: DataFrames in and out, user functions in the workers, and their errors."""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pyarrow as pa
import pytest

import millstream as ms
from millstream.errors import ConfigError, UserCodeError
from millstream.pipeline.watermarks import check_dataframe_watermark
from millstream.spark.runtime.session import stop_session
from millstream.views.state_store.sqlite_store import SqliteStateStore

START = datetime(2026, 1, 1, tzinfo=UTC)
PLANNER = "pyspark.sql.streaming.python_streaming_source_runner"
WORKER = "millstream.spark.runtime.worker_daemon"


@dataclass
class Event:
    at: datetime
    id: int
    text: str


def event(number, text):
    return {"at": (START + timedelta(seconds=number)).isoformat(), "id": number, "text": text}


def send(folder, events):
    with ms.connect(folder) as log:
        if "events" not in log.topics():
            log.create_topic("events", partitions=2)
        with log.producer() as producer:
            for one in events:
                producer.send("events", one, key=str(one["id"]))


def stored(app, name):
    with SqliteStateStore(app.folder / "views.db", readonly=True) as store:
        return store.scan(name)


def ledger(app):
    with SqliteStateStore(app.folder / "views.db", readonly=True) as store:
        lines = pl.DataFrame(store.ledger(app.name)).drop("batch_id")
    return {line["step"]: line for line in lines.group_by("step").sum().to_dicts()}


def write_rows(folder, name, rows):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(session, folder):
    return session.readStream.schema("at timestamp, id long, text string").json(str(folder))


@pytest.mark.quick
def test_a_dataframe_and_a_topic_are_one_pipeline(spark, tmp_path):
    files = tmp_path / "files"
    write_rows(files, "1.json", [event(i, "ab"[i % 2]) for i in range(30)])
    app = ms.App("mixed", log=tmp_path)
    frame = read_rows(app.spark_session(), files)
    try:
        topic = app.topic("events", Event, partitions=2)
        rule = ms.watermark("0 seconds", idle=None)
        read = topic.stream(time="at", watermark=rule)
        taken = app.from_spark(frame, time="at", watermark=rule, name="files")
        both = read.union(taken.with_columns(pl.col("text").str.to_lowercase()))
        both.window(ms.tumbling("10 seconds"), by="text").agg(n=ms.count()).view("out")
        taken.with_columns(number=pl.col("text").str.to_integer(), name="parse").view(
            "none", key="id"
        )
        send(tmp_path, [event(i, "a") for i in range(15)])
        report = app.run(until="caught-up")
        assert report.read == 45
        # The topic's two partitions have reached 13 and 14: only the first window is closed.
        counts = dict(stored(app, "out").select("text", "n").iter_rows())
        assert counts == {"a": 15, "b": 5}
        dead = stored(app, "dead_letters")
        assert dead["topic"].unique().to_list() == [""]
        assert sorted(json.loads(v)["id"] for v in dead["value"]) == list(range(30))
        lines = ledger(app)
        assert (lines["files"]["read"], lines["files"]["rows_out"]) == (30, 30)
        assert (lines["parse"]["read"], lines["parse"]["dead"]) == (30, 30)

        write_rows(files, "2.json", [event(i, "a") for i in range(5, 40)] + [{"id": 99}])
        send(tmp_path, [event(i, "a") for i in range(20, 40)])
        app.run(until="caught-up")
        assert ledger(app)["files"]["dead"] == 1  # the row without a time
        # 5 … 9 came in a batch after the first window was closed: late.
        late = ledger(app)["tumbling(10 seconds) by text"]["late"]
        assert late == 5
    finally:
        stop_session(frame.sparkSession)


@pytest.mark.quick
def test_a_dataframe_may_pass_a_native_step_and_its_watermark_stays_behind(spark, tmp_path):
    def tenfold(rows):
        rows.createOrReplaceTempView("taken")
        return rows.sparkSession.sql("select id, at, concat(text, text) as text from taken")

    files = tmp_path / "files"
    write_rows(files, "1.json", [event(i, "a") for i in range(30)])
    app = ms.App("through", log=tmp_path / "log")
    frame = read_rows(app.spark_session(), files)
    try:
        taken = app.from_spark(frame, time="at", watermark=ms.watermark("12 seconds"))
        doubled = taken.spark(tenfold).spark(lambda rows: rows.where("id % 2 = 0"), name="even")
        for stream, view in ((taken, "all"), (doubled, "doubled")):
            stream.window(ms.tumbling("10 seconds"), by="text").agg(n=ms.count()).view(view)
        assert app.run(until="caught-up").read == 30
        # The newest is second 29, and what is 12 seconds behind it may still come.
        assert stored(app, "all").select("text", "n").rows() == [("a", 10)]
        assert stored(app, "doubled").select("text", "n").rows() == [("aa", 5)]
        write_rows(files, "2.json", [event(18, "a"), event(16, "a"), event(45, "a")])
        app.run(until="caught-up")
        assert stored(app, "all")["n"].to_list() == [10, 12, 10]
        assert stored(app, "doubled")["n"].to_list() == [5, 7, 5]
        assert {line["late"] for line in ledger(app).values()} == {0}
    finally:
        stop_session(frame.sparkSession)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        (ms.watermark(punctuation="at"), "punctuation"),
        (ms.watermark("1 minute", per="text", ends=pl.col("id") > 3), "per, ends"),
        (ms.watermark("1 minute", future_max="1 hour"), "future_max"),
    ],
)
def test_a_watermark_by_what_a_dataframe_does_not_tell_is_refused(rule, named):
    with pytest.raises(ConfigError, match=f"The watermark of 'files' has {named}.*a delay alone"):
        check_dataframe_watermark(rule, "files")


def test_what_is_no_streaming_dataframe_is_refused(spark, tmp_path):
    app = ms.App("refused", log=tmp_path)
    with pytest.raises(ConfigError, match=r"a batch DataFrame.*readStream"):
        app.from_spark(spark.range(3), time="id")
    with pytest.raises(ConfigError, match="Give a streaming DataFrame"):
        app.from_spark([1, 2], time="id")
    rates = spark.readStream.format("rate").load()
    with pytest.raises(ConfigError, match="types that it cannot take"):
        app.from_spark(rates.selectExpr("timestamp", "interval '1' year as i"), time="timestamp")
    with pytest.raises(ConfigError, match="time of 'dataframe' is of type Int64"):
        app.from_spark(rates, time="value")
    app.from_spark(rates, time="timestamp").view("latest", key="value")
    with pytest.raises(ConfigError, match='engine="spark"'):
        ms_testing_run(app)


def ms_testing_run(app):
    from millstream import testing

    return testing.run(app, {})


def parse(text):
    if text == "bad":
        raise LookupError("not a number at all")
    return len(text) * 2


def test_functions_travel_to_the_workers_and_their_failing_rows_go_aside(spark, tmp_path):
    offset = 5  # functions may close over values

    def padded(frame):
        return frame.with_columns(padded=pl.col("size") + offset)

    app = ms.App("functions", log=tmp_path)
    stream = app.topic("events", Event, partitions=2).stream(time="at")
    size = pl.col("text").map_elements(parse, return_dtype=pl.Int64)
    sized = stream.with_columns(size=size, name="parse").map_frames(padded)
    sized.view("sized", key="id")
    counted = sized.window(ms.tumbling("1 hour"), by="text").emit("update").agg(n=ms.count())
    counted.map_frames(lambda frame: frame.with_columns(more=pl.col("n") + offset)).view("counts")
    texts = ["a", "bad", "ccc", "bad", "a"]
    send(tmp_path, [event(i, text) for i, text in enumerate(texts)])
    assert app.run(until="caught-up").dead == 2
    assert dict(stored(app, "sized").select("id", "padded").iter_rows()) == {0: 7, 2: 11, 4: 7}
    counts = dict(stored(app, "counts").select("text", "more").iter_rows())
    assert counts == {
        text: n + offset for text, n in Counter(t for t in texts if t != "bad").items()
    }
    dead = stored(app, "dead_letters")
    assert dead["reason"].to_list() == ["LookupError: not a number at all"] * 2
    assert {json.loads(value)["id"] for value in dead["value"]} == {1, 3}
    assert dead["step"].to_list() == ["parse"] * 2


def test_an_error_of_the_users_stops_the_job_with_its_file_line_and_row(spark, tmp_path):
    app = ms.App("stopping", log=tmp_path, on_error="stop")
    stream = app.topic("events", Event, partitions=2).stream(time="at")
    size = pl.col("text").map_elements(parse, return_dtype=pl.Int64)
    stream.with_columns(size=size, name='it\'s "parse"').view("sized", key="id")
    send(tmp_path, [event(0, "a"), event(1, "bad")])
    with pytest.raises(UserCodeError) as caught:
        app.run(until="caught-up")
    said = str(caught.value)
    line = parse.__code__.co_firstlineno + 2
    assert f"LookupError: not a number at all, at {__file__}:{line} in parse." in said
    assert f"It is declared at {__file__}:" in said
    assert '"text":"bad"' in said
    assert "java" not in said.lower()
    assert caught.value.step == 'it\'s "parse"'
    assert caught.value.__cause__ is None
    assert stored(app, "sized").is_empty()


def test_a_pipeline_may_read_nothing_but_a_dataframe_and_drains_when_stopped(spark, tmp_path):
    app = ms.App("rates", log=tmp_path / "new")
    session = app.spark_session()
    try:
        rates = session.readStream.format("rate").option("rowsPerSecond", 50).load()
        stream = app.from_spark(rates, time="timestamp", name="rates")
        stream.filter(pl.col("value") % 2 == 0).view("even", key="value")
        report = app.run(until=lambda progress: progress.emitted > 20, timeout="1 minute")
        assert report.reason == "condition"
        even = stored(app, "even")["value"].to_list()
        assert len(even) > 20
        assert even == list(range(0, 2 * len(even), 2))
    finally:
        stop_session(session)


def test_small_batches_are_read_by_the_planner_and_large_ones_by_workers(spark, tmp_path):
    def where(rows):
        started_as = sys.modules["__main__"].__spec__  # None where a test runner started us
        return rows.with_columns(text=pl.lit(started_as.name if started_as else "here"))

    send(tmp_path, [event(i, "") for i in range(10)])
    app = ms.App("where", log=tmp_path)
    stream = app.topic("events", Event, partitions=2).stream(time="at")
    stream.map_frames(where).view("out", key="id")
    app.run(until="caught-up")
    assert set(stored(app, "out")["text"]) == {PLANNER}
    with ms.connect(tmp_path) as log, log.producer() as producer:
        producer.send_many(
            "events", values=pa.array([json.dumps(event(i, "")).encode() for i in range(10, 6_000)])
        )
    app.run(until="caught-up")
    assert Counter(stored(app, "out")["text"]) == {PLANNER: 10, WORKER: 5_990}
