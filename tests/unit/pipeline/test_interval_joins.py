"""Joins of streams where they are declared: what is refused, with the way out, and what comes out."""

from dataclasses import dataclass
from datetime import datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream.errors import ConfigError
from millstream.kernels.joins.signed_interval_join import SignedIntervalJoin

BOTH = ("-5 minutes", "5 minutes")


@dataclass
class Event:
    at: datetime
    k: str
    n: int
    tags: list[str]


def stream_of(app, name="t", **options):
    options = {"time": "at", "watermark": ms.watermark("0 seconds"), **options}
    return app.topic(name, Event).stream(**options)


@pytest.fixture
def app():
    return ms.App("joins", log="unused")


def test_the_result_has_the_columns_of_both(app):
    joined = stream_of(app).join(
        stream_of(app, "u").rename({"k": "key"}), {"k": "key"}, within=BOTH
    )
    assert list(joined.columns) == ["at", "k", "n", "tags", "at_right", "n_right", "tags_right"]


@pytest.mark.parametrize(
    ("within", "words"),
    [
        ("30 minutes", r"within is '30 minutes'.*within=\(\"0 seconds\", \"30 minutes\"\)"),
        (("1 minute",), "Give the earliest and the latest"),
        (("5 minutes", "-5 minutes"), "from 5 minutes to -5 minutes, which is no time at all"),
        (("0 seconds", timedelta(days=40_000)), "Give at most 36,525 days"),
        ((timedelta(days=-40_000), "0 seconds"), "from -40000 days"),
        (("soon", "5 minutes"), "join's within is 'soon'. Give a timedelta"),
        (("-soon", "5 minutes"), "join's within is '-soon'. Give a timedelta"),
        ((None, "5 minutes"), "join's within is None"),
        ((0, 300), "join's within is 0. Give a timedelta"),
    ],
)
def test_an_interval_is_two_durations_the_first_not_later(app, within, words):
    with pytest.raises(ConfigError, match=words):
        stream_of(app).join(stream_of(app, "u"), "k", within=within)


def test_bounds_may_be_negative_and_of_both_kinds(app):
    joined = stream_of(app).join(stream_of(app, "u"), "k", within=("-1h30m", timedelta(minutes=-5)))
    kernel = joined.node.kernel
    assert (kernel.lower_us, kernel.upper_us) == (-5_400_000_000, -300_000_000)


def test_what_takes_rows_back_or_replaces_them_is_joined_as_changes(app):
    events = stream_of(app)
    windows = events.window(ms.tumbling("1 minute"), by="k")
    for mode in ("update", "retract"):
        emitted = windows.emit(mode).agg(rows=ms.count())
        for joined in (
            events.join(emitted, "k", within=BOTH),
            emitted.join(events, "k", within=BOTH),
        ):
            assert isinstance(joined.node.kernel, SignedIntervalJoin)
            assert joined.shape.mode == "retract"
    final = events.join(windows.agg(rows=ms.count()), "k", within=BOTH)
    assert not isinstance(final.node.kernel, SignedIntervalJoin)
    parts = windows.emit("discard").agg(rows=ms.count())
    with pytest.raises(ConfigError, match=r"parts that add up: a part of one window would"):
        events.join(parts, "k", within=BOTH)


def test_what_eager_joins_take_back_is_joined_again(app):
    eager = stream_of(app).join(stream_of(app, "u"), "k", within=BOTH, how="left", emit="eager")
    again = eager.join(stream_of(app, "v"), "k", within=BOTH, suffix="_v")
    assert isinstance(again.node.kernel, SignedIntervalJoin)
    assert again.shape.mode == "retract"


@pytest.mark.parametrize("late", ["side", "correct"])
def test_late_rows_can_only_be_dropped(app, late):
    with pytest.raises(ConfigError, match=f'other stream is read with late="{late}".*late="drop"'):
        stream_of(app).join(stream_of(app, "u", late=late, lateness="1 hour"), "k", within=BOTH)


def test_late_rows_are_not_joined(app):
    events = stream_of(app, late="side")
    late = events.dedup("k", within="1 minute").late
    with pytest.raises(ConfigError, match="late rows, whose time has passed"):
        late.join(stream_of(app, "u"), "k", within=BOTH)


def test_only_streams_of_one_app_are_joined(app):
    other = stream_of(ms.App("other", log="unused"))
    events = stream_of(app)
    with pytest.raises(ConfigError, match="'joins' and 'other'"):
        events.join(other, "k", within=BOTH)
    with pytest.raises(ConfigError, match="Give a stream"):
        events.join(stream_of(app, "u").table("k"), "k", within=BOTH)


def test_choices_are_checked(app):
    left, right = stream_of(app), stream_of(app, "u")
    with pytest.raises(ConfigError, match="join's how is 'outer'"):
        left.join(right, "k", within=BOTH, how="outer")
    with pytest.raises(ConfigError, match="join's emit is 'early'"):
        left.join(right, "k", within=BOTH, how="left", emit="early")
    with pytest.raises(ConfigError, match="An inner join emits each pair as soon as"):
        left.join(right, "k", within=BOTH, emit="eager")


def test_keys_are_checked(app):
    left, right = stream_of(app), stream_of(app, "u")
    with pytest.raises(ConfigError, match="cannot be a key"):
        left.join(right, "tags", within=BOTH)
    with pytest.raises(ConfigError, match="'k', a String, with 'n', a Int64"):
        left.join(right, {"k": "n"}, within=BOTH)
    with pytest.raises(ConfigError, match="compares no columns"):
        left.join(right, [], within=BOTH)
    with pytest.raises(ConfigError, match="two columns 'n_right'"):
        left.join(right.with_columns(n_right=pl.col("n")), "k", within=BOTH)


def test_the_key_stays_if_every_row_has_it(app):
    left, right = stream_of(app), stream_of(app, "u")
    assert left.key_by("k").join(right, "k", within=BOTH, how="full").shape.key == ("k",)
    assert left.key_by("n").join(right, "k", within=BOTH).shape.key == ()
    with pytest.raises(ConfigError, match="has no key"):
        left.join(right, "k", within=BOTH).view("pairs")


def test_the_definition_says_the_interval(app):
    joined = stream_of(app).join(stream_of(app, "u"), "k", within=("-5 minutes", "1 hour"))
    joined.to("out")
    (definition,) = app.plan().program.steps.values()
    assert (definition.description["lower_us"], definition.description["upper_us"]) == (
        -300_000_000,
        3_600_000_000,
    )
