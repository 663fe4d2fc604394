"""Enrichment: each row has the answer of its key, failures have their exit, and a repeated batch repeats."""

import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.enrichment import calls
from millstream.kernels.enrichment.calls import CallPolicy, LookupCallError, LookupCalls

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    id: int
    user: str | None
    price: float
    at: datetime


ROWS = [
    Event(
        n,
        None if n % 11 == 0 else f"u{n % 5}",
        [0.0, -0.0, 9.0][n % 3],
        START + timedelta(seconds=n),
    )
    for n in range(60)
]


def app_of(function, on="user", **options):
    app = ms.App("a", log="unused")
    stream = app.topic("events", Event, partitions=2).stream(time="at")
    # JSON has no NaN
    price = pl.when(pl.col("price") == 9).then(float("nan")).otherwise(pl.col("price"))
    found = stream.with_columns(price=price).enrich(
        function, on=on, schema={"c": pl.Int64}, **options
    )
    found.view("seen", key="id")
    found.to("out")
    return app


class Service:
    """Answers with the number of the call; does not know u3."""

    def __init__(self):
        self.calls = []

    def __call__(self, keys):
        self.calls.append(keys["user"].to_list())
        return keys.filter(pl.col("user") != "u3").with_columns(c=pl.lit(len(self.calls), pl.Int64))


def outputs(result):
    seen = result["seen"].select("id", "c").sort("id")
    return seen, result.topic("out").select("id", "c").sort("id").cast(seen.schema)


@pytest.mark.parametrize("cache", ["1 minute", None])
@pytest.mark.parametrize("seed", range(5))
def test_two_sinks_agree_after_crashes_though_each_call_answers_another_way(seed, cache):
    app = app_of(Service(), cache=cache, batch_rows=2)
    inputs = {"events": [*ROWS[:30], testing.Tick("2 minutes"), *ROWS[30:]]}
    result = testing.run(app, inputs, batches=5, crash=8, seed=seed)
    seen, out = outputs(result)
    assert seen.equals(out)
    assert seen.height == 60
    unknown = [row.id for row in ROWS if row.user in (None, "u3")]
    assert seen.filter(seen["c"].is_null())["id"].to_list() == unknown


def test_an_answer_is_used_until_it_expires_and_null_keys_are_not_asked():
    service = Service()
    app = app_of(service, cache="1 minute")
    parts = [
        *ROWS[:20],
        testing.Tick("59 seconds"),
        *ROWS[20:40],
        testing.Tick("1 second"),
        *ROWS[40:],
    ]
    testing.run(app, {"events": parts}, batches=3)
    asked = [key for call in service.calls for key in call]
    assert sorted(asked) == sorted(["u0", "u1", "u2", "u3", "u4"] * 2)


def test_equal_floats_are_one_key():
    asked = []

    def function(keys):
        asked.extend(keys["price"].to_list())
        return keys.with_columns(c=pl.lit(7, pl.Int64))

    seen = testing.run(app_of(function, on="price"), {"events": ROWS})["seen"]
    assert seen["c"].to_list() == [7] * 60
    assert len(asked) == 2


def failing(keys):
    if "u1" in keys["user"].to_list():
        raise ConnectionError("gone")
    return keys.with_columns(c=pl.lit(1, pl.Int64))


def test_what_fails_to_the_end_is_a_dead_letter_null_or_the_end():
    options = {"batch_rows": 1, "retries": 0}
    dead = testing.run(app_of(failing, **options), {"events": ROWS}, batches=3, crash=3)
    lost = [row.id for row in ROWS if row.user == "u1"]
    assert dead.dead["step"].unique().to_list() == ["enrich(user)"]
    assert dead.dead["reason"].unique().to_list() == ["ConnectionError: gone"]
    assert dead.dead.height == len(lost)
    assert not set(dead["seen"]["id"]) & set(lost)
    null = testing.run(app_of(failing, on_error="null", **options), {"events": ROWS})
    assert null["seen"].filter(pl.col("id").is_in(lost))["c"].null_count() == len(lost)
    with pytest.raises(UserCodeError, match=r"ConnectionError: gone.*on_error="):
        testing.run(app_of(failing, on_error="stop", **options), {"events": ROWS})


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda _keys: 3, "gave a int"),
        (lambda keys: keys, "gave the columns user"),
        (lambda keys: keys.with_columns(c=pl.lit("x")), "as String"),
        (
            lambda keys: pl.concat([keys, keys]).with_columns(c=pl.lit(1, pl.Int64)),
            "several answers",
        ),
        (
            lambda keys: keys.with_columns(user=pl.lit("?"), c=pl.lit(1, pl.Int64))[:1],
            "not asked for",
        ),
    ],
)
def test_answers_that_are_not_as_declared_stop_the_job(function, error):
    with pytest.raises(UserCodeError, match=error):
        testing.run(app_of(function), {"events": ROWS})


