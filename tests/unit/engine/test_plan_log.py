"""The log of plans: a plan is written once, read as it was planned, and kept as long as Spark keeps it."""

import json

import pytest

from millstream.engine import plan_log
from millstream.engine.checkpoint_copy import CheckpointCopy
from millstream.engine.plan_log import PLANS_KEPT, PlanLog
from millstream.engine.source.offsets import SourceOffset
from millstream.errors import CorruptionError
from millstream.kernels.time.watermarks import PartitionProgress

SPARKS = """v1
{"batchWatermarkMs":0,"batchTimestampMs":7,"conf":{"spark.sql.shuffle.partitions":"2"}}
%s"""


def offset(at):
    return SourceOffset(5, {"t": (PartitionProgress(at, 0),)}, {}, topic_ids={"t": "id"}).to_json()


@pytest.fixture
def plans(tmp_path):
    log = PlanLog(tmp_path / "checkpoint")
    log.create()
    return log


def test_the_first_of_two_plans_of_a_batch_counts(plans):
    assert plans.plan(0) is None
    assert plans.add(0, offset(3)) == offset(3)
    assert plans.add(0, offset(9)) == offset(3)
    assert plans.plan(0) == offset(3)


def test_a_plan_that_spark_wrote_counts_and_its_settings_stay(plans):
    (plans.checkpoint / "offsets" / "0").write_text(SPARKS % json.dumps(offset(4)))
    assert plans.plan(0) == plans.add(0, offset(9)) == offset(4)
    plans.add(1, offset(9))
    lines = (plans.checkpoint / "offsets" / "1").read_text().splitlines()
    assert lines == [*SPARKS.splitlines()[:2], json.dumps(offset(9))]


def test_what_a_death_left_of_a_plan_is_no_plan(plans, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(plan_log.os, "link", die)
        with pytest.raises(KeyboardInterrupt):
            plans.add(0, offset(3))
    assert [path.name[0] for path in (plans.checkpoint / "offsets").iterdir()] == ["."]
    assert plans.plan(0) is None
    plans.create()
    assert not list((plans.checkpoint / "offsets").iterdir())


def test_a_death_leaves_a_mark_whole_or_not_at_all(plans, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    commits = plans.checkpoint / "commits"
    with monkeypatch.context() as patch:
        patch.setattr(plan_log.Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            plans.mark_committed(0)
    assert not (commits / "0").exists()  # Spark begins behind no mark that is empty
    plans.create()
    assert not list(commits.iterdir())
    plans.mark_committed(0)
    assert [path.read_text() for path in commits.iterdir()] == [plan_log.COMMITTED]


def test_where_files_have_no_links_the_plan_that_is_there_counts(plans, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(plan_log.os, "link", refuse)
    assert plans.add(0, offset(3)) == offset(3)
    assert plans.add(0, offset(9)) == offset(3)
    assert [path.name for path in (plans.checkpoint / "offsets").iterdir()] == ["0"]


@pytest.mark.parametrize("text", ["", "v1\n{}\n-", "v1\n{}\nno plan"])
def test_a_plan_that_cannot_be_read_stops_the_run(plans, text):
    (plans.checkpoint / "offsets" / "0").write_text(text)
    with pytest.raises(CorruptionError, match="Restore the checkpoint"):
        plans.plan(0)


def test_plans_are_kept_as_long_as_spark_keeps_them(plans):
    for batch_id in range(PLANS_KEPT + 3):
        plans.add(batch_id, offset(batch_id))
        (plans.checkpoint / "offsets" / f".{batch_id}.crc").touch()  # as Spark leaves them
        plans.mark_committed(batch_id)
    left = {path.name for path in (plans.checkpoint / "offsets").iterdir()}
    kept = range(3, PLANS_KEPT + 3)
    assert left == {str(n) for n in kept} | {f".{n}.crc" for n in kept}
    assert {path.name for path in (plans.checkpoint / "commits").iterdir()} == set(map(str, kept))


def test_a_copy_of_the_checkpoint_is_made_of_it_as_of_sparks(plans):
    (plans.checkpoint / "millstream-checkpoint-id").write_text("c")
    plans.add(0, offset(3))
    plans.mark_committed(0)
    plans.add(1, offset(8))
    copy = CheckpointCopy.read(plans.checkpoint, 1)
    elsewhere = plans.checkpoint.with_name("elsewhere")
    assert copy.restore(elsewhere, 1)
    assert PlanLog(elsewhere).plan(1) == offset(8)
    assert CheckpointCopy.read(elsewhere, 1) == copy
