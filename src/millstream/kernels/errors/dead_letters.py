"""Dead letters: the columns in which failed records are kept, and the policies of topics for them.

A dead letter holds the step that failed, the reason, and the whole record with its partition and offset, so
that it can be inspected, and replayed once the fault is corrected. After a shuffle it holds the row as JSON
instead of the record.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from millstream.kernels.arrays import Int64s

REASON_CHARS_MAX = 2_000
_FAR_APART = 2_000  # offsets between records that are read in two goes rather than one

BadRecordPolicy = Literal["dead-letter", "stop", "skip"]
"""``dead-letter``: kept, the stream continues. ``stop``: the job stops before it commits the batch.
``skip``: counted, not kept."""

FullRecordReader = Callable[[int, int], Iterable[pa.RecordBatch]]
"""Reads the columns offset, key, headers and value of the records with offsets in [start, end)."""

Headers = Sequence[tuple[str, bytes | None]]

DEAD_LETTER_SCHEMA: dict[str, Any] = {
    "topic": pl.String,
    "partition": pl.Int64,
    "offset": pl.Int64,
    "step": pl.String,
    "number": pl.Int64,  # distinguishes several dead letters of one record and step
    "reason": pl.String,
    "time": pl.Datetime("us", "UTC"),  # the record's own, in the log
    "key": pl.Binary,
    "headers": pl.String,  # JSON: see headers_text
    "value": pl.Binary,
    "replay": pl.Int64,  # the number of the replay that took it; null before any did
    "replayed_at": pl.Datetime("us", "UTC"),
}
DEAD_LETTER_KEY = ("topic", "partition", "offset", "step", "number")


def dead_letter_rows(
    records: pa.RecordBatch,
    dead: Sequence[tuple[int, str]],
    *,
    topic: str,
    partition: int,
    step: str,
    details: FullRecordReader | None,
) -> pl.DataFrame:
    """Return the rows that are kept of dead letters.

    Args:
        records: A batch with columns offset and timestamp, and with value unless they were decoded
            earlier.
        dead: Positions in it, each with its reason.
        details: Reads what ``records`` lacks: keys, headers, and values.
    """
    found = records.take(pa.array([at for at, _ in dead], pa.int64()))
    keys, headers, values = _details(found, details)
    if "value" in found.schema.names:
        values = found.column("value").to_pylist()
    return with_all_columns(
        pl.DataFrame(
            {
                "topic": [topic] * len(dead),
                "partition": [partition] * len(dead),
                "offset": pl.Series(found.column("offset")),
                "step": [step] * len(dead),
                "reason": [reason for _, reason in dead],
                "time": pl.Series(found.column("timestamp").cast(pa.timestamp("us", "UTC"))),
                "key": pl.Series(keys, dtype=pl.Binary),
                "headers": headers,
                "value": pl.Series(values, dtype=pl.Binary),
            }
        )
    )


def with_all_columns(rows: pl.DataFrame) -> pl.DataFrame:
    """Add to dead letters the columns that they lack: numbers where there are none, nulls for the rest.

    A reason may quote data or an error of the user's: a longer one than REASON_CHARS_MAX is cut.
    """
    reason = pl.col("reason")
    cut = pl.concat_str(reason.str.slice(0, REASON_CHARS_MAX - 1), pl.lit("…"))
    too_long = reason.str.len_chars() > REASON_CHARS_MAX
    rows = rows.with_columns(pl.when(too_long).then(cut).otherwise(reason).alias("reason"))
    if "number" not in rows.columns:
        number = pl.int_range(pl.len()).over("topic", "partition", "offset", "step")
        rows = rows.with_columns(number.alias("number"))
    missing = [
        pl.lit(None, dtype).alias(name)
        for name, dtype in DEAD_LETTER_SCHEMA.items()
        if name not in rows.columns
    ]
    return rows.with_columns(missing).select(
        pl.col(name).cast(dtype) for name, dtype in DEAD_LETTER_SCHEMA.items()
    )


def _details(
    found: pa.RecordBatch, details: FullRecordReader | None
) -> tuple[list[bytes | None], list[str], list[bytes | None]]:
    """Read keys, headers and values of records; the log is read again, as few records die."""
    offsets = found.column("offset").to_pylist()
    known: dict[int, tuple[bytes | None, str, bytes | None]] = {}
    if details is not None:
        wanted = found.column("offset")
        for group in group_near_offsets(np.unique(wanted.to_numpy())):
            for batch in details(int(group[0]), int(group[-1]) + 1):
                hits = batch.filter(pc.is_in(batch.column("offset"), wanted))
                for row in hits.to_pylist():
                    pairs = [(header["key"], header["value"]) for header in row["headers"] or ()]
                    known[row["offset"]] = row["key"], headers_text(pairs), row["value"]
    rows = [known.get(offset, (None, "[]", None)) for offset in offsets]
    keys, headers, values = zip(*rows, strict=True)
    return list(keys), list(headers), list(values)


def group_near_offsets(offsets: Int64s) -> Sequence[Int64s]:
    """Divide ascending offsets into groups, each of which is read in one go."""
    return np.split(offsets, np.flatnonzero(np.diff(offsets) > _FAR_APART) + 1)


def headers_text(headers: Headers) -> str:
    """Write headers as JSON: pairs of name and text; bytes that are no text as ``{"base64": …}``."""
    return json.dumps(
        [[name, text_or_base64(value)] for name, value in headers], ensure_ascii=False
    )


def headers_from_text(text: str) -> list[tuple[str, bytes | None]]:
    """Read back what :func:`headers_text` wrote, byte for byte."""
    return [
        (
            name,
            base64.b64decode(value["base64"])
            if isinstance(value, dict)
            else None
            if value is None
            else value.encode(),
        )
        for name, value in json.loads(text)
    ]


def text_or_base64(value: bytes | None) -> str | dict[str, str] | None:
    """Return bytes as JSON has them: text where they are UTF-8, else ``{"base64": …}``."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}
