"""Decoding record values into tables, and setting aside the ones that cannot be decoded.

JSON values are decoded as newline-delimited JSON, a whole batch at a time and only the fields
wanted. The decoder is strict: a number where a string is declared, a missing field that has to be
there, a value that is no JSON object: each makes that record *dead*, with its reason, while the
others go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

_BLOCK_BYTES = 8 << 20
_OPEN, _CLOSE = ord("{"), ord("}")


@dataclass(frozen=True)
class Field:
    """One field of a topic's values."""

    name: str
    type: pa.DataType
    required: bool


@dataclass(frozen=True)
class Decoded:
    """``table`` has a row for each good record; ``good`` says at which positions they stood."""

    table: pa.Table
    good: np.ndarray[tuple[int], np.dtype[np.int64]]
    dead: list[tuple[int, str]]  # position, reason


@dataclass(frozen=True)
class JsonDecoder:
    """Decodes JSON objects into the given fields; others are skipped over.

    Types: int64, float64, bool, string, timestamp (RFC 3339 text), decimal (number or text),
    lists and structs of these.
    """

    fields: tuple[Field, ...]

    def decode(self, values: pa.Array) -> Decoded:
        """Decode a batch of values (binary). Rows come in the order of the values."""
        try:
            table = self._parse(values)
        except (pa.ArrowInvalid, ValueError):
            return self._decode_in_parts(values)
        return self._check_required(table, np.arange(len(values)), [])

    def _decode_in_parts(self, values: pa.Array) -> Decoded:
        """Find the values that do not parse by halving: cheap while they are few."""
        tables: list[pa.Table] = []
        good: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        dead: list[tuple[int, str]] = []
        ranges = [(0, len(values))]
        while ranges:
            start, end = ranges.pop()
            try:
                tables.append(self._parse(values[start:end]))
                good.append(np.arange(start, end))
            except (pa.ArrowInvalid, ValueError) as error:
                if end - start == 1:
                    dead.append((start, _reason(error)))
                else:
                    middle = (start + end) // 2
                    ranges += [(middle, end), (start, middle)]
        table = pa.concat_tables(tables) if tables else self._schema().empty_table()
        positions = np.concatenate(good) if good else np.empty(0, np.int64)
        return self._check_required(table, positions, dead)

    def _check_required(
        self,
        table: pa.Table,
        good: np.ndarray[tuple[int], np.dtype[np.int64]],
        dead: list[tuple[int, str]],
    ) -> Decoded:
        for field in self.fields:
            column = table.column(field.name)
            if field.required and column.null_count:
                missing = pc.is_null(column).to_numpy()
                reason = f"field {field.name!r} is missing or null"
                dead = dead + [(int(at), reason) for at in good[missing]]
                table, good = table.filter(pa.array(~missing)), good[~missing]
        return Decoded(table, good, sorted(dead))

    def _schema(self) -> pa.Schema:
        return pa.schema([(field.name, field.type) for field in self.fields])

    def _parse(self, values: pa.Array) -> pa.Table:
        """Parse all values, or raise because of at least one of them.

        Each value must begin with ``{`` and end with ``}``. Then no object can span two lines (in
        JSON nothing may follow ``}`` that begins with ``{``, and no string holds a raw line
        break), each value gives at least one row, and as many rows as values means one each.
        """
        if not len(values):
            return self._schema().empty_table()
        if values.null_count:
            raise ValueError("the value is null")
        _check_braces(values)
        lines = pc.binary_join_element_wise(values, pa.scalar(b"\n"), pa.scalar(b""))
        offsets = np.frombuffer(lines.buffers()[1], np.int32)[lines.offset :]
        start, end = int(offsets[0]), int(offsets[len(lines)])
        table = pj.read_json(
            pa.BufferReader(lines.buffers()[2].slice(start, end - start)),
            read_options=pj.ReadOptions(
                use_threads=False, block_size=max(_BLOCK_BYTES, 2 * (end - start))
            ),
            parse_options=pj.ParseOptions(
                explicit_schema=self._schema(), unexpected_field_behavior="ignore"
            ),
        )
        if table.num_rows != len(values):
            raise ValueError("the value holds more than one JSON object")
        return table


def _check_braces(values: pa.Array) -> None:
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset :][: len(values) + 1]
    if np.diff(offsets).min() < len("{}"):
        raise ValueError("the value is no JSON object")
    data = np.frombuffer(values.buffers()[2], np.uint8)
    if (data[offsets[:-1]] != _OPEN).any() or (data[offsets[1:] - 1] != _CLOSE).any():
        raise ValueError("the value is no JSON object, or has space around it")


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()[0]
    return text.removesuffix(" in row 0").removeprefix("JSON parse error: ")
