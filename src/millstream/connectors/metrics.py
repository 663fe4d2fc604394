"""The figures of a source that runs."""

from __future__ import annotations

from millstream.capture.last_status import LastStatus
from millstream.connectors.source import SourceStatus
from millstream.metrics.exposition import ReadFigures
from millstream.metrics.readings import Readings


def source_figures(name: str, last: LastStatus[SourceStatus]) -> ReadFigures:
    """Return what adds the figures of the source ``name``. What is not known is missing."""

    def read(readings: Readings) -> None:
        said = last.read()
        readings.add("connector_retrying", float(bool(said.problem)), source=name)
        readings.add("connector_last_write_timestamp_seconds", said.durable_s, source=name)
        if said.lag_s is not None:
            readings.add("connector_lag_seconds", said.lag_s, source=name)
        if said.status is not None:
            readings.add("connector_records_total", said.status.records, source=name)
            readings.add("connector_dead_letters_total", said.status.dead, source=name)
            readings.add("connector_alarm", float(bool(said.status.alarm)), source=name)

    return read
