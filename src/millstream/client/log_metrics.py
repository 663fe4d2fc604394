"""The figures of a log folder for Prometheus: sizes and offsets of partitions, groups, the disk."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

from millstream.client.open import connect
from millstream.log.reader import LogReader
from millstream.metrics.readings import Readings


def read_log_metrics(folder: Path, readings: Readings) -> None:
    """Add the figures of a log folder; none before it is a log. It only reads.

    Raises:
        MillstreamError, OSError: the folder cannot be read.
    """
    if not folder.is_dir():
        return
    disk = shutil.disk_usage(folder)
    readings.add("log_disk_size_bytes", disk.total)
    readings.add("log_disk_free_bytes", disk.free)
    with closing(LogReader(folder)) as reader:
        for topic in reader.topics():
            for number, (start, end) in enumerate(reader.offsets(topic)):
                labels = {"topic": topic, "partition": number}
                readings.add("log_bytes", reader.contents(topic, number).size_bytes, **labels)
                readings.add("log_start_offset", start, **labels)
                readings.add("log_end_offset", end, **labels)
    with connect(folder) as log:
        for lag in log.lag():
            labels = {"group": lag.group, "topic": lag.topic, "partition": lag.partition}
            readings.add("group_lag_records", lag.behind, **labels)
            readings.add("group_at_risk_records", lag.at_risk, **labels)
            readings.add("group_lost_records", lag.lost, **labels)
