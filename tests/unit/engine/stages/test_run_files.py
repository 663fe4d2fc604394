"""Runs as files of the app's folder: what is named stays readable, and what nobody may want goes."""

import os

import pyarrow as pa
import pytest

from millstream.engine.stages import run_files
from millstream.engine.stages.run_files import (
    OWN_FILE_BYTES_MIN,
    ObjectsInUse,
    RunFiles,
    object_name,
)
from millstream.errors import CorruptionError
from millstream.object_store.folder import FolderStore


@pytest.fixture
def folder(tmp_path):
    forget()
    return tmp_path / "runs"


def forget():
    """Be a process that has opened nothing yet."""
    for opened in (run_files._mapped, run_files._copied):
        for path in list(opened.tables):
            opened.forget(path)
        assert opened.bytes == 0


def table(rows, first=0):
    numbers = range(first, first + rows)
    return pa.table({"__hash": pa.array(numbers, pa.uint64()), "n": pa.array(numbers)})


LARGE = table(OWN_FILE_BYTES_MIN // 8)


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.not_in_lane("thresholds", "no run is small there")
def test_a_large_run_is_a_file_of_its_own(folder):
    files = RunFiles(FolderStore(folder), 1)
    run = files.save(7, LARGE)
    files.sync()
    assert names(folder) == {run.name} == {object_name(run.name)}
    forget()
    assert RunFiles(FolderStore(folder), 2).load(run).equals(LARGE)
    assert (run.slot, run.rows) == (7, LARGE.num_rows)


@pytest.mark.not_in_lane("thresholds", "no run is small there")
def test_small_runs_share_a_bundle_which_is_written_once(folder):
    files = RunFiles(FolderStore(folder), 1)
    tables = [table(n, n) for n in (1, 10, 333)]
    runs = [files.save(n, each) for n, each in enumerate(tables)]
    assert not folder.exists()
    assert [files.load(run) for run in runs] == tables  # by the task that made them, before
    files.sync()
    (bundle,) = names(folder)
    assert {object_name(run.name) for run in runs} == {bundle}
    forget()
    assert [RunFiles(FolderStore(folder), 2).load(run) for run in runs] == tables
    more = files.save(0, table(5))
    files.sync()
    assert object_name(more.name) != bundle


@pytest.mark.parametrize("rows", [10, LARGE.num_rows], ids=["small", "large"])
@pytest.mark.parametrize("harm", ["missing", "torn"])
def test_a_missing_or_torn_file_is_told_with_what_to_do(folder, harm, rows):
    files = RunFiles(FolderStore(folder), 1)
    run = files.save(0, table(rows))
    files.sync()
    forget()
    path = folder / object_name(run.name)
    if harm == "missing":
        path.unlink()
    else:
        os.truncate(path, 100)
    with pytest.raises(CorruptionError, match=f"{path.name} has .*millstream reset"):
        files.load(run)


@pytest.mark.not_in_lane("thresholds", "no run is small there")
def test_a_bundle_goes_when_none_of_its_runs_is_named_any_longer(folder):
    files = RunFiles(FolderStore(folder), 1)
    first, second = files.save(0, table(1)), files.save(1, table(2))
    files.sync()
    large = files.save(0, LARGE)
    files.sync()
    used = ObjectsInUse(FolderStore(folder))
    used.replace_manifest((), [first.name, second.name])
    used.replace_manifest([first.name], [large.name])
    assert names(folder) == {object_name(first.name), large.name}
    used.replace_manifest([large.name, second.name], [second.name])
    assert names(folder) == {object_name(first.name)}
    used.replace_manifest([second.name], [])
    assert not names(folder)


@pytest.mark.not_in_lane("thresholds", "no run is small there")
def test_a_sweep_removes_what_an_earlier_run_left_and_no_manifest_names(folder):
    made = []
    for run in (1, 1, 2, 3):
        files = RunFiles(FolderStore(folder), run)
        made.append(files.save(0, LARGE).name)
        files.sync()
    named, _orphan, own, newer = made
    used = ObjectsInUse(FolderStore(folder))
    used.replace_manifest((), [named])
    used.sweep(2)
    assert names(folder) == {named, own, newer}


@pytest.mark.not_in_lane("thresholds", "no run is small there")
def test_what_a_process_has_opened_is_bounded(folder, monkeypatch):
    monkeypatch.setattr(run_files._copied, "count_max", 3)
    files = RunFiles(FolderStore(folder), 1)
    runs = [files.save(0, table(n + 1)) for n in range(6)]
    assert len(run_files._copied.tables) == 3
    assert [files.load(run).num_rows for run in runs] == [1, 2, 3, 4, 5, 6]
    files.sync()
    assert [files.load(run).num_rows for run in runs] == [1, 2, 3, 4, 5, 6]
    assert len(run_files._copied.tables) == 3
    assert run_files._copied.bytes == sum(each.nbytes for each in run_files._copied.tables.values())
