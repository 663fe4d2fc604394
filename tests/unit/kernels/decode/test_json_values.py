"""Blocks against a naive reader: whatever the neighbours, each record has its own fate."""

import base64
import json
import re
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

import pyarrow as pa
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels.decode.constraints import Constraint
from millstream.kernels.decode.fields import Field, ListOf, MapOf, Scalar, StructOf
from millstream.kernels.decode.json_values import JsonDecoder

PLACE = StructOf(
    (
        Field.of("city", Scalar("str", (Constraint("min_length", 2),)), required=True),
        Field.of("zip", Scalar("int"), required=False, default=7, null=False),
        Field.of("since", Scalar("date"), required=False),
    )
)
FIELDS = (
    Field.of("n", Scalar("int", (Constraint("ge", 0),)), required=True, wire="N"),
    Field.of("x", Scalar("float"), required=False, default=0.5, null=True),
    Field.of("day", Scalar("date"), required=False),
    Field.of("at", Scalar("datetime"), required=False),
    Field.of("clock", Scalar("time"), required=False),
    Field.of("cost", Scalar("decimal"), required=False),
    Field.of("raw", Scalar("bytes"), required=False),
    Field.of("id", Scalar("uuid"), required=False),
    Field.of("kind", Scalar("str", (Constraint("one_of", ("a", "b")),)), required=True, null=True),
    Field.of(
        "tags", ListOf(Scalar("int"), constraints=(Constraint("max_length", 2),)), required=False
    ),
    Field.of("place", PLACE, required=False),
    Field.of("places", ListOf(PLACE, null=True), required=False),
)
ABSENT = object()


def naive(value):
    """Read one value in plain Python: the row, or None for a dead one."""
    try:
        found = json.loads(value.decode(), parse_float=Decimal)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    try:
        return {
            "n": member(found, "N", lambda v: at_least(whole(v), 0), null=False),
            "x": member(found, "x", number, default=0.5),
            "day": member(found, "day", day, default=None),
            "at": member(found, "at", instant, default=None),
            "clock": member(found, "clock", clock, default=None),
            "cost": member(found, "cost", decimal, default=None),
            "raw": member(found, "raw", raw, default=None),
            "id": member(found, "id", uuid, default=None),
            "kind": member(found, "kind", one_of_two),
            "tags": member(found, "tags", tags, default=None),
            "place": member(found, "place", place, default=None),
            "places": member(found, "places", places, default=None),
        }
    except (ValueError, ArithmeticError):
        return None


def need(condition):
    if not condition:
        raise ValueError


def member(found, name, read, *, default=ABSENT, null=True):
    if name not in found:
        need(default is not ABSENT)
        return default
    if found[name] is None:
        need(null)
        return None
    return read(found[name])


def whole(v):
    need(type(v) is int and -(2**63) <= v < 2**63)
    return v


def at_least(v, least):
    need(v >= least)
    return v


def number(v):
    need(type(v) in (int, Decimal))
    need(abs(float(v)) != float("inf"))
    return float(v)


def matched(pattern, v):
    need(isinstance(v, str) and re.fullmatch(pattern, v, re.ASCII))
    return v


def day(v):
    return date.fromisoformat(matched(r"\d{4}-\d\d-\d\d", v))


def instant(v):
    matched(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)?)?", v)
    when = datetime.fromisoformat(v)
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)


def clock(v):
    return time.fromisoformat(matched(r"\d\d:\d\d(:\d\d(\.\d{1,6})?)?", v))


