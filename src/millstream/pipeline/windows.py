"""Windows as a program declares them, and the triggers of their panes.

:func:`tumbling`, :func:`hopping`, :func:`cumulating` and :func:`calendar` divide time; :func:`session`,
:func:`sliding` and :func:`count_window` depend on the events.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import polars as pl

from millstream.choices import choose, did_you_mean
from millstream.durations import Duration, format_us, to_us, unit_named
from millstream.errors import ConfigError
from millstream.kernels.frames import HIDDEN_PREFIX
from millstream.kernels.sessions.spans import SessionWindow
from millstream.kernels.trigger import AfterCount, AfterTime, EachBatch, Once, Trigger
from millstream.kernels.windows.assigners import Cumulating, Hopping, Tumbling
from millstream.kernels.windows.calendar_windows import Calendar
from millstream.kernels.windows.count_windows import CountWindow
from millstream.kernels.windows.sliding_windows import RankedSliding, Sliding
from millstream.pipeline.checks import positive_us, whole_number
from millstream.pipeline.expressions import is_pattern

Weekday = Literal["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
EventWindow = SessionWindow | Sliding | CountWindow
TriggerSpec = Duration | AfterCount | None  # "each" and "batch" are strings, as durations are

_WEEKDAYS = get_args(Weekday)
_SPAN = re.compile(r"\s*(\d+)\s*([a-zA-Z]+)\s*")
_MINUTES = {"minute": 1, "hour": 60}
_MONTHS = {"month": 1, "quarter": 3, "year": 12}


def tumbling(size: Duration, *, offset: Duration = "0 seconds") -> Tumbling:
    """Windows of one size, side by side: ``[k·size, (k+1)·size)``, shifted by ``offset``, in UTC.

    The offset may be negative: ``"-30 minutes"``.
    """
    size_us = positive_us(size, "tumbling's size")
    return Tumbling(size_us, _signed_us(offset, "tumbling's offset") % size_us)


def hopping(
    size: Duration,
    slide: Duration,
    *,
    offset: Duration = "0 seconds",
    allow_gaps: bool = False,
) -> Hopping:
    """Windows of one size, one begun every ``slide``: ``[k·slide, k·slide + size)``, in UTC.

    An event is in about size/slide windows. Events are kept in slices as long as the greatest common
    divisor of size and slide: the rounder their ratio, the less is kept.

    Args:
        size: How long a window is.
        slide: How far apart windows begin; it need not divide the size.
        offset: Shifts the windows; may be negative.
        allow_gaps: Allow a slide above the size. Events between two windows are then in none; the
            ledger counts them as filtered.
    """
    size_us, slide_us = positive_us(size, "hopping's size"), positive_us(slide, "hopping's slide")
    if slide_us > size_us and not allow_gaps:
        raise ConfigError(
            f"hopping's slide of {format_us(slide_us)} is above its size of "
            f"{format_us(size_us)}, so events between two windows would be in none. Give a slide "
            "up to the size, or allow_gaps=True."
        )
    return Hopping(size_us, slide_us, _signed_us(offset, "hopping's offset") % slide_us)


def cumulating(size: Duration, step: Duration, *, offset: Duration = "0 seconds") -> Cumulating:
    """Windows that begin together and grow by ``step`` up to ``size``: a day's figures up to each hour.

    With ``cumulating("1 day", "1 hour")`` a day has 24 windows, ``[00:00, 01:00)``, ``[00:00, 02:00)``
    and so on to ``[00:00, 24:00)``, in UTC. ``window_end`` distinguishes them, and is part of a view's key.
    Each event is kept once, in its step. Every window is a row, for each key: with small steps these are many,
    and ``"update"`` emits again all open windows that hold a new event.

    Args:
        size: How long the largest window is.
        step: By how much windows grow; it must divide the size.
        offset: Shifts the windows; may be negative.
    """
    size_us, step_us = (
        positive_us(size, "cumulating's size"),
        positive_us(step, "cumulating's step"),
    )
    if size_us % step_us:
        raise ConfigError(
            f"cumulating's step of {format_us(step_us)} does not divide its size of "
            f"{format_us(size_us)}. Give a step that does."
        )
    return Cumulating(size_us, step_us, _signed_us(offset, "cumulating's offset") % size_us)


def calendar(span: str, *, tz: str, week_start: Weekday = "monday") -> Calendar:
    """Windows as the clocks of a time zone show them: days of 23 or 25 hours where they change.

    Args:
        span: ``"1 day"``, ``"1 week"``, ``"1 month"``, ``"1 quarter"``, ``"1 year"``, several months
            that divide a year, or minutes or hours that divide a day (they start again at midnight).
        tz: The IANA name of the time zone, such as ``"America/New_York"``.
        week_start: The day on which weeks begin.

    An hour that clocks show twice is two windows: results identify windows by instants, in UTC.
    """
    unit, count = _span(span)
    try:
        ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError, TypeError) as error:
        raise ConfigError(
            f'calendar\'s tz is {tz!r}. Give an IANA name, such as "Europe/Berlin" or "UTC".'
        ) from error
    choose("calendar's week_start", week_start, _WEEKDAYS)
    return Calendar(unit, count, tz, _WEEKDAYS.index(week_start))


def _span(span: str) -> tuple[Literal["minute", "day", "week", "month"], int]:
    found = _SPAN.fullmatch(span) if isinstance(span, str) else None
    count, said = (int(found[1]), found[2]) if found else (0, "")
    name = unit_named(said) or said.lower().removesuffix("s")
    if name in ("day", "week") and count == 1:
        return ("day" if name == "day" else "week"), 1
    if name in _MINUTES and count and 1440 % (count * _MINUTES[name]) == 0:
        return "minute", count * _MINUTES[name]
    if name in _MONTHS and count and 12 % (count * _MONTHS[name]) == 0:
        return "month", count * _MONTHS[name]
    raise ConfigError(
        f'calendar\'s span is {span!r}. Give "1 day", "1 week", minutes or hours that divide a day, '
        'or months that divide a year ("1 month", "1 quarter", "1 year").'
    )


def session(
    gap: Duration | pl.Expr,
    *,
    gap_inclusive: bool = True,
    strict: bool = False,
    max_length: Duration | None = None,
    max_gap: Duration | None = None,
) -> SessionWindow:
    """Sessions: activity of a key without a pause longer than ``gap``, as ``[first, last + gap)``.

    Events can arrive in any order: an event between two sessions makes them one, also when both have
    been emitted already (emit ``"retract"`` takes them back then). The rows have a column
    ``overlaps_closed``, for an event that came when the session that it belongs to had expired, but
    one of its own had not: it makes a second session, which overlaps the first.

    Args:
        gap: A duration, or an expression that gives each event the pause that may follow it, as a
            Duration: ``pl.duration(seconds="gap_s")``. A session ends at the largest of its events'
            times plus their gaps. Null and gaps not above zero count as one microsecond, and longer
            ones than ``max_gap`` as that. Two sessions may then begin at the same time, when the
            first had expired: ``window_end`` distinguishes them, and is part of a view's key.
        gap_inclusive: Whether events exactly ``gap`` apart are in one session. It is then complete
            when the watermark is above its end: an event at the end is not late before that.
        strict: An event that would make a session overlapping one that has expired is late instead.
        max_length: Sessions that never end are cut at the multiples of this since 1970 UTC, so none
            is longer: with ``"1 day"``, at midnight UTC. None: they are kept for as long as they go
            on, as one row of state each.
        max_gap: The longest gap of an event, where ``gap`` is an expression: where sessions ended is
            kept for so long, to know what overlaps them.

    An event is too late when its own session, from its time to its gap after it, has expired for
    its partition and no session that is still open covers it.

    Over rows that take others back (``emit("retract")`` above) a session is parted when the event that
    joined it is taken back. The events of open sessions are then kept one by one, a row is late when its
    own session has expired, and windows over the result are complete a gap later. ``strict`` and panes are
    refused there.
    """
    gap_us = _longest_gap_us(gap, max_gap)
    length_us = None if max_length is None else positive_us(max_length, "session's max_length")
    if length_us is not None and not isinstance(gap, pl.Expr) and length_us < gap_us:
        raise ConfigError(
            f"session's max_length is {max_length!r}, less than its gap of {gap!r}. Give at least "
            "the gap."
        )
    return SessionWindow(
        gap_us,
        gap if isinstance(gap, pl.Expr) else None,
        inclusive=gap_inclusive,
        strict=strict,
        max_length_us=length_us,
    )


def _longest_gap_us(gap: Duration | pl.Expr, max_gap: Duration | None) -> int:
    if not isinstance(gap, pl.Expr):
        if max_gap is not None:
            raise ConfigError(
                f"session has the gap {gap!r} and max_gap={max_gap!r}. A longest gap is for gaps that "
                "an expression gives: leave it out."
            )
        return positive_us(gap, "session's gap")
    if max_gap is None:
        raise ConfigError(
            "session's gap is an expression and there is no max_gap. Say how long a gap can be: "
            'max_gap="1 day". Ends of sessions are kept for so long, to find overlaps.'
        )
    return positive_us(max_gap, "session's max_gap")


def sliding(size: Duration, *, rank: str | None = None) -> Sliding:
    """One row per event, over what its key did in the time up to it: ``[t - size, t]``.

    Both ends are included, and events at the same time see each other, as in SQL's ``RANGE BETWEEN
    size PRECEDING AND CURRENT ROW``. ``window_end`` is the event's own time. With ``"final"`` the row
    comes when nothing that it counts can come any more; with ``"update"`` or ``"retract"`` with the
    batch that brought the event, and again for each late event that it counts. An event is too late
    when its partition has passed its time by more than the lateness. Over rows that take others back,
    a retraction takes one row of its time away, and its values out of those that look back on it.
    Rows also come by ``"each"`` event, by count, by running time or once, as emit's ``early`` and ``late`` say. An
    event fires the rows that count it, and a row counts from its own event on: what had come before that is part of
    its first pane. An event that is late by its own partition waits for the on-time row there. Over rows that take
    others back, ``early`` and ``late`` are ``"batch"`` or None. There are no parts: ``"discard"`` is refused.

    Args:
        size: How far each row looks back.
        rank: The name of a column that numbers the rows of events of a key at one time, from 1: such rows are
            equal otherwise. With it, the window, the ``by`` columns and the number identify a row, and of rows
            that are taken back the last one goes first. Without it, a view keeps one row for them all. It is
            refused where one of them may be taken back alone: over rows that take others back, behind steps or
            with ``"retract"``. Then give a rank, or make a table: ``rows.table(key=[…])``.

    For windows of one size that begin at regular times, see :func:`millstream.hopping`.
    """
    size_us = positive_us(size, "sliding's size")
    if rank is None:
        return Sliding(size_us)
    if not isinstance(rank, str) or not rank or rank.startswith(HIDDEN_PREFIX) or is_pattern(rank):
        raise ConfigError(
            f"sliding's rank is {rank!r}. Give the name of a new column, which does not begin with "
            f'{HIDDEN_PREFIX!r} and is no pattern, such as rank="place".'
        )
    return RankedSliding(size_us, rank)


def count_window(
    count: int,
    *,
    unbounded: bool = False,
    slide: int | None = None,
    timeout: Duration | None = None,
) -> CountWindow:
    """Windows of ``count`` events of a key, in the order of their arrival.

    That order is the partition's: for the result to depend on the events alone, the key must decide
    the partition. The rows have ``window_number``, from 0 for each key; ``window_start`` is the time
    of the event that opened the window, ``window_end`` just after the latest. No event is late. Of
    every key that ever came a row of state is kept.

    Args:
        count: How many events a window takes.
        unbounded: Must be said: the state has a row of every key that ever came, and never
            forgets one.
        slide: Begin a window with every ``slide``-th event; by default windows do not overlap.
        timeout: Complete a window as it is when the watermark has reached this much after the
            event that opened it. By default it is open until it is full.

    ``emit("update")``, ``"discard"`` and ``"retract"`` also show windows that are not full yet: with every batch
    that adds to them, or as ``early`` says. The event that fills a window gives the on-time row, and no early
    one besides; a window that is timed out gives it then. There are no late rows. The time of an open window moves with its events: what is taken back has the time that it had, so rows
    of windows that are not full go through steps (``filter``) to views, topics and tables (``group_by``, ``top``), and
    nothing that goes by event time may follow.

    Over rows that take others back (of ``emit("retract")`` above) windows are made of the rows that are left, in
    the order of their times, and of equal times in one that follows from their values: in the order of arrival, one
    event that is taken back would move all that came after it to other windows. A row waits until the
    watermark, less the lateness, has passed its time, when nothing can take it back any more; one that comes
    later is late. A timeout counts in event time alone there. Only ``"final"`` is offered.
    """
    whole_number(count, 1, 1 << 31, "count_window's count")
    if unbounded is not True:
        raise ConfigError(
            "count_window keeps a row of state for every key that ever came, and of its aggregates "
            "besides, without a limit: some 100 bytes each, so of a million new keys a day 36 GB a year. "
            f"Where keys are few, say so: count_window({count}, unbounded=True). Where new ones "
            "keep coming, use windows of time."
        )
    if slide is not None:
        whole_number(slide, 1, count, "count_window's slide")
    if timeout is not None and slide not in (None, count):
        raise ConfigError(
            "count_window has a slide and a timeout. A window that is timed out ends early, so that "
            "none could begin at every slide: leave one of them out."
        )
    timeout_us = None if timeout is None else positive_us(timeout, "count_window's timeout")
    return CountWindow(count, slide or count, timeout_us)


def after_count(count: int) -> AfterCount:
    """Fire a pane with every ``count``-th event of a window and key, in the order of arrival.

    That order is the partition's: events of one key in several partitions are counted as they happen
    to be read.
    """
    return AfterCount(whole_number(count, 1, (1 << 31) - 1, "after_count's count"))


def once(trigger: Duration | AfterCount) -> Once:
    """Fire one pane of each window and key, and close it: for ``early`` of :meth:`Windowed.emit`.

    ``early=ms.once(ms.after_count(2))`` emits the first two events of a window and key, in the order of
    arrival, as soon as they are there. What comes for that window and key afterwards is left out: the ledger
    counts it as ``filtered``, and each event with each window that it came too late for as ``windows_closed``. If
    the trigger has not fired when the watermark reaches the end of the window, the window has its on-time pane
    instead, so nothing is lost for want of events. There are no late panes: the stream's lateness does not count.

    Args:
        trigger: ``ms.after_count(n)``, ``"each"`` for the first event, or a duration of running time after
            the first event. How much a pane by running time has depends on the speed of reading.

    Raises:
        ConfigError: the trigger is none of these.

    A session that has fired goes on without panes: events join it, make it longer and merge it with others, and all
    that it gets is left out. So of sessions that merge, one of which has fired, the others have no pane any more,
    and what came for them is left out, too. A count window has its on-time pane with the event that fills it, or
    when it is timed out, and until then nothing else is counted for the next window.

    The row of a sliding window begins with its own event, so ``ms.once("each")`` gives what was known when the event
    came; of several events of a key at one time the first has the row, and the others are left out of it. They
    still count in later rows, so they are not ``filtered``.

    For windows of every kind. In Apache Beam this is
    ``AfterFirst`` of the trigger and ``AfterWatermark``, without ``Repeatedly``; merged sessions follow its ``onMerge``.
    """
    given = None if isinstance(trigger, Once) else parse_trigger(trigger, "once's trigger")
    if isinstance(given, AfterTime | AfterCount):
        return Once(given)
    raise ConfigError(
        f"once has the trigger {trigger!r}, and closes the window with it. Give "
        'ms.after_count(n), "each" for the first event, or a duration of running time: which events share a '
        "batch is arbitrary, so it must not decide which are left out."
    )


def parse_trigger(word: TriggerSpec, what: str) -> Trigger | None:
    """Read when panes fire: "each" event, each "batch", a duration of running time, a count.

    Raises:
        ConfigError: it is none of these, or a duration of less than a millisecond.
    """
    if word is None or isinstance(word, AfterCount):
        return word
    if word == "each":
        return AfterCount(1)
    if word == "batch":
        return EachBatch()
    near = did_you_mean(word, ("each", "batch")) if isinstance(word, str) else ""
    if isinstance(word, timedelta) or (isinstance(word, str) and not near):
        delay_ms = to_us(word, what=f'{what} (besides "each", "batch" and after_count)') // 1000
        if delay_ms:
            return AfterTime(delay_ms)
    raise ConfigError(
        f'{what} is {word!r}. Give "each", "batch", a duration from a millisecond, '
        f"ms.after_count(n), or None for no such panes.{near}"
    )


def _signed_us(duration: Duration, what: str) -> int:
    if isinstance(duration, timedelta) and duration < timedelta(0):
        return -to_us(-duration, what=what)
    if isinstance(duration, str) and duration.strip().startswith("-"):
        return -to_us(duration.strip()[1:], what=what)
    return to_us(duration, what=what)
