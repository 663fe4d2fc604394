"""`why record` and `why value` where the replay of a log may differ from the job: they follow the job, or say so."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from edited_app import START, EditedApp

import millstream as ms
from millstream.ops.deploy import deploy
from millstream.ops.record_trace import trace_record
from millstream.ops.value_records import records_behind

HEAD = """
from datetime import datetime

import polars as pl

import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
fields = {"ad": str, "id": str, "cost": int, "at": datetime}
stream = app.topic("clicks", fields).stream(time="at", watermark=ms.watermark("1 minute", RULE), lateness="1 day")
"""
FIRSTS = HEAD + 'stream.dedup("id", within="1 hour", name="once").view("firsts", key="id")\n'
MINUTES = HEAD + (
    'stream.window(ms.tumbling("1 minute"), by="ad").emit("update").agg(n=ms.count()).view("minutes")\n'
)
STATIC = HEAD + (
    'rows = pl.DataFrame({"ad": ["a0"], "price": [1]})\n'
    'stream.lookup(app.static_table(rows, key="ad", name="prices"), "ad").view("priced", key="id")\n'
)
NEVER_IDLE = ("RULE", "idle=None")


def clicks(*ads):
    return [
        {"ad": ad, "id": "x", "cost": n, "at": START + timedelta(seconds=n)}
        for n, ad in enumerate(ads, 1)
    ]


def started(folder, source, partitions, *edits):
    edited = EditedApp(folder, partitions, source=source, by_ad=True)
    edited.create()
    return edited, edited.write(*edits)


def run(app):
    """Run an app as a user does, which leaves a history of its batches."""
    app.run(until="caught-up", engine="local", show=None)


def said(app, view, key):
    """Return what both say besides the answer."""
    return trace_record(app, ("clicks", 0, 0)).notes, records_behind(app, view, key).notes


def test_the_first_of_two_duplicates_is_the_one_that_the_job_has_read_first(tmp_path):
    edited, app = started(tmp_path, FIRSTS, 2, NEVER_IDLE)
    for row in clicks("a1", "a0"):  # each in a batch of its own, the second partition's first
        edited.append([row])
        run(app)
    found = records_behind(app, "firsts", {"id": "x"})
    assert found.same
    assert [(one.record, one.without["cost"]) for one in found.records] == [("clicks/1/0", 2)]
    (note,) = found.notes
    assert note.startswith("1 further records have its key")
    outcomes = [trace_record(app, ("clicks", n, 0)) for n in (1, 0)]
    assert [one.outcome for one in outcomes] == ["in the outputs", "duplicate"]
    assert [one.notes for one in outcomes] == [(), ()]


@pytest.mark.parametrize(
    ("partitions", "rule", "is_said"),
    [(1, "idle=None", 0), (1, 'idle="1 minute"', 0), (2, 'idle="1 minute"', 1),
     (1, 'idle="1 minute", idle_advance=True', 1)],
)  # fmt: skip
def test_that_idle_time_may_have_mattered_is_said_by_both(tmp_path, partitions, rule, is_said):
    edited, app = started(tmp_path, FIRSTS, partitions, ("RULE", rule))
    edited.append(clicks("a0", "a0"))
    run(app)
    for notes in said(app, "firsts", {"id": "x"}):
        assert sum("idle for a time" in note for note in notes) == is_said


def test_a_deployment_may_have_read_several_partitions_in_another_order(tmp_path):
    edited, app = started(tmp_path, FIRSTS, 2, NEVER_IDLE)
    edited.append(clicks("a0", "a1"))
    run(app)
    app = edited.write(NEVER_IDLE, ('"1 hour"', '"2 hours"'))
    assert deploy(app).switched
    for notes in said(app, "firsts", {"id": "x"}):
        assert sum("The last deployment came before batch 1" in note for note in notes) == 1
    edited.append(clicks("a0"))
    run(app)
    assert not trace_record(app, ("clicks", 0, 1)).notes


def test_what_a_view_lacks_is_said(tmp_path):
    source = MINUTES + 'stream.filter(pl.col("cost") > 0).view("dear", key="id")\n'
    edited, app = started(tmp_path, source, 1, NEVER_IDLE, ('.view("dear", key="id")', ""))
    edited.append(clicks("a0"))
    run(app)
    edited.append([{**clicks("a0")[0], "id": "y"}])
    app = edited.write(NEVER_IDLE)
    run(app)
    trace = trace_record(app, ("clicks", 0, 0))
    assert [one.now for one in trace.rows if one.output == "dear"] == [None]
    assert [note for note in trace.notes if "The view 'dear' is written since" in note]
    assert [note for note in records_behind(app, "dear", {"id": "y"}).notes if "'dear' is" in note]
    key = {"ad": "a0", "window_start": START}
    assert not [note for note in records_behind(app, "minutes", key).notes if "'dear'" in note]


def test_that_compaction_has_removed_records_is_said(tmp_path):
    edited, app = EditedApp(tmp_path, 1, source=MINUTES), None
    with ms.connect(edited.log) as log:
        log.create_topic("clicks", partitions=1, cleanup="compact")
        with log.producer() as producer:
            for row in clicks("a0"):
                value = json.dumps({**row, "at": row["at"].isoformat()}).encode()
                producer.send("clicks", value, key=row["ad"])
    app = edited.write(NEVER_IDLE)
    run(app)
    for notes in said(app, "minutes", {"ad": "a0", "window_start": START}):
        assert sum("The topic 'clicks' is compacted" in note for note in notes) == 1


def test_a_static_table_with_other_rows_is_named_among_what_was_edited(tmp_path):
    edited, app = started(tmp_path, STATIC, 1, NEVER_IDLE)
    edited.append(clicks("a0"))
    run(app)
    assert not trace_record(app, ("clicks", 0, 0)).notes
    app = edited.write(NEVER_IDLE, ('"price": [1]', '"price": [2]'))
    for notes in said(app, "priced", {"id": "x"}):
        assert sum("the rows of prices" in note for note in notes) == 1
