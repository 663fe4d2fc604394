"""What conditions and measures make of values: of none, of narrow types, of dates, and of several columns at once."""

from datetime import UTC, date, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, UserCodeError

SCHEMA = {"at": datetime, "k": str, "v": str, "n": int, "day": date, "ok1": bool, "ok2": bool}
START = datetime(2026, 1, 1, tzinfo=UTC)
A, B = pl.col("v") == "a", pl.col("v") == "b"
AB = ms.sequence("a", A).followed_by("b", B).within("1 minute")
RUN = ms.sequence("a", A).one_or_more().consecutive().next("b", B).within("1 hour")


def events():
    topic = ms.App("p", log="unused", buckets=2).topic("t", SCHEMA, key="k", partitions=1)
    return topic.stream(time="at", watermark=ms.watermark("0 seconds", idle=None))


def row(seconds, v, n=0, day=1, **truths):
    at = START + timedelta(seconds=seconds)
    truths = {"ok1": True, "ok2": True} | truths
    return {"at": at, "k": "x", "v": v, "n": n, "day": date(2026, 1, day), **truths}


def found(stream, pattern, rows, measures, by="k"):
    """Return the measures of all matches, as rows."""
    key = ["match_start", "match_end", *([by] if by else [])]
    stream.match(pattern, by=by, measures=measures).view("out", key=key)
    out = testing.run(stream.app, {"t": [*rows, row(99_999, "z")]}, batches=2)["out"]
    return out.sort(key).select(*measures).rows()


def test_the_mean_of_no_rows_is_null_and_null_is_false():
    n = pl.col("n")
    for fits in (n < ms.matched("b", "n").mean(), n != ms.matched("b", "n").mean()):
        pattern = ms.sequence("a", A).followed_by("b", B & fits).within("1 minute")
        rows = [row(0, "a"), row(1, "b", 1)]
        assert found(events(), pattern, rows, {"n": ms.matched("b").count()}) == []


def test_dates_are_apart_by_a_duration():
    later = pl.col("day") - ms.matched("a", "day").last()
    for days, matches in ((2, 1), (3, 1), (4, 0)):
        fits = B & (later >= timedelta(days=days))
        pattern = ms.sequence("a", A).followed_by("b", fits).within("1 minute")
        rows = [row(0, "a", day=1), row(1, "b", day=4)]
        made = found(events(), pattern, rows, {"n": ms.matched("b").count()})
        assert len(made) == matches, days


@pytest.mark.parametrize(
    ("dtype", "number", "total", "mean"),
    [
        (pl.Int32, 2_000_000_000, 6_000_000_000, 2e9),
        (pl.UInt32, 4_000_000_000, 12_000_000_000, 4e9),
        (pl.Float32, 16_777_216, 50_331_648.0, 16_777_216.0),
    ],
)
def test_measures_add_up_with_64_bits(dtype, number, total, mean):
    rows = [*(row(at, "a", number) for at in range(3)), row(5, "b")]
    stream = events().with_columns(c=pl.col("n").cast(dtype))
    c = ms.matched("a", "c")
    made = found(stream, RUN.skip("past_last"), rows, {"total": c.sum(), "mean": c.mean()})
    assert made == [(total, mean)]


def test_small_floats_are_not_lost_in_a_sum():
    rows = [row(0, "a", 16_777_216), row(1, "a", 1), row(2, "a", 1), row(5, "b")]
    stream = events().with_columns(c=pl.col("n").cast(pl.Float32))
    measures = {"total": ms.matched("a", "c").sum()}
    assert found(stream, RUN.skip("past_last"), rows, measures) == [(16_777_218.0,)]


def test_one_key_for_all_rows_and_measures_that_look_at_nothing():
    rows = [row(0, "a"), row(1, "b"), row(5, "a"), row(6, "b")]
    made = found(events(), AB, rows, {"kind": pl.lit("ab")}, by=())
    assert made == [("ab",), ("ab",)]


def test_a_condition_over_columns_named_by_a_pattern_sees_all_of_them():
    pattern = ms.sequence("a", pl.all_horizontal(pl.col("^ok.*$"))).within("1 minute")
    rows = [row(0, "a", 1, ok2=False), row(1, "a", 2), row(2, "a", 3, ok1=False)]
    made = found(events(), pattern, rows, {"n": ms.matched("a", "n").last()})
    assert made == [(2,)]


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda: ({}, ms.sequence("a", pl.col("^ok.*$"))), "all_horizontal"),
        (lambda: ({"m": pl.all_horizontal(pl.col("^.*$").is_null())}, AB), "by a pattern"),
        (lambda: ({"m": ms.matched("a", "both").min()}, AB), "have no order"),
    ],
)
def test_what_has_no_value_is_refused(declare, said):
    measures, pattern = declare()
    stream = events().with_columns(both=pl.concat_list("n", "n"))
    with pytest.raises(ConfigError) as refused:
        stream.match(pattern.within("1 minute"), by="k", measures=measures)
    assert said in str(refused.value)


def test_a_match_on_which_a_measure_fails_is_a_dead_letter_and_the_others_are_there():
    rows = [row(0, "a", 1), row(1, "b", 1), row(5, "a", 300), row(6, "b", 1)]
    measures = {"small": ms.matched("a", "n").last().cast(pl.Int8)}
    for on_error in ("dead-letter", "stop"):
        app = ms.App("p", log="unused", buckets=2, on_error=on_error)
        topic = app.topic("t", SCHEMA, key="k", partitions=1)
        stream = topic.stream(time="at", watermark=ms.watermark("0 seconds", idle=None))
        stream.match(AB, by="k", measures=measures).view("out", key="match_start")
        if on_error == "stop":
            with pytest.raises(UserCodeError, match=r"step 'match\(a, b\)' failed: .*declared at"):
                testing.run(app, {"t": [*rows, row(99_999, "z")]}, batches=2)
            continue
        out = testing.run(app, {"t": [*rows, row(99_999, "z")]}, batches=2)
        assert out["out"]["small"].to_list() == [1]
        assert out.dead["step"].to_list() == ["match(a, b)"]
