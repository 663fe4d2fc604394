"""The Spark engine of the test kit: the real job on a log in a temporary folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.client import connect
from millstream.errors import ConfigError
from millstream.pipeline.app import App
from millstream.spark.job import RunOptions, run_job
from millstream.testing.outputs import redirected

if TYPE_CHECKING:
    from millstream.testing.run import Arrival


def run_on_spark(
    app: App,
    folder: Path,
    partition_counts: Mapping[str, int],
    arrivals: Mapping[str, Sequence[Arrival | int]],
    batches: int,
) -> Path:
    """Write the arrivals to a log, run the app's job until caught up, give the view store's path."""
    total = 0
    with connect(folder) as log:
        for topic, count in partition_counts.items():
            log.create_topic(topic, partitions=count)
        with log.producer() as producer:
            for topic, items in arrivals.items():
                for item in items:
                    if isinstance(item, int):
                        raise ConfigError('engine="spark" takes no Tick. Use engine="kernel".')
                    producer.send(topic, item.value, partition=item.partition)
                    total += 1
    job = app.job()
    compiled = job.compile
    job = dataclasses.replace(
        job,
        log=folder,
        folder=folder / "apps" / app.name,
        compile=lambda labels: redirected(compiled(labels), folder),
    )
    options = RunOptions(
        until="caught-up",
        timeout_s=None,
        on_progress=None,
        cores=None,
        rows_per_batch=max(1, -(-total // batches)),
        settings={},
    )
    run_job(job, options)
    return job.folder / "views.db"
