"""A writer killed at any moment leaves whole batches behind, and its successor goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millstream.views.state_store.sqlite_store import SqliteStateStore

WRITER = """
import sys
from pathlib import Path
import polars as pl
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import Fence, ViewChange, ViewSchema

store = SqliteStateStore(Path(sys.argv[1]))
for name in ("one", "two"):
    store.declare(ViewSchema(name, (("k", "int"), ("n", "int")), ("k",)))
run, batch_id = store.begin_run("app", "main", "checkpoint")
print(batch_id, flush=True)
while True:
    rows = pl.DataFrame({"k": range(500), "n": [batch_id] * 500})
    gone = pl.DataFrame({"k": [600 + batch_id - 1]})
    mark = pl.DataFrame({"k": [600 + batch_id], "n": [batch_id]})
    changes = [ViewChange("one", pl.concat([rows, mark]), gone), ViewChange("two", rows)]
    store.commit(
        Fence("app", "main", run, batch_id), changes,
        position={"t": batch_id}, status={"batch": batch_id}, ledger=[{"batch": batch_id}],
    )
    print(batch_id + 1, flush=True)
    batch_id += 1
"""


def _run_and_kill(path: Path, delay_s: float) -> tuple[int, int]:
    """Return what the writer said first and last: the next batch it was about to commit."""
    source = Path(__file__).resolve().parents[4] / "src"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    assert writer.stdout is not None
    first = int(writer.stdout.readline())
    time.sleep(delay_s)  # the moment of the kill is what is random here; nothing waits for it
    writer.send_signal(signal.SIGKILL)
    said = writer.stdout.read().split()
    writer.stdout.close()
    writer.wait()
    return first, int(said[-1]) if said else first


@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_writer_leaves_rows_changes_and_fence_in_agreement(tmp_path, seed):
    rng = random.Random(seed)
    path = tmp_path / "views.db"
    expected_first = 0
    for _ in range(4):
        first, acknowledged = _run_and_kill(path, rng.uniform(0.0, 0.15))
        assert first == expected_first, f"seed {seed}"
        with SqliteStateStore(path, readonly=True) as store:
            committed = store.status("app").get("batch", -1) + 1
            # What was acknowledged is there; at most one batch more, whose answer was cut off.
            assert acknowledged <= committed <= acknowledged + 1, f"seed {seed}"
            _agree(store, committed)
        expected_first = committed


def _agree(store: SqliteStateStore, committed: int) -> None:
    last = committed - 1
    one, two = store.scan("one"), store.scan("two")
    if not committed:
        assert one.is_empty()
        assert two.is_empty()
        return
    assert store.position("app") == {"t": last}
    assert [line["batch"] for line in store.ledger("app")] == list(range(committed))
    assert two.rows() == [(k, last) for k in range(500)]
    assert one.rows() == [*two.rows(), (600 + last, last)]
    for name, rows in (("one", one), ("two", two)):
        changes = store.changes(name)
        assert changes["_seq"].to_list() == list(range(1, changes.height + 1))
        assert changes["_batch_id"].unique().sort().to_list() == list(range(committed))
        replayed: dict[int, int] = {}
        for operation, key, n in changes.select("_op", "k", "n").iter_rows():
            if operation == "delete":
                del replayed[key]
            else:
                replayed[key] = n
        assert sorted(replayed.items()) == rows.rows()
