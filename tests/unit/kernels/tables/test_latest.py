"""A table of rows that may be taken back: of each key the latest row that is there."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from signed_rows import UNIT, Change, Event, Kernel, at, histories, signed_stream, summed

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, CorruptionError
from millstream.kernels.frames import DIFF, TIME
from millstream.kernels.state.row_digest import digest_rows

KEYS = {"key": ["key"], "n": ["n"], "both": ["key", "n"]}


def told(rows):
    return [] if rows is None else rows.select(DIFF, TIME, "key", "n").rows()


def tie(key, n):
    """Of equal times: the digest of the row, its columns by name, and of that it deletes nothing."""
    columns = [pl.Series([key]), pl.Series([n]), pl.Series([False])]
    return int(digest_rows(columns)[0])


def latest(rows, names):
    found = {}
    for time, key, n in rows:
        values = {"key": key, "n": n}
        group = tuple(values[name] for name in names)
        version = (time, tie(key, n))
        if group not in found or version > found[group][0]:
            found[group] = version, (time, key, n)
    return Counter(row for _, row in found.values())


@settings(deadline=None, max_examples=some(40))
@given(history=histories(), by=st.sampled_from(list(KEYS)))
def test_what_was_emitted_and_not_taken_back_is_the_latest_row_of_each_key(history, by):
    kernel = Kernel.of(signed_stream().table(KEYS[by], unbounded=True))
    there, bag = Counter(), Counter()
    for changes, watermark in history:
        for change in changes:
            there[change.time, change.key, change.n] += change.diff
        for row, count in summed(told(kernel.batch(changes, watermark).rows)).items():
            bag[row] += count
        assert min(bag.values(), default=0) >= 0, "a row was taken back that was not there"
        assert +bag == latest(there.elements(), KEYS[by])


def test_the_row_before_the_latest_counts_again_and_what_is_gone_leaves_nothing():
    kernel = Kernel.of(signed_stream().table("key", unbounded=True))
    kernel.batch([Change(1, "a", 1, 1), Change(2, "a", 2, 1)], 50)
    gone = kernel.batch([Change(2, "a", 2, -1)], 50)
    assert told(gone.rows) == [(-1, 2, "a", 2), (1, 1, "a", 1)]
    assert told(kernel.batch([Change(1, "a", 1, -1)], 50).rows) == [(-1, 1, "a", 1)]
    assert sum(entry[4] for entry in kernel.message["runs"].get("rows", [])) == 0
    with pytest.raises(CorruptionError, match="taken back that is not in it"):
        kernel.batch([Change(1, "a", 1, -1)], 50)


# ── behind windows ──────────────────────────────────────────────────────────────────────────────


def windows_of(mode):
    app = ms.App("windows", log="unused", buckets=2)
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark(0 * UNIT, idle=None),
        lateness=100 * UNIT,
        late="correct" if mode == "correct" else "drop",
    )
    windowed = stream.window(ms.hopping(8 * UNIT, 4 * UNIT), by="key", name="windows")
    windowed = windowed if mode == "correct" else windowed.emit(mode)
    rows = windowed.agg(m=ms.sum("n"), list=ms.set("n")).filter(pl.col("m") > 0)
    return app, rows.rename({"m": "^n.*$"})


END = testing.Watermark("events", at=at(10**6))
events = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from("abc"), st.integers(-3, 3)), max_size=40
)


@settings(deadline=None, max_examples=some(10))
@given(
    rows=events,
    mode=st.sampled_from(["update", "retract", "correct"]),
    key=st.sampled_from(["key", "^n.*$", "window_start"]),
    batching=st.fixed_dictionaries(
        {
            "partitions": st.sampled_from([1, 4, 7]),
            "batches": st.integers(1, 6),
            "crash": st.integers(0, 2),
            "seed": st.integers(0, 99),
        }
    ),
)
def test_it_is_the_table_of_the_rows_that_windows_leave_whatever_they_emit(
    rows, mode, key, batching
):
    found = []
    for emit in ("final", mode):
        app, windows = windows_of(emit)
        table = windows.table(key, unbounded=True)
        table.view("latest")
        table.group_by("key").agg(rows=ms.count()).view("counts")
        windows.table(keep="all", unbounded=True).group_by("key").agg(
            rows=ms.count(), least=ms.min("window_start")
        ).view("all")
        windows.drop("list").top(2, by="^n.*$", per="key", rank="place").view("top")
        windows.group_by("key").agg(rows=ms.count(), last=ms.max("window_end")).view("groups")
        inputs = {"events": [*(Event(at(t), k, n) for t, k, n in rows), END]}
        run = testing.run(app, inputs, **batching)
        views = [run[view].to_dicts() for view in ("latest", "counts", "all", "top", "groups")]
        found.append([sorted(map(repr, view)) for view in views])
    assert found[0] == found[1]


def test_a_table_by_what_identifies_windows_needs_no_more_than_a_row_of_each():
    app, windows = windows_of("update")
    table = windows.table()
    assert table.primary_key == ("window_start", "key")
    assert windows.select("window_end", "key").table(["key", "window_end"]).primary_key
    other = windows.table(name="other")
    table.join(other, ["window_start", "key"]).view("joined")
    rows = [Event(at(n), "ab"[n % 2], 1) for n in range(24)]
    out = testing.replay(app, {"events": [*rows, END]}, batchings=3, crash=2)
    assert out["joined"].height == 14
    assert table.columns["^n.*$"] == pl.Int64()


def test_a_condition_that_deletes_takes_the_key_out_while_its_row_is_the_latest():
    app = ms.App("deleted", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark(0 * UNIT, idle=None), lateness=100 * UNIT
    )
    sums = stream.window(ms.tumbling(10 * UNIT), by="key").emit("update").agg(n=ms.sum("n"))
    sums.table("key", deleted=pl.col("n") < 0, unbounded=True).view("out")
    rows = [
        Event(at(1), "a", 1),
        Event(at(11), "a", -5),
        Event(at(2), "b", 2),
        Event(at(12), "b", -1),
    ]
    assert testing.run(app, {"events": rows}, batches=3)["out"].height == 0
    rows.append(Event(at(13), "b", 4))  # now the later window is at 3
    assert testing.run(app, {"events": rows}, batches=5)["out"].select("key", "n").rows() == [
        ("b", 3)
    ]


def test_rows_without_a_key_are_dead_letters_once():
    app, windows = windows_of("update")
    nameless = windows.with_columns(who=pl.when(pl.col("key") != "a").then(pl.col("key")))
    nameless.table("who", unbounded=True, name="table").view("out")
    rows = [Event(at(n), "ab"[n % 2], 1) for n in range(8)]
    out = testing.run(app, {"events": [*rows, END]}, batches=4, partitions=1)
    assert set(out["out"]["key"]) == {"b"}
    line = out.ledger.filter(step="table").sum().to_dicts()[0]
    assert line["read"] == line["held"] + line["dead"]
    assert line["dead"] > out.dead.height > 0  # the retraction of a row has no letter of its own


# ── what is refused where it is declared ────────────────────────────────────────────────────────


@dataclass
class Reading:
    at: datetime
    key: str
    n: int


def refused(match):
    return pytest.raises(ConfigError, match=match)


def test_what_has_no_bound_or_no_sense_is_refused():
    app, windows = windows_of("update")
    with refused(r"one before the latest counts again.*such as window_start, key.*unbounded=True"):
        windows.table("key")
    with refused("condition"):
        windows.table("key", deleted=pl.col("key"), unbounded=True)
    with refused('has order="offset", and its rows have no place in the log'):
        windows.table("key", order="offset", unbounded=True)
    with refused("without end"):
        windows.table(keep="all")
    with refused("names 'kye'.*Did you mean 'key'"):
        windows.table("kye", unbounded=True)
    stream = app.topic("other", Reading).stream(time="at")
    parts = stream.window(ms.tumbling("1 minute"), by="key").emit("discard").agg(n=ms.count())
    with refused(
        'after emit."discard"., whose rows are parts.*"final", "update" or "retract" there'
    ):
        parts.table("key")
