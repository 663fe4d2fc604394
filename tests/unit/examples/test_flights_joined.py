"""The flights joined with weather and tables, in process: row by row what DuckDB's joins come to."""

import importlib.util
import sys
from datetime import date, timedelta
from pathlib import Path

import duckdb
import polars as pl
import pytest

from millstream import testing

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
BY_DUCKDB = """
    select f.*, c.carrier_name, a.dest_name, p.manufacturer, p.model, p.seats,
        w.* exclude (origin, "at"), w."at" as observed
    from departures f
    left join carriers c using (carrier)
    left join airports a using (dest)
    left join planes p using (tailnum)
    asof left join weather v on f.origin = v.origin and f."at" >= v."at"
    left join weather w on w.origin = v.origin and w."at" = v."at"
        and f."at" - v."at" <= interval 2 hours
"""


@pytest.fixture(scope="module")
def example():
    names = ("flights", "flights_joined")  # the second one imports the first
    for name in names:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    yield module
    for name in names:
        del sys.modules[name]


@pytest.fixture(scope="module")
def year(example):
    return example.departures_of(example.read_flights())


def by_duckdb(example, departures, weather):
    """Return all that is known of the departures, as a database joins it."""
    con = duckdb.connect()
    con.execute("set timezone = 'UTC'")
    tables = {
        "departures": departures,
        "weather": weather,
        "planes": example.read_planes(),
        "carriers": example.carrier_names(),
        "airports": example.airport_names(),
    }
    for name, rows in tables.items():
        con.register(name, rows.to_arrow())
    return pl.DataFrame(con.sql(BY_DUCKDB).to_arrow_table())


def test_the_examples_plain_batch_is_duckdbs_over_the_whole_year(example, year):
    weather = example.read_weather()
    expected = by_duckdb(example, year, weather)
    assert expected.height == 336_776
    assert example.differing(example.joined_of(year, weather), expected).is_empty()
    assert 0 < expected["observed"].null_count() < 2_000
    assert expected["minutes_late"].null_count() == 8_255  # cancelled, and joined all the same


@pytest.mark.parametrize(
    ("days", "batches", "partitions"),
    [
        ((date(2013, 3, 9), date(2013, 3, 10)), 3, 4),  # an hour is skipped
        (
            (date(2013, 11, 2), date(2013, 11, 3)),
            5,
            1,
        ),  # an hour comes twice, and observations are missing
        ((date(2013, 12, 30), date(2013, 12, 31)), 2, 4),  # the weather ends before the year
    ],
)
def test_the_stream_comes_to_what_duckdb_comes_to(example, year, days, batches, partitions):
    day = pl.col("scheduled").dt.convert_time_zone("America/New_York").dt.date()
    departures = year.filter(day.is_between(*days))
    first, last = departures["at"].min() - timedelta(hours=6), departures["at"].max()
    weather = example.read_weather().filter(pl.col("at").is_between(first, last))
    inputs = {
        "planes": example.read_planes()[::3].to_dicts(),  # the others are in no table
        "weather": [*weather.to_dicts(), over(example, departures, "weather")],
        "departures": [*departures.to_dicts(), over(example, departures, "departures")],
    }
    out = testing.run(
        example.pipeline("unused"), inputs, batches=batches, partitions=partitions, crash=1
    )
    assert out.late == 0
    expected = by_duckdb(example, departures, weather)
    unknown = ~pl.col("tailnum").is_in(example.read_planes()[::3]["tailnum"].to_list())
    none = pl.when(unknown).then(None)
    expected = expected.with_columns(
        none.otherwise(pl.col(name)).alias(name) for name in ("manufacturer", "model", "seats")
    )
    assert example.differing(out["flights"], expected).is_empty()
    assert example.differing(out["delays"], example.delays_of(expected)).is_empty()
    assert 0 < out["flights"]["model"].null_count() < departures.height


def over(example, departures, topic):
    return testing.Watermark(topic, at=example.end_of(departures))
