"""Deploying from a stated place of the log on: what is rebuilt has the records from there, and says so."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta

import pytest
from edited_app import START, EditedApp, answers, events, per_kind
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.client.open import open_reader
from millstream.errors import ConfigError
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.replay_start import ReplayStart
from millstream.record import to_timestamp_ms
from millstream.views.coverage import partial_note
from millstream.views.store_location import open_state_store

TRIPLE = ("FACTOR = 2", "FACTOR = 3")


class StoppedError(Exception):
    pass


def stop(_progress):
    raise StoppedError


@pytest.fixture
def edited(tmp_path):
    """An app over two partitions whose records have the timestamps of their events."""
    made = EditedApp(tmp_path, 2)
    made.create()
    append(made, events(120, 5))
    made.run(made.write())
    return made


def append(made, rows):
    with ms.connect(made.log) as log, log.producer() as producer:
        for number, row in enumerate(rows):
            value = json.dumps({**row, "at": row["at"].isoformat()}).encode()
            at_ms = to_timestamp_ms(row["at"])
            producer.send("clicks", value, partition=number % 2, timestamp_ms=at_ms)


def note(app, view="per_kind"):
    with open_state_store(app.state_store, readonly=True) as store:
        return partial_note(store.coverage(view))


def test_offsets_of_partitions_are_where_it_begins(edited):
    rows = events(120, 5)
    app = edited.write(TRIPLE)
    start = ReplayStart.parse(["clicks/0/20", "clicks/1/50"])
    plan = plan_change(app, start=start)
    assert [(one.start, one.end, one.gone) for one in plan.replays] == [(20, 60, 0), (50, 60, 0)]
    assert plan.exit_code == 3
    with suppress(StoppedError):
        deploy(app, stop, start=start, rows_per_batch=20)
    assert deploy(app, start=start).records == 30  # it goes on where it was stopped
    read = [row for n, row in enumerate(rows) if n // 2 >= (20, 50)[n % 2]]
    assert edited.views(app) == answers(rows) | {"per_kind": per_kind(read, 3)}
    assert "is written since" in note(app)
    assert "read up to clicks/0 20, clicks/1 50" in note(app)
    assert note(app, "per_ad") is None
    more = events(30, 6, first=120)
    append(edited, more)
    edited.run(app)
    assert edited.views(app)["per_kind"] == per_kind([*read, *more], 3)


def test_a_time_is_that_of_the_records_and_another_place_begins_anew(edited, call):
    rows = events(120, 5)
    app = edited.write(TRIPLE)
    with suppress(StoppedError):
        deploy(app, stop, rows_per_batch=20)  # from the start
    at = START + timedelta(seconds=3 * 70)
    answer = call("compare", str(edited.file), "--from", at.isoformat(), "--json")
    assert answer.code == 0, answer.err
    answer = call("deploy", str(edited.file), "--from", at.isoformat(), "--json")
    assert json.loads(answer.out)["records"] == 0, answer.err  # as it was compared
    assert edited.views(app) == answers(rows) | {"per_kind": per_kind(rows[70:], 3)}
    assert "clicks/0 35, clicks/1 35" in note(app)


def test_a_stated_place_without_anything_that_is_rebuilt_is_said_to_change_nothing(edited, call):
    edited.write()
    said = "Nothing reads the log again, so --from changes nothing."
    assert said in call("deploy", str(edited.file), "--from", "earliest").out
    edited.write(TRIPLE)
    assert said not in call("deploy", str(edited.file), "--from", "earliest").out


def test_a_version_that_is_kept_is_not_what_a_stated_place_begins_with(edited):
    rows = events(120, 5)
    deploy(edited.write(TRIPLE))
    app = edited.write()
    assert deploy(app, start=ReplayStart.parse(["clicks/1/30"])).records == 90
    read = [row for n, row in enumerate(rows) if not n % 2 or n // 2 >= 30]
    assert edited.views(app)["per_kind"] == per_kind(read)


@pytest.mark.long
def test_a_step_whose_rows_go_to_a_topic_is_whole_again_unless_a_place_is_stated(tmp_path):
    to_topic = ('per_kind.view("per_kind")', 'per_kind.to("weights", key="kind")')
    edited = EditedApp(tmp_path, 1)
    edited.create()
    edited.append(events(30, 5))
    edited.run(edited.write(to_topic))
    assert deploy(edited.write(to_topic, TRIPLE), start=ReplayStart.parse(["clicks/0/20"])).switched
    assert deploy(edited.write(to_topic)).switched
    # What is kept of the version lacks the first 20, and its topic does not say so.
    assert deploy(edited.write(to_topic, TRIPLE)).records == 30


def test_a_topic_of_which_nothing_is_rebuilt_may_be_beside_one_that_is(tmp_path):
    mixed = (
        'per_kind.view("per_kind")',
        """per_kind.view("per_kind")
other = app.topic("other", {"kind": str}).stream()
per_kind.select("kind").union(other).to("mixed")""",
    )
    edited = EditedApp(tmp_path, 1)
    edited.create()
    rows = events(30, 5)
    edited.append(rows)
    with ms.connect(edited.log) as log:
        log.create_topic("other", partitions=1)
    edited.append(rows, "other")
    edited.run(edited.write(mixed))
    app = edited.write(mixed, TRIPLE)
    assert deploy(app, start=ReplayStart.parse(["clicks/0/20"])).records == 10
    assert edited.views(app)["per_kind"] == per_kind(rows[20:], 3)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A log with two partitions, of which each has a record every six seconds."""
    folder = tmp_path_factory.mktemp("log")
    with ms.connect(folder) as log, log.producer() as producer:
        log.create_topic("t", partitions=2)
        for n in range(100):
            at_ms = to_timestamp_ms(START + timedelta(seconds=3 * n))
            producer.send("t", b"x", partition=n % 2, timestamp_ms=at_ms)
    return open_reader(folder)


@given(st.integers(-200, 400), st.sampled_from([0, 1, 999, 1000, 500_001]))
def test_a_time_is_where_the_first_record_of_it_is(log, seconds, microseconds):
    at = START + timedelta(seconds=seconds, microseconds=microseconds)
    seconds += microseconds / 1e6
    found = ReplayStart.parse([at.isoformat()]).starts(log, ["t"], {"t": {"0": 40, "1": 50}})
    for partition, end in enumerate((40, 50)):
        before = [n for n in range(100) if n % 2 == partition and 3 * n < seconds]
        assert found["t"][partition] == min(len(before), end)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["yesterday"], "give a time such as"),
        (["t/x/1"], "give a time such as"),
        (["2026-01-01", "2026-01-02"], "two times"),
        (["t/0/1", "t/0/2"], "names t/0 twice"),
        (["t/7/1"], "is of no partition that is read again; that is t/0, t/1"),
        (["t/0/41"], "the log begins at 0 there, and the app has read up to 40"),
    ],
)
def test_what_is_no_place_of_the_log_is_refused(log, texts, said):
    with pytest.raises(ConfigError, match=said):
        ReplayStart.parse(texts).starts(log, ["t"], {"t": {"0": 40, "1": 50}})
