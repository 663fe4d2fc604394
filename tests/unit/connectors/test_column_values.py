"""Values of JSON become those of columns as the same value, or not at all."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.connectors.sinks import column_values as cv
from millstream.connectors.sinks.connector import WrittenNumber


def _value(text):
    return json.loads(text, parse_float=WrittenNumber)


@pytest.mark.parametrize(
    ("to_column", "given_text", "wanted"),
    [
        (cv.whole_numbers(-128, 127), "127", 127),
        (cv.whole_numbers(-128, 127), "1.0", 1),
        (cv.whole_numbers(-128, 127), "1e2", 100),
        (cv.whole_numbers(-128, 127), '"-7"', -7),
        (cv.whole_numbers(-128, 127), "-0.0", 0),
        (cv.whole_numbers(0, 255, bools=True), "true", 1),
        (cv.decimals(5, 2), "-123.450", "-123.45"),
        (cv.decimals(5, 2), '"0.1"', "0.1"),
        (cv.decimals(2, 2), "0.25", "0.25"),
        (cv.floats(bits=64), "0.1", "0.1"),
        (cv.floats(bits=32), "-3.4028234e38", "-3.4028234e38"),
        (cv.truth_value, "false", False),
        (cv.texts(), '{"a": [1.50, null]}', '{"a":[1.50,null]}'),
        (cv.texts(characters_max=2), '"😀é"', "😀é"),
        (cv.json_documents, '"a"', '"a"'),
        (cv.byte_strings(bytes_max=2), '"AP8="', b"\x00\xff"),
        (cv.byte_strings(), '""', b""),
        (cv.uuids, '"123E4567-e89b-12d3-a456-426614174000"', "123e4567-e89b-12d3-a456-426614174000"),
        (cv.dates, '"2024-02-29"', "2024-02-29"),
        (cv.times_of_day(3), '"13:05:01.250"', "13:05:01.25"),
        (cv.moments(3, zone=True), '"2026-01-02T03:04:05.678Z"', "2026-01-02 03:04:05.678"),
        (cv.moments(0, zone=True), '"2026-01-01T00:30:00+01:00"', "2025-12-31 23:30:00"),
        (cv.moments(0, zone=False), '"2026-01-01 00:30"', "2026-01-01 00:30:00"),
        (cv.moments(9, zone=False), '"2026-01-01T00:30:00.123456789"', "2026-01-01 00:30:00.123456789"),
        (cv.labels(["a", "b"], many=True), '"b,a"', "b,a"),
        (cv.labels(["a", "b"], many=True), '""', ""),
        (cv.labels(["a", "7"], many=False), '"7"', "7"),
    ],
)  # fmt: skip
def test_a_value_is_written_as_the_same(to_column, given_text, wanted):
    found = to_column(_value(given_text))
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("to_column", "given_text", "why"),
    [
        (cv.whole_numbers(-128, 127), "1.5", "1.5 is no whole number"),
        (cv.whole_numbers(-128, 127), "128", "not from -128 to 127"),
        (cv.whole_numbers(-128, 127), "true", "True is no number"),
        (cv.whole_numbers(-128, 127), '"1e2"', "is no number"),
        (cv.whole_numbers(-128, 127), '"12 "', "is no number"),
        (cv.whole_numbers(-128, 127), '"1१"', "is no number"),
        (cv.whole_numbers(-128, 127), "1e-999999999", "more digits"),
        (cv.decimals(5, 2), "0.125", "more than 3 digits before the point or 2 behind"),
        (cv.decimals(5, 2), "1000", "more than 3 digits"),
        (cv.floats(bits=32), "3.5e38", "beyond the largest float of 32"),
        (cv.floats(bits=64), "1" + "0" * 400, "beyond the largest float of 64"),
        (cv.floats(bits=64), '"NaN"', "is no number"),
        (cv.truth_value, "1", "neither true nor false"),
        (cv.texts(characters_max=2), '"abc"', "3 characters, and the column has room for 2"),
        (cv.texts(bytes_max=3), '"éé"', "4 bytes, and the column has room for 3"),
        (cv.texts(), '"\\ud800"', "half of a surrogate pair"),
        (cv.texts(keeps_spaces=False), '"a "', "spaces at the end"),
        (cv.json_documents, '["\\udc00"]', "half of a surrogate pair"),
        (cv.byte_strings(), '"no base64"', "is no base64"),
        (cv.byte_strings(), "7", "is no base64"),
        (cv.byte_strings(bytes_exactly=2), '"AA=="', "1 bytes, and the column has 2"),
        (cv.uuids, '"123"', "is no UUID"),
        (cv.uuids, "7", "is no UUID"),
        (cv.dates, '"2026-02-29"', "is no date"),
        (cv.dates, '"2026-02-01T00:00"', "is no date"),
        (cv.times_of_day(0), '"24:00"', "is no time"),
        (cv.times_of_day(2), '"13:05:01.125"', "3 digits of a second, and the column keeps 2"),
        (cv.moments(6, zone=True), '"2026-01-01T00:30"', "has no zone"),
        (cv.moments(6, zone=False), '"2026-01-01T00:30:00.1234567Z"', "7 digits of a second"),
        (cv.moments(6, zone=False), '"2026-13-01T00:30"', "is no time"),
        (cv.moments(6, zone=False), '"2026-01-01T00:30:60"', "is no time"),
        (cv.moments(6, zone=False), "1700000000000", "is no time such as"),
        (cv.moments(6, zone=True), '"0001-01-01T00:00:00+01:00"', "before the year 1"),
        (cv.moments(6, zone=True), '"2026-01-01T00:00:00+24:00"', "a day or more"),
        (cv.labels(["a"], many=False), '"1"', "is none of a"),
        (cv.labels(["a"], many=False), "1", "is none of a"),
    ],
)  # fmt: skip
def test_what_would_be_another_value_is_refused_with_the_reason(to_column, given_text, why):
    with pytest.raises(ValueError, match=why):
        to_column(_value(given_text))


numbers = st.decimals(
    allow_nan=False, allow_infinity=False, places=4, min_value=-9999, max_value=9999
)


@given(numbers, st.integers(1, 8), st.integers(0, 5))
def test_decimals_are_those_that_have_room(number, precision, scale):
    scale = min(scale, precision)
    has_room = number == round(number, scale) and abs(number) < 10 ** (precision - scale)
    try:
        found = cv.decimals(precision, scale)(WrittenNumber(str(number)))
    except ValueError:
        assert not has_room
    else:
        assert has_room
        assert Decimal(found) == number


@given(
    st.datetimes(datetime(2, 1, 1), datetime(9998, 12, 31)),  # noqa: DTZ001 - the zone is another draw
    st.none() | st.integers(-23 * 60, 23 * 60),
    st.integers(0, 6),
)
def test_moments_are_the_same_moment(local, offset_minutes, digits):
    zone = None if offset_minutes is None else timezone(timedelta(minutes=offset_minutes))
    given_moment = local.replace(tzinfo=zone)
    unit = 10 ** (6 - digits)
    try:
        found = cv.moments(digits, zone=False)(given_moment.isoformat())
    except ValueError:
        assert local.microsecond % unit
    else:
        wanted = local if zone is None else given_moment.astimezone(UTC).replace(tzinfo=None)
        assert not local.microsecond % unit
        assert datetime.fromisoformat(found) == wanted
