"""Which views of a program can be filled from what the program before has left, and which of that is used."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from millstream.views.coverage import STATE_STORE_VIEW, is_complete
from millstream.views.state_store.program_paths import ProgramPaths
from millstream.views.state_store.program_state import (
    ProgramOutputs,
    ProgramState,
    state_store_output,
)
from millstream.views.state_store.table_fill import TableFill, find_table_fill, whole_steps
from millstream.views.state_store.view_fill import HeldView, ViewFill, find_fill


@dataclass(frozen=True)
class FillSearch:
    """Finds what views can be filled from, of what a program has ``left``.

    ``kept`` are the steps that keep their state, and the keys that it was stored under.
    """

    left: ProgramState
    declared: ProgramOutputs
    kept: Mapping[str, str]
    stored_paths: ProgramPaths

    def found(self, remade: Iterable[str]) -> dict[str, ViewFill | TableFill | str]:
        """Return how each view is filled that is new, was left out, or is ``remade``; or why it is not."""
        if not self.declared.paths:
            return {}
        wanted = {*remade, *(view for view in self.declared.schemas if self._lacks_rows(view))}
        held = [*self._held()] if wanted else []
        fills = {view: self._fill(view, held) for view in sorted(wanted)}
        return {view: fill for view, fill in fills.items() if fill is not None}

    def _lacks_rows(self, view: str) -> bool:
        """Return whether a view is new, or misses what came out while it was left out."""
        before = self.left.outputs.coverage.get(state_store_output(view))
        if state_store_output(view) not in self.declared.coverage:
            return False  # the dead letters
        until = None if before is None else before.spans[-1].until
        return before is None or (
            until is not None and until.batch_id != self.left.boundary.batch_id
        )

    def _fill(self, view: str, held: Iterable[HeldView]) -> ViewFill | TableFill | str | None:
        """Return how a view is filled: one that has rows only from one that has them all, or is what it was itself.

        None if the step above it does not keep its state.
        """
        path = self.declared.paths.get(view)
        step = None if path is None else self.kept.get(path.step)
        if path is not None and step is None:
            return None
        is_new = state_store_output(view) not in self.left.outputs.coverage
        usable = [
            one
            for one in held
            if is_new or one.schema.name == view or is_complete(one.coverage.spans)
        ]
        schema, definition = (
            self.declared.schemas[view],
            self.declared.coverage[state_store_output(view)].definition,
        )
        found = find_fill(schema, definition, path, step, usable)
        is_whole = isinstance(found, ViewFill) and is_complete(found.held.spans)
        if path is None or step is None or is_whole or step not in self._whole:
            return found
        return find_table_fill(schema, definition, path, step) or found

    @cached_property
    def _whole(self) -> Collection[str]:
        return whole_steps(self.stored_paths, self.left.outputs.written())

    def _held(self) -> Iterator[HeldView]:
        """Yield the views that have been written by one declaration, and have the rows of one step that keeps its state."""
        kept = {*self.kept.values()}
        for (name, label), one in self.left.outputs.coverage.items():
            schema, definition = self.left.outputs.schemas.get(name), json.loads(one.definition)
            is_written = len(one.spans) == 1 and one.spans[-1].until is None
            if label != STATE_STORE_VIEW or schema is None or not is_written:
                continue
            above = self.stored_paths.next_steps_of(definition) & kept
            if "rows of" in definition["reads"][0] and len(above) == 1:
                yield HeldView(schema, one, above.pop())
