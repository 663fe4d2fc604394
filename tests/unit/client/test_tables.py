"""Tables that are sent row by row: the same values are read back, or they are refused."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta

import polars as pl
import pyarrow as pa
import pytest

from millstream.client.tables import rows_to_json
from millstream.errors import ConfigError

NS = 1_767_225_600_000_001_000  # of whole microseconds


def column(kind: pl.DataType, *values: int) -> pl.DataFrame:
    return pl.DataFrame({"at": pl.Series(values, dtype=pl.Int64).cast(kind)})


KINDS = [pl.Datetime("ns"), pl.Datetime("ns", "UTC"), pl.Duration("ns")]


@pytest.mark.parametrize("nest", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, pl.Time()])
def test_nanoseconds_are_refused_and_never_cut_off(kind: pl.DataType, nest: bool) -> None:
    whole = 1_000 if kind == pl.Time else NS
    for value, sent in ((whole, True), (whole + 1, False)):
        frame = column(kind, value)
        if nest:
            frame = frame.select(pl.struct(inner=pl.concat_list("at")).alias("at"))
        if sent:
            assert rows_to_json(frame, None)[0].null_count == 0
        else:
            with pytest.raises(ConfigError, match="nanoseconds"):
                rows_to_json(frame, None)


def test_whole_microseconds_are_sent_as_they_are() -> None:
    frame = pl.DataFrame(
        {
            "at": pl.Series([NS], dtype=pl.Int64).cast(pl.Datetime("ns", "UTC")),
            "took": pl.Series([timedelta(microseconds=-1)], dtype=pl.Duration("ns")),
            "day": [time(1, 2, 3, 4)],
        }
    )
    assert datetime.fromtimestamp(NS // 1_000_000_000, UTC).isoformat().startswith("2026-01-01")
    assert rows_to_json(frame, None)[0].to_pylist() == [
        b'{"at":"2026-01-01T00:00:00.000001+00:00","took":"-PT0.000001S","day":"01:02:03.000004"}'
    ]


def test_a_time_that_python_has_not_is_refused() -> None:
    far = pa.table({"at": pa.array([400_000_000_000_000_000], pa.timestamp("us"))})
    with pytest.raises(ConfigError, match="9999"):
        rows_to_json(far, None)


@pytest.mark.parametrize("key", [pl.col("id"), 5, ["id"]], ids=str)
def test_the_key_is_given_by_the_name_of_its_column(key: object) -> None:
    with pytest.raises(ConfigError, match="name of a column"):
        rows_to_json(pl.DataFrame({"id": ["a"]}), key)  # type: ignore[arg-type]
