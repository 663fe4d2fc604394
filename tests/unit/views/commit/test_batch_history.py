"""The history of batches: as long as stated, with its phases, and there exactly when the batch is."""

from collections import Counter
from datetime import UTC, datetime, timedelta

from millstream.views.commit.batch_history import PhaseTimer, batch_record, with_commits
from millstream.views.commit.committer import BatchResult
from millstream.views.runs.progress import Progress
from millstream.views.state_store import batch_tables
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import Fence

AT = datetime(2026, 1, 1, tzinfo=UTC)


def record(batch_id, timer, **counts):
    at = AT + timedelta(seconds=batch_id)
    zero = dict.fromkeys(("emitted", "held", "late", "filtered", "dead", "duplicate"), 0)
    progress = Progress(
        app="app",
        batch_id=batch_id,
        at=at,
        duration_ms=10.0,
        watermark=None,
        lag={"t/0": 3, "t/1": 4},
        behind_s=1.5,
        state_bytes=12,
        **{**zero, "read": 5, **counts},
    )
    result = BatchResult(
        step_counts={"t": Counter(read=5, late=0), "w": Counter(read=5, late=2)},
        state={"w": Counter(bytes=12, rows=2)},
        worked_ms={"w": 3.04},
        position={"t": {"0": 5}},
    )
    return batch_record(progress, result, timer, 1)


def commit(store, run, batch_id, kept):
    fence = Fence("app", "main", run, batch_id)
    return store.commit(fence, [], position={}, status={}, record=kept)


def test_the_newest_batches_are_kept_and_a_repeated_one_is_kept_once(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_tables, "BATCHES_KEPT", 3)
    with SqliteStateStore(tmp_path / "views.db") as store:
        run, _ = store.begin_run("app", "main", "c")
        for number in range(5):
            assert commit(store, run, number, {"batch_id": number})
        assert not commit(store, run, 4, {"batch_id": 99})
    with SqliteStateStore(tmp_path / "views.db", readonly=True) as again:
        assert [one["batch_id"] for one in again.batches("app")] == [2, 3, 4]
        assert [one["batch_id"] for one in again.batches("app", limit=2)] == [3, 4]
        assert [one["batch_id"] for one in again.batches("app", since=4)] == [4]
        assert again.batches("other") == []


def test_a_batch_has_its_phases_and_the_next_one_its_commit():
    now = iter([0.0, 0.002, 0.002, 0.009, 0.02, 0.05, 1.0, 1.001])
    timer = PhaseTimer(lambda: next(now))
    timer.begin(4.0)
    with timer.phase("read"):
        pass
    with timer.phase("stages"):
        pass
    first = record(0, timer)
    with timer.phase("commit"):
        pass
    timer.begin(1.0)
    with timer.phase("read"):
        pass
    records = [first, record(1, timer), {**record(3, timer), "commit_before_ms": 7.0}]
    found = with_commits(records)
    assert [one["phases"] for one in found] == [
        {"plan": 4.0, "read": 2.0, "stages": 7.0, "commit": 30.0},
        {"plan": 1.0, "read": 1.0},
        {"plan": 1.0, "read": 1.0},
    ]
    assert first["steps"] == {"t": {"read": 5}, "w": {"read": 5, "late": 2, "worked": 3.0}}
    assert (first["unread"], first["state"]) == (7, {"w": {"bytes": 12, "rows": 2}})


def test_a_store_of_before_has_no_history(tmp_path):
    with SqliteStateStore(tmp_path / "views.db") as store, store._transaction() as db:
        db.execute("DROP TABLE _batches")
    with SqliteStateStore(tmp_path / "views.db", readonly=True) as old:
        assert old.batches("app") == []
