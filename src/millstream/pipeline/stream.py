"""Streams and their windows: the operators of the pipeline API.

A stream is immutable; every operator returns a new one. Each operator is checked where it is called,
against the columns that are there, so that a mistake shows at its own line and not in a running job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import TYPE_CHECKING, Self, get_args

import polars as pl

from millstream.choices import choose
from millstream.durations import Duration
from millstream.errors import ConfigError
from millstream.kernels.aggregates.protocol import Aggregate
from millstream.kernels.errors.user_code import OnError, UserCode
from millstream.kernels.frames import plain_schema
from millstream.kernels.steps import AssignBranch, SelectBranch
from millstream.kernels.tables.row_order import Ties
from millstream.kernels.tables.upserts import VersionOrder
from millstream.kernels.trigger import EmitStrategy, Mode, Once
from millstream.kernels.windows.assigners import WindowAssigner
from millstream.pipeline.budget import Zone, build_budget
from millstream.pipeline.checks import check_time, declared_at
from millstream.pipeline.dedup import Bloom, LateIds, NullIds, build_dedup
from millstream.pipeline.event_collection import EventCollection
from millstream.pipeline.expressions import Column, as_expression
from millstream.pipeline.graph import (
    LateNode,
    NativeNode,
    OperatorNode,
    UnionNode,
    placed_inputs,
    time_of,
)
from millstream.pipeline.group_by import group_columns
from millstream.pipeline.process import process_node, side_output_of
from millstream.pipeline.schema import columns_of, fields_of
from millstream.pipeline.shape import StreamShape
from millstream.pipeline.stateless import (
    split_conditions,
    union_of,
)
from millstream.pipeline.table import Grouped, Table
from millstream.pipeline.table_operators import OrderBy, build_top
from millstream.pipeline.upserts import (
    RowsKept,
    build_latest,
    build_upserts,
    check_all_kept,
    check_may_expire,
    check_never_expires,
    not_deleted,
    table_shape,
)
from millstream.pipeline.versions import TableOrigin
from millstream.pipeline.windowed import (
    aggregate_windows,
    emit_strategy,
    plain_names,
    window_name,
)
from millstream.pipeline.windows import EventWindow, TriggerSpec

if TYPE_CHECKING:
    from millstream.spark.job import DataFrame


@dataclass(frozen=True, repr=False)
class Stream(EventCollection):
    """A stream of rows with named, typed columns. See its methods, the operators."""

    @property
    def late(self) -> Stream:
        """The rows that came too late for the window or dedup right above, with ``late="side"``.

        They have the columns of the input, ``late_by`` (how far behind their partition's watermark),
        ``late_reason``, and the ``window_start`` and ``window_end`` of the last window that they missed.
        They can be filtered, viewed and sent on, but not windowed.
        """
        columns = self.shape.late_columns
        node = process_node(self.node)
        if columns is None or node is None:
            raise ConfigError(
                "The stream has no side output of late rows. What agg returns has one, over a stream "
                'read with late="side".'
            )
        shape = StreamShape(columns, is_late=True, names=self.shape.names)
        return Stream(self.app, LateNode(node), shape)

    def side_output(self, name: str) -> Stream:
        """Return a side output of the :meth:`process` right above, by its name.

        Its rows are those that were emitted with ``context.emit(row, to=name)``.
        """
        node, shape = side_output_of(self.node, self.shape, name)
        return self._below(node, shape)

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
            self.app.require_same(stream.app, "union takes streams")
        nodes = tuple(stream.node for stream in streams)
        if len(set(nodes)) < len(nodes):
            raise ConfigError(
                "union has the same stream twice, which would count its rows twice. Give each once."
            )
        shape = union_of([stream.shape for stream in streams])
        return self._below(UnionNode(nodes, signed=shape.mode == "retract"), shape)

    def split(
        self, *conditions: pl.Expr, name: str | None = None, on_error: OnError | None = None
    ) -> tuple[Stream, ...]:
        """Divide the rows: ``clicks, rest = events.split(pl.col("kind") == "click")``.

        Gives a stream for each condition, with the rows for which it is the first that is true, and
        at the end one with all other rows, those whose conditions are null among them. So each row
        is in exactly one of the streams.
        """
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

    # ── tables ──────────────────────────────────────────────────────────────────────────────

    def view(
        self,
        name: str,
        *,
        key: str | Sequence[str] | None = None,
        store: str | None = None,
        ttl: Duration | None = None,
    ) -> Self:
        """Keep the stream as a view: a table with the latest row per key, read with ``ms.view``.

        Args:
            key, store: As for the view of any table: see :meth:`Table.view`.
            ttl: Delete rows in event time: that of a window once the watermark has reached its end plus ``ttl``, another
                once the watermark is above its time plus ``ttl``. Of two rows of a key the one with the later event time
                counts; one that has expired when it comes is not shown. See docs/views.md.

        Raises:
            ConfigError: there is no key, or the name is taken; with ``ttl``, rows may be replaced or taken back.
        """
        if ttl is None:
            return super().view(name, key=key, store=store)
        check_may_expire(name, self.shape)
        columns = self._sinks.view_key(name, key)
        self.table(columns, ttl=ttl, name=f"rows of {name}").view(name, store=store)
        return self

    def table(
        self,
        key: str | Sequence[str] | None = None,
        *,
        keep: RowsKept = "latest",
        order: VersionOrder = "time",
        deleted: Column | None = None,
        ttl: Duration | None = None,
        unbounded: bool = False,
        name: str | None = None,
    ) -> Table:
        """Make a table of the stream: of each key the latest row, or of all rows.

        Args:
            key: The columns that identify a row; behind windows by default the window and its ``by``
                columns.
            keep: ``"latest"``: the latest row of each key. ``"all"``: every event is a row for ever; there is no
                key, and ``unbounded=True`` must be given, because what joins the table keeps all of them.
            order: Which of two rows of a key is the later one. ``"time"``: the one with the later event
                time, and of equal times the later one in the log; the order of arrival changes
                nothing. Rows of windows have no place in the log: of these a digest of the row decides.
                ``"offset"``: the one that is later in its partition; all rows of a key
                must be in one partition: give the topic the table's key.
            deleted: A condition that is true of a row that deletes its key. By time, the key stays in
                state, as an older row may come after it.
            ttl: Delete a row that no other has replaced for so long, in event time: once the stream's watermark is
                above the row's time plus ``ttl``. A row that has expired when it comes removes its key at once. So
                the table is the same in any batches. While the watermark stands, nothing expires. A join as
                of a time finds a row no longer than ``ttl`` after its time.
            name: The step's name; by default ``table by`` with the key.

        The state holds one row for each key, without end unless ``ttl`` is given: a key leaves it when it is
        deleted, or has expired. A row whose key is null is a dead letter.

        Of rows that may be taken back, the table has the latest one of each key that is there: when it is taken
        back, the one before it counts again. So the state holds all rows of a key. If the key does not have what
        identifies a row (of windows the window and its ``by`` columns), say with ``unbounded=True`` that this much
        may be kept.

        Raises:
            ConfigError: there is no key; the stream has no order by offset; all rows of a key would be kept; or
                the rows are parts of results (``emit("discard")``).
        """
        if self.shape.is_late:
            raise ConfigError("table comes after late rows. View them, or send them to a topic.")
        if self.shape.mode == "discard":
            raise ConfigError(
                'table comes after emit("discard"), whose rows are parts that add up. Emit "final", "update" or '
                '"retract" there.'
            )
        choose("table's keep", keep, get_args(RowsKept))
        shape = self.shape.as_changes()
        if keep == "all":
            check_all_kept(key, deleted, ttl, unbounded=unbounded)
            only_added = shape.mode in (None, "final")
            return Table(self.app, self.node, table_shape(shape, None, append_only=only_added))
        if key is None and shape.mode is not None:
            key = (*shape.window_key, *shape.key)
        if key is None:
            key = shape.key
        if order == "offset" and placed_inputs(self.node) != {True}:
            raise ConfigError(
                'table has order="offset", and its rows have no place in the log: they come from a window, a '
                'native step or a DataFrame. Say order="time".'
            )
        if shape.mode == "retract":
            check_never_expires(ttl)
            latest, shape = build_latest(shape, key, unbounded=unbounded, name=name)
            table = Table(self.app, OperatorNode((self.node,), latest), shape)
            return table if deleted is None else table.filter(not_deleted(deleted, shape))
        kernel, shape = build_upserts(shape, key, order=order, deleted=deleted, ttl=ttl, name=name)
        origin = TableOrigin(
            self.node,
            self.columns,
            kernel.deleted,
            by_offset=order == "offset",
            lateness_us=self.shape.lateness_us,
            code=UserCode(kernel.name, declared_at(), self.app.on_error),
            ttl_us=kernel.ttl_us,
        )
        return Table(self.app, OperatorNode((self.node,), kernel), shape, origin=origin)

    def group_by(self, *columns: str, name: str | None = None) -> Grouped:
        """Divide all rows that ever come by the values of columns, without a window.

        ``events.group_by("day", "kind").agg(n=ms.count())`` is a table, of which no row is late. See
        :meth:`Grouped.agg`. The state has a row for each group, and never forgets one: for
        groups without end, such as sessions or minutes, use windows.
        """
        changes = replace(self, shape=self.shape.as_changes())
        return Grouped(changes, group_columns(changes.shape, columns), name)

    def top(
        self,
        n: int,
        by: OrderBy,
        *,
        per: str | Sequence[str] = (),
        ties: Ties = "row_number",
        rank: str | None = None,
        name: str | None = None,
    ) -> Table:
        """Keep of all rows that ever come those whose rank is at most ``n``, in all or in each group.

        The arguments are those of :meth:`Table.top`. Of rows that are equal in ``by``, all their columns
        decide, then the event time. The state holds only the rows of the result.

        The result has a primary key if its rows have a number: ``top(3, by="price", per="item", rank="place")`` is
        identified by item and place. Without one, or with other ``ties``, the rows of windows are identified by the
        window and its ``by`` columns, as long as no step left these out. The one row of a group, ``top(1, …)``, is
        identified by ``per``. Else nothing is known to identify an event: make a table first, with ``table(key=)``.
        """
        shape = self.shape.as_changes()
        kernel, shape = build_top(shape, n, by=by, per=per, ties=ties, rank=rank, name=name)
        return Table(self.app, OperatorNode((self.node,), kernel), shape)

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

        Rows that may be taken back have no order of arrival. Of those that are there, taken by event time, and
        of one time by the values of their columns, a row is kept if no kept one of its id is at most ``within``
        before it. When a row is taken back, or one comes before it, the kept rows are corrected: the result is
        as of ``emit("retract")``. The state then holds each row for the lateness of its input, and
        of the kept ones the id and time for ``within`` more. All of them are counted as held.

        Args:
            id: The column, or columns, that identify an event.
            within: The horizon.
            null: Events without an id (with several columns: without one of its parts): ``"pass"``
                passes all of them, ``"drop"`` leaves them out as filtered.
            late: Events that are below their partition's watermark by more than the stream's
                lateness cannot be judged: ``"drop"`` counts them, ``"side"`` also emits them
                as the ``late`` of the result, with ``late_by`` and ``late_reason``. By default as
                the stream's own ``late`` says.
            bloom: Remember ids in a few bits each instead of exactly: see :func:`millstream.bloom`. Not of
                rows that may be taken back.
            unbounded: Allow ids to be kept exactly for longer than 31 days, at 24 bytes each.
            name: The step's name; by default ``dedup(…)`` with the columns.

        Raises:
            ConfigError: a column is not there, or the rows are parts of results (``emit("discard")``).
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
        if self.shape.is_late:
            raise ConfigError(
                "window comes after late rows, whose time has passed: no watermark says when a "
                "window of them is complete. View them, or count them in the ledger."
            )
        if self.shape.no_windows:
            raise ConfigError(f"window comes after {self.shape.no_windows}")
        columns = self.shape.key if by is None else self.shape.key_columns(by, "window's by")
        stream = replace(self, shape=self.shape.as_changes())
        return Windowed(stream, window, columns, name)

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

    def answer(
        self,
        question: str,
        *,
        id: str,  # noqa: A002 - what it is called everywhere
        to: str,
        deadline: Duration = "5 seconds",
        partitions: int | None = None,
    ) -> Stream:
        """Take the rows as requests, and write the answer to each to a topic, effectively once: see docs/ask.md.

        Each is answered in the batch that reads it, from the state after that batch.

        Args:
            question: One of :meth:`App.question`, whose parameters are columns of these names; or a step or view, by the
                columns of its key.
            id: The column that comes back in the answer, and is its record's key.
            to: The topic of the answers, JSON objects of request, name, position, batch_id and answer.
            deadline: How long a request may take. The batch waits as long, and for a function until it returns.
            partitions: Of a topic that does not exist yet.

        Raises:
            ConfigError: a row of the stream may be taken back, or there is no such column.
        Guarantees: each request has one answer, or is a dead letter that says why it has none.
        """
        return self._into(
            self._sinks.answers(
                question, request=id, to=to, deadline=deadline, partitions=partitions
            )
        )

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

        return to_spark(self.app.job_of(self.node, self.columns, "to_spark"))


@dataclass(frozen=True, repr=False)
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
        early: TriggerSpec | Once | EllipsisType = ...,
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
                None: not at all. :func:`millstream.once` of one of the last two closes the window with it.
            late: The same for events that come after that, within the stream's lateness; by default
                with every batch. None: the window closes with the on-time row.
            suppress_unchanged: Leave out a row equal to the one before (in discard: one without
                new events).
            panes: Add ``pane_kind`` ("early", "on_time", "late"), ``pane_index``, ``pane_first`` and
                ``pane_last``.

        Guarantees: with ``panes``, on-time values, and panes by count of one key in one partition, depend on
            the events alone. Rows by batch or running time depend on these; their sum does not. An event that
            is late in its own partition, while others lag, is in the next early row; with ``panes``,
            early rows by count, or sliding windows that fire otherwise than by batch, in the on-time row.
        """
        emission = emit_strategy(
            self.stream.shape,
            self.window,
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
        plain = plain_names(self.stream.shape, self.by, aggregates)
        keys = {column: name for column, name in plain.items() if column in self.by}
        stream = self.stream.rename(keys) if keys else self.stream
        kernel, shape = aggregate_windows(
            stream.shape,
            self.window,
            tuple(plain.get(column, column) for column in self.by),
            {plain.get(name, name): aggregate for name, aggregate in aggregates.items()},
            name=self.name or window_name(self.window, self.by),
            emission=self.emission,
        )
        made = stream._operator(kernel, shape)  # noqa: SLF001 - of this module
        return made.rename({name: column for column, name in plain.items()}) if plain else made
