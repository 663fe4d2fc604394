import io
from datetime import UTC, datetime

import pytest

from millstream.pipeline.progress_table import ProgressTable
from millstream.views.runs.progress import Progress


def progress(number, **values):
    given = {
        "app": "ads",
        "batch_id": number,
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "duration_ms": 250.0,
        "read": 1000,
        "emitted": 10,
        "held": 990,
        "late": 3,
        "filtered": 0,
        "dead": 0,
        "duplicate": 0,
        "watermark": datetime(2026, 1, 1, 12, tzinfo=UTC),
        "lag": {"clicks/0": 1500, "clicks/1": 0},
        "behind_s": 90.0,
        "state_bytes": 5 << 20,
    }
    return Progress(**{**given, **values})


def test_where_there_is_no_terminal_a_line_is_printed_at_most_once_a_second():
    out, now = io.StringIO(), iter([0.0, 0.5, 1.5])
    with ProgressTable(out, clock=lambda: next(now)) as live:
        for number in range(3):
            live.show(progress(number))
    lines = out.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["batch 0", "batch 2"]
    assert lines[0] == (
        "batch 0: read 1,000 in 250 ms, unread 1,500, behind 90.0 s, watermark "
        "2026-01-01 12:00:00+00:00, late 3, dead 0, state 5.0 MiB"
    )


def test_before_anything_is_known_a_dash_stands_for_it():
    out = io.StringIO()
    with ProgressTable(out) as live:
        live.show(progress(0, watermark=None, behind_s=None, state_bytes=12))
    assert "behind -, watermark -" in out.getvalue()
    assert out.getvalue().rstrip().endswith("state 12 B")


@pytest.mark.parametrize(("behind_s", "said"), [(0.25, "0.2 s"), (600, "10 min"), (86_400, "24 h")])
def test_being_behind_is_said_in_the_unit_that_fits(behind_s, said):
    out = io.StringIO()
    with ProgressTable(out) as live:
        live.show(progress(0, behind_s=behind_s))
    assert f"behind {said}," in out.getvalue()


def test_the_false_positive_rate_of_bloom_filters_is_shown():
    out = io.StringIO()
    with ProgressTable(out) as live:
        live.show(progress(0, false_positive_rates={"dedup(id)": 5e-5}))
    assert out.getvalue().rstrip().endswith("dedup(id) false positives 1 in 20,000")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_one_table_is_drawn_again_with_totals(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, now = Terminal(), iter([0.0, 10.0])
    with ProgressTable(out, clock=lambda: next(now)) as live:
        live.show(progress(0, false_positive_rates={"dedup(id)": 0.0}))
        live.show(progress(1, false_positive_rates={"dedup(id)": 0.001}))
    drawn = out.getvalue()
    assert "2,000" in drawn  # read, both batches together
    assert "4,000" in drawn  # a second
    assert "1 in 1,000" in drawn
    assert "batch 0:" not in drawn


def test_what_is_being_started_is_said_at_once_and_notices_stay():
    out = io.StringIO()
    with ProgressTable(out) as live:
        live.phase("starting Java 21")
        live.note("created topic 'clcks'")
    assert out.getvalue().splitlines() == ["starting Java 21 …", "created topic 'clcks'"]


def test_in_a_terminal_a_notice_stays_above_what_is_drawn_again(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with ProgressTable(out) as live:
        live.phase("starting Spark")
        live.note("created topic 'clcks'")
        live.show(progress(0))
    assert "starting Spark …" in out.getvalue()
    assert "created topic 'clcks'" in out.getvalue()
