"""The figures of an edge for Prometheus: its counters of HTTP and of datagrams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.edge.http.admission import Admission
from millstream.edge.http.counters import HttpCounters
from millstream.metrics.readings import Readings


def add_http_figures(
    readings: Readings, counts: HttpCounters, admission: Admission, streams_open: int
) -> None:
    """Add what was accepted and refused over HTTP."""
    readings.add("edge_requests_total", counts.requests)
    readings.add("edge_events_total", counts.events)
    readings.add("edge_duplicate_requests_total", counts.duplicates)
    readings.add("edge_bad_events_total", counts.bad_events)
    readings.add("edge_events_not_appended_total", counts.not_appended)
    readings.add("edge_refusals_total", admission.refused)
    readings.add("edge_requests_in_progress", admission.requests)
    readings.add("edge_request_memory_bytes", admission.held_bytes)
    readings.add("edge_streams", streams_open)
    readings.add("edge_streams_total", counts.streams)
    readings.add("edge_streamed_bytes_total", counts.streamed_bytes)


def add_statsd_figures(readings: Readings, counts: Mapping[str, Any] | None) -> None:
    """Add what was received in datagrams, and lost; nothing where none are received."""
    if counts is None:
        return
    readings.add("edge_datagrams_total", counts["datagrams"])
    for result in ("appended", "not_appended", "malformed"):
        readings.add("edge_datagram_metrics_total", counts[result], result=result)
    if counts["kernel_dropped"] is not None:
        readings.add("edge_datagrams_lost_total", counts["kernel_dropped"], where="kernel")
    readings.add("edge_datagrams_lost_total", counts["lost_in_sequence"], where="sequence")
