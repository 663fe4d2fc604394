"""The first rows of groups, against a recomputation of everything after each batch."""

import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from bag_model import RUNS, as_rows, bags, histories, last_batch, top, without_times
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError

START = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = {"id": str, "g": str | None, "v": int | None}
TIES = ["row_number", "rank", "dense_rank"]
# 0 is not a number, 1 is -0.0 and 2 is 0.0, which are equal.
FLOAT = (
    pl.when(pl.col("v") == 0)
    .then(float("nan"))
    .when(pl.col("v") == 1)
    .then(-0.0)
    .when(pl.col("v") == 2)
    .then(0.0)
    .otherwise(pl.col("v").cast(pl.Float64))
)


def new_app():
    return ms.App("top", log="unused", buckets=2)


CHOICES = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "ties": st.sampled_from(TIES),
        "directions": st.tuples(*[st.sampled_from(["asc", "desc"])] * 2),
        "per": st.sampled_from([(), ("g",)]),
    }
)


@settings(max_examples=some(20))
@given(rows=histories(), run=RUNS, choices=CHOICES, bag=st.booleans())
def test_after_each_batch_the_first_rows_are_what_sql_gives_over_all(
    rows_given, rows, run, choices, bag
):
    app = new_app()
    table = app.table("t", SCHEMA, key="id").with_columns(x=FLOAT)
    columns = ["id", "g", "v", "x"]
    if bag:  # rows may be equal, and there is no key
        columns = ["g", "v", "x"]
        table = table.select(*columns)
    of_x, of_v = choices["directions"]
    table.to("rows")
    asked = {"by": [("x", of_x), ("v", of_v)], "per": choices["per"], "ties": choices["ties"]}
    table.top(choices["n"], **asked, rank="place").to("ranked")
    table.top(choices["n"], **asked).to("plain")
    out = rows_given(app, {"t": rows}, **run)
    count = last_batch(out)
    there = bags(out.rows["to(rows)"], columns, count)
    ranked = bags(out.rows["to(ranked)"], [*columns, "place"], count)
    plain = bags(out.rows["to(plain)"], columns, count)
    places = {name: place for place, name in enumerate(columns)}
    order = [(places["x"], of_x == "desc"), (places["v"], of_v == "desc")]
    tie_break = [places["g"], places["v"]] if bag else [places["id"]]
    per = [places[name] for name in choices["per"]]
    for all_rows, first, unranked in zip(there, ranked, plain, strict=True):
        expected = top(as_rows(all_rows), per, order, tie_break, choices["n"], choices["ties"])
        assert first == Counter({((*row, r), t): n for (row, t, r), n in expected.items()})
        assert unranked == sum_of(((row, t), n) for (row, t, _), n in expected.items())


def sum_of(pairs):
    found = Counter()
    for key, n in pairs:
        found[key] += n
    return found


@dataclass
class Event:
    at: datetime
    g: str
    v: int | None
    w: int


def stream_of(app):
    return app.topic("events", Event, key="g").stream(time="at")


def events(values):
    return [Event(START + timedelta(seconds=s), g, v, w) for s, g, v, w in values]


VALUES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from("ab"),
        st.sampled_from([None, 0, 1, 2]),
        st.integers(0, 2),
    ),
    max_size=30,
)


@settings(max_examples=some(20))
@given(values=VALUES, run=RUNS, choices=CHOICES)
def test_a_stream_keeps_the_first_of_all_rows_that_came(rows_given, values, run, choices):
    app = new_app()
    stream = stream_of(app)
    of_v, _ = choices["directions"]
    asked = {"by": [("v", of_v)], "per": choices["per"], "ties": choices["ties"]}
    stream.select("g", "v", "w").to("rows")
    stream.select("g", "v", "w").top(choices["n"], **asked, rank="place").to("ranked")
    out = rows_given(app, {"events": events(values)}, **run)
    count = last_batch(out)
    there = Counter()
    came = bags(out.rows["to(rows)"], ["g", "v", "w"], count)
    ranked = bags(out.rows["to(ranked)"], ["g", "v", "w", "place"], count)
    per = [0] if choices["per"] else []
    for there, first in zip(came, ranked, strict=True):
        expected = top(
            as_rows(there), per, [(1, of_v == "desc")], [0, 1, 2], choices["n"], choices["ties"]
        )
        assert first == Counter({((*row, r), t): n for (row, t, r), n in expected.items()})


