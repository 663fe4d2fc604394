"""What a job's status tells of time: where each operator stands, since when, and what was late.

It goes into the store with every batch, so that one can ask a job, running or not, what holds a window
open and why events are late (:mod:`millstream.ops.why`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import polars as pl

from millstream.kernels.plan import JobPlan
from millstream.views.commit.committer import BatchResult


def time_status(
    before: Mapping[str, Any], plan: JobPlan, outcome: BatchResult, batch_id: int, at: datetime
) -> dict[str, Any]:
    """Give the part of the status that tells of time, from that of the batch before.

    ``time`` is operator → where it stands, ``late`` is step → what came too late in all,
    ``sources`` is source → its topic, its rule (``delay_us`` None: its events do not move time), and the
    field that is its time (None: the record's own; empty: an expression). Times in microseconds since 1970.
    """
    return {
        "time": _time(before.get("time", {}), plan, outcome, batch_id, at),
        "late": _late(before.get("late", {}), outcome, batch_id),
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
    before: Mapping[str, Any], plan: JobPlan, outcome: BatchResult, batch_id: int, at: datetime
) -> dict[str, Any]:
    told = dict(before)
    kernels = {one.kernel.name: one.kernel for stage in plan.stages for one in stage.operators}
    for operator, clocks in outcome.clocks.items():
        watermark_us = outcome.watermarks[operator]
        since = {"since": at.isoformat(), "since_batch_id": batch_id}
        known = before.get(operator)
        if known is not None and known["watermark_us"] == watermark_us:
            since = {name: known[name] for name in since}
        told[operator] = {
            "watermark_us": watermark_us,
            "lateness_us": getattr(kernels.get(operator), "lateness_us", 0),
            **since,
            "clocks": clocks,
        }
    return told


def _late(before: Mapping[str, Any], outcome: BatchResult, batch_id: int) -> dict[str, Any]:
    told = dict(before)
    for step, line in outcome.step_counts.items():
        if line["late"]:
            known = before.get(step, {"events": 0, "late_by_us_max": 0})
            missed_us = outcome.late_by_us.get(step, 0)
            told[step] = {
                "events": known["events"] + line["late"],
                "late_by_us_max": max(known["late_by_us_max"], missed_us),
                "batch_id": batch_id,
            }
    return told
