"""The figures of a capture that runs."""

from __future__ import annotations

from collections.abc import Callable

from millstream.capture.lag import SourceLag
from millstream.capture.last_status import LastStatus
from millstream.capture.run import CaptureStatus
from millstream.metrics.exposition import ReadFigures
from millstream.metrics.readings import Readings


def capture_figures(
    name: str, last: LastStatus[CaptureStatus], source_lag: Callable[[], SourceLag]
) -> ReadFigures:
    """Return what adds the figures of the capture ``name``. What is not known is missing.

    ``source_lag`` gives what was measured last: it is measured also while no status comes.
    """

    def read(readings: Readings) -> None:
        said, measured = last.read(), source_lag()
        readings.add("capture_retrying", float(bool(said.problem)), capture=name)
        readings.add("capture_last_write_timestamp_seconds", said.durable_s, capture=name)
        readings.add("capture_alarm", float(bool(measured.alarm)), capture=name)
        found: dict[str, float | None] = {
            "capture_lag_seconds": said.lag_s,
            "capture_behind_bytes": measured.bytes_behind,
            "capture_kept_bytes": measured.bytes_kept,
            "capture_expected_rows": measured.rows_expected,
        }
        if said.status is not None:
            found["capture_snapshot_rows_total"] = said.status.snapshot_rows
            found["capture_changes_total"] = said.status.changes
        for metric, value in found.items():
            if value is not None:
                readings.add(metric, value, capture=name)

    return read
