"""Topics and streams: the verbs of the pipeline surface.

A stream is immutable; every verb gives a new one. Each verb is checked where it is called, against
the columns that are there, so that a mistake shows at its own line and not in a running job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import polars as pl

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.kernels.decode import Field
from millstream.kernels.emission import LatePolicy, Mode
from millstream.kernels.frames import HIDDEN_PREFIX, plain_schema
from millstream.kernels.steps import Filter, Select, Step, WithColumns
from millstream.kernels.watermarks import WatermarkRule
from millstream.kernels.windows import TimeWindows
from millstream.pipeline.checks import check_time, columns_after, named, there_are
from millstream.pipeline.functions import Column, as_expression, watermark
from millstream.pipeline.graph import LateNode, NativeNode, Node, OperatorNode, SourceNode, StepNode
from millstream.pipeline.schema import Columns, columns_of, fields_of
from millstream.pipeline.session_words import EventWindow
from millstream.pipeline.windowed import LATE_COLUMNS, WINDOW_COLUMNS, Windowed

if TYPE_CHECKING:
    from millstream.pipeline.app import App
    from millstream.spark.job import DataFrame

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
        late: LatePolicy = "drop",
        name: str | None = None,
    ) -> Stream:
        """Read the topic as a stream of events.

        Args:
            time: The event time: a datetime field, or an expression that gives a datetime. By
                default the time that the record carries in the log.
            watermark: How the watermark follows the events; see :func:`millstream.watermark`.
            lateness: How long after the watermark has passed its end a window still takes events.
                What comes later is counted as late and left out.
            late: What becomes of late events. ``"drop"``: beyond the lateness they are counted and
                left out. ``"side"``: they come out aside, too, as the ``late`` of the window's
                result. ``"correct"``: a window emits when the watermark reaches its end, and gives
                a row that replaces it for what comes within the lateness; beyond, as drop.
            name: The stream's name in ledger and errors; by default the topic's.
        """
        columns = columns_of(self.fields)
        expression = None if time is None else as_expression(time, what="stream's time")
        if expression is not None:
            check_time(expression, columns, self.name)
        step = self.app.unique_name(name or self.name)
        node = SourceNode(step, self.name, self.fields, expression, watermark)
        lateness_us = to_us(lateness, what="stream's lateness")
        _check_late(late, lateness_us)
        return Stream(self.app, node, columns, lateness_us=lateness_us, late_policy=late)


def _check_late(late: LatePolicy, lateness_us: int) -> None:
    if late not in ("drop", "side", "correct"):
        raise ConfigError(f'stream\'s late is {late!r}. Choose "drop", "side" or "correct".')
    if late == "correct" and not lateness_us:
        raise ConfigError(
            'stream has late="correct" and no lateness, so no late event would be taken in. Say how '
            'long corrections go on: lateness="1 hour".'
        )


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
    went_in: Columns | None = None  # what went into the window above, if it puts late rows aside
    is_late: bool = False  # whether these are the rows that came too late for a window

    @property
    def late(self) -> Stream:
        """The rows that came too late for the window right above, if its stream has ``late="side"``.

        They have the columns that went in, and ``late_by`` (how far behind the watermark of their
        partition they were), ``late_reason``, and ``window_start`` and ``window_end`` of the last
        window that they missed. They can be filtered, viewed and sent on, but not windowed.
        """
        if self.went_in is None or not isinstance(self.node, OperatorNode):
            raise ConfigError(
                "The stream has no late rows aside. They belong to what agg gives, over a stream "
                'read with late="side".'
            )
        columns = {**self.went_in, **LATE_COLUMNS}
        return Stream(self.app, LateNode(self.node), columns, is_late=True)

    # ── stateless verbs ─────────────────────────────────────────────────────────────────────

    def filter(self, *conditions: pl.Expr, name: str | None = None) -> Stream:
        """Keep the rows for which all conditions are true (null counts as false)."""
        if self.mode == "update":
            raise ConfigError(
                'filter comes after emit("update") or late="correct": a row that passed once and '
                "later no longer does would stay in the view. Filter where the view is read, or "
                'emit "retract" or "final".'
            )
        conditions = tuple(as_expression(c, what="filter's condition") for c in conditions)
        step_name = name or f"filter({named(conditions)})"
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
        columns = columns_after(step, self.columns)
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
                raise ConfigError(f"{what} names {name!r}. {there_are(name, self.columns)}")
            if self.columns[name].is_nested():
                raise ConfigError(
                    f"{what} names {name!r}, a {self.columns[name]}: lists and structs cannot be "
                    "keys. Make a plain column of it first, with with_columns."
                )
        return names

    # ── windows ─────────────────────────────────────────────────────────────────────────────

    def window(
        self,
        window: TimeWindows | EventWindow,
        *,
        by: str | Sequence[str] | None = None,
        name: str | None = None,
    ) -> Windowed:
        """Divide the stream's time into windows, and its rows by the columns ``by``.

        ``by`` is by default what :meth:`key_by` said; with neither, a window is one group.
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

    def view(self, name: str, *, key: str | Sequence[str] | None = None) -> Stream:
        """Keep the stream as a view: a table with the latest row per key, read with ``ms.view``.

        The key is by default the window and its ``by`` columns, or what :meth:`key_by` said.
        """
        columns = self.key if key is None else self._key_columns(key, "view's key")
        if self.mode is not None and key is None:
            columns = (WINDOW_COLUMNS[0], *columns)
        if self.mode == "discard" and key is None:
            columns = self._key_of_parts(name, columns)
        missing = [column for column in columns if column not in self.columns]
        if not columns or missing:
            raise ConfigError(
                f"The view {name!r} has no key"
                + (f": its column {missing[0]!r} was left out by a select" if missing else "")
                + '. Say which columns tell its rows apart: view(name, key="…").'
            )
        self.app.add_view(name, self, columns)
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
