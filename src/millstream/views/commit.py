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

from millstream.errors import BadRecordError, CorruptionError
from millstream.kernels.dead_records import DEAD_KEY, DEAD_SCHEMA
from millstream.kernels.frames import (
    LANE,
    ORDER,
    PORT_DEAD,
    PORT_LEDGER,
    PORT_TIME,
    FrameRow,
    decode_frame,
    decode_message,
    visible,
)
from millstream.kernels.plan import JobPlan, SinkPlan
from millstream.kernels.routing import LEDGER_COUNTS, LEDGER_EXITS
from millstream.kernels.watermarks import UNSEEN
from millstream.views.schema import Fence, ViewChange, ViewSchema, kind_of
from millstream.views.store import ViewStore

DEAD_VIEW = "dead_letters"
_VALUE_SHOWN_BYTES = 80
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class BatchOutcome:
    """What the rows of a batch's last edge add up to. ``steps`` are in the order of the graph."""

    steps: tuple[str, ...] = ()
    changes: list[ViewChange] = field(default_factory=list)
    books: dict[str, Counter[str]] = field(default_factory=dict)
    position: dict[str, dict[str, int]] = field(default_factory=dict)  # topic → partition → next
    arrived_ms: dict[str, dict[str, int]] = field(default_factory=dict)  # topic → partition → ms
    watermarks: dict[str, int] = field(default_factory=dict)  # operator → microseconds
    facts: dict[str, dict[str, float]] = field(default_factory=dict)  # operator → name → largest
    state_bytes: int = 0
    forgotten: dict[str, int] = field(default_factory=dict)  # source → producers let go, in all

    def total(self, count: str) -> int:
        """Sum one count over all steps."""
        return sum(line[count] for line in self.books.values())

    def read(self, plan: JobPlan) -> int:
        """How many records the sources read."""
        names = [*(s.name for s in plan.sources), *(f.name for f in plan.frames)]
        return sum(self.books[name]["read"] for name in names if name in self.books)

    @property
    def watermark(self) -> datetime | None:
        """The least advanced operator's watermark; None before every partition has spoken."""
        low_us = min(self.watermarks.values(), default=UNSEEN)
        return None if low_us <= UNSEEN else _EPOCH + timedelta(microseconds=low_us)

    def ledger(self) -> list[dict[str, Any]]:
        """Give the ledger lines: per step, what was read, by which exit it left, what was made."""
        at = {step: number for number, step in enumerate(self.steps)}
        return [
            {"step": step, **{name: line[name] for name in LEDGER_COUNTS}}
            for step, line in sorted(self.books.items(), key=lambda item: at.get(item[0], len(at)))
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
    """Put the rows of a batch's last edge together.

    Raises:
        BadRecordError: a record is dead, and its topic is to stop the job then.
    """
    outcome = BatchOutcome(plan.steps)
    sinks = {sink.port: sink for sink in plan.sinks}
    frames: dict[int, list[pl.DataFrame]] = {}
    for row in rows:
        if row.port == PORT_LEDGER:
            _take_report(outcome, decode_message(row.frame))
        elif row.port != PORT_TIME:
            frames.setdefault(row.port, []).append(decode_frame(row.frame))
    for port, tables in sorted(frames.items()):
        name = DEAD_VIEW if port == PORT_DEAD else sinks[port].name
        table = pl.concat(tables, how="diagonal")
        if port == PORT_DEAD:
            _refuse_where_asked(plan, table)
        # Of rows that replace one another the last in the log shall stay.
        if places := [name for name in (LANE, ORDER) if name in table.columns]:
            table = table.sort(places, maintain_order=True)
        outcome.changes.append(ViewChange(name, table.select(visible(table.columns))))
    return outcome


def _refuse_where_asked(plan: JobPlan, dead: pl.DataFrame) -> None:
    """Raise for the first dead record of a topic that was declared with ``bad="stop"``."""
    stopping = [source.name for source in plan.sources if source.bad == "stop"]
    found = dead.filter(pl.col("step").is_in(stopping)).sort("topic", "partition", "offset")
    if found.height:
        first = found.row(0, named=True)
        seen = repr((first["value"] or b"")[:_VALUE_SHOWN_BYTES])
        raise BadRecordError(
            f"Record {first['topic']}/{first['partition']}/{first['offset']} cannot be decoded: "
            f"{first['reason']}. Its value begins with {seen}. Nothing of this batch was committed. "
            'Mend the schema of the topic, or declare it with bad="dead-letter" or "skip", and '
            "run again.",
            topic=first["topic"],
            partition=first["partition"],
            offset=first["offset"],
            reason=first["reason"],
        )


def _take_report(outcome: BatchOutcome, report: Mapping[str, Any]) -> None:
    for step, counts in report["books"].items():
        outcome.books.setdefault(step, Counter()).update(counts)
    for kind, kept in (("position", outcome.position), ("arrived_ms", outcome.arrived_ms)):
        for topic, numbers in report.get(kind, {}).items():
            known = kept.setdefault(topic, {})
            for partition, number in numbers.items():
                known[partition] = max(known.get(partition, 0), number)
    for operator, watermark_us in report.get("watermarks", {}).items():
        low_us = min(outcome.watermarks.get(operator, watermark_us), watermark_us)
        outcome.watermarks[operator] = low_us
    for operator, facts in report.get("facts", {}).items():
        known_facts = outcome.facts.setdefault(operator, {})
        for name, value in facts.items():
            known_facts[name] = max(known_facts.get(name, value), value)
    outcome.state_bytes += report.get("state_bytes", 0)
    outcome.forgotten.update(report.get("forgotten", {}))  # every bucket says the same


def view_schemas(plan: JobPlan) -> list[ViewSchema]:
    """Give the schemas of the plan's views, and of the view that keeps dead records."""
    dead = tuple(
        (name, kind_of(pl.DataFrame(schema=DEAD_SCHEMA).schema[name])) for name in DEAD_SCHEMA
    )
    return [
        *(_view_schema(sink) for sink in plan.sinks),
        ViewSchema(DEAD_VIEW, dead, DEAD_KEY),
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
