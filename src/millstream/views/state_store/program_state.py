"""What a program has left in a state store, and what another one declares, for the comparison of the two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from millstream.kernels.table_inputs import StepInputs
from millstream.views.coverage import (
    STATE_STORE_VIEW,
    BatchBoundary,
    OutputCoverage,
    OutputSink,
)
from millstream.views.schema import ViewSchema
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.view_fill import ViewPath


@dataclass(frozen=True)
class ProgramOutputs:
    """The outputs of a program, and the schemas of its views in the state store, by name.

    ``paths`` are those to views that hold all rows of a step. Without them no view is filled from another one. ``steps`` says where
    each step has its rows from. Without that no step is filled.
    """

    coverage: Mapping[OutputSink, OutputCoverage]
    schemas: Mapping[str, ViewSchema]
    paths: Mapping[str, ViewPath] = field(default_factory=dict)
    steps: Mapping[str, StepInputs] = field(default_factory=dict)

    def written(self) -> Iterator[OutputCoverage]:
        """Yield the coverage of the views that the program writes to the state store."""
        for (_, label), one in self.coverage.items():
            if label == STATE_STORE_VIEW and one.spans[-1].until is None:
                yield one


@dataclass(frozen=True)
class ProgramState:
    """What a program has left: itself, its outputs, and the boundary before the batch that comes next."""

    program: StoredProgram
    outputs: ProgramOutputs
    boundary: BatchBoundary


def state_store_output(view: str) -> OutputSink:
    """Return the output that a view of the state store is."""
    return view, STATE_STORE_VIEW
