"""Enrichment against a naive model of its published rule, however the input is cut and wherever it crashes.

The rule, from `stream.enrich`: a row gets the first answer that was given for its key, for as long as the cache
says; then the key is asked anew. A key that is not known gets nulls, which are kept like an answer. A key whose
calls fail gets what ``on_error`` says, and the next batch asks again. A key with a null is not asked.

The service of these tests says how often it has answered for a key. So an answer that was lost and asked for again
is another one, and shows.
"""

import threading
from collections import Counter
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.enrichment import calls

START = datetime(2026, 1, 1, tzinfo=UTC)
CACHE_S = 60
USERS = ["ok1", "ok2", "ok3", "no1", "no2", "flaky1", "flaky2", "bad1", None]


class Service:
    """Answers for a key with ``key#count``; knows no ``no…``, fails for ``flaky…`` every other time, for ``bad…`` always."""

    def __init__(self):
        self.answered, self.called, self._lock = Counter(), Counter(), threading.Lock()

    def __call__(self, keys):
        users = keys["user"].to_list()
        with self._lock:
            self.called.update(users)
            for user in users:
                if user.startswith("bad") or (user.startswith("flaky") and self.called[user] % 2):
                    raise ConnectionError(f"gone for {user}")
            self.answered.update(users)
            known = keys.filter(
                pl.Series([not user.startswith("no") for user in users], dtype=pl.Boolean)
            )
            return known.with_columns(
                answer=pl.Series(
                    [f"{u}#{self.answered[u]}" for u in known["user"]], dtype=pl.String
                )
            )


def model(sections, cache_s, on_error):
    """The answer of each row, by its id; and the ids of dead letters."""
    answers, dead, now_s, next_id = {}, set(), 0, 0
    asked = {}  # by key: when it was asked last, and how often
    for users, pause_s in sections:
        for user in users:
            row, next_id = next_id, next_id + 1
            if user is None:
                answers[row] = None
            elif user.startswith("bad"):
                if on_error == "dead-letter":
                    dead.add(row)
                else:
                    answers[row] = None
            else:
                since_s, count = asked.get(user, (None, 0))
                if since_s is None or now_s >= since_s + cache_s:
                    asked[user] = now_s, count + 1
                known = not user.startswith("no")
                answers[row] = f"{user}#{asked[user][1]}" if known else None
        now_s += pause_s
    return answers, dead


def app_of(service, on_error, cache, batch_rows):
    app = ms.App("a", log="unused", buckets=3)
    stream = app.topic("rows", {"user": str | None, "id": int}, key="user").stream()
    found = stream.enrich(
        service,
        on="user",
        schema={"answer": pl.String},
        cache=cache,
        batch_rows=batch_rows,
        concurrency=2,
        retries=1,
        on_error=on_error,
    )
    found.view("seen", key="id")
    found.to("out")
    return app


def items_of(sections):
    items, next_id = [], 0
    for users, pause_s in sections:
        for user in users:
            items.append({"user": user, "id": next_id})
            next_id += 1
        if pause_s:
            items.append(testing.Tick(f"{pause_s} seconds"))
    return items


def outputs(result):
    """What view, topic and dead letters have: answers by id twice, and ids."""
    seen = dict(result["seen"].select("id", "answer").rows()) if result["seen"].width else {}
    out = result.topic("out")
    told = dict(out.select("id", "answer").rows()) if out.width else {}
    assert len(told) == out.height
    return seen, told, result.dead.height


SECTIONS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(USERS), max_size=8), st.sampled_from([0, 1, 30, 59, 60, 200])
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(autouse=True, scope="module")
def _no_waits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_WAIT_S", 0.0)
        yield


@given(
    SECTIONS,
    st.sampled_from(["dead-letter", "null"]),
    st.sampled_from([1, 4, 7]),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=some(15))
def test_each_row_has_the_first_answer_for_its_key_within_the_time_of_the_cache(
    sections, on_error, partitions, batches, crash, seed
):
    service = Service()
    result = testing.run(
        app_of(service, on_error, f"{CACHE_S} seconds", batch_rows=1),
        {"rows": items_of(sections)},
        batches=batches,
        partitions=partitions,
        seed=seed,
        crash=crash,
    )
    answers, dead = model(sections, CACHE_S, on_error)
    assert outputs(result) == (answers, answers, len(dead))


