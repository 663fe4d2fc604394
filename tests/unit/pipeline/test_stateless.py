"""The stateless verbs against plain polars over the whole input, one by one and in any chain."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream import App, Stream, count, testing, tumbling, watermark
from millstream.errors import ConfigError, UserCodeError

START = datetime(2026, 1, 1, tzinfo=UTC)
EXITS = ("emitted", "held", "late", "dead", "filtered", "duplicate")


@dataclass
class Event:
    at: datetime
    id: int
    n: int | None
    text: str | None
    tags: list[str] | None


EVENTS = st.lists(
    st.builds(
        lambda n, text, tags: (n, text, tags),
        st.none() | st.integers(-5, 5),
        st.none() | st.sampled_from(["1", "22", "-3", "x", "", "4.5"]),
        st.none() | st.lists(st.sampled_from(["a", "b", "c"]), max_size=3),
    ),
    max_size=40,
)


def events_of(drawn) -> list[Event]:
    return [Event(START + timedelta(seconds=i), i, *values) for i, values in enumerate(drawn)]


def new_app(**options) -> tuple[App, Stream]:
    app = App("verbs", log="unused", **options)
    rule = watermark("0 seconds", idle=None)
    return app, app.topic("events", Event).stream(time="at", watermark=rule)


def frame_of(events: list[Event]) -> pl.DataFrame:
    schema = {
        "at": pl.Datetime("us", "UTC"),
        "id": pl.Int64,
        "n": pl.Int64,
        "text": pl.String,
        "tags": pl.List(pl.String),
    }
    return pl.DataFrame([vars(e) for e in events], schema=schema)


def gather(stream: Stream) -> None:
    """Count the rows of a stream by all of their values, in a view."""
    nested = [c for c, dtype in stream.columns.items() if dtype.is_nested()]
    if nested:
        stream = stream.with_columns(*(pl.col(c).list.join(",") for c in nested), name="flatten")
    windowed = stream.window(tumbling("1000 days"), by=sorted(stream.columns)).emit("update")
    windowed.agg(times=count()).view("out")


def rows_in(out: testing.Result) -> Counter:
    table = out["out"].drop("window_start", "window_end")
    columns = sorted(set(table.columns) - {"times"})
    return Counter({row[:-1]: row[-1] for row in table.select(*columns, "times").iter_rows()})


def rows_of(frame: pl.DataFrame) -> Counter:
    nested = [c for c, dtype in frame.schema.items() if dtype.is_nested()]
    flat = frame.with_columns(pl.col(c).list.join(",") for c in nested)
    return Counter(flat.select(sorted(flat.columns)).iter_rows())


@dataclass(frozen=True)
class Verb:
    """A verb: on a stream, and on one frame, where ``dead`` gives the rows that it fails on."""

    on_stream: Callable[[Stream], Stream]
    on_frame: Callable[[pl.DataFrame], pl.DataFrame]
    reads: frozenset[str]
    dead: Callable[[pl.DataFrame], pl.DataFrame] = lambda frame: frame.clear()


def doubled(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(twice=pl.col("n") * 2)


def by_amount(frame: pl.DataFrame) -> pl.DataFrame:
    """Make n rows of a row: none where n is null or below 1."""
    times = pl.col("n").fill_null(0).clip(0, 3)
    return frame.with_columns(copy=pl.int_ranges(0, times)).filter(times > 0).explode("copy")


def halves(stream: Stream) -> Stream:
    even, odd, rest = stream.split(pl.col("n") % 2 == 0, pl.col("n") % 2 == 1)
    return odd.union(rest.filter(pl.lit(True)), even)


def raise_on_three(n: int) -> int:
    if n == 3:
        raise LookupError("three")
    return [n, -n][n % 2]


NOT_A_NUMBER = pl.col("text").str.to_integer(strict=False).is_null() & pl.col("text").is_not_null()
LISTS = pl.col("tags").list.len().fill_null(0)
LAMBDA = pl.col("n").map_elements(raise_on_three, return_dtype=pl.Int64)
VERBS = {
    "filter": Verb(
        lambda s: s.filter(pl.col("n") > 0, pl.col("n") != 4),
        lambda f: f.filter(pl.col("n") > 0, pl.col("n") != 4),
        frozenset("n"),
    ),
    "with_columns": Verb(
        lambda s: s.with_columns((pl.col("n") + 1).alias("n"), label=pl.format("{}!", "id")),
        lambda f: f.with_columns((pl.col("n") + 1).alias("n"), label=pl.format("{}!", "id")),
        frozenset({"n", "id"}),
    ),
    "every column": Verb(
        lambda s: s.with_columns(pl.selectors.integer() + 1),
        lambda f: f.with_columns(pl.selectors.integer() + 1),
        frozenset({"n"}),
    ),
    "select": Verb(
        lambda s: s.select("id", "tags", "n", text=pl.col("text").str.strip_chars()),
        lambda f: f.select("id", "tags", "n", text=pl.col("text").str.strip_chars()),
        frozenset({"id", "tags", "n", "text"}),
    ),
    "rename": Verb(
        lambda s: s.rename({"n": "id", "id": "n"}),
        lambda f: f.rename({"n": "id", "id": "n"}),
        frozenset({"n", "id"}),
    ),
    "drop": Verb(lambda s: s.drop("text"), lambda f: f.drop("text"), frozenset({"text"})),
    "explode": Verb(
        lambda s: s.explode("tags").rename({"tags": "tag"}),
        lambda f: f.filter(LISTS > 0).explode("tags").rename({"tags": "tag"}),
        frozenset({"tags"}),
    ),
    "parse": Verb(
        lambda s: s.with_columns(pl.col("text").str.to_integer().alias("number")),
        lambda f: f.filter(~NOT_A_NUMBER).with_columns(number=pl.col("text").str.to_integer()),
        frozenset({"text"}),
        lambda f: f.filter(NOT_A_NUMBER),
    ),
    "lambda": Verb(
        lambda s: s.with_columns(seen=LAMBDA),
        lambda f: f.filter(pl.col("n").is_null() | (pl.col("n") != 3)).with_columns(
            seen=pl.when(pl.col("n") % 2 == 0).then(pl.col("n")).otherwise(-pl.col("n"))
        ),
        frozenset({"n"}),
        lambda f: f.filter(pl.col("n") == 3),
    ),
    "map_frames": Verb(lambda s: s.map_frames(doubled), doubled, frozenset({"n"})),
    "map_frames, any rows": Verb(
        lambda s: s.map_frames(by_amount, rows="any"), by_amount, frozenset({"n"})
    ),
    "split and union": Verb(halves, lambda f: f, frozenset({"n"})),
}


def run_chain(names, drawn, *, batches=1, partitions=1, seed=0):
    """Run a chain of verbs on a stream and on a frame, leaving out those that do not fit."""
    events = events_of(drawn)
    _, stream = new_app()
    frame = frame_of(events)
    dead = 0
    for name in names:
        verb = VERBS[name]
        if verb.reads <= set(frame.columns):
            stream = verb.on_stream(stream)
            dead += verb.dead(frame).height
            frame = verb.on_frame(frame)
    assert set(stream.columns) == set(frame.columns)
    assert {c: stream.columns[c] for c in frame.columns} == dict(frame.schema)
    gather(stream)
    out = testing.run(
        stream.app, {"events": events}, batches=batches, partitions=partitions, seed=seed
    )
    assert rows_in(out) == rows_of(frame)
    assert int(out.ledger["dead"].sum()) == dead
    return stream.app, out


@pytest.mark.parametrize("name", VERBS)
@settings(max_examples=some(8), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=EVENTS, seed=st.integers(0, 99))
def test_each_verb_gives_what_polars_gives(name, drawn, seed):
    run_chain([name], drawn, batches=3, partitions=2, seed=seed)


@settings(max_examples=some(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    names=st.lists(st.sampled_from(sorted(VERBS)), min_size=2, max_size=5),
    drawn=EVENTS,
    batches=st.integers(1, 6),
    partitions=st.sampled_from([1, 4, 7]),
    seed=st.integers(0, 99),
)
def test_any_chain_in_any_batches_gives_what_it_gives_on_one_frame_and_its_books_add_up(
    names, drawn, batches, partitions, seed
):
    app, out = run_chain(names, drawn, batches=batches, partitions=partitions, seed=seed)
    books_add_up(app, out)


def books_add_up(app: App, out: testing.Result) -> None:
    """What each step made is what all that come next read, batch by batch; each line balances."""
    plan = app.plan()
    above: dict[str, set[str]] = {}

    def follow(name, ways):
        for way in ways:
            below = way.step if isinstance(way.step, str) else way.step.name
            above.setdefault(below, set()).add(name)
            follow(below, getattr(way, "downstream", ()))

    for node in (*plan.sources, *(o for stage in plan.stages for o in stage.operators)):
        follow(getattr(node, "name", None) or node.kernel.name, node.edges)
    for (batch,), lines in out.ledger.group_by("batch_id", maintain_order=True):
        by_step = {line["step"]: line for line in lines.to_dicts()}
        order = [plan.steps.index(step) for step in by_step]
        assert order == sorted(order)
        for step, line in by_step.items():
            assert line["read"] == sum(line[exit_] for exit_ in EXITS), (batch, line)
            if step in above:
                made = sum(by_step[p]["rows_out"] for p in above[step] if p in by_step)
                assert line["read"] == made, (batch, step)


def test_a_step_that_several_outputs_share_runs_and_counts_once():
    calls = []

    def noted(frame):
        calls.append(frame.height)
        return frame

    _, stream = new_app()
    shared = stream.map_frames(noted, schema={c: stream.columns[c] for c in ("at", "id")})
    calls.clear()
    shared = stream.select("at", "id").map_frames(noted, name="shared")
    calls.clear()
    shared.view("one", key="id")
    shared.filter(pl.col("id") > 1).view("two", key="id")
    out = testing.run(shared.app, {"events": events_of([(1, "x", [])] * 3)}, partitions=1, seed=4)
    assert sum(calls) == 3
    assert out.ledger.filter(step="shared")["read"].sum() == 3
    assert (out["one"].height, out["two"].height) == (3, 1)


def test_only_the_fields_that_are_needed_are_read_past_rename_and_drop():
    app, stream = new_app()
    stream.rename({"n": "number"}).drop("tags").select("id", "number").view("out", key="id")
    (source,) = app.plan().sources
    assert {field.name for field in source.fields} == {"at", "id", "n"}


def test_of_rows_with_one_key_the_last_stays_though_they_came_through_several_branches():
    for batches in (1, 4):
        _, stream = new_app()
        even, odd = stream.split(pl.col("n") % 2 == 0)
        odd.union(even).with_columns(one=pl.lit(1)).view("last", key="one")
        events = events_of([(i, None, None) for i in range(10)])
        out = testing.run(stream.app, {"events": events}, batches=batches, partitions=1)
        assert out["last"]["n"].to_list() == [9]


def test_a_union_of_topics_has_the_earlier_time_of_both():
    app = App("two", log="unused")
    rule = watermark("0 seconds", idle=None)
    one = app.topic("one", Event, partitions=1).stream(time="at", watermark=rule)
    two = app.topic("two", Event, partitions=1).stream(time="at", watermark=rule)
    both = one.union(two.select("tags", "text", "n", "id", "at"))
    both.window(tumbling("10 seconds")).agg(n=count()).view("out")
    early, late = events_of([(1, None, None)] * 5), events_of([(1, None, None)] * 30)
    assert testing.run(app, {"one": late, "two": early})["out"].is_empty()
    out = testing.run(app, {"one": late, "two": late})
    assert out["out"]["n"].to_list() == [20, 20]


def test_a_split_gives_nulls_to_the_rest_and_the_key_is_renamed_along():
    _, stream = new_app()
    big, rest = stream.key_by("id").split(pl.col("n") > 2)
    big.rename({"id": "big_id"}).view("big")
    rest.view("rest")
    out = testing.run(stream.app, {"events": events_of([(n, None, None) for n in (3, None, 1)])})
    assert out["big"]["big_id"].to_list() == [0]
    assert out["rest"]["n"].to_list() == [None, 1]


def refused(match):
    return pytest.raises(ConfigError, match=match)


def test_mistakes_in_verbs_are_refused_where_they_are_made():
    _, stream = new_app()
    with refused("rename names 'txt'.*Did you mean 'text'"):
        stream.rename({"txt": "x"})
    with refused("two columns 'id'"):
        stream.rename({"n": "id"})
    with refused("reserved"):
        stream.rename({"n": "__n"})
    with refused("drop names no column"):
        stream.drop()
    with refused("drop leaves no column"):
        stream.drop(*stream.columns)
    with refused("explode names 'n', a Int64"):
        stream.explode("n")
    with refused("split has no condition"):
        stream.split()
    with refused("no expression"):
        stream.with_columns()
    with refused(r"select has name= for the name of the step.*\.alias\("):
        stream.select("id", name=pl.col("text"))
    with refused("on_error is 'ignore'"):
        stream.filter(pl.col("n") > 1, on_error="ignore")
    with refused("on_error is 'ignore'"):
        App("x", log="unused", on_error="ignore")


def test_a_union_says_in_what_its_streams_differ():
    _, stream = new_app()
    with refused("the same stream twice"):
        stream.union(stream)
    with refused("has one stream"):
        stream.union()
    with refused("Stream 2 differs.*it has no 'tags'; it has 'm' besides; its 'id' is Int32 and"):
        other = stream.with_columns(pl.col("id").cast(pl.Int32), m=pl.lit(1)).drop("tags")
        stream.union(other)
    with refused("one app"):
        stream.union(new_app()[1])
    windowed = stream.window(tumbling("1 day"), by="id")
    parts = windowed.emit("discard").agg(n=count())
    with refused("these emit 'discard', 'final'.*Parts cannot be mixed"):
        parts.union(windowed.agg(n=count()))


@pytest.mark.parametrize(
    "expression",
    [
        pl.col("n") - pl.col("n").mean(),
        pl.col("n").cum_sum(),
        pl.col("n").shift(),
        pl.col("n").sum().over("id"),
        pl.len(),
        pl.col("text").str.to_datetime(),
        pl.col("n").map_batches(lambda column: column),
    ],
)
def test_an_expression_over_several_rows_is_refused(expression):
    _, stream = new_app()
    with refused("looks at more than one row"):
        stream.with_columns(x=expression)
    with refused("looks at more than one row"):
        stream.split(expression.cast(pl.String) == "1")


@pytest.mark.parametrize(
    "expression",
    [
        pl.col("tags").list.eval(pl.element().str.len_chars().sum()),
        pl.col("tags").list.sort(),
        pl.when(pl.col("n") > 1).then(pl.lit("x")).otherwise(pl.col("text")),
        pl.col("at").dt.truncate("1h"),
        pl.col("text").str.to_datetime("%Y"),
        pl.col("n").map_batches(lambda column: column, is_elementwise=True),
        pl.struct("n", "id"),
        pl.lit(1),
    ],
)
def test_an_expression_over_one_row_is_taken(expression):
    _, stream = new_app()
    assert "x" in stream.with_columns(x=expression).columns


def test_map_frames_finds_its_columns_or_is_told_them():
    @dataclass
    class Made:
        id: int
        shout: str

    _, stream = new_app()

    def shouting(frame):
        return frame.select("id", (pl.col("text") + "!").alias("shout"))

    for schema in (None, Made, {"id": pl.Int64, "shout": pl.String}):
        assert stream.map_frames(shouting, schema=schema).columns == {
            "id": pl.Int64,
            "shout": pl.String,
        }
    with refused("called with no rows.*ZeroDivisionError.*schema="):
        stream.map_frames(lambda frame: 1 / frame.height)
    with refused("gives a int"):
        stream.map_frames(lambda frame: frame.height)
    with refused("does not give the column 'row' back"):
        stream.map_frames(lambda frame: frame.drop("row"), rows="any")
    with refused('Choose "same" or "any"'):
        stream.map_frames(shouting, rows="some")
    with refused("the type 'int'"):
        stream.map_frames(shouting, schema={"id": "int"})
    with refused("function of a polars frame"):
        stream.map_frames("shouting")


@pytest.mark.parametrize(
    ("function", "rows", "match"),
    [
        (lambda f: f.head(0), "same", 'gave 0 rows for .*rows="any"'),
        (lambda f: f.drop("n"), "same", "gave the columns at, id, text, tags. Declared are"),
        (lambda f: f.to_dicts(), "same", "gave a list"),
        (lambda f: f.with_columns(pl.col("n").cast(pl.Int8)), "same", "'n' as Int8.*as Int64"),
        (lambda f: f.with_columns(row=pl.col("row") + 1), "any", "does not hold numbers of rows"),
    ],
)
def test_what_map_frames_gives_must_be_what_was_declared(function, rows, match):
    app, stream = new_app()
    stream.map_frames(function, schema=stream.columns, rows=rows, name="mine").view("x", key="id")
    with pytest.raises(UserCodeError, match=f"step 'mine'.*{match}") as caught:
        # One lane of one batch, so that the rows come together.
        testing.run(app, {"events": events_of([(1, "x", [])] * 3)}, partitions=1, seed=4)
    assert caught.value.step == "mine"


def test_columns_of_nulls_take_the_declared_type():
    app, stream = new_app()
    nothing = stream.map_frames(
        lambda f: pl.DataFrame({"id": f["id"], "n": [None] * f.height}),
        schema={"id": pl.Int64, "n": pl.Int64},
    )
    nothing.view("x", key="id")
    out = testing.run(app, {"events": events_of([(1, "x", [])] * 3)}, batches=2)
    assert out["x"].to_dict(as_series=False) == {"id": [0, 1, 2], "n": [None] * 3}


def test_steps_have_names_of_their_own():
    app, stream = new_app()
    other = replace(stream.filter(pl.col("n") > 1).filter(pl.col("n") > 2, name="mine"))
    first, rest = other.split(pl.col("id") > 1)
    first.rename({"n": "m"}).drop("m").explode("tags").map_frames(doubled_ids).view("x", key="id")
    rest.with_columns(pl.selectors.numeric() * 2).view("y", key="id")
    assert list(app.plan().steps) == [
        "events",
        "filter(n)",
        "mine",
        "split(id)",
        "split(id)[0]",
        "rename(n → m)",
        "drop(m)",
        "explode(tags)",
        "map_frames(doubled_ids)",
        "x",
        "split(id)[rest]",
        "with_columns(id, n)",
        "y",
    ]


def doubled_ids(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col("id") * 2)
