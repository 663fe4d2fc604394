"""Streams and their windows: the operators of the pipeline API.

A stream is immutable; every operator returns a new one. Each operator is checked where it is called,
against the columns that are there, so that a mistake shows at its own line and not in a running job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import TYPE_CHECKING

import polars as pl

from millstream.durations import Duration
from millstream.errors import ConfigError
from millstream.kernels.aggregates.protocol import Aggregate
from millstream.kernels.errors.user_code import OnError, UserCode
from millstream.kernels.frames import plain_schema
from millstream.kernels.map_frames import FrameFunction, RowsRule
from millstream.kernels.operator import Operator
from millstream.kernels.plan import Cleanup
from millstream.kernels.steps import AssignBranch, Filter, Select, SelectBranch, Step, WithColumns
from millstream.kernels.trigger import EmitStrategy, Mode
from millstream.kernels.windows.assigners import WindowAssigner
from millstream.pipeline.budget import Zone, build_budget
from millstream.pipeline.checks import (
    check_time,
    checked_on_error,
    column_names,
    columns_after,
    declared_at,
)
from millstream.pipeline.declaration import AppDeclaration
from millstream.pipeline.dedup import Bloom, LateIds, NullIds, build_dedup
from millstream.pipeline.expressions import Column, as_expression
from millstream.pipeline.graph import (
    GraphNode,
    LateNode,
    NativeNode,
    OperatorNode,
    Output,
    StepNode,
    UnionNode,
    time_of,
)
from millstream.pipeline.schema import ColumnTypes, columns_of, fields_of
from millstream.pipeline.shape import StreamShape
from millstream.pipeline.sinks import ForeachFunction, SinkBuilder
from millstream.pipeline.stateless import (
    FrameSchema,
    drop_step,
    explode_step,
    expressions_of,
    map_frames_step,
    rename_step,
    split_conditions,
    union_of,
)
from millstream.pipeline.windowed import aggregate_windows, emit_strategy
from millstream.pipeline.windows import EventWindow, TriggerSpec

if TYPE_CHECKING:
    from millstream.spark.job import DataFrame


@dataclass(frozen=True)
class Stream:
    """A stream of rows with named, typed columns. See its methods, the operators."""

    app: AppDeclaration
    node: GraphNode
    shape: StreamShape

    @property
    def columns(self) -> ColumnTypes:
        """The columns of the rows, with their types."""
        return self.shape.columns

    @property
    def late(self) -> Stream:
        """The rows that came too late for the window or dedup right above, with ``late="side"``.

        They have the columns of the input, ``late_by`` (how far behind their partition's watermark),
        ``late_reason``, and the ``window_start`` and ``window_end`` of the last window that they missed.
        They can be filtered, viewed and sent on, but not windowed.
        """
        columns = self.shape.late_columns
        if columns is None or not isinstance(self.node, OperatorNode):
            raise ConfigError(
                "The stream has no side output of late rows. What agg returns has one, over a stream "
                'read with late="side".'
            )
        shape = StreamShape(columns, is_late=True, names=self.shape.names)
        return Stream(self.app, LateNode(self.node), shape)

    # ── stateless operators ─────────────────────────────────────────────────────────────────

    def filter(
        self, *conditions: pl.Expr, name: str | None = None, on_error: OnError | None = None
    ) -> Stream:
        """Keep the rows for which all conditions are true (null counts as false).

        ``name`` is the step's in errors and the ledger. Rows on which an expression fails go to the dead
        letters, with the step, the reason and the record; ``on_error="stop"`` stops the job
        instead, and the default is the app's. An expression that fails on each of more than 100
        rows of one table stops the job in any case. This holds for every operator here.
        """
        self.shape.refuse_after_update("filter", "a row that passed once and later no longer does")
        conditions = tuple(as_expression(c, what="filter's condition") for c in conditions)
        step_name = name or f"filter({column_names(conditions)})"
        return self._step(Filter(self.shape.names.unique(step_name), conditions), on_error)

    def with_columns(
        self,
        *expressions: pl.Expr,
        name: str | None = None,
        on_error: OnError | None = None,
        **named: pl.Expr,
    ) -> Stream:
        """Add columns, or replace those of the same name: ``rate=pl.col("a") / pl.col("b")``."""
        every, step_name = expressions_of(expressions, named, "with_columns", name, self.columns)
        return self._step(WithColumns(self.shape.names.unique(step_name), every), on_error)

    def select(
        self,
        *expressions: Column,
        name: str | None = None,
        on_error: OnError | None = None,
        **named: pl.Expr,
    ) -> Stream:
        """Keep only the named columns and expressions."""
        every, step_name = expressions_of(expressions, named, "select", name, self.columns)
        return self._step(Select(self.shape.names.unique(step_name), every), on_error)

    def rename(self, names: Mapping[str, str], *, name: str | None = None) -> Stream:
        """Rename columns: ``rename({"old": "new"})``. Names may be swapped."""
        step = rename_step(name, names, self.columns)
        renamed = self._step(replace(step, name=self.shape.names.unique(step.name)))
        key = tuple(names.get(column, column) for column in self.shape.key)
        return replace(renamed, shape=replace(renamed.shape, key=key))

    def drop(self, *columns: str, name: str | None = None) -> Stream:
        """Leave columns out."""
        step = drop_step(name, columns, self.columns)
        return self._step(replace(step, name=self.shape.names.unique(step.name)))

    def explode(
        self, *columns: str, name: str | None = None, on_error: OnError | None = None
    ) -> Stream:
        """Make a row of each element of a list column.

        The other columns are repeated, and so is the event time. A row whose list is empty or null
        gives none, and counts as filtered. Several columns are exploded together: a row whose
        lists are not equally long is a dead letter.
        """
        self.shape.refuse_after_update("explode", "a row whose list later becomes shorter")
        step = explode_step(name, columns, self.columns)
        return self._step(replace(step, name=self.shape.names.unique(step.name)), on_error)

    def map_frames(
        self,
        function: FrameFunction,
        *,
        schema: FrameSchema | None = None,
        rows: RowsRule = "same",
        name: str | None = None,
        on_error: OnError | None = None,
    ) -> Stream:
        """Run a function of yours over polars frames of the rows.

        Args:
            function: Takes a frame with the stream's columns and gives one. Which rows
                share a frame is arbitrary: it must treat each by itself, and keep nothing between calls.
                It is called again with fewer rows when it raises an error, to find those that it
                fails on.
            schema: The columns that come out: a dataclass, or a dict of polars types. By default
                the function is called with no rows, to find out.
            rows: ``"same"``: one row comes out for each that goes in, in the same order. ``"any"``:
                the frame has one more column, ``row``, which the function must give back: it says
                of each row from which one it was made. That is whose event time it has.
            name: The step's name; by default the function's.
            on_error: See :meth:`filter`. What the function raises concerns rows; a result that is
                not as declared stops the job in any case.
        """
        if rows != "same":
            self.shape.refuse_after_update(
                "map_frames", "a row from which later fewer rows are made"
            )
        step = map_frames_step(name, function, schema, rows, self.columns)
        step = replace(step, name=self.shape.names.unique(step.name))
        return self._with_step(step, dict(step.schema_out), on_error)

    def union(self, *others: Stream) -> Stream:
        """Put streams with the same columns and types together; the order of columns is free.

        Nothing is removed: a row of each input is a row of the union. Its time is the minimum over
        the inputs, so one that is idle delays the others (see :func:`millstream.watermark`),
        and its lateness the longest of theirs. The order of rows of different topics is not determined.
        """
        streams = (self, *others)
        for stream in others:
            if not isinstance(stream, Stream):
                raise ConfigError(f"union is given {stream!r}. Give streams of the app.")
            if stream.app is not self.app:
                apps = f"{self.app.name!r} and {stream.app.name!r}"
                raise ConfigError(f"union takes streams of one app; these are of {apps}.")
        nodes = tuple(stream.node for stream in streams)
        if len(set(nodes)) < len(nodes):
            raise ConfigError(
                "union has the same stream twice, which would count its rows twice. Give each once."
            )
        return self._below(UnionNode(nodes), union_of([stream.shape for stream in streams]))

    def split(
        self, *conditions: pl.Expr, name: str | None = None, on_error: OnError | None = None
    ) -> tuple[Stream, ...]:
        """Divide the rows: ``clicks, rest = events.split(pl.col("kind") == "click")``.

        Gives a stream for each condition, with the rows for which it is the first that is true, and
        at the end one with all other rows, those whose conditions are null among them. So each row
        is in exactly one of the streams.
        """
        self.shape.refuse_after_update("split", "a row that later belongs to another part")
        conditions, step_name = split_conditions(conditions, name, self.columns)
        step_name = self.shape.names.unique(step_name)
        branches = self._with_step(AssignBranch(step_name, conditions), self.columns, on_error)
        return tuple(
            Stream._with_step(branches, SelectBranch(f"{step_name}[{part}]", number), self.columns)
            for number, part in enumerate([*range(len(conditions)), "rest"])
        )

    def key_by(self, *columns: str) -> Stream:
        """Set the key of the rows: the default ``by`` of windows and key of views."""
        key = self.shape.key_columns(columns, "key_by")
        return replace(self, shape=replace(self.shape, key=key))

    def _step(self, step: Step, on_error: OnError | None = None) -> Stream:
        return self._with_step(step, columns_after(step, self.columns), on_error)

    def _with_step(
        self, step: Step, columns: ColumnTypes, on_error: OnError | None = None
    ) -> Stream:
        code = UserCode(step.name, declared_at(), checked_on_error(on_error or self.app.on_error))
        node = StepNode(self.node, step, tuple(columns.items()), code)
        return self._below(node, replace(self.shape, columns=columns))

    def _below(self, node: GraphNode, shape: StreamShape) -> Stream:
        return Stream(self.app, node, shape)

    def _operator(self, kernel: Operator, shape: StreamShape) -> Stream:
        return self._below(OperatorNode((self.node,), kernel), shape)

    # ── duplicates ──────────────────────────────────────────────────────────────────────────

    def dedup(
        self,
        id: str | Sequence[str],  # noqa: A002 - what it is called everywhere
        *,
        within: Duration,
        null: NullIds = "pass",
        late: LateIds | None = None,
        bloom: Bloom | None = None,
        unbounded: bool = False,
        name: str | None = None,
    ) -> Stream:
        """Drop events whose id came before, at a time that is at most ``within`` away (inclusive).

        An event is kept if no kept one that arrived earlier has its id and a time so near. The
        order of arrival is that of the partition, so give the topic the id, or part of it, as key.
        Kept events are passed on unchanged; the others are counted as duplicates. After final windows it
        leaves one row of each id: an alert once a day, and not with every window.

        Args:
            id: The column, or columns, that identify an event.
            within: The horizon.
            null: Events without an id (with several columns: without one of its parts): ``"pass"``
                passes all of them, ``"drop"`` leaves them out as filtered.
            late: Events that are below their partition's watermark by more than the stream's
                lateness cannot be judged: ``"drop"`` counts them, ``"side"`` also emits them
                as the ``late`` of the result, with ``late_by`` and ``late_reason``. By default as
                the stream's own ``late`` says.
            bloom: Remember ids in a few bits each instead of exactly: see :func:`millstream.bloom`.
            unbounded: Allow ids to be kept exactly for longer than 31 days, at 24 bytes each.
            name: The step's name; by default ``dedup(…)`` with the columns.
        """
        first, kernel, shape = build_dedup(
            self.shape,
            self.shape.key_columns(id, "dedup"),
            within=within,
            null=null,
            late=late,
            bloom=bloom,
            unbounded=unbounded,
            name=name,
            buckets=self.app.buckets,
        )
        above = self if first is None else self._step(first)
        return self._below(OperatorNode((above.node,), kernel), shape)

    def budget(
        self,
        by: str | Sequence[str],
        *,
        cost: Column,
        limit: Column,
        least: Column | None = None,
        zone: Zone = "UTC",
        name: str | None = None,
    ) -> Stream:
        """Decide row by row what each key may still spend on a day, in the order of arrival.

        ::

            decided = events.budget(
                "client", cost="cost", limit="daily_budget", zone=pl.col("zone")
            )
            decided.filter(pl.col("decision") == "refused").to("refusals")
            decided.filter(pl.col("budget_event").is_not_null()).to("budget-events", key="client")

        Every row is passed on with five more columns: ``budget_day`` (the date of its event
        time in its zone), ``decision`` (``"granted"`` or ``"refused"``), ``spent`` and ``remaining``
        (of that day, after the row) and ``budget_event``: ``"exhausted"`` on the row after which
        less than ``least`` remains of the key's newest day, ``"resumed"`` on the one that changes
        that, null on all others.

        Args:
            by: The column, or columns, that have a budget each. For the result to depend on the
                events alone, they must decide the partition: give the topic one of them as key.
            cost: What a row costs: whole numbers of the smallest unit, or Decimals. It is refused
                if the day's spending would exceed the limit, and nothing is charged then. Below
                zero it is a refund; null costs nothing.
            limit: What may be spent on the row's day, as the row states it; null: no limit.
            least: The least that is of any use, such as what a click costs; by default the smallest
                unit, so that a budget is exhausted when nothing remains.
            zone: The time zone in which days are counted: its name, or an expression that gives one.
            name: The step's name; by default ``budget(…)`` with the columns.

        Guarantees: what is granted never exceeds the limit that the rows state. A late row charges
            the day of its event time, until that day is over in all zones by the stream's lateness;
            then it is late, as the stream's ``late`` says. Put ``dedup`` before it: each row that
            comes is charged. It keeps a row of state for each key, and one for each open day.
        """
        kernel, shape = build_budget(
            self.shape,
            self.shape.key_columns(by, "budget"),
            cost=cost,
            limit=limit,
            least=least,
            zone=zone,
            name=name,
        )
        return self._operator(kernel, shape)

    # ── windows ─────────────────────────────────────────────────────────────────────────────

    def window(
        self,
        window: WindowAssigner | EventWindow,
        *,
        by: str | Sequence[str] | None = None,
        name: str | None = None,
    ) -> Windowed:
        """Divide the stream's time into windows, and its rows by the columns ``by``.

        ``by`` is by default what :meth:`key_by` said, or the window above was divided by; with
        neither, or with ``by=()``, a window is one group.
        """
        if self.shape.mode == "update":
            raise ConfigError(
                'window comes after emit("update") or late="correct", whose rows replace one '
                'another: adding them up would count events twice. Emit "retract" or "final" there.'
            )
        if self.shape.is_late:
            raise ConfigError(
                "window comes after late rows, whose time has passed: no watermark says when a "
                "window of them is complete. View them, or count them in the ledger."
            )
        columns = self.shape.key if by is None else self.shape.key_columns(by, "window's by")
        return Windowed(self, window, columns, name)

    # ── sinks ───────────────────────────────────────────────────────────────────────────────

    def view(
        self, name: str, *, key: str | Sequence[str] | None = None, store: str | None = None
    ) -> Stream:
        """Keep the stream as a view: a table with the latest row per key, read with ``ms.view``.

        Args:
            key: By default the window and its ``by`` columns, or what :meth:`key_by` said.
            store: ``"sqlite"`` (the app's own store, in its folder), or the URL of a PostgreSQL
                database, ``postgresql://user:password@host/database``; by default the app's
                ``views``. The view is then a table of its name there.
        """
        return self._into(self._sinks.view(name, key=key, store=store))

    def to(
        self,
        topic: str,
        *,
        key: str | None = None,
        value: str | Sequence[str] | None = None,
        partitions: int | None = None,
        cleanup: Cleanup = "delete",
    ) -> Stream:
        """Write the stream to a topic of the app's log, a batch in one transaction.

        A record's timestamp is the row's event time. While such an app runs, its process owns the
        log's folder; other processes on this machine write to the log through it.

        Args:
            key: The column that is the record's key; without one, batches take turns.
            value: By default the value is a JSON object of all columns: datetimes as RFC 3339,
                decimals as text. Give columns for an object of these, or one column of text or
                bytes that is the value as it is.
            partitions: Of a topic that does not exist yet; by default what ``app.topic`` declares
                for it, or 4.
            cleanup: "delete", "compact" or "compact,delete", as ``create_topic`` has it. Rows that
                retract others are tombstones in a compacted topic; elsewhere they have
                ``"_diff": -1``.
        """
        return self._into(
            self._sinks.topic(topic, key=key, value=value, partitions=partitions, cleanup=cleanup)
        )

    def dataset(
        self, path: str | os.PathLike[str], *, partition_by: str | Sequence[str] = ()
    ) -> Stream:
        """Append the stream to a dataset: Parquet files in a folder, read with ``ms.dataset``.

        A manifest names the files that count; each batch replaces it. Many small files are merged into
        few. Rows that retract others have ``_diff`` -1.

        Args:
            path: A folder of its own, which is made; relative to where the program runs.
            partition_by: Columns whose values divide the files into folders, as in ``day=2026-01-31``.
        """
        return self._into(self._sinks.dataset(path, partition_by))

    def foreach(self, function: ForeachFunction, *, name: str | None = None) -> Stream:
        """Call ``function(rows, context)`` with the rows of each batch, where the job was started.

        ``rows`` is a polars frame that is not empty; ``context`` has app, name, batch_id and key.
        The function is called at least once for each batch: again, with the same rows and the same
        key, after a crash. It works exactly once if it keeps the key together with what it does,
        and does nothing for a key that it has kept. An exception stops the job.

        Args:
            name: The step's name, a part of the key; by default the function's.
        """
        return self._into(self._sinks.foreach(function, name))

    @property
    def _sinks(self) -> SinkBuilder:
        return SinkBuilder(self.app, self.node, self.shape)

    def _into(self, output: Output) -> Stream:
        self.app.add_output(output)
        return self

    # ── Spark ───────────────────────────────────────────────────────────────────────────────

    def spark(
        self,
        function: Callable[[DataFrame], DataFrame],
        *,
        schema: type | None = None,
        time: Column | None = None,
        name: str | None = None,
    ) -> Stream:
        """Run a native Spark step on the rows: ``function`` takes a DataFrame and gives one.

        Args:
            function: Called once, when the job is built. It may use anything that Spark can do on
                a stream. What it does must not depend on how rows fall into batches.
            schema: A dataclass with the columns that come out; by default those that went in.
            time: The event time of the result; by default the column that was it before.
            name: The step's name; by default the function's.

        The rows lose their log order, so lateness is judged by the watermark of the batch before.
        A native step must be before the first window.
        """
        if self.shape.mode is not None or self.shape.is_late:
            raise ConfigError(
                "spark comes after a window. Put native steps before the first window, or write "
                "the results with .to(topic) or .dataset(path) and read them with Spark."
            )
        columns = self.columns if schema is None else columns_of(fields_of(schema, what="spark"))
        expression = (
            time_of(self.node) if time is None else as_expression(time, what="spark's time")
        )
        if expression is None:
            raise ConfigError("The stream has no time column. Give one: spark(…, time=…).")
        step_name = self.shape.names.unique(name or str(getattr(function, "__name__", "spark")))
        check_time(expression, columns, step_name)
        node = NativeNode(
            self.node,
            step_name,
            function,
            plain_schema(self.columns),
            plain_schema(columns),
            expression,
        )
        shape = StreamShape(
            columns,
            lateness_us=self.shape.lateness_us,
            late_policy=self.shape.late_policy,
            names=self.shape.names,
        )
        return self._below(node, shape)

    def to_spark(self) -> DataFrame:
        """Return the stream as a streaming Spark DataFrame, to be written with ``writeStream``.

        Its columns have Spark's types. The stream's steps may keep no state: write the results of a window,
        a session, ``dedup`` or ``budget`` with :meth:`to` or :meth:`dataset`, and read these with Spark.
        Rows on which a step fails are left out and kept nowhere; declare ``on_error="stop"`` to stop
        instead. The query has a checkpoint and guarantees of its own. Spark runs until the process ends.

        Raises:
            ConfigError: a step before it keeps state.
        """
        from millstream.spark.job import to_spark  # noqa: PLC0415 - loads pyspark

        return to_spark(self.app.job_of(self.node, self.columns))


@dataclass(frozen=True)
class Windowed:
    """A stream divided into windows; say how it emits, then what it aggregates."""

    stream: Stream
    window: WindowAssigner | EventWindow
    by: tuple[str, ...]
    name: str | None = None
    emission: EmitStrategy = field(default_factory=EmitStrategy)

    def emit(
        self,
        mode: Mode = "final",
        *,
        early: TriggerSpec | EllipsisType = ...,
        late: TriggerSpec | EllipsisType = ...,
        suppress_unchanged: bool = True,
        panes: bool = False,
    ) -> Windowed:
        """Choose when results come out, and what each row says.

        Args:
            mode: ``"final"``: one row per key once the window can get no more events (with the
                stream's ``late="correct"``: when the watermark reaches its end, and again for what
                comes late). ``"update"``: early, on time and late; a later row replaces an earlier
                one, and session rows that none replaces are retracted (``_diff`` -1).
                ``"discard"``: each row counts only the events since the one before.
                ``"retract"``: as update, and a row that is replaced is retracted first.
            early: When rows come out before the watermark reaches the window's end: with every
                ``"batch"`` (so by default, but for final), with ``"each"`` event, a duration of
                running time after the first event that is in no row yet, ``ms.after_count(n)``, or
                None: not at all.
            late: The same for events that come after that, within the stream's lateness; by default
                with every batch. None: the window closes with the on-time row.
            suppress_unchanged: Leave out a row equal to the one before (in discard: one without
                new events).
            panes: Add ``pane_kind`` ("early", "on_time", "late"), ``pane_index``, ``pane_first`` and
                ``pane_last``.

        Guarantees: with ``panes``, on-time values, and panes by count of one key in one partition, depend on
            the events alone. Rows by batch or running time depend on these; their sum does not. An event that
            is late in its own partition, while others lag, is in the next early row; with ``panes``, or
            early rows by count, in the on-time row.
        """
        emission = emit_strategy(
            self.stream.shape,
            mode,
            early=early,
            late=late,
            suppress_unchanged=suppress_unchanged,
            panes=panes,
        )
        return replace(self, emission=emission)

    def agg(self, **aggregates: Aggregate) -> Stream:
        """Aggregate each window and key: ``agg(shown=ms.count(), cost=ms.sum("cost"))``.

        The rows that come out have window_start, window_end, the ``by`` columns and the
        aggregates; their event time is the last microsecond of the window. Over a stream read with
        ``late="side"``, the ``late`` of the result are the rows that came too late.
        """
        kernel, shape = aggregate_windows(
            self.stream.shape,
            self.window,
            self.by,
            aggregates,
            name=self.name,
            emission=self.emission,
        )
        return self.stream._operator(kernel, shape)  # noqa: SLF001 - of this module
