import pytest

from millstream.engine.job_metadata import (
    JOB,
    JobMetadata,
    load_job_metadata,
    load_or_create_job_metadata,
)
from millstream.engine.rescale import rescale
from millstream.errors import ConfigError
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.views.commit.committer import BatchCommitter, BatchResult
from millstream.views.runs.control_files import hold_run_lock
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.store_location import STATE_STORE_FILE


@pytest.fixture
def folder(tmp_path):
    with SqliteStateStore(tmp_path / STATE_STORE_FILE) as state_store:
        committer = BatchCommitter(JobPlan("ads", (), (), (), (), Buckets(4)), state_store, [])
        committer.begin_run(JOB, "one", partitioning=JobMetadata(4, 2, 2).partitioning)
        committer.commit(0, BatchResult(), {})
    return tmp_path


def test_the_number_is_kept_for_the_next_run(folder):
    done = rescale("ads", folder, 4)
    assert (done.partitions_before, done.partitions) == (2, 4)
    assert load_job_metadata("ads", folder / STATE_STORE_FILE) == JobMetadata(4, 4, 2)


@pytest.mark.parametrize("partitions", [0, 5])
def test_more_partitions_than_buckets_are_refused(folder, partitions):
    with pytest.raises(ConfigError, match=r"4 buckets.*Give 1 to 4"):
        rescale("ads", folder, partitions)


def test_buckets_are_wanted_from_the_next_run_on(folder):
    done = rescale("ads", folder, buckets=16)
    assert (done.buckets_before, done.buckets, done.partitions) == (4, 16, 2)
    stored = JobMetadata(16, 2, 2, state_buckets=4, declared_buckets=4)
    assert load_job_metadata("ads", folder / STATE_STORE_FILE) == stored
    again = rescale("ads", folder, 8, buckets=8)
    assert (again.buckets_before, again.buckets, again.partitions) == (16, 8, 8)
    rescale("ads", folder, buckets=4)  # as the state is: there is nothing to do
    stored = JobMetadata(4, 4, 2, declared_buckets=4)
    assert load_job_metadata("ads", folder / STATE_STORE_FILE) == stored


def test_fewer_buckets_have_fewer_partitions(folder):
    assert rescale("ads", folder, buckets=1).partitions == 1


@pytest.mark.parametrize("buckets", [0, 4097])
def test_another_number_of_buckets_is_refused(folder, buckets):
    with pytest.raises(ConfigError, match=rf"^{buckets} buckets were requested. Give 1 to 4096"):
        rescale("ads", folder, buckets=buckets)


def test_the_app_goes_on_declaring_what_it_did_or_declares_what_there_is(folder):
    rescale("ads", folder, buckets=16)
    place = folder / STATE_STORE_FILE
    for declared in (4, 16):
        found = load_or_create_job_metadata("ads", place, JobMetadata(declared, 1, 1, 9))
        assert (found.bucket_count, found.hash_seed) == (16, 0)
    with pytest.raises(
        ConfigError, match=r"divided into 16 buckets.*asks for 8. Use buckets=4,.*--buckets 8"
    ):
        load_or_create_job_metadata("ads", place, JobMetadata(8, 1, 1, 9))


def test_a_running_app_is_refused(folder):
    with (
        hold_run_lock(folder, 3),
        pytest.raises(ConfigError, match=r"is running.*millstream stop ads"),
    ):
        rescale("ads", folder, 4)


def test_an_app_without_state_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no state yet"):
        rescale("ads", tmp_path, 2)


def test_the_number_that_there_is_already_changes_nothing(folder):
    assert rescale("ads", folder, 2).partitions == 2
    assert load_job_metadata("ads", folder / STATE_STORE_FILE) == JobMetadata(4, 2, 2)
