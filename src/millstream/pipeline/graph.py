"""The declared graph: immutable nodes, each knowing those above it. Streams wrap them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import polars as pl
import pyarrow as pa

from millstream.errors import ConfigError
from millstream.kernels.decode import Field
from millstream.kernels.decode.formats import JSON, ValueFormat
from millstream.kernels.errors.dead_letters import BadRecordPolicy
from millstream.kernels.errors.user_code import UserCode
from millstream.kernels.operator import Operator
from millstream.kernels.plan import QuestionPlan, SinkSpec, ViewSinkSpec
from millstream.kernels.steps import Step
from millstream.kernels.tables.group_by import GroupBy
from millstream.kernels.time.watermarks import WatermarkRule
from millstream.kernels.windows.window_operator import WindowOperator
from millstream.notebook.cells import PROGRAM, cell_run, is_newest


@dataclass(frozen=True, eq=False)
class DeclaredNode:
    """What is declared. ``cell``: by which run of a cell of a notebook."""

    cell: int = field(default_factory=cell_run, kw_only=True)

    @property
    def is_replaced(self) -> bool:
        """Whether the cell that declared it has run again."""
        return not is_newest(self.cell)


@dataclass(frozen=True, eq=False)
class SourceNode(DeclaredNode):
    """A topic read as a stream, with its time rule.

    ``table_key``: the topic is a table with that key. ``topic_cell`` has declared the topic.
    """

    name: str
    topic: str
    fields: tuple[Field, ...]
    time: pl.Expr | None
    rule: WatermarkRule
    values: ValueFormat = JSON
    bad: BadRecordPolicy = "dead-letter"
    table_key: str | None = None
    topic_cell: int = PROGRAM

    @property
    def is_replaced(self) -> bool:
        """Whether a cell that declared it, or its topic, has run again."""
        return not (is_newest(self.cell) and is_newest(self.topic_cell))


@dataclass(frozen=True, eq=False)
class DataFrameNode(DeclaredNode):
    """A streaming DataFrame of Spark's as a stream, with its time rule."""

    name: str
    frame: Any
    schema: pa.Schema
    time: pl.Expr
    rule: WatermarkRule


@dataclass(frozen=True, eq=False)
class StepNode(DeclaredNode):
    """A stateless step. ``schema_out`` are the types of all columns that come out."""

    parent: GraphNode
    step: Step
    schema_out: tuple[tuple[str, pl.DataType], ...]
    code: UserCode


@dataclass(frozen=True, eq=False)
class UnionNode(DeclaredNode):
    """The rows of several streams with the same columns, as one stream.

    ``signed``: some are signed changes, and those without a sign are additions.
    """

    inputs: tuple[GraphNode, ...]
    signed: bool = False


@dataclass(frozen=True, eq=False)
class OperatorNode(DeclaredNode):
    """A stateful step, with its inputs in their order.

    Raises:
        ConfigError: it needs the order of the log, and its input has rows with a log order and rows without.
    """

    inputs: tuple[GraphNode, ...]
    kernel: Operator

    def __post_init__(self) -> None:
        # first and last of a window or group compare event time, and the log order only if that is equal.
        by_time = isinstance(self.kernel, GroupBy) or (
            isinstance(self.kernel, WindowOperator) and not self.kernel.by_arrival
        )
        if (
            self.kernel.ordered
            and not by_time
            and any(len(placed_inputs(one)) > 1 for one in self.inputs)
        ):
            raise ConfigError(
                f"{self.kernel.name} takes rows in the order of the log. It gets some that have no "
                "place in it, after a window, a native step or a DataFrame, together with "
                "some that have: which of them go first is arbitrary. Give each its own, before the "
                "union."
            )


class OperatorGroup(Protocol):
    """A stateful step that takes one input more with each declaration that shares it."""

    @property
    def inputs(self) -> tuple[GraphNode, ...]: ...
    @property
    def kernel(self) -> Operator: ...


