"""What is found in the rows of each key of a stream, in their order: patterns, and what functions of users make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from millstream.kernels.errors.user_code import OnError
from millstream.kernels.patterns.row_measures import RowsPerMatch
from millstream.kernels.process.frame_function import FrameFunction
from millstream.kernels.process.function import ProcessFunction
from millstream.kernels.process.operator import RowOrder
from millstream.pipeline.checks import checked_on_error
from millstream.pipeline.collection import Collection
from millstream.pipeline.expressions import Column
from millstream.pipeline.final_rows import when_final
from millstream.pipeline.graph import OperatorNode
from millstream.pipeline.match_recognize import build_match_recognize
from millstream.pipeline.patterns import build_match
from millstream.pipeline.process import build_process
from millstream.pipeline.row_patterns import RowPattern
from millstream.pipeline.sequences import PatternSequence
from millstream.pipeline.stateless import FrameSchema


@dataclass(frozen=True, repr=False)
class PatternCollection(Collection):
    """A collection of events whose rows are matched, or processed, key by key."""

    # ── patterns ────────────────────────────────────────────────────────────────────────────

    def match(
        self,
        pattern: PatternSequence,
        *,
        by: str | Sequence[str],
        measures: Mapping[str, Column] | None = None,
        unbounded: bool = False,
        name: str | None = None,
    ) -> Self:
        """Find a pattern in the rows of each key, in the order of their event time.

        ::

            pattern = (
                ms.sequence("failed", pl.col("ok") == False).times(3).consecutive()
                .next("login", pl.col("ok"))
                .within("1 minute")
            )
            logins.match(pattern, by="user", measures={
                "address": ms.matched("login", "address").last(),
            })

        Args:
            pattern: What is looked for: see :func:`~millstream.sequence`.
            by: The key: the columns that the rows of a match have in common. ``()`` is one key for all rows, which is
                processed in one place.
            measures: The columns of a match, as expressions over the ``by`` columns, ``match_start``, ``match_end``, and
                :func:`~millstream.matched` rows. By default one for each step, with its name: the list of
                its rows.
            unbounded: Allow a pattern without ``within`` whose partial matches nothing ends.
            name: The step's name.

        A match has the ``by`` columns, ``match_start`` and ``match_end`` (the times of its first and last row), and
        the measures. Its event time is when it was decided: with the row that completed it; later, with a skip
        strategy, if a partial match that began before it could still have gone first; at the end of
        ``within``, if it ends by an absence. A row is matched once the watermark has passed it by more than the lateness of
        the stream; rows of one time are taken in the order of the log. Rows that are late are counted, and
        are the ``late`` of the result if the stream is read with ``late="side"``. Null is a key like any other.

        Rows that may be replaced or taken back, behind ``emit("update")``, say, are matched when they are final: what does
        not hold when the watermark has passed it never comes.

        Nothing identifies a match but all of its rows. So say what is to be the key of a view: with
        ``skip("past_last")`` it is ``by`` and ``match_start``, if no two rows of a key have the same time. Where they may, let a
        measure name the first row, such as ``ms.matched("failed", "id").first()``, and put it into the key.

        A match on which a measure fails becomes a dead letter, or stops the job, as the app's ``on_error`` says.

        Guarantees: the matches depend on the rows alone, however they are divided among batches. The state has the rows
            that wait, and those of partial matches, at most for ``within`` and the lateness.

        Raises:
            ConfigError: the pattern has no end; a condition or measure does not fit.
            UserCodeError: when it runs: there are more than 50 million partial matches of the keys of a batch; a measure fails on
                all of many matches.
        """
        columns = self.shape.key_columns(by, "match's by")
        node, shape = when_final(self.node, self.shape, columns, "match")
        kernel, shape = build_match(
            shape,
            pattern,
            columns,
            measures=measures,
            unbounded=unbounded,
            name=name,
            on_error=self.app.on_error,
        )
        return self._below(OperatorNode((node,), kernel), shape)

    def match_recognize(
        self,
        pattern: RowPattern,
        *,
        partition_by: str | Sequence[str],
        measures: Mapping[str, Column] | None = None,
        rows_per_match: RowsPerMatch = "one",
        unbounded: bool = False,
        name: str | None = None,
    ) -> Self:
        """Find a row pattern as SQL's ``MATCH_RECOGNIZE`` does, in the rows of each key by their event time.

        ::

            down, up = ms.variable("DOWN"), ms.variable("UP")
            valley = ms.row_pattern(
                "START DOWN+ UP",
                define={
                    "DOWN": pl.col("price") < down.prev()["price"],
                    "UP": pl.col("price") > up.prev()["price"],
                },
                within="1 hour",
            )
            prices.match_recognize(valley, partition_by="symbol", measures={"lowest": down["price"]})

        Args:
            pattern: What is looked for: see :func:`~millstream.row_pattern`.
            partition_by: The key: the columns that the rows of a match have in common. ``()`` is one key for all rows,
                which is processed in one place.
            measures: Columns, as expressions of polars: over columns of the current row, and over matched rows
                (:func:`~millstream.variable`, ``classifier``, ``match_number``).
            rows_per_match: ``"one"``: a row for each match, with the key, ``match_start`` and ``match_end`` (null, if it has no rows);
                the current row is the last one. ``"all"``: the rows of each match, with all their columns. Of an empty match,
                the row that it would begin with, unless it is ``"all_omit_empty"``. ``"all_with_unmatched"``: also the
                rows that no match has.
            unbounded: Allow what keeps rows, or the number of the last match, for ever.
            name: The step's name.

        A match is emitted when no match that is preferred to it can take a row that may still come; its event time is when that
        was decided. Rows wait for the watermark, and late ones are counted, as in :meth:`match`. A match, or a row of one, on which
        a measure fails becomes a dead letter, or stops the job, as the app's ``on_error`` says.

        Nothing identifies a match but its rows: matches may overlap, and rows of a key may have the same time. So say what is to be the
        key of a view, such as ``partition_by`` and a measure that names the first row: ``ms.variable().first()["id"]``.

        Guarantees: what is emitted depends on the rows alone, however they are divided among batches. The state has the rows that
            wait, and those from where the next match of a key may begin, at most for ``within`` and the lateness.

        Raises:
            ConfigError: the pattern has no end; a condition or measure does not fit.
            UserCodeError: when it runs, with ``on_error="stop"``: ``after_match`` skips to a variable that the match has no row of, or to its first
                row; or finding a match takes very many steps. Otherwise the rows become a dead letter.
        """
        columns = self.shape.key_columns(partition_by, "match_recognize's partition_by")
        node, shape = when_final(self.node, self.shape, columns, "match_recognize")
        kernel, shape = build_match_recognize(
            shape,
            pattern,
            columns,
            measures=measures,
            rows_per_match=rows_per_match,
            unbounded=unbounded,
            name=name,
            on_error=self.app.on_error,
        )
        return self._below(OperatorNode((node,), kernel), shape)

    # ── process functions ───────────────────────────────────────────────────────────────────

    def process(
        self,
        function: ProcessFunction | FrameFunction,
        *,
        by: str | Sequence[str],
        schema: FrameSchema,
        side_outputs: Mapping[str, FrameSchema] | None = None,
        order: RowOrder = "time",
        on_error: OnError | None = None,
        name: str | None = None,
    ) -> Self:
        """Call a function of yours for each row, with state of its key, and timers.

        ::

            visits = clicks.process(
                Visits(), by="user", schema={"user": pl.String, "clicks": pl.Int64},
                side_outputs={"robots": {"user": pl.String}},
            )
            visits.side_output("robots").view("robots", key="user")

        Args:
            function: An instance of your :class:`~millstream.ProcessFunction`, which is called row by row, or of your
                :class:`~millstream.FrameFunction`, which is called with all rows and keys of a batch at once.
            by: The key: the columns that state is kept for. ``()`` is one key for all rows, which is processed in one place.
            schema: The columns of the rows that it emits: a class with annotations, or names and polars types.
            side_outputs: Further outputs, by name, with the columns of each: see :meth:`Stream.side_output`.
            order: ``"time"``: the rows of a key by event time, and of one time by their place in the log (topic, partition,
                offset). A row waits until the watermark has passed it by more than the stream's lateness, and a timer
                comes after all rows before it. ``"arrival"``: rows as they come, in the order of the log; timers come
                after the rows of the batch in which the watermark passes them.
            on_error: A call that fails: its row, or timer, is a dead letter, or it stops the job. By default as the app says.
            name: The step's name; by default the function's class.

        A row that is emitted has the event time of the call. Rows that are late are counted, and are the ``late`` of the
        result if the stream is read with ``late="side"``. Null is a key like any other.

        Guarantees: with ``order="time"`` and without processing-time timers, what is emitted depends on the rows alone,
            however they are divided among batches. A call that fails has no effect, and stops no other. State has a row
            for each key of which there is something to know, and the rows that wait.

        Raises:
            ConfigError: rows may be taken back, and the function has no ``on_retraction``; a schema, state or the function is not one.
            UserCodeError: when it runs: all of more than 100 calls of a batch fail.
        """
        node, shape = build_process(
            self.shape,
            self.node,
            function,
            self.shape.key_columns(by, "process's by"),
            schema=schema,
            side_outputs=side_outputs,
            order=order,
            on_error=checked_on_error(on_error or self.app.on_error),
            name=name,
        )
        return self._below(node, shape)
