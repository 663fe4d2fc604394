"""What streams mean, event by event: the published rules, written down as naively as they read.

Nothing here knows of batches, buckets, runs or partials, and nothing is taken from the kernels. The
rules are those of docs/architecture.md ("Time"), docs/deduplication.md and the docstrings of the
public names, which follow the Dataflow model, Beam, Flink and Kafka Streams. Times are whole
microseconds since 1970; minus infinity is a watermark that has not been set.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NEVER = -math.inf
FOR_EVER = math.inf
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A row on its way, with its event time, what its producer had reached before it, and its place."""

    values: Values
    time: int
    reached: float
    place: tuple[int, int]


@dataclass(frozen=True)
class Judged:
    """What a step gives, and how many of its rows were late."""

    rows: list[Row]
    late: int = 0


@dataclass(frozen=True)
class WatermarkRule:
    """How records move the watermark: by their time less a delay, by punctuation, per producer."""

    delay: int
    producer: str | None = None
    punctuation: str | None = None


@dataclass
class Partition:
    """The watermark of one partition, and of each of its active producers."""

    rule: WatermarkRule
    producers: dict[Any, float] = field(default_factory=dict)
    watermark: float = NEVER

    def take(self, values: Values, time: int) -> float:
        """Give the watermark that the record is judged by, and move on by what it says."""
        who = values[self.rule.producer] if self.rule.producer else None
        reached = self.producers.setdefault(who, self.watermark)
        said = [time - self.rule.delay]
        if self.rule.punctuation and values[self.rule.punctuation] is not None:
            said.append(values[self.rule.punctuation])
        self.producers[who] = max(reached, *said)
        self.watermark = max(self.watermark, min(self.producers.values()))
        return reached


def read(partitions: Sequence[Sequence[Values]], time: str, rule: WatermarkRule) -> list[Row]:
    """Read a topic: rows by partition and offset. A record without a time is dead, and moves nothing."""
    rows = []
    for number, records in enumerate(partitions):
        partition = Partition(rule)
        for offset, values in enumerate(records):
            if values[time] is not None:
                reached = partition.take(values, values[time])
                rows.append(Row(values, values[time], reached, (number, offset)))
    return rows


def keep(rows: Iterable[Row], condition: Callable[[Values], bool | None]) -> list[Row]:
    """Keep the rows for which the condition is true; null counts as false."""
    return [row for row in rows if condition(row.values) is True]


def extend(rows: Iterable[Row], **columns: Callable[[Values], Any]) -> list[Row]:
    """Add columns."""
    return [
        Row({**row.values, **{name: of(row.values) for name, of in columns.items()}},
            row.time, row.reached, row.place)
        for row in rows
    ]  # fmt: skip


def dedup(
    rows: Sequence[Row], ids: str, within: int, lateness: int, *, null_passes: bool
) -> Judged:
    """Keep an event if no kept one that arrived before has its id and a time at most ``within`` away.

    Equal ids are in one partition, whose order is that of arrival.
    """
    kept: dict[Any, list[int]] = defaultdict(list)
    out, late = [], 0
    for row in sorted(rows, key=lambda row: row.place):
        name = row.values[ids]
        if name is None and not null_passes:
            continue
        if row.time < row.reached - lateness:
            late += 1
        elif name is None:
            out.append(row)
        elif all(abs(row.time - time) > within for time in kept[name]):
            kept[name].append(row.time)
            out.append(row)
    return Judged(out, late)