def decimal(v):
    need(type(v) in (int, str, Decimal))
    if isinstance(v, str):
        matched(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", v)
    exact = Decimal(v)
    need(exact == round(exact, 9))
    need(abs(exact) < 10**29)
    return exact


def raw(v):
    need(isinstance(v, str))
    return base64.b64decode(v, validate=True)


def uuid(v):
    matched(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", v)
    return str(UUID(v))


def one_of_two(v):
    need(v in ("a", "b"))
    return v


def tags(v):
    need(isinstance(v, list) and len(v) <= 2)
    return [whole(e) for e in v]


def place(v):
    need(isinstance(v, dict))
    return {
        "city": member(v, "city", city, null=False),
        "zip": member(v, "zip", whole, default=7, null=False),
        "since": member(v, "since", day, default=None),
    }


def city(v):
    need(isinstance(v, str) and len(v) >= 2)
    return v


def places(v):
    need(isinstance(v, list))
    return [None if e is None else place(e) for e in v]


ODD = st.sampled_from([None, True, 5, -1, 1.5, "x", "", "7", [], [1], {}, {"city": "Ulm"}, 2**70])
PLACES = st.fixed_dictionaries(
    {},
    optional={
        "city": st.sampled_from(["Ulm", "Rom", "x", None, 3]),
        "zip": st.sampled_from([1, None, "9"]),
        "since": st.sampled_from(["2026-01-31", "2026-02-30", None]),
        "other": ODD,
    },
)
RECORDS = st.fixed_dictionaries(
    {"N": st.integers(-1, 9), "kind": st.sampled_from(["a", "b", "b", "c", None])},
    optional={
        "x": st.sampled_from([1, 0.25, -3.5, None, "1", True]),
        "day": st.sampled_from(["2026-01-31", "2026-1-31", "2026-02-30", "2026-01-31 ", None]),
        "at": st.sampled_from(
            [
                "2026-01-31T12:00:00Z",
                "2026-01-31 12:00:00.5+02:00",
                "2026-01-31",
                "2026-01-31T12:00:00.1234567Z",
                "2026-01-31T25:00:00",
                "0000-01-01T00:00:00Z",
                "soon",
                1769860800,
            ]
        ),
        "clock": st.sampled_from(["12:00", "23:59:59.25", "24:00", "12:60", "1:00", None]),
        "cost": st.sampled_from([1, 0.1, "2.50", "1e3", "1e-10", "x", "", 10**29, True]),
        "raw": st.sampled_from(["aGk=", "", "aGk", "a b=", "!", 5]),
        "id": st.sampled_from(
            ["8B12A1C4-0000-4000-8000-000000000001", "8b12a1c4", "{8b12a1c4}", None]
        ),
        "tags": st.one_of(st.lists(st.integers(0, 3), max_size=3), st.just([None]), ODD),
        "place": st.one_of(PLACES, ODD),
        "places": st.one_of(st.lists(st.one_of(st.none(), PLACES), max_size=3), ODD),
        "ignored": ODD,
    },
)
VALUES = st.one_of(
    RECORDS.map(lambda r: json.dumps(r).encode()),
    RECORDS.map(lambda r: b" " + json.dumps(r, indent=1).encode() + b"\n"),
    st.sampled_from([b"", b"x", b"[]", b"{}", b'{"N": 1, "kind": "a"', b'{"N":1,"kind":"\xff"}']),
)


def rows_of(decoded):
    return decoded.table.to_pylist()


def same(left, right):
    """Compare rows; 0.1 and 0.100000000 are one decimal, and times one instant."""
    return [dict(row) for row in left] == [dict(row) for row in right]


@settings(max_examples=some(300), deadline=None)
@given(st.lists(VALUES, max_size=12))
def test_blocks_give_what_a_naive_reader_gives(values):
    decoded = JsonDecoder(FIELDS).decode(pa.array(values, pa.binary()))
    expected = [naive(value) for value in values]
    assert decoded.good.tolist() == [at for at, row in enumerate(expected) if row is not None]
    assert same(rows_of(decoded), [row for row in expected if row is not None])
    assert [at for at, _ in decoded.errors] == [
        at for at, row in enumerate(expected) if row is None
    ]
    assert all(0 < len(reason) <= 100 for _, reason in decoded.errors)


@st.composite
def spoilt(draw):
    """A record with a few bytes of it changed for others."""
    value = bytearray(draw(VALUES) or b"{}")
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(len(value) - 1, 0)))
        new = draw(
            st.sampled_from([b"", b'"', b"{", b"}", b",", b"\n", b"\0", b"\xff", b"NaN", b"\\"])
        )
        value[at : at + draw(st.integers(0, 2))] = new
    return bytes(value)


