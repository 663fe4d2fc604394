"""What the ledger must find: each equation, and what is lost when it does not hold."""

import pkgutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import CorruptionError
from millstream.kernels import routing, stage
from millstream.kernels.frames import FrameRow, decode_frame, encode_frame
from millstream.kernels.state.sorted_runs import EACH_ROW, MemoryRunStore, SortedRuns
from millstream.testing.kernel_engine import KernelEngine
from millstream.views.commit import committer
from millstream.views.commit.ledger import check_edges, check_exits, check_ports, count_late_once
from millstream.views.commit.pipeline_graph import pipeline_graph

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    key: str
    n: int


ROWS = [Event(NOON + timedelta(seconds=s), "ab"[s % 2], s) for s in range(20)]
END = testing.Watermark("t", at=NOON + timedelta(hours=1))


def app_with(build):
    app = ms.App("a", log="unused", buckets=2)
    build(app.topic("t", Event, partitions=2).stream(time="at", late="side"))
    return app


def two_windows(stream):
    first = stream.filter(pl.col("n") > 2).window(ms.tumbling("5 seconds"), by="key")
    counted = first.emit("final").agg(n=ms.count())
    counted.view("counted")
    counted.late.view("late", key="at")
    counted.window(ms.tumbling("1 minute"), by="key").agg(n=ms.sum("n")).view("minutes")


def run(build=two_windows):
    return testing.run(app_with(build), {"t": [*ROWS, END]})


def test_a_batch_in_which_nothing_is_lost_balances():
    assert run()["minutes"]["n"].sum() == 17


def test_a_row_that_is_lost_between_two_steps_is_found(monkeypatch):
    taken = routing.ConsumerRouter.take
    monkeypatch.setattr(routing.ConsumerRouter, "take", lambda edge, rows: taken(edge, rows[1:]))
    with pytest.raises(CorruptionError, match="17 rows were given on to step"):
        run()


def lossy(part_of):
    """Make a way between processes on which something happens to frames of rows."""

    def way(stage_plan, bucket, buckets, rows, state):
        rows = [part for row in rows for part in part_of(row)]
        return stage.run_stage(stage_plan, bucket, buckets, rows, state)

    return way


def rows_only(change):
    return lambda row: change(row) if row.port >= 8 else [row]


@pytest.mark.parametrize(
    "change",
    [
        lambda _row: [],
        lambda row: [row, row],
        lambda row: [FrameRow(row.port, row.bucket, encode_frame(decode_frame(row.frame)[1:]))],
    ],
    ids=["lost", "doubled", "shortened"],
)
def test_a_frame_that_is_lost_or_doubled_or_cut_on_its_way_is_found(monkeypatch, change):
    monkeypatch.setattr("millstream.testing.kernel_engine.run_stage", lossy(rows_only(change)))
    with pytest.raises(CorruptionError, match="does not balance"):
        run()


def test_a_message_about_time_that_is_lost_is_found(monkeypatch):
    silent = lossy(lambda row: [] if row.port == 0 else [row])
    monkeypatch.setattr("millstream.testing.kernel_engine.run_stage", silent)
    with pytest.raises(CorruptionError, match="were sent to port time of"):
        run()


def test_rows_that_a_sink_does_not_get_are_found(monkeypatch):
    gathered = committer.collect_results

    def forgetful(plan, rows):
        sinks = {sink.port for sink in plan.sinks}
        return gathered(plan, [row for row in rows if row.port not in sinks])

    monkeypatch.setattr("millstream.testing.kernel_engine.collect_results", forgetful)
    with pytest.raises(CorruptionError, match="and 0 arrived"):
        run()


def test_late_rows_are_followed_into_the_steps_below_them(monkeypatch):
    late = Event(NOON - timedelta(hours=2), "a", 5)
    rows = [testing.Row(event, partition=0) for event in (*ROWS, late)]
    out = testing.run(app_with(two_windows), {"t": [*rows, END]})
    assert out["late"].height == 1
    taken = stage.OperatorRun._emit
    monkeypatch.setattr(
        stage.OperatorRun, "_emit", lambda run, rows, edges: taken(run, None if rows is not None and "late_by" in rows.columns else rows, edges)
    )  # fmt: skip
    with pytest.raises(CorruptionError, match="1 rows were given on"):
        testing.run(app_with(two_windows), {"t": [*rows, END]})


def test_what_a_step_forgets_is_found():
    with pytest.raises(CorruptionError, match="it read 3 events and accounts for 2"):
        check_exits({"s": {"read": 3, "emitted": 1, "late": 1, "rows_out": 7}})


def test_what_never_arrives_anywhere_is_found():
    with pytest.raises(CorruptionError, match="0 rows or messages were sent to port 9, and 1"):
        check_ports({}, {"9": 1})


def late_of(build, **late):
    return count_late_once(pipeline_graph(app_with(build).plan()), late)


def side_by_side(stream):
    for name, size in (("short", "1 minute"), ("long", "1 hour")):
        stream.window(ms.tumbling(size), name=name).agg(n=ms.count()).view(name)


def test_an_event_that_two_windows_side_by_side_find_late_is_one_late_event():
    assert late_of(side_by_side, short=3543, long=3543) == 3543
    assert late_of(side_by_side, short=5, long=2) == 5


def one_behind_the_other(stream):
    once = stream.dedup("n", within="1 minute", name="once")
    once.window(ms.tumbling("1 minute"), name="windows").agg(n=ms.count()).view("v")


def test_late_events_of_steps_one_behind_the_other_add_up():
    assert late_of(one_behind_the_other, once=3, windows=2) == 5


