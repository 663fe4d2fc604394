"""Count windows over rows that are taken back are those of the rows that are left, by a naive model."""

from collections import Counter
from datetime import timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from signed_rows import UNIT, Change, Event, Kernel, at, histories, signed_stream, told

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, CorruptionError

AGGREGATES = {"rows": ms.count(), "total": ms.sum("n"), "top": ms.max("n")}


def kernel_of(window, lateness=0, **aggregates):
    stream = signed_stream(lateness=lateness)
    return Kernel.of(stream.window(window, by="key").agg(**(aggregates or AGGREGATES)))


class Model:
    """Keeps the rows that are there, and makes all windows anew when it is asked."""

    def __init__(self, lateness):
        self.lateness, self.rows = lateness, Counter()

    def batch(self, changes, seen):
        """Take a batch; return how many rows were late."""
        in_time = [c for c in changes if seen <= c.time + self.lateness]
        for change in in_time:
            self.rows[change.key, change.time, change.n] += change.diff
        return len(changes) - len(in_time)

    def events(self, key, watermark):
        """Say the final rows of a key in the order of their times; those of one time in any."""
        found = [(t, n) for (k, t, n) in self.rows.elements() if k == key]
        return sorted((t, n) for t, n in found if t + self.lateness < watermark)

    def windows(self, key, count, slide, timeout, watermark):
        """Say the times of the events of each window, and the time of its row."""
        times = [t for t, _ in self.events(key, watermark)]
        if timeout is None:
            starts = range(0, len(times) - count + 1, slide)
            return [(times[s : s + count], times[s + count - 1]) for s in starts]
        found = []
        while times:
            mine = [t for t in times if t < times[0] + timeout][:count]
            if len(mine) == count:
                found.append((mine, mine[-1]))
            elif times[0] + timeout + self.lateness <= watermark:
                found.append((mine, times[0] + timeout))
            times = times[len(mine) :]
        return found


shapes = st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([None, None, 4, 20]))


@settings(deadline=None, max_examples=some(40))
@given(history=histories(), shape=shapes, lateness=st.sampled_from([0, 6, 30]))
def test_windows_hold_the_rows_that_are_left_in_the_order_of_their_times(history, shape, lateness):
    count, slide, timeout = shape
    slide = count if timeout else min(slide, count)
    window = ms.count_window(
        count, slide=slide, unbounded=True, timeout=None if timeout is None else timeout * UNIT
    )
    kernel, model = kernel_of(window, lateness), Model(lateness)
    said, totals = [], Counter()
    before = -(2**62)
    for changes, watermark in history:
        expected_late = model.batch(changes, kernel.watermark)
        result = kernel.batch(changes, watermark)
        assert result.counts["late"] == expected_late
        if result.rows is not None:
            said += told(
                result.rows, "key", "window_number", "window_start", "window_end", "rows", "__time"
            )
            for _, key, total in told(result.rows, "key", "total"):
                totals[key] += total
            assert (result.rows["__time"] >= before - lateness).all()
        before = watermark
    for key in "ab":
        windows = model.windows(key, count, slide, timeout, before)
        expected = [
            (1, key, number, times[0], times[-1] + 1, len(times), time)
            for number, (times, time) in enumerate(windows)
        ]
        assert sorted(row for row in said if row[1] == key) == expected
        events = model.events(key, before)
        clear = len({t for t, _ in events}) == len(events)  # no two of one time
        if clear and slide == count:
            taken = events[: sum(len(times) for times, _ in windows)]
            assert totals[key] == sum(n for _, n in taken)


def pipeline(window, mode="retract", *, timeout=None, lateness=15):
    app = ms.App("changes", log="unused", buckets=2)
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark("2 seconds", idle=None),
        lateness=timedelta(seconds=lateness),
    )
    above = stream.window(ms.sliding("4 seconds"), by="key").emit(mode)
    rows = above.agg(n=ms.sum("n"), all=ms.list("n"))
    rows.window(window, by="key", name="windows").agg(
        rows=ms.count(), total=ms.sum("n"), first=ms.first("n"), lists=ms.list("all")
    ).view("out")
    return app


