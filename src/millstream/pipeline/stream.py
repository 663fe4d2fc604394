"""Streams and their windows: the operators of the pipeline API.

A stream is immutable; every operator returns a new one. Each operator is checked where it is called,
against the columns that are there, so that a mistake shows at its own line and not in a running job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import TYPE_CHECKING, get_args

import polars as pl

from millstream.choices import choose
from millstream.durations import Duration
from millstream.errors import ConfigError
from millstream.kernels.aggregates.protocol import Aggregate
from millstream.kernels.enrichment.calls import LookupFunction
from millstream.kernels.enrichment.operator import LookupErrorPolicy
from millstream.kernels.errors.user_code import OnError, UserCode
from millstream.kernels.frames import plain_schema
from millstream.kernels.joins.asof_join import AsofKind
from millstream.kernels.joins.asof_match import Direction
from millstream.kernels.joins.interval_join import IntervalJoinKind, UnmatchedEmit
from millstream.kernels.operator import Operator
from millstream.kernels.steps import AssignBranch, SelectBranch
from millstream.kernels.tables.top import Ties
from millstream.kernels.tables.upserts import VersionOrder
from millstream.kernels.trigger import EmitStrategy, Mode
from millstream.kernels.windows.assigners import WindowAssigner
from millstream.pipeline.budget import Zone, build_budget
from millstream.pipeline.checks import check_time, declared_at
from millstream.pipeline.collection import Collection
from millstream.pipeline.dedup import Bloom, LateIds, NullIds, build_dedup
from millstream.pipeline.enrichment import build_enrichment
from millstream.pipeline.expressions import Column, as_expression
from millstream.pipeline.graph import (
    GraphNode,
    LateNode,
    NativeNode,
    OperatorNode,
    UnionNode,
    placed_inputs,
    time_of,
)
from millstream.pipeline.group_by import group_columns
from millstream.pipeline.interval_joins import Within, build_interval_join
from millstream.pipeline.schema import columns_of, fields_of
from millstream.pipeline.shape import StreamShape
from millstream.pipeline.stateless import (
    FrameSchema,
    split_conditions,
    union_of,
)
from millstream.pipeline.table import Grouped, Table
from millstream.pipeline.table_joins import On
from millstream.pipeline.table_operators import OrderBy, build_top
from millstream.pipeline.temporal_joins import (
    AsofOptions,
    RightInput,
    build_asof_join,
    build_lookup,
)
from millstream.pipeline.trend import build_alert, build_compare
from millstream.pipeline.upserts import RowsKept, build_upserts, check_all_kept, table_shape
from millstream.pipeline.versions import TableOrigin
from millstream.pipeline.windowed import aggregate_windows, emit_strategy
from millstream.pipeline.windows import EventWindow, TriggerSpec

if TYPE_CHECKING:
    from millstream.spark.job import DataFrame


@dataclass(frozen=True)
class Stream(Collection):
    """A stream of rows with named, typed columns. See its methods, the operators."""

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

    def _below(self, node: GraphNode, shape: StreamShape) -> Stream:
        return Stream(self.app, node, shape)

    def _operator(self, kernel: Operator, shape: StreamShape) -> Stream:
        return self._below(OperatorNode((self.node,), kernel), shape)

    # ── tables ──────────────────────────────────────────────────────────────────────────────

    def table(
        self,
        key: str | Sequence[str] | None = None,
        *,
        keep: RowsKept = "latest",
        order: VersionOrder = "time",
        deleted: Column | None = None,
        unbounded: bool = False,
        name: str | None = None,
    ) -> Table:
        """Make a table of the stream: of each key the latest row, or of all rows.

        Args:
            key: The columns that identify a row; behind final windows by default the window and its ``by``
                columns.
            keep: ``"latest"``: the latest row of each key. ``"all"``: every event is a row for ever; there is no
                key, and ``unbounded=True`` must be given, because what joins the table keeps all of them.
            order: Which of two rows of a key is the later one. ``"time"``: the one with the later event
                time, and of equal times the later one in the log; the order of arrival changes
                nothing. ``"offset"``: the one that is later in its partition; all rows of a key
                must be in one partition: give the topic the table's key.
            deleted: A condition that is true of a row that deletes its key. By time, the key stays in
                state, as an older row may come after it.
            name: The step's name; by default ``table by`` with the key.

        The state holds one row for each key, without end: a key leaves it when it is deleted. A row whose
        key is null is a dead letter.

        Raises:
            ConfigError: there is no key, or the stream has no order by offset.
        """
        if self.shape.is_late:
            raise ConfigError("table comes after late rows. View them, or send them to a topic.")
        if self.shape.mode in ("update", "retract", "discard"):
            raise ConfigError(
                f'table comes after emit("{self.shape.mode}"), whose rows replace one another or add up. '
                'Emit "final" there.'
            )
        choose("table's keep", keep, get_args(RowsKept))
        if keep == "all":
            check_all_kept(key, deleted, unbounded=unbounded)
            return Table(self.app, self.node, table_shape(self.shape, None, not_null=False))
        if key is None and self.shape.mode == "final":
            key = (*self.shape.window_key, *self.shape.key)
        if key is None:
            key = self.shape.key
        if order == "offset" and placed_inputs(self.node) != {True}:
            raise ConfigError(
                'table has order="offset", and its rows have no place in the log: they come from a window, a '
                'native step or a DataFrame. Say order="time".'
            )
        kernel, shape = build_upserts(self.shape, key, order=order, deleted=deleted, name=name)
        origin = TableOrigin(
            self.node,
            self.columns,
            kernel.deleted,
            by_offset=order == "offset",
            lateness_us=self.shape.lateness_us,
            code=UserCode(kernel.name, declared_at(), self.app.on_error),
        )
        return Table(self.app, OperatorNode((self.node,), kernel), shape, origin=origin)

    def join_asof(
        self,
        right: Table | Stream,
        on: On,
        *,
        how: AsofKind = "left",
        direction: Direction = "backward",
        tolerance: Duration | None = None,
        allow_equal: bool = True,
        nulls_equal: bool = False,
        suffix: str = "_right",
        name: str | None = None,
    ) -> Stream:
        """Join each row with what a table had at the row's event time, or with the nearest row of a stream.

        ::

            rates = app.table("rates", Rate, key="currency", watermark=ms.watermark(idle="30 seconds", …))
            orders.join_asof(rates, on="currency")

        A version of a table is valid from its event time until the next one of its key, in event time, whatever
        the table's ``order``; a deletion leaves no row from its own time on. A row waits until the watermarks of
        both inputs have passed its time and the lateness that they allow (with ``"forward"`` and ``"nearest"``
        also the tolerance), and is then emitted once, with its event time. So the result depends on the events
        alone, and not on their order of arrival or on batches. What comes later than its input allows is
        counted as late: a late row is left out (or is in ``late``), a late version or quote corrects nothing.

        A table that rests, or a quiet stream, makes the join wait. Read it with
        ``watermark=ms.watermark("5 seconds", idle="30 seconds")``: then it is left out of the minimum after so
        long. Where versions are announced ahead, or come in another order than that of their times, give
        a delay that covers it: the default expects the order of time in each partition.

        Args:
            right: A table made directly of a topic or stream, perhaps with ``filter``, ``with_columns``,
                ``select``, ``rename`` and ``drop``; or a stream, of which each row is a quote.
            on: The columns that are equal: a name, several, or a mapping of names of this stream to names of
                the other input. Of a table they are its primary key.
            how: ``"left"``: a row without a match is emitted, too, with nulls. ``"inner"``: it is not.
            direction: Of a stream: ``"backward"`` takes the last row up to the time, ``"forward"`` the first one
                from it on, ``"nearest"`` the one that is less far away, the earlier one if both are equally far.
            tolerance: How far from the row's time a match may be, inclusive. ``"forward"`` and ``"nearest"``
                need it.
            allow_equal: Whether a row of the same time matches. False: only earlier (or later) ones do.
            nulls_equal: Null is equal to null. By default it is equal to nothing, as in SQL.
            suffix: What is added to the name of a column of the other input that this stream has, too.
            name: The step's name.

        Of versions or quotes of one time that counts which is later in the log. The state holds the rows that wait,
        and of each key the newest version that they may need, and those after it.

        Raises:
            ConfigError: a column is not there, or two that are compared differ in type; the table's versions
                are not known, or ``on`` is not its key.
        """
        options = AsofOptions(how, direction, tolerance, allow_equal, nulls_equal)
        kernel, node, shape = build_asof_join(
            self.shape,
            self._right_input(right, "join_asof"),
            on,
            options,
            suffix=suffix,
            name=name,
        )
        return self._below(OperatorNode((self.node, node), kernel), shape)

    def lookup(
        self,
        table: Table,
        on: On,
        *,
        how: AsofKind = "left",
        nulls_equal: bool = False,
        suffix: str = "_right",
        name: str | None = None,
    ) -> Stream:
        """Join each row with the row that a table has when it arrives.

        The row is emitted in the batch of its arrival, with its event time, and waits for nothing: it sees the
        records of the table that arrived before it, or in the same millisecond, by the clocks of the log. Later
        ones correct nothing. What comes after it judges lateness as without the join.

        The result is not deterministic. Of two topics a batch takes what is there, so where a row and a record of
        the table arrive in short order, a rebuilt app may see them in the other order. Where the answer must not
        depend on that, use :meth:`join_asof`.

        Args:
            table: A table with a primary key. Of one that is derived from others, all changes of a batch are
                applied before its rows.
            on: As for :meth:`join_asof`; of a derived table there may be more than the key.
            how: As for :meth:`join_asof`, as are ``nulls_equal``, ``suffix`` and ``name``.

        The state holds the rows of the table.

        Raises:
            ConfigError: a column is not there, or two that are compared differ in type; ``on`` lacks a part
                of the table's key.
        """
        right = self._right_input(table, "lookup")
        if not right.shape.is_table:
            raise ConfigError(
                'lookup is given a stream. Make a table of it, of which each key has one row: table(key="…"); '
                "or take the nearest row by event time: join_asof(…)."
            )
        kernel, node, shape = build_lookup(
            self.shape,
            right,
            on,
            how=how,
            nulls_equal=nulls_equal,
            suffix=suffix,
            name=name,
        )
        return self._below(OperatorNode((self.node, node), kernel), shape)

    def _right_input(self, right: object, what: str) -> RightInput:
        if not isinstance(right, (Table, Stream)):
            raise ConfigError(f"{what} is given {right!r}. Give a table of the app.")
        if right.app is not self.app:
            apps = f"{self.app.name!r} and {right.app.name!r}"
            raise ConfigError(f"{what} takes inputs of one app; these are of {apps}.")
        origin = right.origin if isinstance(right, Table) else None
        return RightInput(right.node, right.shape, origin)

    def group_by(self, *columns: str, name: str | None = None) -> Grouped:
        """Divide all rows that ever come by the values of columns, without a window.

        ``events.group_by("day", "kind").agg(n=ms.count())`` is a table, of which no row is late. See
        :meth:`Grouped.agg`. The state has a row for each group, and never forgets one: for
        groups without end, such as sessions or minutes, use windows.
        """
        return Grouped(self, group_columns(self.shape, columns), name)

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
        identified by item and place.
        """
        kernel, shape = build_top(self.shape, n, by=by, per=per, ties=ties, rank=rank, name=name)
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

    # ── joins ───────────────────────────────────────────────────────────────────────────────

    def join(
        self,
        other: Stream,
        on: On,
        *,
        within: Within,
        how: IntervalJoinKind = "inner",
        emit: UnmatchedEmit = "final",
        nulls_equal: bool = False,
        suffix: str = "_right",
        name: str | None = None,
    ) -> Stream:
        """Join two streams by equal columns and nearness in time.

        ::

            # clicks within 30 minutes after the query, and queries without any
            queries.join(clicks, "query_id", within=("0 seconds", "30 minutes"), how="left")

        Args:
            other: A stream of the same app; it may be this one.
            on: The columns that are equal: a name, several, or a mapping of names of this stream to
                names of the other.
            within: The earliest and the latest time of the other stream's row, seen from the time of this
                one's, both inclusive. Before it is negative: ``("-5 minutes", "5 minutes")`` is up to
                five minutes to both sides, ``("-1 hour", "0 seconds")`` is the hour before.
            how: ``"inner"``: pairs of rows. ``"left"``, ``"right"``, ``"full"``: also the rows of this
                stream, the other, or both, that have no partner; the other side's columns are null.
            emit: When rows without a partner come out. ``"final"``: once, when no partner can come any more.
                ``"eager"``: at once; when its first partner comes, the row is taken back (``_diff`` -1).
            nulls_equal: Null is equal to null. By default it is equal to nothing, as in SQL.
            suffix: What is added to the name of a column of the other stream that this one has, too.
            name: The step's name.

        The result has the columns of this stream, then those of the other but for its ``on``. Each pair comes
        out once, as soon as both rows are there; its event time is the later of the two. A row without a
        partner has its own time. It comes out when the watermark, the minimum over both streams, is above
        its time plus how long a partner may come after it, plus the partner's lateness. Equal rows are
        several rows. An event that is below its partition's watermark by more than its stream's lateness is
        late, and counted. The state holds the rows that may get a partner yet.

        Raises:
            ConfigError: a column is not there, or two that are compared differ in type; the interval is
                empty; a stream takes rows back, or is read with another ``late`` than ``"drop"``.
        """
        if not isinstance(other, Stream):
            raise ConfigError(
                f"join is given {other!r}. Give a stream. To join a stream with a table: "
                "stream.lookup(table, …)."
            )
        if other.app is not self.app:
            apps = f"{self.app.name!r} and {other.app.name!r}"
            raise ConfigError(f"join takes streams of one app; these are of {apps}.")
        kernel, shape = build_interval_join(
            self.shape,
            other.shape,
            on,
            within=within,
            how=how,
            emit=emit,
            nulls_equal=nulls_equal,
            suffix=suffix,
            name=name,
        )
        return self._below(OperatorNode((self.node, other.node), kernel), shape)

    # ── lookups outside ─────────────────────────────────────────────────────────────────────

    def enrich(
        self,
        function: LookupFunction,
        *,
        on: str | Sequence[str],
        schema: FrameSchema,
        cache: Duration | None = "1 hour",
        batch_rows: int = 1000,
        timeout: Duration = "10 seconds",
        retries: int = 3,
        on_error: LookupErrorPolicy | None = None,
        name: str | None = None,
    ) -> Stream:
        """Add columns to each row that a function of yours looks up outside: by HTTP, in a database.

        ::

            def countries(keys: pl.DataFrame) -> pl.DataFrame:
                found = requests.post(URL, json=keys["user"].to_list()).json()
                return pl.DataFrame(found, schema={"user": pl.String, "country": pl.String})

            clicks.enrich(countries, on="user", schema={"country": pl.String})

        Args:
            function: Gets distinct keys, a frame with the columns ``on``, and gives a frame with one row
                for each key that it knows: the columns ``on``, as they were given, and those of
                ``schema``. A key without a row gets nulls, and so does a key with a null in it, which
                is not asked. It is called where the job runs, in several threads at once, and again
                after it failed: it must only read.
            on: The column, or columns, of the key.
            schema: The columns that are added: a dataclass, or a dict of polars types.
            cache: For how long an answer is used for later rows of its key, nulls among them. That time
                is the running time of the job or the time of day, whichever passes faster.
                None: each batch asks its keys anew.
            batch_rows: The most keys in one call.
            timeout: How long a call may take. A slower one counts as failed; what it gives later is ignored.
            retries: How often a failed call is repeated, after growing random waits of 0.1 to 10 seconds.
            on_error: When the last call failed: ``"dead-letter"`` makes dead letters of the rows of
                all its keys, ``"null"`` gives them nulls, ``"stop"`` stops the job. By default what the
                app's ``on_error`` says.
            name: The step's name; by default ``enrich(…)`` with the columns.

        Guarantees: answers and failures are durable before any row with them leaves the step. A batch that is
            repeated after a crash reads them, so all outputs have the same. What is read anew, after a reset
            or by another app, asks again. State holds one answer for each key asked within ``cache``.

        Raises:
            ConfigError: rows of the stream may be taken back or replaced, or what is given does not fit.
            UserCodeError: when it runs: the function's answers are not as declared, or there are two for
                one key. This is not retried, and stops the job.
        """
        columns = self.shape.key_columns(on, "enrich")
        kernel, shape = build_enrichment(
            self.shape,
            self.node,
            function,
            columns,
            schema=schema,
            cache=cache,
            batch_rows=batch_rows,
            timeout=timeout,
            retries=retries,
            on_error=on_error or self.app.on_error,
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
        columns = self.shape.key if by is None else self.shape.key_columns(by, "window's by")
        stream = replace(self, shape=self.shape.as_changes("window"))
        return Windowed(stream, window, columns, name)

    # ── trends ──────────────────────────────────────────────────────────────────────────────

    def compare(
        self,
        columns: str | Sequence[str],
        *,
        to: str,
        zone: str | None = None,
        name: str | None = None,
    ) -> Stream:
        """Put each result of a window beside that of an earlier window: the same hour a week ago.

        ::

            hourly = events.window(ms.tumbling("1 hour"), by="page").agg(n=ms.count())
            hourly.compare("n", to="1 week", zone="America/New_York").view("trend")

        For each column ``n`` the rows get ``n_before``, the value of the window of the same ``by`` columns
        that begins at the same local time so many days or months earlier, and ``n_ratio``, the value now
        divided by that, as Float64.

        Args:
            columns: What is compared: a column of numbers, or several.
            to: How far back: ``"1 day"``, ``"1 week"``, ``"1 month"``, ``"1 year"``, or several of these.
            zone: The time zone of the local time; by default that of calendar windows, else ``"UTC"``.
                Tumbling windows are cut in UTC: longer ones than the step by which the zone's clocks change
                have nothing before them for a while after each change. Use calendar windows then.
            name: The step's name.

        Both are null where there is no earlier window: it had no events, the clocks or the calendar of that
        day do not have the local time (the 31st, a skipped hour), or it is before the first event that was
        read. That is not a window of 0: of an earlier 0 the ratio is infinite, with the sign of the value now,
        and null if that is 0, too. A null on either side gives a null ratio. Where the clocks of the earlier
        day show the time twice, the second showing is compared with the second one of a day that has two, and
        the first with everything else. Windows of whole days are compared by their date.

        Guarantees: a row comes with its window's result and waits for nothing. After ``emit("final")`` it
            comes once. After ``"update"``, ``"retract"`` or ``late="correct"``, a correction of either
            window takes the row back, and gives it anew: the result is as of ``emit("retract")``. State
            is one row for each key and window of as long as it goes back.

        Raises:
            ConfigError: the rows are not results of tumbling or calendar windows, or may be early or parts
                of them; a column is not there, or not a number.
        """
        kernel, shape = build_compare(self.node, self.shape, columns, to=to, zone=zone, name=name)
        return self._operator(kernel, shape)

    def alert(
        self,
        *,
        when: Column,
        recover: Column,
        for_windows: int = 1,
        name: str | None = None,
    ) -> Stream:
        """Say when something begins to be wrong, and when it is right again, key by key.

        ::

            trend.alert(
                when=(pl.col("n_ratio") > 1.3) & (pl.col("n") >= 50),
                recover=pl.col("n_ratio") < 1.1,
                for_windows=2,
            ).to("alerts")

        Only the rows of transitions come out, with the column ``alert``: ``"firing"`` on the row with which
        ``when`` has been true for ``for_windows`` windows in a row, then ``"resolved"`` on the first one
        after it for which ``recover`` is true, and so on. The key are the ``by`` columns of the windows, and
        rows of a key are taken in the order of their windows.

        Args:
            when: The condition; null counts as false. Put the least that is worth an alert into it.
            recover: The condition under which a firing alert is resolved; null counts as false. It is not
                looked at while nothing fires, nor is ``when`` while it does.
            for_windows: For how many windows, one right after the other, ``when`` must be true. A row for
                which it is not, or a window without a row, begins the count anew; so do rows that a filter
                before it left out.
            name: The step's name.

        A window without a row resolves nothing: a key that fires and has no more events goes on firing, and
        is a row of state. To resolve it, give the windows rows: send something for each key.

        Guarantees: after ``emit("final")`` a row comes once. After ``"update"``, ``"retract"`` or
            ``late="correct"``, a correction takes back the alerts that it makes wrong, and gives those
            that are right: the result is as of ``emit("retract")``.

        Raises:
            ConfigError: the rows are not results of tumbling or calendar windows, or are parts of them; a
                condition does not fit the columns.
        """
        kernel, shape = build_alert(
            self.node, self.shape, when=when, recover=recover, for_windows=for_windows, name=name
        )
        return self._operator(kernel, shape)

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
