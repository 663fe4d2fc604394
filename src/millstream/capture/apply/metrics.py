"""The figures of an apply that runs."""

from __future__ import annotations

from millstream.capture.apply.run import ApplyStatus
from millstream.capture.last_status import LastStatus
from millstream.metrics.exposition import ReadFigures
from millstream.metrics.readings import Readings


def apply_figures(name: str, last: LastStatus[ApplyStatus]) -> ReadFigures:
    """Return what adds the figures of what applies the capture ``name``. What is not known is missing."""

    def read(readings: Readings) -> None:
        said = last.read()
        readings.add("apply_retrying", float(bool(said.problem)), capture=name)
        readings.add("apply_last_commit_timestamp_seconds", said.durable_s, capture=name)
        if said.status is not None:
            status = said.status
            readings.add("apply_transactions_total", status.transactions, capture=name)
            readings.add("apply_changes_total", status.changes, capture=name)
            readings.add("apply_done_ratio", status.done, capture=name)
        if said.lag_s is not None:
            readings.add("apply_lag_seconds", said.lag_s, capture=name)

    return read
