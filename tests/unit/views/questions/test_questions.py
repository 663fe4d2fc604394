"""Answers are the rows of keys as of the position that they state: compared with all records up to it."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.example_counts import some
from tests.question_model import (
    ADS,
    STEPS,
    USERS,
    Expected,
    answered_rows,
    draw_records,
    question_app,
    write_records,
)

import millstream as ms
from millstream.engine.local_run import LocalRun
from millstream.errors import (
    BrokerUnavailableError,
    ConfigError,
    CorruptionError,
    DeadlineError,
    RetriableError,
    UserCodeError,
)
from millstream.kernels.state_query import QueryTargets
from millstream.views.questions.key_rows import key_rows

LONG = "5 minutes"  # a machine may be slow
_VALUES = {"ad": [*ADS, 77], "user": [*USERS, "nobody"]}


def check_answers(app, records, partitions, dice):
    """Ask each step for some keys, and for all, and compare."""
    everything = app.ask("everything", names=[*STEPS], deadline=LONG)
    expected = Expected(records, everything.position, partitions)
    for name, columns in STEPS.items():
        rows = expected.rows(name)
        assert answered_rows(name, everything.value[name]) == rows, name
        keys = [{c: dice.choice(_VALUES[c]) for c in columns} for _ in range(dice.randint(1, 4))]
        answer = app.ask(name, keys, deadline=LONG)
        assert answer.position == everything.position
        of_keys = [row for row in rows if {c: row[c] for c in columns} in keys]
        assert answered_rows(name, answer.rows) == of_keys, (name, keys)


def run_asked(folder, seed, partitions, rows_per_batch, count=150):
    records = draw_records(seed, count, partitions)
    write_records(folder, records, partitions)
    app, dice = question_app(folder), random.Random(seed)
    checked = []

    def check(progress):
        if dice.random() < 0.5 or not progress.left:
            check_answers(app, records, partitions, dice)
            checked.append(progress.batch_id)

    run = LocalRun(app.plan(), folder, app.folder, app.state_store, rows_per_batch=rows_per_batch)
    run.run(on_batch=check)
    assert checked
    return app, records


@pytest.mark.parametrize(
    "partitions",
    [pytest.param(1, marks=pytest.mark.long), 4, pytest.param(7, marks=pytest.mark.long)],
)
def test_answers_are_those_of_the_stated_position(tmp_path, partitions):
    run_asked(tmp_path, partitions, partitions, 23)


@pytest.mark.long
@settings(max_examples=some(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    partitions=st.sampled_from([1, 4, 7]),
    rows_per_batch=st.integers(15, 90),
)
def test_answers_are_those_of_the_stated_position_however_batches_are_cut(
    tmp_path_factory, seed, partitions, rows_per_batch
):
    run_asked(tmp_path_factory.mktemp("asked"), seed, partitions, rows_per_batch)


def test_keys_that_are_looked_up_at_once_have_the_rows_that_each_has_alone(tmp_path):
    app, _ = run_asked(tmp_path, 9, 1, 60, count=120)
    dice, at_once = random.Random(9), []

    @app.question("each")
    def each(state, name):
        query, target = state._query, state._query.targets.find(name)
        drawn = {c: [dice.choice(_VALUES[c]) for _ in range(12)] for c in STEPS[name]}
        keys = key_rows(target, drawn)
        found = query.rows_of_each(target, keys)
        if found is None:
            return False
        for place, number in enumerate(found.asked):
            own = found.rows.filter(pl.Series([one == number for one in found.numbers]))
            alone = query.rows(target, keys[place : place + 1])
            assert own.columns == alone.columns, name
            assert sorted(map(repr, own.rows())) == sorted(map(repr, alone.rows())), (name, place)
        return True

    for name in STEPS:
        at_once += [name] if app.ask("each", name=name, deadline=LONG).value else []
    assert at_once == [*STEPS]


# ── what is refused ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    app, records = run_asked(tmp_path_factory.mktemp("refused"), 3, 2, 70)
    return app, records


@pytest.mark.parametrize(
    ("name", "keys", "key", "says"),
    [
        ("minuts", None, {"ad": 1}, "Did you mean 'minutes'"),
        ("minutes", None, {"user": "ann"}, "is asked by ad, and the question gives user"),
        ("updated", None, {"ad": 1}, "filters state.rows('updated')"),
        ("minutes", None, {"ad": "seven"}, "is of type Int64, and the question gives 'seven'"),
        ("minutes", None, {"ad": 1.5}, "is of type Int64, and the question gives 1.5"),
        ("visits", None, {"user": 7}, "is of type String, and the question gives 7"),
        ("minutes", None, {}, "gives no key"),
        ("minutes", [{"ad": 1}, {"user": 2}], {}, "do not have the same columns"),
        ("updated", ["ann"], {}, "is asked by ad, user"),
        ("updated", None, {"ad": [1, 2, 3], "user": ["ann", "bob"]}, "different lengths"),
        ("minutes", [1], {"ad": 1}, "keys twice"),
        ("everything", None, {"nams": []}, "takes the arguments names, and got nams"),
        ("counted", None, {"user": "ann"}, "'counter'"),
    ],
)
def test_a_question_that_does_not_fit_is_refused_with_what_is_allowed(asked, name, keys, key, says):
    app, _ = asked
    with pytest.raises(ConfigError) as refused:
        app.ask(name, keys, **key)
    assert says in str(refused.value)


def test_rows_of_an_outer_join_that_have_no_key_are_refused_as_they_are_not_held(asked):
    app, _ = asked
    with pytest.raises(ConfigError, match="a left join, was asked for a key that has a null"):
        app.ask("joined", user=[None, "ann"], deadline=LONG)


@pytest.mark.parametrize("wrong", [5, {"clicks": 5}, {"clicks": {"0": True}}, {"clicks": {"a": 1}}])
def test_a_position_that_is_none_is_refused(asked, wrong):
    app, _ = asked
    with pytest.raises(ConfigError, match="The position at_least is"):
        app.ask("minutes", ad=1, at_least=wrong)


def test_partitions_of_a_position_may_be_numbers_and_a_question_may_not_be_async(asked):
    app, _ = asked
    assert app.ask("minutes", ad=1, at_least={"clicks": {0: 1}}, deadline=LONG).position
    with pytest.raises(ConfigError, match="are of type int"):
        app.ask("minutes", 5)
    with pytest.raises(ConfigError, match="is an async function"):

        @app.question("later")
        async def later(state): ...


def test_keys_may_be_given_as_frames_columns_and_texts(asked):
    app, _ = asked
    rows = app.ask("updated", ad=[1, 2], user="ann").rows.sort("ad", "window_start")
    frame = pl.DataFrame({"user": ["ann"] * 2, "ad": pl.Series([1, 2], dtype=pl.Int8), "x": [0, 0]})
    assert app.ask("updated", frame.drop("x")).rows.sort("ad", "window_start").equals(rows)
    assert app.ask("updated", ad=["1", "2"], user="ann").rows.height == rows.height
    assert app.ask("minutes", [1, 1, 1]).rows.equals(app.ask("minutes", ad=1).rows)
    assert app.ask("minutes", pl.Series([], dtype=pl.Int64)).rows.is_empty()


def test_before_the_first_batch_there_is_no_state_to_ask(tmp_path):
    app = question_app(tmp_path)
    with pytest.raises(ConfigError, match="has not committed a batch yet"):
        app.ask("minutes", ad=1)


def test_an_app_that_is_declared_otherwise_than_it_ran_is_refused(asked):
    app, _ = asked
    edited = question_app(app.log)
    edited.outputs.clear()
    other = edited.topics["clicks"].stream(time="at").window(ms.tumbling("2 minutes"), by="ad")
    other.agg(n=ms.count()).view("minutes")
    with pytest.raises(ConfigError, match="is not declared as it ran"):
        edited.ask("minutes", ad=1)


def test_a_position_that_is_not_reached_in_time_is_said(asked):
    app, _ = asked
    position = app.ask("minutes", ad=1, at_least={"clicks": {"0": 1}}).position
    wanted = {"clicks": {"0": position["clicks"]["0"] + 1}}
    with pytest.raises(DeadlineError, match=r"is at \{.*and it does not run here"):
        app.ask("minutes", ad=1, at_least=wanted, deadline="3 seconds")


def target_with_key(folder, **columns):
    """Return a step, declared and compiled, that is asked by columns of these types."""
    app = ms.App("typed", log=folder)
    numbers = app.topic("numbers", {"number": int}).stream()
    typed = numbers.with_columns(
        **{k: pl.col("number").cast(dtype) for k, dtype in columns.items()}
    )
    typed.group_by(*columns, name="s").agg(n=ms.count()).view("v")
    return QueryTargets(app.plan()).find("s")


@pytest.mark.parametrize(
    ("dtype", "key", "says"),
    [
        (pl.Int64, 7.5, "are of type Float64"),
        (pl.Int64, 7.0, "are of type Float64"),
        (pl.Int8, 300, "300"),
        (pl.Float64, 2**53 + 1, "would be rounded"),
        (pl.Decimal(10, 2), Decimal("7.555"), "7.555"),
        (pl.Datetime("ms", "UTC"), datetime(2026, 1, 1, 0, 0, 0, 1, UTC), "would be rounded"),
        (pl.Boolean, 1, "are of type Int64"),
    ],
)
def test_a_key_that_is_no_value_of_its_column_is_refused_and_not_rounded(
    tmp_path, dtype, key, says
):
    target = target_with_key(tmp_path, k=dtype)
    with pytest.raises(ConfigError, match="The column 'k' of 's' is of type") as refused:
        key_rows(target, {"k": [key]})
    assert says in str(refused.value)


def test_numbers_that_another_type_has_exactly_are_keys(tmp_path):
    target = target_with_key(
        tmp_path, f=pl.Float64, d=pl.Decimal(10, 2), t=pl.Datetime("ms", "UTC")
    )
    at = datetime(2026, 1, 1, tzinfo=UTC)
    keys = key_rows(target, {"f": [2**53, None], "d": [7, None], "t": [at, None]})
    assert keys.rows() == [(float(2**53), Decimal("7.00"), at), (None, None, None)]


def test_a_topic_of_a_position_that_is_not_read_and_a_deadline_that_is_too_long_are_refused(asked):
    app, _ = asked
    with pytest.raises(ConfigError, match=r"'click', which asked does not read.*Did you mean 'cli"):
        app.ask("minutes", ad=1, at_least={"click": {"0": 1}}, deadline=LONG)
    partitions = len(app.ask("minutes", ad=1).position["clicks"])
    with pytest.raises(
        ConfigError, match=rf"partition '{partitions}' of the topic 'clicks', which"
    ):
        app.ask("minutes", ad=1, at_least={"clicks": {partitions: 0}}, deadline=LONG)
    with pytest.raises(ConfigError, match="The deadline is 3 days, and may be 1 hour at most"):
        app.ask("minutes", ad=1, deadline="3 days")


def test_a_partition_that_has_no_records_yet_is_waited_for_and_one_that_is_not_there_is_refused(
    tmp_path, monkeypatch
):
    with ms.connect(tmp_path) as log, log.producer() as producer:
        log.create_topic("clicks", partitions=2)
        producer.send("clicks", {"user": "ann"}, partition=0)
    app = ms.App("counting", log=tmp_path)
    clicks = app.topic("clicks", {"user": str}).stream()
    clicks.group_by("user", name="totals").agg(n=ms.count()).view("of_users")
    app.run(engine="local", until="caught-up")

    def ask(partition, deadline="1 second"):
        app.ask("totals", user="ann", at_least={"clicks": {partition: 1}}, deadline=deadline)

    with pytest.raises(DeadlineError):
        ask(1)
    with pytest.raises(ConfigError, match=r"has 2: 0 to 1\. Correct it"):
        ask(2, LONG)

    def away(_log):
        raise BrokerUnavailableError

    monkeypatch.setattr("millstream.pipeline.questions.open_reader", away)
    with pytest.raises(DeadlineError):  # nobody can say whether it is there
        ask(2)
    app.close_questions()


def test_questions_that_wait_for_a_position_leave_room_for_others(asked):
    app, _ = asked
    far = {"clicks": {"0": 10**9}}
    with ThreadPoolExecutor(20) as pool:
        waiting = [
            pool.submit(app.ask, "minutes", ad=1, at_least=far, deadline="20 seconds")
            for _ in range(20)
        ]
        while len(app._answers()._waits._waiting) < 20:
            assert not any(one.done() for one in waiting)
        assert app.ask("minutes", ad=1, deadline=LONG).batch_id >= 0
        assert not any(one.done() for one in waiting), "they still wait"
        app.close_questions()
        for one in waiting:
            with pytest.raises(RetriableError, match="were closed before this one was answered"):
                one.result()


def test_a_function_that_never_returns_does_not_keep_questions_open(asked, monkeypatch, caplog):
    app, _ = asked
    monkeypatch.setattr("millstream.views.questions.service._CLOSE_S", 0.2)
    entered, go_on = threading.Event(), threading.Event()

    def endless(state):
        entered.set()
        go_on.wait()
        return state.rows("minutes", ad=1).height

    monkeypatch.setitem(app.questions, "endless", endless)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(app.ask, "endless", deadline=LONG)
        assert entered.wait(60)
        service = app._answers()
        app.close_questions()
        assert "a function that was asked has not returned within" in caplog.text
        assert service._store is not None, "the function may still read"
        go_on.set()
        assert answer.result().value >= 0
    service._threads.close()
    assert service._store is None
    assert app.ask("minutes", ad=1, deadline=LONG).batch_id >= 0


def test_a_function_that_fails_or_takes_too_long_is_said(asked):
    app, _ = asked
    app.questions.pop("failing", None)
    app.questions.pop("slow", None)
    entered = []

    @app.question("failing")
    def failing(state):
        raise KeyError("nothing there")

    @app.question("slow")
    def slow(state):
        entered.append(state.batch_id)
        while True:
            state.rows("minutes", ad=1)

    with pytest.raises(UserCodeError, match="'failing' failed: KeyError: 'nothing there'"):
        app.ask("failing")
    with pytest.raises(DeadlineError, match=r"within 0.3 s"):
        app.ask("slow", deadline="300 milliseconds")
    assert entered


def test_a_run_that_is_missing_though_nothing_was_committed_is_damage(tmp_path):
    app, _ = run_asked(tmp_path, 5, 1, 60)
    fresh = question_app(tmp_path)
    for file in (app.folder / "runs").iterdir():
        file.unlink()
    with pytest.raises(CorruptionError, match="the state needs"):
        fresh.ask("minutes", ad=[*ADS])
    with pytest.raises(CorruptionError, match="the state needs"):
        fresh.ask("everything", names=[*STEPS])
