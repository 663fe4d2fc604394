"""Count windows in panes, against a naive model event by event."""

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
NEVER = -(10**9)


@dataclass
class Event:
    at: datetime
    key: str | None
    n: int = 1


def event(at, key, n=1):
    return Event(START + timedelta(seconds=at), key, n)


def seconds(at):
    return (at - START).total_seconds()


def stream_of(app):
    return app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None)
    )


def declared(count, slide, mode, *, timeout=None, aggregates=None, **emit):
    app = ms.App("counts", log="unused", buckets=2)
    until = None if timeout is None else timedelta(seconds=timeout)
    window = ms.count_window(count, slide=slide, timeout=until, unbounded=True)
    windowed = stream_of(app).window(window, by="key", name="windows").emit(mode, **emit)
    made = aggregates or {"rows": ms.count(), "total": ms.sum("n")}
    windowed.agg(**made).view("out", key=["key", "window_number"])
    return app


def told(table):
    """Say of each window what comes out, in its order."""
    found = defaultdict(list)
    for row in table.to_dicts() if table.width else ():
        start, end = seconds(row["window_start"]), round(seconds(row["window_end"]), 3)
        pane = [row.get(f"pane_{name}") for name in ("kind", "index", "first", "last")]
        values = (row.get("rows"), row["total"])
        time = row["__time"] / 1e6
        found[row["key"], row["window_number"]].append(
            (row.get("__diff", 1), *pane, *values, start, end, time)
        )
    return dict(found)


class Window:
    """A window as the rule tells it: its events, and the events at each firing."""

    def __init__(self, count, early, expires=None):
        self.count, self.early, self.expires = count, early, expires
        self.events, self.new, self.firings, self.due = [], 0, [], None
        self.over = False

    def fire(self, kind, watermark=NEVER, expired=NEVER):
        self.firings.append((kind, len(self.events), self.new, watermark, expired))
        self.new, self.due = 0, None
        self.over |= kind == "on_time"

    def tick(self, clock, watermark):
        if self.due is not None and clock >= self.due:
            self.fire("early", watermark)

    def reach(self, watermark):
        """Time it out."""
        if self.expires is not None and not self.over and watermark >= self.expires:
            self.fire("on_time", expired=self.expires)

    def take(self, entry, clock):
        self.events.append(entry)
        self.new += 1
        if len(self.events) == self.count:
            self.fire("on_time")
        elif isinstance(self.early, int) and self.new == self.early:
            self.fire("early")
        elif isinstance(self.early, float) and self.due is None:
            self.due = clock + self.early


def until_timeouts(windows, row, reached, *, count, early, timeout):
    """Return the window that takes an event: the last one of its key, or the next."""
    mine = [window for (key, _), window in windows.items() if key == row.key]
    if mine:
        mine[-1].reach(reached)
    if not mine or mine[-1].over:
        mine.append(Window(count, early, seconds(row.at) + timeout))
        windows[row.key, len(mine) - 1] = mine[-1]
    return mine[-1]


