"""Every type of polars is right as key, value and time, or refused where it is declared."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import every_type
import polars as pl
import pytest
from every_type import SAMPLES, key_of, keys_of, table_name

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.column_types import TYPES, ColumnType, column_type

START = datetime(2026, 1, 1, tzinfo=UTC)
END = testing.Watermark("events", at=START + timedelta(days=1))
COUNT = {"n": ms.count(), "first": ms.min("n")}


@dataclass
class Event:
    n: int
    at: datetime


def stream_with(values, *, partitions=4):
    """Give an app, and a stream in which the n-th row has the n-th value as ``v``."""
    app = ms.App("types", log="unused")
    topic = app.topic("events", Event, partitions=partitions)
    stream = topic.stream(time="at", watermark=ms.watermark("0 seconds", idle=None))

    def with_value(rows):
        return rows.with_columns(values.gather(rows["n"]).alias("v"))

    return app, stream.map_frames(with_value)


def events(values, times=2):
    """Every value comes ``times`` times."""
    numbers = [n for _ in range(times) for n in range(len(values))]
    return [Event(n, START + timedelta(seconds=at)) for at, n in enumerate(numbers)]


def run(app, values, *, times=2, crash=1):
    rows = [*events(values, times), END]
    return testing.run(app, {"events": rows}, batches=3, seed=1, crash=crash)


def groups_of(values, times=2):
    """Count the rows of each key, by its first number."""
    counts, firsts = Counter(), {}
    for number, key in enumerate(keys_of(values)):
        counts[key] += times
        firsts.setdefault(key, number)
    return {firsts[key]: count for key, count in counts.items()}


def columns():
    return [name for name in SAMPLES if column_type(SAMPLES[name].dtype).column]


def keys():
    return [name for name in SAMPLES if column_type(SAMPLES[name].dtype).key]


def kept():
    return [name for name in SAMPLES if column_type(SAMPLES[name].dtype).kind]


# Operators: what each makes of rows with the key ``v``, as {first number of the key: answer}.


def windowed(window, **emission):
    def made(stream):
        rows = stream.window(window, by="v").emit(**emission).agg(**COUNT)
        return rows.select("n", "first")

    return made


OPERATORS = {
    "tumbling": windowed(ms.tumbling("1 hour")),
    "tumbling, update": windowed(ms.tumbling("1 hour"), mode="update"),
    "session": windowed(ms.session("1 hour")),
    "count window": windowed(ms.count_window(2, unbounded=True)),
    "sliding": windowed(ms.sliding("1 hour")),
}


@pytest.mark.parametrize(
    ("name", "operator"), every_type.some_of([(n, o) for n in keys() for o in OPERATORS])
)
def test_rows_with_one_key_meet_in_every_operator(name, operator):
    values = SAMPLES[name]
    app, stream = stream_with(values, partitions=1)
    given = []
    OPERATORS[operator](stream).foreach(lambda rows, _: given.append(rows), name="out")
    run(app, values)
    rows = pl.concat(given)
    if operator == "count window":  # as many windows of two as pairs came
        found = Counter(dict.fromkeys(groups_of(values), 0))
        for first in rows["first"].to_list():
            found[next(n for n in groups_of(values) if same(values, n, first))] += 2
    else:
        found = {first: rows.filter(first=first)["n"].max() for first in rows["first"].to_list()}
    if operator == "sliding":  # a row for each event: the last counts all
        found = {n: count for n, count in found.items() if n in groups_of(values)}
    assert found == groups_of(values)


def same(values, one, other):
    keys = keys_of(values)
    return keys[one] == keys[other]


@pytest.mark.parametrize("name", every_type.some_of(keys()))
def test_ids_and_budgets_tell_keys_apart(name):
    values = SAMPLES[name]
    app, stream = stream_with(values, partitions=1)
    given = {"ids": [], "granted": []}
    decided = stream.budget("v", cost=pl.lit(1), limit=pl.lit(1))
    for name, kept in (
        ("ids", stream.dedup("v", within="1 hour")),
        ("granted", decided.filter(pl.col("decision") == "granted")),
    ):
        kept.foreach(lambda rows, _, name=name: given[name].append(rows), name=name)
    run(app, values, crash=0)  # which would call the functions again
    firsts = [n for n, value in enumerate(values) if value is not None and n in groups_of(values)]
    nulls = [n for n, value in enumerate(values) if value is None]  # each is like no other
    assert sorted(pl.concat(given["ids"])["n"]) == sorted([*firsts, *nulls, *nulls])
    assert sorted(pl.concat(given["granted"])["n"]) == sorted(groups_of(values))


# Sinks.


@pytest.mark.parametrize("name", every_type.some_of(sorted({*keys()} & {*kept()})))
def test_a_view_keeps_one_row_for_each_key(name):
    values = SAMPLES[name]
    app, stream = stream_with(values, partitions=1)
    stream.view("out", key="v")
    out = run(app, values)["out"]
    found = {key_of(value): n for n, value in out.select("n", "v").rows()}
    expected = {
        key_of(value): n
        for n, value in out.clear().vstack(as_kept(values, out.schema)).select("n", "v").rows()
    }
    assert found == expected
    assert out.height == len(groups_of(values))


def as_kept(values, schema):
    """Give numbers and values as rows of a view with this schema, an at beside them."""
    kept = values.cast(schema["v"]) if not naive(values) else values.dt.replace_time_zone("UTC")
    rows = pl.DataFrame({"n": range(len(values)), "at": [START] * len(values), "v": kept})
    return rows.cast({"at": schema["at"], "n": pl.Int64}).select(schema.names())


def naive(values):
    return isinstance(values.dtype, pl.Datetime) and values.dtype.time_zone is None


@pytest.mark.parametrize("name", every_type.some_of(kept()))
def test_a_view_keeps_values_of_every_kind(name):
    values = SAMPLES[name]
    app, stream = stream_with(values)
    stream.view("out", key="n")
    out = run(app, values)["out"].sort("n")
    if out.schema["v"] == values.dtype:
        assert out["v"].equals(values.alias("v"), null_equal=True)
    elif values.dtype.is_nested():
        texts = out["v"].to_list()
        assert [None if text is None else json.loads(text) for text in texts] == [
            plain(value) for value in values.to_list()
        ]
    else:
        assert out["v"].equals(as_kept(values, out.schema)["v"], null_equal=True)


def plain(value):
    """Give what JSON has instead of a nested value."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return None if isinstance(value, float) and value != value else value


