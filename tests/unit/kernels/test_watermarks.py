"""Watermarks: per partition, the minimum over the active, never back."""

from millstream.kernels.watermarks import (
    UNSEEN,
    InputClock,
    LaneTime,
    PartitionProgress,
    SourceTime,
    WatermarkRule,
    idle_partitions,
    lane_of,
)

RULE = WatermarkRule(delay_us=0, idle_ms=None)


def saw(*times, idle=(), count=2):
    lanes = tuple(LaneTime(partition, split, time) for partition, split, time in times)
    return SourceTime(lanes, count, frozenset(idle))


def test_the_watermark_is_the_minimum_over_the_partitions():
    clock = InputClock.fresh().after(saw((0, 0, 100), (1, 0, 10)), RULE)
    assert clock.watermark_us == 10


def test_a_partition_that_has_shown_nothing_holds_the_watermark():
    assert InputClock.fresh().after(saw((0, 0, 100)), RULE).watermark_us == UNSEEN


def test_an_idle_partition_is_left_out_and_finds_the_watermark_when_it_returns():
    clock = InputClock.fresh().after(saw((0, 0, 100), (1, 0, 10)), RULE)
    clock = clock.after(saw(idle=[1]), RULE)
    assert clock.watermark_us == 100
    back = saw((1, 0, 50))
    assert clock.baselines(back, RULE, 0)[lane_of(0, 1, 0)] == 100  # so 50 is late, by 50
    clock = clock.after(back, RULE)
    assert clock.watermark_us == 100
    clock = clock.after(saw((1, 0, 120), (0, 0, 105)), RULE)
    assert clock.watermark_us == 105


def test_when_all_partitions_are_idle_the_watermark_holds():
    clock = InputClock.fresh().after(saw((0, 0, 100), (1, 0, 90)), RULE)
    assert clock.after(saw(idle=[0, 1]), RULE).watermark_us == 90


def test_a_second_split_is_held_to_what_the_first_had_seen():
    rule = WatermarkRule(delay_us=5, idle_ms=None)
    clock = InputClock.fresh().after(saw((0, 0, 100), count=1), rule)
    baselines = clock.baselines(saw((0, 0, 200), (0, 1, 300), count=1), rule, 0)
    assert baselines == {lane_of(0, 0, 0): 95, lane_of(0, 0, 1): 195}


def test_messages_of_several_tasks_merge_in_any_order():
    one, other = saw((0, 1, 7)).to_message(), saw((1, 0, None), (0, 0, 9)).to_message()
    assert SourceTime.merge([one, other]) == SourceTime.merge([other, one])
    assert SourceTime.merge([one, other]).lanes[0] == LaneTime(0, 0, 9)


def test_a_clock_survives_its_message():
    clock = InputClock.fresh().after(saw((0, 0, 100), (1, 0, 10)), RULE)
    assert InputClock.from_message(clock.to_message()) == clock


def test_idle_is_counted_in_running_time_and_never_while_records_wait():
    progress = [PartitionProgress(5, 0), PartitionProgress(5, 900), PartitionProgress(5, 0)]
    behind = [False, False, True]
    assert idle_partitions(progress, behind, 1000, 1000) == {0}
    assert idle_partitions(progress, behind, 999, 1000) == set()
    assert idle_partitions(progress, behind, 1_000_000, None) == set()
