"""Objects read by their layout: what is read is what JSON says, and what is not JSON is not read.

The reference is the standard library's parser, of each object by itself. There are two readers: that of columns, and a
scanner, which runs compiled. Here it runs as it is, as Python, and once compiled.
"""

import json
import math
import re
import sys
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels import jit
from millstream.kernels.decode import layout_reader, layout_scan
from millstream.kernels.decode.fields import Field, Scalar
from millstream.kernels.decode.json_layout import layout_of
from millstream.kernels.decode.json_values import JsonDecoder
from millstream.kernels.decode.layout_reader import LayoutReader, read_alike
from millstream.kernels.decode.layout_scanner import LayoutScanner

TYPES = {
    "n": pa.int64(),
    "x": pa.float64(),
    "s": pa.string(),
    "t": pa.timestamp("us", "UTC"),
    "b": pa.bool_(),
}
FIELDS = tuple(
    Field.of(name, Scalar(kind), required=True)
    for name, kind in (("n", "int"), ("x", "float"), ("s", "str"), ("t", "datetime"), ("b", "bool"))
)
START = datetime(1, 1, 1, tzinfo=UTC)
SPOILERS = [
    '"',
    "\\",
    "{",
    "}",
    ":",
    ",",
    "-",
    ".",
    "e",
    " ",
    "0",
    "9",
    "\t",
    "é",
    "T",
    "Z",
    "[",
    "null",
    "true",
]


def time_text(at: datetime, form: str) -> str:
    text = at.replace(tzinfo=None).isoformat(timespec=form)
    return text + "Z"


@pytest.fixture(autouse=True, scope="module")
def words_wrap_around():
    """Let words of the scanner wrap around as they do where it is compiled: without a warning."""
    with np.errstate(over="ignore"):
        yield


@pytest.fixture(scope="module", params=["columns", "scanner"])
def reader(request):
    """Give the class that reads objects of a layout; the scanner is not compiled."""
    if request.param == "columns":
        yield LayoutReader
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "compiled", lambda function, *_, **_options: function)
        patch.setattr(layout_reader, "COMPILED_OBJECTS_MIN", 0)
        yield LayoutScanner


times = st.builds(
    lambda microseconds, form: time_text(START + timedelta(microseconds=microseconds), form),
    st.one_of(
        st.integers(0, (10**4 - 2) * 365 * 86_400 * 10**6),
        st.integers(1_790_000_000 * 10**6, 1_790_000_100 * 10**6),
    ),
    st.sampled_from(["seconds", "milliseconds", "microseconds"]),
)
plain_text = st.text(
    st.characters(min_codepoint=32, exclude_characters='"\\', exclude_categories=["Cs"])
)
numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers().map(str),
    st.from_regex(r"\A-?(0|[1-9][0-9]{0,4})(\.[0-9]{1,25})?([eE][-+]?[0-9]{1,3})?\Z"),
)
VALUES = {
    "n": st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-999, 99_999)).map(str),
    "x": numbers,
    "s": plain_text.map(lambda text: f'"{text}"'),
    "t": times.map(lambda text: f'"{text}"'),
    "b": st.sampled_from(["true", "false"]),
    "other n": numbers,
    "other s": plain_text.map(lambda text: f'"{text}"'),
    "other b": st.sampled_from(["true", "false"]),
}


@st.composite
def objects(draw):
    """Draw objects that are laid out in the same way, some of them spoiled."""
    names = draw(st.permutations(list(VALUES)))
    names = [name for name in names if name in TYPES or draw(st.booleans())]
    comma, colon = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :  ")]))
    found = []
    for _ in range(draw(st.integers(1, 12))):
        members = [f'"{name}"{colon}{draw(VALUES[name])}' for name in names]
        found.append("{" + comma.join(members) + "}")
    for at in range(1, len(found)):
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
            place = draw(st.integers(1, len(found[at]) - 1))
            cut = draw(st.integers(0, 2))
            put = draw(st.sampled_from(["", *SPOILERS]))
            found[at] = found[at][:place] + put + found[at][min(place + cut, len(found[at]) - 1) :]
    return [text.encode() for text in found]


def parsed(value: bytes) -> dict:
    """Parse with the standard library; ValueError where it is no JSON object, or has a name twice."""

    def once(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError("twice")
        return dict(pairs)

    def no_constant(text):
        raise ValueError(text)

    return json.loads(value, object_pairs_hook=once, parse_constant=no_constant)


def as_wanted(value: bytes) -> dict:
    found = parsed(value)
    at = datetime.fromisoformat(found["t"])
    assert at.tzinfo is not None
    assert type(found["n"]) is int
    assert type(found["b"]) is bool
    assert type(found["s"]) is str
    assert math.isfinite(found["x"])
    return {**{name: found[name] for name in ("n", "s", "b")}, "x": float(found["x"]), "t": at}


@settings(max_examples=some(200))
@given(values=objects(), chunk_bytes=st.sampled_from([1, 200, 1 << 21]))
def test_what_is_read_is_what_the_json_says(reader, values, chunk_bytes):
    layout = layout_of(values[0])
    assert layout is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_reader, "_CHUNK_BYTES", chunk_bytes)
        table, read = reader(layout, pa.schema(TYPES)).read(pa.array(values, pa.binary()))
    table.validate(full=True)
    expected = [as_wanted(value) for value, was in zip(values, read, strict=True) if was]
    assert table.to_pylist() == [{name: row[name] for name in TYPES} for row in expected]


