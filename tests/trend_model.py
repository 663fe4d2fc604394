"""Comparisons and alerts as the published rules read, one row after another.

Which local times there are, and how often, is found by looking at the clock at every quarter of an hour.
"""

import math
from datetime import UTC, timedelta
from functools import cache
from zoneinfo import ZoneInfo

STEP = timedelta(minutes=15)


def shown(instant, zone):
    """What the clocks of a zone show."""
    return instant.astimezone(ZoneInfo(zone)).replace(tzinfo=None, fold=0)


@cache
def instants_showing(local, zone):
    """All instants at which the clocks show a local time, in order."""
    first = local.replace(tzinfo=UTC) - timedelta(hours=30)
    every = (first + n * STEP for n in range(60 * 4 + 1))
    return [instant for instant in every if shown(instant, zone) == local]


def days_back(days):
    return lambda local: local - timedelta(days=days)


def months_back(months):
    def back(local):
        earlier = local
        for _ in range(months):  # to the month before, without its day
            earlier = earlier.replace(day=1) - timedelta(days=1)
        while earlier.day > local.day:
            earlier -= timedelta(days=1)
        return earlier if earlier.day == local.day else None

    return back


def earlier_instant(start, back, zone):
    """The instant that a window which begins at ``start`` is compared with; None if there is none."""
    local = shown(start, zone)
    earlier = back(local)
    found = [] if earlier is None else instants_showing(earlier, zone)
    if not found:
        return None
    showing = instants_showing(local, zone).index(start)
    return found[showing if len(found) > 1 else 0]


def ratio(now, before):
    if now is None or before is None:
        return None
    if before == 0:
        return None if now == 0 else math.copysign(math.inf, now)
    return now / before


def compared(rows, key, column, earlier):
    """Rows with the value of the window that ``earlier`` names, from all rows of the key."""
    values = {(*(row[k] for k in key), row["window_start"]): row[column] for row in rows}
    made = []
    for row in rows:
        before = values.get((*(row[k] for k in key), earlier(row["window_start"])))
        now = row[column]
        made.append({**row, f"{column}_before": before, f"{column}_ratio": ratio(now, before)})
    return made


def compared_parts(rows, key, column, earlier):
    """The same of cumulating windows: with the value of the earlier window that is as long."""

    def told_apart(row, start):
        return (*(row[k] for k in key), start, row["window_end"] - row["window_start"])

    values = {told_apart(row, row["window_start"]): row[column] for row in rows}
    made = []
    for row in rows:
        before = values.get(told_apart(row, earlier(row["window_start"])))
        now = row[column]
        made.append({**row, f"{column}_before": before, f"{column}_ratio": ratio(now, before)})
    return made


def alerts(rows, key, when, recover, for_windows, step=None):
    """The rows at which the state of their key changes.

    Windows that cumulate by ``step`` follow one another as their last steps do.
    """

    def begins(row):
        return row["window_start"] if step is None else row["window_end"] - step

    made = []
    keys = {tuple(row[k] for k in key) for row in rows}
    for one in keys:
        mine = sorted(
            (row for row in rows if tuple(row[k] for k in key) == one),
            key=begins,
        )
        firing, true_for, last_end = False, 0, None
        for row in mine:
            if last_end != begins(row):
                true_for = 0
            last_end = row["window_end"]
            if firing:
                if recover(row):
                    firing, true_for = False, 0
                    made.append({**row, "alert": "resolved"})
                continue
            true_for = true_for + 1 if when(row) else 0
            if true_for >= for_windows:
                firing = True
                made.append({**row, "alert": "firing"})
    return made
