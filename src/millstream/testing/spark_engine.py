"""The Spark engine of the test kit: the real job on a log in a temporary folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from millstream.client import connect
from millstream.errors import ConfigError
from millstream.pipeline.app import App
from millstream.spark.job import RunOptions, run_job
from millstream.testing.inputs import Item, Record
from millstream.testing.outputs import redirected


def run_on_spark(
    app: App,
    folder: Path,
    partition_counts: Mapping[str, int],
    inputs: Mapping[str, Sequence[Item]],
    batches: int,
) -> Path:
    """Write the records to a log, run the app's job until caught up, give the view store's path."""
    total = 0
    with connect(folder) as log:
        for topic, count in partition_counts.items():
            log.create_topic(topic, partitions=count)
        with log.producer() as producer:
            for topic, items in inputs.items():
                for item in items:
                    if not isinstance(item, Record):
                        raise ConfigError(
                            'engine="spark" takes no Tick and no Watermark. Use engine="kernel".'
                        )
                    producer.send(
                        topic,
                        item.value,
                        key=item.key,
                        partition=item.partition,
                        timestamp_ms=item.at_ms,
                        headers=item.headers or None,
                    )
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
        count=None,
        on_progress=None,
        cores=None,
        rows_per_batch=max(1, -(-total // batches)),
        settings={},
    )
    run_job(job, options)
    return job.folder / "views.db"
