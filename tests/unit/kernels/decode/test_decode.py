"""Decoding: every good record gives its row, every other one its reason, none is lost."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.kernels.decode import Field, JsonDecoder

DECODER = JsonDecoder(
    (Field("n", pa.int64(), required=True), Field("s", pa.string(), required=False))
)
GOOD = b'{"n": 7, "s": "x", "other": [1, {"deep": null}]}'
BAD = [
    b"nonsense",
    b"",
    b"   ",
    b"[1]",
    b"5",
    b"null",
    b'{"n": "7"}',
    b'{"n": 1.5}',
    b'{"n": true}',
    b'{"n": null}',
    b'{"s": "no n"}',
    b'{"n": 99999999999999999999}',
    b'{"n": 1}{"n": 2}',
    b'{"n": 1} {"n": 2}',
    b'{"n": 1}\n{"n": 2}',
    b'{"n": 1}x',
    b'{"n": {"b": 1}}',
    b'{"n": 1, "s": "open',
    b'{"n": 1, "s": "open}',
    None,
]


def decode(*values):
    return DECODER.decode(pa.array(values, pa.binary()))


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_record_is_dead_and_its_neighbours_live(bad):
    decoded = decode(GOOD, bad, GOOD)
    assert decoded.table.column("n").to_pylist() == [7, 7]
    assert decoded.good.tolist() == [0, 2]
    ((position, reason),) = decoded.errors
    assert position == 1
    assert reason


def test_a_record_may_be_spread_over_lines():
    assert decode(b'{"n":\n 3}').table.column("n").to_pylist() == [3]


def test_no_records_are_no_rows():
    assert decode().table.num_rows == 0


def test_a_missing_optional_field_is_null():
    assert decode(b'{"n": 1}').table.column("s").to_pylist() == [None]


def test_times_and_decimals_are_exact():
    decoder = JsonDecoder(
        (
            Field("at", pa.timestamp("us", "UTC"), required=True),
            Field("cost", pa.decimal128(38, 9), required=True),
        )
    )
    value = b'{"at": "2026-03-08T04:59:59.000001+02:00", "cost": 0.1}'
    row = decoder.decode(pa.array([value])).table.to_pylist()[0]
    assert row["at"] == datetime(2026, 3, 8, 2, 59, 59, 1, UTC)
    assert row["cost"] == Decimal("0.1")


@given(st.lists(st.one_of(st.integers(-9, 9), st.sampled_from([b for b in BAD if b]))))
def test_good_and_dead_together_are_all_records(values):
    encoded = [json.dumps({"n": v}).encode() if isinstance(v, int) else v for v in values]
    decoded = decode(*encoded)
    expected = [(at, v) for at, v in enumerate(values) if isinstance(v, int)]
    got = zip(decoded.good.tolist(), decoded.table.column("n").to_pylist(), strict=True)
    assert list(got) == expected
    dead = [at for at, v in enumerate(values) if not isinstance(v, int)]
    assert [at for at, _ in decoded.errors] == dead


def test_a_slice_of_an_array_decodes_as_itself():
    values = pa.array([b"bad", GOOD, b'{"n": 1}', b"bad"], pa.binary())
    assert DECODER.decode(values[1:3]).table.column("n").to_pylist() == [7, 1]


@pytest.mark.parametrize("texts", [[b"{}", b"{}"], [b"{}", b"bad", b'{"n": 1}', None], [b"bad"]])
def test_where_no_field_is_wanted_good_records_are_rows_all_the_same(texts):
    decoded = JsonDecoder(()).decode(pa.array(texts, pa.binary()))
    assert decoded.table.num_rows == len(decoded.good)
    assert len(decoded.good) + len(decoded.errors) == len(texts)


def test_a_stream_of_which_no_field_is_wanted_counts_beside_dead_records():
    @dataclass
    class Event:
        n: int

    app = ms.App("counts", log="none")
    events = app.topic("t", Event).stream(watermark=ms.watermark("1 minute"))
    events.window(ms.tumbling("1 day")).emit("update").agg(n=ms.count()).view("counted")
    assert app.plan().sources[0].fields == ()
    out = testing.run(app, {"t": [{"n": 1}, b"bad", {"n": 2}]}, partitions=1)
    assert out["counted"]["n"].to_list() == [2]
    assert out.dead["value"].to_list() == [b"bad"]
