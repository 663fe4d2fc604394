"""Buckets go under labels that Spark's hash spreads evenly over its partitions."""

import pytest

from millstream.spark.shuffle import _murmur3, bucket_labels


def test_the_hash_is_sparks():
    # SELECT hash(n) in Spark 4.3
    assert [_murmur3(n) for n in (0, 1, 42)] == [933211791, -559580957, 29417773]


@pytest.mark.parametrize(("buckets", "partitions"), [(1, 1), (4, 2), (8, 3), (3, 8), (64, 16)])
def test_every_partition_gets_its_share(buckets, partitions):
    labels = bucket_labels(buckets, partitions)
    assert len(set(labels)) == buckets
    assert [_murmur3(label) % partitions for label in labels] == [
        bucket % partitions for bucket in range(buckets)
    ]


def test_labels_are_the_same_every_time():
    assert bucket_labels(8, 3) == bucket_labels(8, 3)
