"""Enrichment: ``stream.enrich(…)`` checked and made into a kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from millstream.choices import choose
from millstream.durations import Duration
from millstream.errors import ConfigError
from millstream.kernels.code_digest import code_digest
from millstream.kernels.enrichment.answers import LookupColumns
from millstream.kernels.enrichment.calls import CallPolicy, LookupFunction
from millstream.kernels.enrichment.operator import Enrichment, LookupErrorPolicy
from millstream.pipeline.checks import positive_us, require_free, whole_number
from millstream.pipeline.graph import DataFrameNode, GraphNode, parents
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape
from millstream.pipeline.stateless import FrameSchema, declared_columns

BATCH_ROWS_MAX = 1_000_000
RETRIES_MAX = 100
_TIMEOUT_US_MAX = 3_600_000_000  # an hour: a batch waits for it


def build_enrichment(
    shape: StreamShape,
    node: GraphNode,
    function: LookupFunction,
    on: tuple[str, ...],
    *,
    schema: FrameSchema,
    cache: Duration | None,
    batch_rows: int,
    timeout: Duration,
    retries: int,
    on_error: LookupErrorPolicy,
    name: str | None,
) -> tuple[Enrichment, StreamShape]:
    """Check what is declared; return the kernel and the shape of its rows."""
    _require_appended(shape)
    if not on or len(set(on)) < len(on):
        raise ConfigError(
            f'enrich is given on={list(on)}. Name each column of the key that it asks by, once: on="user".'
        )
    if not callable(function):
        raise ConfigError(
            f"enrich is given {function!r}. Give a function of a polars frame of keys."
        )
    choose("enrich's on_error", on_error, get_args(LookupErrorPolicy))
    added = declared_columns(schema, "enrich")
    if not added:
        raise ConfigError(
            "enrich's schema has no column. Say which it adds: {'country': pl.String}."
        )
    require_free(added, shape.columns, "enrich adds")
    cache_ms = None if cache is None else -(-positive_us(cache, "enrich's cache") // 1000)
    if cache_ms is not None and _reads_dataframes(node):
        raise ConfigError(
            "enrich has a cache, and the stream comes from a DataFrame of Spark's, whose batches have no "
            "clock by which an answer gets old. Say cache=None: each batch asks its keys."
        )
    kernel = Enrichment(
        name=shape.names.unique(name or f"enrich({', '.join(on)})"),
        by=on,
        lateness_us=0,
        side_output=False,
        columns=_lookup_columns(on, shape.columns, added),
        function=function,
        cache_ms=cache_ms,
        policy=_policy(batch_rows, timeout, retries),
        on_error=on_error,
        code=code_digest(function),
    )
    return kernel, replace(shape, columns={**shape.columns, **added}, late_columns=None)


def _require_appended(shape: StreamShape) -> None:
    """Refuse rows that replace others, or take them back: the answer may have changed meanwhile."""
    if shape.is_table:
        raise ConfigError(
            "enrich comes after a table, whose rows are taken back as they were added: the answer may be "
            "another one by then. Enrich the stream before it becomes a table."
        )
    if shape.mode not in (None, "final"):
        raise ConfigError(
            f'enrich comes after emit("{shape.mode}"), whose rows replace one another or add up: the answer '
            'may be another one by then. Enrich the events before the window, or emit "final" there.'
        )
    if shape.is_late:
        raise ConfigError(
            "enrich comes after late rows, which no time follows. Enrich the stream before the step that "
            "finds them late."
        )


def _lookup_columns(on: tuple[str, ...], columns: ColumnTypes, added: ColumnTypes) -> LookupColumns:
    return LookupColumns(tuple((name, columns[name]) for name in on), tuple(added.items()))


def _policy(batch_rows: int, timeout: Duration, retries: int) -> CallPolicy:
    timeout_us = positive_us(timeout, "enrich's timeout")
    if timeout_us > _TIMEOUT_US_MAX:
        raise ConfigError(
            f"enrich's timeout is {timeout!r}. Give one of up to an hour: a batch waits for it."
        )
    return CallPolicy(
        whole_number(batch_rows, 1, BATCH_ROWS_MAX, "enrich's batch_rows"),
        timeout_us / 1e6,
        whole_number(retries, 0, RETRIES_MAX, "enrich's retries"),
    )


def _reads_dataframes(node: GraphNode) -> bool:
    """Return whether a DataFrame of Spark's is among the sources of a node."""
    return isinstance(node, DataFrameNode) or any(map(_reads_dataframes, parents(node)))