@pytest.mark.parametrize("name", every_type.some_of(columns()))
def test_a_topic_and_a_dataset_take_every_column(name, tmp_path):
    values = SAMPLES[name]
    app, stream = stream_with(values)
    stream.to("copies")
    stream.dataset(tmp_path / "copies")
    out = run(app, values, times=1)
    assert sorted(out.topic("copies")["n"]) == list(range(len(values)))
    copies = out.dataset("copies").sort("n")
    assert copies["v"].equals(values.alias("v"), null_equal=True)


@pytest.mark.parametrize("name", every_type.some_of(keys()))
def test_a_key_of_a_topic_and_a_folder_of_a_dataset_have_one_spelling(name, tmp_path):
    values = SAMPLES[name]
    app, stream = stream_with(values)
    stream.to("copies", key="v")
    stream.dataset(tmp_path / "divided", partition_by="v")
    out = run(app, values)
    if values.dtype != pl.Binary:  # whose keys the test kit cannot show as text
        assert out.topic("copies")["key"].n_unique() == len(groups_of(values))
    divided = out.dataset("divided")
    assert sorted(divided["n"]) == sorted([*range(len(values)), *range(len(values))])


# Times.


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
def test_a_time_of_any_unit_and_zone_is_the_same_instant(unit, zone):
    app = ms.App("times", log="unused")
    time = pl.col("at").dt.cast_time_unit(unit)
    time = time.dt.replace_time_zone(None) if zone is None else time.dt.convert_time_zone(zone)
    stream = app.topic("events", Event, partitions=1).stream(time=time)
    stream.window(ms.tumbling("1 hour")).emit("update").agg(n=ms.count()).view("out")
    rows = [Event(n, datetime(1969, 12, 31, 23, 59, 59, 999000, tzinfo=UTC)) for n in range(2)]
    out = testing.run(app, {"events": rows})
    assert out["out"].select("window_end", "n").rows() == [(datetime(1970, 1, 1, tzinfo=UTC), 2)]


@pytest.mark.parametrize(
    "ms_since_1970", [253_402_300_800_000, -62_135_596_800_001, 2**62, -(2**63)]
)
def test_an_event_out_of_the_years_1_to_9999_is_dead_and_moves_nothing(ms_since_1970):
    app = ms.App("far", log="unused")
    topic = app.topic("events", {"at_ms": int}, partitions=1)
    stream = topic.stream(
        time=pl.col("at_ms").cast(pl.Datetime("ms")), watermark=ms.watermark("0 seconds", idle=None)
    )
    stream.window(ms.tumbling("1 hour")).emit("update").agg(n=ms.count()).view("out")
    out = testing.run(app, {"events": [{"at_ms": at} for at in (5, ms_since_1970, 4)]})
    assert out["out"]["n"].to_list() == [2]
    assert out.dead["reason"].to_list() == ["no event time, or none in the years 1 to 9999"]


