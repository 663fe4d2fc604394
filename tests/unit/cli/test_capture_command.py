"""What ``millstream capture`` shows: a bar while rows are read, one line afterwards, and alarms; and what it takes out."""

import io
import re
import sqlite3

import pytest

from millstream.capture.run import CaptureStatus
from millstream.cli.capture_display import CaptureDisplay, line_of
from millstream.cli.main import run

STREAMING = CaptureStatus(
    "streaming", 5_000, 1_234, "0/16B3748", 2.25, "", 3 << 20, 40 << 20, None, "too much"
)


def test_a_line_has_the_position_and_the_lag_in_bytes_and_seconds():
    assert line_of(STREAMING) == (
        "streaming, 5,000 rows of snapshots, 1,234 changes, 3 MiB behind, the last one 2.2 s old, "
        "40 MiB kept by the server, at 0/16B3748"
    )
    assert line_of(CaptureStatus("idle")) == "idle, 0 rows of snapshots, 0 changes"


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def text(self):
        """Return what was written since the last time, without control sequences."""
        found = self.getvalue()
        self.seek(0)
        self.truncate()
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", found)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return Terminal()


def statuses(*rows, expected):
    for count in rows:
        yield CaptureStatus("snapshot", count, 0, "x", rows_expected=expected)


def test_a_snapshot_has_a_bar_with_rows_of_about_how_many_and_then_there_is_a_line(terminal):
    now = iter(range(100))
    with CaptureDisplay(lambda: next(now), terminal) as display:
        for status in statuses(1000, 3000, 6000, expected=10_000):
            display(status)
        display._bar._progress.refresh()
        bar = terminal.text()
        display(STREAMING)
        after = terminal.text()
    assert "5,000 of about 10,000 rows" in bar
    assert "at 0/16B3748" not in bar
    assert line_of(STREAMING) in after


def test_a_bar_goes_beyond_what_the_database_expected(terminal):
    now = iter(range(100))
    with CaptureDisplay(lambda: next(now), terminal) as display:
        for status in statuses(0, 50, 400, expected=100):
            display(status)
        display._bar._progress.refresh()
        assert "400 of about 400 rows" in terminal.text()


def test_without_a_terminal_there_is_a_line_for_each_state_and_alarm():
    stream = io.StringIO()
    now = iter(range(100))
    with CaptureDisplay(lambda: next(now), stream) as display:
        for status in [*statuses(1, 2, expected=3), STREAMING, STREAMING]:
            display(status)
        display.alarm("the disk fills")
    said = stream.getvalue().splitlines()
    assert [line.partition(",")[0] for line in said] == [
        "snapshot",
        "streaming",
        "ALARM: the disk fills",
    ]


def test_what_is_installed_in_a_database_of_sqlite_is_taken_out(tmp_path, capsys):
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    url, to = f"sqlite:///{path}", ["--to", str(tmp_path / "log")]
    assert run(["capture", url, *to, "--until", "caught-up"]) == 0
    assert run(["capture", url, *to, "--remove"]) == 0
    assert "Removed the trigger _millstream_insert_t.\n" in capsys.readouterr().out
    with sqlite3.connect(path) as db:
        left = db.execute("SELECT name FROM sqlite_schema WHERE name LIKE '\\_mill%' ESCAPE '\\'")
        assert left.fetchall() == []
    assert run(["capture", url, *to, "--remove"]) == 0
    assert capsys.readouterr().out == "Nothing of this capture is left in the database.\n"
    assert run(["capture", url, *to, "--until", "caught-up"]) == 1
    assert "is not captured now" in capsys.readouterr().err.replace(
        "not captured", "is not captured"
    )


def test_sizes_that_are_none_are_refused(capsys):
    assert run(["capture", "postgresql://a@b/c", "--wal-max", "much"]) == 2
    assert "--wal-max is 'much'" in capsys.readouterr().err
