"""Views that are filled from a view that there is, so that the log is not read for them.

A view that holds every row of a stateful step is the sum of all signed changes that the step has given out.
What filters and expressions make of a sum of changes is the sum of what they make of each change. So a view below such
steps is what they make of the rows of the other view, at its position, as if it had been written from the beginning.

==========================================================  =================================================
a view below                                                is filled from a view of the same step
==========================================================  =================================================
filters, splits, and expressions of single rows that        if that view has one row for each row that holds,
leave the columns which identify a row as they are          and the columns that are needed
explode, map_frames, look-ups                               not: what identifies their rows is not known
no stateful step: rows of a topic, late rows                not: no view says which rows there were
a union                                                     not: its rows are those of several steps
any, of which it keeps some rows by a key of its own        not: which it has depends on their order
==========================================================  =================================================

A view of a table is filled from the table's own state (`table_fill.py`) where no view has all that it needs.

A stateful step is never filled from a view. Its state depends on the event times of rows, also where that of a table is
concerned (two rows are equal if their times are, too), and often on their order. A view holds neither.

Source: Budiu et al., "DBSP: Automatic Incremental View Maintenance for Rich Query Languages", PVLDB 16(7),
2023 (arXiv 2203.16684), section 4: linear operators.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import polars as pl

from millstream.errors import ConflictError
from millstream.kernels.definition import canonical_text
from millstream.kernels.errors.dead_letter_collector import DeadLetterCollector
from millstream.kernels.frames import FrameRow
from millstream.kernels.given_out import HeldTable
from millstream.kernels.plan import JobPlan, StepEdge, ViewSinkSpec
from millstream.kernels.routing import RowRouter, StepRouter, TaskLedger
from millstream.kernels.row_keys import row_key_after
from millstream.kernels.steps import Drop, Rename, is_defining
from millstream.kernels.table_inputs import held_table, paths_to
from millstream.views.coverage import (
    STATE_STORE_VIEW,
    OutputCoverage,
    OutputSink,
    is_complete,
)
from millstream.views.schema import ViewSchema, dtype_of
from millstream.views.state_store.definition_comparison import passes_on_alike
from millstream.views.state_store.program_switch import FilledView
from millstream.views.state_store.sqlite_values import in_kinds

RowKey = tuple[str, ...]

_PLAIN = (
    *(pl.Int8(), pl.Int16(), pl.Int32(), pl.UInt8(), pl.UInt16(), pl.UInt32()),
    *(pl.Float32(), pl.Duration("ms")),
)
_PASSING_ON = (Drop, Rename)  # steps that compute nothing
_BY_TEXT: Mapping[str, pl.DataType] = {repr(dtype): dtype for dtype in _PLAIN}
_TIME = re.compile(r"Datetime\(time_unit='(us|ms)', time_zone=(?:None|'([^']+)')\)")


@dataclass(frozen=True)
class ViewPath:
    """The one path that leads to a view, from a stateful step, whose key in the program is ``step``.

    ``edges`` are the stateless steps. ``row_keys`` are sets of columns of which each identifies a row; none if the view
    does not hold all rows. ``table`` is the step, where its state is what it has given out.
    """

    step: str
    edges: tuple[StepEdge, ...]
    row_keys: tuple[RowKey, ...]
    table: HeldTable | None = None


def view_paths(plan: JobPlan) -> dict[str, ViewPath]:
    """Return the paths to the views that the state store keeps, of those that have one path, from a stateful step."""
    found = {}
    kernels = {one.key: one.kernel for stage in plan.stages for one in stage.operators}
    for sink in plan.sinks:
        paths = [*paths_to(plan, sink.port)] if sink.spec == ViewSinkSpec() else []
        if len(paths) == 1:
            step, edges = paths[0]
            if step is not None:
                found[sink.name] = ViewPath(step, edges, sink.row_keys, held_table(kernels[step]))
    return found


@dataclass(frozen=True)
class HeldView:
    """A view that is there: its ``schema`` and ``coverage``, and the stored key of the ``step`` that gave its rows."""

    schema: ViewSchema
    coverage: OutputCoverage
    step: str


@dataclass(frozen=True)
class ViewFill:
    """A view that is filled from another one, the ``source``, through the stateless steps ``edges``.

    ``step`` is the key of the step whose rows both have. ``types`` are the columns that are taken, with their
    types in the pipeline; ``schema`` and ``definition`` are the view's, and ``held`` is the coverage of the source, whose
    spans become its.
    """

    schema: ViewSchema
    definition: str
    source: str
    step: str
    edges: tuple[StepEdge, ...]
    types: Mapping[str, pl.DataType]
    held: OutputCoverage

    def rows(self, source: pl.DataFrame) -> pl.DataFrame:
        """Return all rows of the view, of those of its source.

        Rows on which the user's code fails are left out, as in a batch: their dead letters are there already, or would
        be those of a rebuild, which are not kept either.

        Raises:
            UserCodeError: failing rows are to stop the app, or too many fail.
        """
        taken = pl.DataFrame([_typed(source[name], dtype) for name, dtype in self.types.items()])
        if all(isinstance(edge.step, _PASSING_ON) for edge in self.edges):  # kept as JSON, perhaps
            for edge in self.edges:
                taken = edge.step.apply(taken).table
            return taken[list(self.schema.names)]
        return rows_after(self.edges, taken, self.schema)


def rows_after(edges: Iterable[StepEdge], rows: pl.DataFrame, schema: ViewSchema) -> pl.DataFrame:
    """Return the rows of a view that stateless steps make of all rows above them; those that fail are left out.

    Raises:
        ConfigError: a column has a value that the view cannot keep.
        UserCodeError: failing rows are to stop the app, or too many fail.
    """
    collector = _Collector()
    routers: list[RowRouter] = [collector]
    for edge in reversed([*edges]):
        routers = [StepRouter(edge, TaskLedger(), DeadLetterCollector(), routers)]
    if rows.height:
        routers[0].take(rows)
    if not collector.tables:
        return pl.DataFrame(schema=schema.dtypes)
    # They are compared with the rows that the view has, which are in its types.
    return in_kinds(pl.concat(collector.tables), schema)


def _typed(column: pl.Series, dtype: pl.DataType) -> pl.Series:
    """Return a column of a view in the type that it has in the pipeline: without loss, as it was stored from it."""
    if not isinstance(dtype, pl.Datetime):
        return column.cast(dtype)
    zone = dtype.time_zone
    local = column.dt.replace_time_zone(None) if zone is None else column.dt.convert_time_zone(zone)
    return local.dt.cast_time_unit(dtype.time_unit)


@dataclass
class _Collector:
    """Takes the rows at the end of a path."""

    tables: list[pl.DataFrame] = field(default_factory=list)

    def take(self, rows: pl.DataFrame) -> None:
        self.tables.append(rows)

    def frames(self, first_bucket: int) -> Iterator[FrameRow]:
        raise NotImplementedError(f"rows of a view stay here: none go to bucket {first_bucket}")


def find_fill(
    schema: ViewSchema,
    definition: str,
    path: ViewPath | None,
    step: str | None,
    held: Iterable[HeldView],
) -> ViewFill | str:
    """Return how a view is filled, or why it is not: a text that goes on from "it is not filled, as".

    Args:
        definition: That of the view, as its coverage has it.
        path: Its path in the program; None if it has not one.
        step: The key under which the state of the step above was stored; None if it is not kept.
        held: The views that there are.
    """
    if path is None:
        return "its rows are not those of one stateful step, and no view says which there were"
    if not path.row_keys:
        return "which rows of a key it has depends on their order, which no view holds"
    above = [one for one in held if one.step == step]
    refused = "no view has the rows of the step above it"
    for view in sorted(
        above, key=lambda one: (not is_complete(one.coverage.spans), one.schema.name)
    ):
        found = _fill_from(view, schema, definition, path)
        if isinstance(found, ViewFill):
            return found
        refused = found
    return refused


def _fill_from(
    view: HeldView,
    schema: ViewSchema,
    definition: str,
    path: ViewPath,
) -> ViewFill | str:
    source = json.loads(view.coverage.definition)
    now, name = json.loads(definition), view.schema.name
    done, steps = (one["reads"][0]["steps"] for one in (source, now))
    if canonical_text(steps[: len(done)]) != canonical_text(done) or not passes_on_alike(
        source, now
    ):
        return f"the view {name!r} has other steps above it, or its rows come from other fields"
    edges = _after(path.edges, len(done), schema.names)
    key: RowKey | None = tuple(source["key"])
    wanted: set[str] | None = {*schema.names}
    for edge in edges:
        key = row_key_after(edge.step, key)
    if key is None or {*key} not in [{*one} for one in path.row_keys]:
        return f"the view {name!r} has not one row for each row that holds, or what identifies them is changed"
    for edge in reversed(edges):
        wanted = edge.step.columns_before(wanted)
    if wanted is None:
        return "it takes columns that it does not name"
    lacking = sorted(wanted - {*view.schema.names})
    if lacking:
        return f"the view {name!r} lacks the column {lacking[0]!r}"
    plain = all(isinstance(edge.step, _PASSING_ON) for edge in edges)
    types = {}
    for column in sorted(wanted):
        kept = dtype_of(view.schema.kinds[column])
        dtype = kept if plain else _pipeline_type(view.schema, column, source["columns"][column])
        if dtype is None:
            return f"the view {name!r} does not keep the column {column!r} exactly as the steps take it"
        types[column] = dtype
    return ViewFill(schema, definition, name, path.step, edges, types, view.coverage)


def _after(
    edges: tuple[StepEdge, ...], described: int, columns: Iterable[str]
) -> tuple[StepEdge, ...]:
    """Return the steps behind the first ones that are described, of a path to a view with such columns."""
    wanted: list[set[str] | None] = [{*columns}]
    for edge in reversed(edges):
        wanted.append(edge.step.columns_before(wanted[-1]))
    for number, (edge, behind) in enumerate(zip(edges, reversed(wanted[:-1]), strict=True)):
        if not described:
            return edges[number:]
        described -= is_defining(edge.step, behind)
    return ()


def _pipeline_type(schema: ViewSchema, column: str, text: str) -> pl.DataType | None:
    """Return the type of a column before it was stored; None if its values are not those that were there."""
    kind = schema.kinds[column]
    if kind == "json" or (kind == "float" and column in schema.key):
        return None  # -0.0 in a key became 0.0
    kept = dtype_of(kind)
    if repr(kept) == text:
        return kept
    time = _TIME.fullmatch(text)
    if time is not None:
        return pl.Datetime("us" if time[1] == "us" else "ms", time[2])
    return _BY_TEXT.get(text)


def fill_views(
    fills: Iterable[ViewFill],
    outputs: Mapping[OutputSink, OutputCoverage],
    scan: Callable[[str], pl.DataFrame],
) -> list[FilledView]:
    """Return filled views with all their rows. No run may commit meanwhile.

    Args:
        outputs: The coverage of the outputs that there are.
        scan: Returns the rows of a view.

    Raises:
        ConflictError: a source is no longer what it was when the program was compared.
    """
    made = []
    for fill in fills:
        if outputs.get((fill.source, STATE_STORE_VIEW)) != fill.held:
            raise ConflictError(
                f"The view {fill.source!r}, from which {fill.schema.name!r} is filled, was declared otherwise by a run "
                "since this program was compared with what is there. Nothing was changed. Do it again."
            )
        coverage = OutputCoverage(fill.definition, fill.held.spans)
        made.append(FilledView(fill.schema, fill.rows(scan(fill.source)), coverage))
    return made