@pytest.mark.parametrize(
    ("mode", "timeout"), [("retract", None), ("retract", "20 seconds"), ("update", None)]
)
def test_windows_are_the_same_under_all_batchings_and_crashes(mode, timeout):
    keys = ["a", "d", "b", "a", "", "é"]
    second = timedelta(seconds=1)
    rows = [
        Event(at(0) + (n + n * 7 % 12) * second, keys[n * 5 % 6], n * n % 11) for n in range(100)
    ]
    app = pipeline(ms.count_window(4, unbounded=True, timeout=timeout), mode)
    found = [
        testing.replay(app, {"events": rows}, batchings=4, partitions=(partitions,))["out"]
        for partitions in (1, 4, 7)
    ]
    assert found[0].height > 15


@settings(deadline=None, max_examples=some(6))
@given(
    drawn=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from("abc"), st.integers(-3, 3)), max_size=40
    ),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_windows_over_changes_are_those_over_the_final_rows(drawn, batches, seed):
    second = timedelta(seconds=1)
    rows = [Event(at(0) + t * second, key, n) for t, key, n in drawn]
    rows += [Event(at(0) + 500 * second, key, 0) for key in "abcdefgh"]
    columns = ["key", "window_number", "window_start", "window_end", "rows", "total", "lists"]
    found = []
    for mode in ("retract", "final"):
        app = pipeline(ms.count_window(3, unbounded=True), mode, lateness=90)
        out = testing.run(app, {"events": rows}, batches=batches, seed=seed)["out"]
        found.append(out.select(columns).sort(columns[:2]) if out.height else [])
    changed, final = found
    assert len(changed) == len(final)
    # Rows of one time are in another order, which is that of their values.
    for name in columns[:5] if len(final) else ():
        assert changed[name].to_list() == final[name].to_list()


def test_a_row_that_is_taken_back_leaves_its_window_to_the_next():
    kernel = kernel_of(ms.count_window(2, unbounded=True), first=ms.first("n"), total=ms.sum("n"))
    rows = [Change(1, "a", 10, 1), Change(2, "a", 20, 1), Change(3, "a", 30, 1)]
    assert kernel.batch(rows, 0).rows is None
    kernel.batch([Change(1, "a", 10, -1)], 1)
    assert told(kernel.batch([], 3).rows, "first", "total") == []  # 30 at 3 is not final yet
    assert told(kernel.batch([], 4).rows, "first", "total") == [(1, 20, 50)]


def test_what_was_never_there_cannot_be_taken_back():
    kernel = kernel_of(ms.count_window(2, unbounded=True))
    with pytest.raises(CorruptionError, match="does not hold"):
        kernel.batch([Change(1, "a", 10, -1)], 5)


def test_rows_that_wait_leave_the_state_when_they_are_final():
    kernel = kernel_of(ms.count_window(1000, unbounded=True))
    for n in range(0, 50_000_000_000, 1_000_000_000):
        kernel.batch([Change(n, "a", 1, 1), Change(n, "a", 2, 1), Change(n, "a", 1, -1)], n)
        waiting = kernel.message["runs"]["waiting rows"]
        assert sum(entry[2] for entry in waiting) <= 4, waiting


def test_only_final_rows_are_offered():
    stream = signed_stream()
    window = ms.count_window(3, unbounded=True)
    for mode in ("update", "retract"):
        with pytest.raises(ConfigError, match=r"emitted when nothing can be taken back any more"):
            stream.window(window, by="key").emit(mode).agg(n=ms.count())
    with pytest.raises(ConfigError, match="A row that comes too late is left out"):
        signed_stream(late="side").window(window, by="key").agg(n=ms.count())
    assert stream.window(window, by="key").agg(first=ms.first("n")).columns["first"] == pl.Int64
