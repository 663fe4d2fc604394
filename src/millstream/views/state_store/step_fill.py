"""Steps that are computed of the state of tables above them, so that the log is not read for them.

A table says in its state what it has given out. A step behind it whose own state follows from the rows that hold above it
(`kernels/table_inputs.py`) is the same whether it is given all that came and went, or these rows at once. So it is filled

1. if every row that it takes comes from a table that keeps its state and was computed of all records, or from another step that is
   filled, or can be computed again of such tables (a join keeps its inputs, and not its result);
2. and all that takes its rows is filled with it: the steps below, and the views that hold every row of it. What is written elsewhere goes on.

Otherwise it is computed from the log, with all that is on its paths.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from millstream.kernels.table_inputs import StepInputs, is_linear
from millstream.views.state_store.view_fill import ViewPath


@dataclass(frozen=True)
class StepFill:
    """How a step is filled: of the rows of ``tables``, through steps ``between`` that keep their state. All by their keys."""

    tables: frozenset[str] = frozenset()
    between: frozenset[str] = frozenset()

    def __or__(self, other: StepFill) -> StepFill:
        return StepFill(self.tables | other.tables, self.between | other.between)


@dataclass(frozen=True)
class StepFillSearch:
    """Finds the steps of a program that are filled.

    Attributes:
        inputs: Where each step has its rows from.
        whole: The steps that keep their state, which was computed of all records.
        readers: The steps that take the rows of each.
        views: The steps above each view of the state store.
        paths: Those to views that hold all rows of a step.
        again: Views that are computed from the log whatever is there.
    """

    inputs: Mapping[str, StepInputs]
    whole: Collection[str]
    readers: Mapping[str, Collection[str]]
    views: Mapping[str, Collection[str]]
    paths: Mapping[str, ViewPath]
    again: Collection[str] = ()

    def found(self, wanted: Iterable[str], rebuilt: Collection[str] = ()) -> dict[str, StepFill]:
        """Return how steps are filled, of those that are ``wanted``. Of what is ``rebuilt`` from the log nothing is."""
        left = {key for key in wanted if key in self.inputs and self.inputs[key].filled}
        while True:
            fills = {key: self._fill(key, left, rebuilt) for key in sorted(left)}
            found = {
                key: fill for key, fill in fills.items() if fill and self._is_whole_below(key, left)
            }
            if found.keys() == left:
                return found
            left = {*found}

    def _fill(
        self, step: str, filled: Collection[str], rebuilt: Collection[str]
    ) -> StepFill | None:
        made = StepFill()
        for key in self.inputs[step].above:
            source = self._source(key, filled, rebuilt)
            if source is None:
                return None
            made |= source
        return made

    def _source(
        self, key: str, filled: Collection[str], rebuilt: Collection[str]
    ) -> StepFill | None:
        """Return where the rows of a step come from in the end; None if they would come from the log."""
        if key in filled:
            return self._fill(key, filled, rebuilt)
        if key in rebuilt or key not in self.whole or key not in self.inputs:
            return None
        if self.inputs[key].table is not None:
            return StepFill(frozenset({key}))
        above = self._fill(key, filled, rebuilt) if self.inputs[key].filled else None
        return None if above is None else above | StepFill(between=frozenset({key}))

    def _is_whole_below(self, step: str, filled: Collection[str]) -> bool:
        """Return whether all that takes the rows of a step is filled, too."""
        return {*self.readers.get(step, ())} <= {*filled} and all(
            self._is_filled(view, filled) for view, steps in self.views.items() if step in steps
        )

    def _is_filled(self, view: str, filled: Collection[str]) -> bool:
        path = self.paths.get(view)
        if path is None or view in self.again:
            return False
        linear = all(is_linear(edge.step) for edge in path.edges)
        return bool(path.row_keys) and linear and path.step in filled
