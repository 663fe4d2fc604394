"""Streams: the verbs of the pipeline surface.

A stream is immutable; every verb gives a new one. Each verb is checked where it is called, against
the columns that are there, so that a mistake shows at its own line and not in a running job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import polars as pl

from millstream.durations import Duration
from millstream.errors import ConfigError
from millstream.kernels.column_types import check_column, check_key
from millstream.kernels.emission import LatePolicy, Mode
from millstream.kernels.frames import plain_schema
from millstream.kernels.isolation import OnError, UserCode
from millstream.kernels.map_frames import FrameFunction, RowsRule
from millstream.kernels.plan import Cleanup
from millstream.kernels.steps import Filter, Mark, Part, Select, Step, WithColumns
from millstream.kernels.windows import TimeWindows
from millstream.pipeline import ends
from millstream.pipeline.budget_words import Zone, budgeted
from millstream.pipeline.checks import (
    check_time,
    checked_on_error,
    columns_after,
    declared_at,
    named,
    there_are,
)
from millstream.pipeline.dedup_words import Bloom, LateIds, NullIds, deduplicated
from millstream.pipeline.functions import Column, as_expression
from millstream.pipeline.graph import (
    FrameNode,
    LateNode,
    NativeNode,
    Node,
    OperatorNode,
    SourceNode,
    StepNode,
    UnionNode,
)
from millstream.pipeline.schema import Columns, columns_of, fields_of
from millstream.pipeline.session_words import EventWindow
from millstream.pipeline.verbs import (
    FrameSchema,
    drop_step,
    explode_step,
    joined,
    map_frames_step,
    rename_step,
)
from millstream.pipeline.window_types import LATE_COLUMNS, WINDOW_COLUMNS
from millstream.pipeline.windowed import Windowed

if TYPE_CHECKING:
    from millstream.pipeline.app import App
    from millstream.spark.job import DataFrame


@dataclass(frozen=True)
class Stream:
    """A stream of rows with named, typed columns. See the verbs."""

    app: App
    node: Node
    columns: Columns
    lateness_us: int = 0
    key: tuple[str, ...] = ()
    mode: Mode | None = None  # how the window above emits; None above the first window
    late_policy: LatePolicy = "drop"
    late_columns: Columns | None = None  # of the rows that the step above puts aside as late
    is_late: bool = False  # whether these are such rows
    apart_by: tuple[str, ...] = WINDOW_COLUMNS[:1]  # what tells windows apart, in a view by default

    def __post_init__(self) -> None:
        for name, dtype in self.columns.items():
            check_column(name, dtype)

    @property
    def late(self) -> Stream:
        """The rows that came too late for the window or dedup right above, with ``late="side"``.

        They have the columns that went in, and ``late_by`` (how far behind the watermark of their
        partition they were), ``late_reason``, and ``window_start`` and ``window_end`` of the last
        window that they missed. They can be filtered, viewed and sent on, but not windowed.
        """
        if self.late_columns is None or not isinstance(self.node, OperatorNode):
            raise ConfigError(
                "The stream has no late rows aside. They belong to what agg gives, over a stream "
                'read with late="side".'
            )
        return Stream(self.app, LateNode(self.node), self.late_columns, is_late=True)

    # ── stateless verbs ─────────────────────────────────────────────────────────────────────

    def filter(
        self, *conditions: pl.Expr, name: str | None = None, on_error: OnError | None = None
    ) -> Stream:
        """Keep the rows for which all conditions are true (null counts as false).

        ``name`` is the step's in errors and books. Rows on which an expression fails go to the dead
        letters, with the step, the reason and the record; ``on_error="stop"`` stops the job
        instead, and the default is the app's. An expression that fails on each of more than 100
        rows that come together stops the job in any case. So it is with every verb here.
        """
        self._refuse_after_update("filter", "a row that passed once and later no longer does")
        conditions = tuple(as_expression(c, what="filter's condition") for c in conditions)
        step_name = name or f"filter({named(conditions)})"
        return self._step(Filter(self.app.unique_name(step_name), conditions), on_error)

    def with_columns(
        self,
        *expressions: pl.Expr,
        name: str | None = None,
        on_error: OnError | None = None,
        **named: pl.Expr,
    ) -> Stream:
        """Add columns, or replace those of the same name: ``rate=pl.col("a") / pl.col("b")``."""
        every, step_name = self._expressions(expressions, named, "with_columns", name)
        return self._step(WithColumns(self.app.unique_name(step_name), every), on_error)

    def select(
        self,
        *expressions: Column,
        name: str | None = None,
        on_error: OnError | None = None,
        **named: pl.Expr,
    ) -> Stream:
        """Keep only the named columns and expressions."""
        every, step_name = self._expressions(expressions, named, "select", name)
        return self._step(Select(self.app.unique_name(step_name), every), on_error)

    def rename(self, names: Mapping[str, str], *, name: str | None = None) -> Stream:
        """Give columns other names: ``rename({"old": "new"})``. They may change places."""
        step = rename_step(name, names, self.columns)
        renamed = self._step(replace(step, name=self.app.unique_name(step.name)))
        return replace(renamed, key=tuple(names.get(column, column) for column in self.key))

    def drop(self, *columns: str, name: str | None = None) -> Stream:
        """Leave columns out."""
        step = drop_step(name, columns, self.columns)
        return self._step(replace(step, name=self.app.unique_name(step.name)))

    def explode(
        self, *columns: str, name: str | None = None, on_error: OnError | None = None
    ) -> Stream:
        """Make a row of each element of a list column.

        The other columns are repeated, and so is the event time. A row whose list is empty or null
        gives none, and counts as filtered. Several columns are taken apart together: a row whose
        lists are not equally long is dead.
        """
        self._refuse_after_update("explode", "a row whose list later becomes shorter")
        step = explode_step(name, columns, self.columns)
        return self._step(replace(step, name=self.app.unique_name(step.name)), on_error)

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
            function: Takes a frame with the stream's columns and gives one. Which rows come
                together is chance: it must treat each by itself, and keep nothing between calls.
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
            self._refuse_after_update("map_frames", "a row from which later fewer rows are made")
        step = map_frames_step(name, function, schema, rows, self.columns)
        step = replace(step, name=self.app.unique_name(step.name))
        return self._with_step(step, dict(step.made), on_error)

    def union(self, *others: Stream) -> Stream:
        """Put streams with the same columns and types together; the order of columns is free.

        Nothing is removed: a row of each input is a row of the union. Its time is the minimum over
        the inputs, so one that is quiet holds the others back (see :func:`millstream.watermark`),
        and its lateness the longest of theirs. In which order the rows of different topics come is
        not determined.
        """
        union = joined((self, *others))
        return replace(union, node=UnionNode(tuple(s.node for s in (self, *others))))

    def split(
        self, *conditions: pl.Expr, name: str | None = None, on_error: OnError | None = None
    ) -> tuple[Stream, ...]:
        """Divide the rows: ``clicks, rest = events.split(pl.col("kind") == "click")``.

        Gives a stream for each condition, with the rows for which it is the first that is true, and
        at the end one with all other rows, those whose conditions are null among them. So each row
        is in exactly one of the streams.
        """
        self._refuse_after_update("split", "a row that later belongs to another part")
        if not conditions:
            raise ConfigError('split has no condition. Give one: split(pl.col("kind") == "click").')
        conditions = tuple(as_expression(c, what="split's condition") for c in conditions)
        step_name = self.app.unique_name(name or f"split({named(conditions)})")
        columns_after(Filter(step_name, conditions), self.columns)
        marked = self._with_step(Mark(step_name, conditions), self.columns, on_error)
        return tuple(
            Stream._with_step(marked, Part(f"{step_name}[{part}]", number), self.columns)
            for number, part in enumerate([*range(len(conditions)), "rest"])
        )

    def key_by(self, *columns: str) -> Stream:
        """Say what the rows are about: the default ``by`` of windows and key of views."""
        return replace(self, key=self._key_columns(columns, "key_by"))

    def _expressions(
        self, given: Sequence[Column], named: dict[str, pl.Expr], what: str, name: str | None
    ) -> tuple[tuple[pl.Expr, ...], str]:
        """Give the expressions of a step, and its name: what it makes, if it was given none."""
        if isinstance(name, pl.Expr):
            raise ConfigError(
                f'{what} has name= for the name of the step. Give a column that is called "name" as '
                'an expression: (…).alias("name").'
            )
        plain = [as_expression(e, what=f"an expression of {what}") for e in given]
        every = (*plain, *(as_expression(e, what=n).alias(n) for n, e in named.items()))
        if not every:
            raise ConfigError(f"{what} has no expression. Give at least one.")
        made = columns_after(Select(name or what, every), self.columns)
        step_name = name or f"{what}({', '.join(made)})"
        return every, step_name

    def _refuse_after_update(self, verb: str, row: str) -> None:
        if self.mode == "update":
            raise ConfigError(
                f'{verb} comes after emit("update"): {row} would stay in the view. '
                'Do it where the view is read, or emit("final").'
            )

    def _step(self, step: Step, on_error: OnError | None = None) -> Stream:
        return self._with_step(step, columns_after(step, self.columns), on_error)

    def _with_step(self, step: Step, columns: Columns, on_error: OnError | None = None) -> Stream:
        code = UserCode(step.name, declared_at(), checked_on_error(on_error or self.app.on_error))
        node = StepNode(self.node, step, tuple(columns.items()), code)
        return replace(self, node=node, columns=columns)

    def _key_columns(self, columns: str | Sequence[str], what: str) -> tuple[str, ...]:
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        for name in names:
            if name not in self.columns:
                raise ConfigError(f"{what} names {name!r}. {there_are(name, self.columns)}")
            check_key(name, self.columns[name], what)
        return names

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
        Kept events go on as they came; the others are counted as duplicates. After final windows it
        leaves one row of each id: an alert once a day, and not with every window.

        Args:
            id: The column, or columns, that tell events apart.
            within: The horizon.
            null: Events without an id (with several columns: without one of its parts): ``"pass"``
                lets all of them through, ``"drop"`` leaves them out as filtered.
            late: Events that are below their partition's watermark by more than the stream's
                lateness cannot be judged: ``"drop"`` counts them, ``"side"`` also gives them out,
                as the ``late`` of the result, with ``late_by`` and ``late_reason``. By default as
                the stream's own ``late`` says.
            bloom: Remember ids in a few bits each instead of exactly: see :func:`millstream.bloom`.
            unbounded: Say that ids may be kept exactly for longer than 31 days, at 24 bytes each.
            name: The step's name; by default ``dedup(…)`` with the columns.
        """
        columns = self._key_columns(id, "dedup")
        if late is None:
            late = "side" if self.late_policy == "side" else "drop"
        first, kernel = deduplicated(
            self,
            columns,
            within=within,
            null=null,
            late=late,
            bloom=bloom,
            unbounded=unbounded,
            name=name,
        )
        above = self if first is None else self._step(first)
        told = ("late_by", "late_reason")
        late_columns = {**self.columns, **{name: LATE_COLUMNS[name] for name in told}}
        return replace(
            self,
            node=OperatorNode((above.node,), kernel),
            late_columns=late_columns if late == "side" else None,
        )

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

        Every row goes on as it came, with five more columns: ``budget_day`` (the date of its event
        time in its zone), ``decision`` (``"granted"`` or ``"refused"``), ``spent`` and ``remaining``
        (of that day, after the row) and ``budget_event``: ``"exhausted"`` on the row after which
        less than ``least`` remains of the key's newest day, ``"resumed"`` on the one that changes
        that, null on all others.

        Args:
            by: The column, or columns, that have a budget each. For the answer to depend on the
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
        kernel, columns = budgeted(
            self,
            self._key_columns(by, "budget"),
            cost=cost,
            limit=limit,
            least=least,
            zone=zone,
            name=name,
        )
        told = ("late_by", "late_reason")
        late_columns = {**self.columns, **{name: LATE_COLUMNS[name] for name in told}}
        return replace(
            self,
            node=OperatorNode((self.node,), kernel),
            columns=columns,
            late_columns=late_columns if kernel.side else None,
        )

    # ── windows ─────────────────────────────────────────────────────────────────────────────

    def window(
        self,
        window: TimeWindows | EventWindow,
        *,
        by: str | Sequence[str] | None = None,
        name: str | None = None,
    ) -> Windowed:
        """Divide the stream's time into windows, and its rows by the columns ``by``.

        ``by`` is by default what :meth:`key_by` said, or the window above was divided by; with
        neither, or with ``by=()``, a window is one group.
        """
        if self.mode == "update":
            raise ConfigError(
                'window comes after emit("update") or late="correct", whose rows replace one '
                'another: adding them up would count events twice. Emit "retract" or "final" there.'
            )
        if self.is_late:
            raise ConfigError(
                "window comes after late rows, whose time has passed: no watermark says when a "
                "window of them is complete. View them, or count them in the ledger."
            )
        columns = self.key if by is None else self._key_columns(by, "window's by")
        return Windowed(self, window, columns, name)

    # ── ends ────────────────────────────────────────────────────────────────────────────────

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
        columns = self.key if key is None else self._key_columns(key, "view's key")
        if self.mode is not None and key is None:
            columns = (*self.apart_by, *columns)
        if self.mode == "discard" and key is None:
            columns = self._key_of_parts(name, columns)
        missing = [column for column in columns if column not in self.columns]
        if not columns or missing:
            raise ConfigError(
                f"The view {name!r} has no key"
                + (f": its column {missing[0]!r} was left out by a select" if missing else "")
                + '. Say which columns tell its rows apart: view(name, key="…").'
            )
        ends.end_in_view(self, name, columns, store)
        return self

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
        log's folder: no other process can write to it.

        Args:
            key: The column that is the record's key; without one, batches take turns.
            value: By default the value is a JSON object of all columns: datetimes as RFC 3339,
                decimals as text. Give columns for an object of these, or one column of text or
                bytes that is the value as it is.
            partitions: Of a topic that does not exist yet; by default what ``app.topic`` declares
                for it, or 4.
            cleanup: "delete", "compact" or "compact,delete", as ``create_topic`` has it. Rows that
                take back others are tombstones in a compacted topic; elsewhere they have
                ``"_diff": -1``.
        """
        if key is not None:
            self._key_columns(key, f"the key of to({topic!r})")
        ends.end_in_topic(self, topic, key=key, value=value, partitions=partitions, cleanup=cleanup)
        return self

    def dataset(
        self, path: str | os.PathLike[str], *, partition_by: str | Sequence[str] = ()
    ) -> Stream:
        """Append the stream to a dataset: Parquet files in a folder, read with ``ms.dataset``.

        Which files count is told by a manifest that is replaced with each batch; many small files
        become few. Rows that take back others have ``_diff`` -1.

        Args:
            path: A folder of its own, which is made; relative to where the program runs.
            partition_by: Columns whose values divide the files into folders, as in ``day=2026-01-31``.
        """
        columns = self._key_columns(partition_by, "dataset's partition_by")
        ends.end_in_dataset(self, path, columns)
        return self

    def foreach(self, function: ends.ForeachFunction, *, name: str | None = None) -> Stream:
        """Call ``function(rows, context)`` with the rows of each batch, where the job was started.

        ``rows`` is a polars frame that is not empty; ``context`` has app, name, batch_id and key.
        The function is called at least once for each batch: again, with the same rows and the same
        key, after a crash. It works exactly once if it keeps the key together with what it does,
        and does nothing for a key that it has kept. An exception stops the job.

        Args:
            name: The step's name, a part of the key; by default the function's.
        """
        ends.end_in_function(self, function, name)
        return self

    def _key_of_parts(self, name: str, columns: tuple[str, ...]) -> tuple[str, ...]:
        if "pane_index" not in self.columns:
            raise ConfigError(
                f'The view {name!r} would keep of each key the last row of emit("discard"), which is '
                'a part of the answer. Emit "update", or keep all parts: emit("discard", panes=True).'
            )
        return (*columns, "pane_index")

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
            time: The event time of what comes out; by default the column that was it before.
            name: The step's name; by default the function's.

        The rows lose their place in the log on the way, so whether they are late is judged by the
        watermark as of the batch before. A native step stands before the first window; after one,
        use :meth:`to_spark`.
        """
        if self.mode is not None or self.is_late:
            raise ConfigError(
                "spark comes after a window. Put native steps before the first window, or take "
                "the results out with to_spark()."
            )
        columns = self.columns if schema is None else columns_of(fields_of(schema, what="spark"))
        expression = self._native_time(time)
        step_name = self.app.unique_name(name or str(getattr(function, "__name__", "spark")))
        check_time(expression, columns, step_name)
        node = NativeNode(
            self.node,
            step_name,
            function,
            plain_schema(self.columns),
            plain_schema(columns),
            expression,
        )
        return Stream(
            self.app, node, columns, lateness_us=self.lateness_us, late_policy=self.late_policy
        )

    def _native_time(self, time: Column | None) -> pl.Expr:
        if time is not None:
            return as_expression(time, what="spark's time")
        node: Node = self.node
        while isinstance(node, StepNode):
            node = node.parent
        before = node.time if isinstance(node, (SourceNode, FrameNode, NativeNode)) else None
        if before is None:
            raise ConfigError(
                "The stream has no time column. Say which one it is: spark(…, time=…)."
            )
        return before

    def to_spark(self) -> DataFrame:
        """Give the stream as a streaming Spark DataFrame, to be written with ``writeStream``.

        Its columns have Spark's types. Where results take earlier ones back (``emit("retract")``,
        and ``"update"`` of sessions) a column ``_diff`` says +1 of a row that is given, and -1 of one that is taken back.

        Dead rows are left out, and kept nowhere, as nothing of ours is committed here: declare
        ``on_error="stop"`` where that must not be.

        The query that you start has a checkpoint and guarantees of its own. Spark stays up until
        the process ends.
        """
        from millstream.spark.job import stream_to_spark  # noqa: PLC0415 - loads pyspark

        return stream_to_spark(self.app.job_of(self))
