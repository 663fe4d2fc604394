"""Views in PostgreSQL: tables of their own names, their change logs and fences, in one database.

Readers use :class:`PostgresViewReader`; a job writes with `views/sinks/postgres.py`. Tables are created in
the schema that the connection's ``search_path`` names first; the names of our other tables begin with
``_millstream``. A view belongs to one app. Rows, changes, position and fence of a batch are one
transaction of the server, which is as durable as its ``synchronous_commit`` says.

The statements on a view's table: `view_table.py`; values: `values.py`.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import polars as pl

from millstream.choices import did_you_mean
from millstream.errors import ConfigError, UnknownViewError
from millstream.views.address import PostgresAddress, postgres_address
from millstream.views.coverage import CoverageSpan, last_covered
from millstream.views.postgres.connection import PostgresConnection
from millstream.views.postgres.values import decode_rows, encode_parameter
from millstream.views.postgres.view_table import PostgresViewTable
from millstream.views.query import Query, QueryResult, ViewReader, view_id_of
from millstream.views.schema import ViewSchema
from millstream.views.state_store import changelog
from millstream.views.state_store.reader import encode_values

if TYPE_CHECKING:
    from millstream.views.postgres.connection import Session

FORMAT = 3


class PostgresViewReader(ViewReader):
    """Reads the views of a database; see :class:`ViewReader` for the methods."""

    _poll_s = 0.05

    def __init__(self, url: str) -> None:
        """Connect to the database.

        Raises:
            ConfigError: it cannot be reached with this address, or holds no views.
            RetriableError: the server is away.
        """
        self.address = postgres_address(url)
        self._connection = PostgresConnection(self.address, readonly=True)
        with self._connection.closed_on_error(), self._connection.transaction() as session:
            check_format(session, self.address)

    def close(self) -> None:
        self._connection.close()

    def views(self) -> list[ViewSchema]:
        with self._connection.transaction() as session:
            rows = session.execute("SELECT schema FROM _millstream_views ORDER BY name").fetchall()
        return [ViewSchema.from_json(text) for (text,) in rows]

    def apps(self) -> dict[str, str]:
        """Return the app of each view."""
        with self._connection.transaction() as session:
            return dict(session.execute("SELECT name, app FROM _millstream_views").fetchall())

    def schema(self, view: str) -> ViewSchema:
        with self._connection.transaction() as session:
            return _schema(session, view, self.address)

    def count(self, view: str) -> int:
        with self._connection.transaction() as session:
            name = PostgresViewTable(_schema(session, view, self.address)).name
            row = session.execute(f"SELECT count(*) FROM {name}").fetchone()  # noqa: S608
        assert row is not None, "an aggregate has one row"
        return int(row[0])

    def version(self) -> tuple[int, ...]:
        with self._connection.transaction() as session:
            row = session.execute(
                "SELECT coalesce(sum(batch_id), 0)::bigint, coalesce(sum(run), 0)::bigint, "
                "count(*), (SELECT coalesce(sum(seq_next), 0)::bigint FROM _millstream_views) "
                "FROM _millstream_fences"
            ).fetchone()
        assert row is not None, "an aggregate has one row"
        return row

    def newest_changes(self) -> dict[str, int]:
        with self._connection.transaction() as session:
            rows = session.execute("SELECT name, seq_next - 1 FROM _millstream_views ORDER BY name")
            return dict(rows.fetchall())

    def view_id(self, view: str) -> str:
        with self._connection.transaction() as session:
            return _view_id(session, view)

    def select(self, view: str, query: Query) -> QueryResult:
        with self._connection.transaction() as session:
            schema = _schema(session, view, self.address)
            text, given = query_statement(schema, query)
            with session.cursor(binary=True) as cursor:
                rows = cursor.execute(text, given).fetchall()
            newest = session.execute(
                "SELECT seq_next - 1 FROM _millstream_views WHERE name = %s", (view,)
            ).fetchone()
            assert newest is not None, "its schema was there"
            last, position = _last_committed(session, view)
            coverage = _coverage(session, view)
            view_id = _view_id(session, view)
        found = decode_rows(rows, schema, schema.names)
        return QueryResult(schema, found, newest[0], last, position, coverage, view_id)

    def coverage(self, view: str) -> tuple[CoverageSpan, ...]:
        with self._connection.transaction() as session:
            return _coverage(session, view)

    def changes(self, view: str, *, since: int = 0, limit: int | None = None) -> pl.DataFrame:
        with self._connection.transaction() as session:
            schema = _schema(session, view, self.address)
            row = session.execute(
                "SELECT v.seq_next, coalesce((SELECT min(seq) FROM _millstream_changes "
                "WHERE view = v.name), v.seq_next) FROM _millstream_views AS v WHERE name = %s",
                (view,),
            ).fetchone()
            assert row is not None, "its schema was there"
            end, start = row
            changelog.check_since(view, since, start, end)
            with session.cursor(binary=True) as cursor:
                frames = cursor.execute(
                    "SELECT seq, batch_id, frame FROM _millstream_changes "
                    "WHERE view = %s AND seq + rows > %s AND seq <= %s ORDER BY seq",
                    (view, since + 1, end if limit is None else since + limit),
                ).fetchall()
        return changelog.decode_changes(schema, frames, since, limit)

    def _last_committed(self, view_or_app: str) -> tuple[int | None, dict[str, Any]]:
        with self._connection.transaction() as session:
            return _last_committed(session, view_or_app)


def holds_views(address: PostgresAddress) -> bool:
    """Return whether a database has views that are kept beside the apps' own stores.

    Raises:
        ConfigError: it cannot be reached with this address.
        RetriableError: the server is away.
    """
    connection = PostgresConnection(address, readonly=True)
    with closing(connection), connection.transaction() as session:
        row = session.execute("SELECT to_regclass('_millstream_store') IS NOT NULL").fetchone()
    return row == (True,)


def query_statement(schema: ViewSchema, query: Query) -> tuple[str, dict[str, Any]]:
    """Return the statement for a query, and its parameters."""
    # Encoded as if nothing were a key, so that null stays null.
    plain = ViewSchema(schema.name, schema.columns, ())
    values = encode_values(plain, query.where)
    bounds = query.checked_bounds(schema)
    named = [name for name, value in values.items() if value is not None]
    compared = [(name, values[name]) for name in named]
    compared += [(name, encode_values(plain, {name: value})[name]) for name, _, value in bounds]
    text = PostgresViewTable(schema).select(
        named,
        [name for name, value in values.items() if value is None],
        [(name, comparison) for name, comparison, _ in bounds],
        query.checked_order(schema),
        limited=query.limit is not None,
    )
    given = {
        f"p{n}": encode_parameter(v, schema.kinds[name]) for n, (name, v) in enumerate(compared)
    }
    return text, {**given, "limit": query.limit}


def _last_committed(session: Session, view_or_app: str) -> tuple[int | None, dict[str, Any]]:
    """Return the last batch and the position of a view's job, or of an app's newest."""
    ended = last_covered(_coverage(session, view_or_app))
    if ended is not None:
        return ended
    row = session.execute(
        "SELECT f.batch_id, f.position FROM _millstream_fences AS f "
        "LEFT JOIN _millstream_views AS v ON v.name = %(name)s "
        "WHERE f.app = coalesce(v.app, %(name)s) AND f.job = coalesce(v.job, f.job) "
        "ORDER BY f.commit_number DESC NULLS LAST LIMIT 1",
        {"name": view_or_app},
    ).fetchone()
    if row is None:
        return None, {}
    return row[0], json.loads(row[1] or "{}")


def _view_id(session: Session, view: str) -> str:
    row = session.execute(
        "SELECT f.checkpoint_id FROM _millstream_fences AS f JOIN _millstream_views AS v "
        "ON f.app = v.app AND f.job = v.job WHERE v.name = %s",
        (view,),
    ).fetchone()
    return view_id_of(None if row is None else row[0])


def _coverage(session: Session, view: str) -> tuple[CoverageSpan, ...]:
    row = session.execute(
        "SELECT coverage FROM _millstream_views WHERE name = %s", (view,)
    ).fetchone()
    spans = json.loads(row[0]) if row is not None and row[0] is not None else []
    return tuple(map(CoverageSpan.from_json, spans))


def check_format(session: Session, address: PostgresAddress) -> None:
    """Make sure that the database holds views that this version can read.

    Raises:
        ConfigError: it holds none, or they are of another version.
    """
    there = session.execute("SELECT to_regclass('_millstream_store') IS NOT NULL").fetchone()
    row = None
    if there is not None and there[0]:
        row = session.execute("SELECT format FROM _millstream_store").fetchone()
    if row is None:
        raise ConfigError(
            f"There are no views in {address.shown}. Run the pipeline that fills them, or correct "
            "the address (its search_path, too)."
        )
    if row[0] > FORMAT:
        raise ConfigError(
            f"The views in {address.shown} have format {row[0]}; this version reads {FORMAT}. "
            "Upgrade millstream."
        )
    if row[0] < FORMAT:
        raise ConfigError(
            f"The views in {address.shown} have format {row[0]}, of an earlier version; this one "
            f"reads {FORMAT}. Go on with that version, or give the views another schema (search_path)."
        )


def _schema(session: Session, view: str, address: PostgresAddress) -> ViewSchema:
    row = session.execute(
        "SELECT schema FROM _millstream_views WHERE name = %s", (view,)
    ).fetchone()
    if row is None:
        found = session.execute("SELECT name FROM _millstream_views ORDER BY name").fetchall()
        known = [name for (name,) in found]
        raise UnknownViewError(
            f"There is no view {view!r} in {address.shown}; there are: "
            f"{', '.join(known) or 'none yet'}. Correct the name, or run the pipeline that fills the "
            f"view.{did_you_mean(view, known)}"
        )
    return ViewSchema.from_json(row[0])