@settings(max_examples=some(300), deadline=None)
@given(st.lists(spoilt(), min_size=2, max_size=8))
def test_no_neighbour_changes_what_becomes_of_a_record(values):
    decoder = JsonDecoder(FIELDS)
    alone = [decoder.decode(pa.array([value], pa.binary())) for value in values]
    together = decoder.decode(pa.array(values, pa.binary()))
    assert together.good.tolist() == [at for at, one in enumerate(alone) if not one.errors]
    assert rows_of(together) == [row for one in alone for row in rows_of(one)]
    reasons = {at: one.errors[0][1] for at, one in enumerate(alone) if one.errors}
    assert dict(together.errors) == reasons


NUMBERS = st.from_regex(
    r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,20}0{0,9})?([eE][+-]?[0-9]{1,3})?", fullmatch=True
)
TIMES = st.from_regex(
    r"[012][0-9]{3}-[01][0-9]-[0-3][0-9]([T ][0-2][0-9](:[0-6][0-9](:[0-5][0-9](\.[0-9]{1,7})?)?)?"
    r"(Z|[+-][0-2][0-9](:?[0-6][0-9])?)?)?",
    fullmatch=True,
)
TEXTS = {
    "float": st.one_of(NUMBERS, st.sampled_from(["NaN", "Inf", "-Infinity", "-0", "-0.0"])),
    "int": NUMBERS,
    "decimal": st.one_of(NUMBERS, NUMBERS.map(json.dumps)),
    "datetime": TIMES.map(json.dumps),
    "time": st.from_regex(r"[0-2][0-9]:[0-6][0-9](:[0-6][0-9](\.[0-9]{0,7})?)?Z?").map(json.dumps),
    "date": st.from_regex(r"[0-9]{4}-[01]?[0-9]-[0-3][0-9]").map(json.dumps),
    "bytes": st.from_regex(r"[ab+/_=\n -]{0,9}={0,2}", fullmatch=True).map(json.dumps),
    "str": st.sampled_from(['"\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\\x"', '"\u00e9"']),
}


@settings(max_examples=some(300), deadline=None)
@given(
    st.sampled_from(sorted(TEXTS)).flatmap(
        lambda kind: st.tuples(st.just(kind), st.lists(TEXTS[kind], min_size=1, max_size=12))
    )
)
def test_arrow_passes_nothing_that_is_read_otherwise_by_row(case):
    kind, texts = case
    decoder = JsonDecoder((Field.of("f", Scalar(kind), required=True),))
    values = [f'{{"f": {text}}}'.encode() for text in texts]
    alone = [decoder.decode(pa.array([value], pa.binary())) for value in values]
    by_row = decoder.decode(pa.array([*values, b"x"], pa.binary()))
    assert by_row.good.tolist() == [at for at, one in enumerate(alone) if not one.errors]
    rows = [repr(row) for one in alone for row in rows_of(one)]
    assert [repr(row) for row in rows_of(by_row)] == rows


@pytest.mark.parametrize(
    "value",
    [
        b'{"f": 2125753946738198241097.5e9}',
        b'{"f": "+1790305702801995513e14"}',
        b'{"f": -1.5e-459}',
        b'{"\\u0066": 1790305702801995513e14}',
    ],
)
def test_a_decimal_that_does_not_fit_is_dead_and_not_another_number(value):
    assert "field 'f' is" in str(one(Field.of("f", Scalar("decimal"), required=True), value))


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [0],
        [7_776],
        [7_777],
        [0, 4_999, 5_000, 9_999],
        [1, 2, 9_999],
        list(range(0, 10_000, 97)),
    ],
)
def test_bad_records_are_found_in_large_blocks(bad):
    values = [b'{"n": %d}' % number for number in range(10_000)]
    for at in bad:
        values[at] = b'{"n": "x"}' if at % 2 else b"x"
    field = Field.of("n", Scalar("int"), required=True)
    decoded = JsonDecoder((field,)).decode(pa.array(values, pa.binary()))
    assert [at for at, _ in decoded.errors] == bad
    assert decoded.good.tolist() == decoded.table.column("n").to_pylist()
    assert decoded.table.num_rows == 10_000 - len(bad)


