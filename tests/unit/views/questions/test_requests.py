"""Each request has one answer, as of the position that it states, or is one dead letter, however often a batch is repeated."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.example_counts import some
from tests.request_model import (
    POINTS,
    USERS,
    check_kit,
    check_log,
    draw,
    request_app,
    send,
)

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, CorruptionError, UserCodeError
from millstream.ops.deploy import deploy
from millstream.testing.disk import SimulatedCrash
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import open_state_store

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(("partitions", "batches"), [(1, 5), (4, 3), (7, 1)])
def test_each_request_is_answered_once_as_of_the_position_that_its_answer_states(
    tmp_path, partitions, batches
):
    check_kit(tmp_path, partitions, partitions, batches, crash=3)


@pytest.mark.long
@settings(max_examples=some(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
    command = [sys.executable, "-m", "tests.request_model", "local", str(tmp_path), point, "1"]
    died = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert died.returncode == -9, died.stderr
    app = request_app(tmp_path)
    app.run(engine="local", until="caught-up", rows_per_batch=20)
    check_log(app, tmp_path, drawn, 2)
    assert not [*(tmp_path / "apps" / "answering" / "runs" / "journal").glob("*")]


def check_interrupted(app, folder, monkeypatch):
    """Interrupt a run where the topics have the answers, and the state store does not; run again, and compare."""
    drawn = draw(6, 50, 30, 2)
    send(folder, drawn, 2)
    with monkeypatch.context() as patched:
        committed = StateStore.commit

        def commit(store, fence, *args, **options):
            if fence.batch_id == 2:
                raise SimulatedCrash
            return committed(store, fence, *args, **options)

        patched.setattr(StateStore, "commit", commit)
        with pytest.raises(SimulatedCrash):
            app.run(engine="local", until="caught-up", rows_per_batch=10)
    app.run(engine="local", until="caught-up", rows_per_batch=20)
    check_log(app, folder, drawn, 2)


def test_requests_are_answered_once_where_the_state_store_is_postgresql(
    tmp_path, database, monkeypatch
):
    check_interrupted(request_app(tmp_path, store=database), tmp_path, monkeypatch)


@pytest.mark.usefixtures("s3")
def test_state_in_an_object_store_answers_requests_and_is_asked(tmp_path, s3_url, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    app = request_app(tmp_path, state=s3_url)
    check_interrupted(app, tmp_path, monkeypatch)
    asking = request_app(tmp_path, state=s3_url)
    answer = asking.ask("totals", user=USERS, deadline="5 minutes")
    with ms.view("of_users", log=tmp_path) as view:
        assert answer.rows.sort("user").equals(view.scan().sort("user")[answer.rows.columns])
    assert asking.ask("spent", users=USERS, deadline="5 minutes").value == answer.rows["cost"].sum()
    asking.close_questions()


def deployed(log, within, calls):
    app = ms.App("answering", log=log)
    clicks = app.topic("clicks", {"user": str}, key="user").stream()
    clicks.group_by("user", name="totals").agg(n=ms.count()).view("of_users")
    requests = app.topic("requests", {"id": int, "user": str, "at": datetime}, key="id").stream(
        time="at"
    )
    once = requests.dedup("id", within=within)
    once.answer("clicks_of", id="id", to="answers", partitions=1)
    once.group_by("user", name="asking").agg(n=ms.count()).view("of_requests")

    @app.question("clicks_of")
    def clicks_of(state, user):
        calls.append(user)
        return int(state.rows("totals", user=user)["n"].sum())

    return app


def test_a_deployment_computes_steps_above_the_answers_anew_and_answers_nothing_again(tmp_path):
    calls, at = [], "2026-01-01T00:00:00Z"
    with ms.connect(tmp_path) as log, log.producer() as producer:
        for topic in ("clicks", "requests"):
            log.create_topic(topic)
        producer.send("clicks", {"user": "ann"})
        for number in (1, 2, 1):
            producer.send("requests", {"id": number, "user": "ann", "at": at})
    deployed(tmp_path, "5 minutes", calls).run(engine="local", until="caught-up")
    assert calls == ["ann"] * 2
    edited = deployed(tmp_path, "1 hour", calls)
    assert deploy(edited).switched
    assert calls == ["ann"] * 2
    with ms.connect(tmp_path) as log, log.producer() as producer:
        producer.send("requests", {"id": 3, "user": "ann", "at": at})
    edited.run(engine="local", until="caught-up")
    with ms.connect(tmp_path) as log:
        found = [json.loads(value) for value in log.read("answers", 0)["value"].to_pylist()]
    assert [(one["request"], one["answer"]) for one in found] == [(1, 1), (2, 1), (3, 1)]


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
        ({"id": int, "user": str}, {"deadline": "2 days"}, "1 hour at most"),
        ({"id": int, "user": str}, {"deadline": "0 seconds"}, "Give a longer one"),
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


def test_one_request_that_fails_leaves_the_answers_to_those_beside_it(tmp_path):
    app = ms.App("beside", log=tmp_path, dead_max=1)
    people = app.topic("people", {"user": str}, key="user").stream()
    sums = people.group_by("user", name="totals").agg(n=ms.count())
    sums.with_columns(code=pl.col("user").str.to_integer(strict=True)).view("coded")
    requests = app.topic("requests", {"id": int, "user": str}).stream()
    requests.answer("coded", id="id", to="answers", deadline="5 minutes")
    users = ["1", "no code", "3", "nobody", "1"]
    inputs = {
        "people": [{"user": user} for user in ("1", "3", "no code", "1")],
        "requests": [{"id": number, "user": user} for number, user in enumerate(users)],
    }
    result = testing.run(app, inputs)
    answers = {
        one["request"]: one["answer"] for one in map(json.loads, result.topic("answers")["value"])
    }
    one, three = {"user": "1", "n": 2, "code": 1}, {"user": "3", "n": 1, "code": 3}
    assert answers == {0: [one], 2: [three], 3: [], 4: [one]}
    letter = result.dead.filter(step="answer(coded)")
    assert json.loads(letter["value"].item())["id"] == 1
    assert "on the way to 'coded', fails on a row of the answer" in letter["reason"].item()


def test_requests_for_a_null_and_for_what_has_no_key_are_answered(tmp_path):
    app = ms.App("nulls", log=tmp_path)
    people = app.topic("people", {"id": int, "user": str | None}, key="id").stream()
    people.group_by("user", name="totals").agg(n=ms.count()).view("of_users")
    people.top(1, by="id", rank="rank").view("last", key="rank")
    requests = app.topic("requests", {"id": int, "user": str | None}).stream()
    requests.answer("totals", id="id", to="totals-answers", deadline="5 minutes")
    requests.answer("last", id="id", to="last-answers", deadline="5 minutes")
    users = [None, "ann", "nobody", None]
    inputs = {
        "people": [{"id": 1, "user": None}, {"id": 2, "user": "ann"}, {"id": 3, "user": None}],
        "requests": [{"id": number, "user": user} for number, user in enumerate(users)],
    }
    result = testing.run(app, inputs, partitions=1, batches=3, crash=1)
    for topic in ("totals-answers", "last-answers"):
        records = [json.loads(value) for value in result.topic(topic)["value"]]
        assert sorted(one["request"] for one in records) == [0, 1, 2, 3]
        for one in records:
            read = one["position"].get("people", {}).get("0", 0)
            seen = list(inputs["people"][:read])
            if topic == "last-answers":
                expected = [{**seen[-1], "rank": 1}] if seen else []
            else:
                own = [row for row in seen if row["user"] == users[one["request"]]]
                expected = [{"user": users[one["request"]], "n": len(own)}] if own else []
            assert one["answer"] == expected
    assert result.dead.is_empty()


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


def test_whoever_interrupts_a_job_in_a_function_stops_it_and_the_next_run_answers(tmp_path):
    app = declared(tmp_path, {"id": int}, "interrupted", partitions=1)
    interrupting = [True]

    @app.question("interrupted")
    def interrupted(state):
        if interrupting.pop():
            raise KeyboardInterrupt
        return 7

    with ms.connect(tmp_path) as log, log.producer() as producer:
        for topic in ("clicks", "requests"):
            log.create_topic(topic)
        producer.send("clicks", {"user": "ann"})
        producer.send("requests", {"id": 1})
    app.run(engine="local", until="caught-up")
    interrupting.append(False)
    app.run(engine="local", until="caught-up")
    with ms.connect(tmp_path) as log:
        found = [json.loads(value) for value in log.read("answers", 0)["value"].to_pylist()]
    assert [one["answer"] for one in found] == [7]


def test_a_journal_of_other_requests_stops_the_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "millstream.kernels.state.journal.MemoryJournal.read",
        lambda _self, _name: b'[["another", ["answered", "1"]]]',
    )
    with pytest.raises(CorruptionError, match="has other requests"):
        check_kit(tmp_path, 1, 1, 1, crash=0)


def test_an_answer_larger_than_its_topic_allows_is_a_dead_letter_and_the_largest_allowed_is_none(
    tmp_path,
):
    app = declared(tmp_path, {"id": int, "size": int}, "letters")

    @app.question("letters")
    def letters(state, size):
        return "ä" * size

    def answers():
        with ms.connect(tmp_path) as log:
            return [bytes(value) for value in log.read("answers", 0)["value"].to_pylist()]

    def ask(*sizes):
        with ms.connect(tmp_path) as log, log.producer() as producer:
            for size in sizes:
                producer.send("requests", {"id": 7, "size": size})
        app.run(engine="local", until="caught-up")

    with ms.connect(tmp_path) as log:
        for topic in ("clicks", "requests"):
            log.create_topic(topic)
        log.create_topic("answers", settings={"max.message.bytes": "2000"})
    ask(0)
    left = 2000 - 128 - len("7") - len(answers()[0])
    ask(left // 2, left // 2 + 1, 1)
    assert [len(json.loads(value)["answer"]) for value in answers()] == [0, left // 2, 1]
    with open_state_store(app.state_store, readonly=True) as store:
        dead = store.scan("dead_letters")
    assert json.loads(dead["value"].item())["size"] == left // 2 + 1
    assert "and its topic takes 1,872" in dead["reason"].item()


def test_the_reason_of_a_dead_letter_is_cut_however_much_an_error_says(tmp_path):
    app = declared(tmp_path, {"id": int}, "talks")

    @app.question("talks")
    def talks(state):
        raise ValueError("much" * 100_000)

    result = testing.run(app, {"clicks": [{"user": "ann"}], "requests": [{"id": 1}]})
    reason = result.dead["reason"].item()
    assert len(reason) < 1_200
    assert reason.endswith("…. Correct its function, or ask for something else.")


# ── what functions do, and programs that are edited ─────────────────────────────────────────────


class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError


class UnreadableDict(dict):
    def items(self):
        raise KeyError


def half_of_a_pair(state):
    raise ValueError("\udcff")


def unreadable(state):
    raise Unreadable


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda _: "\udcff", "cannot be said in JSON"),
        (lambda _: UnreadableDict(a=1), "cannot be said in JSON"),
        (
            lambda _: pl.DataFrame({"at": [pl.Series([10**18]).cast(pl.Datetime("us"))]}),
            "cannot be said in JSON",
        ),
        (half_of_a_pair, r"ValueError: \udcff"),
        (unreadable, "Unreadable: its message cannot be read"),
    ],
)
def test_what_cannot_be_told_is_a_dead_letter_and_stops_no_job(tmp_path, function, says):
    app = declared(tmp_path, {"id": int}, "told")
    app.question("told")(function)
    result = testing.run(app, {"clicks": [{"user": "ann"}], "requests": [{"id": 1}]})
    assert says in result.dead["reason"].item()


def test_a_request_whose_time_python_cannot_hold_is_a_dead_letter_beside_the_others(tmp_path):
    app = ms.App("times", log=tmp_path, dead_max=1)
    people = app.topic("people", {"user": str}, key="user").stream()
    people.group_by("user", name="totals").agg(n=ms.count()).view("of_users")
    requests = app.topic("requests", {"id": int, "us": int}).stream()
    at = requests.with_columns(at=pl.col("us").cast(pl.Datetime("us")))
    at.answer("year", id="id", to="answers")
    at.answer("totals-of-nobody", id="at", to="by-time")

    @app.question("year")
    def year(state, at):
        return at.year

    @app.question("totals-of-nobody")
    def of_nobody(state):
        return 0

    asked = [{"id": 1, "us": 0}, {"id": 2, "us": 10**18}]
    result = testing.run(app, {"people": [{"user": "ann"}], "requests": asked})
    for topic in ("answers", "by-time"):
        assert len(result.topic(topic)) == 1
    assert [*result.dead["reason"].str.contains("from the year 1 to 9999")] == [True, True]


def test_a_function_that_changes_the_position_that_it_is_given_changes_no_answer(tmp_path):
    app = declared(tmp_path, {"id": int}, "changing")

    @app.question("changing")
    def changing(state):
        state.position.setdefault("clicks", {})["0"] = 1000
        return 1

    inputs = {"clicks": [{"user": "ann"}] * 3, "requests": [{"id": 1}, {"id": 2}]}
    result = testing.run(app, inputs, partitions=1, batches=3)
    for one in map(json.loads, result.topic("answers")["value"]):
        assert one["position"].get("clicks", {}).get("0", 0) <= 3


def test_a_parameter_that_is_taken_by_place_alone_keeps_its_default(tmp_path):
    app = declared(tmp_path, {"id": int, "factor": int}, "scaled")

    @app.question("scaled")
    def scaled(state, factor=5, /):
        return factor

    requests = [{"id": 1, "factor": 7}]
    result = testing.run(app, {"clicks": [{"user": "ann"}], "requests": requests})
    assert json.loads(result.topic("answers")["value"].item())["answer"] == 5


def edited(log, ids_from, calls):
    app = ms.App("edited", log=log)
    clicks = app.topic("clicks", {"user": str}, key="user").stream()
    clicks.group_by("user", name="totals").agg(n=ms.count()).view("of_users")
    requests = app.topic("requests", {"id": int}).stream().filter(pl.col("id") >= ids_from)
    requests.answer("number", id="id", to="answers", partitions=1)

    @app.question("number")
    def number(state, id):  # noqa: A002 - a column of this name
        calls.append(id)
        return len(calls)

    return app


def test_a_program_that_is_edited_after_a_crash_answers_what_its_requests_are(
    tmp_path, monkeypatch
):
    """The crash leaves a journal of the program before; what both have asked keeps its outcome."""
    with ms.connect(tmp_path) as log, log.producer() as producer:
        for topic in ("clicks", "requests"):
            log.create_topic(topic)
        producer.send("clicks", {"user": "ann"})
        for number in range(4):
            producer.send("requests", {"id": number})
    calls = []

    def crash(*_, **__):
        raise SimulatedCrash

    for ids_from in (2, 1):
        with monkeypatch.context() as patched:
            patched.setattr("millstream.views.sinks.topics.TopicsSink.commit", crash)
            with pytest.raises(SimulatedCrash):
                edited(tmp_path, ids_from, calls).run(engine="local", until="caught-up")
    edited(tmp_path, 1, calls).run(engine="local", until="caught-up")
    assert calls == [2, 3, 1]
    with ms.connect(tmp_path) as log:
        found = [json.loads(value) for value in log.read("answers", 0)["value"].to_pylist()]
    assert {one["request"]: one["answer"] for one in found} == {1: 3, 2: 1, 3: 2}
    assert not [*(tmp_path / "apps" / "edited" / "runs" / "journal").glob("*")]
