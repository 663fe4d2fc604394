"""The figures of a sink that runs."""

from __future__ import annotations

from millstream.capture.last_status import LastStatus
from millstream.connectors.sinks.sink import SinkStatus
from millstream.metrics.exposition import ReadFigures
from millstream.metrics.readings import Readings


def sink_figures(name: str, last: LastStatus[SinkStatus]) -> ReadFigures:
    """Return what adds the figures of the sink ``name``. What is not known is missing."""

    def read(readings: Readings) -> None:
        said = last.read()
        readings.add("sink_retrying", float(bool(said.problem)), sink=name)
        readings.add("sink_last_write_timestamp_seconds", said.durable_s, sink=name)
        if said.lag_s is not None:
            readings.add("sink_lag_seconds", said.lag_s, sink=name)
        if said.status is not None:
            readings.add("sink_records_total", said.status.records, sink=name)
            readings.add("sink_dead_letters_total", said.status.dead, sink=name)
            readings.add("sink_behind_offsets", said.status.behind, sink=name)
            readings.add("sink_alarm", float(bool(said.status.alarm)), sink=name)

    return read
