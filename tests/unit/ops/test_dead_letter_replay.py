"""Dead records after the fact: forwarded once, shown whole, appended again once."""

import json
import sqlite3
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.cli.main import run
from millstream.client.folder.log import FolderLog
from millstream.engine.topic_ids import save_topic_ids
from millstream.errors import ConfigError, MillstreamError, RetriableError, UnknownViewError
from millstream.kernels.decode.records import columns_read
from millstream.kernels.errors.dead_letters import headers_from_text, headers_text, with_all_columns
from millstream.kernels.ingest import Ingest, SplitInput
from millstream.kernels.time.watermarks import SourceTime
from millstream.log.reader import LogReader
from millstream.ops import dead_letter_replay as ops
from millstream.ops.dead_letter_replay import (
    DeadLetterFilter,
    dead_letters,
    parse_record_id,
    replay,
)
from millstream.ops.replay_lateness import count_maybe_late
from millstream.ops.reset import find_footprint, reset
from millstream.views.commit.committer import collect_results
from millstream.views.commit.open_committer import open_committer
from millstream.views.dead_letter_relay import relay
from millstream.views.reader import state_store_path
from millstream.views.state_store.sqlite_store import SqliteStateStore


@dataclass
class Click:
    ad: int


@dataclass
class LaxClick:
    ad: float


@pytest.fixture
def log(tmp_path):
    """Return a log with five records, three of which are no clicks."""
    folder = tmp_path / "data"
    with ms.connect(folder) as log, log.producer() as producer:
        log.create_topic("clicks", partitions=2)
        producer.send("clicks", {"ad": 1}, partition=0)
        headers = [("trace", b"17"), ("raw", b"\xff"), ("none", None)]
        producer.send(
            "clicks", b"no\xffJSON", partition=0, key="u1", headers=headers, timestamp_ms=1234
        )
        producer.send("clicks", {"ad": "x"}, partition=0)
        producer.send("clicks", {"ad": 1.5}, partition=1)
        producer.send("clicks", {"ad": 2}, partition=1)
    return folder


def app_on(log, schema=Click):
    app = ms.App("ads", log=log)
    topic = app.topic("clicks", schema, metadata=("partition", "offset"))
    topic.stream().view("all", key=("partition", "offset"))
    return app


def take_in(log, schema=Click, *, rows=1000):
    """Run the app's sources and commit, as the job does, in batches of so many records."""
    app = app_on(log, schema)
    plan = app.plan()
    reader = LogReader(log)
    path = state_store_path(log, "ads")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_committer(plan, path, log) as committer:
        batch_id = committer.begin_run("main", "checkpoint")
        save_topic_ids("ads", committer.state_store, plan, reader)
        position = committer.state_store.position("ads").get("clicks", {})
        ends = [end for _, end in reader.offsets("clicks")]
        at = [int(position.get(str(p), 0)) for p in range(len(ends))]
        while at != ends:
            goal = [min(start + rows, end) for start, end in zip(at, ends, strict=True)]
            lanes = [
                lane_of(reader, plan.sources[0], p, *ends)
                for p, ends in enumerate(zip(at, goal, strict=True))
                if ends[0] < ends[1]
            ]
            frames = Ingest(plan.sources[0], plan.buckets).run(
                lanes, SourceTime((), 2, frozenset())
            )
            committer.commit(batch_id, collect_results(plan, frames), {})
            at, batch_id = goal, batch_id + 1


def lane_of(reader, source, partition, start, end):
    read = partial(reader.read, source.topic, partition)
    batches = read(start, end, columns=columns_read(source.fields))
    details = partial(read, columns=("offset", "key", "headers", "value"))
    return SplitInput(partition, 0, start, end, batches, details=details)


def records(log, topic):
    with ms.connect(log) as opened:
        if topic not in opened.topics():
            return []
        return list(opened.consumer(topic, start="earliest", follow=False))


