"""Outputs that tasks write: once each, whatever fails, comes twice or comes late, and wherever the driver dies."""

from __future__ import annotations

import itertools
import random
from contextlib import ExitStack

import polars as pl
import pytest
from task_attempts import Attempts

import millstream as ms
from millstream.errors import FencedError, StagedRowsLostError
from millstream.kernels.frames import ORDER, PORT_LEDGER, FrameRow, encode_frame, encode_message
from millstream.kernels.plan import DatasetSinkSpec, JobPlan, SinkPlan, ViewSinkSpec
from millstream.kernels.state.keyhash import Buckets
from millstream.spark import output_tasks
from millstream.spark.output_tasks import OutputTasks
from millstream.testing.disk import SimulatedCrash
from millstream.views.commit.committer import collect_results
from millstream.views.commit.open_committer import open_committer
from millstream.views.sinks.dataset import DatasetSink
from millstream.views.sinks.dataset_address import place_of
from millstream.views.sinks.dataset_files import DatasetStager

PORTS = {"set": 8, "there": 9, "here": 10}
COLUMNS = {"k": pl.Int64(), "v": pl.Int64()}


class App:
    """An app with a dataset, a view here, and one in a database if there is one; and what it should hold."""

    def __init__(self, folder, url, seed, dataset=None):
        self.folder, self.url = folder, url
        self.dataset = dataset or str(folder / "set")
        self.generator = random.Random(seed)
        self.plan = JobPlan("app", (), (), (), tuple(self._sinks()), Buckets(4, 77))
        self.dies_at, self.steps = None, 0
        self.opened = ExitStack()
        self.woken = []
        self.start()

    def _sinks(self):
        schema = tuple(COLUMNS.items())
        spec = DatasetSinkSpec(self.dataset, ())
        yield SinkPlan("set", PORTS["set"], (), schema, spec)
        yield SinkPlan("here", PORTS["here"], ("k",), schema)
        if self.url is not None:
            yield SinkPlan("there", PORTS["there"], ("k",), schema, ViewSinkSpec(self.url))

    def step(self):
        self.steps += 1
        if self.steps == self.dies_at:
            raise SimulatedCrash(f"at step {self.steps}")

    def start(self):
        """Begin a run, as after a crash: what an earlier one had running goes on at some time."""
        self.committer = self.opened.enter_context(
            open_committer(self.plan, self.folder / "views.db", self.folder / "log")
        )
        self.next = self.committer.begin_run("main", "one")
        self.tasks = Attempts(self.generator, self.step)
        self.woken.append(self.tasks)
        for each in (*self.committer.sinks, self.committer.state_store):
            each.commit = self._stepping(each.commit)
        self.outputs = OutputTasks(self.plan, self.tasks, self.committer.stager, pytest.fail)

    def _stepping(self, commit):
        def stepping(*given, **named):
            self.step()
            done = commit(*given, **named)
            self.step()
            return done

        return stepping

    def batch(self, number):
        """Make the frames of a batch; the same ones each time."""
        generator = random.Random(number)
        frames = []
        orders = list(range(1000 * number, 1000 * number + 60))
        generator.shuffle(orders)
        for _ in range(5):
            own = [orders.pop() for _ in range(generator.randrange(1, 9))]
            table = pl.DataFrame(
                {"k": [generator.randrange(9) for _ in own], "v": own, ORDER: own},
                schema={**COLUMNS, ORDER: pl.Int64()},
            )
            frames += [
                FrameRow(PORTS[sink.name], 0, encode_frame(table)) for sink in self.plan.sinks
            ]
        rows = sum(
            pl.read_ipc_stream(bytes(row.frame)).height for row in frames[:: len(self.plan.sinks)]
        )
        ports = {str(sink.port): rows for sink in self.plan.sinks}
        report = encode_message({"steps": {}, "sent": ports})
        return [*frames, FrameRow(PORT_LEDGER, 0, report)]

    def run(self, number):
        """Commit a batch as a run does."""
        left, staged = self.outputs.stage(number, self.batch(number))
        result = collect_results(self.plan, left, staged)
        return self.committer.commit(number, result, {})

    def expected(self, batches):
        tables = [
            pl.read_ipc_stream(bytes(row.frame))
            for number in range(batches)
            for row in self.batch(number)
            if row.port == PORTS["set"]
        ]
        rows = sorted(row[:2] for table in tables for row in table.rows())
        last = dict(sorted(rows, key=lambda row: row[1]))  # values are places in the log
        return rows, sorted(last.items())

    def check(self, batches):
        rows, last = self.expected(batches)
        assert sorted(ms.dataset(self.dataset).scan().collect().rows()) == rows
        assert sorted(self.committer.state_store.scan("here").rows()) == last
        if self.url is not None:
            with ms.view("there", log=self.folder, store=self.url) as view:
                assert sorted(view.scan().rows()) == last

    def leftovers(self):
        place = place_of(self.dataset)
        manifest = place.read()
        named = {file.path for file in (*manifest.files, *manifest.replaced)}
        return place.files(manifest).keys() - named


