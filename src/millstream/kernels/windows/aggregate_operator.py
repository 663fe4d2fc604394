"""The base of operators that aggregate one input by key: windows of every kind."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.kernels.aggregation import Aggregation
from millstream.kernels.queryable import KeyColumns
from millstream.kernels.state.layout import StateLayout
from millstream.kernels.trigger import EmitStrategy


@dataclass(frozen=True)
class AggregateOperator:
    """An operator that aggregates its one input by key, and emits rows of results."""

    name: str
    aggregation: Aggregation
    emission: EmitStrategy

    @property
    def by(self) -> tuple[str, ...]:
        return self.aggregation.by

    @property
    def query_key(self) -> KeyColumns | None:
        """The columns by which its rows are found in the state."""
        return self.aggregation.keys

    @property
    def queried_as_emitted(self) -> bool:
        return True

    @property
    def layout(self) -> StateLayout:
        return StateLayout()

    @property
    def transparent(self) -> bool:
        return False

    @property
    def ordered(self) -> bool:
        return self.aggregation.ordered

    @property
    def heartbeat_ms(self) -> int | None:
        """How often a batch must come, in running time, even without input; None: never."""
        return self.emission.heartbeat_ms

    @property
    def side_output(self) -> bool:
        """Whether events that are too late go to the side output as they came."""
        return self.emission.late_policy == "side"

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        return self.aggregation.columns_read
