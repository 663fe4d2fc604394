import pytest

from millstream.errors import ConfigError
from millstream.kernels.plan import JobPlan
from millstream.spark.birth import HOME, JOB, Birth, stored_birth
from millstream.spark.rescale import rescale
from millstream.views.commit import BatchOutcome, Targets
from millstream.views.running import marked
from millstream.views.store import ViewStore


@pytest.fixture
def folder(tmp_path):
    with ViewStore(tmp_path / HOME) as home:
        targets = Targets(JobPlan("ads", (), (), (), (), (0, 1, 2, 3)), home, [])
        targets.begin_run(JOB, "one", sharing=Birth(4, 2, 2).sharing)
        targets.commit(0, BatchOutcome(), {})
    return tmp_path


def test_the_number_is_kept_for_the_next_run(folder):
    done = rescale("ads", folder, 4)
    assert (done.partitions_before, done.partitions) == (2, 4)
    assert stored_birth("ads", folder) == Birth(4, 4, 2)


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


def test_the_number_that_there_is_already_changes_nothing(folder):
    assert rescale("ads", folder, 2).partitions == 2
    assert stored_birth("ads", folder) == Birth(4, 2, 2)
