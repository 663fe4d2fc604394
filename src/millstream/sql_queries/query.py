"""SQL from Python: a statement over the views and topics of an app, answered with a frame and the position that it reflects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from millstream.choices import did_you_mean
from millstream.client.address import is_kafka
from millstream.client.default_log import default_log
from millstream.durations import Duration, to_us
from millstream.errors import ConfigError, SqlError
from millstream.pipeline.app import App
from millstream.sql_queries.app_tables import RECORDS_MAX, AppTables, SqlScope
from millstream.sql_queries.session import SqlLimits, SqlRows, SqlSession
from millstream.sql_queries.topic_table import TopicColumns
from millstream.views.reader import apps_with_state, state_store_location


@dataclass(frozen=True)
class SqlResult:
    """The rows of a statement, and what they reflect.

    Attributes:
        rows: A polars DataFrame. Where two columns have one name, the second has a number after it.
        position: The position of the log that all views and topics were read at: topic → partition → offset of the next
            record. Of topics that the app does not read, where they ended.
        batch_id: The last batch of the app that is in it; None before the first.
        notes: What the rows lack, as sentences: of a view that was not always written, for example.
        types: The engine's types of the columns.
    """

    rows: pl.DataFrame
    position: Mapping[str, Any]
    batch_id: int | None
    notes: tuple[str, ...] = ()
    types: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{self.rows}\n{self._said}"

    def _repr_html_(self) -> str:
        return f"{self.rows._repr_html_()}<small>{self._said}</small>"

    @property
    def _said(self) -> str:
        return " ".join(
            (f"As of batch {self.batch_id}, position {dict(self.position)}.", *self.notes)
        )


def sql(
    query: str,
    *,
    app: App | str | None = None,
    log: Path | str | None = None,
    at_least: Mapping[str, Any] | None = None,
    timeout: Duration = "1 minute",
    since: Duration | None = None,
    records_max: int = RECORDS_MAX,
    memory_mb: int = SqlLimits.memory_mb,
) -> SqlResult:
    """Ask the views and topics of an app in SQL: DuckDB's, which is close to PostgreSQL's.

    A view is ``views.NAME`` and a topic ``topics.NAME``; a name alone is the view's, or else the topic's. A topic has its fields as
    columns if ``app`` is the object that declares them. See docs/sql.md.

    Args:
        app: Whose views: an app, or its name, which is needed only if several apps of the log have run.
        log: The log, where ``app`` is no object: by default MILLSTREAM_LOG, or ``./data``.
        at_least: A position that the rows must reflect, such as ``{"clicks": {"0": 17}}``. It is waited for.
        timeout: How long the statement may take.
        since: Of topics read only the records of so long ago or less, by their timestamps.
        records_max: The largest topic that is read, in records.
        memory_mb: How much memory the engine may take, beside the rows of the tables.

    Raises:
        SqlError: The statement is wrong, changes something, or takes more than it may.
        DeadlineError: It took longer than ``timeout``.
        ConfigError: It is not clear which app is meant.
        EnvironmentProblem: The extra ``sql`` is not installed.
    Guarantees: all rows are as of one position, which the result has. Nothing is changed, and the job is not held up.

    Example::

        ms.sql("SELECT ad, sum(n) AS n FROM per_minute GROUP BY ad ORDER BY n DESC", app=app).rows
    """
    scope = scope_of(app, log, since=since, records_max=records_max)
    limits = SqlLimits(seconds=to_us(timeout, what="sql's timeout") / 1e6, memory_mb=memory_mb)
    with closing(AppTables(scope)) as tables, closing(SqlSession(tables, limits)) as session:
        return to_result(session.run(query, at_least))


def scope_of(
    app: App | str | None,
    log: Path | str | None,
    *,
    since: Duration | None = None,
    records_max: int = RECORDS_MAX,
) -> SqlScope:
    """Return what can be asked of an app, or of a log.

    Raises:
        ConfigError: several apps of the log have run, and none is named; or an option is not possible.
    """
    since_ms = None if since is None else to_us(since, what="sql's since") // 1000
    if not isinstance(records_max, int) or records_max < 1:
        raise ConfigError(f"records_max is {records_max!r}. Give a number of records, 1 or more.")
    if isinstance(app, App):
        if log is not None:
            raise ConfigError(
                f"A log {str(log)!r} is given, and an app that has one. Leave one of them out."
            )
        topics = {
            name: TopicColumns(topic.values, topic.fields) for name, topic in app.topics.items()
        }
        return SqlScope(app.name, app.state_store, app.log, topics, since_ms, records_max)
    log = default_log() if log is None else log
    name = None if is_kafka(log) else _app_of(log, app)
    store = None if name is None else state_store_location(log, name)
    return SqlScope(name, store, log, {}, since_ms, records_max)


def _app_of(log: Path | str, app: str | None) -> str | None:
    known = apps_with_state(log)
    if app is None and len(known) > 1:
        raise ConfigError(
            f"Several apps of {str(log)!r} have run: {', '.join(known)}. Say which with app=; views of two apps are as of two "
            "positions, so that a statement is about one."
        )
    if app is not None and app not in known:
        raise ConfigError(
            f"The log folder {str(log)!r} has no views of an app {app!r}; there are views of: "
            f"{', '.join(known) or 'none'}. Correct the app or the folder, or run the app first."
            f"{did_you_mean(app, known)}"
        )
    return app or (known[0] if known else None)


def to_result(found: SqlRows) -> SqlResult:
    """Return rows as a frame of polars.

    Raises:
        SqlError: an interval has months, which polars' durations cannot have.
    """
    names = _told_apart(found.names)
    columns = [
        _duration(column, name) if _is_interval(column.type) else column
        for name, column in zip(names, found.rows.columns, strict=True)
    ]
    frame = pl.DataFrame(pl.from_arrow(pa.table(columns, names=list(map(str, range(len(names)))))))
    frame.columns = names
    snapshot = found.snapshot
    return SqlResult(frame, snapshot.position, snapshot.batch_id, snapshot.notes, found.types)


def _told_apart(names: Sequence[str]) -> list[str]:
    """Return names of which no two are the same: what comes again has a number after it."""
    out: list[str] = []
    for name in names:
        chosen, number = name, 0
        while chosen in out:
            number += 1
            chosen = f"{name}_{number}"
        out.append(chosen)
    return out


def _is_interval(kind: pa.DataType) -> bool:
    return bool(pa.types.is_interval(kind))


def _duration(column: pa.ChunkedArray, name: str) -> pa.Array:
    micros: list[int | None] = []
    for one in column.to_pylist():
        if one is not None and one.months:
            raise SqlError(
                f"The column {name!r} has an interval with months, which have no fixed length. Ask for its text: "
                f"{name}::VARCHAR.",
                sqlstate="0A000",
            )
        micros.append(None if one is None else one.days * 86_400_000_000 + one.nanoseconds // 1000)
    return pc.cast(pa.array(micros, pa.int64()), pa.duration("us"))
