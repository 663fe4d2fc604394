"""Deploying from archives, as `millstream topic archive` makes them: the same rows, killed or not, and no gap unsaid."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from edited_app import EditedApp, answers, events, per_kind

import millstream as ms
from millstream.errors import ConfigError, CorruptionError
from millstream.log.archive import ArchiveFile
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.replay_start import ReplayStart
from millstream.testing.disk import SimulatedCrash
from millstream.views.coverage import partial_note
from millstream.views.store_location import open_state_store

TRIPLE = ("FACTOR = 2", "FACTOR = 3")
ROWS = 240
SEGMENT_ROWS = 40


def append(edited, rows):
    """Append rows to two partitions in batches of which a segment has some, so that a topic has several."""
    with ms.connect(edited.log) as log, log.producer() as producer:
        for number, row in enumerate(rows):
            value = json.dumps({**row, "at": row["at"].isoformat()}).encode()
            producer.send("clicks", value, partition=number % 2)
            if number % 10 == 9:
                producer.flush()


@pytest.fixture
def edited(tmp_path, call):
    """An app that has run over a log of which all but the last records are archived."""
    made = EditedApp(tmp_path, 2)
    with ms.connect(made.log) as log:
        log.create_topic("clicks", partitions=2, settings={"segment.bytes": "4000"})
    append(made, events(ROWS - 40, 5))
    made.run(made.write())
    done = call("topic", "archive", "clicks", "--app", str(made.file), "--close-active", "--json")
    found = json.loads(done.out)
    assert sum(one["rows"] for one in found) == ROWS - 40
    assert sum(one["segments"] for one in found) > 4
    append(made, events(40, 6, first=ROWS - 40))
    made.run(made.write())
    return made


def rows_of():
    return [*events(ROWS - 40, 5), *events(40, 6, first=ROWS - 40)]


@pytest.fixture
def archived(monkeypatch):
    """Return the list of the offsets that were read from archives."""
    read, real = [], ArchiveFile.read

    def noted(self, *args, **options):
        for batch in real(self, *args, **options):
            read.extend(batch.column("offset").to_pylist())
            yield batch

    monkeypatch.setattr(ArchiveFile, "read", noted)
    return read


def segments(edited, kind, partition=0):
    """Return the files of a partition of one kind, in the order of their offsets."""
    return sorted(edited.log.glob(f"t/clicks.*/{partition}/*.{kind}"))


def note(app):
    with open_state_store(app.state_store, readonly=True) as store:
        return partial_note(store.coverage("per_kind"))


def test_what_is_archived_is_read_from_there_once_also_if_the_deployment_is_killed(
    edited, archived
):
    app = edited.write(TRIPLE)
    done = []

    def killed(progress):
        done.append(progress.read)
        if len(done) in (2, 4):
            raise SimulatedCrash

    for _ in range(2):
        with suppress(SimulatedCrash):
            deploy(app, killed, rows_per_batch=40)
    result = deploy(app, rows_per_batch=40)
    assert result.records == ROWS - sum(done)
    assert len(archived) == ROWS - 40
    assert edited.views(app) == answers(rows_of()) | {"per_kind": per_kind(rows_of(), 3)}
    assert note(app) is None


def test_a_stated_offset_within_an_archive_is_where_it_begins(edited, archived):
    app = edited.write(TRIPLE)
    assert (
        deploy(app, start=ReplayStart.parse(["clicks/0/55", "clicks/1/55"])).records == ROWS - 110
    )
    assert min(archived) == 55
    assert edited.views(app)["per_kind"] == per_kind(rows_of()[110:], 3)
    assert "clicks/0 55, clicks/1 55" in note(app)


def test_an_archive_does_not_bring_back_what_the_log_no_longer_holds(edited, archived):
    with ms.connect(edited.log) as log:
        for partition in (0, 1):
            log.delete_records("clicks", partition, 70)  # within an archive
    app = edited.write(TRIPLE)
    plan = plan_change(app)
    assert (plan.gone, plan.records, plan.exit_code) == (140, ROWS - 140, 5)
    with pytest.raises(ConfigError, match="no longer holds 140 records that ads has read before"):
        deploy(app)
    with pytest.raises(ConfigError, match="--from clicks/0/60: the log begins at 70 there"):
        deploy(app, start=ReplayStart.parse(["clicks/0/60"]))
    assert edited.views(app) == answers(rows_of())
    assert deploy(app, gone_ok=True).records == ROWS - 140
    assert min(archived) == 70
    assert edited.views(app)["per_kind"] == per_kind(rows_of()[140:], 3)
    assert "is written since" in note(app)


def test_a_damaged_archive_is_reported_and_its_records_come_from_the_segment(edited, caplog):
    damaged = segments(edited, "parquet")[1]
    damaged.write_bytes(damaged.read_bytes()[:-100])
    app = edited.write(TRIPLE)
    assert deploy(app).records == ROWS
    assert str(damaged) in caplog.text
    assert edited.views(app)["per_kind"] == per_kind(rows_of(), 3)


def test_a_gap_between_archives_and_the_log_is_one_error_and_nothing_is_changed(edited):
    gone = segments(edited, "log")[2]
    gone.unlink()
    gone.with_suffix(".parquet").unlink(missing_ok=True)
    app = edited.write(TRIPLE)
    with pytest.raises(CorruptionError, match="clicks"):
        deploy(app)
    assert edited.views(app) == answers(rows_of())
