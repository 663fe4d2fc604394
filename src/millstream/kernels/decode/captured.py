"""The rows that records of change data capture become: what each does to its table.

===========  =====================================================================================
kind         the row
===========  =====================================================================================
``upsert``   is the row of its key, but for the columns in ``__unavailable``, which keep their value
``delete``   has only its key, whose row goes
``truncate`` has nothing: all rows before it go
``move``     as ``delete``; the next row of the same record takes unavailable values from what goes
``carry``    has only a key: the next row of the same record takes unavailable values from its row
``spoil``    has only the key of a record that could not be read: what its row has may be outdated
``mark``     has nothing, and changes nothing; it counts as a record of its transaction
===========  =====================================================================================

All but the first are ``__deleted``, too: their columns are null but for those of the key. A record that became a
dead letter, but names its key or its transaction, also becomes a row, which is ``__extra``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import pyarrow as pa

from millstream.kernels.decode.fields import Field, table_schema
from millstream.kernels.frames import DELETED, EXTRA, KIND

CapturedKind = Literal["upsert", "delete", "truncate", "move", "carry", "spoil", "mark"]

UNAVAILABLE = "__unavailable"  # List(String): the columns whose values the record leaves out
TRANSACTION = "__transaction"  # String: the id of the record's transaction, if it has one
TOTAL = "__total"  # Int64: the place of the record in its transaction
COMMITTED = "__committed"  # Datetime: when the change was made, according to the source

CAPTURED_COLUMNS = pa.schema(
    [
        (KIND, pa.string()),
        (UNAVAILABLE, pa.list_(pa.string())),
        (TRANSACTION, pa.string()),
        (TOTAL, pa.int64()),
        (COMMITTED, pa.timestamp("us", "UTC")),
        (EXTRA, pa.bool_()),
        (DELETED, pa.bool_()),
    ]
)


@dataclass
class CapturedRow:
    """One row. ``values`` has those that are there, by column."""

    kind: CapturedKind
    values: Mapping[str, Any] = field(default_factory=dict)
    unavailable: Sequence[str] = ()
    transaction: str | None = None
    total: int | None = None
    committed: datetime | None = None
    extra: bool = False


def captured_table(rows: Sequence[CapturedRow], fields: tuple[Field, ...]) -> pa.Table:
    """Return rows as columns: those of the fields, and the hidden ones."""
    columns = [pa.array([row.values.get(one.name) for row in rows], one.type) for one in fields]
    hidden = [
        [row.kind for row in rows],
        [list(row.unavailable) for row in rows],
        [row.transaction for row in rows],
        [row.total for row in rows],
        [row.committed for row in rows],
        [row.extra for row in rows],
        [row.kind != "upsert" for row in rows],
    ]
    columns += [
        pa.array(values, of.type) for values, of in zip(hidden, CAPTURED_COLUMNS, strict=True)
    ]
    schema = pa.schema([*table_schema(fields), *CAPTURED_COLUMNS])
    return pa.Table.from_arrays(columns, schema=schema)