def rows_in_state(engine):
    found = 0
    for state in engine.states.values():
        for operator in json.loads(state.manifest()).values():
            found += sum(entry[2] for runs in operator["runs"].values() for entry in runs)
    return found


@pytest.mark.parametrize("ties", TIES)
def test_of_a_stream_only_rows_are_kept_that_can_still_be_among_the_first(rows_given, ties):
    app = new_app()
    stream_of(app).top(3, by="v", per="g", ties=ties).to("top")
    # Always a better one, so that each row is among the first for a while.
    rows = events([(n, "ab"[n % 2], n, n) for n in range(400)])
    out = rows_given(app, {"events": rows}, batches=60)
    assert bags(out.rows["to(top)"], ["g", "v"], last_batch(out))[-1].total() == 6
    assert rows_in_state(out.engine) < 60


def test_a_row_that_stays_with_its_rank_is_not_emitted_again(rows_given):
    app = new_app()
    table = app.table("t", SCHEMA, key="id")
    table.top(3, by="v", rank="place").to("top")
    rows = []
    for key, v in [("a", 9), ("b", 7), ("c", 5), ("d", 1), ("e", 6)]:
        value = json.dumps({"id": key, "g": None, "v": v}).encode()
        rows += [testing.Row(value, key=key), testing.Tick(after="1 second")]
    out = rows_given(app, {"t": rows}).rows["to(top)"]
    assert out.select("id", "place", "__diff").rows() == [
        ("a", 1, 1),
        ("b", 2, 1),
        ("c", 3, 1),
        ("c", 3, -1),
        ("e", 3, 1),
    ]


def test_the_views_of_first_rows_do_not_depend_on_batches_partitions_or_crashes():
    app = new_app()
    table = app.table("t", SCHEMA, key="id").with_columns(x=FLOAT)
    for ties in TIES:
        table.top(2, by="x", per="g", ties=ties, rank="place").view(ties)
    stream = stream_of(app)
    stream.top(2, by=("w", "asc"), per="v", rank="place").view("stream")
    only = stream.top(1, by="w", per="v")
    assert only.primary_key == ("v",)  # no rank is needed to tell the one row of a group
    only.view("only")
    rows = [
        testing.Row(
            json.dumps({"id": str(n % 7), "g": "ab"[n % 2], "v": n * n % 5}).encode(),
            key=str(n % 7),
        )
        for n in range(40)
    ]
    came = events([(n, "ab"[n % 2], n % 3, n * n % 11) for n in range(40)])
    out = testing.replay(app, {"t": rows, "events": came}, batchings=4, crash=2)
    assert out["stream"].height == 6
    greatest = {v: max(n * n % 11 for n in range(40) if n % 3 == v) for v in range(3)}
    assert dict(out["only"].select("v", "w").iter_rows()) == greatest


def test_what_has_no_order_is_refused_where_it_is_declared():
    app = new_app()
    table = app.table("t", SCHEMA, key="id")
    nested = table.with_columns(l=pl.concat_list("v"))
    refused = {
        "top's n is 0": lambda: table.top(0, by="v"),
        "top's by is": lambda: table.top(1, by=[]),
        "names 'h'": lambda: table.top(1, by="h"),
        "direction of 'v'": lambda: table.top(1, by=[("v", "down")]),
        "twice": lambda: table.top(1, by=["v", "v"]),
        "cannot be a key": lambda: nested.top(1, by="l"),
        "top's ties": lambda: table.top(1, by="v", ties="first"),
        "top's rank is 'v'": lambda: table.top(1, by="v", rank="v"),
        "top's rank is '__r'": lambda: table.top(1, by="v", rank="__r"),
    }
    for message, declare in refused.items():
        with pytest.raises(ms.ConfigError, match=message):
            declare()


# ── published cases ─────────────────────────────────────────────────────────────────────────

