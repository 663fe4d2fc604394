"""The declared graph: immutable nodes, each knowing those above it. Streams wrap them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from millstream.errors import ConfigError
from millstream.kernels.dead_records import BadPolicy
from millstream.kernels.decode import Field
from millstream.kernels.decode.formats import JSON, ValueFormat
from millstream.kernels.isolation import UserCode
from millstream.kernels.operator import Operator
from millstream.kernels.plan import End, ViewEnd
from millstream.kernels.steps import Step
from millstream.kernels.watermarks import WatermarkRule
from millstream.kernels.window_step import WindowStep


@dataclass(frozen=True, eq=False)
class SourceNode:
    """A topic read as a stream, with its time rule."""

    name: str
    topic: str
    fields: tuple[Field, ...]
    time: pl.Expr | None
    rule: WatermarkRule
    values: ValueFormat = JSON
    bad: BadPolicy = "dead-letter"


@dataclass(frozen=True, eq=False)
class FrameNode:
    """A streaming DataFrame of Spark's as a stream, with its time rule."""

    name: str
    frame: Any
    schema: pa.Schema
    time: pl.Expr
    rule: WatermarkRule


@dataclass(frozen=True, eq=False)
class StepNode:
    """A stateless step. ``made`` are the types of all columns that come out."""

    parent: Node
    step: Step
    made: tuple[tuple[str, pl.DataType], ...]
    code: UserCode


@dataclass(frozen=True, eq=False)
class UnionNode:
    """The rows of several streams with the same columns, as one stream."""

    inputs: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class OperatorNode:
    """A stateful step, with its inputs in their order.

    Raises:
        ConfigError: it goes by the order of the log, and gets rows with a place in it beside others.
    """

    inputs: tuple[Node, ...]
    kernel: Operator

    def __post_init__(self) -> None:
        # A window's first and last go by event time, and by the place only where that is equal.
        by_time = isinstance(self.kernel, WindowStep) and not self.kernel.by_arrival
        if self.kernel.ordered and not by_time and len(_placed(self)) > 1:
            raise ConfigError(
                f"{self.kernel.name} takes rows in the order of the log. It gets some that have no "
                "place in it, from behind a window, a native step or a DataFrame, together with "
                "some that have: which of them go first is chance. Give each its own, before the "
                "union."
            )


@dataclass(frozen=True, eq=False)
class LateNode:
    """The rows that came too late for an operator."""

    parent: OperatorNode


@dataclass(frozen=True, eq=False)
class NativeNode:
    """A native Spark step."""

    parent: Node
    name: str
    function: Callable[[Any], Any]
    schema_in: pa.Schema
    schema_out: pa.Schema
    time: pl.Expr


Node = SourceNode | FrameNode | StepNode | UnionNode | OperatorNode | LateNode | NativeNode
_AT_HOME = ViewEnd()


@dataclass(frozen=True, eq=False)
class Output:
    """A named output: what becomes of the rows is its ``end``; ``key`` is a view's.

    ``replaces``: they come from ``emit("update")``.
    """

    name: str
    parent: Node
    key: tuple[str, ...]
    schema: tuple[tuple[str, pl.DataType], ...]
    end: End = _AT_HOME
    replaces: bool = False


def _placed(operator: OperatorNode) -> set[bool]:
    """Say whether what an operator takes has a place in the log: some of it, and some of it not."""
    found: set[bool] = set()
    above: list[Node] = [*operator.inputs]
    while above:
        node = above.pop()
        passes = isinstance(node, (StepNode, UnionNode))
        if passes or (isinstance(node, OperatorNode) and node.kernel.transparent):
            above += parents(node)
        else:
            found.add(isinstance(node, SourceNode))
    return found


def parents(node: Node | Output) -> tuple[Node, ...]:
    """Give the nodes whose rows a node takes."""
    if isinstance(node, (SourceNode, FrameNode)):
        return ()
    if isinstance(node, (UnionNode, OperatorNode)):
        return node.inputs
    return (node.parent,)


def nodes_above(outputs: Sequence[Output]) -> list[Node | Output]:
    """List all nodes that lead to the outputs, and the outputs, each after those above it."""
    listed: dict[Node | Output, None] = {}

    def add(node: Node | Output) -> None:
        if node not in listed:
            for parent in parents(node):
                add(parent)
            listed[node] = None

    for output in outputs:
        add(output)
    return list(listed)
