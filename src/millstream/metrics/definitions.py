"""The table of all metrics: name, kind, labels and meaning of each. Nothing else is ever exposed.

Names follow Prometheus' rules: base units (seconds, bytes) at the end, ``_total`` for what only grows. A
label's values are bounded: apps, steps, views, topics, partitions and groups that somebody has declared, or
words of this table. No label is a key, a client or an error's text.

``docs/metrics.md`` is made from this table. What serves them is in :data:`SERVED_BY`.

Source: prometheus.io, "Metric and label naming", "Instrumentation".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]
MetricSource = Literal[
    "process", "app", "log", "broker", "edge", "webhook", "capture", "apply", "source", "sink"
]

PREFIX = "millstream_"
SERVED_BY: Mapping[MetricSource, str] = {
    "process": "every server",
    "app": "`millstream ui`, of all apps; `millstream run --metrics`, of its own",
    "log": "`millstream ui`; `millstream broker --metrics`",
    "broker": "`millstream broker --metrics`",
    "edge": "`millstream edge`",
    "webhook": "`millstream webhook --metrics`",
    "capture": "`millstream capture --metrics`",
    "apply": "`millstream apply --metrics`",
    "source": "`millstream source --metrics`",
    "sink": "`millstream sink --metrics`",
}


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One metric. ``name`` is that of its samples; those of a histogram have ``_bucket``, ``_sum``, ``_count``."""

    name: str
    source: MetricSource
    kind: MetricKind
    labels: tuple[str, ...]
    help: str


def _table(source: MetricSource, rows: str) -> list[MetricDefinition]:
    """Read lines of a table: name, kind, labels, meaning."""
    found = []
    for row in rows.strip().splitlines():
        name, kind, labels, meaning = (cell.strip() for cell in row.split("|", 3))
        assert kind in ("counter", "gauge", "histogram"), row
        names = () if labels == "-" else tuple(labels.split())
        found.append(MetricDefinition(PREFIX + name, source, kind, names, meaning))  # type: ignore[arg-type]
    return found


