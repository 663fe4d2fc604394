"""Where an app begins to read: a model written from the rule, and what happens at each moment of a first run."""

from __future__ import annotations

import json
import logging
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.cli.run import run as run_command
from millstream.engine.first_offsets import load_first_offsets
from millstream.errors import ConfigError, OffsetOutOfRangeError
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.record_trace import trace_record
from millstream.ops.replay_start import ReplayStart
from millstream.views.commit.committer import BatchCommitter
from millstream.views.store_location import open_state_store

START = datetime(2026, 1, 1, tzinfo=UTC)


def declare(folder, *, factor=1, partitions=1, **topic):
    app = ms.App("readers", log=folder)
    clicks = app.topic(
        "clicks", {"n": int}, partitions=partitions, metadata=("partition", "offset"), **topic
    )
    read = clicks.stream(name="read").select("partition", "offset", n=pl.col("n") * factor)
    read.view("seen", key=("partition", "offset"))
    read.group_by("partition").agg(total=ms.sum("n")).view("totals")
    return app


def send(folder, times, partitions):
    """Append a record for each (partition, seconds); its timestamp is so long after START."""
    with ms.connect(folder) as log:
        log.create_topic("clicks", partitions=partitions, exist_ok=True)
        with log.producer() as producer:
            for n, (partition, seconds) in enumerate(times):
                at_ms = int((START + timedelta(seconds=seconds)).timestamp() * 1000)
                producer.send("clicks", {"n": n}, partition=partition, timestamp_ms=at_ms)


