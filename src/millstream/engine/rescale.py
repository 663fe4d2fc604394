"""Rescaling: divides an app's state into more or fewer buckets, and the work on it among more or fewer tasks.

The command only says what is wanted. The next run makes the manifests of the new buckets of those that there are
(:mod:`millstream.kernels.state.rescale`), which name the same runs; no run is read or written for it.

===============================================  ===================================================================
a crash after                                    leaves
===============================================  ===================================================================
1. the numbers are in the state store            the state as it was; the next run goes on with step 2
2. the next run has its number, and fences       the same
   those before
3. one transaction of the state store has        the state of the new buckets, which the next run finds. Its runs have the
   replaced all manifests                        objects that there were, each named by one bucket or more; so none is
                                                 removed before the last of them has folded it
===============================================  ===================================================================

A batch that was begun with the buckets before, and that others may know of, is repeated with them: of such a batch a
topic or a database may have its part, and ``enrich`` has asked for its keys as they were divided. Then the run is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from millstream.engine.job_metadata import JobMetadata, load_job_metadata, save_job_metadata
from millstream.engine.stages.journal_place import JournalPlace
from millstream.errors import ConfigError
from millstream.kernels.plan import JobPlan
from millstream.kernels.rescale import rescale_manifests
from millstream.views.runs.control_files import active_runs
from millstream.views.sink import RunStart
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import STATE_STORE_FILE, StoreLocation

BUCKETS_MAX = 4096


@dataclass(frozen=True)
class RescaleResult:
    """What a rescale did: how the state is divided from the next run on, and how it was."""

    app: str
    partitions_before: int
    partitions: int
    buckets_before: int
    buckets: int


def rescale(
    app: str,
    folder: Path,
    partitions: int | None = None,
    location: StoreLocation | None = None,
    *,
    buckets: int | None = None,
) -> RescaleResult:
    """Set the number of buckets of the app in ``folder``, and that of the tasks that share them.

    ``location`` is that of its state store, if it is not in the folder. What is not given stays; there are never
    more tasks than buckets.

    Raises:
        ConfigError: the app runs, has no state yet, or has fewer buckets.
        ConflictError: a run that has just begun divides the state.
    Cost: none that grows with the state.
    """
    alive = active_runs(folder)
    if alive:
        raise ConfigError(
            f"{app} is running (process {alive[-1].pid}). Stop it first: millstream stop {app}."
        )
    location = location or folder / STATE_STORE_FILE
    before = _metadata(app, location)
    wanted = _wanted(app, before, partitions, buckets)
    if wanted != before:
        save_job_metadata(app, location, wanted, was=before)  # step 1
    return RescaleResult(
        app, before.partitions, wanted.partitions, before.bucket_count, wanted.bucket_count
    )


def _metadata(app: str, location: StoreLocation) -> JobMetadata:
    metadata = load_job_metadata(app, location)
    if metadata is None:
        raise ConfigError(
            f"{app} has no state yet. Run it; its first run divides the work among as many tasks as "
            "it has cores, if it has as many buckets."
        )
    return metadata


def _wanted(
    app: str, before: JobMetadata, partitions: int | None, buckets: int | None
) -> JobMetadata:
    count = before.bucket_count if buckets is None else buckets
    if not 1 <= count <= BUCKETS_MAX:
        raise ConfigError(f"{count} buckets were requested. Give 1 to {BUCKETS_MAX}.")
    if partitions is None:
        partitions = min(before.partitions, count)
    if not 1 <= partitions <= count:
        raise ConfigError(
            f"{partitions} partitions were requested; the state of {app} is in "
            f"{count} buckets, and there can be no more partitions than buckets. Give 1 to "
            f"{count}, or more buckets: --buckets {partitions}."
        )
    if count == before.bucket_count:
        return replace(before, partitions=partitions)
    state_buckets = before.state_buckets or before.bucket_count
    return replace(
        before,
        bucket_count=count,
        partitions=partitions,
        state_buckets=0 if count == state_buckets else state_buckets,
        declared_buckets=before.declared_buckets or before.bucket_count,
    )


def divide_state(
    store: StateStore,
    start: RunStart,
    plan: JobPlan,
    metadata: JobMetadata,
    *,
    next_batch_id: int,
    journals: JournalPlace,
) -> None:
    """Make the manifests of the wanted number of buckets, if those of another number are there.

    Call it in a run that has begun, before its first batch.

    Raises:
        ConfigError: answers of ``enrich`` are there for a batch that was begun and not committed.
        FencedError: a newer run has begun.
        ConflictError: another run has divided the state since this one read ``metadata``.
    """
    before, after = metadata.state_buckets, metadata.bucket_count
    if not before:
        return
    if journals.has_entries(next_batch_id):
        raise ConfigError(
            f"Batch {next_batch_id} of {start.app} was interrupted after it had asked for what enrich() looks up, in "
            f"{before} buckets, and those answers count. Let it be committed first: millstream rescale {start.app} "
            f"--buckets {before}, run the app once, and rescale again."
        )
    manifests = store.state_manifests(start.app, start.job)
    made = rescale_manifests(plan.stages, manifests, before, after)
    done = replace(metadata, state_buckets=0)
    store.replace_state(start, made, done.partitioning, was=metadata.partitioning)  # step 3