def joined(stream):
    other = stream.app.topic("other", Event).stream(time="at")
    both = stream.union(other)
    both.window(ms.tumbling("1 minute"), name="both").agg(n=ms.count()).view("v")


def test_late_events_below_a_union_are_counted_with_one_of_its_inputs():
    assert late_of(joined, both=4) == 4


def moved(change):
    """Make an engine whose splits are other ranges than were planned."""
    splits = KernelEngine._splits

    def other(engine, partition, number, start):
        return [change(split) for split in splits(engine, partition, number, start)]

    return other


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda split: replace(split, start_offset=split.start_offset + 1),
            "where it was to go on",
        ),
        (lambda split: replace(split, batches=[*split.batches] * 2), "where it was to go on"),
        (lambda split: replace(split, end_offset=split.end_offset + 5), "where it was to go on"),
    ],
    ids=["skipped", "doubled", "too far"],
)
def test_a_batch_that_does_not_go_on_where_the_last_one_ended_is_found(monkeypatch, change, says):
    monkeypatch.setattr(KernelEngine, "_splits", moved(change))
    with pytest.raises(CorruptionError, match=says):
        testing.run(app_with(windows_of_a_minute), {"t": [*ROWS, END]}, batches=4)


def test_records_that_are_lost_between_reading_and_counting_are_found():
    plan = app_with(windows_of_a_minute).plan()
    with pytest.raises(CorruptionError, match="3 rows were given on to step 't', and it read 2"):
        check_edges(plan, {"t": {"0": [(0, 3, 3)]}}, {"t": {"read": 2}})


def test_an_output_may_have_the_name_of_its_topic():
    out = run(lambda stream: stream.view("t", key="at"))
    assert out["t"].height == len(ROWS)


def windows_of_a_minute(stream):
    stream.window(ms.tumbling("1 minute"), by="key").agg(n=ms.count()).view("v")


@pytest.mark.parametrize("change", [lambda rows: rows[1:], lambda rows: pl.concat([rows, rows])])
@pytest.mark.parametrize("build", [windows_of_a_minute, two_windows])
def test_events_that_state_loses_or_doubles_are_found_when_they_are_read(
    monkeypatch, change, build
):
    scanned = SortedRuns.scan
    monkeypatch.setattr(SortedRuns, "scan", lambda *given: map(change, scanned(*given)))
    with pytest.raises(CorruptionError, match="its state held"):
        testing.run(app_with(build), {"t": [*ROWS, testing.Tick(after="1 second"), END]})


def test_a_run_with_another_number_of_rows_than_its_manifest_says_is_found(monkeypatch):
    loaded = MemoryRunStore.load
    monkeypatch.setattr(MemoryRunStore, "load", lambda store, run: loaded(store, run)[1:])
    with pytest.raises(CorruptionError, match="its manifest says"):
        testing.run(
            app_with(windows_of_a_minute), {"t": [*ROWS, testing.Tick(after="1 second"), END]}
        )


@pytest.mark.not_in_lane("thresholds", "it counts the rows of a fold, which is done in parts there")
def test_rows_that_a_fold_loses_are_found():
    runs = SortedRuns(MemoryRunStore(), counted=EACH_ROW)
    rows = pl.DataFrame({"__hash": pl.Series([1, 2], dtype=pl.UInt64)})
    runs.add(0, rows, lambda pieces: pieces)
    with pytest.raises(CorruptionError, match="4 events were folded into 3"):
        runs.add(0, rows, lambda pieces: pieces[1:])


@pytest.mark.not_in_lane("thresholds", "it counts the rows of a fold, which is done in parts there")
@pytest.mark.parametrize(("given_out", "says"), [(0, "0 had been given out"), (2, "2 had been")])
def test_rows_that_a_fold_leaves_out_must_have_been_given_out(given_out, says):
    runs = SortedRuns(MemoryRunStore(), counted=EACH_ROW)
    rows = pl.DataFrame({"__hash": pl.Series([1, 2], dtype=pl.UInt64)})
    runs.add(0, rows, lambda pieces: pieces)
    runs.spend(0, given_out)
    with pytest.raises(CorruptionError, match=f"left out 1 events, and {says}"):
        runs.add(0, rows, lambda pieces: pieces, alive=lambda pieces: pieces[1:])


def into_a_topic(stream):
    stream.to("out", key="key")


def into_a_dataset(stream, folder="written"):
    stream.dataset(folder)


def into_a_view(stream):
    stream.view("v", key="at")


def short_by_one(name, take):
    """Replace a function by one that loses the first of what it gives."""

    def patch(monkeypatch):
        where, _, attribute = name.rpartition(".")
        target = pkgutil.resolve_name(where)
        given = getattr(target, attribute)
        monkeypatch.setattr(target, attribute, lambda *args, **named: take(given(*args, **named)))

    return patch


@pytest.mark.parametrize(
    ("build", "lossy"),
    [
        (
            into_a_topic,
            short_by_one("millstream.views.sinks.topic_records.to_records", lambda _: []),
        ),
        (
            into_a_dataset,
            short_by_one(
                "millstream.views.sinks.dataset:DatasetWriter._partitions",
                lambda parts: [(folder, rows[1:]) for folder, rows in parts],
            ),
        ),
        (
            into_a_view,
            short_by_one(
                "millstream.views.state_store.sqlite_values.encode_rows", lambda rows: [*rows][1:]
            ),
        ),
    ],
    ids=["topic", "dataset", "view"],
)
def test_rows_that_an_output_does_not_write_are_found(monkeypatch, tmp_path, build, lossy):
    monkeypatch.chdir(tmp_path)
    lossy(monkeypatch)
    with pytest.raises(CorruptionError, match="rows and wrote"):
        run(build)
