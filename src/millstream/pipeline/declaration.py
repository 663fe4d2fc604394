"""What an app declares, as its topics and streams know it; :class:`~millstream.App` runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.client.default_log import default_log
from millstream.errors import ConfigError
from millstream.kernels.errors.user_code import OnError
from millstream.kernels.plan import TopicSinkSpec
from millstream.notebook.cells import cell_name, cell_run, is_newest
from millstream.pipeline.graph import GraphNode, Output, SourceNode, upstream_nodes
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StepNames

if TYPE_CHECKING:
    from millstream.engine.job import Job


@dataclass
class AppDeclaration(ABC):
    """The options of an app that streams depend on, and the outputs declared so far."""

    name: str
    # Not shown, as an option of kafka:// may be a password.
    log: str | Path = field(default_factory=default_log, repr=False)
    buckets: int = 2
    on_error: OnError = "dead-letter"
    views: str | None = field(default=None, repr=False)  # it may hold a password
    store: str | None = field(default=None, repr=False, kw_only=True)  # it may, too
    outputs: list[Output] = field(default_factory=list, init=False)
    partitions: dict[str, int] = field(default_factory=dict, init=False, repr=False)  # by topic
    questions: dict[str, Callable[..., Any]] = field(default_factory=dict, init=False, repr=False)
    names: StepNames = field(default_factory=StepNames, init=False, repr=False)
    cell: int = field(default_factory=cell_run, init=False, repr=False)  # also: cells are followed

    def add_output(self, output: Output) -> None:
        """Declare an output.

        An app cannot write to a topic that it reads, even where the graph has no loop: what a batch
        writes is read by a later one, so a run "until caught up" would end before its own records
        are read, and the result would depend on where batches end.

        Raises:
            ConfigError: the app would write to a topic that it reads.
        """
        self.drop_replaced()
        outputs = [*self.outputs, output]
        read = {node.topic for node in upstream_nodes(outputs) if isinstance(node, SourceNode)}
        for each in outputs:
            if isinstance(each.spec, TopicSinkSpec) and each.spec.topic in read:
                raise ConfigError(
                    f"The app writes to the topic {each.spec.topic!r} and reads it. Go on with the "
                    "stream itself, or read the topic in another app."
                )
        self.outputs.append(output)

    def drop_replaced(self) -> None:
        """Forget outputs that cells of a notebook declared before they ran again."""
        self.outputs[:] = [output for output in self.outputs if not output.is_replaced]

    def check_newest(self) -> None:
        """Make sure that outputs are made of what their notebook's cells declare now.

        Raises:
            ConfigError: a cell has run again, and what is below it, in another cell, has not.
        """
        for output in self.outputs:
            for node in upstream_nodes([output]):
                if isinstance(node, SourceNode) and is_newest(node.cell) and node.is_replaced:
                    raise ConfigError(_stale(output, node, node.topic_cell))
                if node.is_replaced:
                    raise ConfigError(_stale(output, node, node.cell))

    def require_same(self, other: AppDeclaration, what: str) -> None:
        """Make sure that another input is of this app; ``what`` says what takes it, as "join takes tables".

        Raises:
            ConfigError: it is not.
        """
        if other is not self:
            raise ConfigError(f"{what} of one app; these are of {self.name!r} and {other.name!r}.")

    @abstractmethod
    def job_of(self, node: GraphNode, columns: ColumnTypes, name: str) -> Job:
        """Describe a plan of its own whose one output, by a name, is the rows of a node."""


def _stale(output: Output, node: GraphNode | Output, cell: int) -> str:
    """Return the message that an output is made of something which its cell has declared again."""
    by, of = cell_name(output.cell), cell_name(cell)
    again = f"Run {by} again" if node.cell == output.cell else "Run the cells between the two again"
    return (
        f"The output {output.name!r} was declared by {by}, of what {of} declared before it ran again. {again}, "
        "so that it is made of what is declared now."
    )
