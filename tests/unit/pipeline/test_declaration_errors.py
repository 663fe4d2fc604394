"""Mistakes show where they are made: each verb is checked against the columns that are there."""

import re
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

import polars as pl
import pytest

from millstream import (
    App,
    count,
    mean,
    session,
    sliding,
    sum,  # noqa: A004
    testing,
    tumbling,
    watermark,
)
from millstream.errors import ConfigError, UserCodeError


@dataclass
class Place:
    city: str
    zip: int | None = None


@dataclass
class Event:
    at: datetime
    ad: int
    kind: str
    cost: Decimal
    place: Place
    tags: list[str]
    note: str | None = None


@pytest.fixture
def events():
    return App("declared", log="unused").topic("events", Event, key="ad").stream(time="at")


def refused(match):
    return pytest.raises(ConfigError, match=match)


def test_a_misspelt_column_is_named_with_those_there_are_and_the_nearest(events):
    with refused(r"'knd'.*at, ad, kind, cost, place, tags, note.*Did you mean 'kind'"):
        events.filter(pl.col("knd") == "click")
    with refused("'adx'"):
        events.window(tumbling("1 hour"), by="adx")
    with refused("'costs'"):
        events.window(tumbling("1 hour"), by="ad").agg(total=sum("costs"))
    with refused("'user'"):
        events.key_by("user")


NAMED_COLUMNS = {
    "key_by": lambda events, given: events.key_by(given),
    "dedup": lambda events, given: events.dedup(["ad", given], within="1 hour"),
    "budget": lambda events, given: events.budget(["ad", given], cost="cost", limit="cost"),
    "window's by": lambda events, given: events.window(tumbling("1 hour"), by=["ad", given]),
    "view's key": lambda events, given: events.view("kept", key=[given]),
    "the key of to": lambda events, given: events.to("sent", key=given),
    "the value of to": lambda events, given: events.to("sent", value=[given]),
    "dataset's partition_by": lambda events, given: events.dataset("rows", partition_by=[given]),
    "drop": lambda events, given: events.drop(given),
    "explode": lambda events, given: events.explode(given),
    "rename": lambda events, given: events.rename({"ad": given}),
    "The key of topic": lambda events, given: events.app.topic("other", Event, key=given),
}


@pytest.mark.parametrize("given", [pl.col("ad"), 5, None, ["ad"], b"ad"], ids=str)
@pytest.mark.parametrize("call", NAMED_COLUMNS)
def test_a_column_is_given_by_its_name(events, call, given):
    if given is None and "key of" in call:
        return  # without a key
    shown = 'col("ad")' if isinstance(given, pl.Expr) else repr(given)
    with refused(f"^{call}.* is given .*{re.escape(shown)}.*name of a column.*with_columns"):
        NAMED_COLUMNS[call](events, given)


def test_what_is_given_alone_must_be_a_name_too(events):
    for given in (pl.col("ad"), 5):
        with refused("dedup is given"):
            events.dedup(given, within="1 hour")
        with refused("window's by is given"):
            events.window(tumbling("1 hour"), by=given)
    with refused("rename is given 'ad'.*new name"):
        events.rename("ad")
    with refused("metadata=None.*tuple"):
        events.app.topic("other", Event, metadata=None)


def test_what_is_no_time_cannot_be_the_time(events):
    topic = events.app.topics["events"]
    with refused("of type Int64.*cast"):
        topic.stream(time="ad")
    with refused("'wen'"):
        topic.stream(time="wen")


def test_a_whole_number_of_milliseconds_becomes_the_time_by_an_expression(events):
    stream = events.app.topics["events"].stream(time=pl.from_epoch("ad", time_unit="ms"))
    assert stream.columns["ad"] == pl.Int64


def test_sums_of_text_are_refused(events):
    with refused("takes numbers, Decimals and durations"):
        events.window(tumbling("1 hour"), by="ad").agg(total=sum("kind"))


def test_lists_and_structs_cannot_be_keys(events):
    with refused("'tags'.*cannot be a key"):
        events.window(tumbling("1 hour"), by="tags")


def test_modes_and_aggregates_are_checked(events):
    windowed = events.window(tumbling("1 hour"), by="ad")
    with refused('Choose "final", "update"'):
        windowed.emit("sometimes")
    with refused("no aggregates"):
        windowed.agg()
    with refused("'ad' is taken"):
        windowed.agg(ad=count())
    with refused("ms.count, ms.sum or ms.mean"):
        windowed.agg(n=pl.len())


def test_a_view_needs_a_key(events):
    with refused("no key"):
        events.view("latest")
    events.view("latest", key="ad")
    windowed = events.window(tumbling("1 hour"), by="ad").agg(n=count())
    with refused("'window_start' was left out"):
        windowed.select("ad", "n").view("lost")
    with refused("declared twice"):
        windowed.view("latest")


def test_an_app_without_a_view_has_nothing_to_run(events):
    with refused(re.escape("End a stream with .view(name)")):
        events.app.plan()


@pytest.mark.parametrize("name", ["", "Ads", "a b", "-x", "x" * 64])
def test_names_of_apps_are_checked(name):
    with refused("lower-case letters"):
        App(name, log="unused")


def test_an_app_over_brokers_says_where_its_state_is():
    address = "kafka://a:1,b?sasl.password=secret"
    with pytest.raises(ConfigError, match=r'kafka://a:1,b, and brokers keep .* state="./data"'):
        App("ads", log=address)
    with pytest.raises(ConfigError, match=r"an option that there is not; .* Choose"):
        App("ads", log="kafka://a?linger=5", state="./data")
    app = App("ads", log=address, state="./data")
    assert app.folder.as_posix() == "data/apps/ads"
    assert "secret" not in repr(app)
    assert App("ads", log="./log").folder.as_posix() == "log/apps/ads"


