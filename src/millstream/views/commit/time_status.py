"""The part of a job's status about time: each operator's watermark, since when, and late events.

It is stored with every batch, so that :mod:`millstream.ops.why` can say what holds a window open and why
events are late, whether the job runs or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import polars as pl

from millstream.kernels.plan import JobPlan
from millstream.views.commit.committer import BatchResult


def time_status(
    before: Mapping[str, Any], plan: JobPlan, result: BatchResult, batch_id: int, at: datetime
) -> dict[str, Any]:
    """Return the part of the status about time, from that of the batch before.

    ``time`` is operator → its watermark and clocks, ``late`` is step → its late events in all, ``sources``
    is source → its topic, its watermark rule (``delay_us`` None: its events do not advance time), and the
    field of its event time (None: the record's timestamp; empty: an expression). Times are in
    microseconds since 1970.
    """
    return {
        "time": _time(before.get("time", {}), plan, result, batch_id, at),
        "late": _late(before.get("late", {}), result, batch_id),
        "sources": {
            source.name: {
                "topic": source.topic,
                "idle_ms": source.rule.idle_ms,
                "delay_us": source.rule.delay_us,
                "time": _field(source.time),
            }
            for source in plan.sources
        },
    }


def _field(time: pl.Expr | None) -> str | None:
    if time is None:
        return None
    return time.meta.output_name() if time.meta.is_column() else ""


def _time(
    before: Mapping[str, Any], plan: JobPlan, result: BatchResult, batch_id: int, at: datetime
) -> dict[str, Any]:
    times = dict(before)
    kernels = {one.kernel.name: one.kernel for stage in plan.stages for one in stage.operators}
    for operator, clocks in result.clocks.items():
        watermark_us = result.watermarks[operator]
        since = {"since": at.isoformat(), "since_batch_id": batch_id}
        known = before.get(operator)
        if known is not None and known["watermark_us"] == watermark_us:
            since = {name: known[name] for name in since}
        times[operator] = {
            "watermark_us": watermark_us,
            "lateness_us": getattr(kernels.get(operator), "lateness_us", 0),
            **since,
            "clocks": clocks,
        }
    return times


def _late(before: Mapping[str, Any], result: BatchResult, batch_id: int) -> dict[str, Any]:
    late = dict(before)
    for step, line in result.step_counts.items():
        if line["late"]:
            known = before.get(step, {"events": 0, "late_by_us_max": 0})
            missed_us = result.late_by_us.get(step, 0)
            late[step] = {
                "events": known["events"] + line["late"],
                "late_by_us_max": max(known["late_by_us_max"], missed_us),
                "batch_id": batch_id,
            }
    return late
