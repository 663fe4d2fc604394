"""The executable plan of a job: what the sources read, which operators stand where, what comes out.

A plan is made of frozen values and travels to the workers by pickling. Sources feed edges; an edge
carries rows through stateless steps to an operator or a sink; operators stand in stages, one
shuffle each, and feed edges in turn:

    source ──edge──▶ operator (stage 0) ──edge──▶ operator (stage 1) ──edge──▶ sink
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import polars as pl
import pyarrow as pa

from millstream.kernels.decode import Field
from millstream.kernels.steps import Step
from millstream.kernels.watermarks import WatermarkRule
from millstream.kernels.window_aggregate import WindowAggregate


@dataclass(frozen=True)
class Edge:
    """The way of rows from one node to the next: steps, then the port of what takes them.

    ``step`` names the taker in ledger and errors. ``operator`` is what the rows are prepared for;
    None when the taker is a sink or a native step.
    """

    step: str
    steps: tuple[Step, ...]
    port: int
    operator: WindowAggregate | None


@dataclass(frozen=True)
class SourcePlan:
    """One stream read from a topic. ``fields`` are the value's fields that the plan needs.

    ``time`` gives the event time (a Datetime) from the fields; None: the record's timestamp.
    ``time_ports`` are the operators that are to be told of this source's time.
    """

    name: str
    topic: str
    fields: tuple[Field, ...]
    time: pl.Expr | None
    rule: WatermarkRule
    edges: tuple[Edge, ...]
    time_ports: tuple[int, ...]


@dataclass(frozen=True)
class InputPlan:
    """One input of an operator, as its time is told. ``rule`` is None for an operator's output."""

    name: str
    rule: WatermarkRule | None


@dataclass(frozen=True)
class OperatorPlan:
    """An operator in its place. ``time_ports`` are the operators told of its output's time."""

    port: int
    kernel: WindowAggregate
    inputs: tuple[InputPlan, ...]
    edges: tuple[Edge, ...]
    time_ports: tuple[int, ...]


@dataclass(frozen=True)
class StagePlan:
    """Operators that run behind one shuffle."""

    operators: tuple[OperatorPlan, ...]

    @property
    def ports(self) -> frozenset[int]:
        return frozenset(operator.port for operator in self.operators)


@dataclass(frozen=True)
class NativePlan:
    """A native Spark step: ``function`` takes and gives a DataFrame, between sources and stages.

    ``time`` gives the event time from the columns that come out.
    """

    name: str
    port: int
    function: Callable[[Any], Any]
    schema_in: pa.Schema
    schema_out: pa.Schema
    time: pl.Expr
    edges: tuple[Edge, ...]


Cleanup = Literal["delete", "compact", "compact,delete"]
"""How a topic forgets: by time and size, all but the last record of each key, or both."""


@dataclass(frozen=True)
class ViewEnd:
    """Rows become a view. ``store`` is the address of its store; None is the app's own.

    An address may hold a password, so it is not shown.
    """

    store: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class TopicEnd:
    """Rows become records of a topic.

    ``key`` names the column that is the record's key. ``value`` names the one whose text or bytes
    are the record's value, or the columns of its JSON object. ``partitions`` and ``cleanup`` are
    for a topic that does not exist yet.
    """

    topic: str
    key: str | None
    value: str | tuple[str, ...]
    partitions: int
    cleanup: Cleanup


@dataclass(frozen=True)
class DatasetEnd:
    """Rows become Parquet files in a folder, divided by the columns of ``partition_by``."""

    path: str
    partition_by: tuple[str, ...]


@dataclass(frozen=True)
class ForeachEnd:
    """Rows are given to a function of the user's, as a polars frame and a context."""

    function: Callable[[Any, Any], object]


End = ViewEnd | TopicEnd | DatasetEnd | ForeachEnd


@dataclass(frozen=True)
class SinkPlan:
    """An output: its columns, and what becomes of its rows.

    ``key`` names the columns by which rows replace one another in a view; other ends have none.
    """

    name: str
    port: int
    key: tuple[str, ...]
    schema: tuple[tuple[str, pl.DataType], ...]
    end: End = ViewEnd()


@dataclass(frozen=True)
class JobPlan:
    """All that runs, and the numbers fixed at the birth of its state.

    ``bucket_labels`` stand for the buckets in the shuffle; their number divides the keys.
    """

    app: str
    sources: tuple[SourcePlan, ...]
    natives: tuple[NativePlan, ...]
    stages: tuple[StagePlan, ...]
    sinks: tuple[SinkPlan, ...]
    bucket_labels: tuple[int, ...]