def test_a_dead_record_is_kept_whole(log):
    take_in(log)
    rows = dead_letters(log, "ads")
    assert rows.select("topic", "partition", "offset", "step").rows() == [
        ("clicks", 0, 1, "clicks"),
        ("clicks", 0, 2, "clicks"),
        ("clicks", 1, 0, "clicks"),
    ]
    assert rows["reason"].to_list() == [
        "the value is not UTF-8 at byte 2",
        "field 'ad' is \"x\": not a whole number",
        "field 'ad' is 1.5: not a whole number",
    ]
    first = rows.row(0, named=True)
    assert first["value"] == b"no\xffJSON"
    assert first["key"] == b"u1"
    assert first["time"].timestamp() == 1.234
    headers = [("trace", b"17"), ("raw", b"\xff"), ("none", None)]
    assert headers_from_text(first["headers"]) == headers
    assert headers_from_text(headers_text(headers)) == headers


def test_dead_records_are_forwarded_once_however_often_the_relay_runs(log):
    take_in(log, rows=1)
    assert relay(log, "ads") == 3
    assert relay(log, "ads") == 0
    forwarded = records(log, "ads.dead")
    assert {r.value for r in forwarded} == {b'{"ad":"x"}', b'{"ad":1.5}', b"no\xffJSON"}
    assert len(forwarded) == 3
    first = next(r for r in forwarded if r.value == b"no\xffJSON")
    assert first.key == b"u1"
    assert dict(first.headers) == {
        "topic": b"clicks",
        "partition": b"0",
        "offset": b"1",
        "step": b"clicks",
        "reason": b"the value is not UTF-8 at byte 2",
        "trace": b"17",
        "raw": b"\xff",
        "none": None,
    }


def test_one_that_the_topic_has_no_room_for_is_forwarded_without_what_it_had(log):
    take_in(log)
    assert relay(log, "ads") == 3
    with ms.connect(log) as opened:
        opened.alter_topic("ads.dead", settings={"max.message.bytes": "300"})
        with opened.producer() as producer:
            producer.send("clicks", b"no" * 200, partition=0, key="k", headers=[("own", b"1")])
    take_in(log)
    assert relay(log, "ads") == 1
    assert relay(log, "ads") == 0
    forwarded = records(log, "ads.dead")
    (notice,) = (r for r in forwarded if r.value is None)
    told = dict(notice.headers)
    assert (notice.key, told["value-omitted"]) == (None, b"400 bytes")
    assert (told["topic"], told["partition"], told["offset"]) == (b"clicks", b"0", b"3")
    assert "own" not in told


def test_what_dies_later_is_forwarded_later(log):
    take_in(log)
    relay(log, "ads")
    with ms.connect(log) as opened, opened.producer() as producer:
        producer.send("clicks", b"late", partition=0)
    take_in(log)
    assert relay(log, "ads") == 1
    assert len(records(log, "ads.dead")) == 4


def test_views_that_are_built_again_do_not_forward_again(log):
    take_in(log)
    relay(log, "ads")
    for path in state_store_path(log, "ads").parent.iterdir():
        path.unlink()
    take_in(log)
    assert relay(log, "ads") == 0
    assert len(records(log, "ads.dead")) == 3


def test_a_lost_mark_costs_reading_and_nothing_else(log):
    take_in(log)
    relay(log, "ads")
    state_store_path(log, "ads").with_name("relay-position").write_text("torn")
    assert relay(log, "ads") == 0


@dataclass
class Flag:
    ad: bool


def test_an_app_that_is_reset_forwards_all_that_is_dead_by_its_next_program(log):
    take_in(log)
    assert relay(log, "ads") == 3
    reset(find_footprint("ads", log, log))
    take_in(log, Flag)  # on which the others fail, too, below those that are forwarded
    assert relay(log, "ads") == 5
    assert relay(log, "ads") == 0


