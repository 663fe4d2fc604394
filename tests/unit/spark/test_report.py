"""Where a run begins and ends, without Spark: what refuses it, and what it tells."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from millstream.engine.batch_runner import RunTotals
from millstream.engine.frame_files import FrameFiles
from millstream.engine.job import BegunRun, _report, watermark_before
from millstream.errors import ConfigError, FencedError
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.spark.job import _Query, run_job
from millstream.views.commit.committer import BatchCommitter
from millstream.views.runs.control_files import write_reset_marker
from millstream.views.runs.dead_letter_share import DeadLetterShare
from millstream.views.schema import Fence
from millstream.views.state_store.sqlite_store import SqliteStateStore


@pytest.fixture
def state_store(tmp_path):
    with SqliteStateStore(tmp_path / "views.db") as state_store:
        yield state_store


def read_nothing():
    """A sink that took no batch."""
    return SimpleNamespace(totals=RunTotals(), dead_letter_share=DeadLetterShare(0.5, None))


def committed(state_store, watermark):
    run, batch_id = state_store.begin_run("app", "main", "c")
    fence = Fence("app", "main", run, batch_id)
    state_store.commit(fence, [], position={}, status={"watermark": watermark})


def test_a_run_that_found_nothing_new_tells_the_watermark_that_its_state_holds(state_store):
    committed(state_store, "2026-01-31T12:00:00+00:00")
    reached = watermark_before(state_store, "app")
    report = _report("app", "caught-up", read_nothing(), reached, 1.0)
    assert report.watermark == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert "watermark 2026-01-31T12:00:00+00:00" in str(report)


def test_no_run_begins_while_its_app_is_being_reset(tmp_path):
    write_reset_marker(tmp_path)
    job = SimpleNamespace(app="app", folder=tmp_path)
    with pytest.raises(ConfigError, match="End it: `millstream reset"):
        run_job(job, None)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_run_that_was_replaced_says_so_and_not_what_else_failed_by_it(
    tmp_path, state_store, monkeypatch, replaced
):
    targets = BatchCommitter(JobPlan("app", (), (), (), (), Buckets(1)), state_store, [])
    targets.begin_run("main", "c")
    swept = FileNotFoundError(2, "No such file or directory", "frames/1/abc")
    query = SimpleNamespace(exception=lambda: swept, stop=lambda: None)
    monkeypatch.setattr(_Query, "_start", lambda _: query)
    monkeypatch.setattr(_Query, "_wait", lambda *_: "caught-up")
    sink = SimpleNamespace(committer=targets, error=None, stages=None, frame_files=FrameFiles(None))
    options = SimpleNamespace(on_phase=lambda _: None, on_started=lambda _: None)
    job = SimpleNamespace(app="app", folder=tmp_path)
    begun = BegunRun(job, options, None, targets, None, None, None, 0)
    run = _Query(begun, sink, None)
    if replaced:
        state_store.begin_run("app", "main", "c")
    with pytest.raises(FencedError if replaced else FileNotFoundError) as raised:
        run.run()
    assert ("was replaced by run 2" in str(raised.value)) is replaced
    assert raised.value.__context__ is None  # nothing stands above it


def test_a_watermark_that_no_batch_has_set_is_not_yet_set(state_store):
    assert watermark_before(state_store, "app") is None
    committed(state_store, None)
    report = _report("app", "caught-up", read_nothing(), watermark_before(state_store, "app"), 1.0)
    assert "watermark not yet set" in str(report)
