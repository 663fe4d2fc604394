"""Enrichment: ``stream.enrich(…)`` checked and made into a kernel."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import get_args

from millstream.choices import choose
from millstream.durations import Duration
from millstream.errors import ConfigError
from millstream.kernels.code_digest import digest
from millstream.kernels.definition import canonical_text, describe
from millstream.kernels.enrichment.answers import LookupColumns
from millstream.kernels.enrichment.calls import CallPolicy, LookupFunction
from millstream.kernels.enrichment.operator import Enrichment, LookupErrorPolicy
from millstream.kernels.enrichment.signed_enrichment import SignedEnrichment
from millstream.lookups.http_lookup import HttpLookup
from millstream.lookups.sql_lookup import SqlLookup
from millstream.pipeline.checks import positive_us, require_free, whole_number
from millstream.pipeline.final_rows import may_change, timed_changes
from millstream.pipeline.graph import GraphNode, reads_dataframes
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape
from millstream.pipeline.stateless import FrameSchema, declared_columns

BATCH_ROWS = 1000
BATCH_ROWS_MAX = 1_000_000
CONCURRENCY_MAX = 256
RETRIES_MAX = 100
_TIMEOUT_US_MAX = 3_600_000_000  # an hour: a batch waits for it


Lookup = HttpLookup | SqlLookup


def build_enrichment(
    shape: StreamShape,
    node: GraphNode,
    function: LookupFunction | Lookup,
    on: tuple[str, ...],
    *,
    schema: FrameSchema,
    cache: Duration | None,
    batch_rows: int | None,
    concurrency: int,
    timeout: Duration,
    retries: int,
    on_error: LookupErrorPolicy,
    name: str | None,
) -> tuple[Enrichment, StreamShape]:
    """Check what is declared; return the kernel and the shape of its rows."""
    signed = may_change(shape)
    shape = _changes(shape)
    if not on or len(set(on)) < len(on):
        raise ConfigError(
            f'enrich is given on={list(on)}. Name each column of the key that it asks by, once: on="user".'
        )
    choose("enrich's on_error", on_error, get_args(LookupErrorPolicy))
    added = declared_columns(schema, "enrich")
    if not added:
        raise ConfigError(
            "enrich's schema has no column. Say which it adds: {'country': pl.String}."
        )
    require_free(added, shape.columns, "enrich adds")
    cache_ms = None if cache is None else -(-positive_us(cache, "enrich's cache") // 1000)
    if cache_ms is not None and reads_dataframes(node):
        raise ConfigError(
            "enrich has a cache, and the stream comes from a DataFrame of Spark's, whose batches have no "
            "clock by which an answer gets old. Say cache=None: each batch asks its keys."
        )
    columns = _lookup_columns(on, shape.columns, added)
    policy = _policy(timeout, retries, concurrency, stops=on_error == "stop")
    call, keys_max = _bound(function, columns, policy)
    kernel = Enrichment(
        name=shape.names.unique(name or f"enrich({', '.join(on)})"),
        by=on,
        lateness_us=0,
        side_output=False,
        columns=columns,
        function=call,
        cache_ms=cache_ms,
        policy=replace(policy, batch_rows=_keys_per_call(batch_rows, keys_max)),
        on_error=on_error,
        code=digest(canonical_text(describe(call))),
    )
    enriched = replace(shape, columns={**shape.columns, **added}, late_columns=None)
    if not signed:
        return kernel, enriched
    of_kernel = {field.name: getattr(kernel, field.name) for field in fields(kernel)}
    of_kernel["lateness_us"] = shape.lateness_us
    names = tuple(shape.columns)
    kernel = SignedEnrichment(**of_kernel, names=names, is_table=shape.is_table)
    # A row whose call fails comes nowhere, so the one that it replaces goes without another in its place.
    return kernel, replace(enriched, stable=(), takes_back=True)


def _changes(shape: StreamShape) -> StreamShape:
    """Return the shape of rows as they come: with a sign, where they may be replaced or taken back.

    Raises:
        ConfigError: they are parts, or late rows; or they cannot come with a sign.
    """
    if shape.mode == "discard":
        raise ConfigError(
            'enrich comes after emit("discard"), whose rows are parts that add up. Enrich the events before '
            'the window, or emit "final", "update" or "retract" there.'
        )
    if shape.is_late:
        raise ConfigError(
            "enrich comes after late rows, which no time follows. Enrich the stream before the step that "
            "finds them late."
        )
    if shape.is_table or not may_change(shape):
        return shape
    return timed_changes(shape, "enrich")


def _lookup_columns(on: tuple[str, ...], columns: ColumnTypes, added: ColumnTypes) -> LookupColumns:
    return LookupColumns(tuple((name, columns[name]) for name in on), tuple(added.items()))


def _policy(timeout: Duration, retries: int, concurrency: int, *, stops: bool) -> CallPolicy:
    timeout_us = positive_us(timeout, "enrich's timeout")
    if timeout_us > _TIMEOUT_US_MAX:
        raise ConfigError(
            f"enrich's timeout is {timeout!r}. Give one of up to an hour: a batch waits for it."
        )
    return CallPolicy(
        BATCH_ROWS,
        timeout_us / 1e6,
        whole_number(retries, 0, RETRIES_MAX, "enrich's retries"),
        whole_number(concurrency, 1, CONCURRENCY_MAX, "enrich's concurrency"),
        stops=stops,
    )


def _bound(
    function: LookupFunction | Lookup, columns: LookupColumns, policy: CallPolicy
) -> tuple[LookupFunction, int | None]:
    """Return the function of keys, and how many it can be given at most."""
    if isinstance(function, (HttpLookup, SqlLookup)):
        bound = function.bound(columns.key, columns.answer, policy.timeout_s)
        return bound, function.keys_per_call_max
    if not callable(function):
        raise ConfigError(
            f"enrich is given {function!r}. Give a function of a polars frame of keys, ms.http_lookup(…) or "
            "ms.sql_lookup(…)."
        )
    return function, None


def _keys_per_call(given: int | None, keys_max: int | None) -> int:
    if given is None:
        return keys_max or BATCH_ROWS
    rows = whole_number(given, 1, BATCH_ROWS_MAX, "enrich's batch_rows")
    if keys_max is not None and rows > keys_max:
        raise ConfigError(
            f"enrich's batch_rows is {rows}, and a GET asks for one key. Leave it out, or declare the lookup "
            'with method="POST".'
        )
    return rows