def test_a_reset_says_which_records_the_next_run_reads_twice(log, capsys):
    take_in(log)
    replay(log, "ads", DeadLetterFilter(reason="1.5"))
    assert find_footprint("ads", log, log).replayed == {"clicks": 1}
    assert run(["reset", "ads", "--yes", "--log", str(log)]) == 0
    assert "topic clicks: 1 dead letter appended again" in capsys.readouterr().out
    take_in(log, LaxClick)
    with ms.view("all", log) as rows:
        assert rows.scan()["ad"].to_list().count(1.5) == 2


def test_the_dead_of_a_topic_that_was_made_anew_are_forwarded_at_the_same_offsets_too(log):
    take_in(log)
    assert relay(log, "ads") == 3
    reset(find_footprint("ads", log, log))
    with ms.connect(log) as opened:
        opened.delete_topic("clicks")
        opened.create_topic("clicks", partitions=2)
        with opened.producer() as producer:
            producer.send("clicks", b"bad again", partition=0)
    take_in(log)
    assert relay(log, "ads") == 1
    assert records(log, "ads.dead")[-1].value == b"bad again"


def test_a_relay_that_is_killed_forwards_the_rest_the_next_time(log, monkeypatch):
    take_in(log)
    monkeypatch.setattr("millstream.views.dead_letter_relay.SLICE_ROWS", 1)
    began = FolderLog.fence
    calls = []

    def dying(self, writer):
        calls.append(writer)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return began(self, writer)

    monkeypatch.setattr(FolderLog, "fence", dying)
    with pytest.raises(KeyboardInterrupt):
        relay(log, "ads")
    monkeypatch.undo()
    assert 0 < len(records(log, "ads.dead")) < 3
    relay(log, "ads")
    assert len(records(log, "ads.dead")) == 3


def test_a_replay_appends_the_records_as_they_were_and_only_once(log):
    take_in(log)
    assert replay(log, "ads").records == 3
    again = replay(log, "ads")
    assert (again.records, again.already_replayed) == (0, 3)
    back = [r for r in records(log, "clicks") if r.value == b"no\xffJSON"]
    assert [(r.partition, r.key, r.timestamp) for r in back] == [(0, b"u1", back[0].timestamp)] * 2
    assert back[0].headers == back[1].headers
    assert dead_letters(log, "ads")["replayed_at"].null_count() == 0
    assert replay(log, "ads", again=True).records == 3
    assert len(records(log, "clicks")) == 11


def test_replayed_records_arrive_once_the_schema_is_mended(log):
    take_in(log)
    replay(log, "ads", DeadLetterFilter(reason="not a whole number"))
    take_in_mended = partial(take_in, log)
    take_in_mended()  # still wrong: they die again, at their new place
    rows = dead_letters(log, "ads")
    assert rows.height == 5
    assert rows["replayed_at"].null_count() == 3


@pytest.mark.parametrize(
    ("selection", "count"),
    [
        (DeadLetterFilter(), 3),
        (DeadLetterFilter(topic="clicks"), 3),
        (DeadLetterFilter(topic="other"), 0),
        (DeadLetterFilter(reason="field 'ad'"), 2),
        (DeadLetterFilter(record_ids=[("clicks", 0, 2)]), 1),
        (DeadLetterFilter(reason="UTF-8", record_ids=[("clicks", 0, 2)]), 0),
    ],
)
def test_a_replay_takes_what_is_selected(log, selection, count):
    take_in(log)
    assert replay(log, "ads", selection).records == count


@pytest.mark.not_in_lane("thresholds", "it is several transactions there")
@pytest.mark.parametrize("step", ["before the transaction", "after the transaction"])
def test_a_replay_that_is_interrupted_is_finished_by_the_next_and_appends_once(
    log, monkeypatch, step
):
    take_in(log)
    marks = ops._Replay._mark

    def dying_mark(self, rows, number, at, **looks):
        assert at is not None or marks(self, rows, number, at, **looks)
        if (at is None) == (step == "before the transaction"):
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(ops._Replay, "_mark", dying_mark)
    with pytest.raises(KeyboardInterrupt):
        replay(log, "ads")
    monkeypatch.undo()
    done = replay(log, "ads")
    assert (done.records, done.finished) == (0, 3)
    assert len(records(log, "clicks")) == 8
    assert replay(log, "ads").finished == 0


