"""Comparisons and alerts are checked where they are declared; what cannot be right is refused."""

from dataclasses import dataclass
from datetime import datetime

import polars as pl
import pytest

import millstream as ms
from millstream.errors import ConfigError


@dataclass
class Event:
    at: datetime
    page: str
    n: int


HOUR = ms.tumbling("1 hour")
FIRE = {"when": pl.col("n") > 3, "recover": pl.col("n") < 2}


def events(**options):
    app = ms.App("trend", log="unused")
    return app.topic("events", Event, key="page").stream(
        time="at", watermark=ms.watermark("1 hour"), **options
    )


def results(window=HOUR, mode="final", late="drop", **emit):
    windowed = events(late=late, lateness="1 hour").window(window, by="page")
    return windowed.emit(mode, **emit).agg(n=ms.sum("n"), pages=ms.set("page"))


def test_compare_adds_the_value_before_and_the_ratio():
    trend = results().with_columns(m=pl.col("n") * 0.5).compare(["n", "m"], to="1 week")
    assert list(trend.columns)[-4:] == ["n_before", "n_ratio", "m_before", "m_ratio"]
    assert trend.columns["n_before"] == pl.Int64
    assert trend.columns["m_before"] == trend.columns["n_ratio"] == pl.Float64


def test_comparisons_follow_one_another_and_alerts_follow_them():
    trend = results().compare("n", to="1 week").rename({"n_before": "week", "n_ratio": "by_week"})
    alerts = trend.filter(pl.col("week") > 9).compare("n", to="1 day").alert(**FIRE)
    assert list(alerts.columns)[-3:] == ["n_before", "n_ratio", "alert"]


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "final"),
        ({"mode": "retract", "early": None}, "retract"),
        ({"mode": "update", "early": None}, "retract"),
        ({"late": "correct"}, "retract"),
    ],
)
def test_rows_that_can_change_are_taken_back(options, mode):
    trend = results(**options).compare("n", to="1 week")
    assert trend.shape.mode == trend.alert(**FIRE).shape.mode == mode


NOT_SIDE_BY_SIDE = "windows that lie side by side"


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (events, NOT_SIDE_BY_SIDE),
        (lambda: results(ms.hopping("1 hour", "10 minutes")), NOT_SIDE_BY_SIDE),
        (lambda: results(ms.session("1 hour")), NOT_SIDE_BY_SIDE),
        (lambda: results(ms.sliding("1 hour")), NOT_SIDE_BY_SIDE),
        (lambda: results().union(results()), "streams of one app"),
        (lambda: results(late="side").late, "late rows"),
        (lambda: results().alert(**FIRE), "comes after 'alert'"),
        (lambda: results(mode="discard"), 'after emit\\("discard"\\)'),
        (lambda: results().drop("window_start"), "'drop\\(window_start\\)'.*Do that after"),
        (lambda: results().with_columns(page=pl.lit("x")), "makes it anew"),
        (lambda: results().explode("pages"), "results are told apart"),
    ],
)
def test_only_whole_results_of_windows_side_by_side_are_taken(stream, message):
    for step in (
        lambda rows: rows.compare("n", to="1 week"),
        lambda rows: rows.alert(**FIRE),
    ):
        with pytest.raises(ConfigError, match=message):
            step(stream())


@pytest.mark.parametrize("mode", ["update", "retract"])
def test_a_part_of_a_window_is_not_compared_with_a_whole_one(mode):
    with pytest.raises(ConfigError, match="early=None"):
        results(mode=mode).compare("n", to="1 week")


MONTHLY = ms.calendar("1 quarter", tz="UTC")
WEEKLY = ms.calendar("1 week", tz="Europe/Berlin")


@pytest.mark.parametrize(
    ("window", "columns", "options", "message"),
    [
        (HOUR, "x", {}, "names 'x'"),
        (HOUR, "page", {}, "compares numbers"),
        (HOUR, [], {}, "names no column"),
        (HOUR, ["n", "n"], {}, "column 'n_before'"),
        (HOUR, "n", {"to": "1 hour"}, '"1 day", "1 week"'),
        (HOUR, "n", {"to": "0 days"}, "'0 days'"),
        (HOUR, "n", {"to": "11 years"}, "up to 10 years"),
        (HOUR, "n", {"to": "1 mont"}, "month"),
        (HOUR, "n", {"to": 7}, "to is 7"),
        (HOUR, "n", {"zone": "Mars/Base"}, "no time zone"),
        (WEEKLY, "n", {"zone": "UTC"}, "Leave zone out"),
        (WEEKLY, "n", {"to": "1 month"}, "whole number of windows"),
        (WEEKLY, "n", {"to": "10 days"}, "whole number of windows"),
        (MONTHLY, "n", {"to": "1 month"}, "whole number of windows"),
        (MONTHLY, "n", {"to": "1 week"}, "whole number of windows"),
        (ms.tumbling("7 days"), "n", {"to": "1 day"}, "no window of 1 week begins"),
        (ms.tumbling("2 days"), "n", {"to": "1 month"}, "windows that divide a day"),
    ],
)
def test_what_cannot_be_compared_is_refused(window, columns, options, message):
    with pytest.raises(ConfigError, match=message):
        results(window).compare(columns, **{"to": "1 week", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when": pl.col("x") > 1}, "column 'x'"),
        ({"when": pl.col("n")}, "alert's when is of type Int64"),
        ({"recover": pl.col("n") + 1}, "alert's recover is of type Int64"),
        ({"when": pl.col("n") > pl.col("n").mean()}, "more than one row"),
        ({"for_windows": 0}, "whole number from 1"),
        ({"for_windows": True}, "whole number from 1"),
    ],
)
def test_conditions_must_hold_of_each_row_by_itself(options, message):
    with pytest.raises(ConfigError, match=message):
        results().alert(**{**FIRE, **options})


def test_an_alert_column_that_is_there_already_is_refused():
    with pytest.raises(ConfigError, match="'alert'"):
        results().with_columns(alert=pl.lit(1)).alert(**FIRE)
