"""The declared graph: immutable nodes, each knowing its parent. Streams wrap them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from millstream.kernels.dead_records import BadPolicy
from millstream.kernels.decode import Field
from millstream.kernels.decode.formats import JSON, ValueFormat
from millstream.kernels.steps import Step
from millstream.kernels.watermarks import WatermarkRule
from millstream.kernels.window_aggregate import WindowAggregate


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
class StepNode:
    """A stateless step."""

    parent: Node
    step: Step


@dataclass(frozen=True, eq=False)
class WindowNode:
    """A windowing operator."""

    parent: Node
    kernel: WindowAggregate


@dataclass(frozen=True, eq=False)
class NativeNode:
    """A native Spark step."""

    parent: Node
    name: str
    function: Callable[[Any], Any]
    schema_in: pa.Schema
    schema_out: pa.Schema
    time: pl.Expr


Node = SourceNode | StepNode | WindowNode | NativeNode


@dataclass(frozen=True, eq=False)
class Output:
    """A named output: a view and its key, or the stream given out as a Spark DataFrame."""

    name: str
    parent: Node
    key: tuple[str, ...]
    schema: tuple[tuple[str, pl.DataType], ...]


def path_from(node: Node) -> list[Node]:
    """List the nodes from the source down to ``node``."""
    path: list[Node] = [node]
    while not isinstance(path[-1], SourceNode):
        path.append(path[-1].parent)
    return path[::-1]
