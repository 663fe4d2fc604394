"""The switch: an edited program takes the place of the one before, with state and views computed beside it.

It is part of one write transaction of the state store, so readers see the views of the old program or those
of the new one, in each of their reads, and never some of both:

===============================================  ===================================================================
a crash after                                    leaves
===============================================  ===================================================================
1. the run that switches has its number          the old program, its state and views; its runs are fenced
2. runs of state are where the app's are         the same, and objects that no manifest names: a later run removes them
3. the transaction is durable                    the new program, its state and views, and which run has switched
===============================================  ===================================================================

Between the comparison with what is there and the switch, another machine may deploy or run another program into the same
store. So a switch names what it was compared with, and the transaction refuses it if that is no longer there
(`switch_conflicts.py`).

A view with the columns and key of before is brought to the new rows by changes, which its subscribers get as
those of any batch. A view with others is created again. Its change log is empty then, and begins one number
later: so every subscriber of the old one is told to read the view as a whole (OffsetOutOfRangeError).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from millstream.views.coverage import STATE_STORE_VIEW, OutputCoverage, OutputSink
from millstream.views.schema import ViewChange, ViewSchema
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_tables import RunProgram

SWITCHED_BY = "switched_by"
"""The description that has the number of the run that has switched last."""


@dataclass(frozen=True)
class RebuiltView:
    """A view with all its rows, as of the position at which a program switches."""

    schema: ViewSchema
    rows: pl.DataFrame


@dataclass(frozen=True)
class FilledView(RebuiltView):
    """A view with all its rows, of another view with all of them; and its ``coverage``, which is that one's."""

    coverage: OutputCoverage


def coverage_of(views: Sequence[FilledView]) -> dict[OutputSink, OutputCoverage]:
    """Return the coverage of views that were filled."""
    return {(view.schema.name, STATE_STORE_VIEW): view.coverage for view in views}


@dataclass(frozen=True)
class ComparedProgram:
    """What an edited program was compared with: the ``program`` that was stored, and the run that had switched last."""

    program: StoredProgram
    switched_by: int | None


@dataclass(frozen=True)
class ProgramSwitch:
    """What takes the place of a program's state and views.

    ``compared`` is what it was compared with; ``position`` is the one that state and views are of; ``manifests`` are all
    of the new program's state. ``coverage`` is that of outputs that were rebuilt; the others go on as in any run.
    """

    beginning: RunProgram
    compared: ComparedProgram
    position: Mapping[str, Any]
    manifests: Mapping[tuple[int, int], bytes]
    views: Sequence[RebuiltView] = ()
    coverage: Mapping[OutputSink, OutputCoverage] = field(default_factory=dict)


def difference(schema: ViewSchema, before: pl.DataFrame, after: pl.DataFrame) -> ViewChange:
    """Return the change that brings a keyed view from some rows to others."""
    # Numbers for names meanwhile: polars takes a name such as "^a.*$" for a pattern.
    numbers = {str(number): name for number, name in enumerate(schema.key)}
    keys = (
        pl.DataFrame([rows[name].alias(number) for number, name in numbers.items()])
        for rows in (before, after)
    )
    gone = next(keys).join(next(keys), on=list(numbers), how="anti", nulls_equal=True)
    return ViewChange(schema.name, after, gone.rename(numbers))
