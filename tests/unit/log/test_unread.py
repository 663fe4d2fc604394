"""Only records are counted as unread, exactly near the end and by offsets far from it."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import CorruptBatchError, CorruptionError
from millstream.log.unread import BLOCKS_MAX, count_unread


class Partition:
    """A partition that has records at some offsets, and gives them in blocks of a few."""

    def __init__(self, offsets, block, damaged=None, error=None):
        self.offsets, self.block, self.damaged = sorted(offsets), block, damaged
        self.error = error

    def read(self, topic, partition, start, end, *, columns, bytes_max):
        wanted = [offset for offset in self.offsets if start <= offset < end]
        for at in range(0, len(wanted), self.block):
            part = wanted[at : at + self.block]
            if self.damaged is not None and part[-1] >= self.damaged:
                raise self.error
            yield pa.record_batch([pa.array(part, pa.int64())], names=["offset"])


@given(st.sets(st.integers(0, 60)), st.integers(0, 70), st.integers(0, 70), st.integers(1, 20))
def test_what_is_near_is_exact_and_the_rest_is_never_below_the_truth(offsets, start, end, block):
    truth = sum(start <= offset < end for offset in offsets)
    found = count_unread(Partition(offsets, block), "t", 0, start, end)
    if truth <= block * (BLOCKS_MAX - 1):
        assert found == truth
    assert truth <= found <= max(end - start, 0)
    assert (found == 0) == (truth == 0)


@pytest.mark.parametrize(
    "error",
    [
        CorruptBatchError("a damaged batch", path="p", position=0),
        CorruptionError("a damaged list of aborted transactions"),
    ],
)
@pytest.mark.parametrize(("damaged", "unread"), [(0, 10), (4, 9)])
def test_what_cannot_be_read_counts_as_unread(damaged, unread, error):
    partition = Partition(range(0, 10, 2), 1, damaged, error)
    assert count_unread(partition, "t", 0, 0, 10) == unread