FOLLOW = {"id": str, "user": str, "followed": str}
POST = {"id": str, "author": str, "ts": int}
# Follows and posts of each step, and what of ann's timeline comes, goes, and is at its head after it.
K1 = [
    ([], [("p1", "bob", 10)], [], [], []),
    ([("f1", "ann", "bob")], [], ["p1"], [], ["p1"]),
    ([], [("p2", "bob", 20)], ["p2"], [], ["p2", "p1"]),
    ([("f1", None, None)], [("p3", "bob", 30)], [], ["p1", "p2"], []),
    (
        [("f1", "ann", "bob"), ("f2", "ann", "cat")],
        [("q1", "cat", 15)],
        ["p1", "p2", "p3", "q1"],
        [],
        ["p3", "p2"],
    ),
    ([], [("p2", None, None)], [], ["p2"], ["p3", "q1"]),
    ([("f1", "ann", "bob")], [], [], [], ["p3", "q1"]),
    ([("f1", "ann", "dan")], [], [], ["p1", "p3"], ["q1"]),
]


def test_case_k1_the_timeline_and_its_newest_two_after_each_step(rows_given):
    app = new_app()
    follows = app.table("follows", FOLLOW, key="id")
    posts = app.table("posts", POST, key="id").rename({"id": "post"})
    timeline = follows.join(posts, on={"followed": "author"})
    timeline.to("timeline")
    timeline.top(2, by="ts", per="user", rank="place").to("newest")
    given_follows, given_posts = [], []
    for step_follows, step_posts, *_ in K1:
        given_follows += [record(f, ["id", "user", "followed"]) for f in step_follows]
        given_posts += [record(p, ["id", "author", "ts"]) for p in step_posts]
        given_follows.append(testing.Tick(after="1 second"))
        given_posts.append(testing.Tick(after="1 second"))
    out = rows_given(app, {"follows": given_follows, "posts": given_posts}, partitions=3)
    batches = 2 * len(K1)  # a Tick makes a batch of its own
    timelines = bags(out.rows["to(timeline)"], ["post"], batches)[::2]
    newest = bags(out.rows["to(newest)"], ["post", "place"], batches)[::2]
    before = Counter()
    for (_, _, came, went, head), now, first in zip(
        K1, map(without_times, timelines), newest, strict=True
    ):
        assert sorted(post for (post,) in (now - before).elements()) == came
        assert sorted(post for (post,) in (before - now).elements()) == went
        assert sorted((place, post) for (post, place), _ in first) == [*enumerate(head, 1)]
        before = now


def record(values, names):
    key, *rest = values
    value = None if None in rest else json.dumps(dict(zip(names, values, strict=True))).encode()
    return testing.Row(value, key=key)


@pytest.mark.parametrize("ties", ["rank", "dense_rank"])
@pytest.mark.parametrize("mode", ["update", "retract", "final"])
@pytest.mark.parametrize("session", [False, True])
def test_ties_of_windows_are_kept_in_a_view_by_window_and_key(ties, mode, session):
    app = new_app()
    topic = app.topic("clicks", {"user": str | None, "at": datetime}, key="user", partitions=1)
    clicks = topic.stream(time="at", watermark=ms.watermark("1 second", idle=None))
    window = ms.session("10 seconds") if session else ms.tumbling("10 seconds")
    counts = clicks.window(window, by="user").emit(mode).agg(n=ms.count())
    counts.top(2, by="n", ties=ties, rank="place").view("top")
    given = [(n % 5 or None, 7 * n % 53) for n in range(60)]
    given = [*sorted(given, key=lambda each: each[1]), ("end", 900)]
    users = [(user and str(user), second) for user, second in given]
    rows = [{"user": user, "at": START + timedelta(seconds=second)} for user, second in users]
    out = testing.replay(app, {"clicks": rows}, batchings=4, partitions=(1,))["top"]
    counted = Counter(_windows_of(users, session=session, closed=mode == "final"))
    sizes = sorted(counted.values(), reverse=True)
    if ties == "dense_rank":
        sizes = sorted(set(sizes), reverse=True)
    wanted = Counter((n, sizes.index(n) + 1) for n in counted.values() if sizes.index(n) < 2)
    assert Counter(zip(out["n"], out["place"], strict=True)) == wanted
    with pytest.raises(ConfigError, match="Its rows have no key"):
        counts.drop("user").top(2, by="n", ties=ties).view("other")


def _windows_of(users, *, session, closed):
    """Return the window of each click, as its key and a number of its own."""
    last, number = {}, {}
    for user, second in users:
        if closed and second == 900:
            continue
        if not session:
            yield user, second // 10
            continue
        apart = user not in last or second - last[user] >= 10
        number[user] = number.get(user, 0) + apart
        last[user] = second
        yield user, number[user]
