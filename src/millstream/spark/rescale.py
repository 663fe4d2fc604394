"""Dividing an app's state among another number of Spark partitions, while the app is stopped.

Keys stay in their buckets; it is the buckets that Spark's partitions share out anew. Spark rewrites
the state as a batch of its own, without records; the views then take note of that batch, so that
both go on with the same number.

A rescale goes through these steps; a crash after each leaves what is said, and the next start of
the app, or of a rescale, does what is said (:func:`settle_rescale`):

======================================  =========================================  ==================
step                                    after a crash there                        the next start
======================================  =========================================  ==================
1. the checkpoint is copied (by links)  a copy without ``rescale.json``            removes the copy
2. ``rescale.json`` is written          a copy of the whole checkpoint             puts the copy back
3. Spark has rewritten the state        state of both kinds, perhaps half of one   puts the copy back
4. the views have the batch             new state, and views that fit it           goes on with step 5
5. ``job.json`` has the new number      the same                                   goes on with step 6
6. ``rescale.json``, copy are removed   nothing                                    nothing to do
======================================  =========================================  ==================
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.errors import ConfigError
from millstream.spark.birth import Birth, stored_birth, write_shuffle_partitions, write_whole
from millstream.spark.internals import repartition_state
from millstream.spark.session import start_session, stop_session
from millstream.views.running import runs_alive
from millstream.views.schema import Fence
from millstream.views.store import ViewStore

if TYPE_CHECKING:
    from collections.abc import Sequence

_INTENT = "rescale.json"
_COPY = "checkpoint-before-rescale"
_JOB = "main"


@dataclass(frozen=True)
class Rescaled:
    """What a rescale did."""

    app: str
    partitions_before: int
    partitions: int


def rescale(app: str, folder: Path, partitions: int) -> Rescaled:
    """Divide the state of the app in ``folder`` among so many Spark partitions.

    Raises:
        ConfigError: the app runs, has no state yet, has a batch half done, or has fewer buckets.
        EnvironmentProblem: PySpark or Java is missing.
    Cost: the whole state is read and written once, on this machine.
    """
    _require_stopped(app, folder)
    with ViewStore(folder / "views.db") as store:
        settle_rescale(folder, store, app)
        birth = _checked(app, folder, partitions)
        if birth.shuffle_partitions == partitions:
            return Rescaled(app, partitions, partitions)
        last = _last_whole_batch(app, folder)
        checkpoint = folder / "checkpoint"
        _copy_by_links(checkpoint, folder / _COPY)  # step 1
        intent = {"partitions": partitions, "batch_id": last + 1}
        write_whole(folder / _INTENT, json.dumps(intent))  # step 2
        spark = start_session(app, folder=folder)
        try:
            repartition_state(spark, checkpoint.absolute(), partitions)  # step 3
        finally:
            stop_session(spark)
        _note_batch(store, app, folder, last + 1)  # step 4
        settle_rescale(folder, store, app)  # steps 5 and 6
    return Rescaled(app, birth.shuffle_partitions, partitions)


def settle_rescale(folder: Path, store: ViewStore, app: str) -> None:
    """Finish a rescale that was interrupted, or undo it: see the table above."""
    intent_path, copy = folder / _INTENT, folder / _COPY
    if not intent_path.exists():
        shutil.rmtree(copy, ignore_errors=True)
        return
    intent = json.loads(intent_path.read_text())
    if store.last_batch_id(app, _JOB) == intent["batch_id"]:
        write_shuffle_partitions(folder, intent["partitions"])
    elif copy.exists():
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        copy.rename(folder / "checkpoint")
    intent_path.unlink()
    shutil.rmtree(copy, ignore_errors=True)


def _require_stopped(app: str, folder: Path) -> None:
    alive = runs_alive(folder)
    if alive:
        raise ConfigError(
            f"{app} is running (process {alive[-1].pid}). Stop it first: millstream stop {app}."
        )


def _checked(app: str, folder: Path, partitions: int) -> Birth:
    birth = stored_birth(folder)
    if birth is None:
        raise ConfigError(
            f"{app} has no state yet. Run it; its first run divides the state among as many Spark "
            "partitions as it has cores, if it has as many buckets."
        )
    if not 1 <= partitions <= birth.bucket_count:
        raise ConfigError(
            f"{partitions} partitions were asked for; the state of {app} is in "
            f"{birth.bucket_count} buckets, which at most as many partitions can share. Give 1 to "
            f"{birth.bucket_count}. How many buckets there are is fixed at birth, by App(buckets=…)."
        )
    return birth


def _last_whole_batch(app: str, folder: Path) -> int:
    """Give the last batch; it must be complete, as Spark repartitions between batches only."""
    begun, done = (_numbers(folder / "checkpoint" / kind) for kind in ("offsets", "commits"))
    if not done or max(begun) != max(done):
        raise ConfigError(
            f"The last batch of {app} is not complete: its run was killed. Run it once more "
            "(--until caught-up will do), and rescale then."
        )
    return max(done)


def _numbers(folder: Path) -> Sequence[int]:
    return [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()]


def _copy_by_links(source: Path, copy: Path) -> None:
    """Copy a checkpoint, file by file as a hard link: no file of a checkpoint changes in place."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source, copy, copy_function=os.link)


def _note_batch(store: ViewStore, app: str, folder: Path, batch_id: int) -> None:
    checkpoint_id = (folder / "checkpoint" / "millstream-checkpoint-id").read_text().strip()
    run, _ = store.begin_run(app, _JOB, checkpoint_id)
    status = store.status(app, _JOB)
    store.commit(Fence(app, _JOB, run, batch_id), [], position={}, status=status)
