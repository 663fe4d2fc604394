"""Dividing the work on an app's state among another number of tasks, while the app is stopped.

Keys stay in their buckets, and what is known of a bucket stays where it is: it is the buckets that tasks
share out again. So nothing is moved, and a single row of the view store is written: a crash leaves it as
it was, or as it is to be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from millstream.errors import ConfigError
from millstream.spark.job_metadata import JobMetadata, load_job_metadata, save_partitions
from millstream.views.runs.control_files import active_runs


@dataclass(frozen=True)
class RescaleResult:
    """What a rescale did."""

    app: str
    partitions_before: int
    partitions: int


def rescale(app: str, folder: Path, partitions: int) -> RescaleResult:
    """Have the buckets of the app in ``folder`` worked on by so many tasks at once.

    Raises:
        ConfigError: the app runs, has no state yet, or has fewer buckets.
    Cost: none that grows with the state.
    """
    alive = active_runs(folder)
    if alive:
        raise ConfigError(
            f"{app} is running (process {alive[-1].pid}). Stop it first: millstream stop {app}."
        )
    metadata = _check(app, folder, partitions)
    if metadata.partitions != partitions:
        save_partitions(app, folder, replace(metadata, partitions=partitions))
    return RescaleResult(app, metadata.partitions, partitions)


def _check(app: str, folder: Path, partitions: int) -> JobMetadata:
    metadata = load_job_metadata(app, folder)
    if metadata is None:
        raise ConfigError(
            f"{app} has no state yet. Run it; its first run divides the work among as many tasks as "
            "it has cores, if it has as many buckets."
        )
    if not 1 <= partitions <= metadata.bucket_count:
        raise ConfigError(
            f"{partitions} partitions were asked for; the state of {app} is in "
            f"{metadata.bucket_count} buckets, which at most as many partitions can share. Give 1 to "
            f"{metadata.bucket_count}. How many buckets there are is fixed at metadata, by App(buckets=…)."
        )
    return metadata