@given(
    SECTIONS,
    st.sampled_from([1, 2, 1000]),
    st.sampled_from([1, 4, 7]),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=some(8))
def test_without_a_cache_the_outputs_agree_and_answers_are_those_that_were_given(
    sections, batch_rows, partitions, batches, crash, seed
):
    """Here batches show, as each asks anew: of a key's rows, in order, later ones have later answers."""
    service = Service()
    users = [
        [user for user in of if not (user or "").startswith(("bad", "flaky"))] for of, _ in sections
    ]
    sections = list(zip(users, [pause for _, pause in sections], strict=True))
    result = testing.run(
        app_of(service, "stop", None, batch_rows),
        {"rows": items_of(sections)},
        batches=batches,
        partitions=partitions,
        seed=seed,
        crash=crash,
    )
    seen, told, dead = outputs(result)
    assert (seen, dead) == (told, 0)
    of_user = {}
    for number, user in enumerate(user for of, _ in sections for user in of):
        if user is None or user.startswith("no"):
            assert seen[number] is None
        else:
            name, count = seen[number].split("#")
            assert name == user
            of_user.setdefault(user, []).append(int(count))
    for user, counts in of_user.items():
        assert counts == sorted(counts)
        assert set(counts) == set(
            range(1, service.answered[user] + 1)
        )  # none was given for nothing


def streams_of_changes():
    app = ms.App("a", log="unused")
    schema = {"user": str, "at": datetime, "n": int}
    topic = app.topic("events", schema)
    events = topic.stream(time="at")
    corrected = topic.stream(time="at", lateness="1 hour", late="correct")
    minute = ms.tumbling("1 minute")
    for mode in ("update", "retract", "discard"):
        yield events.window(minute, by="user").emit(mode).agg(n=ms.count())
    yield corrected.window(minute, by="user").agg(n=ms.count())
    others = app.topic("others", schema).stream(time="at")
    within = ("0 seconds", "1 minute")
    yield events.join(others, "user", within=within, how="left", emit="eager")
    updates = events.window(minute, by="user").emit("update").agg(n=ms.count())
    yield updates.filter(pl.col("n") > 1).with_columns(m=pl.col("n") + 1)


@pytest.mark.parametrize("number", range(6))
def test_a_row_is_taken_back_with_the_answer_that_it_came_with(number):
    """The service has another answer each time, so what is told and taken back must add up to what a view has."""
    changes = [*streams_of_changes()][number]
    if changes.shape.mode == "discard":
        with pytest.raises(ConfigError, match="whose rows are parts that add up"):
            changes.enrich(Service(), on="user", schema={"answer": pl.String})
        return
    found = changes.enrich(Service(), on="user", schema={"answer": pl.String}, cache=None)
    found.to("told", partitions=1)
    found.table(keep="all", unbounded=True).group_by("answer").agg(rows=ms.count()).view("answers")
    times = [START + timedelta(seconds=n * 7 % 300) for n in range(60)]
    rows = [{"user": f"ok{n % 3}", "at": at, "n": n} for n, at in enumerate(times)]
    inputs = dict.fromkeys(found.app.topics, rows)
    out = testing.run(found.app, inputs, batches=8, partitions=1, seed=number, crash=2)
    told, before = Counter(), Counter()
    for *row, sign in out.topic("told").select(*found.columns, "_diff").rows():
        told[tuple(row)] += sign
        before[sign] += 1
        assert told[tuple(row)] >= 0, "a row was taken back that was not there"
    assert before[-1] > 0
    answers = Counter()
    for row, count in told.items():
        answers[row[-1]] += count
    assert +answers == Counter(dict(out["answers"].select("answer", "rows").rows()))


def test_a_window_behind_an_enrichment_may_take_its_rows_back():
    """Its rows are events, each with its answer, so what is counted of them is corrected by the same answers."""
    app = ms.App("a", log="unused")
    stream = app.topic("rows", {"user": str, "at": datetime}, key="user", partitions=1)
    found = stream.stream(time="at").enrich(Service(), on="user", schema={"answer": pl.String})
    counts = found.window(ms.tumbling("1 minute"), by="answer").emit("retract").agg(n=ms.count())
    counts.view("counts")
    rows = [{"user": "ok1", "at": START} for _ in range(5)]
    found = testing.run(app, {"rows": rows}, batches=4, crash=2)["counts"]
    assert found.select("answer", "n").rows() == [("ok1#1", 5)]
