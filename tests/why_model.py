"""What happened to each record at a step, and the rows there are because of it: by the rules of the documentation.

One record after another, with dictionaries and seconds, for each kind of step. A model is told what its partition had
reached before each record, and so can leave one out "with all clocks moving as they did". It returns how many rows of
each record left by which exit, and the rows of the view by key.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import session_model
from pattern_model import Fits, Pattern, Step
from pattern_model import model as matches_of

DELAY_S, LATENESS_S = 5, 3
BEFORE_ALL = -(10**9)


class Seen(NamedTuple):
    """A record, and the watermark of its partition just before it."""

    n: int
    ad: str
    id: str
    cost: int
    at: int
    watermark: int


def seen(rows):
    """Return the records with what their partitions, one for each ad, had reached before them."""
    reached = defaultdict(lambda: BEFORE_ALL)
    for row in rows:
        yield Seen(**row, watermark=reached[row["ad"]] - DELAY_S)
        reached[row["ad"]] = max(reached[row["ad"]], row["at"])


def below(one):
    """A record is late that is below its partition's watermark by more than the lateness."""
    return one.at < one.watermark - LATENESS_S


def total(rows):
    return len(rows), sum(row.cost for row in rows)


# ── stateless, deduplication ────────────────────────────────────────────────────────────────


def filtered(records):
    exits = {one.n: {"emitted" if one.cost > 1 else "filtered": 1} for one in records}
    return exits, {(one.n,): (one.cost,) for one in records if one.cost > 1}


def deduplicated(records, within=30):
    exits, kept = {}, []
    for one in records:
        if below(one):
            exits[one.n] = {"late": 1}
        elif any(one.id == other.id and abs(one.at - other.at) <= within for other in kept):
            exits[one.n] = {"duplicate": 1}
        else:
            exits[one.n] = {"emitted": 1}
            kept.append(one)
    return exits, {(one.n,): (one.cost,) for one in kept}


# ── windows ─────────────────────────────────────────────────────────────────────────────────


def tumbling(at, size=20):
    return [(at - at % size, at - at % size + size)]


def hopping(at, size=20, slide=10):
    return [
        (start, start + size) for start in range(-200, 400, slide) if start <= at < start + size
    ]


def with_gaps(at):
    return hopping(at, 5, 20)


def cumulating(at, size=30, step=10):
    start = at - at % size
    return [(start, start + end) for end in range(step, size + 1, step) if at < start + end]


def minutes(at):
    return tumbling(at, 60)


def windowed(assign):
    """A record is in each window that has not expired in its partition; it is late if all of its windows have."""

    def model(records):
        exits, inside = {}, defaultdict(list)
        for one in records:
            windows = assign(one.at)
            open_yet = [w for w in windows if w[1] + LATENESS_S > one.watermark]
            exits[one.n] = {"filtered" if not windows else "held" if open_yet else "late": 1}
            for window in open_yet:
                inside[one.ad, *window].append(one)
        return exits, {key: total(rows) for key, rows in inside.items()}

    return model


