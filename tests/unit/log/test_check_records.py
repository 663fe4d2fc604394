"""What a batch from outside is held against: exactly that which readers rely on."""

from __future__ import annotations

import numpy as np
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import CorruptBatchError
from millstream.log.batch import EncodedBatch, as_encoded, finish, read_header
from millstream.log.compression import COMPRESSIONS, compress
from millstream.log.decoding import ALL_COLUMNS, Block, check_records, decode
from millstream.log.encoding import SimpleRecord, encode_records

BODY = 44  # where the records begin in the tail of a batch

rows = st.lists(
    st.builds(
        SimpleRecord,
        st.integers(0, 1 << 40),
        st.none() | st.binary(max_size=20),
        st.none() | st.binary(max_size=60),
        st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=3).map(
            tuple
        ),
    ),
    min_size=1,
    max_size=90,  # few are looked at one by one, many as columns
)


def block(batch: EncodedBatch) -> Block:
    data = batch.prefix(0, 0) + batch.tail
    return Block(data, [(0, read_header(data, 0))], "x", 0)


@settings(max_examples=some(60))
@given(rows, st.sampled_from(COMPRESSIONS))
def test_what_was_encoded_here_passes_and_is_described(rows, compression) -> None:
    facts = check_records(block(compress(encode_records(rows), compression)))
    assert facts.unkeyed == any(row.key is None for row in rows)
    assert facts.max_timestamp_ms == max(row.timestamp_ms for row in rows)


@settings(max_examples=some(300))
@given(rows, st.data())
def test_what_passes_is_decoded_without_an_error(rows, data) -> None:
    """Bytes of the records are changed, and the CRC with them: so nothing but this finds it."""
    good = encode_records(rows)
    body = bytearray(good.tail[BODY:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    bad = block(finish(bytes(body), records=len(rows), timestamps_ms=(0, 0)))
    try:
        check_records(bad)
    except CorruptBatchError:
        return
    found = decode(bad, 0, len(rows), ALL_COLUMNS)
    assert found["offset"].to_pylist() == list(range(len(rows)))


@pytest.mark.parametrize("count", [2, 90])
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_count_that_lies_is_refused(count, wrong) -> None:
    good = encode_records([SimpleRecord(0, b"k", b"v")] * count)
    lying = finish(good.tail[BODY:], records=count + wrong, timestamps_ms=(0, 0))
    with pytest.raises(CorruptBatchError):
        check_records(block(lying))


@pytest.mark.parametrize("count", [3, 90])
def test_offsets_that_do_not_follow_each_other_are_refused(count) -> None:
    """A reader would be given two records at one offset."""
    tail = encode_records([SimpleRecord(0, b"k", b"v")] * count).tail
    body = np.frombuffer(tail[BODY:], np.uint8).copy()
    size = 9  # of each of the first 64
    body[2 * size + 3] = body[size + 3]
    data = finish(body.tobytes(), records=count, timestamps_ms=(0, 0))
    with pytest.raises(CorruptBatchError):
        check_records(block(data))


def test_a_batch_comes_back_from_its_bytes_as_it_was() -> None:
    good = encode_records([SimpleRecord(5, b"k", b"v"), SimpleRecord(3, None, b"w")])
    data = good.prefix(0, 0) + good.tail
    again = as_encoded(data, 0, read_header(data, 0))
    assert (again.tail, again.count, again.max_timestamp_ms) == (good.tail, 2, 5)
