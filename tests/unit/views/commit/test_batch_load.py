"""The load of a job: rates by the clock, capacity by the time that batches took, and where it goes."""

from datetime import UTC, datetime

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream.views.commit.batch_load import batch_load


def record(batch_id, second, read, unread, took_ms, run=1, commit_before_ms=None):
    return {
        "batch_id": batch_id,
        "run": run,
        "at": f"2026-01-01T00:00:{second:02}+00:00",
        "duration_ms": took_ms,
        "phases": {"read": took_ms / 4, "stages": took_ms / 2},
        "commit_before_ms": commit_before_ms,
        "read": read,
        "unread": unread,
        "steps": {"w": {"read": read, "worked": 5.0, "late": 1}, "t": {"read": read}},
        "state": {"w": {"bytes": 10 * batch_id, "rows": batch_id}},
    }


def test_rates_are_those_between_the_first_and_the_last_batch():
    records = [
        record(0, 59, 7, 0, 1000.0, run=0),
        record(1, 0, 100, 50, 1000.0),
        record(2, 2, 100, 70, 1000.0, commit_before_ms=200.0),
        record(3, 4, 300, 10, 1600.0, commit_before_ms=200.0),
    ]
    load = batch_load(records)
    # 400 were read in 4 seconds, and 40 fewer are unread: 360 have arrived.
    assert (load.batches, load.seconds, load.read_per_s, load.arriving_per_s) == (3, 4, 100, 90)
    assert load.capacity == (300 / 1.6, 300, False, 1.2, 1.6)
    assert load.busy == pytest.approx(3.0 / 4)
    assert load.phases_ms == {"read": 900.0, "stages": 1800.0, "commit": 400.0}
    assert [(one.step, one.read, one.worked_ms, one.late) for one in load.steps] == [
        ("w", 500, 15.0, 3),
        ("t", 500, 0.0, 0),
    ]
    assert (load.steps[0].state_bytes, load.steps[0].state_rows) == (30, 3)
    assert load.catch_up(70) == (pytest.approx(1.2 + 70 / (300 / 1.6)), False)
    assert load.catch_up(0) == (0, False)
    assert load.catch_up(301) == (None, False), "no batch had so many"


def test_a_job_that_gets_more_than_it_can_read_never_catches_up():
    records = [record(number, number, 10, 90 * number, 1000.0) for number in range(1, 7)]
    load = batch_load(records)
    assert load.arriving_per_s == load.usually_arriving_per_s == 100
    assert load.catch_up(540) == (None, True)
    assert batch_load(records[:4]).catch_up(360) == (None, False), "of so few nothing is usual"


def test_without_a_second_batch_there_is_no_rate():
    assert batch_load([]).phases_ms == {}
    load = batch_load([record(1, 0, 10, 0, 1000.0)])
    assert (load.arriving_per_s, load.busy, load.capacity.per_s) == (None, None, 10)
    assert load.catch_up(5) == (None, False)


class Job:
    """A job whose batches take a time each, and one for each record, and read no more than so many."""

    def __init__(self, each_s, record_s, arriving_per_s, batch_max):
        self.each_s, self.record_s = each_s, record_s
        self.arriving_per_s, self.batch_max = arriving_per_s, batch_max
        self.now_s, self.unread, self.records = 0.0, 0.0, []

    def batch(self, wait_s=0.0):
        """Process a batch after a wait; return whether it took all there was."""
        self.now_s += wait_s
        self.unread += wait_s * self.arriving_per_s
        read = min(int(self.unread), self.batch_max)
        took_s = self.each_s + read * self.record_s
        all_of_it = read == int(self.unread)
        self.now_s += took_s
        self.unread += took_s * self.arriving_per_s - read
        at = datetime.fromtimestamp(self.now_s, UTC).isoformat()
        number = len(self.records)
        made = record(number, 0, read, int(self.unread), took_s * 1000)
        self.records.append({**made, "at": at, "phases": {}})
        return all_of_it


@example(  # most batches were empty, also of the fullest quarter
    each_s=0.05078125,
    record_s=0.0078125,
    used=0.01,
    batch_max=15,
    burst=0.02734375,
    batches=35,
    wait_s=0.0,
)
@example(  # no batch was short, but a record takes next to nothing of one
    each_s=0.0625, record_s=0.0078125, used=0.0625, batch_max=34, burst=0.0, batches=2, wait_s=5.0
)
@settings(max_examples=100, deadline=None)
@given(
    each_s=st.floats(0.05, 2),
    record_s=st.floats(1e-5, 1e-2),
    used=st.floats(0.01, 3),
    batch_max=st.integers(10, 100_000),
    burst=st.floats(0, 100),
    batches=st.integers(2, 60),
    wait_s=st.sampled_from([0.0, 0.5, 5.0]),
)
def test_an_estimate_is_what_a_simulated_job_does(
    each_s, record_s, used, batch_max, burst, batches, wait_s
):
    full_per_s = batch_max / (each_s + batch_max * record_s)
    job = Job(each_s, record_s, used * full_per_s, batch_max)
    for number in range(batches):
        if number == batches // 2:
            job.unread += burst * batch_max
        job.batch(wait_s if job.unread < batch_max else 0.0)
    unread, now_s = int(job.unread), job.now_s
    seconds, never = batch_load(job.records[-60:]).catch_up(unread)
    keeps_up = job.arriving_per_s < full_per_s
    if not unread:
        assert seconds == 0
    elif never:
        assert used > 0.9, "it would have caught up"
    elif seconds is not None and keeps_up and used < 0.8:
        while not job.batch():
            pass
        took_s = job.now_s - now_s
        one_s = each_s + min(batch_max, unread + 1) * record_s
        # Of a job whose batches were all large, nobody can say how short a small one is.
        longest_s = max(each_s + one["read"] * record_s for one in job.records[:batches])
        within_one = longest_s if unread <= batch_max else 0.0
        assert took_s / 3 - one_s <= seconds <= max(3 * took_s + one_s, within_one)