def counted(records, count=2):
    """Windows of two records of an ad, in the order of arrival; a row is there when its window is full."""
    of_ad = defaultdict(list)
    for one in records:
        of_ad[one.ad].append(one)
    rows = {
        (ad, number): (each[0].at, max(one.at for one in each), *total(each))
        for ad, every in of_ad.items()
        for number in range(len(every) // count)
        if (each := every[number * count : (number + 1) * count])
    }
    return {one.n: {"held": 1} for one in records}, rows


def sliding(records, size=15):
    """One row for each record that is in time: what its ad did in the time up to it. Others count as long as a row may come
    that they are in.
    """
    exits, kept = {}, []
    for one in records:
        first = max(one.at, one.watermark - LATENESS_S)
        exits[one.n] = {"held" if first <= one.at + size else "late": 1}
        if first <= one.at + size:
            kept.append((one, first))
    rows = {}
    for one, own in kept:
        if own <= one.at:
            inside = [r for r, f in kept if r.ad == one.ad and one.at - size <= r.at <= one.at >= f]
            rows[one.ad, one.at] = total(inside)
    return exits, rows


def sessions(records, gap=15):
    rules = session_model.Rules(lateness=LATENESS_S)
    found = session_model.run(
        [(one.ad, one.at, gap, one.n, one.watermark) for one in records], rules
    )
    late = {n for each in found.values() for n in each.late}
    cost = {one.n: one.cost for one in records}
    rows = {
        (ad, start): (len(values), sum(cost[n] for n in values), end, overlaps)
        for ad, each in found.items()
        for start, end, _, overlaps, values in each.closed
    }
    return {one.n: {"late" if one.n in late else "held": 1} for one in records}, rows


# ── joins and tables ────────────────────────────────────────────────────────────────────────


def pairs(records, *, alone=False):
    """A record is read on both sides, and paired with those of its id that are 1 to 20 seconds later."""
    exits = {one.n: {"late" if below(one) else "held": 2} for one in records}
    there = [one for one in records if not below(one)]
    rows = {
        (one.n, other.n): ()
        for one in there
        for other in there
        if one.id == other.id and 1 <= other.at - one.at <= 20
    }
    if alone:
        rows |= {(one.n, -1): () for one in there if not any(one.n == pair[0] for pair in rows)}
    return exits, rows


def as_of(records):
    """Cheap records find the latest dear one of their ad that is not after them.

    A dear one that is late counts for those that its partition's watermark, less the lateness, had not passed.
    """
    exits = {one.n: {"late" if below(one) else "held": 1} for one in records}
    dear = [
        (one, one.watermark - LATENESS_S if below(one) else one.at)
        for one in records
        if one.cost > 1
    ]
    rows = {}
    for one in records:
        if one.cost <= 1 and not below(one):
            before = [
                each for each, since in dear if each.ad == one.ad and since <= one.at >= each.at
            ]
            latest = max(before, key=lambda each: each.at, default=None)
            rows[one.n,] = (latest.cost if latest else None,)
    return exits, rows


def looked_up(records):
    """Cheap records find what the table of the dear ones holds when they arrive."""
    exits, table, rows = {}, {}, {}
    for one in records:
        if one.cost <= 1:
            exits[one.n] = {"emitted": 1}
            rows[one.n,] = (table[one.ad].cost if one.ad in table else None,)
        else:
            exits[one.n] = {"held": 1}
            table[one.ad] = max(table.get(one.ad, one), one, key=lambda each: each.at)
    return exits, rows


def latest(records):
    rows = {}
    for one in sorted(records, key=lambda each: each.at):
        rows[one.ad,] = (one.n, one.cost)
    return {one.n: {"held": 1} for one in records}, rows


def grouped(records):
    of_ad = defaultdict(list)
    for one in records:
        of_ad[one.ad].append(one)
    rows = {(ad,): (len(each), max(one.cost for one in each)) for ad, each in of_ad.items()}
    return {one.n: {"held": 1} for one in records}, rows


def best(records):
    of_ad = defaultdict(list)
    for one in records:
        of_ad[one.ad].append(one)
    rows = {
        (ad, place): (one.n, one.cost)
        for ad, each in of_ad.items()
        for place, one in enumerate(sorted(each, key=lambda r: (-r.cost, r.n))[:2], 1)
    }
    return {one.n: {"held": 1} for one in records}, rows


# ── functions and patterns ──────────────────────────────────────────────────────────────────


def processed(records, after=10):
    """Rows of an ad are numbered in the order of time; ten seconds after each, a timer says how many there were."""
    exits = {one.n: {"late" if below(one) else "held": 1} for one in records}
    rows = {}
    for ad in {one.ad for one in records}:
        there = [one for one in records if one.ad == ad and not below(one)]
        calls = [(one.at, 1, one) for one in there] + [(one.at + after, 0, None) for one in there]
        count = 0
        for at, _, one in sorted(calls, key=lambda call: call[:2]):
            count += one is not None
            rows[ad, "timer" if one is None else "row", at] = (count,)
    return exits, rows


LOW_THEN_HIGH = Pattern(
    (Step("low", Fits("a")), Step("high", Fits("d"))), within=40, skip=("past_last", None)
)


def matched(records):
    """A row that fits no step is left out where it is read; others wait, or are left out if nothing begins with them."""
    rows = {}
    for ad in {one.ad for one in records}:
        there = sorted(
            (one for one in records if one.ad == ad and not below(one)), key=lambda r: r.at
        )
        as_rows = [{"at": one.at, "v": "abcd"[one.cost], "n": one.n} for one in there]
        for taken in matches_of(LOW_THEN_HIGH, as_rows):
            (_, first), (_, last) = taken
            rows[ad, there[first].at] = (there[last].n,)
    exits = {one.n: {"late": 1} for one in records if below(one)}
    exits |= {one.n: {"filtered": 1} for one in records if one.cost in (1, 2)}
    return exits, rows


# ── what is asked ───────────────────────────────────────────────────────────────────────────


def because_of(model, records, number):
    """Return the rows that are others, or there, and those that are gone, because of a record: by those up to it."""
    until = [one.n for one in records].index(number)
    with_it, without = (model(records[:end])[1] for end in (until + 1, until))
    given = {key for key, row in with_it.items() if without.get(key, "absent") != row}
    return given, without.keys() - with_it.keys()


def behind(model, records, key):
    """Return the records without which a row would be another, or not there."""
    row = model(records)[1][key]
    return {
        one.n
        for place, one in enumerate(records)
        if model(records[:place] + records[place + 1 :])[1].get(key, "absent") != row
    }