def model(rows, *, partitions, count, slide, early, timeout=None):
    seen, windows, places = defaultdict(lambda: NEVER), {}, Counter()
    clock = 0.0
    for row in rows:
        if isinstance(row, float):
            clock += row
            watermark = min(seen[partition] for partition in range(partitions))
            for window in windows.values():
                window.tick(clock, watermark)
            continue
        at, partition = seconds(row.at), partition_of(row.key.encode(), partitions)
        place = places[row.key]
        places[row.key] += 1
        if timeout is not None:
            window = until_timeouts(
                windows, row, seen[partition], count=count, early=early, timeout=timeout
            )
            window.take((at, row.n, max(at, seen[partition])), clock)
        for number in range(place // slide + 1 if timeout is None else 0):
            if number * slide <= place < number * slide + count:
                window = windows.setdefault((row.key, number), Window(count, early))
                window.take((at, row.n, max(at, seen[partition])), clock)
        seen[partition] = max(seen[partition], at)
        for window in windows.values():
            window.reach(min(seen[partition] for partition in range(partitions)))
    return windows


def expected_rows(windows, mode, *, suppress, panes):
    expected = {}
    for key, window in windows.items():
        rows, before, index, values_before = [], None, 0, None
        for kind, upto, new, watermark, expired in window.firings:
            events = window.events[:upto]
            counted = events[upto - new :] if mode == "discard" else events
            values = (len(counted), sum(n for _, n, _ in counted))
            known = max(expired, *(k for _, _, k in events))
            if suppress and mode == "discard" and not new:
                continue
            if mode == "discard":  # a part that stays is in time for windows behind
                known = max(known, watermark)
            span = (events[0][0], max(at for at, _, _ in events), known)
            if suppress and mode != "discard" and values_before == (values, span):
                continue
            values_before = values, span
            if mode == "retract" and before:
                rows.append((-1, *before))
            pane = (kind, index, index == 0, kind == "on_time") if panes else (None,) * 4
            before = (*pane, *values, *span)
            rows.append((1, *before))
            index += 1
        if rows:
            expected[key] = rows
    return expected


@settings(deadline=None, max_examples=some(30))
@given(
    drawn=st.lists(
        st.tuples(st.integers(-30, 70), st.sampled_from("abc"), st.integers(-1, 3))
        | st.sampled_from([3.0, 10.0]),
        max_size=40,
    ),
    mode=st.sampled_from(["update", "discard", "retract"]),
    early=st.sampled_from([None, 1, 2, 3, 5.0, 12.0]),
    count=st.integers(1, 6),
    slide=st.integers(1, 6),
    suppress=st.booleans(),
    panes=st.booleans(),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_panes_are_the_models_event_by_event(
    rows_given, drawn, mode, early, count, slide, suppress, panes, partitions, batches, seed
):
    slide = min(count, slide)
    rows = [d if isinstance(d, float) else event(*d) for d in drawn]
    windows = model(rows, partitions=partitions, count=count, slide=slide, early=early)
    trigger = timedelta(seconds=early) if isinstance(early, float) else early
    app = declared(
        count, slide, mode, suppress_unchanged=suppress, panes=panes,
        early=ms.after_count(trigger) if isinstance(trigger, int) else trigger,
    )  # fmt: skip
    ticked = [testing.Tick(timedelta(seconds=r)) if isinstance(r, float) else r for r in rows]
    out = rows_given(app, {"events": ticked}, batches=batches, partitions=partitions, seed=seed)
    assert told(out.rows["out"]) == expected_rows(windows, mode, suppress=suppress, panes=panes)
    line = out.books.get("windows", Counter())
    assert line["read"] == line["held"] == sum(not isinstance(r, float) for r in rows)


@settings(deadline=None, max_examples=some(40))
@given(
    drawn=st.lists(
        st.tuples(st.integers(-30, 70), st.sampled_from("abc"), st.integers(-1, 3))
        | st.sampled_from([3.0, 10.0]),
        max_size=40,
    ),
    mode=st.sampled_from(["update", "discard", "retract"]),
    early=st.sampled_from([None, 1, 2, 3, 5.0, 12.0]),
    count=st.integers(1, 6),
    timeout=st.sampled_from([1, 7, 20, 60]),
    suppress=st.booleans(),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_panes_of_windows_that_may_be_timed_out_are_the_models_event_by_event(
    rows_given, drawn, mode, early, count, timeout, suppress, partitions, batches, seed
):
    rows = [d if isinstance(d, float) else event(*d) for d in drawn]
    windows = model(
        rows, partitions=partitions, count=count, slide=count, early=early, timeout=timeout
    )
    trigger = timedelta(seconds=early) if isinstance(early, float) else early
    app = declared(
        count, count, mode, timeout=timeout, suppress_unchanged=suppress, panes=True,
        early=ms.after_count(trigger) if isinstance(trigger, int) else trigger,
    )  # fmt: skip
    ticked = [testing.Tick(timedelta(seconds=r)) if isinstance(r, float) else r for r in rows]
    out = rows_given(app, {"events": ticked}, batches=batches, partitions=partitions, seed=seed)
    assert told(out.rows["out"]) == expected_rows(windows, mode, suppress=suppress, panes=True)
    line = out.books.get("windows", Counter())
    assert line["read"] == line["held"] == sum(not isinstance(r, float) for r in rows)


@settings(deadline=None, max_examples=some(10))
@given(
    drawn=st.lists(st.tuples(st.integers(0, 50), st.sampled_from("abc")), max_size=40),
    count=st.integers(1, 5),
    mode=st.sampled_from(["update", "retract", "discard"]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_panes_by_batch_add_up_to_what_the_windows_have(
    rows_given, drawn, count, mode, batches, seed
):
    rows = [event(at, key, n) for n, (at, key) in enumerate(drawn)]
    app = declared(count, count, mode, panes=True)
    out = rows_given(app, {"events": rows}, batches=batches, seed=seed).rows["out"]
    places, sums = Counter(), Counter()
    for row in rows:
        sums[row.key, places[row.key] // count] += row.n
        places[row.key] += 1
    found = Counter()
    for key, said in told(out).items():
        for diff, *_, total, _, _, _ in said:
            found[key] = total if mode == "update" else found[key] + diff * total
        kinds = [row[1] for row in said if row[0] > 0]
        full = places[key[0]] >= (key[1] + 1) * count
        assert kinds == ["early"] * (len(kinds) - full) + ["on_time"] * full
    assert dict(found) == dict(sums)


REPLAYED = {
    "sliding": ms.count_window(4, slide=2, unbounded=True),
    "with a timeout": ms.count_window(4, timeout="9 seconds", unbounded=True),
}


@pytest.mark.parametrize("window", REPLAYED.values(), ids=REPLAYED)
@pytest.mark.parametrize("mode", ["update", "retract", "discard"])
def test_views_are_the_same_under_all_batchings_and_crashes(mode, window):
    app = ms.App("replayed", log="unused", buckets=2)
    windowed = stream_of(app).window(window, by="key")
    windowed = windowed.emit(mode, early=ms.after_count(2), panes=mode == "discard")
    windowed.agg(
        total=ms.sum("n"), first=ms.first("n"), values=ms.list("n"), different=ms.distinct("n")
    ).view("out")
    keys = ["a", "d", "b", "a", "", "é"]
    rows = [event(n * 7 % 50, keys[n % 6], n) for n in range(90)]
    for partitions in (1, 4, 7):  # the time of a row is that of its partition's watermark
        testing.replay(app, {"events": rows}, batchings=3, partitions=(partitions,))


@pytest.mark.parametrize("early", ["each", "batch"])
@pytest.mark.parametrize("mode", ["update", "retract"])
def test_what_is_taken_back_adds_up_in_a_table_but_no_window_may_follow(rows_given, mode, early):
    app = ms.App("table", log="unused", buckets=2)
    windowed = stream_of(app).window(ms.count_window(3, unbounded=True), by="key")
    out = windowed.emit(mode, early=early).agg(total=ms.sum("n"))
    out.group_by("key").agg(total=ms.sum("total"), windows=ms.count()).view("sums")
    rows = [event(n, "ab"[n % 2], n) for n in range(20)]
    run = testing.run(app, {"events": rows}, batches=7)
    found = {row["key"]: (row["total"], row["windows"]) for row in run["sums"].to_dicts()}
    assert found == {"a": (90, 4), "b": (100, 4)}
    after = out.filter(pl.col("total") >= 0).with_columns(more="total")
    for stream in (out, after):
        with pytest.raises(ConfigError, match=r"a row that is taken back would be late.*discard"):
            stream.window(ms.tumbling("1 minute"))
