"""Runs as files of the checkpoint: what is named stays readable, and what nobody may want goes."""

import os

import pyarrow as pa
import pytest

from millstream.errors import CorruptionError
from millstream.spark import run_files
from millstream.spark.run_files import BATCHES_KEPT, FileRunStore, RunFiles
from millstream.spark.run_store import COPY_BYTES_MIN


class Parts:
    """A map state as Spark gives it: tuples in, tuples out."""

    def __init__(self):
        self.stored = {}

    def getValue(self, key):
        return self.stored[key]

    def updateValue(self, key, value):
        self.stored[key] = value

    def removeKey(self, key):
        del self.stored[key]


@pytest.fixture
def folder(tmp_path):
    run_files._open.clear()
    return tmp_path / "runs"


def table(rows):
    return pa.table({"__hash": pa.array(range(rows), pa.uint64()), "n": pa.array(range(rows))})


LARGE = table(COPY_BYTES_MIN // 8)


def store_of(files, prefix="9-0-"):
    return FileRunStore(Parts(), files, prefix)


def names(folder):
    return {path.stem for path in folder.iterdir()}


def test_a_large_run_is_a_file_and_nothing_of_it_is_in_the_state_store(folder):
    store = store_of(RunFiles(folder, run=1))
    run = store.save(7, LARGE)
    assert names(folder) == {run.name}
    assert not store._small._parts.stored
    assert store.load(run).equals(LARGE)
    assert (run.slot, run.rows) == (7, LARGE.num_rows)


def test_a_small_run_lies_in_the_state_store_alone(folder):
    store = store_of(RunFiles(folder, run=1))
    run = store.save(0, table(10))
    assert store.load(run).equals(table(10))
    assert not folder.exists()
    store.drop(run)
    assert not store._small._parts.stored


def test_another_process_reads_what_was_written(folder):
    run = store_of(RunFiles(folder, run=1)).save(0, LARGE)
    run_files._open.clear()
    assert store_of(RunFiles(folder, run=2)).load(run).equals(LARGE)


@pytest.mark.parametrize("harm", ["missing", "torn"])
def test_a_missing_or_torn_file_is_told_with_what_to_do(folder, harm):
    store = store_of(RunFiles(folder, run=1))
    run = store.save(0, LARGE)
    path = folder / f"{run.name}.arrow"
    if harm == "missing":
        path.unlink()
    else:
        os.truncate(path, 1000)
    with pytest.raises(CorruptionError, match=f"{run.name}.*rebuild"):
        store.load(run)


def test_a_file_that_was_dropped_is_kept_for_batches_that_may_be_run_again(folder):
    files = RunFiles(folder, run=1)
    store = store_of(files)
    run = store.save(0, LARGE)
    store.drop(run)
    files.settle()
    for _ in range(BATCHES_KEPT):
        assert store_of(RunFiles(folder, run=1)).load(run).equals(LARGE)
        files = RunFiles(folder, 1, dict(files.left))  # as the manifest gives it to the next batch
        files.settle()
    assert not names(folder)
    assert not files.left


def test_a_sweep_removes_what_an_earlier_run_left_and_no_manifest_names(folder):
    before = RunFiles(folder, run=1)
    named, left, orphan = (store_of(before).save(0, LARGE) for _ in range(3))
    other = store_of(before, "9-1-").save(0, LARGE)
    now = RunFiles(folder, 2, {left.name: 3})
    own = store_of(now).save(
        0, LARGE
    )  # of an attempt that failed, perhaps: the next run sees to it
    store_of(now).sweep({named.name})
    assert names(folder) == {named.name, left.name, other.name, own.name}
    assert orphan.name not in names(folder)


def test_a_run_that_was_replaced_harms_nothing_when_it_wakes(folder):
    asleep = RunFiles(folder, run=1)
    kept = store_of(asleep).save(0, LARGE)
    newer = store_of(RunFiles(folder, run=2)).save(0, LARGE)
    store_of(asleep).sweep({kept.name})  # its manifest does not know of the newer run's file
    assert names(folder) == {kept.name, newer.name}