def ids_of(log):
    """Return the records that have died in the partition 0, as they are named."""
    rows = dead_letters(log, "ads").filter(pl.col("partition") == 0)
    return [(row["topic"], row["partition"], row["offset"]) for row in rows.iter_rows(named=True)]


def one(log, record, **options):
    return replay(log, "ads", DeadLetterFilter(record_ids=[record]), late_ok=True, **options)


@pytest.mark.not_in_lane("thresholds", "it is several transactions there")
def test_a_replay_that_stood_still_does_not_send_again_what_another_has_sent(log, monkeypatch):
    take_in(log)
    first, _ = ids_of(log)
    before = len(records(log, "clicks"))
    numbered = ops._Replay.replay

    def late(run, rows):
        monkeypatch.setattr(ops._Replay, "replay", numbered)
        assert one(log, first).records == 1  # another replay, from its begin to its end
        return numbered(run, rows)

    monkeypatch.setattr(ops._Replay, "replay", late)
    with pytest.raises(RetriableError, match="Another replay"):
        one(log, first)
    assert one(log, first).already_replayed == 1
    assert len(records(log, "clicks")) == before + 1


@pytest.mark.not_in_lane("thresholds", "it is several transactions there")
@pytest.mark.parametrize("older_first", [True, False])
def test_of_two_replays_with_one_number_none_loses_its_records(log, monkeypatch, older_first):
    take_in(log)
    first, second = ids_of(log)
    before = len(records(log, "clicks"))
    mark = ops._Replay._mark
    waiting = []

    def marked(run, rows, number, at, **looks):
        if at is None and not waiting:
            waiting.append(partial(mark, run, rows, number, at, **looks))
            with suppress(MillstreamError):
                one(log, second)  # begins when the older one has a number and no marks yet
            if older_first:
                return True
        elif at is None and older_first and len(waiting) == 1:
            waiting.append(None)
            assert waiting[0]()
        return mark(run, rows, number, at, **looks)

    monkeypatch.setattr(ops._Replay, "_mark", marked)
    with suppress(MillstreamError):
        one(log, first)
    monkeypatch.setattr(ops._Replay, "_mark", mark)
    one(log, first)
    one(log, second)
    assert len(records(log, "clicks")) == before + 2
    assert dead_letters(log, "ads").filter(pl.col("replayed_at").is_null()).height == 1


def test_marks_do_not_disturb_the_job_nor_what_it_says_of_itself(log):
    take_in(log)
    with SqliteStateStore(state_store_path(log, "ads"), readonly=True) as store:
        before = store.position("ads"), store.ledger("ads"), store.position("dead_letters")
    replay(log, "ads")
    with SqliteStateStore(state_store_path(log, "ads"), readonly=True) as store:
        after = store.position("ads"), store.ledger("ads"), store.position("dead_letters")
        assert store.changes("dead_letters")["_seq"].to_list() == list(range(1, 10))
    assert before == after
    take_in(log)  # goes on from where it was


def test_an_app_or_record_that_is_not_there_is_named(log):
    take_in(log)
    with pytest.raises(UnknownViewError, match=r"no views of an app 'other'.*ads"):
        replay(log, "other")
    for text in (
        "clicks",
        "clicks/0",
        "clicks/x/1",
        "/0/1",
        f"clicks/0/{1 << 63}",
        f"clicks/{1 << 31}/0",
    ):
        with pytest.raises(ConfigError, match="Give TOPIC/PARTITION/OFFSET"):
            parse_record_id(text)


# The command.


@pytest.fixture
def said(log, capsys, monkeypatch):
    """Return a function that runs `millstream dead …` on the log and returns what it prints."""
    take_in(log)
    monkeypatch.setenv("MILLSTREAM_LOG", str(log))

    def call(*arguments, code=0):
        assert run(["dead", *arguments]) == code
        out, err = capsys.readouterr()
        return out if code == 0 else err

    return call


