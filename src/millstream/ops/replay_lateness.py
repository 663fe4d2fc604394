"""Counts the dead letters that may be late if they are appended again.

A replayed record is a new record with its old time. Windows that have closed since stay closed, as opening
one again would replace a result with a part of it. So possibly late records are counted before a replay, by
the app's last commit.

A record may be late if its time plus the operator's lateness is not above the operator's watermark or the
watermark of the record's own partition, which the replayed records before it advance. Whether it is late
depends on its windows, which end after it; a record that is not counted here is not late as of now. The time
is the field that is the event time of the topic's stream, or the record's timestamp. If the bytes do not
have the field, or an expression computes the time, the time is not known, and the record may be late.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import polars as pl

from millstream.client.json_fields import timestamp_ms_of
from millstream.kernels.time.watermarks import NO_WATERMARK
from millstream.record import to_timestamp_ms
from millstream.views.dead_letters import RECORD_ID
from millstream.views.state_store.store import StateStore


def count_maybe_late(store: StateStore, app: str, rows: pl.DataFrame) -> int:
    """Count the dead letters of ``rows`` that may be late when they are appended again now."""
    status = store.status(app)
    fields = _time_fields(status)
    limits: dict[tuple[str, int], int] = {}
    count = 0
    for row in rows.unique(RECORD_ID, keep="first", maintain_order=True).iter_rows(named=True):
        place = row["topic"], row["partition"]
        if place not in limits:
            limits[place] = _limit_us(status, *place)
        at_us = _time_us(row, fields.get(row["topic"], set()))
        count += limits[place] > NO_WATERMARK and (at_us is None or at_us <= limits[place])
        behind_us = _behind_us(status, row["topic"])
        if at_us is not None and behind_us is not None:  # it is appended before those that follow
            limits[place] = max(limits[place], at_us - behind_us)
    return count


def _behind_us(status: Mapping[str, Any], topic: str) -> int | None:
    """Return by how much later records may be behind a record without being late; None: by any time."""
    sources = status.get("sources", {})
    names = {name for name, one in sources.items() if one["topic"] == topic}
    delays = [sources[name]["delay_us"] for name in names]
    reading = [
        operator.get("lateness_us", 0)
        for operator in status.get("time", {}).values()
        if names & operator["clocks"].keys()
    ]
    known = [delay_us for delay_us in delays if delay_us is not None]
    return min(known) + min(reading) if known and reading else None


def _time_fields(status: Mapping[str, Any]) -> dict[str, set[str | None]]:
    """Return the event time fields of each topic: see :mod:`millstream.views.commit.time_status`."""
    fields: dict[str, set[str | None]] = {}
    for source in status.get("sources", {}).values():
        fields.setdefault(source["topic"], set()).add(source.get("time", ""))
    return fields


def _limit_us(status: Mapping[str, Any], topic: str, partition: int) -> int:
    """Return the time up to which events of a partition may be late at some operator."""
    names = [name for name, one in status.get("sources", {}).items() if one["topic"] == topic]
    limits = [NO_WATERMARK]
    for operator in status.get("time", {}).values():
        for name in names:
            clock = operator["clocks"].get(name)
            if clock is not None:
                watermark_us = clock["partitions"].get(str(partition), NO_WATERMARK)
                limits.append(
                    max(operator["watermark_us"], watermark_us) - operator.get("lateness_us", 0)
                )
    return max(limits)


def _time_us(row: Mapping[str, Any], fields: Collection[str | None]) -> int | None:
    """Return the earliest of a record's times; None if one of them is not known."""
    times = [to_timestamp_ms(row["time"]) if f is None else _field_ms(row, f) for f in fields]
    known = [at_ms for at_ms in times if at_ms is not None]
    return 1000 * min(known) if known and len(known) == len(times) else None


def _field_ms(row: Mapping[str, Any], field: str) -> int | None:
    try:
        return timestamp_ms_of(json.loads(row["value"] or b"").get(field))
    except (ValueError, AttributeError, RecursionError):
        return None  # it is dead: perhaps it is not even JSON
