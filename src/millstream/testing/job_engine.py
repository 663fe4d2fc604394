"""The engines "spark" and "local" of the test kit: the real job on a log in a temporary folder.

The input is cut into batches as the in-process engine does it: somewhere in every partition. The records of
a batch are sent once the batch before is committed, while the job runs.
"""

from __future__ import annotations

import dataclasses
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from millstream.client import connect
from millstream.engine.job import Job, RunOptions
from millstream.errors import ConfigError
from millstream.pipeline.app import App
from millstream.testing.inputs import InputRecord, Item
from millstream.testing.outputs import redirected
from millstream.views.runs.progress import Progress, Report, Until
from millstream.views.store_location import STATE_STORE_FILE

RunJob = Callable[[Job, RunOptions], Report]

Parts = list[list[tuple[str, InputRecord]]]
"""What each batch reads: records with their topics."""


def run_as_job(
    run_job: RunJob,
    app: App,
    folder: Path,
    partition_counts: Mapping[str, int],
    inputs: Mapping[str, Sequence[Item]],
    *,
    batches: int,
    dice: random.Random,
) -> Path:
    """Write the records to a log, batch by batch as the job runs; return the view store's path."""
    records = _records(inputs)
    with connect(folder) as log:
        for topic, count in partition_counts.items():
            log.create_topic(topic, partitions=count)
    job = app.job()
    compiled = job.compile
    job = dataclasses.replace(
        job,
        log=folder,
        folder=folder / "apps" / app.name,
        state=None,  # nothing outside of the folder is touched
        state_store=folder / "apps" / app.name / STATE_STORE_FILE,
        compile=lambda buckets: redirected(compiled(buckets), folder),
    )
    parts = _parts(records, batches, dice)
    _feed(run_job, job, folder, parts)
    if app.plan().frames or len(parts) < 2:
        run_job(job, _options(parts))
    return folder / "apps" / app.name / STATE_STORE_FILE


def _records(inputs: Mapping[str, Sequence[Item]]) -> list[tuple[str, InputRecord]]:
    records: list[tuple[str, InputRecord]] = []
    for topic, items in inputs.items():
        for item in items:
            if not isinstance(item, InputRecord):
                raise ConfigError(
                    'The real job takes no Tick and no Watermark. Use engine="kernel".'
                )
            records.append((topic, item))
    return records


def _parts(records: Sequence[tuple[str, InputRecord]], batches: int, dice: random.Random) -> Parts:
    """Cut every partition at random places; return the records of each batch that has some."""
    counts = Counter((topic, record.partition) for topic, record in records)
    ends = {
        place: sorted(dice.randint(0, count) for _ in range(batches - 1))
        for place, count in counts.items()
    }
    parts: list[list[tuple[str, InputRecord]]] = [[] for _ in range(batches)]
    read: Counter[tuple[str, int]] = Counter()
    for topic, record in records:
        place = (topic, record.partition)
        parts[bisect_right(ends[place], read[place])].append((topic, record))
        read[place] += 1
    return [part for part in parts if part]


def _feed(run_job: RunJob, job: Job, folder: Path, parts: Parts) -> None:
    """Send the first part; if there are more, run the job and send each after the batch before."""
    to_come = iter(parts)
    _send(folder, next(to_come, []))
    unread = len(parts)

    def send_next(_progress: Progress) -> None:
        nonlocal unread
        unread -= 1
        _send(folder, next(to_come, []))

    if unread > 1:
        run_job(job, _options(parts, until=lambda _progress: unread <= 0, on_progress=send_next))


def _options(
    parts: Parts,
    *,
    until: Until = "caught-up",
    on_progress: Callable[[Progress], None] | None = None,
) -> RunOptions:
    return RunOptions(
        until=until,
        timeout_s=None,
        count=None,
        on_progress=on_progress,
        cores=None,
        rows_per_batch=sum(map(len, parts)) + 1,
        settings={},
    )


def _send(folder: Path, part: Sequence[tuple[str, InputRecord]]) -> None:
    if not part:
        return
    with connect(folder) as log, log.producer() as producer:
        for topic, record in part:
            producer.send(
                topic,
                record.value,
                key=record.key,
                partition=record.partition,
                timestamp_ms=record.at_ms,
                headers=record.headers or None,
            )
