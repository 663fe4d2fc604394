"""Rescaling: divides the work on an app's state among another number of tasks, while the app is stopped.

Keys stay in their buckets, and the state of a bucket stays where it is; only the assignment of buckets to
tasks changes. So nothing is moved, and one row of the state store is written: a crash leaves the old or
the new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from millstream.errors import ConfigError
from millstream.spark.job_metadata import JobMetadata, load_job_metadata, save_partitions
from millstream.views.runs.control_files import active_runs
from millstream.views.store_location import STATE_STORE_FILE, StoreLocation


@dataclass(frozen=True)
class RescaleResult:
    """What a rescale did."""

    app: str
    partitions_before: int
    partitions: int


def rescale(
    app: str, folder: Path, partitions: int, location: StoreLocation | None = None
) -> RescaleResult:
    """Set the number of tasks that share the buckets of the app in ``folder``.

    ``location`` is that of its state store, if it is not in the folder.

    Raises:
        ConfigError: the app runs, has no state yet, or has fewer buckets.
    Cost: none that grows with the state.
    """
    alive = active_runs(folder)
    if alive:
        raise ConfigError(
            f"{app} is running (process {alive[-1].pid}). Stop it first: millstream stop {app}."
        )
    location = location or folder / STATE_STORE_FILE
    metadata = _check(app, location, partitions)
    if metadata.partitions != partitions:
        save_partitions(app, location, replace(metadata, partitions=partitions))
    return RescaleResult(app, metadata.partitions, partitions)


def _check(app: str, location: StoreLocation, partitions: int) -> JobMetadata:
    metadata = load_job_metadata(app, location)
    if metadata is None:
        raise ConfigError(
            f"{app} has no state yet. Run it; its first run divides the work among as many tasks as "
            "it has cores, if it has as many buckets."
        )
    if not 1 <= partitions <= metadata.bucket_count:
        raise ConfigError(
            f"{partitions} partitions were requested; the state of {app} is in "
            f"{metadata.bucket_count} buckets, and there can be no more partitions than buckets. Give 1 to "
            f"{metadata.bucket_count}. The number of buckets is fixed when the state is created, by "
            "App(buckets=…)."
        )
    return metadata
