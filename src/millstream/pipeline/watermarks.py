"""Event time, and how the watermark follows the events."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.kernels.column_types import column_type
from millstream.kernels.time.watermarks import TimeMarks, WatermarkRule
from millstream.pipeline.checks import type_of
from millstream.pipeline.expressions import Column, as_expression
from millstream.pipeline.schema import ColumnTypes

_PRODUCERS_MAX = 1_000
_PRODUCERS_LIMIT = 10_000
_ALIGN = "10 minutes"
_PARAMETER_NAMES = {"producer": "per"}  # the parameters that have other names in the rule


def watermark(
    delay: Duration | None = None,
    *,
    idle: Duration | None = "1 minute",
    idle_advance: bool = False,
    per: Column | None = None,
    ends: pl.Expr | None = None,
    producers_max: int | None = None,
    punctuation: Column | None = None,
    punctuation_only: pl.Expr | None = None,
    future_max: Duration | None = None,
    align: Duration | None = _ALIGN,
) -> WatermarkRule:
    """Declare how the watermark of a partition follows its records.

    Args:
        delay: How much disorder to expect: an event this much older than the newest one of its
            partition is still in time. None: only ``punctuation`` moves the watermark.
        idle: A partition that has had no new record for this long, while the job ran, no longer delays the
            others. None: it delays them without a limit, and results depend on the events alone. With
            ``per``, the same for a producer.
        idle_advance: While *all* partitions are idle the watermark advances with running time: it is the
            latest watermark of a partition plus the running time since the last record was read. So the
            last windows close although no records come any more. False: it holds, and they stay open. Later
            events may then be late, if they are older than this watermark: do not use it where time in the
            log runs slower than here. The time is recorded with each batch, so a repeated batch closes the
            same windows; but which events are late depends on when they were read. It costs a batch without
            records every tenth of ``idle`` (a second at least) while no records come. A run
            ``until="caught-up"`` does not wait for it.
        per: The column that says who sent the record: a device, an instance. Each producer has a
            watermark of its own, by which its events are judged, and the partition's is the
            minimum over them; so a producer whose clock or link lags loses nothing because others are
            ahead. A producer is active from its first record on, which is compared with the partition's
            watermark by then, until ``idle`` or ``ends`` removes it.
        ends: With ``per``: true for a producer's last record, such as
            ``pl.col("kind") == "bye"``. If it sends again, it is a new one.
        producers_max: With ``per``: how many producers of a partition are followed, up to 10,000;
            1,000 by default. Beyond it, at the end of a batch, the one seen longest ago is evicted
            and counted; then batch boundaries may matter.
        punctuation: A datetime, null on most records: the sender guarantees that nothing earlier
            comes after this record, in the partition (with ``per``: from this producer).
        punctuation_only: True for records that only carry a time, such as
            ``pl.col("kind") == "heartbeat"``. They move it, and are counted as filtered.
        future_max: An event (or a punctuation) whose time is later than the record's arrival in the
            log by more than this does not move the watermark and goes to the dead letters. One clock that is
            years ahead would otherwise make all other events late.
        align: While there is more to read than one batch holds, partitions that are further apart
            than this in event time are aligned, so that little state waits for the slowest. None: all are
            read in proportion to their records.

    Costs: ``delay`` alone costs next to nothing. With ``per``, rows are reduced per producer before
    the shuffle, every batch sends every bucket the producers' watermarks (some tens of bytes for
    each one seen; for n of them that begin in a batch, up to about n log n times that), and each
    operator keeps the list of those active, about 30 bytes and the name each, in each bucket and rewrites it
    with every batch. Use it for thousands of producers, not for users.

    Example::

        events.stream(time="occurred_at", watermark=ms.watermark("2 minutes", idle="30 seconds"))
    """
    if delay is None and punctuation is None:
        raise ConfigError(
            "watermark has neither a delay nor a punctuation, so nothing would move it. Give a "
            'delay such as "2 minutes", or punctuation=pl.col("…").'
        )
    if per is None and (ends is not None or producers_max is not None):
        raise ConfigError(
            "watermark has ends or producers_max, which are about producers. Say with per= which "
            "column names them."
        )
    if producers_max is not None and not 1 <= producers_max <= _PRODUCERS_LIMIT:
        raise ConfigError(
            f"watermark's producers_max is {producers_max}. Allowed are 1 to {_PRODUCERS_LIMIT:,}."
        )
    if idle_advance and (idle is None or delay is None):
        why = (
            "idle=None, so no partition is ever idle"
            if idle is None
            else "no delay, so only punctuation may move it"
        )
        raise ConfigError(
            f"watermark has idle_advance=True and {why}. Give both, as in "
            'watermark("2 minutes", idle="1 minute", idle_advance=True), or leave idle_advance out.'
        )
    marks = TimeMarks(
        punctuation=_mark(punctuation, "punctuation"),
        punctuation_only=_mark(punctuation_only, "punctuation_only"),
        producer=_mark(per, "per"),
        ends=_mark(ends, "ends"),
    )
    idle_us = _given_us(idle, "idle")
    return WatermarkRule(
        delay_us=_given_us(delay, "delay"),
        idle_ms=None if idle_us is None else idle_us // 1000,
        marks=marks,
        future_max_us=_given_us(future_max, "future_max"),
        align_us=_given_us(align, "align"),
        producers_max=None if per is None else producers_max or _PRODUCERS_MAX,
        idle_advance=idle_advance,
    )


def _given_us(duration: Duration | None, name: str) -> int | None:
    return None if duration is None else to_us(duration, what=f"watermark's {name}")


def _mark(column: Column | None, name: str) -> pl.Expr | None:
    return None if column is None else as_expression(column, what=f"watermark's {name}")


IN_ORDER = watermark("0 seconds")  # for streams without a watermark


@dataclass(frozen=True)
class ProcessingTime:
    """The time of arrival as the event time: see :func:`processing_time`."""

    settle_us: int
    align_us: int | None


def processing_time(
    *, settle: Duration = "1 second", align: Duration | None = _ALIGN
) -> ProcessingTime:
    """Take the time of arrival as the event time: ``topic.stream(time=ms.processing_time())``.

    It is the record's timestamp in the log, and never goes back within a partition. So a backlog, or the
    same log read again, falls into the same windows as when it came, without an artificial spike. The
    watermark follows the arrivals while there is something to read; in partitions that are read to their
    end it follows the clock of this machine, so the last window closes without another event. For that, a
    running job makes a batch a second, even without records; ``until="caught-up"`` does not wait for it.

    Args:
        settle: How far the watermark stays behind the clock: as long as it can take from a record's
            timestamp until it can be read. A record that takes longer is late, if its window
            has expired.
        align: See :func:`watermark`.
    """
    settle_us = to_us(settle, what="processing_time's settle")
    align_us = None if align is None else to_us(align, what="processing_time's align")
    return ProcessingTime(settle_us, align_us)


def processing_rule(time: ProcessingTime, given: WatermarkRule) -> WatermarkRule:
    """Return the rule of a stream over processing time."""
    if given is not IN_ORDER:
        raise ConfigError(
            "stream has time=processing_time() and a watermark. Arrivals are in order and bring "
            "their own watermark: leave watermark= out."
        )
    return WatermarkRule(delay_us=0, idle_ms=None, align_us=time.align_us, settle_us=time.settle_us)


def check_dataframe_watermark(rule: WatermarkRule, name: str) -> None:
    """Make sure that a watermark needs nothing that a Spark DataFrame lacks."""
    _check_rule(rule, name)
    given = [_PARAMETER_NAMES.get(mark, mark) for mark in rule.marks.present()]
    if rule.future_max_us is not None:
        given.append("future_max")
    if rule.idle_advance:
        given.append("idle_advance")
    if given:
        raise ConfigError(
            f"The watermark of {name!r} has {', '.join(given)}. The rows of a DataFrame have neither "
            "an order nor a time of arrival to go by: give a delay alone, or write the rows to a topic "
            "and read that."
        )


def _check_rule(rule: object, name: str) -> None:
    if not isinstance(rule, WatermarkRule):
        raise ConfigError(
            f"The watermark of {name!r} is {rule!r}. Give a rule, such as "
            'watermark=ms.watermark("10 seconds"), the time that events may come out of order.'
        )


def _names_a_producer(dtype: pl.DataType) -> bool:
    """Return whether values of a type have one spelling each: floats have two zeros, bytes may have none."""
    return column_type(dtype).key and not dtype.is_float() and dtype != pl.Binary


def check_topic_watermark(rule: WatermarkRule, columns: ColumnTypes, topic: str) -> None:
    """Make sure that a watermark's expressions fit the columns and give what they must."""
    _check_rule(rule, topic)
    for name, mark in rule.marks.present().items():
        word = _PARAMETER_NAMES.get(name, name)
        dtype = type_of(mark, columns, f"the watermark's {word} of {topic!r}")
        wrong = {
            "punctuation": not isinstance(dtype, pl.Datetime),
            "producer": not _names_a_producer(dtype),
        }.get(name, dtype != pl.Boolean)
        if wrong:
            wanted = {
                "punctuation": "a datetime",
                "producer": "text, a whole number or another exact value",
            }
            raise ConfigError(
                f"The watermark's {word} of {topic!r} is of type {dtype}. Give an expression that "
                f"gives {wanted.get(name, 'true or false')}."
            )
