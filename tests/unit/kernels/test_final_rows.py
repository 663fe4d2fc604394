"""Rows that may be taken back come out once, when the watermark has passed them: what does not hold by then never came."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from signed_rows import (
    Change,
    Kernel,
    drawn_watermarks,
    histories,
    histories_together,
    of_many_histories,
    signed_stream,
)

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, CorruptionError
from millstream.kernels.final_rows import FinalRows
from millstream.kernels.frames import DIFF, TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.pipeline.final_rows import when_final

START = datetime(2026, 1, 1, tzinfo=UTC)
END = START + timedelta(days=1)


def kernel_of(lateness):
    stream = signed_stream(lateness=lateness)
    node, shape = when_final(stream.node, stream.shape, ("key",), "a test")
    assert (shape.mode, shape.lateness_us) == ("final", 0)
    return Kernel(node.kernel, MemoryRunStore())


LATENESSES = [0, 6, 30]


@settings(deadline=None, max_examples=some(60))
@given(history=histories(), lateness=st.sampled_from(LATENESSES))
def test_a_row_comes_once_when_nothing_can_take_it_back(history, lateness):
    check_that_rows_come_once(history, lateness)


@pytest.mark.timeout(3600)  # of ten thousand
@of_many_histories
def test_rows_of_many_histories_come_once_when_nothing_can_take_them_back(dice):
    history = histories_together(dice, drawn_watermarks(dice))
    check_that_rows_come_once(history, dice.choice(LATENESSES))


def check_that_rows_come_once(history, lateness):
    kernel, there, before = kernel_of(lateness), Counter(), -(2**62)
    for changes, watermark in history:
        in_time = [c for c in changes if before <= c.time + lateness]
        for change in in_time:
            there[change.key, change.time, change.n] += change.diff
        result = kernel.batch(changes, watermark)
        assert result.counts["late"] == len(changes) - len(in_time)
        made = [] if result.rows is None else result.rows.select("key", TIME, "n").rows()
        assert result.rows is None or DIFF not in result.rows.columns
        due = [row for row in there.elements() if before <= row[1] + lateness < watermark]
        assert Counter(made) == Counter(due)
        assert [time for _, time, _ in made] == sorted(time for _, time, _ in due)
        # Nothing that comes out is late for the next operator.
        assert all(time >= kernel.operator.output_watermark(before) for _, time, _ in made)
        before = watermark


def test_rows_leave_the_state_when_they_are_final_or_taken_back():
    kernel = kernel_of(0)
    kernel.batch([Change(5, "a", 1, 1), Change(7, "a", 2, 1)], 0)
    kernel.batch([Change(5, "a", 1, -1)], 1)
    assert kernel.batch([], 100_000_000).rows["n"].to_list() == [2]
    assert not kernel.store.tables


def test_taking_back_what_never_came_is_damage():
    kernel = kernel_of(0)
    kernel.batch([Change(5, "a", 1, -1)], 0)
    with pytest.raises(CorruptionError, match="take back an event that it does not hold"):
        kernel.batch([], 10)


def test_values_are_taken_back_as_they_came_whatever_they_are():
    values = [float("nan"), 0.0, -0.0, None, float("inf")]
    columns = (("^a.*$", pl.Float64()), ("l", pl.List(pl.Int64)))
    kernel = Kernel(FinalRows("final", columns, ("^a.*$",), 0), MemoryRunStore())
    lists = [[1], None, [], [1], [None]]
    rows = pl.DataFrame({"^a.*$": values, "l": lists, TIME: [1] * 5, DIFF: [1] * 5})
    rows = rows.cast({"^a.*$": pl.Float64, "l": pl.List(pl.Int64), DIFF: pl.Int8})
    gone = rows[:4].with_columns(pl.lit(-1, pl.Int8).alias(DIFF))
    prepared = [kernel.operator.prepare(each).table for each in (rows, gone)]
    state = OperatorState.from_message(None, kernel.store)
    result = kernel.operator.process(state, {0: prepared}, BatchContext(-(2**62), 10))
    assert result.rows.rows() == [(float("inf"), [None], 1)]


# ── what waits for the watermark anyhow ─────────────────────────────────────────────────────────


@dataclass
class Event:
    at: datetime
    key: str
    n: int


def stream_of(app, name, lateness):
    return app.topic(name, Event, key="key").stream(
        time="at",
        watermark=ms.watermark("0 seconds", idle=None),
        lateness=timedelta(seconds=lateness),
    )


drawn = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from("ab"), st.integers(-2, 2)), max_size=14
)
EMITS = [
    ("update", {"early": "each"}),
    ("retract", {"early": ms.after_count(2)}),
    ("update", {}),
]


def inputs_of(left, right):
    found = {}
    for name, events in (("l", left), ("r", right)):
        rows = [Event(START + timedelta(seconds=second), key, n) for second, key, n in events]
        found[name] = [*rows, testing.Watermark(name, at=END)]
    return found


def in_time(events, lateness, size):
    """Say which events found their window open; one partition, whose watermark is its latest time."""
    newest, kept = -1, []
    for second, key, n in events:
        if newest < 0 or newest < (second // size + 1) * size + lateness:
            kept.append((second, key, n))
        newest = max(newest, second)
    return kept


@settings(deadline=None, max_examples=some(40))
@given(
    left=drawn,
    right=drawn,
    emits=st.tuples(st.sampled_from(EMITS), st.sampled_from(EMITS)),
    lateness=st.sampled_from([0, 15]),
    options=st.tuples(
        st.sampled_from(["left", "inner"]), st.sampled_from(["backward", "forward", "nearest"])
    ),
    seed=st.integers(0, 1000),
)
def test_windows_that_are_replaced_are_joined_as_of_a_time_when_they_are_final(
    left, right, emits, lateness, options, seed
):
    how, direction = options
    app = ms.App("final", log="unused", buckets=2)
    both = [
        stream_of(app, name, lateness)
        .window(ms.tumbling(f"{size} seconds"), by="key")
        .emit(mode, **early)
        .agg(n=ms.count(), s=ms.sum("n"))
        for name, size, (mode, early) in zip("lr", (10, 5), emits, strict=True)
    ]
    both[0].filter(pl.col("n") != 2).select("window_end", "n", k="key").join_asof(
        both[1].filter(pl.col("s") != 0).select("s", k="key", end="window_end"),
        "k",
        how=how,
        direction=direction,
        tolerance="20 seconds",
    ).to("out")
    out = testing.run(
        app, inputs_of(left, right), partitions=1, batches=1 + seed % 6, seed=seed, crash=seed % 2
    )
    found = out.topic("out")
    assert "_diff" not in found.columns
    # A naive join: windows of the events in time, and of each the nearest row.
    counts, quotes = Counter(), defaultdict(int)
    for second, key, _ in in_time(left, lateness, 10):
        counts[(second // 10 + 1) * 10, key] += 1
    for second, key, n in in_time(right, lateness, 5):
        quotes[(second // 5 + 1) * 5, key] += n
    expected = Counter()
    for (end, key), n in counts.items():
        near = [e - end for e, k in quotes if k == key and quotes[e, k] != 0 and abs(e - end) <= 20]
        before = [e for e in near if e <= 0] if direction != "forward" else []
        after = [e for e in near if e >= 0] if direction != "backward" else []
        nearest = min((abs(e), e) for e in [*before, *after]) if before or after else None
        s = None if nearest is None else quotes[end + nearest[1], key]
        if n != 2 and (s is not None or how == "left"):
            expected[end, key, n, s] += 1
    ends = found["window_end"]
    ends = ends.str.to_datetime("%Y-%m-%dT%H:%M:%S%.fZ", time_zone="UTC") if found.height else ends
    rows = found.select("k", "n", "s").rows()
    made = [(int((e - START).total_seconds()), *row) for e, row in zip(ends, rows, strict=True)]
    assert Counter(made) == expected


@pytest.mark.parametrize("late", ["keep", "correct"])
def test_events_of_an_eager_join_are_joined_with_a_table_once(late):
    results = []
    for emit in ("final", "eager"):
        app = ms.App("eager", log="unused", buckets=2)
        pairs = stream_of(app, "l", 0).join(
            stream_of(app, "m", 0).select("key", m="n"),
            "key",
            within=("0 seconds", "5 seconds"),
            how="left",
            emit=emit,
        )
        rates = app.table(
            "r", Event, key="key", time="at", watermark=ms.watermark("0 seconds", idle=None)
        )
        pairs.join_asof(
            rates.select("key", rate="n"),
            "key",
            late=late,
            lateness="1 minute" if late == "correct" else None,
        ).rename({"key": "k"}).to("out")
        inputs = inputs_of(
            [(2 * n, "ab"[n % 2], n) for n in range(20)],
            [(max(0, 3 * n - 9 * (n % 4 == 0)), "ab"[n % 2], 100 + n) for n in range(12)],
        )
        inputs["m"] = [
            *(Event(START + timedelta(seconds=3 * n), "ab"[n % 2], n) for n in range(20)),
            testing.Watermark("m", at=END),
        ]
        bag = Counter()
        out = testing.run(app, inputs, partitions=1, batches=4, seed=3).topic("out")
        signs = out["_diff"].to_list() if "_diff" in out.columns else [1] * out.height
        for row, sign in zip(out.select("k", "n", "m", "rate").rows(), signs, strict=True):
            bag[row] += 1 if sign is None else sign
        results.append(+bag)
    assert results[0] == results[1]
    assert results[0].total() > 10


@pytest.mark.parametrize(("mode", "early"), EMITS)
def test_a_pattern_is_matched_in_the_rows_that_hold(mode, early):
    def matches(mode, early):
        app = ms.App("pattern", log="unused", buckets=2)
        counts = (
            stream_of(app, "l", 10)
            .window(ms.tumbling("10 seconds"), by="key")
            .emit(mode, **early)
            .agg(n=ms.count())
        )
        rising = ms.sequence("one", pl.col("n") == 1).next("two", pl.col("n") == 2)
        counts.match(
            rising.within("1 minute"), by="key", measures={"n": ms.matched("two", "n").last()}
        ).rename({"key": "k"}).to("out")
        events = [(n * 7 % 60, "ab"[n % 2], n) for n in range(25)]
        inputs = {"l": inputs_of(events, [])["l"]}
        return testing.run(app, inputs, partitions=1, batches=5, seed=1).topic("out")

    assert (
        matches(mode, early)
        .sort("k", "match_start")
        .equals(matches("final", {}).sort("k", "match_start"))
    )
    assert matches(mode, early).height


def test_what_is_never_known_to_be_final_is_refused():
    app = ms.App("refused", log="unused")
    stream = stream_of(app, "l", 0)
    counts = stream.window(ms.tumbling("10 seconds"), by="key").emit("update").agg(n=ms.count())
    with pytest.raises(ConfigError, match=r'join_asof has late="keep".*leave late out'):
        stream.join_asof(counts.select("key", "n"), "key", late="keep")
    late = app.topic("s", Event, key="key").stream(time="at", late="side").select("key", "n")
    together = late.union(counts.select("key", pl.col("n").cast(pl.Int64)))
    with pytest.raises(ConfigError, match=r'some are read with late="side"'):
        together.join_asof(stream, "key")


def test_a_join_of_events_waits_for_nothing_more():
    app = ms.App("plain", log="unused")
    stream, other = stream_of(app, "l", 0), stream_of(app, "r", 0)
    joined = stream.join_asof(other, "key")
    assert joined.node.inputs == (stream.node, other.node)