def test_text_that_is_not_utf8_in_a_field_that_is_not_wanted_costs_nothing():
    field = Field.of("f", Scalar("int"), required=False, default=5, null=True)
    values = [b'{"g": "\xff"}', b'{"f": 1, "g": "\xff"}', b"{}"]
    decoded = JsonDecoder((field,)).decode(pa.array(values, pa.binary()))
    assert decoded.table.column("f").to_pylist() == [5, 1, 5]


def test_an_object_with_keys_that_are_data_has_none_of_them_twice():
    field = Field.of("f", MapOf(Scalar("int")), required=True)
    assert one(field, b'{"f": {"a": 1, "a": 2}}') == "field 'f' has 'a' twice"


@settings(max_examples=some(100), deadline=None)
@given(st.lists(VALUES, max_size=6))
def test_a_shape_that_arrow_cannot_read_changes_nothing_for_the_others(values):
    slow = (*FIELDS, Field.of("attrs", MapOf(Scalar("int")), required=False))
    array = pa.array(values, pa.binary())
    by_row, by_block = JsonDecoder(slow).decode(array), JsonDecoder(FIELDS).decode(array)
    assert by_row.errors == by_block.errors
    assert same(rows_of(JsonDecoder(slow).decode(array)), by_row.table.to_pylist())
    assert by_row.table.drop_columns(["attrs"]).equals(by_block.table)


def one(field, value):
    decoded = JsonDecoder((field,)).decode(pa.array([value], pa.binary()))
    return decoded.table.to_pylist()[0][field.name] if not decoded.errors else decoded.errors[0][1]


def json_of(**members):
    return json.dumps(members).encode()


@pytest.mark.parametrize(
    ("shape", "given", "reason"),
    [
        (Scalar("float"), "abc", "field 'f' is \"abc\": not a number"),
        (Scalar("int", (Constraint("ge", 0),)), -3, "field 'f' is -3: must be >= 0"),
        (Scalar("int"), 1.5, "field 'f' is 1.5: not a whole number"),
        (Scalar("int"), True, "field 'f' is true: not a whole number"),
        (Scalar("str"), 5, "field 'f' is 5: not text"),
        (Scalar("bool"), 0, "field 'f' is 0: not true or false"),
        (Scalar("int"), None, "field 'f' is null"),
        (Scalar("str", (Constraint("pattern", "^x"),)), "y", "field 'f' is \"y\": must match '^x'"),
        (
            Scalar("str", (Constraint("one_of", ("a", "b")),)),
            "c",
            "field 'f' is \"c\": must be one of 'a', 'b'",
        ),
        (ListOf(Scalar("int")), [1, None], "field 'f[1]' is null"),
        (ListOf(Scalar("int")), {"a": 1}, "field 'f' is {\"a\": 1}: not a list"),
        (PLACE, {"city": "x"}, "field 'f.city' is \"x\": must have a length of at least 2"),
        (PLACE, {"zip": 1}, "field 'f.city' is missing"),
        (ListOf(PLACE), [{"city": "Ulm"}, {}], "field 'f[1].city' is missing"),
        (MapOf(Scalar("int")), {"k": "v"}, "field 'f['k']' is \"v\": not a whole number"),
        (
            Scalar("datetime"),
            "2026-01-31T12:00:00.1234567Z",
            "field 'f' is \"2026-01-31T12:00:00.1234567Z\": has more than six digits of a second",
        ),
    ],
)
def test_a_reason_names_field_and_value(shape, given, reason):
    assert one(Field.of("f", shape, required=True), json_of(f=given)) == reason.replace(
        "'f['k']'", "\"f['k']\""
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"[1]", "the value is a list, not an object"),
        (b"null", "the value is null, not an object"),
        (None, "the value is null"),
        (b'{"f": 1', "the value is not JSON: Expecting ',' delimiter at character 7"),
        (b'{"f": "\xff"}', "the value is not UTF-8 at byte 7"),
        (b"{}", "field 'f' is missing"),
        (b'{"f": 1, "f": 2}', "field 'f' is given twice"),
    ],
)
def test_a_reason_tells_what_the_value_is_instead(value, reason):
    assert one(Field.of("f", Scalar("int"), required=True), value) == reason


