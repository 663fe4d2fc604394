"""Encoding and decoding, against kafka-python and aiokafka in both directions, and under damage."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AioBatch
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AioBuilder
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch as KafkaBatch
from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaBuilder

from millstream.errors import CorruptBatchError, RecordTooLargeError
from millstream.log.batch import COMPRESSION_MASK, HEADER_BYTES, EncodedBatch, finish, walk
from millstream.log.compression import COMPRESSIONS, CompressionName, compress
from millstream.log.decoding import ALL_COLUMNS, SCHEMA, Block, decode
from millstream.log.encoding import SimpleRecord, encode_columns, encode_records, split_columns

payloads = st.none() | st.binary(max_size=200) | st.binary(max_size=9).map(lambda some: some * 50)
header_lists = st.lists(
    st.tuples(st.text(max_size=9), st.none() | st.binary(max_size=9)), max_size=3
)
rows_lists = st.lists(
    st.builds(
        SimpleRecord,
        st.integers(0, 2**42),
        payloads,
        payloads,
        st.just(()) | header_lists.map(tuple),
    ),
    min_size=1,
    max_size=60,
)
plain_rows_lists = st.lists(
    st.builds(SimpleRecord, st.integers(0, 2**42), payloads, payloads, st.just(())),
    min_size=1,
    max_size=60,
)
codecs = st.sampled_from(COMPRESSIONS)


def columns_of(rows: Sequence[SimpleRecord]) -> tuple[np.ndarray, pa.Array, pa.Array, pa.Array]:
    pairs = [[{"key": key, "value": value} for key, value in row.headers] for row in rows]
    return (
        np.array([row.timestamp_ms for row in rows], np.int64),
        pa.array([row.key for row in rows], pa.binary()),
        pa.array([row.value for row in rows], pa.binary()),
        pa.array(pairs, SCHEMA.field("headers").type),
    )


def stamped(batch: EncodedBatch, offset: int = 0) -> bytes:
    return batch.prefix(offset, 7) + batch.tail


def block_of(data: bytes, offset: int = 0) -> Block:
    return Block(data, list(walk(data, offset, path="a.log")), "a.log", 0)


def rows_of(data: bytes, offset: int = 0) -> list[tuple[object, ...]]:
    batch = decode(block_of(data, offset), 0, 2**62, ALL_COLUMNS)
    batch.validate(full=True)
    return list(zip(*(plain(batch[name], name) for name in ALL_COLUMNS), strict=True))


def plain(column: pa.Array, name: str) -> list[object]:
    if name == "timestamp":
        return column.cast(pa.int64()).to_pylist()
    if name == "headers":
        return [tuple((one["key"], one["value"]) for one in some) for some in column.to_pylist()]
    return column.to_pylist()


def expected(rows: Sequence[SimpleRecord], offset: int = 0) -> list[tuple[object, ...]]:
    return [(offset + number, *row) for number, row in enumerate(rows)]


def with_crc(content: bytearray) -> bytes:
    content[17:21] = google_crc32c.value(bytes(content[21:])).to_bytes(4, "big")
    return bytes(content)


@given(rows_lists, codecs, st.integers(0, 2**40))
def test_what_is_encoded_is_read_back_and_by_kafka_python_and_aiokafka(
    rows: list[SimpleRecord], name: CompressionName, offset: int
) -> None:
    for batch in (
        encode_records(rows[:20]),
        encode_records(rows),
        encode_columns(*columns_of(rows)),
    ):
        data = stamped(compress(batch, name), offset)
        wanted = expected(rows[: batch.count], offset)
        assert rows_of(data, offset) == wanted
        for reader in (KafkaBatch(data), AioBatch(data)):
            assert reader.validate_crc()
            found = [(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in reader]
            assert found == wanted


@given(rows_lists, codecs, st.sampled_from([KafkaBuilder, AioBuilder]))
def test_batches_of_kafka_python_and_aiokafka_are_read(
    rows: list[SimpleRecord], name: CompressionName, builder_class: type
) -> None:
    builder = builder_class(
        magic=2,
        compression_type=COMPRESSIONS.index(name),
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 20,
    )
    for number, row in enumerate(rows):
        builder.append(number, row.timestamp_ms, row.key, row.value, list(row.headers))
    assert rows_of(bytes(builder.build())) == expected(rows)


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("builder_class", [KafkaBuilder, AioBuilder])
def test_batches_of_several_blocks_are_exchanged_with_other_programs(
    name: CompressionName, builder_class: type
) -> None:
    rows = [
        SimpleRecord(n, b"key-%d" % n, b"value %d " % n * 40, (("n", b"%d" % n),) if n % 2 else ())
        for n in range(1000)
    ]
    made = compress(encode_records(rows), name)
    assert made.attributes == COMPRESSIONS.index(name)
    builder = builder_class(2, COMPRESSIONS.index(name), 0, -1, -1, -1, 1 << 20)
    for number, row in enumerate(rows):
        builder.append(number, row.timestamp_ms, row.key, row.value, list(row.headers))
    theirs = bytes(builder.build())
    assert theirs[22] == COMPRESSIONS.index(name)
    assert rows_of(theirs) == rows_of(stamped(made)) == expected(rows)
    for reader in (KafkaBatch(stamped(made)), AioBatch(stamped(made))):
        assert [(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in reader] == (
            expected(rows)
        )


@given(plain_rows_lists)
def test_rows_and_columns_are_encoded_to_the_same_bytes(rows: list[SimpleRecord]) -> None:
    times, keys, values, _ = columns_of(rows)
    assert encode_columns(times, keys, values) == encode_records(rows)


@given(st.lists(st.tuples(rows_lists, codecs), min_size=1, max_size=5), st.data())
def test_any_range_and_any_columns_of_several_batches_are_what_was_put_in(
    groups: list[tuple[list[SimpleRecord], CompressionName]], data: st.DataObject
) -> None:
    content, rows = b"", []
    for group, codec in groups:
        content += stamped(compress(encode_records(group), codec), len(rows))
        rows += group
    start = data.draw(st.integers(0, len(rows)))
    end = data.draw(st.integers(start, len(rows)))
    names = data.draw(st.lists(st.sampled_from(ALL_COLUMNS), min_size=1, unique=True))
    batch = decode(block_of(content), start, end, names)
    wanted = [dict(zip(ALL_COLUMNS, row, strict=True)) for row in expected(rows)[start:end]]
    assert batch.schema.names == names
    for name in names:
        assert plain(batch[name], name) == [row[name] for row in wanted]


@pytest.mark.parametrize("sizes", [[1] * 900, [2] * 400, [3, 1] * 300])
def test_many_small_batches_are_read_as_one_table(sizes: list[int]) -> None:
    rows = [
        SimpleRecord(n, b"k%d" % n, None if n % 5 == 0 else b"v" * (n % 90))
        for n in range(sum(sizes))
    ]
    content, at = b"", 0
    for size in sizes:
        content += stamped(encode_records(rows[at : at + size]), at)
        at += size
    assert rows_of(content) == expected(rows)


@pytest.mark.parametrize("value_bytes", [0, 50, 60, 100, 9000])
def test_runs_of_equal_lengths_are_found_whole(value_bytes: int) -> None:
    rows = [SimpleRecord(5, None, b"x" * (value_bytes + (n % 97 == 0))) for n in range(3000)]
    assert rows_of(stamped(encode_columns(*columns_of(rows)))) == expected(rows)


@pytest.mark.parametrize("spread_ms", [1, 2**40, 2**54, 2**61])
def test_timestamps_however_far_apart_are_kept(spread_ms: int) -> None:
    rows = [SimpleRecord(n % 3 * spread_ms, None, b"v") for n in range(500)]
    assert rows_of(stamped(encode_records(rows))) == expected(rows)


def test_sliced_columns_and_columns_without_keys_or_values_are_encoded() -> None:
    rows = [SimpleRecord(n, b"k%d" % n, b"v%d" % n) for n in range(40)]
    times, keys, values, _ = columns_of(rows)
    batch = encode_columns(times[5:30], keys.slice(5, 25), values.slice(5, 25))
    assert [row[2] for row in rows_of(stamped(batch))] == [row.key for row in rows[5:30]]
    nulls = pa.nulls(40, pa.binary())
    for given_keys in (None, nulls):
        data = stamped(encode_columns(times, given_keys, nulls))
        assert {row[2:4] for row in rows_of(data)} == {(None, None)}


@pytest.mark.not_in_lane("thresholds", "batches are smaller there")
def test_columns_are_split_by_size_and_a_large_record_travels_alone() -> None:
    values = pa.array([b"a" * 100] * 50 + [b"b" * 5000] + [b"c" * 100] * 50, pa.binary())
    parts = list(split_columns(np.zeros(101, np.int64), None, values, bytes_max=2000))
    assert sum(part.count for part in parts) == 101
    assert max(part.size for part in parts if part.count > 1) <= 2000 + HEADER_BYTES
    assert [part.count for part in parts if part.size > 5000] == [1]


def test_a_record_of_sixteen_mebibytes_is_kept_and_one_above_the_limit_refused() -> None:
    row = SimpleRecord(1, b"k", bytes(16 << 20))
    assert rows_of(stamped(encode_records([row]))) == expected([row])
    with pytest.raises(RecordTooLargeError, match="67,108,864"):
        encode_records([SimpleRecord(1, None, bytes((64 << 20) + 1))])


@given(rows_lists, codecs, st.data())
def test_any_changed_byte_is_found(
    rows: list[SimpleRecord], name: CompressionName, data: st.DataObject
) -> None:
    content = bytearray(stamped(compress(encode_records(rows), name)))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    if 12 <= place < 16:
        return  # the leader epoch says who wrote it, and changes nothing of what is read
    try:
        found = rows_of(bytes(content))
    except CorruptBatchError as error:
        assert error.path == "a.log"
    else:
        # A batch that claims to be longer than the file is taken for one not wholly written.
        assert found == [] and 8 <= place < 12  # noqa: PT018


@pytest.mark.parametrize("value_bytes", [100, 16_000, 17_000, 1_000_000])
def test_a_changed_bit_is_found_in_batches_of_any_size(value_bytes: int) -> None:
    before = stamped(encode_records([SimpleRecord(1, None, b"before")]), 0)
    data = bytearray(
        before + stamped(encode_records([SimpleRecord(1, b"k", bytes(value_bytes))]), 1)
    )
    assert len(list(walk(bytes(data), 0))) == 2
    for at in (len(before) + 21, len(before) + value_bytes // 2 + 61, len(data) - 1):
        data[at] ^= 1
        with pytest.raises(CorruptBatchError, match="CRC-32C"):
            list(walk(bytes(data), 0))
        data[at] ^= 1


@settings(deadline=None)
@given(rows_lists, codecs, st.data())
def test_a_lying_batch_with_a_right_crc_gives_an_error_and_nothing_worse(
    rows: list[SimpleRecord], name: CompressionName, data: st.DataObject
) -> None:
    content = bytearray(stamped(encode_records(rows)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(23, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    content[21:23] = b"\0\0"
    lie = EncodedBatch(bytes(content[17:]), 1, 0)
    try:
        found = rows_of(with_crc(bytearray(stamped(compress(lie, name)))))
    except CorruptBatchError:
        return
    assert len(found) <= len(content)


@given(rows_lists, codecs, st.data())
def test_lies_in_compressed_bytes_with_a_right_crc_give_an_error_and_nothing_worse(
    rows: list[SimpleRecord], name: CompressionName, data: st.DataObject
) -> None:
    content = bytearray(stamped(compress(encode_records(rows), name)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(23, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    content[22] = content[22] & ~COMPRESSION_MASK | data.draw(st.integers(0, 7))
    try:
        rows_of(with_crc(content))
    except CorruptBatchError as error:
        assert error.path == "a.log"


def test_a_record_length_of_more_than_five_bytes_is_refused() -> None:
    # Read from its first byte it leads beyond the batch, from its second to the end of it.
    body = b"\x8e\x90\x80\x80\x80\x00" + b"\0\0\0\1\1\0\0\0"
    with pytest.raises(CorruptBatchError, match="a record length"):
        rows_of(stamped(finish(body, records=2, timestamps_ms=(0, 0))))


def test_an_error_names_the_batch_of_several_that_is_damaged() -> None:
    first, last = (encode_records([SimpleRecord(0, b"k", b"v" * 50)] * 20) for _ in range(2))
    content = bytearray(stamped(last, 20))
    content[HEADER_BYTES + 5] = 200  # its first key cannot be that long
    content[HEADER_BYTES + 6] = 1
    with pytest.raises(CorruptBatchError) as caught:
        rows_of(stamped(first) + with_crc(content))
    assert caught.value.position == first.size
    assert "offset 20" in str(caught.value)


@pytest.mark.parametrize("count", [-1, 0, 2, 1 << 20, (1 << 31) - 1])
def test_a_count_that_lies_is_refused_before_anything_is_allocated(count: int) -> None:
    content = bytearray(stamped(encode_records([SimpleRecord(1, b"key", b"value" * 100)])))
    struct.pack_into(">i", content, 23, max(count - 1, 0))
    struct.pack_into(">i", content, 57, count)
    if count == 0:
        assert rows_of(with_crc(content)) == []
    else:
        with pytest.raises(CorruptBatchError):
            rows_of(with_crc(content))
