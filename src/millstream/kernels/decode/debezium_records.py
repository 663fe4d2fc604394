"""Records in Debezium's envelope, decoded into the rows that they are for a table: see `captured.py`.

The value is a JSON object with ``before``, ``after``, ``op``, ``source`` and ``transaction``, alone or, with its
schema, as ``payload``. The key is a JSON object of the key's columns, likewise, or there is none.

What concerns several keys at once needs one order of all records: a truncate, a change of the key, a column that
is carried over from another key. There is one where the topic has one partition, or transactions are known; else
such a record is a dead letter.

Source: Debezium 3.6, "Data change events"; the key change as delete and create, and ``carry_from``, are those of
``unavailable`` in a superset of the envelope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.kernels.decode.captured import CapturedRow, captured_table
from millstream.kernels.decode.debezium_columns import PlainEnvelopes, PlainKeys
from millstream.kernels.decode.debezium_values import (
    PLACEHOLDER,
    ColumnEncoding,
    from_debezium,
    is_unavailable,
)
from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import Decoded, Decoder, Field, Positions
from millstream.kernels.decode.row_decoder import merged
from millstream.kernels.decode.row_reader import RowReader, parse_json

_OPS = ("c", "u", "d", "r", "t", "m")
_WRITES = ("c", "u", "r")
_WRAPPED = {"schema", "payload"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_US, _END_US = -62_135_596_800_000_000, 253_402_300_800_000_000
_ONE_ORDER = "and several partitions have no order; have one, or say debezium(transactions=…)"


@dataclass(frozen=True)
class DebeziumFormat:
    """Debezium's envelope around JSON. It is sent to the workers within the plan.

    ``key`` are the fields of the key. ``encodings`` say how columns are written, by name. ``transactions``:
    the records of all partitions have an order, by their transactions. ``placeholder`` stands for a value that
    the connector did not get. ``strict_key``: the record's key has these fields and no others; else it is an error, as
    rows that the source tells apart would be one.
    """

    key: tuple[Field, ...]
    encodings: tuple[tuple[str, ColumnEncoding], ...] = ()
    transactions: bool = False
    placeholder: str = PLACEHOLDER
    strict_key: bool = False

    def decoder(self, fields: tuple[Field, ...]) -> Decoder:
        raise NotImplementedError("the rows of an envelope are made of whole records")


@dataclass
class _Envelope:
    """A value, as far as it is understood: what is known of it goes on even if the rest is wrong."""

    payload: Mapping[str, Any]
    schema: Mapping[str, Any] | None
    transaction: str | None = None
    total: int | None = None


@dataclass
class DebeziumDecoder:
    """Decodes records, and makes one row or more of each."""

    format: DebeziumFormat
    fields: tuple[Field, ...]

    def decode(self, records: pa.RecordBatch, *, several_partitions: bool) -> Decoded:
        """Decode records with the columns key, value and timestamp. Rows come in their order.

        A record with an error may also have rows, which are ``__extra``.
        """
        plain, at = self._plain.decode(records)
        if self.format.strict_key:
            fits = self._plain_keys.fit(records.column("key"))[at]
            if not fits.all():
                plain, at = plain.filter(pa.array(fits)), at[fits]
        if len(at) == records.num_rows and (np.diff(at) > 0).all():
            return Decoded(plain, at, [])
        left = np.ones(records.num_rows, np.bool_)
        left[at] = False
        ordered = self.format.transactions or not several_partitions
        return merged([(plain, at)], self._by_record(records, np.flatnonzero(left), ordered))

    @cached_property
    def _plain_keys(self) -> PlainKeys:
        return PlainKeys(tuple(one.key for one in self.format.key))

    @cached_property
    def _plain(self) -> PlainEnvelopes:
        form = self.format
        return PlainEnvelopes(
            self.fields, form.key, form.encodings, form.transactions, form.placeholder
        )

    def _by_record(self, records: pa.RecordBatch, left: Positions, ordered: bool) -> Decoded:  # noqa: FBT001 - private
        """Decode the records at some positions, one after the other."""
        rows: list[CapturedRow] = []
        good: list[int] = []
        errors: list[tuple[int, str]] = []
        chosen = records.take(pa.array(left)) if len(left) < records.num_rows else records
        keys, values = chosen.column("key").to_pylist(), chosen.column("value").to_pylist()
        times = chosen.column("timestamp").cast(pa.timestamp("us", "UTC")).to_pylist()
        for at, key, value, time in zip(left.tolist(), keys, values, times, strict=True):
            made, reason = _Record(self, key, value, ordered=ordered).rows()
            if reason is not None:
                errors.append((at, reason))
            for row in made:
                row.committed = row.committed or time
            rows += made
            good += [at] * len(made)
        return Decoded(captured_table(rows, self.fields), np.array(good, np.int64), errors)

    def read(self, one: Field, value: Any, schema: Mapping[str, Any] | None) -> Any:
        """Read the value of a field, of which ``value`` may be a mapping of one member, or none.

        Raises:
            DecodeError: it does not fit.
        """
        encoding = self._encodings.get(one.name, ColumnEncoding()).by_schema(schema)
        member: dict[str, Any] = {}
        if one.key in value:
            found = value[one.key]
            try:
                member[one.key] = (
                    None if found is None else from_debezium(one.value_shape, found, encoding)
                )
            except DecodeError as error:
                raise error.within(one.key) from None
        return RowReader().read((one,), member)[one.name]

    @cached_property
    def _encodings(self) -> dict[str, ColumnEncoding]:
        return dict(self.format.encodings)


@dataclass
class _Record:
    """One record on its way to rows."""

    decoder: DebeziumDecoder
    key: bytes | None
    value: bytes | None
    ordered: bool

    def rows(self) -> tuple[list[CapturedRow], str | None]:
        """Return the rows, and why the record is a dead letter, if it is one."""
        try:
            envelope = self._envelope()
        except DecodeError as error:
            return self._of_dead(None), error.reason()
        try:
            rows = self._deletion() if envelope is None else self._rows(envelope)
        except DecodeError as error:
            return self._of_dead(envelope), error.reason()
        if envelope is not None:
            self._stamp(rows, envelope)
        return rows, None

    def _envelope(self) -> _Envelope | None:
        """Parse the value; None is a tombstone."""
        payload, schema = _unwrapped(None if self.value is None else parse_json(self.value))
        if payload is None:
            return None
        if not isinstance(payload, Mapping):
            raise DecodeError("the value is no object, so no envelope of Debezium's")
        envelope = _Envelope(payload, schema)
        transaction = payload.get("transaction")
        if isinstance(transaction, Mapping):
            name, total = transaction.get("id"), transaction.get("total_order")
            known = isinstance(name, str) and not isinstance(total, bool)
            if known and isinstance(total, int) and 0 <= total < 1 << 62:
                envelope.transaction, envelope.total = name, total
        return envelope

    def _stamp(self, rows: list[CapturedRow], envelope: _Envelope) -> None:
        committed = _committed(envelope.payload.get("source"))
        for row in rows:
            row.transaction, row.total = envelope.transaction, envelope.total
            row.committed = committed

    def _of_dead(self, envelope: _Envelope | None) -> list[CapturedRow]:
        """Return what goes on of a record that is a dead letter: its key, or that it was in a transaction."""
        key = self._key_at_all(envelope)
        if key is None and (envelope is None or envelope.transaction is None):
            return []
        row = CapturedRow("mark" if key is None else "spoil", key or {}, extra=True)
        if envelope is not None:
            self._stamp([row], envelope)
        return [row]

    def _key_at_all(self, envelope: _Envelope | None) -> dict[str, Any] | None:
        """Return the key of the row that a dead record is about; None where nothing names it."""
        payload = {} if envelope is None else envelope.payload
        for side in ("after", "before"):
            try:
                return self._key_in(payload.get(side), envelope)
            except DecodeError:
                continue
        try:
            return self._record_key()
        except DecodeError:
            return None

    def _deletion(self) -> list[CapturedRow]:
        """Return the row of a tombstone: it deletes again what is deleted, and says nothing without a key.

        With transactions it never says anything: one that was sent again would delete a later row.
        """
        if self.key is None or self.decoder.format.transactions:
            return [CapturedRow("mark")]
        return [CapturedRow("delete", self._record_key())]

    def _rows(self, envelope: _Envelope) -> list[CapturedRow]:
        payload = envelope.payload
        unnamed = payload.get("transaction") is not None and envelope.transaction is None
        if unnamed and self.decoder.format.transactions:
            raise DecodeError("the transaction has no id and total_order")
        op = payload.get("op")
        if op not in _OPS:
            seen = "has no op" if "op" not in payload else f"has the op {op!r}"
            raise DecodeError(f"the value {seen}; Debezium's envelope has {', '.join(_OPS)}")
        if op == "m":
            return [CapturedRow("mark")]
        if op == "t":
            self._require_order("a truncate,")
            return [CapturedRow("truncate")]
        if self.decoder.format.strict_key:
            self._check_key()
        if op in _WRITES:
            return self._written(envelope)
        try:
            return [CapturedRow("delete", self._key_in(payload.get("before"), envelope))]
        except DecodeError:
            if self.key is None:
                raise
            return [CapturedRow("delete", self._record_key())]

    def _require_order(self, what: str) -> None:
        if not self.ordered:
            raise DecodeError(f"{what} {_ONE_ORDER}")

    # ── c, u, r ─────────────────────────────────────────────────────────────────────────────

    def _written(self, envelope: _Envelope) -> list[CapturedRow]:
        after = envelope.payload.get("after")
        key = self._key_in(after, envelope, "after")
        assert isinstance(after, Mapping), "it has a key"
        unavailable = self._unavailable(envelope, after)
        schemas = _schemas_of(envelope.schema, "after")
        values = {
            one.name: self.decoder.read(one, after, schemas.get(one.key))
            for one in self.decoder.fields
            if one.name not in unavailable
        }
        rows = [CapturedRow("upsert", values, sorted(unavailable))]
        moved = self._moved(envelope, key)
        if moved is not None:
            self._require_order("a change of the key,")
            return [CapturedRow("move", moved, extra=True), *rows]
        carried = envelope.payload.get("carry_from")
        if unavailable and carried is not None and self.ordered:
            from_key = self._key_in(carried, envelope, "carry_from")
            return [CapturedRow("carry", from_key, extra=True), *rows]
        return rows

    def _unavailable(self, envelope: _Envelope, after: Mapping[str, Any]) -> set[str]:
        """Return the columns whose values are not in the record."""
        listed = envelope.payload.get("unavailable")
        listed = [] if listed is None else listed
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise DecodeError("unavailable is no list of names")
        placeholder = self.decoder.format.placeholder
        return {
            one.name
            for one in self.decoder.fields
            if one not in self.decoder.format.key
            and (one.key in listed or is_unavailable(after.get(one.key), placeholder))
        }

    def _moved(self, envelope: _Envelope, key: dict[str, Any]) -> dict[str, Any] | None:
        """Return the key before, if an update changed it."""
        before = envelope.payload.get("before")
        if envelope.payload.get("op") != "u" or not isinstance(before, Mapping):
            return None
        if any(before.get(one.key) is None for one in self.decoder.format.key):
            return None
        found = self._key_in(before, envelope, "before")
        return None if found == key else found

    # ── keys ────────────────────────────────────────────────────────────────────────────────

    def _key_in(
        self, side: Any, envelope: _Envelope | None, what: str = "before"
    ) -> dict[str, Any]:
        """Read the key's columns of a row, or of a key."""
        if not isinstance(side, Mapping):
            raise DecodeError(f"the value has no {what}, and its op must have one")
        schema = None if envelope is None else envelope.schema
        return self._key_of(side, _schemas_of(schema, "after"))

    def _check_key(self) -> None:
        """Return if the record's key has the columns of the declared key.

        Raises:
            DecodeError: it has others, or there is none.
        """
        declared = [one.key for one in self.decoder.format.key]
        names = [] if self.key is None else list(self._parsed_key()[0])
        if set(names) != set(declared):
            raise DecodeError(
                f"the key of the table in its database is {', '.join(names) or 'none'}, and it is declared with the key "
                f"{', '.join(declared)}; rows would replace each other. Declare it with the database's key, in an app of "
                "another name"
            )

    def _parsed_key(self) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """Return the record's key, which is there, and its schema."""
        assert self.key is not None
        try:
            payload, schema = _unwrapped(parse_json(self.key))
        except DecodeError as error:
            raise DecodeError(error.what.replace("the value", "the key")) from None
        if not isinstance(payload, Mapping):
            raise DecodeError("the key is no JSON object")
        return payload, schema

    def _record_key(self) -> dict[str, Any]:
        """Read the record's key."""
        if self.key is None:
            raise DecodeError("a deletion has no key")
        payload, schema = self._parsed_key()
        return self._key_of(payload, _by_name(schema))

    def _key_of(
        self, side: Mapping[str, Any], schemas: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        found = {}
        for one in self.decoder.format.key:
            if side.get(one.key) is None:
                raise DecodeError(
                    "is missing, or null, and is part of the key", shown=False
                ).within(one.key)
            found[one.name] = self.decoder.read(one, side, schemas.get(one.key))
        return found


def _unwrapped(value: Any) -> tuple[Any, Mapping[str, Any] | None]:
    """Return what is in a value with its schema, and the schema; else the value as it is."""
    if isinstance(value, Mapping) and set(value) == _WRAPPED:
        schema = value["schema"]
        return value["payload"], schema if isinstance(schema, Mapping) else None
    return value, None


def _by_name(schema: Any) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of a struct's members, by name."""
    members = schema.get("fields") if isinstance(schema, Mapping) else None
    if not isinstance(members, list):
        return {}
    return {
        one["field"]: one
        for one in members
        if isinstance(one, Mapping) and isinstance(one.get("field"), str)
    }


def _schemas_of(schema: Mapping[str, Any] | None, side: str) -> dict[str, Mapping[str, Any]]:
    return _by_name(_by_name(schema).get(side))


def _committed(source: Any) -> datetime | None:
    """Return when a change was made; None where its source does not say so, or not in the years 1 to 9999."""
    if not isinstance(source, Mapping):
        return None
    for name, factor in (("ts_us", 1), ("ts_ms", 1000)):
        at = source.get(name)
        if isinstance(at, int) and not isinstance(at, bool):
            us = at * factor
            return _EPOCH + timedelta(microseconds=us) if _FIRST_US <= us < _END_US else None
    return None


# ── the topic of transactions ───────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TransactionFormat:
    """The records of a connector's topic of transactions: status, id, and how many changes of which tables."""

    def decoder(self, fields: tuple[Field, ...]) -> Decoder:
        return TransactionDecoder(fields)


TRANSACTION_FIELDS = (
    Field("status", pa.string(), required=True),
    Field("id", pa.string(), required=True),
    Field(
        "counts", pa.list_(pa.struct([("name", pa.string()), ("n", pa.int64())])), required=False
    ),
)


@dataclass(frozen=True)
class TransactionDecoder:
    """Decodes BEGIN and END. A tombstone is none of them."""

    fields: tuple[Field, ...]

    def decode(self, values: pa.Array) -> Decoded:
        rows: list[dict[str, Any]] = []
        good: list[int] = []
        errors: list[tuple[int, str]] = []
        for at, value in enumerate(values.to_pylist()):
            try:
                rows.append(_boundary(_unwrapped(parse_json(value))[0]))
                good.append(at)
            except DecodeError as error:
                errors.append((at, error.reason()))
        columns = [pa.array([row[one.name] for row in rows], one.type) for one in self.fields]
        table = pa.table(columns, schema=pa.schema([(f.name, f.type) for f in self.fields]))
        return Decoded(table, np.array(good, np.int64), errors)


def _boundary(found: Any) -> dict[str, Any]:
    """Read one BEGIN or END."""
    if not isinstance(found, Mapping):
        raise DecodeError("the value is no object")
    status, name = found.get("status"), found.get("id")
    if status not in ("BEGIN", "END") or not isinstance(name, str):
        raise DecodeError("the value is no BEGIN or END of a transaction with an id")
    if status == "BEGIN":
        return {"status": status, "id": name, "counts": []}
    listed = found.get("data_collections")
    if listed is None and found.get("event_count") == 0:
        listed = []
    if not isinstance(listed, list):
        raise DecodeError("the END of a transaction has no data_collections")
    counts = []
    for one in listed:
        collection = one.get("data_collection") if isinstance(one, Mapping) else None
        count = one.get("event_count") if isinstance(one, Mapping) else None
        if not isinstance(collection, str) or isinstance(count, bool) or not isinstance(count, int):
            raise DecodeError(
                "the END of a transaction has a data_collection without name and count"
            )
        counts.append({"name": collection, "n": count})
    return {"status": status, "id": name, "counts": counts}
