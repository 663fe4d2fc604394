"""Millstream: a durable event log, and stream processing over it, in one install.

The log is the truth; everything else is a fold over it. Start with :func:`connect` for the log and
with :class:`App` for a pipeline. Names load when they are first used, so that ``import millstream``
is cheap and needs neither pyspark nor a Java.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# The public names, by the module that defines them. Type checkers read the imports below instead; a
# test compares the two.
_MODULES: dict[str, str] = {
    name: module
    for module, names in {
        "millstream.capture.apply.reconcile": (
            "Reconciler Reconciliation TableComparison reconcile"
        ),
        "millstream.capture.apply.run": "Apply ApplyStatus apply",
        "millstream.capture.run": "Capture CaptureStatus capture",
        "millstream.client.log": "EventLog",
        "millstream.client.open": "connect",
        "millstream.connectors.amqp": "amqp",
        "millstream.connectors.folder.folder_source": "folder",
        "millstream.connectors.generated": "generate",
        "millstream.connectors.http_poll": "http_poll",
        "millstream.connectors.mqtt": "mqtt",
        "millstream.connectors.redis_stream": "redis_stream",
        "millstream.connectors.sinks.email_sink": "to_email",
        "millstream.connectors.sinks.http_sink": "to_http",
        "millstream.connectors.sinks.opensearch_sink": "to_opensearch",
        "millstream.connectors.sinks.sink": "SinkRun SinkStatus sink",
        "millstream.connectors.sinks.to_duckdb": "to_duckdb",
        "millstream.connectors.sinks.to_mariadb": "to_mariadb",
        "millstream.connectors.sinks.to_redis": "to_redis",
        "millstream.connectors.source": "Source SourceStatus source",
        "millstream.errors": (
            "CommandRejectedError ConfigError ConflictError CorruptionError DeadlineError FencedError "
            "JobFailedError MillstreamError OffsetOutOfRangeError RetriableError SqlError UserCodeError "
            "VersionConflictError"
        ),
        "millstream.kernels.aggregates.user_defined": "UserAggregate",
        "millstream.kernels.dedup.bloom_loss": "expected_loss",
        "millstream.kernels.process.context": "ProcessContext",
        "millstream.kernels.process.declarations": "list_state map_state value_state",
        "millstream.kernels.process.frame_function": "FrameContext FrameFunction",
        "millstream.kernels.process.function": "ProcessFunction",
        "millstream.lookups.http_lookup": "http_lookup",
        "millstream.lookups.sql_lookup": "sql_lookup",
        "millstream.pipeline.aggregates": (
            "aggregate count distinct first frequent_items_sketch hll_sketch kll_sketch last list "
            "max max_by mean min min_by quantile quantiles set stddev sum top_k variance"
        ),
        "millstream.pipeline.app": "App",
        "millstream.pipeline.background_run": "BackgroundRun BackgroundStatus",
        "millstream.pipeline.debezium": "Debezium debezium",
        "millstream.pipeline.dedup": "bloom",
        "millstream.pipeline.device_clock": "device_time",
        "millstream.pipeline.row_patterns": "RowPattern row_pattern",
        "millstream.pipeline.row_variables": "PatternVariable classifier match_number variable",
        "millstream.pipeline.sequences": "PatternSequence either matched sequence",
        "millstream.pipeline.stream": "Stream Windowed",
        "millstream.pipeline.table": "Grouped Table",
        "millstream.pipeline.topic": "Topic",
        "millstream.pipeline.watermarks": "processing_time watermark",
        "millstream.pipeline.windows": (
            "after_count calendar count_window cumulating hopping once session sliding tumbling"
        ),
        "millstream.record": "Record",
        "millstream.sourcing.decider": "Decider",
        "millstream.sourcing.event_types": "EventTypes",
        "millstream.sourcing.process_manager": "ProcessManager Send",
        "millstream.sourcing.projection": "Projection",
        "millstream.sourcing.store": "EventStore",
        "millstream.sourcing.stored_event": "SourcedEvent",
        "millstream.sql_queries.query": "SqlResult sql",
        "millstream.views": "panels",
        "millstream.views.alerts.rule": "alert",
        "millstream.views.alerts.targets": "tell_command tell_email tell_webhook",
        "millstream.views.coverage": "PartialOutputWarning",
        "millstream.views.questions.answer": "Answer",
        "millstream.views.questions.client": "ask",
        "millstream.views.questions.state_reader": "StateReader",
        "millstream.views.reader": "View view",
        "millstream.views.server.server": "serve",
        "millstream.views.sinks.dataset": "Dataset dataset",
        "millstream.views.sinks.foreach": "ForeachContext",
        "millstream.views.view_display": "ViewPlot",
    }.items()
    for name in names.split()
}

__all__ = [*sorted(("__version__", *_MODULES))]

# A checker that saw __getattr__ would accept every misspelt name.
if TYPE_CHECKING:
    from millstream.capture.apply.reconcile import Reconciler as Reconciler
    from millstream.capture.apply.reconcile import Reconciliation as Reconciliation
    from millstream.capture.apply.reconcile import TableComparison as TableComparison
    from millstream.capture.apply.reconcile import reconcile as reconcile
    from millstream.capture.apply.run import Apply as Apply
    from millstream.capture.apply.run import ApplyStatus as ApplyStatus
    from millstream.capture.apply.run import apply as apply
    from millstream.capture.run import Capture as Capture
    from millstream.capture.run import CaptureStatus as CaptureStatus
    from millstream.capture.run import capture as capture
    from millstream.client.log import EventLog as EventLog
    from millstream.client.open import connect as connect
    from millstream.connectors.amqp import amqp as amqp
    from millstream.connectors.folder.folder_source import folder as folder
    from millstream.connectors.generated import generate as generate
    from millstream.connectors.http_poll import http_poll as http_poll
    from millstream.connectors.mqtt import mqtt as mqtt
    from millstream.connectors.redis_stream import redis_stream as redis_stream
    from millstream.connectors.sinks.email_sink import to_email as to_email
    from millstream.connectors.sinks.http_sink import to_http as to_http
    from millstream.connectors.sinks.opensearch_sink import to_opensearch as to_opensearch
    from millstream.connectors.sinks.sink import SinkRun as SinkRun
    from millstream.connectors.sinks.sink import SinkStatus as SinkStatus
    from millstream.connectors.sinks.sink import sink as sink
    from millstream.connectors.sinks.to_duckdb import to_duckdb as to_duckdb
    from millstream.connectors.sinks.to_mariadb import to_mariadb as to_mariadb
    from millstream.connectors.sinks.to_redis import to_redis as to_redis
    from millstream.connectors.source import Source as Source
    from millstream.connectors.source import SourceStatus as SourceStatus
    from millstream.connectors.source import source as source
    from millstream.errors import CommandRejectedError as CommandRejectedError
    from millstream.errors import ConfigError as ConfigError
    from millstream.errors import ConflictError as ConflictError
    from millstream.errors import CorruptionError as CorruptionError
    from millstream.errors import DeadlineError as DeadlineError
    from millstream.errors import FencedError as FencedError
    from millstream.errors import JobFailedError as JobFailedError
    from millstream.errors import MillstreamError as MillstreamError
    from millstream.errors import OffsetOutOfRangeError as OffsetOutOfRangeError
    from millstream.errors import RetriableError as RetriableError
    from millstream.errors import SqlError as SqlError
    from millstream.errors import UserCodeError as UserCodeError
    from millstream.errors import VersionConflictError as VersionConflictError
    from millstream.kernels.aggregates.user_defined import UserAggregate as UserAggregate
    from millstream.kernels.dedup.bloom_loss import expected_loss as expected_loss
    from millstream.kernels.process.context import ProcessContext as ProcessContext
    from millstream.kernels.process.declarations import list_state as list_state
    from millstream.kernels.process.declarations import map_state as map_state
    from millstream.kernels.process.declarations import value_state as value_state
    from millstream.kernels.process.frame_function import FrameContext as FrameContext
    from millstream.kernels.process.frame_function import FrameFunction as FrameFunction
    from millstream.kernels.process.function import ProcessFunction as ProcessFunction
    from millstream.lookups.http_lookup import http_lookup as http_lookup
    from millstream.lookups.sql_lookup import sql_lookup as sql_lookup
    from millstream.pipeline.aggregates import *  # noqa: F403
    from millstream.pipeline.app import App as App
    from millstream.pipeline.background_run import BackgroundRun as BackgroundRun
    from millstream.pipeline.background_run import BackgroundStatus as BackgroundStatus
    from millstream.pipeline.debezium import Debezium as Debezium
    from millstream.pipeline.debezium import debezium as debezium
    from millstream.pipeline.dedup import bloom as bloom
    from millstream.pipeline.device_clock import device_time as device_time
    from millstream.pipeline.row_patterns import RowPattern as RowPattern
    from millstream.pipeline.row_patterns import row_pattern as row_pattern
    from millstream.pipeline.row_variables import PatternVariable as PatternVariable
    from millstream.pipeline.row_variables import classifier as classifier
    from millstream.pipeline.row_variables import match_number as match_number
    from millstream.pipeline.row_variables import variable as variable
    from millstream.pipeline.sequences import PatternSequence as PatternSequence
    from millstream.pipeline.sequences import either as either
    from millstream.pipeline.sequences import matched as matched
    from millstream.pipeline.sequences import sequence as sequence
    from millstream.pipeline.stream import Stream as Stream
    from millstream.pipeline.stream import Windowed as Windowed
    from millstream.pipeline.table import Grouped as Grouped
    from millstream.pipeline.table import Table as Table
    from millstream.pipeline.topic import Topic as Topic
    from millstream.pipeline.watermarks import processing_time as processing_time
    from millstream.pipeline.watermarks import watermark as watermark
    from millstream.pipeline.windows import after_count as after_count
    from millstream.pipeline.windows import calendar as calendar
    from millstream.pipeline.windows import count_window as count_window
    from millstream.pipeline.windows import cumulating as cumulating
    from millstream.pipeline.windows import hopping as hopping
    from millstream.pipeline.windows import once as once
    from millstream.pipeline.windows import session as session
    from millstream.pipeline.windows import sliding as sliding
    from millstream.pipeline.windows import tumbling as tumbling
    from millstream.record import Record as Record
    from millstream.sourcing.decider import Decider as Decider
    from millstream.sourcing.event_types import EventTypes as EventTypes
    from millstream.sourcing.process_manager import ProcessManager as ProcessManager
    from millstream.sourcing.process_manager import Send as Send
    from millstream.sourcing.projection import Projection as Projection
    from millstream.sourcing.store import EventStore as EventStore
    from millstream.sourcing.stored_event import SourcedEvent as SourcedEvent
    from millstream.sql_queries.query import SqlResult as SqlResult
    from millstream.sql_queries.query import sql as sql
    from millstream.views import panels as panels
    from millstream.views.alerts.rule import alert as alert
    from millstream.views.alerts.targets import tell_command as tell_command
    from millstream.views.alerts.targets import tell_email as tell_email
    from millstream.views.alerts.targets import tell_webhook as tell_webhook
    from millstream.views.coverage import PartialOutputWarning as PartialOutputWarning
    from millstream.views.questions.answer import Answer as Answer
    from millstream.views.questions.client import ask as ask
    from millstream.views.questions.state_reader import StateReader as StateReader
    from millstream.views.reader import View as View
    from millstream.views.reader import view as view
    from millstream.views.server.server import serve as serve
    from millstream.views.sinks.dataset import Dataset as Dataset
    from millstream.views.sinks.dataset import dataset as dataset
    from millstream.views.sinks.foreach import ForeachContext as ForeachContext
    from millstream.views.view_display import ViewPlot as ViewPlot
else:

    def __getattr__(name: str) -> object:
        """Load a public name on its first use, and keep it."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Name what is public, loaded or not."""
        return sorted({*globals(), *__all__})