_PROCESS = """
info                 | gauge   | version | Always 1; the label is the version of Millstream.
metrics_cpu_seconds_total | counter | -  | CPU time that the figures of this server have cost.
metrics_failed       | gauge   | source  | 1 if figures of this source could not be read, and are missing.
log_sync_seconds     | histogram | - | How long a sync of the log took (fdatasync), of all partitions of a group of appends. Of a server that writes to the log's folder itself, and not through its owner or a broker.
"""
_APP = """
app_running                 | gauge   | app | 1 while a run of the app is alive, else 0.
app_failed                  | gauge   | app | 1 if the last run ended with an error or was killed, and none is alive.
app_batches_total           | counter | app | Batches committed.
app_last_batch_timestamp_seconds | gauge | app | When the last batch was committed.
app_last_batch_duration_seconds  | gauge | app | How long the last batch took before its commit.
app_batch_phase_seconds_total | counter | app phase | Time in each phase of batches: plan, read, stages, outputs, collect, commit. The commit of a batch is counted with the next one.
app_late_events_total       | counter | app | Events that were late, each once.
app_object_requests_total   | counter | app operation | Requests to the object store of the state: puts, gets, lists, deletes, retries.
app_object_bytes_total      | counter | app direction | Bytes to (up) and from (down) the object store of the state.
app_state_cache_hits_total  | counter | app | Reads of state that were answered by the cache of the object store. Each other read is one of the gets.
source_lag_records          | gauge   | app topic partition | Offsets that the app has still to read.
source_lag_seconds          | gauge   | app topic partition | Age of the oldest record that the app has still to read, by its timestamp in the log; 0 if there is none.
source_watermark_delay_seconds | gauge | app topic partition | How far the partition's watermark is behind the clock. Missing while it has none.
source_idle                 | gauge   | app topic partition | 1 while the partition is idle and holds no watermark back.
view_freshness_seconds      | gauge   | app view | Age of the oldest record of the view's topics that the view does not reflect; 0 if it reflects all.
view_changes_total          | counter | app view | Changes of rows of the view.
step_read_rows_total        | counter | app step | Rows that the step has read.
step_exit_rows_total        | counter | app step exit | Where they went: emitted, held (in the state), late, dead, filtered, duplicate. The sum over all exits is what the step has read.
step_watermark_delay_seconds | gauge  | app step | How far the step's watermark is behind the clock. Missing while it has none.
step_state_bytes            | gauge   | app step | Size of the step's state.
step_state_rows             | gauge   | app step | Rows of the step's state, with those of a key once for each run that has it.
"""
_LOG = """
log_bytes                   | gauge   | topic partition | Size of the partition's files.
log_start_offset            | gauge   | topic partition | The first offset that is kept.
log_end_offset              | gauge   | topic partition | The offset after the last one that readers may read.
log_disk_size_bytes         | gauge   | - | Size of the file system that has the log.
log_disk_free_bytes         | gauge   | - | What is free of it for this user.
group_lag_records           | gauge   | group topic partition | Records that the group has still to read.
group_at_risk_records       | gauge   | group topic partition | Those of them that retention removes next.
group_lost_records          | gauge   | group topic partition | Offsets that retention removed before the group had read them.
"""
_BROKER = """
broker_connections          | gauge   | - | Open connections.
broker_connections_total    | counter | - | Connections accepted.
broker_refusals_total       | counter | reason | Connections that the broker ended: limit, unauthenticated, malformed, unsupported, timeout, fault.
broker_requests_total       | counter | api | Requests, by kind.
broker_request_memory_bytes | gauge   | - | Memory that requests hold.
broker_log_writable         | gauge   | - | 1 while the log accepts appends; 0 after the disk has failed.
"""
_EDGE = """
edge_requests_total         | counter | - | Requests to append.
edge_events_total           | counter | - | Events appended over HTTP.
edge_duplicate_requests_total | counter | - | Requests whose Idempotency-Key had been used: nothing was appended again.
edge_bad_events_total       | counter | - | Events that were refused as malformed.
edge_events_not_appended_total | counter | - | Events that the log did not accept.
edge_refusals_total         | counter | - | Requests refused for load (429).
edge_requests_in_progress   | gauge   | - | Requests that are appending.
edge_request_memory_bytes   | gauge   | - | Memory that they hold.
edge_streams                | gauge   | - | Open streams of events.
edge_streams_total          | counter | - | Streams opened.
edge_streamed_bytes_total   | counter | - | Bytes sent in streams.
edge_datagrams_total        | counter | - | StatsD datagrams received.
edge_datagram_metrics_total | counter | result | Metrics in datagrams: appended, not_appended, malformed.
edge_datagrams_lost_total   | counter | where | Datagrams lost: kernel (its buffer was full), sequence (missing by the sender's numbers).
"""
_WEBHOOK = """
webhook_leading             | gauge   | topic group | 1 while this process delivers, 0 on standby.
webhook_delivered_records_total | counter | topic group | Records delivered.
webhook_undeliverable_records_total | counter | topic group | Records that went to the dead-letter topic.
webhook_failed_attempts_total | counter | topic group | Attempts that failed.
"""
_CAPTURE = """
capture_retrying            | gauge   | capture | 1 while the database, or the log, does not respond, and it is tried again.
capture_last_write_timestamp_seconds | gauge | capture | When something became durable in the log last, at least that the database had nothing more; before that, when it began.
capture_lag_seconds         | gauge   | capture | How old the last change was when it was durable; 0 when the database had nothing more.
capture_snapshot_rows_total | counter | capture | Rows of snapshots, in all runs.
capture_changes_total       | counter | capture | Changes of rows, in all runs.
capture_expected_rows       | gauge   | capture | How many rows the tables have, about, that are not read to their end. Missing where that is not known.
capture_behind_bytes        | gauge   | capture | Of the database's own log, how much is not captured yet. Missing where that is not known.
capture_kept_bytes          | gauge   | capture | How much of it the database keeps for this capture. Missing where that is not known.
capture_alarm               | gauge   | capture | 1 while the database keeps too much, or may soon remove what is not captured.
"""
_APPLY = """
apply_retrying              | gauge   | capture | 1 while the target, or the log, does not respond, and it is tried again.
apply_last_commit_timestamp_seconds | gauge | capture | When a batch was durable in the target last, or the log had nothing more; before that, when it began.
apply_lag_seconds           | gauge   | capture | How old the last transaction was when it was durable; 0 when the log had nothing more.
apply_transactions_total    | counter | capture | Transactions that were applied, in all runs.
apply_changes_total         | counter | capture | Changes of rows, in all runs.
apply_done_ratio            | gauge   | capture | The part of the log that is applied, 0 to 1.
"""
_SOURCE = """
connector_retrying             | gauge   | source | 1 while what is read, or the log, does not respond, and it is tried again.
connector_last_write_timestamp_seconds | gauge | source | When something became durable in the log last, or there was nothing more to read; before that, when it began.
connector_lag_seconds          | gauge   | source | How long the last record had been there when it was durable; 0 when there was nothing more. Missing where that is not known.
connector_records_total        | counter | source | Records that were read, in all runs.
connector_dead_letters_total   | counter | source | What was read and is no record, in all runs.
connector_alarm                | gauge   | source | 1 while somebody should do something, such as about a file that was passed over.
"""
_SINK = """
sink_retrying              | gauge   | sink | 1 while what is written to, or the log, does not respond, and it is tried again.
sink_last_write_timestamp_seconds | gauge | sink | When a batch was written last, or there was nothing more to write; before that, when it began.
sink_lag_seconds           | gauge   | sink | How old the newest record of the last batch was when it was written; 0 when there was nothing more. Missing where that is not known.
sink_records_total         | counter | sink | Records that were written, in all runs.
sink_dead_letters_total    | counter | sink | Records that can never be written, in all runs.
sink_behind_offsets        | gauge   | sink | Offsets of the topic that are not written yet.
sink_alarm                 | gauge   | sink | 1 while somebody should do something, such as about a store that was set back.
"""

METRICS: Mapping[str, MetricDefinition] = {
    metric.name: metric
    for metric in (
        *_table("process", _PROCESS),
        *_table("app", _APP),
        *_table("log", _LOG),
        *_table("broker", _BROKER),
        *_table("edge", _EDGE),
        *_table("webhook", _WEBHOOK),
        *_table("capture", _CAPTURE),
        *_table("apply", _APPLY),
        *_table("source", _SOURCE),
        *_table("sink", _SINK),
    )
}
