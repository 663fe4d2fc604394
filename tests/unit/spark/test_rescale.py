import json

import pytest

from millstream.errors import ConfigError
from millstream.spark.birth import Birth, stored_birth
from millstream.spark.rescale import rescale, settle_rescale
from millstream.views.running import marked
from millstream.views.schema import Fence
from millstream.views.store import ViewStore

JOB = {"buckets": 4, "shuffle_partitions": 2, "label_partitions": 2, "steps": {}}


@pytest.fixture
def folder(tmp_path):
    """An app's folder after batch 6, with a checkpoint that is told by its one file."""
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    for kind in ("offsets", "commits"):
        (tmp_path / "checkpoint" / kind).mkdir(parents=True)
        (tmp_path / "checkpoint" / kind / "6").write_text("old")
    return tmp_path


@pytest.fixture
def store(folder):
    with ViewStore(folder / "views.db") as store:
        run, _ = store.begin_run("ads", "main", "c")
        for batch_id in range(7):
            store.commit(Fence("ads", "main", run, batch_id), [], position={}, status={})
        yield store


def content(folder):
    return (folder / "checkpoint" / "offsets" / "6").read_text()


def copied(folder):
    copy = folder / "checkpoint-before-rescale" / "offsets"
    copy.mkdir(parents=True)
    (copy / "6").write_text("old")


def spark_has_begun(folder):
    (folder / "checkpoint" / "offsets" / "6").write_text("half made")


def left_over(folder):
    names = ("rescale.json", "checkpoint-before-rescale")
    return [name for name in names if (folder / name).exists()]


def test_after_a_crash_at_step_1_the_copy_is_removed(folder, store):
    copied(folder)
    settle_rescale(folder, store, "ads")
    assert (content(folder), left_over(folder)) == ("old", [])


@pytest.mark.parametrize("begun", [False, True])
def test_after_a_crash_at_steps_2_and_3_the_copy_is_put_back(folder, store, begun):
    copied(folder)
    (folder / "rescale.json").write_text(json.dumps({"partitions": 4, "batch_id": 7}))
    if begun:
        spark_has_begun(folder)
    settle_rescale(folder, store, "ads")
    assert (content(folder), left_over(folder)) == ("old", [])
    assert stored_birth(folder) == Birth(4, 2, 2)


def test_putting_the_copy_back_may_itself_be_interrupted(folder, store):
    (folder / "rescale.json").write_text(json.dumps({"partitions": 4, "batch_id": 7}))
    settle_rescale(folder, store, "ads")  # the copy is in its place already
    assert (content(folder), left_over(folder)) == ("old", [])


def test_once_the_views_have_the_batch_it_goes_forward(folder, store):
    copied(folder)
    (folder / "rescale.json").write_text(json.dumps({"partitions": 4, "batch_id": 7}))
    spark_has_begun(folder)
    run, batch_id = store.begin_run("ads", "main", "c")
    store.commit(Fence("ads", "main", run, batch_id), [], position={}, status={})
    settle_rescale(folder, store, "ads")
    assert (content(folder), left_over(folder)) == ("half made", [])
    assert stored_birth(folder) == Birth(4, 4, 2)


def test_more_partitions_than_buckets_are_refused(folder, store):
    with pytest.raises(ConfigError, match=r"5 partitions were asked for.*Give 1 to 4"):
        rescale("ads", folder, 5)


def test_a_running_app_is_refused(folder, store):
    with (
        marked(folder, 1),
        pytest.raises(ConfigError, match=r"ads is running .*millstream stop ads"),
    ):
        rescale("ads", folder, 4)


def test_a_batch_half_done_is_refused(folder, store):
    (folder / "checkpoint" / "offsets" / "7").write_text("begun")
    with pytest.raises(ConfigError, match="last batch of ads is not complete"):
        rescale("ads", folder, 4)


def test_an_app_without_state_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="ads has no state yet"):
        rescale("ads", tmp_path, 4)


def test_the_number_that_there_is_already_changes_nothing(folder, store):
    assert rescale("ads", folder, 2).partitions_before == 2
    assert content(folder) == "old"
