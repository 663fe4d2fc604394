"""How many captured changes a second of CPU makes into a table: decoding, transactions, and the table, in one process.

    python benchmarks/captured_table.py [rows] [rounds]

The records are those that capture writes: of transactions of 100 changes, a third inserts, the others updates of rows
that there are, and deletions. CPU time of this process is counted, which polars and Arrow spend in threads of their own, too.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import pyarrow as pa

from millstream.capture.envelope import CaptureTopics, UnitRecords
from millstream.capture.units import CaptureUnit, TableChange, TableDefinition
from millstream.kernels.decode import Field
from millstream.kernels.decode.debezium_records import (
    TRANSACTION_FIELDS,
    DebeziumFormat,
    TransactionFormat,
)
from millstream.kernels.decode.records import RecordDecoder
from millstream.kernels.frames import DIFF, EXTRA, ORDER, TIME, polars_table
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.tables.captured_table import CapturedTable
from millstream.kernels.tables.transactions import Transactions
from millstream.kernels.time.log_order import log_order_of

TOPIC, TRANSACTIONS = "shop.public.orders", "shop.transaction"
FIELDS = tuple(
    Field(name, kind, required=required)
    for name, kind, required in (
        ("id", pa.int64(), True),
        ("customer", pa.int64(), True),
        ("cents", pa.int64(), True),
        ("status", pa.string(), True),
        ("note", pa.string(), False),
    )
)
PER_TRANSACTION = 100


def changes(rows: int, dice: random.Random) -> Iterator[list[TableChange]]:
    """Yield transactions."""
    known: dict[int, dict[str, Any]] = {}
    made = 0
    while made < rows:
        transaction = []
        for _ in range(PER_TRANSACTION):
            made += 1
            row = {
                "id": made,
                "customer": dice.randrange(10_000),
                "cents": dice.randrange(100_000),
                "status": dice.choice(["placed", "paid", "sent"]),
                "note": None if dice.random() < 0.5 else "leave it at the door",
            }
            kind = dice.random()
            if kind < 0.35 or not known:
                known[made] = row
                transaction.append(change("c", None, row))
                continue
            key = dice.choice(list(known)[-2000:]) if made % 7 == 0 else next(reversed(known))
            if kind < 0.9:
                known[key] = {**row, "id": key}
                transaction.append(change("u", {"id": key}, known[key]))
            else:
                known.pop(key)
                transaction.append(change("d", {"id": key}, None))
        yield transaction


def change(op: Any, before: dict[str, Any] | None, after: dict[str, Any] | None) -> TableChange:
    """Return a change of the table."""
    return TableChange("public", "orders", op, ("id",), before, after)


@dataclass
class Records:
    """The records of a topic."""

    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)

    def batch(self) -> pa.RecordBatch:
        """Return them as the log's reader does."""
        count = len(self.values)
        return pa.record_batch(
            {
                "offset": pa.array(range(count), pa.int64()),
                "timestamp": pa.array([1_767_225_600_000] * count, pa.timestamp("ms", "UTC")),
                "key": pa.array(self.keys, pa.binary()),
                "value": pa.array(self.values, pa.binary()),
            }
        )


def captured(rows: int) -> dict[str, pa.RecordBatch]:
    """Return the records that capture makes of so many changes, by topic."""
    maker = UnitRecords(CaptureTopics("shop"), "postgresql", lambda: 1_767_225_600_000)
    topics = {TOPIC: Records(), TRANSACTIONS: Records()}
    columns = tuple({"name": one.name, "type": "x"} for one in FIELDS)
    defined = TableDefinition("public", "orders", columns, ("id",))
    details = {"db": "shop", "txId": 7, "lsn": 26000056}
    for number, transaction in enumerate(changes(rows, random.Random(1))):
        contents = iter([defined, *transaction] if not number else transaction)
        unit = CaptureUnit("transaction", f"0/{number:X}", 1_767_225_600_000, contents, {}, details)
        for record in maker.records(unit):
            if record.topic in topics:
                topics[record.topic].keys.append(record.key)
                topics[record.topic].values.append(record.value)
    return {name: records.batch() for name, records in topics.items()}


def cpu_s() -> float:
    """Return the CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def decoded(decoder: RecordDecoder, batch: pa.RecordBatch, number: int) -> pl.DataFrame:
    """Decode records, and add what a source adds."""
    found = decoder.decode(batch, 0)
    assert not found.errors, found.errors[:1]
    first = log_order_of(number, 0, 0)
    order = pl.Series(ORDER, batch.column("offset").to_numpy()[found.good] + first)
    rows = polars_table(found.table).hstack([order])
    return rows.with_columns(pl.lit(0, pl.Int64).alias(TIME))


def apply(batches: dict[str, pa.RecordBatch], count: int) -> tuple[dict[str, float], int]:
    """Make the table, in ``count`` batches; return the CPU time of each part, and its rows."""
    spent = dict.fromkeys(("decode", "transactions", "table"), 0.0)
    values = DebeziumFormat(FIELDS[:1], transactions=True)
    rows_of, ends_of = (
        RecordDecoder(values, FIELDS),
        RecordDecoder(TransactionFormat(), TRANSACTION_FIELDS),
    )
    columns = tuple(
        (one.name, pl.Int64() if one.type == pa.int64() else pl.String()) for one in FIELDS
    )
    transactions = Transactions("order", ("public.orders",))
    table = CapturedTable("table", ("id",), columns, transactions=True)
    states = [OperatorState(MemoryRunStore()) for _ in range(2)]
    context, rows = BatchContext(0, 0), 0
    for number in range(count):
        parts = {}
        for topic, batch in batches.items():
            start, end = (batch.num_rows * at // count for at in (number, number + 1))
            parts[topic] = batch.slice(start, end - start)
        begun = cpu_s()
        changed = decoded(rows_of, parts[TOPIC], 0)
        ends = decoded(ends_of, parts[TRANSACTIONS], 1)
        at = cpu_s()
        spent["decode"] += at - begun
        inputs = {
            0: [transactions.prepare(ends, 0).table],
            1: [transactions.prepare(changed, 1).table],
        }
        said = transactions.process(states[0], inputs, context).rows
        begun = cpu_s()
        spent["transactions"] += begun - at
        inputs = {
            0: [table.prepare(changed, 0).table],
            1: [table.prepare(said, 1).table],
        }
        result = table.process(states[1], inputs, context)
        spent["table"] += cpu_s() - begun
        assert EXTRA in changed.columns
        if result.rows is not None:
            rows += int(result.rows[DIFF].cast(pl.Int64).sum())
    return spent, rows


def main(rows: int, rounds: int) -> None:
    """Measure, and print changes per CPU-second of each part and of all."""
    batches = captured(rows)
    size = batches[TOPIC].column("value").nbytes / rows
    print(
        f"{rows:,} changes of {size:.0f} bytes, in 5 batches; changes per CPU-second, median (least to most)"
    )
    found = [apply(batches, 5) for _ in range(rounds)]
    assert len({count for _, count in found}) == 1
    print(f"rows of the table: {found[0][1]:,}")
    for part in (*found[0][0], "all"):
        rates = [
            rows / (sum(spent.values()) if part == "all" else spent[part]) for spent, _ in found
        ]
        print(
            f"{part:13}{statistics.median(rates):12,.0f}  ({min(rates):,.0f} to {max(rates):,.0f})"
        )


if __name__ == "__main__":
    arguments = [int(text) for text in sys.argv[1:]]
    main(arguments[0] if arguments else 200_000, arguments[1] if len(arguments) > 1 else 5)
