"""Where batches end: everything is read once, fairly, and a batch is a function of its offsets."""

from hypothesis import given
from hypothesis import strategies as st

from millstream.kernels.plan import SourcePlan
from millstream.kernels.watermarks import PartitionProgress, WatermarkRule
from millstream.spark.source_offsets import SourceOffset, divide, next_offset

IDLE_MS = 1000


def source(name="s", topic="t", idle_ms=IDLE_MS):
    return SourcePlan(0, name, topic, (), None, WatermarkRule(0, idle_ms), (), ())


def at(*offsets, clock_ms=0, active_ms=0):
    progress = tuple(PartitionProgress(offset, active_ms) for offset in offsets)
    return SourceOffset(clock_ms, {"t": progress}, {})


def test_with_nothing_new_the_offset_stays_and_no_batch_is_made():
    start = at(3, 4)
    assert next_offset(start, {"t": [3, 4]}, [source()], clock_ms=500, rows_max=10) is start


def test_a_batch_takes_what_there_is_up_to_its_limit_in_proportion():
    start = at(0, 0, 0)
    ends = {"t": [100, 300, 0]}
    assert next_offset(start, ends, [source()], clock_ms=5, rows_max=400).offsets("t") == [
        100,
        300,
        0,
    ]
    assert next_offset(start, ends, [source()], clock_ms=5, rows_max=40).offsets("t") == [10, 30, 0]


def test_a_partition_that_becomes_idle_makes_a_batch_without_records():
    start = at(3, 4, active_ms=100)
    ends = {"t": [3, 4]}
    quiet = next_offset(start, ends, [source()], clock_ms=1099, rows_max=10)
    assert quiet is start
    idle = next_offset(start, ends, [source()], clock_ms=1100, rows_max=10)
    assert idle.idle == {"s": frozenset({0, 1})}
    assert next_offset(idle, ends, [source()], clock_ms=9999, rows_max=10) is idle


def test_a_partition_with_unread_records_is_not_idle():
    start = at(0, 0)
    later = next_offset(start, {"t": [1000, 0]}, [source()], clock_ms=5000, rows_max=10)
    assert later.idle == {"s": frozenset({1})}


def test_a_partition_that_is_added_is_read_from_its_beginning():
    grown = next_offset(at(5), {"t": [5, 7]}, [source()], clock_ms=1, rows_max=100)
    assert grown.offsets("t") == [5, 7]


def test_an_offset_survives_sparks_log():
    start = next_offset(at(1, 2), {"t": [9, 2]}, [source()], clock_ms=2000, rows_max=99)
    assert SourceOffset.from_json(start.to_json()) == start


counts = st.lists(st.integers(0, 5000), min_size=1, max_size=9)


@given(counts, st.integers(1, 2000))
def test_repeated_batches_read_everything_and_never_too_much(ends, rows_max):
    position = at(*([0] * len(ends)))
    for _ in range(20_000):
        following = next_offset(
            position, {"t": ends}, [source(idle_ms=None)], clock_ms=0, rows_max=rows_max
        )
        if following is position:
            break
        taken = sum(following.offsets("t")) - sum(position.offsets("t"))
        assert 0 < taken < rows_max + len(ends)
        position = following
    assert position.offsets("t") == ends


@given(counts, counts, st.integers(1, 5), st.integers(0, 3000))
def test_tasks_cover_a_batch_exactly_once(starts, more, tasks, rows_min):
    size = min(len(starts), len(more))
    before = at(*starts[:size])
    after = at(*(s + m for s, m in zip(starts, more, strict=False)))
    divided = divide(before, after, [source(), source("other")], tasks=tasks, rows_min=rows_min)
    assert 1 <= len(divided) <= tasks
    for index in (0, 1):
        for partition in range(size):
            splits = [
                s for task in divided for s in task if (s.source, s.partition) == (index, partition)
            ]
            assert [s.number for s in splits] == list(range(len(splits)))
            covered = [offset for s in splits for offset in range(s.start, s.end)]
            assert covered == list(range(starts[partition], starts[partition] + more[partition]))
