"""The executable plan of a job: what the sources read, which operators stand where, what comes out.

A plan is made of frozen values and travels to the workers by pickling. Sources feed edges; an edge
carries rows through stateless steps to an operator or a sink; operators stand in stages, one
shuffle each, and feed edges in turn:

    source ──edge──▶ operator (stage 0) ──edge──▶ operator (stage 1) ──edge──▶ sink
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from millstream.kernels.decode import Field
from millstream.kernels.operator import Operator
from millstream.kernels.steps import Step
from millstream.kernels.watermarks import WatermarkRule


@dataclass(frozen=True)
class Edge:
    """The way of rows from one node to the next: steps, then the port of what takes them.

    ``step`` names the taker in ledger and errors. ``operator`` is what the rows are prepared for,
    as its input ``number``; None when the taker is a sink or a native step.
    """

    step: str
    steps: tuple[Step, ...]
    port: int
    operator: Operator | None
    number: int = 0


@dataclass(frozen=True)
class SourcePlan:
    """One stream read from a topic. ``fields`` are the value's fields that the plan needs.

    ``number`` is its place among the sources. ``time`` gives the event time (a Datetime) from the
    fields; None: the record's timestamp. ``time_ports`` are the operators that are to be told of
    this source's time. ``ordered``: rows carry their place in the partition.
    """

    number: int
    name: str
    topic: str
    fields: tuple[Field, ...]
    time: pl.Expr | None
    rule: WatermarkRule
    edges: tuple[Edge, ...]
    time_ports: tuple[int, ...]
    ordered: bool


@dataclass(frozen=True)
class ClockPlan:
    """Something whose time an operator follows: a source with its number and rule, or an operator."""

    name: str
    source: int | None
    rule: WatermarkRule | None


@dataclass(frozen=True)
class OperatorPlan:
    """An operator in its place.

    ``ports`` take the rows of its inputs, in their order; the first also names it. ``clocks`` are
    what its time follows; ``late_edges`` take the rows that came too late for it; ``time_ports``
    are the operators told of its output's time.
    """

    ports: tuple[int, ...]
    kernel: Operator
    clocks: tuple[ClockPlan, ...]
    edges: tuple[Edge, ...]
    late_edges: tuple[Edge, ...]
    time_ports: tuple[int, ...]

    @property
    def port(self) -> int:
        return self.ports[0]


@dataclass(frozen=True)
class StagePlan:
    """Operators that run behind one shuffle."""

    operators: tuple[OperatorPlan, ...]

    @property
    def ports(self) -> frozenset[int]:
        return frozenset(port for operator in self.operators for port in operator.ports)


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


@dataclass(frozen=True)
class SinkPlan:
    """An output. ``key`` names the columns by which rows replace one another in the view."""

    name: str
    port: int
    key: tuple[str, ...]
    schema: tuple[tuple[str, pl.DataType], ...]


@dataclass(frozen=True)
class JobPlan:
    """All that runs, and the numbers fixed at the birth of its state.

    ``bucket_labels`` stand for the buckets in the shuffle; their number divides the keys.
    ``heartbeat_ms`` is how often operators want to be told the time though there is nothing to
    read, because something may fire by time alone; None: never. What a source's own rule wants
    comes on top (:attr:`millstream.kernels.watermarks.WatermarkRule.heartbeat_ms`).
    """

    app: str
    sources: tuple[SourcePlan, ...]
    natives: tuple[NativePlan, ...]
    stages: tuple[StagePlan, ...]
    sinks: tuple[SinkPlan, ...]
    bucket_labels: tuple[int, ...]
    heartbeat_ms: int | None = None