@settings(max_examples=some(200))
@given(values=objects())
def test_a_record_has_the_same_fate_alone_and_among_others_that_are_alike(reader, values):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_reader, "_WORTHWHILE", 1)
        together = JsonDecoder(FIELDS).decode(pa.array(values, pa.binary()))
    rows = dict(zip(together.good.tolist(), together.table.to_pylist(), strict=True))
    errors = dict(together.errors)
    for at, value in enumerate(values):
        alone = JsonDecoder(FIELDS).decode(pa.array([value], pa.binary()))
        assert ([rows[at]] if at in rows else []) == alone.table.to_pylist()
        assert errors.get(at) == dict(alone.errors).get(0)


@pytest.mark.parametrize("member", ["x", "other"])
@pytest.mark.parametrize(
    "text",
    ["1e99999999999999999999", "0e99999999999999999999", "1e-99999999999999999999", "9" * 5000],
)
def test_a_number_beyond_what_parsers_take_has_the_same_fate_alone_and_among_others(
    reader, monkeypatch, member, text
):
    fields = (Field.of("x", Scalar("float"), required=True),)
    good = b'{"x":1.5,"other":1}'
    odd = b'{"x":%s,"other":%s}' % tuple(
        text.encode() if name == member else b"1" for name in ("x", "other")
    )
    alone = JsonDecoder(fields).decode(pa.array([odd], pa.binary()))
    monkeypatch.setattr(layout_reader, "_WORTHWHILE", 1)
    together = JsonDecoder(fields).decode(pa.array([good, good, odd], pa.binary()))
    assert together.table.slice(2).to_pylist() == alone.table.to_pylist()
    assert [why for _, why in together.errors] == [why for _, why in alone.errors]


COMMON = b'{"n":%d,"s":"%s","t":"2026-01-31T12:00:%02d.%03dZ","x":%s,"b":%s}'


def common(number: int) -> bytes:
    truth = b"true" if number % 3 else b"false"
    text = b"x" * (number % 40)
    return COMMON % (number, text, number % 60, number % 1000, b"%.3f" % (number / 7), truth)


def test_all_of_many_common_objects_are_read(reader):
    values = [common(number) for number in range(5000)]
    table, read = read_alike(pa.array(values, pa.binary()), pa.schema(TYPES))
    assert read.all()
    assert table.num_rows == 5000
    assert table.column("s").to_pylist()[39] == "x" * 39
    assert table.column("t").to_pylist()[1234] == datetime(
        2026, 1, 31, 12, 0, 34, 234_000, tzinfo=UTC
    )


def test_objects_of_another_layout_are_left(reader):
    other = [b'{"t":"2026-01-31T12:00:00Z","n":1,"s":"","x":0,"b":true}'] * 700
    values = [common(number) for number in range(1000)] + other
    _, read = read_alike(pa.array(values, pa.binary()), pa.schema(TYPES))
    assert read[:1000].all()
    assert not read[1000:].any()


def test_a_slice_is_read_as_if_it_were_whole(reader):
    values = pa.array([common(number) for number in range(5000)], pa.binary())[1700:4000]
    table, read = read_alike(values, pa.schema([("n", pa.int64())]))
    assert read.all()
    assert table.column("n").to_pylist() == list(range(1700, 4000))


@pytest.mark.parametrize(
    "value",
    [
        b'{"a":{"b":1}}',
        b'{"a":[1]}',
        b'{"a":null}',
        b'{"a":"\\n"}',
        b'{"a":1,"a":2}',
        b'{"a":01}',
        b'{"a":1,}',
        b'{"a":1}}',
        b"{}",
        b"[1]",
        b'{"a":NaN}',
        b'{"a" 1}',
    ],
)
def test_these_have_no_layout(value):
    assert layout_of(value) is None


def assert_left(reader, name, value, left):
    """Read a value and, laid out in the same way, one that must be left; return what is read."""
    values = [f'{{"{name}":{one}}}'.encode() for one in (value, left)]
    objects = pa.array(values, pa.binary())
    table, read = reader(layout_of(values[0]), pa.schema({name: TYPES[name]})).read(objects)
    assert read.tolist() == [True, False]
    return table


@pytest.mark.parametrize(
    "text",
    [
        "2026-02-29T12:00:00Z",
        "2026-13-01T12:00:00Z",
        "2026-00-01T12:00:00Z",
        "2026-01-00T12:00:00Z",
        "0000-01-01T12:00:00Z",
        "2026-01-31T24:00:00Z",
        "2026-01-31T12:60:00Z",
        "2026-01-31T12:00:60Z",
        "2026-01-31T12:00:00.Z",
        "2026-01-31T12:00:00.1234567Z",
        "2026-01-31T12:00:00",
        "2026-01-31T12:00:00+01:00",
        "2026-01-31",
        "2026/01/31T12:00:00Z",
        "2026-01-31T12.00:00Z",
        "2026-01-31T12:00:0:Z",
        "2026-01-31T12:00:00,123Z",
        "",
    ],
)
def test_these_times_are_left(reader, text):
    assert_left(reader, "t", '"2026-01-31T12:00:00Z"', f'"{text}"')


