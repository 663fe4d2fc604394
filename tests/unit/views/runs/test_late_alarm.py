"""The alarm over late events: once when their share is too large, and once more after it fell."""

from datetime import UTC, datetime

import pytest

import millstream as ms
from millstream.errors import ConfigError
from millstream.views.runs.late_alarm import BATCHES_WATCHED, LateAlarm
from millstream.views.runs.progress import Progress, Report

AT = datetime(2026, 1, 1, tzinfo=UTC)


def batch(number, read, late):
    return Progress("app", number, AT, 1.0, read, 0, 0, late, 0, 0, 0, None, {}, None, 0)


def run(counts, share=0.01):
    said, seen = [], []
    alarm = LateAlarm(share, said.append)
    take = alarm.wrap(seen.append)
    for number, (read, late) in enumerate(counts):
        take(batch(number, read, late))
    assert len(seen) == len(counts)
    assert alarm.messages == said
    return said


def test_a_share_up_to_the_limit_is_silent():
    assert run([(0, 0), (1000, 10), (1000, 10)]) == []


def test_a_larger_share_is_said_once(caplog):
    said = run([(1000, 0), (1000, 30), (1000, 30), (1000, 30)])
    assert len(said) == 1
    assert said[0].startswith("30 of the 2,000 events of the last 2 batches came too late")
    assert caplog.messages == said


def test_it_is_said_again_only_after_the_share_fell():
    calm = [(1000, 0)] * BATCHES_WATCHED
    assert len(run([(1000, 30), *calm, (1000, 500)])) == 2


def test_the_report_has_the_alarms():
    report = Report("app", "stopped", 1, 1.0, 10, 5, 0, 0, 0, None, {}, ("half came late",))
    assert "alarm: half came late" in str(report)


@pytest.mark.parametrize("share", [0, -0.1, 1.5])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(ConfigError, match="late_alarm is"):
        ms.App("alarm", log="unused", late_alarm=share)


def test_the_report_says_what_bloom_filters_cost():
    report = Report(
        "app", "stopped", 1, 1.0, 10, 0, 0, 0, 0, None, {}, (), {"first": 0.0, "second": 1e-4}
    )
    assert "first takes none of the new events for repeats" in str(report)
    assert "second takes 1 in 10,000 new events for repeats" in str(report)
