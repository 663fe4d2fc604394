"""What is fixed when an app's state is created, and the refusal of what does not fit it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime

import pytest

import millstream as ms
from millstream.engine.job_metadata import (
    JOB,
    JobMetadata,
    check_checkpoint_current,
    load_job_metadata,
    load_or_create_checkpoint_id,
    load_or_create_job_metadata,
)
from millstream.errors import ConfigError
from millstream.views.commit.committer import BatchCommitter, BatchResult
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.store_location import STATE_STORE_FILE, parse_state_store

WANTED = JobMetadata(4, 2, 2)


@dataclass
class Event:
    at: datetime
    ad: int


def plan(buckets=4):
    app = ms.App("app", log="unused", buckets=buckets)
    stream = app.topic("events", Event).stream(time="at")
    stream.window(ms.tumbling("1 hour"), by="ad").agg(n=ms.count()).view("v")
    return app.plan()


def run(folder, *, buckets=4, metadata=WANTED, batches=1):
    """Begin a run as a job does, and commit empty batches."""
    with SqliteStateStore(folder / STATE_STORE_FILE) as state_store:
        committer = BatchCommitter(plan(buckets), state_store, [])
        first = committer.begin_run(
            JOB, load_or_create_checkpoint_id(folder), partitioning=metadata.partitioning
        )
        for batch_id in range(first, first + batches):
            committer.commit(batch_id, BatchResult(), {})
        return first


def enter_batches(folder, name, *batch_ids):
    known = folder / "checkpoint" / name
    known.mkdir(exist_ok=True)
    for batch_id in batch_ids:
        (known / str(batch_id)).touch()
        (known / f".{batch_id}.crc").touch()


def test_an_app_without_state_gets_the_wanted_metadata(tmp_path):
    assert load_or_create_job_metadata("app", tmp_path / STATE_STORE_FILE, WANTED) == WANTED


def test_a_run_that_committed_nothing_fixes_no_number(tmp_path):
    run(tmp_path, batches=0)
    assert load_or_create_job_metadata(
        "app", tmp_path / STATE_STORE_FILE, JobMetadata(8, 3, 3)
    ) == JobMetadata(8, 3, 3)


def test_a_run_that_committed_nothing_fixes_the_hashes(tmp_path):
    run(tmp_path, metadata=JobMetadata(4, 2, 2, 7), batches=0)
    assert load_or_create_job_metadata(
        "app", tmp_path / STATE_STORE_FILE, JobMetadata(8, 3, 3, 9)
    ) == JobMetadata(8, 3, 3, 7)


def test_a_later_run_keeps_the_numbers_of_the_first(tmp_path):
    run(tmp_path)
    assert (
        load_or_create_job_metadata("app", tmp_path / STATE_STORE_FILE, JobMetadata(4, 16, 16))
        == WANTED
    )
    run(tmp_path, metadata=JobMetadata(4, 16, 16))
    assert load_job_metadata("app", tmp_path / STATE_STORE_FILE) == WANTED


def test_another_number_of_buckets_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(ConfigError, match="divided into 4 buckets and the app asks for 8"):
        load_or_create_job_metadata("app", tmp_path / STATE_STORE_FILE, JobMetadata(8, 2, 2))


def test_the_views_refuse_other_buckets_whatever_lies_beside_them(tmp_path):
    run(tmp_path)
    for path in tmp_path.glob("*.json"):
        path.unlink()
    with pytest.raises(ConfigError, match="divided into 4 buckets and the app asks for 5"):
        run(tmp_path, buckets=5)


def test_a_deleted_checkpoint_is_refused_by_the_views(tmp_path):
    run(tmp_path)
    for path in (tmp_path / "checkpoint").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match=r"was replaced \(deleted\?\)"):
        run(tmp_path)


def test_a_checkpoint_must_know_the_batches_that_the_views_hold(tmp_path):
    load_or_create_checkpoint_id(tmp_path)
    check_checkpoint_current(tmp_path, 0)
    with pytest.raises(ConfigError, match="ends with batch -1, but the views hold batches up to 2"):
        check_checkpoint_current(tmp_path, 3)
    enter_batches(tmp_path, "offsets", 0, 1, 2)
    check_checkpoint_current(tmp_path, 3)


def test_a_checkpoint_may_know_one_batch_that_was_begun_and_not_committed(tmp_path):
    load_or_create_checkpoint_id(tmp_path)
    enter_batches(tmp_path, "offsets", 0, 1, 2)
    enter_batches(tmp_path, "commits", 0, 1)
    check_checkpoint_current(tmp_path, 2)


@pytest.mark.parametrize(("held", "said"), [(2, "batches up to 1"), (0, "no batch")])
def test_views_that_are_older_than_the_checkpoint_are_refused(tmp_path, held, said):
    load_or_create_checkpoint_id(tmp_path)
    enter_batches(tmp_path, "offsets", 0, 1, 2, 3)
    with pytest.raises(ConfigError, match=f"ends with batch 3, but the views hold {said}"):
        check_checkpoint_current(tmp_path, held)
    # where the views are in a database, its reset alone would leave the checkpoint
    address = parse_state_store("postgresql://db/streams", "app", what="store=")
    with pytest.raises(ConfigError, match=r"reset app --log \S+ --store '?postgresql://db/streams"):
        check_checkpoint_current(tmp_path, held, address)


def test_a_batch_that_spark_takes_for_done_must_be_in_the_views(tmp_path):
    load_or_create_checkpoint_id(tmp_path)
    enter_batches(tmp_path, "offsets", 0)
    enter_batches(tmp_path, "commits", 0)
    check_checkpoint_current(tmp_path, 1)
    with pytest.raises(ConfigError, match="the views hold no batch"):
        check_checkpoint_current(tmp_path, 0)


def test_first_starts_at_once_agree_on_the_checkpoint(tmp_path):
    for number in range(20):
        folder = tmp_path / str(number)
        begin = threading.Barrier(4)

        def start(folder=folder, begin=begin):
            begin.wait()
            return load_or_create_checkpoint_id(folder)

        with ThreadPoolExecutor(4) as threads:
            ids = [made.result() for made in [threads.submit(start) for _ in range(4)]]
        assert len(set(ids)) == 1
        assert [path.name for path in (folder / "checkpoint").iterdir()] == [
            "millstream-checkpoint-id"
        ]


def test_where_files_cannot_have_two_names_the_checkpoint_has_an_id_too(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    made = load_or_create_checkpoint_id(tmp_path)
    assert load_or_create_checkpoint_id(tmp_path) == made
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == [
        "millstream-checkpoint-id"
    ]


def test_of_two_first_runs_the_second_does_not_go_on_with_keys_divided_in_its_own_way(tmp_path):
    location = tmp_path / STATE_STORE_FILE
    seeds = [
        load_or_create_job_metadata("app", location, replace(WANTED, hash_seed=seed))
        for seed in (1, 2)
    ]
    with SqliteStateStore(location) as first, SqliteStateStore(location) as second:
        runs = [BatchCommitter(plan(), store, []) for store in (first, second)]
        runs[0].begin_run(JOB, "one", partitioning=seeds[0].partitioning)
        runs[0].commit(0, BatchResult(), {})
        with pytest.raises(ConfigError, match=r"keys are in other buckets\. Run the app again"):
            runs[1].begin_run(JOB, "one", partitioning=seeds[1].partitioning)
        runs[0].commit(1, BatchResult(), {})  # it was not replaced
        again = load_or_create_job_metadata("app", location, replace(WANTED, hash_seed=2))
        assert runs[1].begin_run(JOB, "one", partitioning=again.partitioning) == 2