@pytest.fixture(autouse=True)
def all_in_tasks(monkeypatch):
    monkeypatch.setattr(output_tasks, "DRIVER_BYTES_MAX", -1)
    monkeypatch.setattr(output_tasks, "_STAGED_BYTES_MAX", 2000)


@pytest.fixture(params=["folder", "URL"])
def dataset_at(request):
    """Give the address of the dataset of an app: None for one in its folder."""
    if request.param == "folder":
        return lambda _number: None
    url = request.getfixturevalue("s3_url")
    return lambda number: f"{url}/{number}"


@pytest.mark.timeout(600)
def test_a_driver_that_dies_anywhere_leaves_each_row_once(tmp_path, dataset_at):
    seen = 0
    for dies_at in itertools.count(1):
        folder = tmp_path / str(dies_at)
        folder.mkdir()
        app = App(folder, None, dies_at, dataset_at(dies_at))
        app.run(0)
        app.steps, app.dies_at = 0, dies_at
        died = False
        try:
            app.run(1)
        except SimulatedCrash:
            died = True
        app.dies_at = None
        if app.generator.random() < 0.5:
            app.tasks.wake()
        app.start()
        if app.next == 1:
            assert app.run(1)
        app.check(2)
        app.run(2)
        for tasks in app.woken:
            tasks.wake()
        app.check(3)
        seen += bool(app.leftovers())
        app.start()
        assert not app.leftovers()
        app.check(3)
        app.opened.close()
        if not died:
            break
    assert dies_at > 8
    assert seen > 3


def test_a_driver_that_dies_anywhere_leaves_each_row_once_in_a_database(tmp_path, database):
    app = App(tmp_path, database, seed=0)
    number = 0
    for dies_at in itertools.count(1, step=3):
        app.steps, app.dies_at = 0, dies_at
        try:
            app.run(number)
        except SimulatedCrash:
            app.dies_at = None
            app.start()
            if app.next == number:
                assert app.run(number)
        else:
            break
        number += 1
        app.check(number)
    for tasks in app.woken:
        tasks.wake()
    app.check(number + 1)
    assert number > 5
    app.opened.close()


def test_a_driver_that_was_replaced_commits_nothing(tmp_path):
    app = App(tmp_path, None, seed=3)
    app.run(0)
    old, outputs, plan = app.committer, app.outputs, app.plan
    left, staged = outputs.stage(1, app.batch(1))
    app.start()
    with pytest.raises(FencedError):
        old.commit(1, collect_results(plan, left, staged), {})
    app.check(1)
    left, staged = outputs.stage(1, app.batch(1))  # it has not noticed yet
    with pytest.raises(FencedError):
        old.commit(1, collect_results(plan, left, staged), {})
    assert app.run(1)
    app.check(2)
    app.opened.close()


def test_files_that_the_driver_does_not_see_are_refused(tmp_path):
    app = App(tmp_path, None, seed=4)
    left, staged = app.outputs.stage(0, app.batch(0))
    result = collect_results(app.plan, left, staged)
    file = tmp_path / "set" / staged["set"].parts[0].files[0].path
    kept = file.read_bytes()
    file.write_bytes(kept[:-1])
    with pytest.raises(StagedRowsLostError, match=f"{len(kept)} bytes, and the driver finds"):
        app.committer.commit(0, result, {})
    file.unlink()
    with pytest.raises(StagedRowsLostError, match="finds no such file"):
        app.committer.commit(0, result, {})
    file.write_bytes(kept)
    assert app.committer.commit(0, result, {})
    app.check(1)
    app.opened.close()


def test_what_tasks_cannot_reach_goes_through_the_driver_and_the_user_is_told_once(
    tmp_path, monkeypatch
):
    app = App(tmp_path, None, seed=5)
    said = []
    app.outputs.on_notice = said.append
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(DatasetStager, "is_reachable", lambda _: False)
        app.run(0)
    app.run(1)
    assert len(said) == 1
    assert "'set'" in said[0]
    app.check(2)
    app.opened.close()


def test_a_small_output_goes_through_the_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(output_tasks, "DRIVER_BYTES_MAX", 1 << 20)
    app = App(tmp_path, None, seed=6)
    rows = app.batch(0)
    assert app.outputs.stage(0, rows) == (rows, {})
    assert app.run(0)
    app.check(1)
    app.opened.close()


def test_the_class_of_a_dataset_gives_a_stager_for_its_own_output_alone(tmp_path):
    app = App(tmp_path, None, seed=7)
    (sink,) = (each for each in app.committer.sinks if isinstance(each, DatasetSink))
    fence = app.committer._fence(0)
    assert sink.stager(fence, "here") is None
    assert sink.stager(fence, "set") is not None
    app.opened.close()
