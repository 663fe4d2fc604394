"""What panes add up to: folding the rows of any mode gives what a recomputation gives."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.log.murmur2 import partition_of

START = datetime(1970, 1, 1, tzinfo=UTC)
LATENESS = 30
SIZE = 10


@dataclass
class Event:
    at: datetime
    key: str
    n: int = 1


def events(draws):
    return [Event(START + timedelta(seconds=at), key, n) for at, key, n in draws]


def stream_of(app, **options):
    return app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark("0 seconds", idle=None),
        lateness=timedelta(seconds=LATENESS),
        **options,
    )


def in_time(rows, partitions, *, waits=False):
    """Give, by window and key, the numbers that no window's expiry shut out, and the watermark.

    ``waits``: what is late for its own partition is in no window that is not yet on time.
    """
    seen = dict.fromkeys(range(partitions), -(10**9))
    windows, waiting = defaultdict(list), defaultdict(list)
    for row in rows:
        at = (row.at - START).total_seconds()
        partition = partition_of(row.key.encode(), partitions)
        start = at // SIZE * SIZE
        if start + SIZE + LATENESS > seen[partition]:
            late = waits and start + SIZE <= seen[partition]
            (waiting if late else windows)[start, row.key].append(row.n)
        seen[partition] = max(seen[partition], at)
    reached = min(seen.values())
    for window, numbers in waiting.items():
        if window[0] + SIZE <= reached:
            windows[window] += numbers
    return windows, reached


def start_of(row):
    return (row["window_start"] - START).total_seconds()


def folded(rows, mode):
    """Fold rows into a table; a row that is taken back must be the one that is there."""
    table = {}
    for row in rows.to_dicts():
        key, value = (start_of(row), row["key"]), (row["n"], row["total"])
        if mode == "discard":
            value = tuple(a + b for a, b in zip(table.get(key, (0, 0)), value, strict=True))
        if row.get("__diff") == -1:
            assert table.pop(key) == value
        else:
            assert mode != "retract" or key not in table
            table[key] = value
    return table


draws = st.lists(
    st.tuples(st.integers(-20, 90), st.sampled_from("abcdef"), st.integers(0, 3)), max_size=40
)


@settings(deadline=None, max_examples=some(40))
@given(
    draws,
    st.sampled_from(["update", "discard", "retract"]),
    st.sampled_from(["batch", "5 seconds", ms.after_count(2)]),
    st.sampled_from(["batch", "5 seconds"]),
    st.sampled_from([1, 4, 7]),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_rows_add_up_to_what_came_in_time(
    rows_given, drawn, mode, early, late, partitions, batches, seed
):
    app = ms.App("folds", log="unused", buckets=2)
    windowed = stream_of(app).window(ms.tumbling(timedelta(seconds=SIZE)), by="key")
    windowed = windowed.emit(mode, early=early, late=late)
    windowed.agg(n=ms.count(), total=ms.sum("n")).view("out", key=["window_start", "key"])
    rows = [*events(drawn), testing.Tick("1 minute")]
    out = rows_given(app, {"events": rows}, batches=batches, partitions=partitions, seed=seed)
    expected, reached = in_time(rows[:-1], partitions, waits=not isinstance(early, str))
    found = folded(out.rows["out"], mode)
    wanted = {key: (len(ns), sum(ns)) for key, ns in expected.items()}
    if isinstance(early, str):
        assert found == wanted
    else:  # what is short of a pair before its window's end is still to come
        ended = {key for key in wanted if key[0] + SIZE <= reached}
        assert {k: v for k, v in found.items() if k in ended} == {k: wanted[k] for k in ended}


@settings(deadline=None, max_examples=some(30))
@given(draws, st.sampled_from([1, 4, 7]), st.integers(1, 6), st.integers(0, 99))
def test_a_window_over_rows_that_are_taken_back_counts_only_what_stands(
    rows_given, drawn, partitions, batches, seed
):
    app = ms.App("chain", log="unused", buckets=2)
    first = stream_of(app).window(ms.tumbling(timedelta(seconds=SIZE)), by="key")
    totals = first.emit("retract").agg(total=ms.sum("n"), n=ms.sum("n"))
    by_total = totals.window(ms.tumbling(timedelta(seconds=2 * SIZE)), by="total")
    by_total.emit("retract").agg(all=ms.sum("n")).view("out", key=["window_start", "total"])
    out = rows_given(
        app, {"events": events(drawn)}, batches=batches, partitions=partitions, seed=seed
    )
    standing = Counter()
    for row in out.rows["out"].to_dicts():
        standing[start_of(row), row["total"], row["all"]] += row["__diff"]
    expected, groups = in_time(events(drawn), partitions)[0], defaultdict(int)
    for (start, _), numbers in expected.items():
        groups[start // (2 * SIZE) * 2 * SIZE, sum(numbers)] += sum(numbers)
    wanted = {(*group, total): 1 for group, total in groups.items()}
    assert {row: count for row, count in standing.items() if count} == wanted


def test_a_key_of_which_nothing_is_left_has_no_final_row(rows_given):
    app = ms.App("left", log="unused")
    first = stream_of(app).window(ms.tumbling("10 seconds"), by="key")
    totals = first.emit("retract").agg(total=ms.sum("n"))
    totals.window(ms.tumbling("10 seconds"), by="total").agg(s=ms.sum("total")).view("out")
    rows = events([(1, "a", 1), (2, "a", 1), (200, "a", 0)])
    for seed in range(5):
        out = rows_given(app, {"events": rows}, batches=3, seed=seed).rows["out"]
        assert out.select("total", "s").rows() == [(2, 2)]


# ── what is refused where it is declared ────────────────────────────────────────────────────────


@pytest.fixture
def app():
    return ms.App("declared", log="unused")


def refused(words):
    return pytest.raises(ConfigError, match=words)


HOUR = ms.tumbling("1 hour")


def test_early_and_late_panes_must_fit_the_mode(app):
    windowed = stream_of(app).window(HOUR, by="key")
    with refused('emit\\("final"\\) has early'):
        windowed.emit("final", early="batch")
    with refused("no late rows and no panes"):
        windowed.emit("final", panes=True)
    with refused("no late rows and no panes"):
        windowed.emit(late="each")
    with refused('emit\'s early is 5. Give "each"'):
        windowed.emit("update", early=5)
    with refused("emit's late.*'sometimes'"):
        windowed.emit("update", late="sometimes")
    with refused("emit's early is '0 seconds'"):
        windowed.emit("update", early="0 seconds")


def test_corrections_need_lateness_and_late_rows(app):
    topic = app.topic("events", Event, key="key")
    with refused('late="correct" and no lateness'):
        topic.stream(time="at", late="correct")
    with refused("late is 'keep'. Choose \"drop\""):
        topic.stream(time="at", late="keep")
    corrected = topic.stream(time="at", late="correct", lateness="1 hour").window(HOUR, by="key")
    with refused("nothing would correct"):
        corrected.emit("update", late=None)


def test_a_filter_may_follow_rows_that_are_taken_back(app):
    counted = stream_of(app).window(HOUR, by="key").emit("retract").agg(n=ms.count())
    counted.filter(pl.col("n") > 1).view("many")


def test_aggregates_over_rows_that_are_taken_back_must_take_them_back(app):
    totals = stream_of(app).window(HOUR, by="key").emit("retract").agg(n=ms.count())
    with refused("last is over rows that can be retracted"):
        totals.window(HOUR).agg(newest=ms.last("n"))
    with refused("cannot be emitted as parts"):
        totals.window(HOUR).emit("discard")


def test_a_view_of_parts_keeps_them_apart(app):
    windowed = stream_of(app).window(HOUR, by="key")
    with refused("a part of the answer"):
        windowed.emit("discard").agg(n=ms.count()).view("parts")
    windowed.emit("discard", panes=True).agg(n=ms.count()).view("parts")
    rows = events([(1, "a", 1), (2, "a", 1), (3, "a", 1)])
    out = testing.run(app, {"events": rows}, batches=3, partitions=1, seed=1)["parts"]
    assert out["pane_index"].to_list() == list(range(out.height))
    assert out["n"].sum() == 3


def test_late_rows_are_not_windowed(app):
    stream = stream_of(app, late="side")
    with refused("no side output of late rows"):
        _ = stream.late
    late = stream.window(HOUR, by="key").agg(n=ms.count()).late
    with refused("whose time has passed"):
        late.window(HOUR)
    late.filter(pl.col("late_by") > timedelta(seconds=1)).view("late", key="at")


def test_pane_columns_are_not_aggregates(app):
    with refused("'pane_kind' is taken"):
        windowed = stream_of(app).window(HOUR).emit("update", panes=True)
        windowed.agg(pane_kind=ms.count())