def test_the_command_lists_dead_records(said):
    text = said("list", "ads")
    assert "clicks/0/1" in text
    assert "the value is not UTF-8 at byte 2" in text
    found = json.loads(said("list", "ads", "--reason", "1.5", "--json"))
    assert [row["record"] for row in found] == ["clicks/1/0"]
    assert "1 of 3 rows" in said("list", "ads", "--limit", "1")
    assert said("list", "ads", "--topic", "other") == "No dead letters in ads.\n"


def test_the_command_shows_one_record_whole(said):
    text = said("show", "ads", "clicks/0/1")
    assert 'value:    {"base64": "bm//SlNPTg=="}' in text
    assert '["trace", "17"]' in text
    assert "key:      u1" in text
    (row,) = json.loads(said("show", "ads", "clicks/0/2", "--json"))
    assert row["value"] == '{"ad":"x"}'
    assert "no dead letter clicks/0/0" in said("show", "ads", "clicks/0/0", code=2)


def test_the_command_replays_and_relays(said, log):
    assert said("relay", "ads") == "3 records forwarded to ads.dead\n"
    assert json.loads(said("relay", "ads", "--json")) == {"topic": "ads.dead", "records": 0}
    assert said("replay", "ads", "--record", "clicks/0/1", "--yes") == "1 record appended again\n"
    assert said("replay", "ads", "--yes") == (
        "2 records appended again; 1 were replayed before (--again appends them once more)\n"
    )
    assert len(records(log, "clicks")) == 8
    assert "no views of an app 'x'" in said("relay", "x", code=2)


def test_a_replay_is_asked_for(said, monkeypatch, log):
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert "again" in said("replay", "ads", code=130)
    assert len(records(log, "clicks")) == 5


def test_dead_records_of_a_mended_schema_come_out(log):
    take_in(log)
    replay(log, "ads")
    for path in state_store_path(log, "ads").parent.iterdir():
        path.unlink()
    take_in(log, LaxClick)
    with SqliteStateStore(state_store_path(log, "ads"), readonly=True) as store:
        assert store.scan("all").filter(pl.col("ad") == 1.5).height == 2


# -- what would come too late --------------------------------------------------------------------

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@dataclass
class Bid:
    at: datetime
    price: int


def ran(folder, rows, lateness="0 seconds", time="at"):
    """Run windows over rows, and leave log and store as the app would; the last row is the latest."""
    app = ms.App("bids", log=folder)
    stream = app.topic("bids", Bid).stream(time=time, lateness=lateness)
    stream.window(ms.tumbling("1 minute")).agg(n=ms.sum("price")).view("minutes")
    out = testing.run(app, {"bids": rows}, partitions=1)
    path = state_store_path(folder, "bids")
    path.parent.mkdir(parents=True)
    with sqlite3.connect(out._store._path) as made, sqlite3.connect(path) as copy:
        made.backup(copy)
    made.close()
    copy.close()
    with ms.connect(folder) as log:
        log.create_topic("bids", exist_ok=True)
    return folder


def bid(seconds, price=1):
    return {"at": (NOON + timedelta(seconds=seconds)).isoformat(), "price": price}


def test_a_replay_of_what_is_older_than_the_watermark_is_refused_before_anything_is_appended(
    tmp_path,
):
    rows = [bid(0), bid(10, "x"), bid(300), bid(299, "x"), bid(301, "x"), bid(300)]
    folder = ran(tmp_path / "data", rows)
    with pytest.raises(ConfigError, match="2 of the 3 dead letters of bids may come too late"):
        replay(folder, "bids")
    assert records(folder, "bids") == []
    assert dead_letters(folder, "bids")["replay"].null_count() == 3
    done = replay(folder, "bids", late_ok=True)
    assert (done.records, done.may_be_late) == (3, 2)
    assert len(records(folder, "bids")) == 3


