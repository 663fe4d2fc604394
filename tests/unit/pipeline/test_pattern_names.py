"""A column whose name polars takes for a pattern divides windows, and identifies rows, as any other does."""

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError

START = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = ["^a.*$", "*"]
WINDOWS = [
    ms.tumbling("1 minute"),
    ms.hopping("1 minute", "30 seconds"),
    ms.cumulating("1 minute", "20 seconds"),
    ms.calendar("1 day", tz="UTC"),
    ms.session("20 seconds"),
    ms.sliding("20 seconds"),
    ms.count_window(3, unbounded=True),
]
ROWS = [
    {
        "at": START + timedelta(seconds=7 * n),
        "id": "xy"[n % 2] if n % 5 else None,
        "ab": n,
        "n": n % 3,
    }
    for n in range(40)
]
END = testing.Watermark("events", at=START + timedelta(days=2))


def outputs(name, declare):
    """Give the rows of a view, with the column ``id`` under a name; then called ``id`` again."""
    app = ms.App("names", log="unused", buckets=2)
    columns = {"at": datetime, name: str | None, "ab": int, "n": int}
    stream = app.topic("events", columns).stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None), lateness="5 minutes"
    )
    declare(stream, name)
    rows = [{name if column == "id" else column: row[column] for column in row} for row in ROWS]
    out = testing.run(app, {"events": [*rows, END]}, batches=4, partitions=1, crash=1)
    table = out["out"].rename({name: "id"}, strict=True)
    return sorted(map(repr, table.select(sorted(table.columns)).to_dicts()))


def same(declare, names=NAMES):
    expected = outputs("id", declare)
    assert expected
    for name in names:
        assert outputs(name, declare) == expected


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("mode", ["final", "update"])
def test_windows_by_it_are_those_by_a_column_of_another_name(window, mode):
    def declare(stream, name):
        counted = stream.window(window, by=[name, "n"]).emit(mode)
        rows = counted.agg(rows=ms.count(), most=ms.max("ab"))
        label = "window_number" if "count_window" in str(window) else "window_end"
        rows.view("out", key=[label, name, "n"])

    same(declare, ["^a.*$" if mode == "update" else "*"])


def test_a_window_of_windows_takes_it_from_the_one_before():
    def declare(stream, name):
        first = stream.key_by(name).window(ms.tumbling("30 seconds")).emit("retract")
        counts = first.agg(rows=ms.count())
        assert counts.shape.key == (name,)
        again = counts.window(ms.tumbling("1 minute")).emit("update")
        again.agg(rows=ms.sum("rows"), windows=ms.count()).view("out")

    same(declare)


def test_comparisons_and_alerts_by_it():
    def declare(stream, name):
        windows = stream.window(ms.tumbling("30 seconds"), by=name).agg(rows=ms.count())
        windows.compare("rows", to="1 day").view("out")

    same(declare)


@pytest.mark.parametrize("null", ["pass", "drop"])
@pytest.mark.parametrize("changes", [False, True])
def test_deduplication_by_it(null, changes):
    def declare(stream, name):
        if changes:
            windows = stream.window(ms.tumbling("10 seconds"), by=[name, "ab"]).emit("update")
            rows = windows.agg(rows=ms.count())
            rows.dedup(name, within="30 seconds", null=null).view("out")
        else:
            stream.dedup(name, within="30 seconds", null=null).view("out", key=["ab"])

    same(declare)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_aggregates_may_have_such_a_name(window):
    def rows_with(given):
        app = ms.App("names", log="unused", buckets=2)
        stream = app.topic(
            "events", {"at": datetime, "id": str | None, "ab": int, "n": int}
        ).stream(time="at", watermark=ms.watermark("0 seconds", idle=None), lateness="5 minutes")
        labels = {"count_window": "window_number", "session": "window_start"}
        label = labels.get(str(window).partition("(")[0], "window_end")
        results = stream.window(window, by="id").emit("retract")
        results = results.agg(**{given: ms.sum("ab"), "n": ms.min("n")})
        results.filter(pl.col("n") == 0).view("out", key=[label, "id"])
        out = testing.run(app, {"events": [*ROWS, END]}, batches=4, partitions=1, crash=1)["out"]
        out.columns = ["given" if column == given else column for column in out.columns]
        return out.to_dicts()

    assert rows_with("^n.*$") == rows_with("plain") != []


EVERY_KIND = {
    "float": pl.col("n") / pl.col("n"),
    "datetime": pl.col("at"),
    "date": pl.col("at").dt.date(),
    "duration": pl.duration(seconds="n"),
    "decimal": pl.col("n").cast(pl.Decimal(38, 9)),
    "list": pl.concat_list("n", "ab"),
    "struct": pl.struct(pl.col("n").alias("^n$"), pl.col("ab").alias("*")),
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_sinks_take_columns_of_such_a_name(kind):
    def rows_with(given):
        app = ms.App("names", log="unused", buckets=2)
        stream = app.topic("events", {"at": datetime, "ab": int, "n": int}).stream(time="at")
        rows = stream.select("ab", **{given: EVERY_KIND[kind]})
        rows.view("out", key="ab")
        rows.to("out-topic", partitions=1)
        given_rows = [{name: row[name] for name in ("at", "ab", "n")} for row in ROWS]
        out = testing.run(app, {"events": given_rows}, batches=2, partitions=1)
        tables = [out["out"], out.topic("out-topic").drop("timestamp")]
        for table in tables:
            table.columns = ["given" if column == given else column for column in table.columns]
        return [repr(table.to_dicts()) for table in tables]

    assert rows_with("^a.*$") == rows_with("plain")


def test_frames_for_functions_have_it():
    def declare(stream, name):
        def doubled(frame):
            return frame.with_columns(pl.col("ab") * 2)

        whole = stream.map_frames(doubled)
        parts = whole.map_frames(lambda frame: doubled(frame.filter(pl.col("n") > 0)), rows="any")
        parts.view("out", key="ab")

    same(declare)


def test_explode_takes_it():
    def rows_with(given):
        app = ms.App("names", log="unused")
        stream = app.topic("events", {"ab": int, given: list[int]}, partitions=1).stream()
        stream.explode(given).dedup(given, within="1 hour").view("out", key=["ab", given])
        rows = [{"ab": n, given: [n, n + 1]} for n in range(5)]
        return testing.run(app, {"events": rows}, batches=2)["out"].rows()

    assert (
        rows_with("^a.*$")
        == rows_with("plain")
        == [(0, 0), (0, 1), *((n, n + 1) for n in range(1, 5))]
    )


def test_names_that_would_be_taken_twice_are_refused():
    app = ms.App("names", log="unused")
    topic = app.topic("events", {"at": datetime, "^a$": str, "by 1": int})
    window = topic.stream(time="at").window(ms.tumbling("1 minute"), by="^a$")
    with pytest.raises(ConfigError, match="'\\^a\\$'"):
        window.agg(**{"^a$": ms.count()})
    rows = window.agg(**{"by 2": ms.sum("by 1")})
    assert list(rows.columns) == ["window_start", "window_end", "^a$", "by 2"]
    late = topic.stream(time="at", late="side").window(ms.tumbling("1 minute"), by="^a$")
    with pytest.raises(ConfigError, match="late rows have all columns"):
        late.agg(n=ms.count())
