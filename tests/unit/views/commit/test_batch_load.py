"""The load of a job: rates by the clock, capacity by the time that batches took, and where it goes."""

import pytest

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
    assert load.capacity_per_s == pytest.approx(500 / 4.0)
    assert load.busy == pytest.approx(3.0 / 4)
    assert load.phases_ms == {"read": 900.0, "stages": 1800.0, "commit": 400.0}
    assert [(one.step, one.read, one.worked_ms, one.late) for one in load.steps] == [
        ("w", 500, 15.0, 3),
        ("t", 500, 0.0, 0),
    ]
    assert (load.steps[0].state_bytes, load.steps[0].state_rows) == (30, 3)
    assert load.catch_up_s(70) == pytest.approx(70 / 35)
    assert load.catch_up_s(0) == 0


def test_a_job_that_gets_more_than_it_can_read_never_catches_up():
    load = batch_load([record(1, 0, 10, 0, 1000.0), record(2, 1, 10, 90, 1000.0)])
    assert load.arriving_per_s == 100
    assert load.catch_up_s(90) is None


def test_without_a_second_batch_there_is_no_rate():
    assert batch_load([]).phases_ms == {}
    load = batch_load([record(1, 0, 10, 0, 1000.0)])
    assert (load.arriving_per_s, load.busy, load.capacity_per_s) == (None, None, 10)
    assert load.catch_up_s(5) is None