def test_a_reason_is_cut_at_100_characters():
    reason = one(Field.of("f", Scalar("int"), required=True), json_of(f="x" * 500))
    assert len(reason) <= 100
    assert reason.startswith("field 'f' is \"xxx")
    assert reason.endswith("…: not a whole number")


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ("PT90S", timedelta(seconds=90)),
        ("P1DT2H3M4.5S", timedelta(days=1, hours=2, minutes=3, seconds=4.5)),
        ("P2W", timedelta(weeks=2)),
        ("-PT1M", timedelta(minutes=-1)),
        (1.5, timedelta(seconds=1.5)),
        (90, timedelta(seconds=90)),
    ],
)
def test_durations_are_seconds_or_iso_text(given, length):
    assert one(Field.of("f", Scalar("timedelta"), required=True), json_of(f=given)) == length


@pytest.mark.parametrize("given", ["P", "PT", "1 hour", "P1M", True, 1e-7, "P1DT"])
def test_what_is_no_exact_duration_is_dead(given):
    assert "field 'f' is" in str(
        one(Field.of("f", Scalar("timedelta"), required=True), json_of(f=given))
    )


def test_an_object_with_keys_that_are_data_becomes_a_list_of_pairs():
    field = Field.of("f", MapOf(Scalar("int")), required=True)
    assert one(field, b'{"f": {"a": 1, "b": 2}}') == [
        {"key": "a", "value": 1},
        {"key": "b", "value": 2},
    ]


def test_a_missing_field_gets_its_default_and_a_null_does_not():
    field = Field.of("f", Scalar("int"), required=False, default=5, null=True)
    values = [b"{}", b'{"f": null}', b'{"f": 1}', b'{"\\u0066": null}', b'{"g": "f"}']
    decoded = JsonDecoder((field,)).decode(pa.array(values, pa.binary()))
    assert decoded.table.column("f").to_pylist() == [5, None, 1, None, 5]


def test_values_of_which_no_field_is_wanted_are_still_looked_at():
    decoded = JsonDecoder(()).decode(pa.array([b"{}", b"x", b'{"a": 1}'], pa.binary()))
    assert decoded.good.tolist() == [0, 2]
    assert [at for at, _ in decoded.errors] == [1]


def test_numbers_that_are_none_are_floats_all_the_same():
    field = Field.of("f", Scalar("float"), required=True)
    assert str(one(field, b'{"f": NaN}')) == "nan"
    strict = Field.of("f", Scalar("float", (Constraint("finite"),)), required=True)
    assert "must be a finite number" in str(one(strict, b'{"f": NaN}'))


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (Constraint("gt", 0), 1, 0),
        (Constraint("ge", 0), 0, -1),
        (Constraint("lt", 5), 4, 5),
        (Constraint("le", 5), 5, 6),
        (Constraint("multiple_of", 3), 9, 10),
        (Constraint("ge", 0.5), 1, 0),
    ],
)
def test_constraints_on_numbers_hold_by_column_as_by_row(check, good, bad):
    column = pa.array([good, bad, None], pa.int64())
    assert check.holds_in(column).to_pylist() == [True, False, None]
    assert [check.holds(good), check.holds(bad)] == [True, False]


@given(st.lists(st.floats(-10, 10)), st.sampled_from([0.1, 0.5, 0.25]))
def test_multiples_of_floats_allow_for_rounding(values, step):
    column = pa.array([*values, 3 * step], pa.float64())
    held = Constraint("multiple_of", step).holds_in(column).to_pylist()
    assert held[-1]
    assert held[:-1] == [Constraint("multiple_of", step).holds(v) for v in values]
