"""The executable plan of a job: what the sources read, which operators stand where, what comes out.

A plan is made of frozen values and travels to the workers by pickling. Sources feed edges; an edge
carries rows through stateless steps to an operator or a sink; operators stand in stages, one
shuffle each, and feed edges in turn:

    source ──edge──▶ operator (stage 0) ──edge──▶ operator (stage 1) ──edge──▶ sink

The paths down from a node are a tree: a step that several outputs share runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import polars as pl
import pyarrow as pa

from millstream.kernels.decode import Field
from millstream.kernels.decode.formats import JSON, ValueFormat
from millstream.kernels.errors.dead_letters import BadRecordPolicy
from millstream.kernels.errors.user_code import UserCode
from millstream.kernels.operator import Operator
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.steps import Step
from millstream.kernels.time.watermarks import WatermarkRule


@dataclass(frozen=True)
class Updates:
    """What a sink shows of a window that emits changes, where rows that replace one another were declared.

    Those changes, but for the retractions of rows that others replace. ``signed``: rows have ``__diff``,
    because some are taken back for good.
    """

    signed: bool


@dataclass(frozen=True)
class ConsumerEdge:
    """The last edge of a path: the port of the consumer of the rows.

    ``step`` names the consumer in ledger and errors. ``operator`` is what the rows are prepared for,
    as its input ``number``; None when the consumer is a sink or a native step. ``columns`` are those
    that go on, in their order; None stands for all, in the order of their names. ``ordered``: the
    rows keep their place in the partition; ``arrived``: their time of arrival; ``released``: what orders rows of one time
    that waited in a join. ``code`` says what rows lead to that the operator fails on. ``latest_by``: of rows with a place the last one for each value of these columns is enough,
    because it would replace the others. ``signed``: some of its rows are signed changes, and those without
    a sign are additions. ``updates``: it shows rows that replace one another.
    """

    step: str
    port: int
    operator: Operator | None
    number: int
    columns: tuple[str, ...] | None
    ordered: bool
    code: UserCode
    latest_by: tuple[str, ...] = ()
    arrived: bool = False
    signed: bool = False
    updates: Updates | None = None
    released: bool = False


@dataclass(frozen=True)
class StepEdge:
    """A stateless step on a path, and the edges for its rows.

    ``schema_out`` are the types of the columns that come out, as far as they are there; ``code`` says
    what failing rows lead to.
    """

    step: Step
    schema_out: tuple[tuple[str, pl.DataType], ...]
    code: UserCode
    downstream: tuple[PlanEdge, ...]


PlanEdge = ConsumerEdge | StepEdge


@dataclass(frozen=True)
class SourcePlan:
    """One stream read from a topic. ``fields`` are the value's fields that the plan needs.

    ``number`` is its place among the sources, ``topic_number`` that of its topic in the order of the
    log: the same in every program that reads these topics. ``time`` gives the event time (a Datetime)
    from the fields; None: the record's timestamp. ``time_ports`` are the operators that receive this
    source's time. ``values`` is the format of the topic's values, ``bad`` the policy for those that
    cannot be decoded. ``table_key``: the topic is a table with that key, and a record without a value
    deletes the row of its key. ``arrived``: its rows carry their time of arrival. ``looked_up``: not 0 if rows
    of other sources are looked up in what is made of it; sources with higher numbers are read first.
    """

    number: int
    name: str
    topic: str
    fields: tuple[Field, ...]
    time: pl.Expr | None
    rule: WatermarkRule
    edges: tuple[PlanEdge, ...]
    time_ports: tuple[int, ...]
    values: ValueFormat = JSON
    bad: BadRecordPolicy = "dead-letter"
    topic_number: int = 0
    table_key: str | None = None
    arrived: bool = False
    looked_up: int = 0


@dataclass(frozen=True)
class ClockPlan:
    """Something whose time an operator follows: a source with its number and rule, or an operator.

    ``key`` is what state knows it by: names are for people, and may change.
    """

    name: str
    source: int | None
    rule: WatermarkRule | None
    key: str


@dataclass(frozen=True)
class OperatorPlan:
    """An operator in its place.

    ``ports`` take the rows of its inputs, in their order; the first also names it. An operator without
    inputs has a port, too, to which sources send their time, so that it runs in every batch. ``clocks`` are
    what its time follows; ``late_edges`` take the rows that came too late for it; ``time_ports``
    are the operators that receive its output's time. ``key`` is what its state is kept under: it comes from
    what the step means, and not from its name or place.
    """

    ports: tuple[int, ...]
    key: str
    kernel: Operator
    clocks: tuple[ClockPlan, ...]
    edges: tuple[PlanEdge, ...]
    late_edges: tuple[PlanEdge, ...]
    time_ports: tuple[int, ...]

    @property
    def port(self) -> int:
        return self.ports[0]


@dataclass(frozen=True)
class StagePlan:
    """Operators that run behind one shuffle. ``topics`` names all topics that are read, by number."""

    operators: tuple[OperatorPlan, ...]
    topics: tuple[str, ...] = ()

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
    edges: tuple[PlanEdge, ...]


@dataclass(frozen=True)
class DataFramePlan:
    """A streaming DataFrame of the user's as a source. ``number`` is its place among the sources.

    ``time`` gives the event time from its columns, ``delay_us`` how far the watermark stays behind the
    newest of them; ``time_ports`` are the operators that receive it.
    """

    number: int
    name: str
    frame: Any
    schema: pa.Schema
    time: pl.Expr
    delay_us: int
    edges: tuple[PlanEdge, ...]
    time_ports: tuple[int, ...]


Cleanup = Literal["delete", "compact", "compact,delete"]
"""How a topic forgets: by time and size, all but the last record of each key, or both."""


@dataclass(frozen=True)
class ViewSinkSpec:
    """Rows become a view. ``store`` is the address of its store; None is the app's own.

    An address may hold a password, so it is not shown.
    """

    store: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class TopicSinkSpec:
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
class DatasetSinkSpec:
    """Rows become Parquet files in a folder, divided by the columns of ``partition_by``."""

    path: str
    partition_by: tuple[str, ...]


@dataclass(frozen=True)
class ForeachSinkSpec:
    """Rows are passed to a function of the user, as a polars frame and a context."""

    function: Callable[[Any, Any], object]


SinkSpec = ViewSinkSpec | TopicSinkSpec | DatasetSinkSpec | ForeachSinkSpec


@dataclass(frozen=True)
class QuestionPlan:
    """What the rows of an output ask: then they are requests, and the records that are written are their answers.

    ``name`` is one of ``functions``, which are the app's questions, or else a step or view. ``id`` is the column that comes back
    with the answer. ``stops``: a request that cannot be answered stops the job.
    """

    name: str
    id: str
    deadline_us: int
    functions: Mapping[str, Callable[..., Any]] = field(repr=False, compare=False)
    stops: bool = False


@dataclass(frozen=True)
class SinkPlan:
    """An output: its columns, and the sink of its rows.

    ``key`` names the columns by which rows replace one another in a view; other sinks have none.
    ``replaces``: a row replaces the one before it without a retraction. ``row_keys``: of a view that holds every row that
    holds where it is declared, sets of columns of which each identifies one. ``question``: its rows are requests, which
    the job answers; the schema is theirs.
    """

    name: str
    port: int
    key: tuple[str, ...]
    schema: tuple[tuple[str, pl.DataType], ...]
    spec: SinkSpec = ViewSinkSpec()
    replaces: bool = False
    row_keys: tuple[tuple[str, ...], ...] = ()
    question: QuestionPlan | None = None


@dataclass(frozen=True)
class StepDefinition:
    """The name of a stateful step, and its definition by :mod:`millstream.kernels.definition`.

    ``passed``: what the columns are that it takes of rows that a step above it passes on, if there are any.
    """

    name: str
    description: Any
    passed: Any = None


@dataclass(frozen=True)
class Program:
    """What a later run of an app is compared with: the definitions of all state and outputs.

    ``steps`` has the stateful steps by the keys of their state, ``outputs`` the outputs by name.
    ``topics`` are those that are read, ``frames`` the number of DataFrames that are. ``given`` has a digest of the
    rows of each static table, by its name.
    """

    steps: Mapping[str, StepDefinition] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    topics: tuple[str, ...] = ()
    frames: int = 0
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class JobPlan:
    """All that runs, and the numbers fixed when its state is created.

    ``buckets`` divide the keys.
    ``steps`` names all that has an entry in the ledger, in the order of the graph. ``heartbeat_ms`` is
    how often operators need the time although there is nothing to read, because something
    may fire by time alone; None: never. What a source's own rule needs is added
    (:attr:`millstream.kernels.time.watermarks.WatermarkRule.heartbeat_ms`).
    """

    app: str
    sources: tuple[SourcePlan, ...]
    natives: tuple[NativePlan, ...]
    stages: tuple[StagePlan, ...]
    sinks: tuple[SinkPlan, ...]
    buckets: Buckets
    frames: tuple[DataFramePlan, ...] = ()
    steps: tuple[str, ...] = ()
    heartbeat_ms: int | None = None
    program: Program = Program()

    @property
    def spark_steps(self) -> list[str]:
        """The names of what only Spark can compute: native steps, and streaming DataFrames."""
        return [one.name for one in self.natives] + [one.name for one in self.frames]

    @property
    def answering(self) -> list[SinkPlan]:
        """The outputs whose rows are requests."""
        return [sink for sink in self.sinks if sink.question is not None]
