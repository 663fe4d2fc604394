"""The figures of a broker for Prometheus."""

from __future__ import annotations

from millstream.broker.memory import RequestMemory
from millstream.broker.node import BrokerNode
from millstream.metrics.readings import Readings


def read_broker_metrics(node: BrokerNode, memory: RequestMemory, readings: Readings) -> None:
    """Add the figures of a broker. From any thread."""
    counters, writer = node.counters, node.log.writer
    readings.add("broker_connections", counters.connections)
    readings.add("broker_connections_total", counters.accepted)
    for reason, count in counters.refusals.copy().items():
        readings.add("broker_refusals_total", count, reason=reason)
    for api, count in counters.requests.copy().items():
        readings.add("broker_requests_total", count, api=api)
    readings.add("broker_request_memory_bytes", memory.held_bytes)
    readings.add("broker_log_writable", float(writer.failure is None))
