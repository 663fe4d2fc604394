"""The one commit: all that a batch gives, put together and handed to the store in one piece.

The frames of every sink become view changes, the books of every step become ledger lines that must
balance, and what was read becomes the position; then one transaction takes them all. A repeated
batch finds its fence and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from millstream.errors import CorruptionError
from millstream.kernels.frames import (
    LANE,
    PORT_DEAD,
    PORT_LEDGER,
    PORT_TIME,
    FrameRow,
    decode_frame,
    decode_message,
    visible,
)
from millstream.kernels.ingest import DEAD_SCHEMA
from millstream.kernels.plan import JobPlan, SinkPlan
from millstream.kernels.routing import LEDGER_EXITS, LEDGER_NOTES
from millstream.kernels.watermarks import UNSEEN
from millstream.views.schema import Fence, ViewChange, ViewSchema, kind_of
from millstream.views.store import ViewStore

DEAD_VIEW = "dead_letters"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class BatchOutcome:
    """What the rows of a batch's last edge add up to."""

    changes: list[ViewChange] = field(default_factory=list)
    books: dict[str, Counter[str]] = field(default_factory=dict)
    position: dict[str, dict[str, int]] = field(default_factory=dict)  # topic → partition → next
    watermarks: dict[str, int] = field(default_factory=dict)  # operator → microseconds
    state_bytes: int = 0

    def total(self, count: str) -> int:
        """Sum one count over all steps."""
        return sum(line[count] for line in self.books.values())

    def read(self, plan: JobPlan) -> int:
        """How many records the sources read."""
        return sum(self.books[s.name]["read"] for s in plan.sources if s.name in self.books)

    @property
    def watermark(self) -> datetime | None:
        """The least advanced operator's watermark; None before every partition has spoken."""
        low_us = min(self.watermarks.values(), default=UNSEEN)
        return None if low_us <= UNSEEN else _EPOCH + timedelta(microseconds=low_us)

    def ledger(self) -> list[dict[str, Any]]:
        """Give the ledger lines: per step, what was read, by which exit it left, and the notes."""
        told = (*LEDGER_EXITS, *LEDGER_NOTES)
        return [
            {"step": step, "read": line["read"], **{name: line[name] for name in told}}
            for step, line in sorted(self.books.items())
        ]

    def check_balance(self) -> None:
        """Make sure that at every step what was read is what left, by all exits together.

        Raises:
            CorruptionError: it is not; the batch must not be committed.
        """
        for line in self.ledger():
            exits = sum(line[name] for name in LEDGER_EXITS)
            if exits != line["read"]:
                raise CorruptionError(
                    f"The books of step {line['step']!r} do not balance: it read {line['read']} "
                    f"events and accounts for {exits} ({line}). Nothing of this batch was "
                    "committed. Please report this; the log still holds every event."
                )


def gather(plan: JobPlan, rows: Iterable[FrameRow]) -> BatchOutcome:
    """Put the rows of a batch's last edge together."""
    outcome = BatchOutcome()
    sinks = {sink.port: sink for sink in plan.sinks}
    frames: dict[int, list[pl.DataFrame]] = {}
    for row in rows:
        if row.port == PORT_LEDGER:
            _take_report(outcome, decode_message(row.frame))
        elif row.port != PORT_TIME:
            frames.setdefault(row.port, []).append(decode_frame(row.frame))
    for port, tables in sorted(frames.items()):
        name = DEAD_VIEW if port == PORT_DEAD else sinks[port].name
        table = pl.concat(tables)
        if LANE in table.columns:  # of rows that replace one another the last in the log shall stay
            table = table.sort(LANE, maintain_order=True)
        outcome.changes.append(ViewChange(name, table.select(visible(table.columns))))
    return outcome


def _take_report(outcome: BatchOutcome, report: Mapping[str, Any]) -> None:
    for step, counts in report["books"].items():
        outcome.books.setdefault(step, Counter()).update(counts)
    for topic, offsets in report.get("position", {}).items():
        known = outcome.position.setdefault(topic, {})
        for partition, offset in offsets.items():
            known[partition] = max(known.get(partition, 0), offset)
    for operator, watermark_us in report.get("watermarks", {}).items():
        low_us = min(outcome.watermarks.get(operator, watermark_us), watermark_us)
        outcome.watermarks[operator] = low_us
    outcome.state_bytes += report.get("state_bytes", 0)


def view_schemas(plan: JobPlan) -> list[ViewSchema]:
    """Give the schemas of the plan's views, and of the view that keeps dead records."""
    dead = tuple(
        (name, kind_of(pl.DataFrame(schema=DEAD_SCHEMA).schema[name])) for name in DEAD_SCHEMA
    )
    return [
        *(_view_schema(sink) for sink in plan.sinks),
        ViewSchema(DEAD_VIEW, dead, ("topic", "partition", "offset")),
    ]


def _view_schema(sink: SinkPlan) -> ViewSchema:
    columns = tuple((name, kind_of(dtype)) for name, dtype in sink.schema)
    return ViewSchema(sink.name, columns, sink.key)


def commit(
    store: ViewStore, fence: Fence, outcome: BatchOutcome, status: Mapping[str, Any]
) -> bool:
    """Commit a batch, whole. False when it was committed before; then nothing changes.

    Raises:
        CorruptionError: the books do not balance; nothing was committed.
        FencedError: a newer run of the app has taken over.
    """
    outcome.check_balance()
    return store.commit(
        fence,
        outcome.changes,
        position=outcome.position,
        ledger=[{"batch_id": fence.batch_id, **line} for line in outcome.ledger()],
        status=status,
    )
