"""What streams of events are joined with, looked up in and compared with: operators of :class:`Stream`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from millstream.durations import Duration
from millstream.errors import ConfigError
from millstream.kernels.errors.user_code import OnError
from millstream.kernels.joins.asof_join import AsofKind, LateVersions
from millstream.kernels.joins.asof_match import Direction
from millstream.kernels.joins.interval_join import IntervalJoinKind, UnmatchedEmit
from millstream.kernels.joins.signed_lookup import SignedLookup
from millstream.kernels.operator import Operator
from millstream.kernels.tables.static_rows import StaticRows
from millstream.pipeline.expressions import Column
from millstream.pipeline.graph import (
    OperatorNode,
)
from millstream.pipeline.interval_joins import Within, build_interval_join
from millstream.pipeline.pattern_collection import PatternCollection
from millstream.pipeline.percolate import PercolateOptions, build_percolate
from millstream.pipeline.shape import StreamShape
from millstream.pipeline.table import Table
from millstream.pipeline.table_joins import On
from millstream.pipeline.temporal_joins import (
    AsofOptions,
    RightInput,
    build_asof_join,
    build_lookup,
    static_lookup,
)
from millstream.pipeline.trend import build_alert, build_compare


@dataclass(frozen=True, repr=False)
class EventCollection(PatternCollection):
    """A collection of events, and what it is put together with."""

    def _operator(self, kernel: Operator, shape: StreamShape) -> Self:
        return self._below(OperatorNode((self.node,), kernel), shape)

    # ── joins ───────────────────────────────────────────────────────────────────────────────

    def join(
        self,
        other: EventCollection,
        on: On,
        *,
        within: Within,
        how: IntervalJoinKind = "inner",
        emit: UnmatchedEmit = "final",
        nulls_equal: bool = False,
        suffix: str = "_right",
        name: str | None = None,
    ) -> Self:
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

        Of rows that may be taken back (behind ``emit("update")``, say), the result is the join of those that are there, and
        as of ``emit("retract")``. The state then holds rows for the length of the interval more. A view of it needs
        what identifies both rows: of windows these and their ``by`` columns, of both sides.

        Raises:
            ConfigError: a column is not there, or two that are compared differ in type; the interval is
                empty; a stream has parts of results (``emit("discard")``), or is read with another ``late`` than
                ``"drop"``.
        """
        if not isinstance(other, EventCollection):
            raise ConfigError(
                f"join is given {other!r}. Give a stream. To join a stream with a table: "
                "stream.lookup(table, …)."
            )
        self.app.require_same(other.app, "join takes streams")
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

    def join_asof(
        self,
        right: Table | EventCollection,
        on: On,
        *,
        how: AsofKind = "left",
        direction: Direction = "backward",
        tolerance: Duration | None = None,
        allow_equal: bool = True,
        nulls_equal: bool = False,
        late: LateVersions | None = None,
        lateness: Duration | None = None,
        suffix: str = "_right",
        name: str | None = None,
    ) -> Self:
        """Join each row with what a table had at the row's event time, or with the nearest row of a stream.

        ::

            rates = app.table("rates", Rate, key="currency", watermark=ms.watermark(idle="30 seconds", …))
            orders.join_asof(rates, on="currency")

        A version of a table is valid from its event time until the next one of its key, in event time, whatever
        the table's ``order``; a deletion leaves no row from its own time on. A row waits until the watermarks of
        both inputs have passed its time and the lateness that they allow (with ``"forward"`` and ``"nearest"``
        also the tolerance), and is then emitted once, with its event time. So the result depends on the events
        alone, and not on their order of arrival or on batches. What comes later than its input allows is
        counted as late: a late row is left out (or is in ``late``); of a late version or quote ``late`` says what it
        is used for.

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
            late: What becomes of a version or quote that is below its partition's watermark. ``"keep"``, the default
                for a table: it counts for the rows whose time is not before that watermark, less the
                lateness; none of these has come out. ``"correct"``: rows that came out without it are taken
                back (``_diff`` -1) and put right. ``"drop"``, the default for a stream: it is left out.
            lateness: With ``"correct"``: how far below its partition's watermark a version corrects all that it is
                valid for. What is later corrects the rows that are within it, and counts for later ones.
            suffix: What is added to the name of a column of the other input that this stream has, too.
            name: The step's name.

        Rows of either stream that may be replaced or taken back, behind ``emit("update")``, say, are joined when they are
        final: once the watermark has passed them, what does not hold by then never comes, and the result is that of
        ``emit("final")``.

        Of versions or quotes of one time that counts which is later in the log. The state holds the rows that wait,
        and of each key the newest version that they may need, and those after it. So it grows with the keys, unless
        ``tolerance``, or a ``ttl`` of the table, says how old a version may be. Unless late ones are dropped, a
        deleted key stays in it with the time of its deletion, as an older version may come after it. With
        ``"correct"`` it also has the rows that came out, for as long as they may be corrected, and windows
        below the join wait for that long. Then key a view by what identifies a row of this stream.

        Raises:
            ConfigError: a column is not there, or two that are compared differ in type; the table's versions
                are not known, or ``on`` is not its key; ``late`` and the other options do not fit.
        """
        options = AsofOptions(how, direction, tolerance, allow_equal, nulls_equal, late, lateness)
        node, shape = build_asof_join(
            self.node,
            self.shape,
            self._right_input(right, "join_asof"),
            on,
            options,
            suffix=suffix,
            name=name,
        )
        return self._below(node, shape)

    def lookup(
        self,
        table: Table,
        on: On,
        *,
        how: AsofKind = "left",
        nulls_equal: bool = False,
        suffix: str = "_right",
        name: str | None = None,
    ) -> Self:
        """Join each row with the row that a table has when it arrives.

        The row is emitted in the batch of its arrival, with its event time, and waits for nothing: it sees the
        records of the table that arrived before it, or in the same millisecond, by the clocks of the log. Later
        ones correct nothing. What comes after it judges lateness as without the join.

        Where there is more to read than a batch can hold, the table's records are read before the rows. So a row finds
        all that arrived before it; it may find what arrived later.

        The result is not deterministic. Of two topics a batch takes what is there, so where a row and a record of
        the table arrive in short order, a rebuilt app may see them in the other order. Where the answer must not
        depend on that, use :meth:`join_asof`.

        Args:
            table: A table with a primary key. Of one that is derived from others, or has a ``ttl``, all changes of
                a batch are applied before its rows.
            on: As for :meth:`join_asof`; of a derived table there may be more than the key.
            how: As for :meth:`join_asof`, as are ``nulls_equal``, ``suffix`` and ``name``.

        Rows that may be replaced or taken back, behind ``emit("update")``, say, are taken back with what they were looked up
        with. They have no time of arrival, and see the table as it is after the batch's changes. The state then has them,
        too, until the watermark has passed them by the lateness of their stream; changes that come later are
        counted as late, and left out.

        The state holds the rows of the table; only deletions, or its ``ttl``, bound it. Of a
        :meth:`static table <millstream.App.static_table>` itself there is no state: the rows go to where the stream is
        read, and each row is looked up there, whatever its time.

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
        if (
            isinstance(node, OperatorNode)
            and isinstance(node.kernel, StaticRows)
            # A later run may give other rows: what may be taken back is looked up where that is stored.
            and not isinstance(kernel, SignedLookup)
        ):
            step = static_lookup(kernel, node.kernel)
            return replace(self._with_step(step, shape.columns), shape=shape)
        return self._below(OperatorNode((self.node, node), kernel), shape)

    def _right_input(self, right: object, what: str) -> RightInput:
        if not isinstance(right, (Table, EventCollection)):
            raise ConfigError(f"{what} is given {right!r}. Give a table of the app.")
        self.app.require_same(right.app, f"{what} takes inputs")
        origin = right.origin if isinstance(right, Table) else None
        return RightInput(right.node, right.shape, origin)

    # ── stored searches ─────────────────────────────────────────────────────────────────────

    def percolate(
        self,
        queries: Table,
        query: str,
        *,
        analyzers: Mapping[str, str] | None = None,
        points: Mapping[str, tuple[str, str]] | None = None,
        default: str | Sequence[str] | None = None,
        highlight: str | None = None,
        marks: tuple[str, str] = ("<em>", "</em>"),
        shards: int = 1,
        suffix: str = "_query",
        on_error: OnError = "dead-letter",
        name: str | None = None,
    ) -> Self:
        """Match each row with stored queries: a row comes out once for each query that it matches.

        ::

            alerts = app.table("alerts", Alert, key="id", time="since", watermark=ms.watermark("5 seconds", idle="30 seconds"))
            flats.percolate(alerts, "query", analyzers={"title": "english"}, points={"place": ("lat", "lon")})

        A query is a text such as ``title:"quiet street" rent:<900 place:near(52.5 13.4 3km) NOT furnished:true``. It
        names the columns of this stream, and the points. Queries are added, changed and removed while the app runs, as
        rows of the table: each is in force from its event time until the next row of its key. A row waits until the
        watermarks of both inputs have passed its time by their lateness, and is then matched with the
        queries that were in force at its time. So the matches depend on the records alone, and not on batches. A query
        that is late counts for rows from its partition's watermark on, less the lateness; none of these has come out.

        Args:
            queries: A table made directly of a topic or stream, perhaps with ``filter``, ``with_columns``,
                ``select``, ``rename`` and ``drop``.
            query: Its column with the text. A text that is no query is a dead letter that says at which character that
                shows, and the row of its key before it stays in force.
            analyzers: What makes terms of a column of text: ``"standard"`` (words, in lower case), if nothing else is
                said; ``"keyword"`` (the value as it is), ``"whitespace"``, or a language, such as ``"english"``: stems
                of words. Languages need ``pip install "millstream[search]"``.
            points: Fields of points on the globe: the columns of latitude and longitude, in degrees.
            default: The columns that a word without a field is looked for in; by default all text but that with ``"keyword"``.
            highlight: A column to add, with the part of the text where the words of the query are; null if no word is.
            marks: What stands before and after each of these words there. The text itself is not escaped.
            shards: Into how many parts the queries are divided. A row is sent to all of them; those of one bucket are
                matched together.
            suffix: What is added to the name of a column of the table that this stream has, too.
            on_error: ``"stop"``: a text that is no query stops the job.
            name: The step's name.

        A result has the row's columns and event time, and those of the query. The state holds the rows that wait, and the
        queries with an index of the terms that a row must have to match: only what a row's terms lead to is tried.

        Raises:
            ConfigError: a column is not there or of another type; the versions of the table are not known.
        """
        options = PercolateOptions(
            query,
            analyzers or {},
            points or {},
            default,
            highlight,
            marks,
            shards,
            suffix,
            on_error,
        )
        right = self._right_input(queries, "percolate")
        node, shape = build_percolate(self.node, self.shape, right, options, name=name)
        return self._below(node, shape)

    # ── trends ──────────────────────────────────────────────────────────────────────────────

    def compare(
        self,
        columns: str | Sequence[str],
        *,
        to: str,
        zone: str | None = None,
        name: str | None = None,
    ) -> Self:
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

        After ``window(ms.cumulating("1 day", "1 hour"))`` a day is compared while it goes on: its first ten
        hours with the first ten hours of the earlier day, and not with all of it. What has elapsed is event time
        since the start of the window, which is the same on both sides whatever the clocks do meanwhile. Early
        rows of other windows are refused: running time, batches and counts do not say how far a window has got.
        ::

            parts = events.window(ms.cumulating("1 day", "1 hour"), by="page").agg(n=ms.count())
            parts.compare("n", to="1 week").alert(
                when=pl.col("n_ratio") > 2, recover=pl.col("n_ratio") < 1.5
            )

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
            ConfigError: the rows are not results of tumbling, calendar or cumulating windows, or may be early
                or parts of them; a column is not there, or not a number.
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
    ) -> Self:
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
            ConfigError: the rows are not results of tumbling, calendar or cumulating windows, or are parts of
                them; a condition does not fit the columns.
        """
        kernel, shape = build_alert(
            self.node, self.shape, when=when, recover=recover, for_windows=for_windows, name=name
        )
        return self._operator(kernel, shape)