@pytest.mark.parametrize(
    "text", ["01", "-", "", "1.0", "1e3", "+1", "1234567890123456789", "--1", "0x1", "٣"]
)
def test_these_whole_numbers_are_left(reader, text):
    table = assert_left(reader, "n", "-1", text)
    assert table.to_pylist() == [{"n": -1}]


@pytest.mark.parametrize(
    "text",
    [
        "01",
        "-",
        "",
        ".5",
        "5.",
        "1e",
        "1e+",
        "+1",
        "1.e3",
        "NaN",
        "Infinity",
        "1e999",
        "1e-0000000001",
        "0x1",
    ],
)
def test_these_numbers_are_left(reader, text):
    table = assert_left(reader, "x", "-1.5e-3", text)
    assert table.to_pylist() == [{"x": -0.0015}]


def test_a_dead_letter_among_many_common_objects_is_alone(reader):
    values = [common(number) for number in range(3000)]
    values[1500] = b'{"n":1,"s":"x'
    values[1501] = b'{"s":"in another order","n":7,"t":"2026-01-31T12:00:00Z","x":1e0,"b":true}'
    decoded = JsonDecoder(FIELDS).decode(pa.array(values, pa.binary()))
    assert [at for at, _ in decoded.errors] == [1500]
    assert decoded.good.tolist() == [at for at in range(3000) if at != 1500]
    assert decoded.table.column("s")[1500].as_py() == "in another order"


def test_text_that_is_not_utf_8_is_a_dead_letter_alone(reader):
    values = [common(number) for number in range(2000)]
    values[7] = values[7].replace(b'"xxxxxxx"', b'"xxx\xffxxx"')
    decoded = JsonDecoder(FIELDS).decode(pa.array(values, pa.binary()))
    assert decoded.errors == [(7, "the value is not UTF-8 at byte 15")]
    assert decoded.table.num_rows == 1999


@given(st.lists(st.integers(0, 255) | st.sampled_from([*b'"\\\x1f 09/:-']), min_size=8, max_size=8))
def test_words_are_looked_at_as_their_bytes_are(values):
    data = np.array([*values, 0], np.uint8)
    word = layout_scan.word_at(data, 0)
    assert int(word) == int.from_bytes(bytes(values), "little")
    stops = [n for n, byte in enumerate(values) if byte < 32 or byte in b'"\\']
    assert layout_scan.text_end(data, 0, 8) == min(stops, default=8)
    assert layout_scan.digits_in(word) == len(re.match(rb"[0-9]*", bytes(values)).group())


@given(st.integers(0, 99_999_999))
def test_eight_digits_are_a_number(number):
    data = np.frombuffer(b"%08d" % number, np.uint8)
    assert layout_scan.number_of(layout_scan.word_at(data, 0)) == number


@pytest.mark.thorough  # compiling takes some 4 CPU seconds
@settings(max_examples=some(200))
@given(values=objects())
def test_the_compiled_scanner_reads_what_it_reads_as_python(values):
    layout, array = layout_of(values[0]), pa.array(values, pa.binary())
    compiled, read = LayoutScanner(layout, pa.schema(TYPES)).read(array)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "compiled", lambda function, *_, **_options: function)
        table, read_as_python = LayoutScanner(layout, pa.schema(TYPES)).read(array)
    assert compiled.equals(table)
    assert read.tolist() == read_as_python.tolist()


def test_the_scanner_is_compiled_once_a_process_has_read_many_objects(monkeypatch):
    asked = []
    monkeypatch.setattr(
        jit, "compiled", lambda function, *_, **_options: asked.append(1) or function
    )
    monkeypatch.setattr(layout_reader, "_seen", 0)
    monkeypatch.setattr(layout_reader, "COMPILED_OBJECTS_MIN", 4000)
    values = pa.array([common(number) for number in range(2000)], pa.binary())
    before, _ = read_alike(values, pa.schema(TYPES))
    assert not asked
    after, _ = read_alike(values, pa.schema(TYPES))
    assert asked
    assert after.equals(before)
    monkeypatch.setattr(jit, "is_available", lambda: False)
    asked.clear()
    without_numba, _ = read_alike(values, pa.schema(TYPES))
    assert not asked
    assert without_numba.equals(before)


def test_a_numba_that_does_not_load_is_as_good_as_none(monkeypatch, tmp_path):
    package = tmp_path / "numba"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('Numba needs NumPy 1.0 or less')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setattr(layout_reader, "COMPILED_OBJECTS_MIN", 0)
    jit.is_available.cache_clear()
    try:
        values = pa.array([common(number) for number in range(2000)], pa.binary())
        _, read = read_alike(values, pa.schema(TYPES))
    finally:
        jit.is_available.cache_clear()
    assert read.all()