class SharedOperatorNode(OperatorNode):
    """A stateful step that several declarations share: it is complete when the graph is compiled."""

    def __init__(self, group: OperatorGroup) -> None:
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "cell", cell_run())

    @property
    def inputs(self) -> tuple[GraphNode, ...]:
        group: OperatorGroup = self.__dict__["group"]
        return group.inputs

    @property
    def kernel(self) -> Operator:
        group: OperatorGroup = self.__dict__["group"]
        return group.kernel


@dataclass(frozen=True, eq=False)
class LateNode(DeclaredNode):
    """The rows that came too late for an operator."""

    parent: OperatorNode


@dataclass(frozen=True, eq=False)
class NativeNode(DeclaredNode):
    """A native Spark step."""

    parent: GraphNode
    name: str
    function: Callable[[Any], Any]
    schema_in: pa.Schema
    schema_out: pa.Schema
    time: pl.Expr


GraphNode = SourceNode | DataFrameNode | StepNode | UnionNode | OperatorNode | LateNode | NativeNode
_IN_STATE_STORE = ViewSinkSpec()


@dataclass(frozen=True, eq=False)
class Output(DeclaredNode):
    """A named output: its ``spec`` is the sink; ``key`` is a view's.

    ``replaces``: they come from ``emit("update")``. ``step``: its name in the ledger, where a stream or step
    has the output's name. ``row_keys``, ``question``: see :class:`millstream.kernels.plan.SinkPlan`.
    """

    name: str
    parent: GraphNode
    key: tuple[str, ...]
    schema: tuple[tuple[str, pl.DataType], ...]
    spec: SinkSpec = _IN_STATE_STORE
    replaces: bool = False
    step: str = ""
    row_keys: tuple[tuple[str, ...], ...] = ()
    question: QuestionPlan | None = None


def placed_inputs(*nodes: GraphNode) -> set[bool]:
    """Return whether the rows of nodes have a log order: both, if some rows have and some not."""
    found: set[bool] = set()
    above: list[GraphNode] = [*nodes]
    while above:
        node = above.pop()
        passes = isinstance(node, (StepNode, UnionNode))
        if passes or (isinstance(node, OperatorNode) and node.kernel.transparent):
            above += time_parents(node)
        else:
            found.add(isinstance(node, SourceNode))
    return found


def parents(node: GraphNode | Output) -> tuple[GraphNode, ...]:
    """Return the nodes whose rows a node takes."""
    if isinstance(node, (SourceNode, DataFrameNode)):
        return ()
    if isinstance(node, (UnionNode, OperatorNode)):
        return node.inputs
    return (node.parent,)


def reads_dataframes(node: GraphNode) -> bool:
    """Return whether a DataFrame of Spark's is among the sources of a node."""
    return isinstance(node, DataFrameNode) or any(map(reads_dataframes, parents(node)))


def time_parents(node: GraphNode) -> tuple[GraphNode, ...]:
    """Return the nodes whose time a node follows: a transparent operator follows its first input alone."""
    if isinstance(node, OperatorNode) and node.kernel.transparent:
        return node.inputs[:1]
    return parents(node)


def time_of(node: GraphNode) -> pl.Expr | None:
    """Return the expression of a node's event time; None where it is the record's or a window's."""
    while isinstance(node, StepNode):
        node = node.parent
    return node.time if isinstance(node, (SourceNode, DataFrameNode, NativeNode)) else None


def upstream_nodes(outputs: Sequence[Output]) -> list[GraphNode | Output]:
    """List all nodes that lead to the outputs, each after those above it."""
    listed: dict[GraphNode | Output, None] = {}

    def add(node: GraphNode | Output) -> None:
        if node not in listed:
            for parent in parents(node):
                add(parent)
            listed[node] = None

    for output in outputs:
        add(output)
    return list(listed)
