"""Time as the user says it: the cases of watermarks, end to end, and what is refused."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, UserCodeError
from millstream.pipeline.graph import UnionNode
from millstream.testing import Row, Tick, Watermark

START = datetime(2026, 1, 1, 10, tzinfo=UTC)
BATCHINGS = [(1 + 3 * seed % 7, seed) for seed in range(20)]


@dataclass
class Event:
    at: datetime | None = None
    device: str = "a"
    kind: str = "event"
    wm: datetime | None = None


def when(seconds):
    return START + timedelta(seconds=seconds)


def sent(seconds, partition=0, **values):
    return Row(Event(None if seconds is None else when(seconds), **values), partition=partition)


def app_with(*, partitions=1, size="10 seconds", time="at", by=(), **rule):
    app = ms.App("time", log="unused")
    topic = app.topic("events", Event, partitions=partitions)
    stream = topic.stream(time=time, **({"watermark": ms.watermark(**rule)} if rule else {}))
    stream.window(ms.tumbling(size), by=by).emit("final").agg(n=ms.count()).view("final")
    return app


def run(app, *rows, batches=1, seed=0):
    return testing.run(app, {"events": rows}, batches=batches, seed=seed)


def seconds(out):
    return None if out.watermark is None else (out.watermark - START).total_seconds()


def finals(out):
    starts = out["final"]["window_start"]
    return {
        (start - START).total_seconds(): n
        for start, n in zip(starts, out["final"]["n"], strict=True)
    }


# The cases, by the numbers that the reference gives them.


@pytest.mark.parametrize(("batches", "seed"), BATCHINGS)
def test_d2_an_idle_partition_is_left_out_and_judged_by_the_input_when_it_returns(batches, seed):
    app = app_with(partitions=2, delay="0 seconds", idle="30 seconds")
    rows = [sent(100, 0), sent(10, 1)]
    assert seconds(run(app, *rows, batches=batches, seed=seed)) == 10
    rows += [Tick("20 seconds"), sent(100, 0), Tick("10 seconds")]
    assert seconds(run(app, *rows, batches=batches, seed=seed)) == 100
    rows += [sent(50, 1)]
    out = run(app, *rows, batches=batches, seed=seed)
    assert (seconds(out), out.late) == (100, 1)
    rows += [sent(120, 1), sent(105, 0)]
    out = run(app, *rows, batches=batches, seed=seed)
    assert (seconds(out), out.late) == (105, 1)


@pytest.mark.parametrize(("batches", "seed"), BATCHINGS)
def test_d3_when_all_partitions_are_idle_the_watermark_holds_and_goes_on_with_data(batches, seed):
    app = app_with(partitions=2, delay="0 seconds", idle="30 seconds")
    rows = [sent(15, 0), sent(12, 1), Tick("1 hour")]
    out = run(app, *rows, batches=batches, seed=seed)
    assert (seconds(out), finals(out)) == (12, {})
    out = run(app, *rows, sent(31, 0), sent(33, 1), batches=batches, seed=seed)
    assert (seconds(out), finals(out), out.late) == (31, {10: 2}, 0)


@pytest.mark.parametrize(("batches", "seed"), BATCHINGS)
def test_d4_with_punctuation_alone_nothing_else_moves_the_watermark(batches, seed):
    app = app_with(partitions=2, punctuation="wm", idle=None)
    rows = [sent(90, 0), sent(50, 0, wm=when(60)), sent(55, 0), sent(70, 1)]
    assert run(app, *rows).watermark is None  # the other partition has said nothing
    out = run(app, *rows, sent(70, 1, wm=when(80)), batches=batches, seed=seed)
    assert seconds(out) == 60
    assert (out.late, finals(out)) == (1, {50: 1})  # 50 came before the promise, 55 after it


@pytest.mark.parametrize("idle", [None, "20 seconds"])
def test_d5_of_two_inputs_the_quiet_one_holds_the_other_until_it_is_idle(idle):
    app = ms.App("two", log="unused")
    rule = ms.watermark("0 seconds", idle=idle)
    loud = app.topic("loud", Event, partitions=1).stream(time="at", watermark=rule)
    quiet = app.topic("quiet", Event, partitions=1).stream(time="at", watermark=rule)
    both = replace(loud, node=UnionNode((loud.node, quiet.node)))
    both.window(ms.tumbling("10 seconds"), by=()).emit("final").agg(n=ms.count()).view("final")
    inputs = {
        "loud": [sent(5), sent(200), Tick("15 seconds"), sent(600), Tick("5 seconds")],
        "quiet": [sent(20)],
    }
    out = testing.run(app, inputs, batches=2)
    assert seconds(out) == (20 if idle is None else 600)
    assert finals(out) == ({0: 1} if idle is None else {0: 1, 20: 1, 200: 1})
    back = {**inputs, "quiet": [sent(20), Tick("15 seconds"), Tick("5 seconds"), sent(30)]}
    out = testing.run(app, back, batches=2)
    assert (seconds(out), out.late) == ((30, 0) if idle is None else (600, 1))


@pytest.mark.parametrize(("batches", "seed"), BATCHINGS)
def test_d6_a_time_from_the_future_moves_nothing_and_goes_to_the_dead_letters(batches, seed):
    app = app_with(delay="0 seconds", future_max="5 minutes", idle=None)
    far = datetime(2099, 1, 1, tzinfo=UTC)
    rows = [Row(Event(at), at=when(120)) for at in (when(0), far, when(60))]
    out = run(app, *rows, batches=batches, seed=seed)
    assert seconds(out) == 60
    assert out.late == 0
    assert out.dead["offset"].to_list() == [1]
    assert out.dead["reason"].to_list() == [
        (
            "the event time 2099-01-01T00:00:00+00:00 is later than the record's arrival, "
            "2026-01-01T10:02:00+00:00, by more than 5 minutes (future_max)"
        )
    ]
    assert out.ledger.filter(step="events")["dead"].sum() == 1


# Producers, heartbeats, arrivals.


def test_a_lagging_producer_loses_nothing_because_another_is_ahead():
    rows = [sent(0, device=d) for d in "ab"]
    for step in range(1, 10):
        rows += [sent(step * 60, device="a"), sent(step, device="b")]
    told_apart = run(app_with(delay="0 seconds", per="device", idle=None), *rows, batches=4)
    assert (told_apart.late, seconds(told_apart)) == (0, 9)
    together = run(app_with(delay="0 seconds", idle=None), *rows, batches=4)
    assert together.late == 9


def test_a_producer_that_says_goodbye_holds_nobody_up():
    app = app_with(delay="0 seconds", per="device", ends=pl.col("kind") == "bye", idle=None)
    rows = [sent(0, device="a"), sent(0, device="b"), sent(50, device="a")]
    assert seconds(run(app, *rows)) == 0
    rows += [sent(1, device="b", kind="bye")]
    out = run(app, *rows)
    assert (seconds(out), out.late) == (50, 0)
    out = run(app, *rows, sent(2, device="b"), batches=3)
    assert (seconds(out), out.late) == (50, 1)  # back again, and a newcomer


def test_a_quiet_producer_holds_nobody_up_once_it_is_idle():
    app = app_with(delay="0 seconds", per="device", idle="30 seconds")
    rows = [sent(0, device="a"), sent(0, device="b"), Tick("20 seconds"), sent(50, device="a")]
    assert seconds(run(app, *rows, Tick("9 seconds"))) == 0
    assert seconds(run(app, *rows, Tick("10 seconds"))) == 50


def test_beyond_the_maximum_producers_are_let_go_and_it_is_told():
    app = app_with(delay="0 seconds", per="device", producers_max=2, idle=None)
    rows = [sent(at, device=name) for at, name in enumerate("abc")]
    out = run(app, *rows)
    assert seconds(out) == 1
    assert out.forgotten_producers == {"events": 1}


@pytest.mark.parametrize(("batches", "seed"), BATCHINGS)
def test_records_that_only_tell_the_time_move_it_and_are_filtered(batches, seed):
    beats = pl.col("kind") == "heartbeat"
    app = app_with(punctuation="wm", punctuation_only=beats, delay="10 seconds", idle=None)
    rows = [
        sent(5),
        sent(None, kind="heartbeat", wm=when(10)),  # it needs no time of its own
        sent(30, kind="heartbeat"),  # and may have one
        sent(9),
    ]
    out = run(app, *rows, batches=batches, seed=seed)
    assert (seconds(out), out.late, finals(out)) == (20, 1, {0: 1})
    books = out.ledger.filter(step="events").sum()
    assert books.select("read", "filtered", "emitted", "dead").row(0) == (4, 2, 2, 0)


def test_an_event_without_time_is_dead_even_where_others_need_none():
    beats = pl.col("kind") == "heartbeat"
    app = app_with(punctuation_only=beats, delay="0 seconds")
    out = run(app, sent(None), sent(None, kind="heartbeat"))
    assert out.dead["reason"].to_list() == ["no event time, or none in the years 1 to 9999"]
    assert out.dead["offset"].to_list() == [0]


def test_a_punctuation_from_the_future_is_dead_too():
    app = app_with(punctuation="wm", future_max="1 minute", idle=None)
    rows = [Row(Event(when(0), wm=when(wm)), at=when(0)) for wm in (60, 61)]
    out = run(app, *rows)
    assert seconds(out) == 60
    assert "the punctuation 2026-01-01T10:01:01+00:00 is later" in out.dead["reason"][0]


def test_over_processing_time_the_last_window_closes_by_the_clock():
    app = app_with(time=ms.processing_time(settle="2 seconds"), partitions=2)
    rows = [Row(Event(), at=when(at), partition=at % 2) for at in (1, 2, 11)]
    assert finals(run(app, *rows)) == {}
    assert finals(run(app, *rows, Tick(at=when(12)))) == {0: 2}
    assert finals(run(app, *rows, Tick("10 seconds"))) == {0: 2}
    assert finals(run(app, *rows, Tick(at=when(22)))) == {0: 2, 10: 1}


def test_an_arrival_that_goes_back_counts_with_the_one_before_it():
    app = app_with(time=ms.processing_time())
    rows = [Row(Event(), at=when(at)) for at in (12, 3, 21)]
    for batches, seed in BATCHINGS:
        out = run(app, *rows, Tick("1 minute"), batches=batches, seed=seed)
        assert (finals(out), out.late) == ({10: 2, 20: 1}, 0)


def test_time_is_told_without_records_only_where_something_waits_for_it():
    def heartbeat_ms(**options):
        return app_with(**options).plan().sources[0].rule.heartbeat_ms

    assert heartbeat_ms(delay="0 seconds") is None
    assert heartbeat_ms(delay="0 seconds", per="device", idle=None) is None
    assert heartbeat_ms(delay="0 seconds", per="device", idle="2 minutes") == 12_000
    assert heartbeat_ms(delay="0 seconds", per="device", idle="2 seconds") == 1_000
    assert heartbeat_ms(time=ms.processing_time()) == 1_000


@pytest.mark.parametrize(
    "rule",
    [{"delay": "0 seconds", "per": "device"}, {"punctuation": pl.col("at")}],
    ids=["producers", "punctuation"],
)
@pytest.mark.parametrize(("batches", "seed"), BATCHINGS)
def test_whatever_the_rule_a_partition_that_was_idle_is_judged_by_the_input(rule, batches, seed):
    app = app_with(partitions=2, idle="30 seconds", **rule)
    rows = [sent(100, 0), sent(10, 1), Tick("20 seconds"), sent(100, 0), Tick("10 seconds")]
    assert seconds(run(app, *rows, batches=batches, seed=seed)) == 100
    out = run(app, *rows, sent(50, 1), sent(105, 1), sent(103, 1), batches=batches, seed=seed)
    assert (seconds(out), out.late) == (100, 1)  # 103's window is open, though 105 came before it


# The test kit's own time.


@pytest.mark.parametrize("partitions", [1, 4, 7])
@pytest.mark.parametrize(("batches", "seed"), BATCHINGS)
def test_a_watermark_between_rows_closes_windows_whatever_the_rule(partitions, batches, seed):
    app = app_with(delay="1 hour", idle=None)
    rows = [
        Row(Event(when(5)), key="a"),
        Watermark("events", at=when(10)),
        Row(Event(when(6)), key="a"),
        Row(Event(when(12)), key="b"),
    ]
    inputs = {"events": rows}
    out = testing.run(app, inputs, batches=batches, seed=seed, partitions=partitions)
    assert (finals(out), out.late, seconds(out)) == ({0: 1}, 1, 10)


def test_a_watermark_of_one_partition_leaves_the_others():
    app = app_with(partitions=2, delay="0 seconds", idle=None)
    rows = [sent(5, 0), sent(3, 1), Watermark("events", 1, at=when(50)), sent(4, 1)]
    out = run(app, *rows)
    assert (seconds(out), out.late) == (5, 1)


def test_a_rows_key_chooses_its_partition_and_arrives_with_it():
    app = app_with(partitions=4, delay="0 seconds")
    rows = [Row(b"bad", key="k", at=when(1), headers={"h": b"1"})] * 3
    assert len(set(run(app, *rows).dead["partition"])) == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Tick, "Tick takes after= or at="),
        (lambda: Tick(at=START, after="1 second"), "Tick takes after= or at="),
        (lambda: Watermark("others", at=START), "Put it among that topic's rows"),
        (lambda: Watermark("events", 3, at=START), "no partition 3"),
        (lambda: sent(1, partition=-1), "no partition -1"),
        (lambda: Row(Event(), at=datetime(2026, 1, 1)), "with a time zone"),  # noqa: DTZ001
    ],
)
def test_what_makes_no_sense_in_a_test_is_refused(row, words):
    with pytest.raises(ConfigError, match=words):
        run(app_with(delay="0 seconds"), row())


def test_a_tick_does_not_go_back():
    rows = [Row(Event(when(0)), at=when(60)), Row(Event(when(0)), at=when(0)), Tick(at=when(59))]
    with pytest.raises(ConfigError, match="Time does not go back"):
        run(app_with(delay="0 seconds"), *rows)


# What is refused when it is declared.


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({}, "neither a delay nor a punctuation"),
        ({"delay": "1 s", "ends": pl.col("kind") == "bye"}, "Say with per="),
        ({"delay": "1 s", "producers_max": 5}, "Say with per="),
        ({"delay": "1 s", "per": "device", "producers_max": 0}, "Allowed are 1 to 10,000"),
        ({"delay": 5}, "watermark's delay is 5"),
        ({"delay": "1 s", "per": 5}, "watermark's per is 5"),
    ],
)
def test_a_watermark_that_cannot_be_is_refused(rule, words):
    with pytest.raises(ConfigError, match=words):
        ms.watermark(**rule)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"punctuation": "device"}, "the type String|of type String. Give .*a datetime"),
        ({"delay": "1 s", "punctuation_only": pl.col("kind")}, "true or false"),
        ({"delay": "1 s", "per": "devise"}, "per of 'events' uses the column 'devise'"),
    ],
)
def test_a_watermark_that_does_not_fit_its_columns_is_refused(rule, words):
    with pytest.raises(ConfigError, match=words):
        app_with(**rule)


def test_processing_time_takes_no_other_watermark():
    with pytest.raises(ConfigError, match="leave watermark= out"):
        app_with(time=ms.processing_time(), delay="1 second")


def test_an_expression_of_time_that_fails_on_data_names_the_stream():
    failing = pl.col("kind").str.to_datetime("%Y", strict=True, time_zone="UTC")
    with pytest.raises(UserCodeError, match="the watermark of 'events' failed"):
        run(app_with(punctuation=failing), sent(1))


@pytest.mark.parametrize("rule", ["10 seconds", timedelta(seconds=10), None])
def test_a_watermark_that_is_no_rule_is_refused_with_the_way_to_make_one(rule):
    topic = ms.App("time", log="unused").topic("events", Event, key="device")
    for declared in (topic.stream, topic.table):
        with pytest.raises(ConfigError, match=r"'events' is .*ms\.watermark\(\"10 seconds\"\)"):
            declared(time="at", watermark=rule)
