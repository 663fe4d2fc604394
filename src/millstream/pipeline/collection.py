"""What streams and tables have in common: named, typed columns, the stateless operators, and the sinks.

A stream is a collection of events, a table one of rows with a key. Both are immutable: every operator
returns a new one, and is checked where it is called, against the columns that are there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, get_args

import polars as pl

from millstream.choices import choose
from millstream.durations import Duration, to_us
from millstream.engine.peek import PeekedEnd, PeekLimits, peek_rows
from millstream.kernels.enrichment.calls import LookupFunction
from millstream.kernels.enrichment.operator import LookupErrorPolicy
from millstream.kernels.errors.user_code import OnError, UserCode
from millstream.kernels.map_frames import FrameFunction, RowsRule
from millstream.kernels.plan import Cleanup
from millstream.kernels.steps import Filter, Select, Step, WithColumns
from millstream.notebook.html import facts_html
from millstream.pipeline.checks import (
    at_least_one,
    checked_on_error,
    column_names,
    columns_after,
    declared_at,
)
from millstream.pipeline.declaration import AppDeclaration
from millstream.pipeline.enrichment import Lookup, build_enrichment
from millstream.pipeline.expressions import Column, as_expression
from millstream.pipeline.graph import GraphNode, OperatorNode, Output, StepNode
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape
from millstream.pipeline.sinks import ForeachFunction, SinkBuilder
from millstream.pipeline.stateless import (
    FrameSchema,
    drop_step,
    explode_step,
    expressions_of,
    map_frames_step,
    rename_step,
    shape_after,
)


@dataclass(frozen=True, repr=False)
class Collection:
    """Rows with named, typed columns: a :class:`Stream` or a :class:`Table`."""

    app: AppDeclaration
    node: GraphNode
    shape: StreamShape

    @property
    def columns(self) -> ColumnTypes:
        """The columns of the rows, with their types."""
        return self.shape.columns

    def __repr__(self) -> str:
        columns = ", ".join(f"{name} {dtype}" for name, dtype in self.columns.items())
        return f"{type(self).__name__} of {self.app.name!r}: {columns}"

    def _repr_html_(self) -> str:
        return facts_html(f"{type(self).__name__} of {self.app.name}", self.columns.items())

    def peek(
        self,
        rows: int = 10,
        *,
        end: PeekedEnd = "last",
        records: int = 10_000,
        timeout: Duration = "5 seconds",
    ) -> pl.DataFrame:
        """Look at some rows here, as the log has them now. Nothing is changed, and the app need not run.

        The steps above are computed in memory over a part of the log, beginning with no state. So a window or a table says what
        this part gives, which may be less than the app has. Where rows may be taken back, ``_diff`` is -1 of those that are.
        Functions of ``enrich`` are called.

        Args:
            rows: How many, at most.
            end: ``"last"``: of the newest records of each topic. ``"first"``: from the start of the log, until there are
                so many.
            records: Of ``"last"``: how many of the newest records of each topic are read.
            timeout: How long it may take. It is looked at after each 2,000 records.

        Warns:
            UserWarning: rows became dead letters, or the time was over.

        Raises:
            ConfigError: a step above is Spark's.

        Example::

            clicks.filter(pl.col("ad") == 7).peek()
        """
        limits = PeekLimits(
            at_least_one(rows, "peek's rows"),
            choose("peek's end", end, get_args(PeekedEnd)),
            at_least_one(records, "peek's records"),
            to_us(timeout, what="peek's timeout") / 1e6,
            next((one for one in self.shape.timed if one in self.columns), None),
        )
        return peek_rows(self.app.job_of(self.node, self.columns, "peek"), limits)

    # ── stateless operators ─────────────────────────────────────────────────────────────────

    def filter(
        self, *conditions: pl.Expr, name: str | None = None, on_error: OnError | None = None
    ) -> Self:
        """Keep the rows for which all conditions are true (null counts as false).

        ``name`` is the step's in errors and the ledger. Rows on which an expression fails go to the dead
        letters, with the step, the reason and the record; ``on_error="stop"`` stops the job
        instead, and the default is the app's. An expression that fails on each of more than 100
        rows of one table stops the job in any case. Where a row is taken back, its expressions and
        functions are evaluated again, and must give the same. All this holds for every operator here.
        """
        conditions = tuple(as_expression(c, what="filter's condition") for c in conditions)
        step_name = name or f"filter({column_names(conditions)})"
        step = Filter(self.shape.names.unique(step_name), conditions)
        return self._step(step, on_error)

    def with_columns(
        self,
        *expressions: pl.Expr,
        name: str | None = None,
        on_error: OnError | None = None,
        **named: pl.Expr,
    ) -> Self:
        """Add columns, or replace those of the same name: ``rate=pl.col("a") / pl.col("b")``."""
        every, step_name = expressions_of(expressions, named, "with_columns", name, self.columns)
        return self._step(WithColumns(self.shape.names.unique(step_name), every), on_error)

    def select(
        self,
        *expressions: Column,
        name: str | None = None,
        on_error: OnError | None = None,
        **named: pl.Expr,
    ) -> Self:
        """Keep only the named columns and expressions."""
        every, step_name = expressions_of(expressions, named, "select", name, self.columns)
        return self._step(Select(self.shape.names.unique(step_name), every), on_error)

    def rename(self, names: Mapping[str, str], *, name: str | None = None) -> Self:
        """Rename columns: ``rename({"old": "new"})``. Names may be swapped."""
        step = rename_step(name, names, self.columns)
        renamed = self._step(replace(step, name=self.shape.names.unique(step.name)))
        key = tuple(names.get(column, column) for column in self.shape.key)
        return replace(renamed, shape=replace(renamed.shape, key=key))

    def drop(self, *columns: str, name: str | None = None) -> Self:
        """Leave columns out."""
        step = drop_step(name, columns, self.columns)
        return self._step(replace(step, name=self.shape.names.unique(step.name)))

    def explode(
        self, *columns: str, name: str | None = None, on_error: OnError | None = None
    ) -> Self:
        """Make a row of each element of a list column.

        The other columns are repeated, and so is the event time. A row whose list is empty or null
        gives none, and counts as filtered. Several columns are exploded together: a row whose
        lists are not equally long is a dead letter.
        """
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
    ) -> Self:
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
        step = map_frames_step(name, function, schema, rows, self.columns)
        step = replace(step, name=self.shape.names.unique(step.name))
        return self._with_step(step, dict(step.schema_out), on_error)

    def _step(self, step: Step, on_error: OnError | None = None) -> Self:
        return self._with_step(step, columns_after(step, self.columns), on_error)

    def _with_step(self, step: Step, columns: ColumnTypes, on_error: OnError | None = None) -> Self:
        code = UserCode(step.name, declared_at(), checked_on_error(on_error or self.app.on_error))
        node = StepNode(self.node, step, tuple(columns.items()), code)
        return self._below(node, shape_after(step, self.shape, columns))

    def _below(self, node: GraphNode, shape: StreamShape) -> Self:
        return replace(self, node=node, shape=shape)

    # ── lookups outside ─────────────────────────────────────────────────────────────────────

    def enrich(
        self,
        function: LookupFunction | Lookup,
        *,
        on: str | Sequence[str],
        schema: FrameSchema,
        cache: Duration | None = "1 hour",
        batch_rows: int | None = None,
        concurrency: int = 8,
        timeout: Duration = "10 seconds",
        retries: int = 3,
        on_error: LookupErrorPolicy | None = None,
        name: str | None = None,
    ) -> Self:
        """Add columns to each row that a function of yours looks up outside: by HTTP, in a database.

        ::

            def countries(keys: pl.DataFrame) -> pl.DataFrame:
                found = requests.post(URL, json=keys["user"].to_list()).json()
                return pl.DataFrame(found, schema={"user": pl.String, "country": pl.String})

            clicks.enrich(countries, on="user", schema={"country": pl.String})

        For a service or database, there are ready ones: :func:`~millstream.http_lookup` and
        :func:`~millstream.sql_lookup`.

        Args:
            function: A ready lookup, or a function. It gets distinct keys, a frame with the columns ``on``, and gives a frame with one row
                for each key that it knows: the columns ``on``, as they were given, and those of
                ``schema``. A key without a row gets nulls, and so does a key with a null in it, which
                is not asked. It is called where the job runs, in several threads at once, and again
                after it failed: it must only read. If it raises ``UserCodeError``, the job stops.
            on: The column, or columns, of the key.
            schema: The columns that are added: a dataclass, or a dict of polars types.
            cache: For how long an answer is used for later rows of its key, nulls among them. That time
                is the running time of the job or the time of day, whichever passes faster.
                None: each batch asks its keys anew.
            batch_rows: The most keys in one call. By default 1000, and 1 for a lookup by GET.
            concurrency: How many calls each bucket makes at once. A job has as many buckets at work as
                Spark has cores, so a service sees so many times more.
            timeout: How long a call may take. A slower one counts as failed; what it gives later is ignored.
            retries: How often a failed call is repeated, after growing random waits of 0.1 to 10 seconds.
            on_error: When the last call failed: ``"dead-letter"`` makes dead letters of the rows of
                all its keys, ``"null"`` gives them nulls, ``"stop"`` stops the job. By default what the
                app's ``on_error`` says. After 20 calls in a row that failed to the end, the other keys of the
                batch have failed, too, without being asked.
            name: The step's name; by default ``enrich(…)`` with the columns.

        Guarantees: answers and failures are durable before any row with them leaves the step. A batch that is
            repeated after a crash reads them, so all outputs have the same. What is read anew, after a reset
            or by another app, asks again. State holds one answer for each key asked within ``cache``.

        Rows that may be replaced or taken back, those of a table among them, are taken back with the answer that they came
        with. State then has the rows, too: of a table as long as they are there, of a stream until the watermark has
        passed them by its lateness. Changes of a stream that come later are counted as late, and left out.

        Raises:
            ConfigError: the rows are parts or late ones, or what is given does not fit.
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
            concurrency=concurrency,
            timeout=timeout,
            retries=retries,
            on_error=on_error or self.app.on_error,
            name=name,
        )
        return self._below(OperatorNode((self.node,), kernel), shape)

    # ── sinks ───────────────────────────────────────────────────────────────────────────────

    def view(
        self, name: str, *, key: str | Sequence[str] | None = None, store: str | None = None
    ) -> Self:
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
    ) -> Self:
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
    ) -> Self:
        """Append the stream to a dataset: Parquet files in a folder or at a URL, read with ``ms.dataset``.

        A manifest names the files that count; each batch replaces it. Many small files are merged into
        few. Rows that retract others have ``_diff`` -1.

        Args:
            path: A folder of its own, which is made; relative to where the program runs. Or a URL,
                ``"s3://bucket/prefix"`` (``pip install "millstream[s3]"``): credentials, endpoint and region come from the
                environment.
            partition_by: Columns whose values divide the files into folders, as in ``day=2026-01-31``.
        """
        return self._into(self._sinks.dataset(path, partition_by))

    def foreach(self, function: ForeachFunction, *, name: str | None = None) -> Self:
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
        self.app.drop_replaced()
        return SinkBuilder(self.app, self.node, self.shape)

    def _into(self, output: Output) -> Self:
        self.app.add_output(output)
        return self
