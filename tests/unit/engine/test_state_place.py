"""Which place has the state of an app: of two first runs, of an older state store, and of two copies of one."""

import shutil
from contextlib import ExitStack
from unittest import mock

import pytest

from millstream.engine.state_place import begin_at_place, load_or_create_place
from millstream.errors import ConfigError, FencedError
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.object_store.address import parse_state_url
from millstream.object_store.folder import FolderStore
from millstream.object_store.generations import register_run
from millstream.testing.disk import SimulatedCrash
from millstream.views.commit.committer import BatchCommitter
from millstream.views.schema import JOB
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import open_state_store, parse_state_store


class Driver:
    """What a run does with its state store and its place before its first batch."""

    def __init__(self, location, url):
        self.store = open_state_store(location)
        self.committer = BatchCommitter(JobPlan("app", (), (), (), (), Buckets(2)), self.store, [])
        self.url = url

    def find(self, folder):
        self.place = load_or_create_place("app", self.store, self.url, folder)
        return self.place

    def take_number(self):
        self.committer.begin_run(JOB, "checkpoint", partitioning={})
        return self.committer.run

    def register(self):
        begin_at_place(self.place, self.committer)

    def start(self, folder):
        self.find(folder)
        number = self.take_number()
        self.register()
        return number


@pytest.fixture
def driver(tmp_path):
    url = parse_state_url(f"file://{tmp_path}/state")
    with ExitStack() as opened:

        def make(location):
            made = Driver(location, url)
            opened.callback(made.store.close)
            return made

        yield make


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request, tmp_path):
    if request.param == "sqlite":
        return tmp_path / "views.db"
    return parse_state_store(request.getfixturevalue("database"), "app", what="The store")


def test_an_older_state_store_is_refused_however_often_it_is_tried(driver, location, tmp_path):
    driver(location).start(tmp_path)
    one = driver(location)
    register_run(one.find(tmp_path), 4)  # by the newer copy, of which this one is a backup
    for _ in range(6):
        with pytest.raises(ConfigError, match="was used by run 4 of the app"):
            driver(location).start(tmp_path)
    assert one.store.newest_run("app", JOB) == 1


def test_two_first_runs_at_once_have_one_place(driver, location, tmp_path, monkeypatch):
    first, second = driver(location), driver(location)
    found = StateStore.description

    def interrupted(store, app, name):
        before = found(store, app, name)
        monkeypatch.setattr(StateStore, "description", found)
        first.find(tmp_path)
        return before

    monkeypatch.setattr(StateStore, "description", interrupted)
    assert second.find(tmp_path) == first.place


def test_of_two_copies_that_begin_at_once_one_is_refused_from_then_on(driver, tmp_path):
    file, copy = tmp_path / "views.db", tmp_path / "copy.db"
    original = driver(file)
    original.start(tmp_path)
    original.store.close()
    shutil.copy(file, copy)
    one, other = driver(file), driver(copy)
    for each in (one, other):
        each.find(tmp_path)
        assert each.take_number() == 2
    one.register()
    with pytest.raises(ConfigError, match="was used by run 2"):
        other.register()
    for _ in range(3):
        with pytest.raises(ConfigError, match="was used by run 2"):
            driver(copy).start(tmp_path)
    assert driver(file).start(tmp_path) == 3


def test_a_run_that_a_newer_one_has_replaced_is_told_so_and_the_store_stays_in_use(
    driver, location, tmp_path
):
    old, new = driver(location), driver(location)
    old.find(tmp_path)
    old.take_number()
    new.start(tmp_path)
    with pytest.raises(FencedError):
        old.register()
    assert driver(location).start(tmp_path) == 3


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("step", ["put", "sync", "delete"])
def test_after_a_crash_while_a_run_is_noted_the_next_one_begins_and_ends_its_mark(
    driver, tmp_path, step, is_done
):
    def crash(store, *given):
        if is_done:
            real(store, *given)
        raise SimulatedCrash

    driver(tmp_path / "views.db").start(tmp_path)
    killed, real = driver(tmp_path / "views.db"), getattr(FolderStore, step)
    killed.find(tmp_path)
    killed.take_number()
    with mock.patch.object(FolderStore, step, crash), pytest.raises(SimulatedCrash):
        killed.register()
    assert driver(tmp_path / "views.db").start(tmp_path) == 3
    marks = (tmp_path / "state" / killed.place.prefix / "started").iterdir()
    assert [path.name for path in marks] == [f"{3:012d}"]


def test_files_that_a_file_system_leaves_beside_the_runs_are_passed_over(driver, tmp_path):
    one = driver(tmp_path / "views.db")
    one.start(tmp_path)
    (tmp_path / "state" / one.place.prefix / "started" / ".nfs0001").touch()
    assert driver(tmp_path / "views.db").start(tmp_path) == 2
