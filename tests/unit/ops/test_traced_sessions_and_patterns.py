"""Sessions and patterns: what became of each record, and which are behind a row, by dictionaries.

A model of the rules in the documentation: a session ends where a gap follows; a match is a cart without a payment within
a minute after it.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from edited_app import EditedApp

from millstream.ops.record_trace import trace_record
from millstream.ops.value_records import records_behind

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
GAP = timedelta(seconds=30)
SOURCE = """
from datetime import datetime

import polars as pl

import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
clicks = app.topic("clicks", {"ad": str, "kind": str, "at": datetime})
stream = clicks.stream(time="at", watermark=ms.watermark("5 seconds"))
visits = stream.window(ms.session("30 seconds"), by="ad", name="visits")
visits.agg(n=ms.count()).view("visits")
bought = ms.sequence("cart", pl.col("kind") == "cart").followed_by("pay", pl.col("kind") == "pay").within("1 minute")
stream.match(bought, by="ad", measures={"paid": ms.matched("pay").count()}, name="bought").view(
    "bought", key=["ad", "match_start"]
)
"""
# Seconds after the start, kind. The one at 35 is late: its session has ended, as the one at 98 has been seen by then.
CLICKS = (
    (0, "cart"),
    (10, "show"),
    (20, "pay"),
    (70, "cart"),
    (98, "show"),
    (35, "show"),
    (105, "pay"),
    (300, "show"),
)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    edited = EditedApp(tmp_path_factory.mktemp("sessions"), 1, 1, SOURCE)
    edited.create()
    edited.append({"ad": "a0", "kind": kind, "at": at(second)} for second, kind in CLICKS)
    found = edited.write()
    edited.run(found)
    return found


def at(second):
    return START + timedelta(seconds=second)


def late_offsets():
    """A record is late for a step if the watermark that it saw is behind its time: 5 seconds before the latest."""
    latest, found = None, set()
    for offset, (second, _) in enumerate(CLICKS):
        if latest is not None and second + GAP.seconds <= latest - 5:
            found.add(offset)
        latest = second if latest is None else max(latest, second)
    return found


def sessions():
    """Start, end and offsets of each session of the records that were in time."""
    there = sorted(
        (second, offset)
        for offset, (second, _) in enumerate(CLICKS)
        if offset not in late_offsets()
    )
    found = [[there[0]]]
    for before, one in pairwise(there):
        if one[0] - before[0] >= GAP.seconds:
            found.append([])
        found[-1].append(one)
    return {
        (at(rows[0][0]), at(rows[-1][0]) + GAP): [offset for _, offset in rows] for rows in found
    }


def test_each_record_is_in_its_session_or_late(app):
    of_record = {offset: bounds for bounds, offsets in sessions().items() for offset in offsets}
    for offset in range(len(CLICKS)):
        found = trace_record(app, ("clicks", 0, offset))
        (visits,) = [step for step in found.steps if step.step == "visits"]
        rows = [row for row in found.rows if row.output == "visits"]
        if offset not in of_record:
            assert visits.exits == {"late": 1}, found.sentences
            assert rows == []
            continue
        assert visits.exits == {"held": 1}, found.sentences
        start, end = of_record[offset]
        last = max(bounds[1] for bounds in of_record.values())
        now = [row.now for row in rows if row.now is not None]
        if end < last:  # it has ended
            assert [(row["window_start"], row["window_end"]) for row in now] == [(start, end)]


def test_the_records_behind_a_session_are_those_in_it(app):
    for (start, end), offsets in sessions().items():
        if end >= at(300):
            continue  # it is open
        found = records_behind(app, "visits", {"ad": "a0", "window_start": start})
        assert [int(one.record.rpartition("/")[2]) for one in found.records] == offsets


def test_a_match_is_of_the_records_of_its_steps(app):
    bought = records_behind(app, "bought", {"ad": "a0", "match_start": at(0)})
    assert [int(one.record.rpartition("/")[2]) for one in bought.records] == [0, 2]
    outcomes, rows = {}, {}
    for offset in range(3):
        found = trace_record(app, ("clicks", 0, offset))
        (step,) = [step for step in found.steps if step.step == "bought"]
        outcomes[offset] = step.exits
        rows[offset] = [row.key["match_start"] for row in found.rows if row.output == "bought"]
    # A cart waits for what follows it; a payment makes the match; what fits no step is passed over.
    assert rows == {0: [], 1: [], 2: [at(0)]}, outcomes
    assert outcomes[0] == {"held": 1}
