from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as kafka_murmur2

from millstream.log.murmur2 import murmur2, partition_of, partitions_of


# Kafka UtilsTest.testMurmur2, as unsigned numbers.
@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_hashes_are_those_of_kafkas_java_client(key: bytes, hashed: int) -> None:
    assert murmur2(key) == hashed % 2**32


@given(st.binary(max_size=64))
def test_hashes_agree_with_kafka_python(key: bytes) -> None:
    assert murmur2(key) == kafka_murmur2(key)


@given(st.lists(st.none() | st.binary(max_size=300)), st.integers(1, 100), st.integers(0, 3))
def test_a_column_of_keys_goes_where_each_key_alone_goes(
    keys: list[bytes | None], partitions: int, skip: int
) -> None:
    column = pa.array(keys, pa.binary()).slice(skip)
    expected = [-1 if key is None else partition_of(key, partitions) for key in keys[skip:]]
    assert partitions_of(column, partitions).tolist() == expected
