"""Each request has one answer, as of the position that it states, or is one dead letter, however often a batch is repeated."""

import subprocess
import sys
from datetime import datetime
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.example_counts import some
from tests.request_model import OUTPUTS, POINTS, check_all, counts, draw, request_app

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, CorruptionError, UserCodeError
from millstream.views.state_store.sqlite_store import SqliteStateStore

ROOT = Path(__file__).parents[4]


def check_kit(folder, seed, partitions, batches, crash, engine="kernel"):
    drawn = draw(seed, 60, 40, partitions)
    result = testing.run(
        request_app(folder),
        drawn,
        partitions=partitions,
        batches=batches,
        seed=seed,
        crash=crash,
        engine=engine,
    )
    answers = {
        topic: [bytes(value) for value in result.topic(topic)["value"]]
        for topic in OUTPUTS.values()
    }
    check_all(drawn, partitions, answers, result.dead, counts(result.ledger))


@pytest.mark.parametrize(("partitions", "batches"), [(1, 5), (4, 3), (7, 1)])
def test_each_request_is_answered_once_as_of_the_position_that_its_answer_states(
    tmp_path, partitions, batches
):
    check_kit(tmp_path, partitions, partitions, batches, crash=3)


@pytest.mark.long
@settings(max_examples=some(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 8),
    crash=st.integers(0, 5),
)
def test_answers_are_right_however_batches_are_cut_and_crash(
    tmp_path_factory, seed, partitions, batches, crash
):
    check_kit(tmp_path_factory.mktemp("asked"), seed, partitions, batches, crash)


def check_log(folder, drawn, partitions):
    with ms.connect(folder) as log:
        answers = {
            topic: [
                bytes(value)
                for number in range(log.topics()[topic].partitions)
                for value in log.read(topic, number)["value"].to_pylist()
            ]
            for topic in OUTPUTS.values()
        }
    with ms.view("answering/dead_letters", log=folder) as view:
        dead = view.scan()
    store = SqliteStateStore(folder / "apps" / "answering" / "views.db", readonly=True)
    try:
        ledger = pl.DataFrame(store.ledger("answering"))
    finally:
        store.close()
    check_all(drawn, partitions, answers, dead, counts(ledger))


def send(folder, drawn, partitions):
    with ms.connect(folder) as log:
        for topic in drawn:
            log.create_topic(topic, partitions=partitions)
        with log.producer() as producer:
            for topic, rows in drawn.items():
                for row in rows:
                    producer.send(topic, row.values, partition=row.partition)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=[] if point == "after the topic" else pytest.mark.long)
        for point in POINTS
    ],
)
def test_a_job_that_is_killed_at_a_point_of_the_commit_answers_each_request_once(tmp_path, point):
    drawn = draw(5, 50, 30, 2)
    send(tmp_path, drawn, 2)
    command = [sys.executable, "-m", "tests.request_model", str(tmp_path), point, "1"]
    died = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert died.returncode == -9, died.stderr
    request_app(tmp_path).run(engine="local", until="caught-up", rows_per_batch=20)
    check_log(tmp_path, drawn, 2)
    assert not [*(tmp_path / "apps" / "answering" / "runs" / "journal").glob("*")]


# ── what is refused ─────────────────────────────────────────────────────────────────────────────


def declared(log, columns, question="totals", **options):
    app = ms.App("refusing", log=log)
    clicks = app.topic("clicks", {"user": str}, key="user").stream()
    clicks.group_by("user", name="totals").agg(n=ms.count()).view("of_users")

    @app.question("reach")
    def reach(state, url, at=None):
        return state.rows("totals").height

    requests = app.topic("requests", columns).stream()
    requests.answer(question, **{"id": "id", "to": "answers", **options})
    return app


@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        ({"id": int, "user": int}, {}, "is of type String"),
        ({"id": int, "person": str}, {}, "have no column user"),
        ({"id": int, "user": str}, {"question": "total"}, "Did you mean 'totals'"),
        ({"id": int, "user": str}, {"question": "reach"}, "takes url by name"),
        ({"id": float, "user": str}, {}, "Cast it to a whole number or to text"),
        ({"id": int, "user": str}, {"id": "ident"}, "'ident'"),
        ({"id": int, "user": str}, {"to": "clicks"}, "writes to the topic 'clicks' and reads it"),
        ({"id": int, "user": str}, {"deadline": "soon"}, "'soon'"),
    ],
)
def test_requests_that_do_not_fit_are_refused_before_a_run(tmp_path, columns, options, says):
    with pytest.raises(ConfigError) as refused:
        declared(tmp_path, columns, **options).plan()
    assert says in str(refused.value)


def test_rows_that_may_be_taken_back_are_no_requests(tmp_path):
    app = ms.App("refusing", log=tmp_path)
    clicks = app.topic("clicks", {"user": str, "at": datetime}).stream(time="at")
    counted = clicks.window(ms.tumbling("1 minute"), by="user").emit("update").agg(n=ms.count())
    with pytest.raises(ConfigError, match="may be taken back or replaced"):
        counted.answer("totals", id="user", to="answers")


def test_a_request_that_is_too_slow_is_a_dead_letter_that_says_so(tmp_path):
    app = declared(tmp_path, {"id": int, "url": str}, "reach", deadline="1 microsecond")
    result = testing.run(app, {"clicks": [{"user": "ann"}], "requests": [{"id": 1, "url": "/"}]})
    assert result.topic("answers").is_empty()
    assert "was not answered within 1e-06 s" in result.dead["reason"].item()


def test_an_app_that_stops_on_errors_stops_at_a_request_without_an_answer(tmp_path):
    app = ms.App("stopping", log=tmp_path, on_error="stop")
    people = app.topic("people", {"user": str}, key="user").stream()
    people.group_by("user", name="totals").agg(n=ms.count()).view("of_users")
    app.topic("requests", {"id": int}).stream().answer("broken", id="id", to="answers")

    @app.question("broken")
    def broken(state):
        return 1 / 0

    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        testing.run(app, {"requests": [{"id": 1}]})


def test_a_journal_of_other_requests_stops_the_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "millstream.kernels.state.journal.MemoryJournal.read",
        lambda _self, _name: b'[["another", ["answered", "1"]]]',
    )
    with pytest.raises(CorruptionError, match="has other requests"):
        check_kit(tmp_path, 1, 1, 1, crash=0)
