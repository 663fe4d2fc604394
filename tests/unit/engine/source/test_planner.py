"""The planner over a real log: what it writes into offsets, and what tasks get as the time."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import polars as pl
import pytest

import millstream as ms
from millstream.engine.frame_files import FrameFiles
from millstream.engine.source import planner as planner_module
from millstream.engine.source.event_times import EventTimesFile
from millstream.engine.source.planner import (
    LogPlanner,
    SourceSpec,
    read_planned,
    record_batches,
)
from millstream.errors import DeletionsLostError, TopicRecreatedError, UserCodeError
from millstream.kernels.frames import (
    PORT_FIRST,
    PORT_LEDGER,
    PORT_TIME,
    FrameRow,
    decode_frame,
    decode_message,
    encode_message,
)
from millstream.log.compaction.cleaner import compact_partition
from millstream.log.removed_tombstones import note_removal
from millstream.record import TopicPartition


@dataclass
class Event:
    id: int


@pytest.fixture
def log(tmp_path):
    with ms.connect(tmp_path / "log") as log:
        log.create_topic("events", partitions=2)
        yield log


def send(log, *stamps_ms, partition=0):
    with log.producer() as producer:
        for stamp_ms in stamps_ms:
            producer.send("events", {"id": 1}, partition=partition, timestamp_ms=stamp_ms)


def planner(log, tmp_path, *, time=None, **changes):
    app = ms.App("plans", log=tmp_path / "log")
    stream = app.topic("events", Event, partitions=2).stream(
        time=ms.processing_time() if time is None else time
    )
    stream.window(ms.tumbling("1 minute"), by=()).agg(n=ms.count()).view("out")
    plan = app.plan()
    spec = SourceSpec(
        log=tmp_path / "log",
        sources=plan.sources,
        buckets=plan.buckets,
        rows_max=100,
        tasks=2,
        stop_request=tmp_path / "stop-request",
        stop_acknowledged=tmp_path / "stop-acknowledged",
        event_times=tmp_path / "event-times.json",
        heartbeat_ms=plan.heartbeat_ms,
        frame_files=FrameFiles(None),
    )
    return LogPlanner(replace(spec, **changes))


def time_message(planner, start, end):
    """Run the tasks of a batch; return the message about time to the first bucket."""
    rows = [
        FrameRow(port, bucket, frame)
        for task in planner.partitions(start, end)
        for batch in planner.read(task)
        for port, bucket, frame in zip(*(c.to_pylist() for c in batch.columns), strict=True)
    ]
    messages = [decode_message(row.frame)["source"] for row in rows if row.port == PORT_TIME]
    return messages[0]


@pytest.mark.not_in_lane("thresholds", "the planner reads nothing itself there")
def test_the_wall_clock_and_the_latest_arrivals_are_part_of_the_offset(log, tmp_path):
    made = planner(log, tmp_path)
    start = made.initial_offset()
    send(log, 5_000, 3_000)
    send(log, 4_000, partition=1)
    before_ms = int(datetime.now(UTC).timestamp() * 1000)
    end = made.next_offset(start)
    assert before_ms <= end["wall_ms"] <= datetime.now(UTC).timestamp() * 1000
    assert [at[2] for at in end["topics"]["events"]] == [5_000, 4_000]
    message = time_message(made, start, end)
    assert message["wall_us"] == end["wall_ms"] * 1000
    assert [split[2] for split in message["splits"]] == [5_000_000, 4_000_000]
    send(log, 1_000)
    later = made.next_offset(end)
    assert [at[2] for at in later["topics"]["events"]] == [5_000, 4_000]
    # The record is from before: it counts as having come with the latest before it.
    assert [split[2] for split in time_message(made, end, later)["splits"]] == [5_000_000]


def test_when_time_has_passed_there_is_a_batch_without_records(log, tmp_path):
    made = planner(log, tmp_path, heartbeat_ms=0)
    send(log, 5_000)
    end = made.next_offset(made.initial_offset())
    beat = made.next_offset(end)
    assert beat["topics"] == end["topics"]
    assert beat["wall_ms"] >= end["wall_ms"]
    assert time_message(made, end, beat)["splits"] == []
    quiet = planner(log, tmp_path)  # a second has not passed, even on a slow machine's clock
    quiet._clock_ms = lambda at: at.clock_ms + 999
    assert quiet.next_offset(end) == end
    quiet._clock_ms = lambda at: at.clock_ms + 1_000
    assert quiet.next_offset(end) != end


def test_a_run_to_the_end_of_the_log_waits_for_no_time(log, tmp_path):
    made = planner(log, tmp_path, heartbeat_ms=0)
    send(log, 5_000)
    made.pin_end_offsets()
    end = made.next_offset(made.initial_offset())
    send(log, 6_000)  # comes after the run began: it is left for the next
    assert made.next_offset(end) == end
    assert end["behind"] == {"events": []}


def test_a_stop_comes_before_everything_else(log, tmp_path):
    made = planner(log, tmp_path, heartbeat_ms=0)
    start = made.initial_offset()
    (tmp_path / "stop-request").touch()
    assert made.next_offset(start) == start
    assert (tmp_path / "stop-acknowledged").exists()


LONG_S = 600.0  # no test waits so long


def test_who_waits_for_a_batch_gets_it_when_a_record_comes(log, tmp_path):
    made = planner(log, tmp_path, heartbeat_ms=None)
    start = made.next_offset(made.initial_offset())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made.await_next_offset, start, LONG_S)
        send(log, 5_000, partition=1)
        end = waiting.result(LONG_S / 2)
    assert [offset for offset, *_ in end["topics"]["events"]] == [0, 1]


def test_who_waits_for_a_batch_gets_none_when_the_time_is_over(log, tmp_path):
    made = planner(log, tmp_path, heartbeat_ms=None)
    start = made.next_offset(made.initial_offset())
    assert made.await_next_offset(start, 0.05) == start


@pytest.mark.parametrize("why", ["stop", "pinned"])
def test_nobody_waits_for_a_batch_that_cannot_come(log, tmp_path, why):
    made = planner(log, tmp_path, heartbeat_ms=None)
    start = made.next_offset(made.initial_offset())
    if why == "stop":
        (tmp_path / "stop-request").touch()
    else:
        made.pin_end_offsets()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(made.await_next_offset, start, LONG_S).result(LONG_S / 2) == start


def test_partitions_that_are_ahead_wait_as_the_sinks_file_tells(log, tmp_path):
    made = planner(log, tmp_path, rows_max=10)
    send(log, *[1_000] * 40)
    send(log, *[1_000] * 40, partition=1)
    start = made.initial_offset()
    first = made.next_offset(start)
    assert [at[0] for at in first["topics"]["events"]] == [5, 5]
    written = EventTimesFile(tmp_path / "event-times.json")

    def read_up_to(times):
        report = {"event_times": {"events": times}}
        written.add([FrameRow(PORT_LEDGER, 0, encode_message(report))])

    read_up_to({"0": 10_000_000_000, "1": 5})
    second = made.next_offset(first)
    assert [at[0] for at in second["topics"]["events"]] == [10, 10]  # no pace is known yet
    read_up_to({"0": 20_000_000_000, "1": 10})
    third = made.next_offset(second)
    assert [at[0] for at in third["topics"]["events"]] == [11, 19]


def test_event_times_only_rise_and_outlive_the_run(tmp_path):
    path = tmp_path / "event-times.json"
    for times in ({"0": 5}, {"0": 3, "1": 7}):
        report = {"event_times": {"t": times}}
        EventTimesFile(path).add([FrameRow(PORT_LEDGER, 0, encode_message(report))])
    assert EventTimesFile(path).read() == {"t": {0: 5, 1: 7}}
    path.write_text("{half a")
    assert EventTimesFile(path).read() == {}


def _without_times(message):
    """Leave out for how long steps have worked, which no two readings share."""
    return {name: value for name, value in message.items() if name != "worked_ms"}


def rows_of(batches):
    """Give rows with their frames decoded; the rows of a table are in no order."""
    rows = [row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True)]
    return [
        (port, bucket, sorted(decode_frame(frame).rows()))
        if port >= PORT_FIRST
        else (port, bucket, _without_times(decode_message(frame)))
        for port, bucket, frame in rows
    ]


@pytest.mark.not_in_lane("thresholds", "the planner reads nothing itself there")
def test_what_the_planner_reads_itself_is_what_a_worker_reads(log, tmp_path):
    made = planner(log, tmp_path)
    send(log, 5_000, 3_000)
    send(log, 4_000, partition=1)
    start = made.initial_offset()
    end = made.next_offset(start)
    (task,) = made.partitions(start, end)
    read_here = rows_of(made.read_on_driver(start, end))
    assert read_here == rows_of(made.read(task))
    assert read_here[-1][2]["ranges"] == {"events": {"0": [[0, 2, 2]], "1": [[0, 1, 1]]}}


@pytest.mark.not_in_lane("thresholds", "the planner reads nothing itself there")
def test_what_the_sink_reads_as_it_was_planned_is_what_a_worker_reads(log, tmp_path):
    made = planner(log, tmp_path, planner_reads=False)
    plans = {0: made.initial_offset()}
    for batch, count in ((1, 3), (2, 2)):
        send(log, *[1_000] * count, partition=1)
        plans[batch] = made.next_offset(plans[batch - 1])
        assert made.read_on_driver(plans[batch - 1], plans[batch]) is None
        (task,) = made.partitions(plans[batch - 1], plans[batch])
        rows = read_planned(made._spec, plans.get, batch)
        assert rows_of(record_batches(iter(rows))) == rows_of(made.read(task))
    assert read_planned(made._spec, plans.get, 0) is None  # where it begins is not among the plans
    assert read_planned(made._spec, plans.get, 3) is None  # nor is this one


@pytest.mark.not_in_lane("thresholds", "the planner reads nothing itself there")
def test_the_planner_leaves_to_workers_what_is_not_small(log, tmp_path, monkeypatch):
    made = planner(log, tmp_path, rows_max=1_000_000)
    start = made.initial_offset()
    assert made.read_on_driver(start, start) is None  # Spark asks so as a query begins
    send(log, *[1_000] * 30)
    end = made.next_offset(start)
    for limit, just_enough in (("_DRIVER_ROWS_MAX", 30), ("_DRIVER_BYTES_MAX", 10_000)):
        with monkeypatch.context() as patched:
            patched.setattr(planner_module, limit, just_enough)
            assert made.read_on_driver(start, end) is not None
            patched.setattr(planner_module, limit, just_enough // 30)
            assert made.read_on_driver(start, end) is None


@pytest.mark.not_in_lane("thresholds", "the planner reads nothing itself there")
@pytest.mark.parametrize(("times", "read_here"), [(1, True), (2_000, False)])
def test_the_planner_leaves_to_workers_few_events_of_which_steps_make_much(
    log, tmp_path, monkeypatch, times, read_here
):
    app = ms.App("plans", log=tmp_path / "log")
    stream = app.topic("events", Event, partitions=2).stream(time=ms.processing_time())
    stream.map_frames(lambda rows: pl.concat([rows] * times), rows="any").dataset(tmp_path / "out")
    made = planner(log, tmp_path, sources=app.plan().sources)
    send(log, 1_000, 1_000)
    start = made.initial_offset()
    monkeypatch.setattr(planner_module, "_DRIVER_BYTES_MAX", 20_000)
    assert (made.read_on_driver(start, made.next_offset(start)) is not None) == read_here


def test_a_batch_that_fails_in_the_planner_is_told_of_by_a_worker(log, tmp_path):
    def stops(rows):
        if rows.height:
            raise ValueError("no")
        return rows

    app = ms.App("plans", log=tmp_path / "log", on_error="stop")
    stream = app.topic("events", Event, partitions=2).stream(time=ms.processing_time())
    stream.map_frames(stops).window(ms.tumbling("1 minute"), by=()).agg(n=ms.count()).view("out")
    made = planner(log, tmp_path, sources=app.plan().sources)
    send(log, 1_000)
    start = made.initial_offset()
    end = made.next_offset(start)
    assert made.read_on_driver(start, end) is None
    (task,) = made.partitions(start, end)
    with pytest.raises(UserCodeError, match="no"):
        list(made.read(task))


def make_anew(log, records):
    """Delete the topic, and create it with more records than the old one had."""
    log.delete_topic("events")
    log.create_topic("events", partitions=2)
    send(log, *[9_000] * records)


def test_offsets_of_a_topic_that_was_made_anew_are_refused_with_what_had_been_read(log, tmp_path):
    made = planner(log, tmp_path)
    send(log, *[1_000] * 3)
    end = made.next_offset(made.initial_offset())
    make_anew(log, 8)
    for following in (made, planner(log, tmp_path)):  # at work, and after a restart
        with pytest.raises(TopicRecreatedError, match="'events' was deleted and created again"):
            following.next_offset(end)
    pinned = planner(log, tmp_path)
    pinned.pin_end_offsets()
    with pytest.raises(TopicRecreatedError, match=r"up to offset, by partition, 0: 3, 1: 0,"):
        pinned.next_offset(end)


def test_a_batch_that_was_planned_reads_nothing_of_a_topic_that_was_made_anew(log, tmp_path):
    made = planner(log, tmp_path)
    send(log, *[1_000] * 3)
    start = made.initial_offset()
    end = made.next_offset(start)
    make_anew(log, 8)
    for reading in (made, planner(log, tmp_path)):
        assert reading.read_on_driver(start, end) is None  # workers say what is wrong
        with pytest.raises(TopicRecreatedError):
            time_message(reading, start, end)


def test_a_topic_that_was_made_anew_is_read_from_its_start_by_who_begins(log, tmp_path):
    send(log, *[1_000] * 3)
    make_anew(log, 8)
    made = planner(log, tmp_path)
    end = made.next_offset(made.initial_offset())
    assert [at[0] for at in end["topics"]["events"]] == [8, 0]
    assert end["topic_ids"] == {"events": log.topics()["events"].topic_id}


DAY_MS = 86_400_000


def table_planner(log, tmp_path, **changes):
    app = ms.App("plans", log=tmp_path / "log")
    users = app.table("users", {"id": str, "n": int}, key="id")
    users.view("all")
    return planner(log, tmp_path, sources=app.plan().sources, **changes)


def set_users(log, **numbers):
    """Send a new row of each key, or its deletion."""
    with log.producer() as producer:
        for key, n in numbers.items():
            value = None if n is None else {"id": key, "n": n}
            producer.send("users", value, key=key, timestamp_ms=1_000)


def compact_users(log, *, after_ms=0):
    """Close the growing segment, and compact so long after now."""
    with log._owner_client().access.use_writer() as writer:
        (partition,) = (one for one in writer.partitions() if one.name.topic == "users")
        writer.exclusively(lambda: partition.roll() if partition.active_size else None)
        compact_partition(writer, partition, int(time.time() * 1000) + after_ms)


@pytest.fixture
def users(log):
    """A topic of which the tombstone at offset 2 is gone, or about to go."""
    settings = {"min.cleanable.dirty.ratio": "0"}
    log.create_topic("users", cleanup="compact", settings=settings)
    set_users(log, ann=1, bob=1)
    return log


def read_all(made, start, end):
    return [rows_of(made.read(task)) for task in made.partitions(start, end)]


def test_a_table_that_missed_a_deletion_is_refused_as_the_run_begins(users, tmp_path):
    made = table_planner(users, tmp_path)
    end = made.next_offset(made.initial_offset())
    assert [at[0] for at in end["topics"]["users"]] == [2]
    set_users(users, ann=None, eve=1)
    compact_users(users)
    present = table_planner(users, tmp_path).next_offset(end)  # it is there for a day
    assert [at[0] for at in present["topics"]["users"]] == [4]
    compact_users(users, after_ms=2 * DAY_MS)
    with pytest.raises(
        DeletionsLostError, match=r"up to offset 2; .* had come to offset 2"
    ) as told:
        table_planner(users, tmp_path).next_offset(end)
    assert f"`millstream reset {tmp_path.name} --log {tmp_path.parent.parent}`" in str(told.value)
    assert table_planner(users, tmp_path).next_offset(present)["topics"] == present["topics"]


def test_a_table_is_not_refused_for_what_was_gone_when_it_began(users, tmp_path):
    set_users(users, ann=None, eve=1, joe=1)
    compact_users(users)
    compact_users(users, after_ms=2 * DAY_MS)
    at = table_planner(users, tmp_path).initial_offset()
    for _ in range(5):  # one record in each batch, and each in another run
        made = table_planner(users, tmp_path, rows_max=1)
        end = made.next_offset(at)
        read_all(made, at, end)
        at = end
    assert [at[0] for at in at["topics"]["users"]] == [5]


def test_a_deletion_that_goes_between_the_plan_and_its_reading_is_missed_by_no_task(
    users, tmp_path
):
    made = table_planner(users, tmp_path)
    first = made.next_offset(made.initial_offset())
    set_users(users, ann=None, eve=1)
    compact_users(users)
    second = made.next_offset(first)
    read_all(made, first, second)
    compact_users(users, after_ms=2 * DAY_MS)
    assert made.read_on_driver(first, second) is None  # a worker says what is wrong
    with pytest.raises(DeletionsLostError):
        read_all(made, first, second)


def test_offsets_from_before_removals_were_known_are_refused_for_any(users, tmp_path):
    made = table_planner(users, tmp_path)
    end = made.next_offset(made.initial_offset())
    del end["removals"]
    assert made.next_offset(end)["removals"] == {"users": [0]}
    set_users(users, ann=None, eve=1)
    compact_users(users)
    compact_users(users, after_ms=2 * DAY_MS)
    with pytest.raises(DeletionsLostError):
        table_planner(users, tmp_path).next_offset(end)


def test_a_partition_that_is_added_is_read_from_what_is_gone_by_then(users, tmp_path):
    made = table_planner(users, tmp_path)
    end = made.next_offset(made.initial_offset())
    users.alter_topic("users", partitions=2)
    with users._owner_client().access.use_writer() as writer:
        note_removal(writer.control, TopicPartition("users", 1), 8)
    later = made.next_offset(end)
    assert later["removals"] == {"users": [0, 1]}


def test_a_stream_does_not_ask_for_deletions(users, tmp_path):
    made = planner(users, tmp_path)
    end = made.next_offset(made.initial_offset())
    assert end["removals"] == {}
