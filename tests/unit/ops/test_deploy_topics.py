"""Topics that an app writes, across a switch: one sequence of records, and the offsets at which the new program begins."""

from __future__ import annotations

import json
from contextlib import suppress
from unittest import mock

import pytest
from edited_app import EditedApp, events, per_kind

import millstream as ms
from millstream.client.open import open_reader
from millstream.errors import ConfigError
from millstream.ops import deploy as deployment
from millstream.ops.deploy import deploy
from millstream.ops.rollback import rollback
from millstream.testing.disk import SimulatedCrash
from millstream.views.commit.committer import BatchCommitter
from millstream.views.coverage import partial_note
from millstream.views.schema import JOB
from millstream.views.state_store import store as state_store
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import open_state_store

TOPIC = ('per_kind.view("per_kind")', 'per_kind.to("weights", key="kind", partitions=2)')
TRIPLE = ("FACTOR = 2", "FACTOR = 3")

CRASHES = {
    "before the switch": (BatchCommitter, "switch_program", False),
    "the run has begun in the topics": (deployment, "keep_previous", False),
    "within the transaction": (state_store, "put_program", False),
    "after the transaction": (deployment, "kept_until", True),
}


def began(folder):
    edited = EditedApp(folder, 4)
    edited.create()
    rows = events(60, 5)
    edited.append(rows)
    edited.run(edited.write(TOPIC))
    return edited, rows


def grow(edited, app, rows, seed):
    more = events(20, seed, first=len(rows))
    edited.append(more)
    edited.run(app)
    rows += more


def weights(edited):
    """Return what consumers read: of each partition the records by offset."""
    with ms.connect(edited.log) as log:
        tables = [log.read("weights", partition) for partition in range(2)]
    found = []
    for table in tables:
        values = [json.loads(value) for value in table["value"].to_pylist()]
        found.append(dict(zip(table["offset"].to_pylist(), values, strict=True)))
    return found


def expected(rows, factor):
    return {(row[2], row[3]) for row in per_kind(rows, factor)}


def pairs(records):
    return {(record["kind"], record["weight"]) for record in records}


def span_of(app):
    with open_state_store(app.state_store, readonly=True) as store:
        return store.outputs(app.name, JOB)["to(weights)", "topic weights"].spans[-1]


def records_from(edited, offsets):
    """Return the records of each partition below some offsets, and those from them on."""
    below, after = [], []
    for records, first in zip(weights(edited), offsets, strict=True):
        below += [record for offset, record in records.items() if offset < first]
        after += [record for offset, record in records.items() if offset >= first]
    return below, after


@pytest.mark.parametrize("point", CRASHES)
def test_killed_at_any_step_records_of_the_two_programs_are_parted_by_the_marker(tmp_path, point):
    edited, rows = began(tmp_path)
    first = expected(rows, 2)
    place, name, switched = CRASHES[point]
    with mock.patch.object(place, name, side_effect=SimulatedCrash), suppress(SimulatedCrash):
        deploy(edited.write(TOPIC, TRIPLE))
    # The version that is there goes on, once more with its own records.
    grow(edited, edited.write(TOPIC, *([TRIPLE] if switched else [])), rows, 6)
    second = expected(rows, 3 if switched else 2)
    app = edited.write(TOPIC, TRIPLE)
    assert deploy(app).switched
    grow(edited, app, rows, 7)
    offsets = span_of(app).first_offsets
    below, after = records_from(edited, offsets)
    assert pairs(below) == (first if switched else first | second)
    assert pairs(after) == (second if switched else set()) | expected(rows, 3)
    with open_state_store(app.state_store, readonly=True) as store:
        note = partial_note(store.outputs(app.name, JOB)["to(weights)", "topic weights"].spans)
    assert f"from the offsets 0/{offsets[0]}, 1/{offsets[1]} on" in note


def test_the_marker_is_told_by_the_deployment_and_stays_where_it_is(tmp_path, call):
    edited, rows = began(tmp_path)
    app = edited.write(TOPIC, TRIPLE)
    answer = call("deploy", str(edited.file))
    offsets = span_of(app).first_offsets
    assert list(offsets) == [end for _, end in open_reader(edited.log).offsets("weights")]
    said = f"from weights/0/{offsets[0]}, weights/1/{offsets[1]} on"
    assert f"The topic 'weights' has records of it {said}." in answer.out
    for seed in (6, 7):
        grow(edited, app, rows, seed)
        assert span_of(app).first_offsets == offsets
    assert json.loads(call("deploy", str(edited.file), "--json").out)["topics"] == {}
    back = rollback(edited.write(TOPIC))
    assert back.topics["weights"] > offsets
    grow(edited, edited.write(TOPIC), rows, 8)
    assert pairs(records_from(edited, back.topics["weights"])[1]) == expected(rows, 2)


def test_a_topic_that_an_edit_does_not_concern_has_no_marker(tmp_path):
    edited, _ = began(tmp_path)
    app = edited.write(TOPIC, ('most=ms.max("n")', 'most=ms.min("n")'))
    assert deploy(app).topics == {}
    assert span_of(app).first_offsets == ()


def test_a_batch_that_only_the_topic_has_is_of_the_program_that_wrote_it(tmp_path):
    edited, rows = began(tmp_path)
    more = events(20, 6, first=len(rows))
    edited.append(more)
    with (
        mock.patch.object(StateStore, "commit", side_effect=SimulatedCrash),
        suppress(SimulatedCrash),
    ):
        edited.run(edited.write(TOPIC))
    app = edited.write(TOPIC, TRIPLE)
    with pytest.raises(ConfigError, match="the batch would have rows of two programs"):
        deploy(app)
    edited.run(edited.write(TOPIC))  # completes it
    done = deploy(app)
    assert done.switched
    rows += more
    below, _ = records_from(edited, done.topics["weights"])
    assert expected(rows, 2) <= pairs(below)
    grow(edited, app, rows, 7)
    assert pairs(records_from(edited, done.topics["weights"])[1]) == expected(rows, 3)