class Notices(logging.Handler):
    """What a run has said of starts."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        text = record.getMessage()
        if text.startswith("The start "):
            self.texts.append(text)


def seen(folder):
    with ms.view("seen", log=folder) as view:
        return set(view.scan().select("partition", "offset").rows())


def total(folder):
    with ms.view("totals", log=folder) as view:
        return view.get(partition=0)["total"]


def run(app, **options):
    notices = Notices()
    logger = logging.getLogger("millstream.engine.job")
    logger.addHandler(notices)
    try:
        app.run(engine="local", until="caught-up", **options)
    finally:
        logger.removeHandler(notices)
    return notices.texts


def model(times, partitions, start):
    """By the rule: what is read of the records that were there, and where each partition begins."""
    begins = []
    for number in range(partitions):
        own = [seconds for partition, seconds in times if partition == number]
        if start == "earliest":
            begins.append(0)
        elif start == "latest":
            begins.append(len(own))
        elif isinstance(start, datetime):
            at = (start - START).total_seconds()
            begins.append(next((n for n, s in enumerate(own) if s >= at), len(own)))
        else:
            begins.append(start.get(number, 0))
    return begins


@st.composite
def histories(draw):
    partitions = draw(st.sampled_from([1, 4, 7]))
    record = st.tuples(st.integers(0, partitions - 1), st.integers(0, 30))
    before, after = draw(st.lists(record, max_size=25)), draw(st.lists(record, max_size=8))
    counts = [sum(p == n for p, _ in before) for n in range(partitions)]
    named = draw(st.sets(st.integers(0, partitions - 1)))
    offsets = {n: draw(st.integers(0, counts[n])) for n in sorted(named)}
    moment = START + timedelta(
        seconds=draw(st.integers(-1, 31)), microseconds=draw(st.sampled_from([0, 1]))
    )
    start = draw(st.sampled_from(["earliest", "latest", moment, moment.isoformat(), offsets]))
    return partitions, before, after, start, draw(st.integers(1, 40))


@settings(max_examples=some(60))
@given(histories())
def test_an_app_reads_what_is_behind_its_start_and_all_that_follows(history):
    partitions, before, after, start, rows_per_batch = history
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        send(folder, before, partitions)
        parsed = start
        if isinstance(start, str) and start not in ("earliest", "latest"):
            parsed = datetime.fromisoformat(start)
        begins = model(before, partitions, parsed)
        app = declare(folder, partitions=partitions, start=start)
        assert run(app, rows_per_batch=rows_per_batch) == []
        send(folder, after, partitions)
        # Another start changes nothing once there is one.
        run(declare(folder, partitions=partitions), rows_per_batch=rows_per_batch)
        counts = [sum(p == n for p, _ in [*before, *after]) for n in range(partitions)]
        wanted = {(n, at) for n in range(partitions) for at in range(begins[n], counts[n])}
        if parsed == "earliest" or wanted:
            assert seen(folder) == wanted
        if wanted and any(begins):
            with open_state_store(app.state_store, readonly=True) as store:
                assert store.position("readers")["clicks"] == {
                    str(n): at for n, at in enumerate(counts)
                }


@pytest.fixture
def folder(tmp_path):
    send(tmp_path, [(0, n) for n in range(20)], 1)
    return tmp_path


def test_another_start_is_said_to_be_ignored(folder):
    assert run(declare(folder, start={0: 15})) == []
    assert run(declare(folder, start={0: 15})) == []
    assert run(declare(folder)) == []  # asks for nothing
    (notice,) = run(declare(folder, start="latest"))
    assert (
        "The start latest of topic 'clicks' is ignored: readers began at 0: 15 and stands at 0: 20"
        in notice
    )
    assert "millstream reset readers" in notice
    (notice,) = run(declare(folder), start="2026-01-01")
    assert "The start 2026-01-01T00:00:00 of topic 'clicks' is ignored" in notice
    assert seen(folder) == {(0, n) for n in range(15, 20)}


def test_an_app_that_began_before_there_were_starts_stays_where_it_is(folder):
    run(declare(folder))
    (notice,) = run(declare(folder, start="latest"))
    assert "began at earliest" in notice


def test_latest_is_the_end_at_the_first_run_also_if_that_run_read_nothing(folder):
    run(declare(folder, start="latest"))
    send(folder, [(0, 50)] * 3, 1)
    (notice,) = run(declare(folder, start="earliest"), start="earliest") or ("",)
    assert seen(folder) == {(0, n) for n in range(20, 23)}
    assert notice == ""  # what is asked for by default is not said to be ignored


def test_a_first_batch_that_was_planned_and_not_committed_begins_where_it_began(
    folder, monkeypatch
):
    def die(*_args, **_options):
        raise MemoryError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(BatchCommitter, "commit", die)
        with pytest.raises(MemoryError):
            run(declare(folder, start={0: 12}), rows_per_batch=3)
    send(folder, [(0, 50)], 1)
    (notice,) = run(declare(folder, start={0: 2}))
    assert "began at 0: 12 and has read nothing yet" in notice
    assert seen(folder) == {(0, n) for n in range(12, 21)}


def test_a_first_batch_that_was_planned_without_a_start_begins_at_the_start(folder, monkeypatch):
    def die(*_args, **_options):
        raise MemoryError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(BatchCommitter, "commit", die)
        with pytest.raises(MemoryError):
            run(declare(folder))
    assert len(run(declare(folder, start="latest"))) == 1
    assert seen(folder) == {(0, n) for n in range(20)}


def test_a_topic_that_was_created_again_before_anything_was_read_is_asked_anew(folder):
    run(declare(folder, start="latest"))
    with ms.connect(folder) as log:
        log.delete_topic("clicks")
    send(folder, [(0, 1)] * 2, 1)
    run(declare(folder, start={0: 1}))
    assert seen(folder) == {(0, 1)}


def test_of_two_topics_only_the_one_that_was_created_again_is_asked_anew(folder):
    def two(start):
        app = declare(folder, start=start)
        app.topic("others", {"n": int}, start=start).stream().view("others", key="n")
        return app

    run(two("latest"))
    with ms.connect(folder) as log:
        log.delete_topic("others")
        log.create_topic("others", partitions=1)
        with log.producer() as producer:
            for n in range(4):
                producer.send("others", {"n": n})
    send(folder, [(0, 1)], 1)
    (ignored,) = run(two({0: 2}))
    assert "of topic 'clicks'" in ignored
    assert seen(folder) == {(0, 20)}
    with ms.view("others", log=folder) as view:
        assert set(view.scan()["n"]) == {2, 3}


def test_what_is_no_start_is_one_error(folder):
    for start, said in [
        (
            "lates",
            "The start of topic 'clicks' is 'lates'; give \"earliest\" or \"latest\", a datetime or its ISO text",
        ),
        ("lates", "Did you mean 'latest'"),
        (7, "is 7; give"),
        ({"0": 1}, "is {'0': 1}; give"),
    ]:
        with pytest.raises(ConfigError) as error:
            declare(folder, start=start)
        assert said in str(error.value)
    with pytest.raises(
        OffsetOutOfRangeError,
        match=r"start of topic 'clicks' is offset 21 of clicks/0, which holds \[0, 20\)",
    ):
        run(declare(folder, start={0: 21}))
    with pytest.raises(ConfigError, match="names partition 3"):
        run(declare(folder, start={3: 0}))
    with pytest.raises(ConfigError, match=r"names other/0, and what is read is clicks"):
        run(declare(folder), start="other/0/1")
    run(declare(folder, start={0: 20}))  # nothing of these has begun the app


def test_an_offset_that_retention_has_removed_is_one_error(folder):
    with ms.connect(folder) as log:
        log.delete_records("clicks", 0, 5)
    with pytest.raises(
        OffsetOutOfRangeError, match=r"is offset 3 of clicks/0, which holds \[5, 20\)"
    ):
        run(declare(folder, start={0: 3}))


def test_a_table_of_a_database_has_all_its_records(folder):
    app = ms.App("copies", log=folder)
    with pytest.raises(ConfigError, match="leave the start out"):
        app.table("orders", {"id": int}, key="id", envelope="debezium", start="latest")
    app = ms.App("copies", log=folder)
    app.table("orders", {"id": int}, key="id", envelope="debezium").view("orders")
    with pytest.raises(ConfigError, match="is read as a table of a database"):
        run(app, start="orders/0/1")


def test_what_a_run_is_asked_is_for_streams_and_tables_have_all_rows(folder):
    app = ms.App("joined", log=folder)
    with ms.connect(folder) as log, log.producer() as producer:
        log.create_topic("names", partitions=1)
        producer.send("names", {"n": 21, "name": "x"}, key="21")
    names = app.table("names", {"n": int, "name": str}, key="n", partitions=1)
    clicks = app.topic("clicks", {"n": int}, partitions=1, metadata=("offset",)).stream()
    clicks.lookup(names, on="n", how="left").view("named", key="offset")
    assert run(app, start="latest") == []
    send(folder, [(0, 60)] * 22, 1)
    run(app)
    with ms.view("named", log=folder) as view:
        assert view.scan().height == 22
        assert view.scan(where={"n": 21})["name"].to_list() == ["x"]


def test_a_rebuild_begins_where_the_app_began_and_earliest_where_the_log_does(folder):
    began = {"start": {0: 8}}
    run(declare(folder, **began))
    edited = declare(folder, factor=2, **began)
    plan = plan_change(edited)
    assert [(one.start, one.end, one.gone) for one in plan.replays] == [(8, 20, 0)]
    assert plan.to_dict()["began"] == {"clicks": "0: 8 (offset 0: 8)"}
    assert deploy(edited).records == 12
    assert total(folder) == 2 * sum(range(8, 20))
    again = declare(folder, factor=3, **began)
    assert deploy(again, start=ReplayStart.parse(["earliest"])).records == 20
    assert total(folder) == 3 * sum(range(20))
    with ms.connect(folder) as log:
        log.delete_records("clicks", 0, 10)
    (replay,) = plan_change(declare(folder, factor=4, **began)).replays
    assert (replay.start, replay.end, replay.gone) == (10, 20, 2)


def test_a_record_before_the_start_was_not_read(folder):
    app = declare(folder, start={0: 8})
    run(app)
    before, behind = trace_record(app, ("clicks", 0, 7)), trace_record(app, ("clicks", 0, 8))
    assert (before.outcome, behind.outcome) == ("not read", "in the outputs")
    assert "began to read clicks/0 at offset 8" in before.notes[0]
    assert not any("no longer holds" in note for note in behind.notes)


def test_the_command_begins_where_it_is_asked_to_and_the_plan_says_where(folder, tmp_path):
    from click.testing import CliRunner

    from millstream.cli.plan import plan as plan_command

    file = tmp_path / "app.py"
    file.write_text(
        "import millstream as ms\n"
        f"app = ms.App('readers', log={str(folder)!r})\n"
        "clicks = app.topic('clicks', {'n': int}, metadata=('partition', 'offset'), start='latest')\n"
        "clicks.stream().view('seen', key=('partition', 'offset'))\n"
    )
    first = CliRunner().invoke(plan_command, [str(file)])
    assert (
        "its first run reads the log from its start.\nBut for clicks, which it reads from latest."
        in first.output
    )
    command = [str(file), "--engine", "local", "--until", "caught-up", "--json"]
    done = CliRunner().invoke(run_command, [*command, "--start", "clicks/0/17"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["read"] == 3
    assert seen(folder) == {(0, n) for n in range(17, 20)}
    later = CliRunner().invoke(plan_command, [str(file)])
    assert "It began to read clicks at 0: 17 (offset 0: 17)." in later.output
    refused = CliRunner().invoke(run_command, [*command, "--start", "yesterday"])
    assert isinstance(refused.exception, ConfigError)
    assert "give a time such as" in str(refused.exception)


def test_the_offsets_are_noted_for_those_that_look_at_the_app(folder):
    app = declare(folder, start=START + timedelta(seconds=4))
    run(app)
    with open_state_store(app.state_store, readonly=True) as store:
        assert load_first_offsets(store, "readers") == {"clicks": (4,)}


def test_offsets_of_one_topic_that_a_run_is_asked_for_leave_the_starts_of_others(folder):
    def two():
        app = declare(folder, start="latest")
        app.topic("others", {"n": int}, partitions=1).stream().view("others", key="n")
        return app

    with ms.connect(folder) as log:
        log.create_topic("others", partitions=1)
        with log.producer() as producer:
            for n in range(4):
                producer.send("others", {"n": n})
    run(two(), start="others/0/3")
    send(folder, [(0, 60)], 1)
    run(two())
    assert seen(folder) == {(0, 20)}
    with ms.view("others", log=folder) as view:
        assert view.scan()["n"].to_list() == [3]


def test_a_run_that_is_asked_for_the_first_record_elsewhere_has_it_of_all_topics(folder):
    run(declare(folder, start="latest"), start=["earliest", "clicks/0/18"])
    assert seen(folder) == {(0, 18), (0, 19)}
    again = declare(folder, start="latest")
    again.topic("others", {"n": int})
    assert len(run(again, start="earliest")) == 0


def test_a_topic_that_was_deleted_and_is_no_longer_read_is_forgotten(folder):
    def two():
        app = declare(folder, start="latest")
        app.topic("others", {"n": int}, start="latest").stream().view("others", key="n")
        return app

    with ms.connect(folder) as log:
        log.create_topic("others", partitions=1)
    run(two())
    with ms.connect(folder) as log:
        log.delete_topic("others")
    send(folder, [(0, 60)], 1)
    assert run(declare(folder, start="latest")) == []
    assert seen(folder) == {(0, 20)}


def test_the_position_is_of_the_topics_that_are_read(folder):
    with ms.connect(folder) as log:
        log.create_topic("others", partitions=1)
        with log.producer() as producer:
            producer.send("others", {"n": 1})
    both = declare(folder, start="latest")
    both.topic("others", {"n": int}, start="latest").stream().view("others", key="n")
    run(both)
    send(folder, [(0, 60)], 1)
    run(app := declare(folder, start="latest"))
    with open_state_store(app.state_store, readonly=True) as store:
        assert store.position("readers") == {"clicks": {"0": 21}}
