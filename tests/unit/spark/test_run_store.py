"""Runs in the state store with copies on disk: the store is the truth, a copy only a shortcut."""

import os

import pyarrow as pa
import pytest

from millstream.spark import run_store
from millstream.spark.run_store import COPY_BYTES_MIN, PART_BYTES, SparkRunStore, copies_folder


class Parts:
    """A map state as Spark gives it: tuples in, tuples out."""

    def __init__(self):
        self.stored = {}
        self.reads = 0

    def getValue(self, key):
        self.reads += 1
        return self.stored[key]

    def updateValue(self, key, value):
        self.stored[key] = value

    def removeKey(self, key):
        del self.stored[key]


@pytest.fixture
def store(tmp_path):
    run_store._open.clear()
    return SparkRunStore(Parts(), tmp_path / "copies", "9-0-")


def table(rows):
    return pa.table({"__hash": pa.array(range(rows), pa.uint64()), "n": pa.array(range(rows))})


LARGE = 2 * PART_BYTES // 16  # two parts and a little


@pytest.mark.not_in_lane("thresholds", "no run is small there")
def test_a_small_run_lies_in_the_state_store_alone(store, tmp_path):
    run = store.save(0, table(10))
    assert run.size_bytes < COPY_BYTES_MIN
    assert store.load(run).equals(table(10))
    assert not (tmp_path / "copies").exists()


@pytest.mark.not_in_lane("thresholds", "it knows the size of parts")
def test_a_large_run_is_read_from_its_copy_without_the_state_store(store):
    run = store.save(7, table(LARGE))
    assert len(store._parts.stored) == 3
    assert store.load(run).equals(table(LARGE))
    assert store._parts.reads == 0
    assert (run.slot, run.rows) == (7, LARGE)


@pytest.mark.not_in_lane("thresholds", "it knows the size of parts")
@pytest.mark.parametrize("harm", ["missing", "torn"])
def test_a_missing_or_torn_copy_is_fetched_again(store, harm):
    run = store.save(0, table(LARGE))
    copy = store._copy(run.name)
    if harm == "missing":
        copy.unlink()
    else:
        os.truncate(copy, 1000)
    assert store.load(run).equals(table(LARGE))
    assert store._parts.reads == 3
    run_store._open.clear()
    assert store.load(run).equals(table(LARGE))
    assert store._parts.reads == 3


def test_the_same_content_saved_twice_has_two_names(store):
    assert store.save(0, table(10)).name != store.save(0, table(10)).name


def test_dropping_a_run_removes_parts_and_copy(store):
    run = store.save(0, table(LARGE))
    store.load(run)
    store.drop(run)
    assert not store._parts.stored
    assert not list(store._copies.iterdir())


def test_a_sweep_removes_what_no_manifest_names_and_leaves_other_buckets_alone(store):
    kept, left = store.save(0, table(LARGE)), store.save(0, table(LARGE))
    other = SparkRunStore(Parts(), store._copies, "9-1-").save(0, table(LARGE))
    store.sweep({kept.name})
    assert {path.stem for path in store._copies.iterdir()} == {kept.name, other.name}
    assert store.load(left).equals(table(LARGE))  # its parts are not for the sweep to judge


def test_each_start_of_each_machine_keeps_its_copies_apart(tmp_path, monkeypatch):
    """They are not synced, and machines of a cluster may share the folder."""
    here = copies_folder(tmp_path)
    assert here == copies_folder(tmp_path)
    monkeypatch.setattr(run_store.Path, "read_text", lambda _: "another\n")
    assert copies_folder(tmp_path) == tmp_path / "another" != here


def test_where_starts_cannot_be_told_apart_copies_serve_one_process(tmp_path, monkeypatch):
    def fail(_):
        raise FileNotFoundError

    monkeypatch.setattr(run_store.Path, "read_text", fail)
    here = copies_folder(tmp_path)
    monkeypatch.setattr(run_store.os, "getpid", lambda: 1)
    assert copies_folder(tmp_path) != here
