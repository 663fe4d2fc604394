"""Tables as bags of rows, batch by batch, and what SQL says of them: slow, plain, and from the rules alone.

A row is a tuple of values; a bag counts rows with their event times. NaN is written as text, so that it equals
itself, and lists as tuples.
"""

import json
import math
from collections import Counter, defaultdict

from hypothesis import strategies as st

from millstream import testing
from millstream.kernels.frames import DIFF, TIME

GROUPS = (None, "a", "b", "c")


def plain(value):
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, list):
        return tuple(map(plain, value))
    if isinstance(value, dict):
        return tuple(sorted((name, plain(each)) for name, each in value.items()))
    return value


def bags(table, columns, batches):
    """Return the bag of an output after each batch, as pairs of row and time."""
    bag, found = Counter(), []
    rows = table.to_dicts()
    for batch in range(batches):
        for row in rows:
            if row["batch"] == batch:
                key = tuple(plain(row[name]) for name in columns), row[TIME]
                bag[key] += row.get(DIFF) or 1
        assert min(bag.values(), default=0) >= 0, "a row was taken back that was not there"
        bag = +bag
        found.append(bag.copy())
    return found


def last_batch(given):
    return 1 + max((int(t["batch"].max()) for t in given.rows.values() if t.height), default=-1)


def as_rows(bag):
    """Return (row, time) pairs, each as many times as the bag has it."""
    return list(bag.elements())


def without_times(bag):
    return Counter(row for row, _ in bag.elements())


def grouped(rows, places):
    groups = defaultdict(list)
    for row, time in rows:
        groups[tuple(row[place] for place in places)].append((row, time))
    return groups


# ── top ─────────────────────────────────────────────────────────────────────────────────────


def order_key(value, *, descending):
    """SQL's NULLS LAST; what is not a number before that. Numbers only."""
    if value is None:
        return 2, 0
    if value == "NaN":
        return 1, 0
    return 0, -value if descending else value


def top(rows, per, order, tie_break, count, ties):
    """Return (row, time, rank) of the rows whose rank is at most ``count``."""
    found = []
    for members in grouped(rows, per).values():

        def values(member):
            return tuple(order_key(member[0][place], descending=down) for place, down in order)

        def told_apart(member):
            # The order of polars for the rest: rising, null last.
            rest = tuple((member[0][p] is None, member[0][p] or 0) for p in tie_break)
            return (*values(member), rest, member[1])

        for number, member in enumerate(sorted(members, key=told_apart)):
            before = [other for other in members if values(other) < values(member)]
            rank = {
                "row_number": number + 1,
                "rank": len(before) + 1,
                "dense_rank": len({values(other) for other in before}) + 1,
            }[ties]
            if rank <= count:
                found.append((*member, rank))
    return Counter(found)


# ── inputs ──────────────────────────────────────────────────────────────────────────────────


@st.composite
def histories(draw, count=30):
    """Inserts, updates and deletions of a table ``id, g, v``; ``v`` is a small number or null."""
    rows = []
    for _ in range(draw(st.integers(0, count))):
        key = str(draw(st.integers(0, 5)))
        if draw(st.integers(0, 3)) == 0:
            rows.append(testing.Row(None, key=key))
        else:
            value = {
                "id": key,
                "g": draw(st.sampled_from(GROUPS)),
                "v": draw(st.sampled_from([None, 0, 1, 2, 3, 4])),
            }
            rows.append(testing.Row(json.dumps(value).encode(), key=key))
    return rows


RUNS = st.fixed_dictionaries(
    {
        "batches": st.integers(1, 6),
        "partitions": st.sampled_from([1, 4, 7]),
        "seed": st.integers(0, 99),
    }
)
