"""Topics and streams: the verbs of the pipeline surface.

A stream is immutable; every verb gives a new one. Each verb is checked where it is called, against
the columns that are there, so that a mistake shows at its own line and not in a running job.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import polars as pl

from millstream.durations import Duration, describe_us, to_us
from millstream.errors import ConfigError
from millstream.kernels.aggregates import Aggregate
from millstream.kernels.decode import Field
from millstream.kernels.frames import HIDDEN_PREFIX, ROWS, TIME, plain_schema, visible
from millstream.kernels.plan import Cleanup
from millstream.kernels.steps import Filter, Select, Step, WithColumns
from millstream.kernels.watermarks import WatermarkRule
from millstream.kernels.window_aggregate import EmitMode, WindowAggregate
from millstream.kernels.windows import Tumbling
from millstream.pipeline import ends
from millstream.pipeline.functions import Column, as_expression, watermark
from millstream.pipeline.graph import NativeNode, Node, SourceNode, StepNode, WindowNode
from millstream.pipeline.schema import Columns, columns_of, fields_of

if TYPE_CHECKING:
    from millstream.pipeline.app import App
    from millstream.spark.job import DataFrame

WINDOW_COLUMNS = ("window_start", "window_end")
_IN_ORDER = watermark("0 seconds")


@dataclass(frozen=True)
class Topic:
    """A topic of the log as the pipeline declares it: name, schema, key and partitions."""

    app: App
    name: str
    fields: tuple[Field, ...]
    key: str | None
    partitions: int

    def stream(
        self,
        *,
        time: Column | None = None,
        watermark: WatermarkRule = _IN_ORDER,
        lateness: Duration = "0 seconds",
        name: str | None = None,
    ) -> Stream:
        """Read the topic as a stream of events.

        Args:
            time: The event time: a datetime field, or an expression that gives a datetime. By
                default the time that the record carries in the log.
            watermark: How the watermark follows the events; see :func:`millstream.watermark`.
            lateness: How long after the watermark has passed its end a window still takes events.
                What comes later is counted as late and left out.
            name: The stream's name in ledger and errors; by default the topic's.
        """
        columns = columns_of(self.fields)
        expression = None if time is None else as_expression(time, what="stream's time")
        if expression is not None:
            _check_time(expression, columns, self.name)
        step = self.app.unique_name(name or self.name)
        node = SourceNode(step, self.name, self.fields, expression, watermark)
        lateness_us = to_us(lateness, what="stream's lateness")
        return Stream(self.app, node, columns, lateness_us=lateness_us)


@dataclass(frozen=True)
class Stream:
    """A stream of rows with named, typed columns. See the verbs."""

    app: App
    node: Node
    columns: Columns
    lateness_us: int = 0
    key: tuple[str, ...] = ()
    mode: EmitMode | None = None  # how the window above emits; None above the first window

    # ── stateless verbs ─────────────────────────────────────────────────────────────────────

    def filter(self, *conditions: pl.Expr, name: str | None = None) -> Stream:
        """Keep the rows for which all conditions are true (null counts as false)."""
        if self.mode == "update":
            raise ConfigError(
                'filter comes after emit("update"): a row that passed once and later no longer '
                'does would stay in the view. Filter where the view is read, or emit("final").'
            )
        conditions = tuple(as_expression(c, what="filter's condition") for c in conditions)
        step_name = name or f"filter({_named(conditions)})"
        return self._step(Filter(self.app.unique_name(step_name), conditions))

    def with_columns(
        self, *expressions: pl.Expr, name: str | None = None, **named: pl.Expr
    ) -> Stream:
        """Add columns, or replace those of the same name: ``rate=pl.col("a") / pl.col("b")``."""
        every = self._expressions(expressions, named, "with_columns")
        made = ", ".join(expression.meta.output_name() for expression in every)
        step_name = name or f"with_columns({made})"
        return self._step(WithColumns(self.app.unique_name(step_name), every))

    def select(self, *expressions: Column, name: str | None = None, **named: pl.Expr) -> Stream:
        """Keep only the named columns and expressions."""
        every = self._expressions(expressions, named, "select")
        made = ", ".join(expression.meta.output_name() for expression in every)
        step_name = name or f"select({made})"
        return self._step(Select(self.app.unique_name(step_name), every))

    def key_by(self, *columns: str) -> Stream:
        """Say what the rows are about: the default ``by`` of windows and key of views."""
        return replace(self, key=self._key_columns(columns, "key_by"))

    def _expressions(
        self, given: Sequence[Column], named: dict[str, pl.Expr], what: str
    ) -> tuple[pl.Expr, ...]:
        plain = [as_expression(e, what=f"an expression of {what}") for e in given]
        return (*plain, *(as_expression(e, what=name).alias(name) for name, e in named.items()))

    def _step(self, step: Step) -> Stream:
        columns = _columns_after(step, self.columns)
        hidden = [name for name in columns if name.startswith(HIDDEN_PREFIX)]
        if hidden:
            raise ConfigError(
                f"{step.name} makes the column {hidden[0]!r}: names that begin with "
                f"{HIDDEN_PREFIX!r} are reserved. Choose another name."
            )
        return replace(self, node=StepNode(self.node, step), columns=columns)

    def _key_columns(self, columns: str | Sequence[str], what: str) -> tuple[str, ...]:
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        for name in names:
            if name not in self.columns:
                raise ConfigError(f"{what} names {name!r}. {_there_are(name, self.columns)}")
            if self.columns[name].is_nested():
                raise ConfigError(
                    f"{what} names {name!r}, a {self.columns[name]}: lists and structs cannot be "
                    "keys. Make a plain column of it first, with with_columns."
                )
        return names

    # ── windows ─────────────────────────────────────────────────────────────────────────────

    def window(
        self, window: Tumbling, *, by: str | Sequence[str] | None = None, name: str | None = None
    ) -> Windowed:
        """Divide the stream's time into windows, and its rows by the columns ``by``.

        ``by`` is by default what :meth:`key_by` said; with neither, a window is one group.
        """
        if self.mode == "update":
            raise ConfigError(
                'window comes after emit("update"), whose rows replace one another: adding them up '
                'would count events twice. Emit "final" there.'
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
            columns = (WINDOW_COLUMNS[0], *columns)
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
        if self.mode is not None:
            raise ConfigError(
                "spark comes after a window. Put native steps before the first window, or take "
                "the results out with to_spark()."
            )
        columns = self.columns if schema is None else columns_of(fields_of(schema, what="spark"))
        expression = self._native_time(time)
        step_name = self.app.unique_name(name or str(getattr(function, "__name__", "spark")))
        _check_time(expression, columns, step_name)
        node = NativeNode(
            self.node,
            step_name,
            function,
            plain_schema(self.columns),
            plain_schema(columns),
            expression,
        )
        return Stream(self.app, node, columns, lateness_us=self.lateness_us)

    def _native_time(self, time: Column | None) -> pl.Expr:
        if time is not None:
            return as_expression(time, what="spark's time")
        node: Node = self.node
        while isinstance(node, StepNode):
            node = node.parent
        before = node.time if isinstance(node, (SourceNode, NativeNode)) else None
        if before is None:
            raise ConfigError(
                "The stream has no time column. Say which one it is: spark(…, time=…)."
            )
        return before

    def to_spark(self) -> DataFrame:
        """Give the stream as a streaming Spark DataFrame, to be written with ``writeStream``.

        The query that you start has a checkpoint and guarantees of its own. Spark stays up until
        the process ends.
        """
        from millstream.spark.job import stream_to_spark  # noqa: PLC0415 - loads pyspark

        return stream_to_spark(self.app.job_of(self))


@dataclass(frozen=True)
class Windowed:
    """A stream divided into windows; say how it emits, then what it aggregates."""

    stream: Stream
    window: Tumbling
    by: tuple[str, ...]
    name: str | None = None
    mode: EmitMode = "final"

    def emit(self, mode: EmitMode) -> Windowed:
        """Say when results come out.

        ``"final"``: one row per key once the window can get no more events. ``"update"``: after
        every batch a row for each key that changed; a later row replaces an earlier one.
        """
        if mode not in ("final", "update"):
            raise ConfigError(f'emit is {mode!r}. Choose "final" or "update".')
        return replace(self, mode=mode)

    def agg(self, **aggregates: Aggregate) -> Stream:
        """Aggregate each window and key: ``agg(shown=ms.count(), cost=ms.sum("cost"))``.

        The rows that come out have window_start, window_end, the ``by`` columns and the
        aggregates; their event time is the last microsecond of the window.
        """
        self._check_names(aggregates)
        name = self.name or f"tumbling({describe_us(self.window.size_us)}) by {', '.join(self.by)}"
        kernel = WindowAggregate(
            name=self.stream.app.unique_name(name.removesuffix(" by ")),
            window=self.window,
            by=self.by,
            aggregates=tuple(aggregates.items()),
            mode=self.mode,
            lateness_us=self.stream.lateness_us,
            partial_schema=(),
        )
        kernel, columns = _typed(kernel, self.stream.columns)
        node = WindowNode(self.stream.node, kernel)
        return Stream(self.stream.app, node, columns, key=self.by, mode=self.mode)

    def _check_names(self, aggregates: dict[str, Aggregate]) -> None:
        if not aggregates:
            raise ConfigError("agg has no aggregates. Name at least one: agg(n=ms.count()).")
        for name, aggregate in aggregates.items():
            if name in (*WINDOW_COLUMNS, *self.by) or name.startswith(HIDDEN_PREFIX):
                raise ConfigError(f"The aggregate's name {name!r} is taken. Choose another.")
            if not hasattr(aggregate, "partial"):
                raise ConfigError(
                    f"The aggregate {name!r} is {aggregate!r}. Use ms.count, ms.sum or ms.mean."
                )


def _typed(kernel: WindowAggregate, columns: Columns) -> tuple[WindowAggregate, Columns]:
    """Find the types of partials and results by running the kernel on no rows."""
    rows = kernel.assign(pl.DataFrame(schema={**columns, TIME: pl.Int64}))
    try:
        partials = kernel.prepare(rows)
    except pl.exceptions.PolarsError as error:
        raise _wrong_columns(kernel.name, error, columns) from error
    own = [name for name in partials.columns if name not in (*kernel.by, *rows.columns)]
    schema = tuple((name, _held_type(partials.schema[name], name)) for name in own)
    kernel = replace(kernel, partial_schema=schema)
    results = kernel.read_off(kernel.merge(kernel.prepare(rows)))
    return kernel, {name: results.schema[name] for name in visible(results.columns)}


def _held_type(dtype: pl.DataType, name: str) -> pl.DataType:
    if name == ROWS or dtype.is_integer() or dtype == pl.Boolean:
        return pl.Int64()
    if dtype.is_float():
        return pl.Float64()
    if dtype.is_decimal() or dtype == pl.Duration:
        return dtype
    raise ConfigError(
        f"The aggregate {name.split('.', maxsplit=1)[0]!r} is over values of type {dtype}. Sums and means take "
        "numbers, Decimals and durations."
    )


def _columns_after(step: Step, columns: Columns) -> Columns:
    try:
        return dict(step.apply(pl.DataFrame(schema=columns)).schema)
    except pl.exceptions.PolarsError as error:
        raise _wrong_columns(step.name, error, columns) from error


def _wrong_columns(step: str, error: Exception, columns: Columns) -> ConfigError:
    text = str(error).strip().splitlines()[0].strip('"')
    if isinstance(error, pl.exceptions.ColumnNotFoundError):
        name = text.split('"', 2)[1] if '"' in text else text
        return ConfigError(f"{step} uses the column {name!r}. {_there_are(name, columns)}")
    return ConfigError(f"{step} does not fit its columns: {text}. {_there_are('', columns)}")


def _there_are(name: str, columns: Columns) -> str:
    near = difflib.get_close_matches(name, columns, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"The columns there are {', '.join(columns)}.{hint}"


def _check_time(expression: pl.Expr, columns: Columns, step: str) -> None:
    try:
        dtype = pl.DataFrame(schema=columns).select(expression).dtypes[0]
    except pl.exceptions.PolarsError as error:
        raise _wrong_columns(f"the time of {step!r}", error, columns) from error
    if not isinstance(dtype, pl.Datetime):
        raise ConfigError(
            f"The time of {step!r} is of type {dtype}. Give a datetime field, or an expression "
            'that makes one, such as pl.from_epoch("ts_ms", time_unit="ms").'
        )


def _named(expressions: Sequence[pl.Expr]) -> str:
    roots = dict.fromkeys(name for e in expressions for name in e.meta.root_names())
    return ", ".join(roots)
