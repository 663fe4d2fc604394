"""Plain envelopes of Debezium's, decoded in blocks: whole columns instead of record after record.

Plain is a record that is one row and nothing else: a write with all columns, whose key is as it was, or a deletion with
its key in ``before``. All others are left to :mod:`millstream.kernels.decode.debezium_records`, whose rules these are:

=======================  ==================================================================
left to it               why
=======================  ==================================================================
no object, an ``op``     a truncate, a message, a wrapped value, or an error
that is none of these
a value of another type  it may be encoded (:mod:`.debezium_values`), or an error
``unavailable``, or a    a column keeps its value
placeholder
another key in before    the row of that key goes
a transaction without    an error
id and total_order
a part of the key null   an error, or the record's key counts
a time out of range      the record's time counts
=======================  ==================================================================

So what a record becomes does not depend on which of the two decodes it.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.kernels.decode.captured import CAPTURED_COLUMNS
from millstream.kernels.decode.debezium_values import ColumnEncoding
from millstream.kernels.decode.fields import (
    Field,
    ListOf,
    Mask,
    Positions,
    Scalar,
    ScalarKind,
    StructOf,
    table_schema,
)
from millstream.kernels.decode.json_values import JsonDecoder

_FIRST_US, _END_US = -62_135_596_800_000_000, 253_402_300_800_000_000
_TOTAL_END = 1 << 62
_TEXT = Scalar("str")
_PLAIN_KINDS: frozenset[ScalarKind] = frozenset(
    ("int", "float", "bool", "str", "datetime", "date", "time", "bytes", "uuid")
)


# A text with its escapes, or what has neither quotes, commas nor brackets.
_JSON_SCALAR = r'(?:"(?:[^"\\]|\\.)*"|[^",{}\[\]]+)'


@dataclass(frozen=True)
class PlainKeys:
    """Which keys of records have certain members, all scalars, and no others, written as capture writes them.

    Of the others nothing is said: they may have, in another spelling.
    """

    names: tuple[str, ...]

    def fit(self, keys: pa.Array) -> Mask:
        """Return which keys have them, each once in any order."""
        fits = pc.fill_null(pc.match_substring_regex(keys, self._pattern), fill_value=False)
        for member in self._members if len(self.names) > 1 else ():
            fits = pc.and_(fits, pc.fill_null(pc.match_substring(keys, member), fill_value=False))
        return _mask(fits)

    @cached_property
    def _members(self) -> list[str]:
        return [f"{json.dumps(name, ensure_ascii=False)}:" for name in self.names]

    @cached_property
    def _pattern(self) -> str:
        member = f"(?:{'|'.join(map(re.escape, self._members))}){_JSON_SCALAR}"
        return rf"^\{{{member}(?:,{member}){{{len(self.names) - 1}}}\}}$"


def _optional(name: str, shape: Scalar | ListOf | StructOf) -> Field:
    return Field.of(name, shape, required=False)


@dataclass(frozen=True)
class PlainEnvelopes:
    """Decodes the plain ones among envelopes.

    Args:
        fields: Of the table.
        key: Those of its key.
        encodings: How columns are written, by name.
        transactions: Tombstones say nothing: each is a ``mark``.
        placeholder: What stands for a value that the connector did not get.
    """

    fields: tuple[Field, ...]
    key: tuple[Field, ...]
    encodings: tuple[tuple[str, ColumnEncoding], ...]
    transactions: bool
    placeholder: str

    def decode(self, records: pa.RecordBatch) -> tuple[pa.Table, Positions]:
        """Return the rows of the plain records, and where those are."""
        nothing = self._empty, np.empty(0, np.int64)
        if not self._can:
            return nothing
        values, there = records.column("value"), None
        if values.null_count:
            there = np.flatnonzero(_mask(values.is_valid()))
            values = values.drop_null()
        found = self._decoder.decode(values)
        parsed, good = found.table.combine_chunks(), found.good
        good = good if there is None else there[good]
        if not len(good):
            table, at = nothing
        else:
            plain = self._plain(parsed)
            if not plain.all():
                parsed, good = parsed.filter(pa.array(plain)), good[plain]
            table, at = self._rows(parsed, records.column("timestamp"), good), good
        if not self.transactions:
            return table, at
        return self._with_marks(records, table, at)

    @cached_property
    def _can(self) -> bool:
        """Whether all columns are values that JSON has as they are."""
        encodings = dict(self.encodings)
        for field in self.fields:
            shape = field.value_shape
            if not isinstance(shape, Scalar) or shape.zoned:
                return False
            encoding = encodings.get(field.name, ColumnEncoding())
            as_digits = shape.kind == "decimal" and encoding.decimals in ("string", "double")
            if not as_digits and shape.kind not in _PLAIN_KINDS:
                return False
        return len({field.key for field in self.fields}) == len(self.fields)

    @cached_property
    def _decoder(self) -> JsonDecoder:
        key = tuple(
            Field.of(one.name, one.value_shape, required=False, wire=one.wire) for one in self.key
        )
        transaction = (_optional("id", _TEXT), _optional("total_order", Scalar("int")))
        source = (_optional("ts_us", Scalar("int")), _optional("ts_ms", Scalar("int")))
        return JsonDecoder(
            (
                Field.of("op", _TEXT, required=True),
                _optional("before", StructOf(key)),
                _optional("after", StructOf(self.fields)),
                _optional("transaction", StructOf(transaction)),
                _optional("source", StructOf(source)),
                _optional("unavailable", ListOf(_TEXT, null=True)),
            )
        )

    # ── which are plain ─────────────────────────────────────────────────────────────────────

    def _plain(self, parsed: pa.Table) -> Mask:
        op = parsed.column("op")
        before, after = _struct(parsed, "before"), _struct(parsed, "after")
        writes = _mask(pc.is_in(op, pa.array(["c", "u", "r"]))) & _mask(after.is_valid())
        deletes = _mask(pc.equal(op, "d"))
        of_after = dict(zip((one.name for one in self.fields), after.flatten(), strict=True))
        has_key, has_old = np.ones(len(op), np.bool_), _mask(before.is_valid())
        same = np.ones(len(op), np.bool_)
        for one, old in zip(self.key, before.flatten(), strict=True):
            new = of_after[one.name]
            has_key &= _mask(new.is_valid())
            has_old &= _mask(old.is_valid())
            same &= _mask(pc.equal(old, new))
        kept = ~(_mask(pc.equal(op, "u")) & has_old) | same
        plain = (writes & has_key & kept & ~self._unavailable(of_after)) | (deletes & has_old)
        listed = _mask(pc.greater(pc.list_value_length(parsed.column("unavailable")), 0))
        return plain & ~listed & self._in_transaction(parsed) & self._timed(parsed)

    def _unavailable(self, columns: dict[str, pa.Array]) -> Mask:
        """Return where a column has the placeholder, as text or bytes."""
        text = self.placeholder
        in_map = json.dumps({text: text}, separators=(",", ":"), ensure_ascii=False)
        texts = pa.array([text, base64.b64encode(text.encode()).decode(), in_map])
        found = np.zeros(len(next(iter(columns.values()))), np.bool_)
        for column in columns.values():
            if pa.types.is_string(column.type):
                found |= _mask(pc.is_in(column, texts))
            elif pa.types.is_binary(column.type):
                found |= _mask(pc.equal(column, pa.scalar(text.encode())))
        return found

    def _in_transaction(self, parsed: pa.Table) -> Mask:
        """Return where there is no transaction, or one with an id and a place in it."""
        column = _struct(parsed, "transaction")
        name, total = column.flatten()
        inside = _mask(pc.and_(pc.greater_equal(total, 0), pc.less(total, _TOTAL_END)))
        return ~_mask(column.is_valid()) | (_mask(name.is_valid()) & inside)

    def _timed(self, parsed: pa.Table) -> Mask:
        """Return where the time of the change is not there, or in the years 1 to 9999."""
        us, ms = _struct(parsed, "source").flatten()
        us_there = _mask(us.is_valid())
        us_good = _mask(pc.and_(pc.greater_equal(us, _FIRST_US), pc.less(us, _END_US)))
        first, end = _FIRST_US // 1000, _END_US // 1000
        ms_good = _mask(pc.and_(pc.greater_equal(ms, first), pc.less(ms, end)))
        return np.where(us_there, us_good, ms_good | ~_mask(ms.is_valid()))

    # ── their rows ──────────────────────────────────────────────────────────────────────────

    def _rows(self, parsed: pa.Table, arrived: pa.Array, good: Positions) -> pa.Table:
        gone = pc.equal(parsed.column("op"), "d").combine_chunks()
        after, before = _struct(parsed, "after").flatten(), _struct(parsed, "before").flatten()
        old = dict(zip((one.name for one in self.key), before, strict=True))
        columns = []
        for one, value in zip(self.fields, after, strict=True):
            other = old.get(one.name, pa.scalar(None, value.type))
            columns.append(pc.if_else(gone, other, value) if pc.any(gone).as_py() else value)
        name, total = _struct(parsed, "transaction").flatten()
        us, ms = _struct(parsed, "source").flatten()
        made = pc.coalesce(us, pc.multiply(ms, 1000)).cast(pa.timestamp("us", "UTC"))
        committed = pc.coalesce(made, _times(arrived, good))
        kind = pc.if_else(gone, "delete", "upsert")
        hidden = _hidden(kind, name, total, committed, gone)
        return pa.Table.from_arrays([*columns, *hidden], schema=self._schema)

    def _with_marks(
        self, records: pa.RecordBatch, table: pa.Table, good: Positions
    ) -> tuple[pa.Table, Positions]:
        """Add a row for each tombstone."""
        values = records.column("value")
        if not values.null_count:
            return table, good
        at = np.flatnonzero(_mask(values.is_null()))
        count = len(at)
        hidden = _hidden(
            pa.repeat("mark", count),
            pa.nulls(count, pa.string()),
            pa.nulls(count, pa.int64()),
            _times(records.column("timestamp"), at),
            pa.repeat(pa.scalar(True), count),
        )
        columns = [pa.nulls(count, one.type) for one in self.fields]
        marks = pa.Table.from_arrays([*columns, *hidden], schema=self._schema)
        return pa.concat_tables([table, marks]), np.concatenate([good, at])

    @cached_property
    def _schema(self) -> pa.Schema:
        return pa.schema([*table_schema(self.fields), *CAPTURED_COLUMNS])

    @cached_property
    def _empty(self) -> pa.Table:
        return self._schema.empty_table()


def _hidden(
    kind: pa.Array, name: pa.Array, total: pa.Array, committed: pa.Array, gone: pa.Array
) -> list[pa.Array]:
    """Return the hidden columns, in their order: see :mod:`millstream.kernels.decode.captured`."""
    count = len(kind)
    nothing = pa.ListArray.from_arrays(
        pa.array(np.zeros(count + 1, np.int32)), pa.array([], pa.string())
    )
    extra = pa.repeat(pa.scalar(False), count)
    return [kind, nothing, name, total, committed, extra, gone]


def _times(arrived: pa.Array, good: Positions) -> pa.Array:
    return arrived.take(pa.array(good)).cast(pa.timestamp("us", "UTC"))


def _struct(table: pa.Table, name: str) -> pa.StructArray:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _mask(found: pa.Array | pa.ChunkedArray) -> Mask:
    mask: Mask = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
    return mask