def test_a_call_is_repeated_after_growing_waits_and_a_slow_one_has_failed():
    waits, calls, over = [], [], threading.Event()

    def function(keys):
        calls.append(keys)
        over.wait(5)

    policy = CallPolicy(batch_rows=9, timeout_s=0.01, retries=3)
    asking = LookupCalls(function, policy, lambda _part, given: given, waits.append, lambda: 0.0)
    ((_, failed),) = asking.ask(pl.DataFrame({"user": ["a"]}))
    over.set()
    assert isinstance(failed.error, TimeoutError)
    assert (len(calls), failed.calls, waits) == (4, 4, [0.05, 0.1, 0.2])


def test_calls_that_never_end_do_not_become_more_and_more_threads(monkeypatch):
    monkeypatch.setattr(calls, "_HANGING_MAX", 2)
    monkeypatch.setattr(calls, "_HANGING", calls._HangingCalls())
    over, threads = threading.Event(), []

    def function(keys):
        threads.append(threading.current_thread())
        over.wait(5)
        return keys

    _, found = asked_of(function, keys=5, retries=0, timeout_s=0.01)
    assert len(threads) == 2
    assert "2 earlier calls did not answer in time" in str(found[2].error)
    over.set()
    for thread in threads:
        thread.join(5)
    _, found = asked_of(function)
    assert found[0].height == 1


def asked_of(function, keys=1, **options):
    """The waits, and what became of each key, asked one by one and one after the other."""
    waits = []
    given = {"timeout_s": 5.0, "retries": 2, **options}
    policy = CallPolicy(1, concurrency=1, **given)
    asking = LookupCalls(function, policy, lambda _part, given: given, waits.append, lambda: 0.0)
    done = asking.ask(pl.DataFrame({"user": [f"u{n}" for n in range(keys)]}))
    return waits, [answers for _, answers in done]


def raising(*errors):
    left = iter(errors)

    def function(_keys):
        raise next(left)

    return function


def test_a_service_that_says_when_to_come_back_is_not_asked_sooner():
    busy, long = (LookupCallError("busy", retry_after_s=after_s) for after_s in (7.0, 61.0))
    waits, (failed,) = asked_of(raising(busy, LookupCallError("busy"), busy))
    assert (waits, failed.calls) == ([7.0, 0.1], 3)
    waits, (failed,) = asked_of(raising(long))
    assert (waits, failed.calls) == ([], 1)
    waits, (failed,) = asked_of(raising(LookupCallError("no", retriable=False)))
    assert (waits, failed.calls) == ([], 1)


def test_a_service_that_is_down_does_not_hold_a_batch_for_all_its_keys():
    def down(_keys):
        raise ConnectionError("gone")

    waits, all_failed = asked_of(down, keys=50, failures_max=3)
    assert [failed.calls for failed in all_failed] == [3] * 3 + [0] * 47
    assert len(waits) == 6
    assert "gone" in str(all_failed[-1].error)
    _, all_failed = asked_of(down, keys=50, stops=True)
    assert [failed.calls for failed in all_failed] == [3] + [0] * 49


def test_keys_that_cannot_be_asked_and_failures_between_answers_do_not_stop_the_others():
    def refusing(keys):
        if keys["user"][0] != "u49":
            raise LookupCallError("no such path", retriable=False)
        return keys

    _, done = asked_of(refusing, keys=50, failures_max=3)
    assert [getattr(each, "calls", None) for each in done] == [1] * 49 + [None]

    def moody(keys):
        if int(keys["user"][0][1:]) % 3:
            raise ConnectionError("gone")
        return keys

    _, done = asked_of(moody, keys=50, failures_max=3, retries=0)
    assert [getattr(each, "calls", None) for each in done] == [
        1 if n % 3 else None for n in range(50)
    ]


def test_a_program_that_is_wrong_stops_the_job_at_once():
    asked = []

    def function(keys):
        asked.append(keys)
        raise UserCodeError("no such table")

    with pytest.raises(UserCodeError, match="no such table"):
        testing.run(app_of(function, batch_rows=1, concurrency=1), {"events": ROWS})
    assert len(asked) == 1


def test_what_cannot_be_enriched_is_refused():
    app = ms.App("a", log="unused")
    stream = app.topic("events", Event).stream(time="at")
    parts = stream.window(ms.tumbling("1 minute"), by="user").emit("discard").agg(n=ms.count())
    with pytest.raises(ConfigError, match="Enrich the events before the window"):
        parts.enrich(failing, on="user", schema={"c": pl.Int64})
    with pytest.raises(ConfigError, match="adds a column 'price'"):
        stream.enrich(failing, on="user", schema={"price": pl.Int64})