def test_the_first_and_the_last_year_are_taken():
    app = ms.App("far", log="unused")
    stream = app.topic("events", {"at": datetime}, partitions=1).stream(time="at")
    stream.window(ms.tumbling("1 hour")).emit("update").agg(n=ms.count()).view("out")
    rows = [{"at": "0001-01-01T00:00:00Z"}, {"at": "9999-12-31T22:59:59Z"}]
    assert testing.run(app, {"events": rows})["out"].height == 2


@pytest.mark.parametrize("dtype", [pl.Float32, pl.Float64])
@pytest.mark.parametrize("given", [[0.0, -0.0], [-0.0, 0.0]])
def test_the_two_zeros_are_one_as_key_and_as_least_and_greatest(dtype, given):
    values = pl.Series(given, dtype=dtype)
    app, stream = stream_with(values, partitions=1)
    stream.view("latest", key="v")
    stream.window(ms.tumbling("1 hour")).emit("update").agg(
        least=ms.min("v"), most=ms.max("v"), all=ms.set("v")
    ).view("out")
    out = run(app, values)
    told = [str(value) for value in out["out"].select("least", "most", "all").row(0)]
    assert [str(out["latest"]["v"].item()), *told] == ["0.0", "0.0", "0.0", "[0.0]"]


# What is refused, and where it says so.


def refused(match):
    return pytest.raises(ConfigError, match=match)


@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in columns()])
def test_a_type_that_rows_cannot_hold_is_refused_where_the_column_is_made(name):
    with refused(r"column 'v' is a .*, which rows of a stream cannot hold\. Cast it to"):
        stream_with(SAMPLES[name])


@pytest.mark.parametrize("name", [name for name in columns() if name not in keys()])
def test_a_type_that_is_no_key_is_refused_wherever_keys_are_named(name):
    _, stream = stream_with(SAMPLES[name])
    for named in (
        lambda: stream.key_by("v"),
        lambda: stream.window(ms.tumbling("1 hour"), by="v"),
        lambda: stream.dedup("v", within="1 hour"),
        lambda: stream.budget("v", cost="n", limit="n"),
        lambda: stream.to("copies", key="v"),
        lambda: stream.dataset("unused", partition_by="v"),
        lambda: stream.drop("n").view("out", key="v"),
    ):
        with refused(r"names 'v', a .*, which cannot be a key\. (Make|Cast)"):
            named()


@pytest.mark.parametrize("name", [name for name in columns() if name not in kept()])
def test_a_type_that_views_do_not_keep_is_refused_by_the_view(name):
    _, stream = stream_with(SAMPLES[name])
    with refused("The view 'out' has the column 'v'. A view cannot keep a column of the type"):
        stream.view("out", key="n")


@pytest.mark.parametrize("per", [pl.lit(0.5) * pl.col("n"), pl.col("b"), pl.concat_list("n")])
def test_a_producer_is_named_by_what_has_one_spelling(per):
    topic = ms.App("per", log="unused").topic("events", {"n": int, "at": datetime, "b": bytes})
    with refused("The watermark's per of 'events' is of type"):
        topic.stream(time="at", watermark=ms.watermark("1 minute", per=per))


# The table itself.


def test_the_documented_table_says_what_the_code_decides():
    text = (Path(__file__).parents[3] / "docs" / "types.md").read_text("utf-8")
    cells = re.findall(
        r"^\| ([A-Z][\w, ]*) \| (yes|no) \| (yes|no) \| (\w+) \| (.*?) ?\|$", text, re.MULTILINE
    )
    documented = {
        name: ColumnType(column == "yes", key == "yes", None if kind == "no" else kind, instead)
        for names, column, key, kind, instead in cells
        for name in names.split(", ")
    }
    assert documented == TYPES


def test_the_table_has_a_row_for_every_type_that_polars_has():
    abstract = {"DataType", "BaseExtension", "Extension", "Unknown", "Utf8", "Map", "Object"}
    there = {
        name
        for name in dir(pl)
        if isinstance(getattr(pl, name), type) and issubclass(getattr(pl, name), pl.DataType)
    }
    assert there - abstract <= {*TYPES}
    assert not column_type(pl.Object()).column
    assert {table_name(name) for name in SAMPLES} == {*TYPES, "Object"}
