import json

import pytest

from millstream.errors import ConfigError
from millstream.spark.birth import Birth, stored_birth
from millstream.spark.rescale import rescale
from millstream.views.running import marked

JOB = {"buckets": 4, "partitions": 2, "label_partitions": 2, "hash_seed": 7, "steps": {}}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    return tmp_path


def test_the_number_is_kept_for_the_next_run(folder):
    done = rescale("ads", folder, 4)
    assert (done.partitions_before, done.partitions) == (2, 4)
    assert stored_birth(folder) == Birth(4, 4, 2, 7)
    assert [path.name for path in folder.iterdir()] == ["job.json"]


@pytest.mark.parametrize("partitions", [0, 5])
def test_more_partitions_than_buckets_are_refused(folder, partitions):
    with pytest.raises(ConfigError, match=r"4 buckets.*Give 1 to 4"):
        rescale("ads", folder, partitions)


def test_a_running_app_is_refused(folder):
    with marked(folder, 3), pytest.raises(ConfigError, match=r"is running.*millstream stop ads"):
        rescale("ads", folder, 4)


def test_an_app_without_state_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no state yet"):
        rescale("ads", tmp_path, 2)


def test_state_of_an_earlier_version_is_refused_with_what_to_do(folder):
    (folder / "job.json").write_text(json.dumps({"buckets": 4, "shuffle_partitions": 2}))
    with pytest.raises(ConfigError, match=r"earlier version.*delete the app's folder"):
        stored_birth(folder)


def test_the_number_that_there_is_already_changes_nothing(folder):
    assert rescale("ads", folder, 2).partitions == 2
    assert stored_birth(folder) == Birth(4, 2, 2, 7)