def test_what_the_lateness_still_takes_in_is_replayed_without_a_word(tmp_path):
    rows = [bid(0), bid(10, "x"), bid(300)]
    folder = ran(tmp_path / "data", rows, lateness="290 seconds 1 millisecond")
    assert replay(folder, "bids").may_be_late == 0


def test_of_a_record_whose_time_cannot_be_told_it_is_assumed_that_it_is_late(tmp_path):
    folder = ran(tmp_path / "data", [bid(0), b"no JSON", bid(300)])
    with pytest.raises(ConfigError, match="1 of the 1 dead letters"):
        replay(folder, "bids")


def test_of_a_time_that_an_expression_makes_nothing_is_assumed_either(tmp_path):
    time = pl.col("at").dt.offset_by("1h")
    folder = ran(tmp_path / "data", [bid(0), bid(9999, "x"), bid(300)], time=time)
    with pytest.raises(ConfigError, match="1 of the 1 dead letters"):
        replay(folder, "bids")


@given(
    st.lists(st.tuples(st.integers(0, 400), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 200),
)
@example([(0, False), (60, True), (1, True)], 0)  # the first of the dead makes the second late
@settings(max_examples=15, deadline=None)
def test_what_is_not_counted_as_perhaps_late_is_taken_in(rows, lateness_s):
    """Run the dead again, mended, behind the others: those that were not counted are not late."""
    lateness = timedelta(seconds=lateness_s)
    with tempfile.TemporaryDirectory() as name:
        first = [bid(at, "x" if dead else 1) for at, dead in rows]
        folder = ran(Path(name) / "data", first, lateness=lateness)
        dead = dead_letters(folder, "bids")
        with SqliteStateStore(state_store_path(folder, "bids")) as store:
            counted = count_maybe_late(store, "bids", dead)
    app = ms.App("again", log="unused")
    stream = app.topic("bids", Bid).stream(time="at", lateness=lateness)
    stream.window(ms.tumbling("1 minute")).agg(n=ms.sum("price")).view("minutes")
    good = [bid(at) for at, dead in rows if not dead]
    mended = [bid(at) for at, dead in rows if dead]
    out = testing.run(app, {"bids": [*good, *mended]}, partitions=1)
    before = testing.run(app, {"bids": good}, partitions=1).late if good else 0
    assert out.late - before <= counted or not good


def row_died(offset, topic="clicks"):
    """Return the dead letter of a row behind a shuffle, as an operator gives it."""
    letter = {
        "topic": topic,
        "partition": 0 if topic else -1,
        "offset": offset,
        "step": "with_columns(cost)",
        "reason": "ValueError: three",
        "value": b'{"ad":1}',
    }
    return with_all_columns(pl.DataFrame(letter))


def test_what_died_behind_a_shuffle_is_listed_and_shown_and_left_out_of_a_replay(log, capsys):
    take_in(log)
    with SqliteStateStore(state_store_path(log, "ads")) as store:
        store.amend("dead_letters", pl.concat([row_died(0), row_died(-1, "")]))
    for command in (["list", "ads"], ["show", "ads", "clicks/0/0"]):
        assert run(["dead", *command, "--log", str(log)]) == 0
        assert "with_columns(cost)" in capsys.readouterr().out
    ends = len(records(log, "clicks"))
    with pytest.raises(
        ConfigError, match=r"1 selected dead letters .* no record.*millstream reset"
    ):
        replay(log, "ads", DeadLetterFilter(record_ids=[("clicks", 0, 0)]))
    assert len(records(log, "clicks")) == ends
    assert run(["dead", "replay", "ads", "--yes", "--log", str(log)]) == 0
    said = capsys.readouterr().out
    assert "3 records appended again" in said
    assert "2 dead letters from after a shuffle left out" in said
    assert len(records(log, "clicks")) == ends + 3
    assert replay(log, "ads", again=True).records == 3
