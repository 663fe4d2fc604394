"""The declared graph: immutable nodes, each knowing its parent. Streams wrap them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from millstream.kernels.decode import Field
from millstream.kernels.plan import End, ViewEnd
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


_AT_HOME = ViewEnd()

Node = SourceNode | StepNode | WindowNode | NativeNode


@dataclass(frozen=True, eq=False)
class Output:
    """A named output: what becomes of the rows is its ``end``; ``key`` is a view's."""

    name: str
    parent: Node
    key: tuple[str, ...]
    schema: tuple[tuple[str, pl.DataType], ...]
    end: End = _AT_HOME


def path_from(node: Node) -> list[Node]:
    """List the nodes from the source down to ``node``."""
    path: list[Node] = [node]
    while not isinstance(path[-1], SourceNode):
        path.append(path[-1].parent)
    return path[::-1]
