"""The flights example in process: its answers are those of one plain batch, and it would be seen."""

import importlib.util
import sys
from datetime import date
from pathlib import Path

import polars as pl
import pytest

from millstream import testing

PATH = Path(__file__).resolve().parents[3] / "examples" / "flights.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("flights", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["flights"] = module  # where a dataclass looks its types up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["flights"]


@pytest.fixture(scope="module")
def year(example):
    return example.read_flights()


@pytest.fixture(scope="module")
def flights(year):
    """Two days, with the night in which clocks went forward between them."""
    day = pl.date("year", "month", "day")
    return year.filter(day.is_between(date(2013, 3, 9), date(2013, 3, 10)))


def test_all_the_flights_are_there_and_their_times_are_right(year):
    assert year.height == 336_776
    hours = year["time_hour"].str.to_datetime(time_zone="UTC")  # as the data has them besides
    assert year["scheduled"].dt.truncate("1h").equals(hours)
    clock = year["departed"].dt.convert_time_zone("America/New_York")
    shown = clock.dt.hour().cast(pl.Int64) * 100 + clock.dt.minute()
    assert shown.equals(year["dep_time"] % 2400)


def test_landings_come_late_by_hours(example, flights):
    events = example.events_of(flights)
    late_by = events["known_at"] - events["at"]
    assert events["known_at"].is_sorted()
    assert late_by.max().total_seconds() > 10 * 3600
    assert late_by.filter(events["kind"] != "landed").max().total_seconds() == 0


@pytest.mark.parametrize(("batches", "partitions"), [(1, 1), (3, 4)])
def test_the_stream_comes_to_what_the_batch_comes_to(example, flights, batches, partitions):
    events = example.events_of(flights)
    over = testing.Watermark("flights", at=events["known_at"].max() + 3 * example.AWAY)
    rows = [*events.drop("known_at").to_dicts(), over]
    out = testing.run(
        example.pipeline("unused"), {"flights": rows}, batches=batches, partitions=partitions
    )
    assert out.late == 0
    assert example.differing(out["delays"], example.delays_of(flights)).is_empty()
    assert example.differing(out["tours"], example.tours_of(flights)).is_empty()
    assert "late" in out["delays"]["pane_kind"]


def test_a_row_that_differs_is_shown(example, flights):
    expected = example.delays_of(flights)
    wrong = expected.with_columns(landed=pl.col("landed") + (pl.int_range(pl.len()) == 7))
    assert example.differing(wrong, expected).height == 2
    assert example.differing(expected[1:], expected).rows() == [expected.row(0)]
    assert example.differing(expected.sample(fraction=1, shuffle=True, seed=1), expected).is_empty()
