"""What became of each record, step by step, compared with dictionaries by the rules of the documentation."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta

import pytest
from edited_app import EditedApp
from followed_clicks import MINUTE, SOURCE, START, clicks

import millstream as ms
from millstream.engine.topic_ids import save_topic_ids
from millstream.errors import ConfigError, TopicRecreatedError
from millstream.log.reader import LogReader
from millstream.ops.record_trace import trace_record
from millstream.views.store_location import open_state_store

DELAY = timedelta(seconds=10)


def ran(folder, partitions, rows, batch_rows=7):
    edited = EditedApp(folder, partitions, batch_rows, SOURCE, by_ad=True)
    edited.create()
    edited.append(rows)
    app = edited.write()
    edited.run(app)
    return app


def places(rows, partitions):
    """Return topic, partition and offset of each row, and the watermark that it saw."""
    ends, latest, found = defaultdict(int), {}, []
    for row in rows:
        partition = int(row["ad"][1:]) % partitions
        seen = latest.get(partition)
        found.append((("clicks", partition, ends[partition]), seen and seen - DELAY))
        ends[partition] += 1
        latest[partition] = max(row["at"], seen or row["at"])
    return found


def expected(rows, partitions):
    """Say of each record by which exit it left each step."""
    given = set()
    for row, (record, watermark) in zip(rows, places(rows, partitions), strict=True):
        exits = {"clicks": "emitted", "costly": "emitted" if row["cost"] else "filtered"}
        end = row["at"] - (row["at"] - START) % MINUTE + MINUTE
        if row["cost"]:
            exits["minutes"] = "late" if watermark and watermark >= end else "held"
        if watermark and watermark > row["at"]:
            exits["once"] = "late"
        else:
            exits["once"] = "duplicate" if row["id"] in given else "emitted"
            given.add(row["id"])
        yield record, exits


@pytest.mark.parametrize("partitions", [1, pytest.param(4, marks=pytest.mark.long)])
def test_every_exit_of_every_record_is_that_of_the_model(tmp_path, partitions):
    rows = clicks(14, seed=0)
    app = ran(tmp_path, partitions, rows)
    with open_state_store(app.state_store, readonly=True) as store:
        views = {name: store.scan(name).to_dicts() for name in ("minutes", "firsts", "newest")}
    seen = set()
    for (record, exits), row in zip(expected(rows, partitions), rows, strict=True):
        found = trace_record(app, record)
        steps = {step.step: step for step in found.steps}
        for step, name in exits.items():
            assert steps[step].exits == {name: 1}, (record, step, found.sentences)
            seen.add((step, name))
        assert ("minutes" in steps) == (row["cost"] > 0)
        assert found.steps[0].read == 1
        outputs = {(one.output, *one.key.values()): one for one in found.rows}
        start = row["at"] - (row["at"] - START) % MINUTE
        windows = [one for one in found.rows if one.output == "minutes"]
        if exits.get("minutes") == "held":
            (window,) = windows
            assert {window.key["ad"], window.key["window_start"]} == {row["ad"], start}
            there = [one for one in views["minutes"] if window.key.items() <= one.items()]
            assert window.now == (there[0] if there else None)
        else:
            assert windows == []
        assert (("firsts", row["id"]) in outputs) == (exits["once"] == "emitted")
        newest = outputs.get(("newest", row["ad"]))
        if newest is not None:
            assert newest.now == next(one for one in views["newest"] if one["ad"] == row["ad"])
    wanted = {("minutes", "late"), ("once", "duplicate"), ("costly", "filtered")}
    assert wanted <= seen


def test_the_rows_of_a_join_and_a_top_are_those_that_the_record_made(tmp_path):
    rows = [
        {"ad": "a0", "id": "x", "cost": cost, "at": START + timedelta(seconds=n)}
        for n, cost in enumerate((3, 5, 4, 0))
    ]
    app = ran(tmp_path, 1, rows, 100)
    pairs = {}
    for offset in range(4):
        found = trace_record(app, ("clicks", 0, offset))
        pairs[offset] = {
            (row.key["cost"], row.key["other"], row.now is not None)
            for row in found.rows
            if row.output == "pairs"
        }
        best = [row for row in found.rows if row.output == "best"]
        assert bool(best) == (offset < 3)  # the last is none of the two greatest, then or now
    # The model: a pair of each costly row with each row of its id that is 0 to 5 seconds later.
    costs = [row["cost"] for row in rows]
    at = range(len(rows))
    every = {(n, m) for n in at for m in at if costs[n] and n <= m}
    for offset in at:
        mine = {(costs[n], costs[m], True) for n, m in every if max(n, m) == offset}
        assert mine <= pairs[offset], (offset, pairs[offset])


def test_a_record_that_was_not_processed_says_why(tmp_path):
    app = ran(tmp_path, 1, clicks(3, 1))
    with ms.connect(app.log) as log, log.producer() as producer:
        producer.send("clicks", b"{}", partition=0)
        producer.send("clicks", b"no JSON", partition=0)
    assert trace_record(app, ("clicks", 0, 3)).outcome == "unread"
    assert trace_record(app, ("clicks", 0, 9)).outcome == "not in the log yet"
    with pytest.raises(ConfigError, match="reads no clicks/7"):
        trace_record(app, ("clicks", 7, 0))


def test_a_dead_letter_has_its_reason_and_what_was_removed_is_said_to_be(tmp_path):
    edited = EditedApp(tmp_path, 1, 100, SOURCE)
    edited.create()
    with ms.connect(edited.log) as log, log.producer() as producer:
        producer.send("clicks", b"no JSON", partition=0)
    edited.append(clicks(3, 1))
    app = edited.write()
    edited.run(app)
    dead = trace_record(app, ("clicks", 0, 0))
    assert (dead.outcome, dead.steps[0].exits) == ("dead", {"dead": 1})
    assert "JSON" in dead.steps[0].reason
    assert dead.to_dict()["steps"][0]["reason"] == dead.steps[0].reason
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 2)
    gone = trace_record(app, ("clicks", 0, 0))
    assert gone.outcome == "no longer in the log"
    assert "from offset 2 on" in gone.notes[0]
    later = trace_record(app, ("clicks", 0, 2))
    assert "no longer holds the first 2 records" in later.notes[-1]


KEPT = """
stream.select("ad", "cost").to("costs")
stream.table("ad", name="latest").filter(pl.col("cost") > 0).select("ad", "id").view("dear")
"""


@pytest.fixture(scope="module")
def changing(tmp_path_factory):
    """An app with a row that its last record takes back, and with rows in a topic; and the file that it is in."""
    edited = EditedApp(tmp_path_factory.mktemp("app"), 1, 100, SOURCE.split("costly =")[0] + KEPT)
    edited.create()
    with ms.connect(edited.log) as log:
        log.create_topic("costs", partitions=1)
    edited.append({"ad": "a0", "id": "x", "cost": cost, "at": START} for cost in (3, 0))
    app = edited.write()
    edited.run(app)
    with open_state_store(app.state_store) as store:
        save_topic_ids(app.name, store, app.plan(), LogReader(app.log))
    return edited, app


def test_a_row_that_a_record_took_back_is_not_said_to_be_its_own(changing):
    found = trace_record(changing[1], ("clicks", 0, 1))
    (dear,) = (row for row in found.rows if row.output == "dear")
    assert (dear.removed, dear.now) == (True, None)
    assert dear.sentence() == "dear: the record took back the row ad=a0, which is not there"


def test_a_row_of_a_topic_is_not_said_to_be_taken_back(changing):
    found = trace_record(changing[1], ("clicks", 0, 0))
    (cost,) = (row for row in found.rows if row.output == "to(costs)")
    assert cost.sentence() == "to(costs): the record gave the row ad=a0, cost=3"


def test_an_app_that_was_edited_since_is_said_to_be(changing):
    edited, app = changing
    assert not any("Edited" in note for note in trace_record(app, ("clicks", 0, 0)).notes)
    other = edited.write(('"cost") > 0', '"cost") > 5'))
    (note,) = (n for n in trace_record(other, ("clicks", 0, 0)).notes if "Edited" in n)
    assert "Edited since ads ran: dear." in note


def test_a_topic_made_anew_is_not_taken_for_the_one_that_was_read(changing):
    edited, app = changing
    with ms.connect(edited.log) as log:
        log.delete_topic("clicks")
        log.create_topic("clicks", partitions=1)
    edited.append({"ad": "a0", "id": "y", "cost": cost, "at": START} for cost in (5, 6))
    with pytest.raises(TopicRecreatedError, match="'clicks' was deleted and created again"):
        trace_record(app, ("clicks", 0, 0))