def budget(rows: Sequence[Row], by: str, cost: str, limit: str, day: int) -> list[Row]:
    """Grant what does not exceed the limit of the key's day, in the order of arrival (UTC days)."""
    spent: dict[tuple[Any, int], int] = defaultdict(int)
    out = []
    for row in sorted(rows, key=lambda row: row.place):
        account = (row.values[by], row.time // day)
        price, most = row.values[cost] or 0, row.values[limit]
        granted = most is None or price <= 0 or spent[account] + price <= most
        spent[account] += price if granted else 0
        said = {"decision": "granted" if granted else "refused", "spent": spent[account]}
        out.append(Row({**row.values, **said}, row.time, row.reached, row.place))
    return out


Span = tuple[int, int]


def tumbling(size: int, offset: int = 0) -> Callable[[int], list[Span]]:
    """Windows ``[k·size + offset, (k + 1)·size + offset)``."""
    return hopping(size, size, offset)


def hopping(size: int, slide: int, offset: int = 0) -> Callable[[int], list[Span]]:
    """Windows ``[k·slide + offset, k·slide + offset + size)``."""

    def of(time: int) -> list[Span]:
        newest = (time - offset) // slide * slide + offset
        starts = range(newest, time - size, -slide)
        return [(start, start + size) for start in starts if start <= time < start + size]

    return of


def cumulating(size: int, step: int) -> Callable[[int], list[Span]]:
    """Windows ``[k·size, k·size + n·step)`` for n from 1 to size / step."""

    def of(time: int) -> list[Span]:
        start = time // size * size
        ends = range(start + step, start + size + 1, step)
        return [(start, end) for end in ends if time < end]

    return of


Aggregates = Mapping[str, Callable[[list[Row]], Any]]


def result(span: Span, key: Values, rows: list[Row], aggregates: Aggregates) -> Row:
    """Give the row of a window: its event time is the window's last microsecond."""
    start, end = span
    made = {name: of(rows) for name, of in aggregates.items()}
    return Row({"window_start": start, "window_end": end, **key, **made}, end - 1, NEVER, (-1, -1))


def windows(
    rows: Iterable[Row],
    assign: Callable[[int], list[Span]],
    by: Sequence[str],
    lateness: int,
    aggregates: Aggregates,
) -> Judged:
    """Put each row into all of its windows that have not expired for it; late is one that has none."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    late = 0
    for row in rows:
        spans = assign(row.time)
        open_spans = [span for span in spans if row.reached < span[1] + lateness]
        late += bool(spans) and not open_spans
        for span in open_spans:
            groups[(span, *(row.values[name] for name in by))].append(row)
    out = [
        result(span, dict(zip(by, key, strict=True)), members, aggregates)
        for (span, *key), members in groups.items()
    ]
    return Judged(out, late)


def sliding(
    rows: Sequence[Row], size: int, by: Sequence[str], lateness: int, aggregates: Aggregates
) -> Judged:
    """Give a row for each event that is not late, over its key's events in ``[t - size, t]``.

    An event has no row of its own when its partition has passed its time by more than the lateness.
    It still counts in the rows that it is not too late for, and is late when there can be none.
    """
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row.values[name] for name in by)].append(row)
    out, late = [], 0
    for key, members in groups.items():
        in_time = [row for row in members if row.reached <= row.time + lateness]
        late += sum(row.reached > row.time + size + lateness for row in members)
        for time in [row.time for row in in_time]:
            counted = [
                row
                for row in members
                if time - size <= row.time <= time and row.reached <= time + lateness
            ]
            named = dict(zip(by, key, strict=True))
            made = {name: of(counted) for name, of in aggregates.items()}
            span = {"window_start": time - size, "window_end": time}
            out.append(Row({**span, **named, **made}, time, NEVER, (-1, -1)))
    return Judged(out, late)


def sessions(
    rows: Iterable[Row],
    gap: Callable[[Values], int],
    by: Sequence[str],
    aggregates: Aggregates,
    *,
    inclusive: bool,
) -> Judged:
    """Join events of a key whose stretches ``[t, t + gap)`` meet: only for rows none of which is late."""
    groups: dict[tuple[Any, ...], list[tuple[int, int, Row]]] = defaultdict(list)
    for row in rows:
        stretch = (row.time, row.time + max(gap(row.values), 1), row)
        groups[tuple(row.values[name] for name in by)].append(stretch)
    out = []
    for key, stretches in groups.items():
        together: list[tuple[int, int, list[Row]]] = []
        for start, end, row in sorted(stretches, key=lambda stretch: stretch[:2]):
            meets = together and (
                start <= together[-1][1] if inclusive else start < together[-1][1]
            )
            if meets:
                first, last, members = together.pop()
                together.append((first, max(last, end), [*members, row]))
            else:
                together.append((start, end, [row]))
        named = dict(zip(by, key, strict=True))
        out += [
            result((start, end), named, members, aggregates) for start, end, members in together
        ]
    return Judged(out)


def count_windows(
    rows: Iterable[Row],
    count: int,
    slide: int,
    by: Sequence[str],
    aggregates: Aggregates,
    *,
    partial: bool,
) -> Judged:
    """Give the windows of ``count`` events of a key, one begun with every ``slide``-th, as they arrive.

    With ``partial`` those that are not full, too. Equal keys are in one partition.
    """
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.place):
        groups[tuple(row.values[name] for name in by)].append(row)
    out = []
    for key, members in groups.items():
        for number, first in enumerate(range(0, len(members), slide)):
            inside = members[first : first + count]
            if len(inside) == count or partial:
                end = max(row.time for row in inside) + 1
                named = {**dict(zip(by, key, strict=True)), "window_number": number}
                out.append(result((inside[0].time, end), named, inside, aggregates))
    return Judged(out)
