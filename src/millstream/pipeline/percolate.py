"""Stored searches: ``stream.percolate(…)`` with its checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.kernels.errors.user_code import OnError, UserCode
from millstream.kernels.joins.join_input import JoinInput
from millstream.kernels.search.analyzers import ANALYZERS, stemmer_release
from millstream.kernels.search.compiled_queries import QueryLanguage
from millstream.kernels.search.fields import SearchField, kind_of
from millstream.kernels.search.highlight import Highlight
from millstream.kernels.search.operator import Percolate
from millstream.pipeline.checks import (
    checked_on_error,
    declared_at,
    require_column,
    require_free,
    whole_number,
)
from millstream.pipeline.final_rows import when_final
from millstream.pipeline.graph import GraphNode, OperatorNode
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape, check_events, late_columns_of
from millstream.pipeline.temporal_joins import RightInput

_SHARDS_MAX = 1024
_FRAGMENT_CHARS = 150


@dataclass(frozen=True)
class PercolateOptions:
    """What the caller said: see :meth:`millstream.Stream.percolate`."""

    query: str
    analyzers: Mapping[str, str]
    points: Mapping[str, tuple[str, str]]
    default: str | Sequence[str] | None
    highlight: str | None
    marks: tuple[str, str]
    shards: int
    suffix: str
    on_error: OnError


def build_percolate(
    node: GraphNode,
    shape: StreamShape,
    queries: RightInput,
    options: PercolateOptions,
    *,
    name: str | None,
) -> tuple[OperatorNode, StreamShape]:
    """Build the operator with its inputs, and the shape of its rows."""
    check_events(shape, "percolate")
    node, shape = when_final(node, shape, (), "percolate")
    language = _language(shape.columns, options)
    right = _right_columns(shape, queries.shape, options)
    if queries.origin is None:
        raise ConfigError(
            "percolate is given a table whose versions are not known: it is derived from others, changes by whole "
            "transactions, or a step left its key out or made other rows. Give the table that is made of the topic "
            "or stream."
        )
    late_columns = late_columns_of(shape, "percolate")
    columns = {**shape.columns, **{renamed: dtype for _, renamed, dtype in right.columns}}
    highlight = _highlight(columns, options)
    if highlight is not None:
        columns[highlight.column] = pl.String()
    step = shape.names.unique(name or f"percolate({options.query})")
    kernel = Percolate(
        name=step,
        columns=tuple(shape.columns.items()),
        queries=right,
        query=options.query,
        language=language,
        lateness_of_us=(shape.lateness_us, queries.origin.lateness_us),
        shards=whole_number(options.shards, 1, _SHARDS_MAX, "percolate's shards"),
        highlight=highlight,
        within_us=queries.origin.ttl_us,
        side_output=late_columns is not None,
        code=UserCode(step, declared_at(), checked_on_error(options.on_error)),
    )
    made = StreamShape(columns=columns, late_columns=late_columns, names=shape.names)
    return OperatorNode((node, queries.origin.versions(shape.names)), kernel), made


def _right_columns(shape: StreamShape, table: StreamShape, options: PercolateOptions) -> JoinInput:
    """Return the key of the table of queries, and the columns that results have of it."""
    if not table.is_table:
        raise ConfigError(
            "percolate is given a stream as its queries. Make a table of it, in which a later row of a key replaces the "
            'one before: table(key="…").'
        )
    if table.primary_key is None:
        raise ConfigError(
            "percolate is given a table whose rows may be equal: a step left its key out, or made it anew. Keep the key "
            "in the table: by it a query is changed and removed."
        )
    require_column(options.query, table.columns, "percolate's query")
    if table.columns[options.query] != pl.String:
        raise ConfigError(
            f"percolate's query names {options.query!r}, a {table.columns[options.query]}. Name the column with the text "
            "of the queries."
        )
    names: dict[str, str] = {}
    for column in table.columns:
        renamed = f"{column}{options.suffix}" if column in shape.columns else column
        if renamed in shape.columns or renamed in names.values():
            raise ConfigError(
                f"percolate would have two columns {renamed!r}. Rename one, or give another suffix=."
            )
        names[column] = renamed
    key = table.primary_key
    return JoinInput(
        key,
        tuple(table.columns[column] for column in key),
        tuple((column, renamed, table.columns[column]) for column, renamed in names.items()),
    )


def _highlight(columns: ColumnTypes, options: PercolateOptions) -> Highlight | None:
    if options.highlight is None:
        return None
    require_free([options.highlight], columns, "percolate's highlight adds")
    before, after = options.marks
    return Highlight(options.highlight, before, after, _FRAGMENT_CHARS)


# ── fields ──────────────────────────────────────────────────────────────────────────────────────


def _language(columns: ColumnTypes, options: PercolateOptions) -> QueryLanguage:
    for column in options.analyzers:
        require_column(column, columns, "percolate's analyzers")
        if columns[column] != pl.String:
            raise ConfigError(
                f"percolate's analyzers name {column!r}, a {columns[column]}. Only text is analyzed: leave it out."
            )
    fields = (*_columns_as_fields(columns, options.analyzers), *_points(columns, options.points))
    return QueryLanguage(fields, _defaults(fields, options.default))


def _columns_as_fields(columns: ColumnTypes, analyzers: Mapping[str, str]) -> Iterator[SearchField]:
    for column, dtype in columns.items():
        kind = kind_of(dtype)
        if kind == "text":
            what = f"percolate's analyzer of {column!r}"
            analyzer = choose(what, analyzers.get(column, "standard"), ANALYZERS)
            release = stemmer_release(analyzer)
            yield SearchField(column, (column,), "text", dtype, analyzer, release)
        elif kind is not None:
            yield SearchField(column, (column,), kind, dtype)


def _points(columns: ColumnTypes, points: Mapping[str, tuple[str, str]]) -> Iterator[SearchField]:
    for name, pair in points.items():
        if name in columns:
            raise ConfigError(
                f"percolate's points name {name!r}, which is a column of the stream, too. Take another name."
            )
        if isinstance(pair, str) or len(pair) != 2:
            raise ConfigError(
                f"percolate's points give {name!r} as {pair!r}. Give the columns of latitude and longitude: "
                f'points={{{name!r}: ("lat", "lon")}}.'
            )
        for column in pair:
            require_column(column, columns, f"percolate's point {name!r}")
            if not columns[column].is_numeric():
                raise ConfigError(
                    f"percolate's point {name!r} names {column!r}, a {columns[column]}. Give degrees, as numbers."
                )
        yield SearchField(name, tuple(pair), "point", columns[pair[0]])


def _defaults(fields: Sequence[SearchField], given: str | Sequence[str] | None) -> tuple[int, ...]:
    text = {field.name: n for n, field in enumerate(fields) if field.kind == "text"}
    if given is None:
        return tuple(number for number in text.values() if fields[number].analyzer != "keyword")
    names = [given] if isinstance(given, str) else list(given)
    for name in names:
        if name not in text:
            there = ", ".join(text) or "(none)"
            raise ConfigError(
                f"percolate's default names {name!r}, which is no column of text. Those of this stream are {there}."
            )
    return tuple(text[name] for name in names)