def test_a_topic_is_declared_by_a_dataclass_of_known_types(events):
    @dataclass
    class Odd:
        when: complex

    app = events.app
    with refused("Odd.when has the type complex"):
        app.topic("odd", Odd)
    with refused("Give a dataclass"):
        app.topic("odd", dict)
    with refused("Its fields are at, ad"):
        app.topic("other", Event, key="user")
    with refused("declared twice"):
        app.topic("events", Event)


def test_reserved_names_are_refused(events):
    with refused("reserved"):
        events.with_columns(__time=pl.col("at"))


def test_aggregates_keep_exact_types(events):
    out = events.window(tumbling("1 hour"), by="ad").agg(
        n=count(), clicks=count(pl.col("kind") == "click"), total=sum("cost"), average=mean("ad")
    )
    assert out.columns == {
        "window_start": pl.Datetime("us", "UTC"),
        "window_end": pl.Datetime("us", "UTC"),
        "ad": pl.Int64,
        "n": pl.Int64,
        "clicks": pl.Int64,
        "total": pl.Decimal(38, 9),
        "average": pl.Float64,
    }


def test_only_the_fields_that_the_plan_needs_are_read(events):
    with_label = events.with_columns(label=pl.col("kind").str.to_uppercase())
    kept = with_label.filter(pl.col("place").struct.field("city") == "Rome")
    kept.window(tumbling("1 hour"), by="label").agg(total=sum("cost")).view("out")
    (source,) = events.app.plan().sources
    assert {field.name for field in source.fields} == {"at", "kind", "cost", "place"}


def test_steps_of_the_same_name_are_told_apart(events):
    for hours in (1, 1):
        events.window(tumbling(f"{hours} hour"), by="ad").agg(n=count()).view(
            f"v{len(events.app.outputs)}"
        )
    names = [operator.kernel.name for operator in events.app.plan().stages[0].operators]
    assert names == ["tumbling(1 hour) by ad", "tumbling(1 hour) by ad #2"]


def test_a_failing_expression_names_its_step(events):
    number = pl.col("kind").str.to_integer()
    stream = events.with_columns(number=number, name="parse kind", on_error="stop")
    stream.window(tumbling("1 hour"), by="number").agg(n=count()).view("out")
    row = Event(datetime(2026, 1, 1), 1, "x", Decimal(1), Place("Rome"), [])  # noqa: DTZ001
    with pytest.raises(UserCodeError, match="step 'parse kind' failed"):
        testing.run(events.app, {"events": [row]})


def test_one_stream_feeds_several_views_and_branches_share_nothing(events):
    clicks = events.filter(pl.col("kind") == "click")
    clicks.window(tumbling("1 hour"), by="ad").emit("update").agg(n=count()).view("clicks")
    events.window(tumbling("1 hour"), by="ad").emit("update").agg(n=count()).view("all")
    events.select("ad", "kind").view("latest", key="ad")
    rows = [
        Event(datetime(2026, 1, 1), ad, kind, Decimal(1), Place("Rome"), [])  # noqa: DTZ001
        for ad in (1, 2)
        for kind in ("imp", "click", "imp")
    ]
    out = testing.run(events.app, {"events": rows}, batches=3)
    assert out["clicks"]["n"].to_list() == [1, 1]
    assert out["all"]["n"].to_list() == [3, 3]
    assert out["latest"].to_dicts() == [{"ad": 1, "kind": "imp"}, {"ad": 2, "kind": "imp"}]


def test_input_for_an_unknown_topic_is_refused(events):
    events.view("latest", key="ad")
    with refused("The app's topics are events"):
        testing.run(events.app, {"evnts": []})


@pytest.mark.parametrize("option", ["count", "rows_per_batch"])
def test_a_run_that_would_read_nothing_is_refused(events, option):
    events.view("latest", key="ad")
    with refused(f"run's {option} is 0. Give 1 or more"):
        events.app.run(**{option: 0})


def test_the_default_watermark_follows_the_newest_event():
    rule = watermark("2 minutes")
    assert (rule.delay_us, rule.idle_ms) == (120_000_000, 60_000)


@pytest.mark.parametrize("name", [5, None, "", pl.col("ad")])
def test_names_of_outputs_are_text(events, name):
    with refused(r"A view's name is .*Give a text, such as 'per_minute'"):
        events.view(name, key="ad")
    with refused(r"The topic of to\(\) is .*Give a text"):
        events.to(name)


def test_a_union_is_of_streams(events):
    with refused("union is given 'clicks'. Give streams"):
        events.union("clicks")


@pytest.mark.parametrize("taken", ["late_by", "late_reason", "window_end"])
@pytest.mark.parametrize("window", [tumbling("1 hour"), session("1 minute"), sliding("1 minute")])
def test_columns_of_late_rows_do_not_replace_those_of_the_stream(taken, window):
    app = App("late", log="unused")
    columns = {"at": datetime, "ad": int, taken: str}
    stream = app.topic("t", columns).stream(time="at", late="side")
    with refused(f"A window gives late rows a column '{taken}'"):
        stream.window(window, by="ad").agg(n=count())
    dropped = app.topic("t2", columns).stream(time="at")
    dropped.window(window, by="ad").agg(n=count())


def test_columns_of_late_rows_do_not_replace_those_of_a_budgets_input():
    app = App("late", log="unused")
    columns = {"at": datetime, "ad": int, "cost": int, "late_by": str}
    stream = app.topic("t", columns).stream(time="at", late="side")
    with refused("budget gives late rows a column 'late_by'"):
        stream.budget("ad", cost="cost", limit=pl.lit(5), zone="UTC")
