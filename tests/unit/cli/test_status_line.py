"""The line that says how far a source or an apply is, where it is not shown on a terminal."""

from __future__ import annotations

from millstream.capture.apply.run import ApplyStatus
from millstream.cli.apply import ApplyLine
from millstream.cli.source import line_of
from millstream.cli.status_line import StatusLine
from millstream.connectors.source import SourceStatus


def test_a_line_is_shown_where_the_state_changes_and_an_alarm_where_it_is_another(capsys):
    line = StatusLine(line_of, monotonic_s=iter(range(0, 100, 2)).__next__)
    alarms = ("", "a", "a", "b", "", "a")
    states = ("idle", "idle", "streaming", "streaming", "idle", "idle")
    for alarm, state in zip(alarms, states, strict=True):
        line.alarm(alarm)
        line(SourceStatus(state))
    line.end("done")
    said = capsys.readouterr()
    shown = [text.partition(",")[0] for text in said.err.splitlines()]
    assert shown == ["idle", "ALARM: a", "streaming", "ALARM: b", "idle", "ALARM: a"]
    assert said.out == "done\n"


def test_an_apply_says_how_fast_it_is_and_what_is_left():
    status = ApplyStatus("applying", changes=1000, done=0.25)
    line = ApplyLine(iter((0.0, 10.0)).__next__)
    assert "left" not in line(status)
    later = ApplyStatus("applying", changes=3000, done=0.5)
    assert line(later).endswith(", 200 changes/s, about 10 s left")
