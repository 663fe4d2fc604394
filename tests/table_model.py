"""Tables as bags of rows, and what SQL says of joining them: slow, plain, one pair of rows after another.

Nothing here knows of changes, batches or hashes. By the definition of DBSP a join that is maintained has, after
each batch, the rows that the same join has over the two tables as they are then; so the changes that an
operator emits, summed up, are compared with these.

Rows are equal as SQL's ``IS NOT DISTINCT FROM`` has it, and NaN as PostgreSQL: NaN is equal to NaN, -0.0 to
0.0, null to null. ``=`` is never true of null.
"""

import json
import math
from collections import Counter

import numpy as np
import polars as pl

from millstream.kernels import routing  # a lane replaces its hash_columns
from millstream.kernels.frames import DIFF, TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.keyhash import buckets_of
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore


def plain(value):
    """Return a value such that values which are equal in SQL are equal in Python, and can be counted."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, dict):
        return tuple((name, plain(item)) for name, item in value.items())
    if isinstance(value, (list, tuple, pl.Series)):
        return tuple(plain(item) for item in value)
    return value


def bag(rows):
    """Return how often each row is there."""
    return Counter(tuple(plain(value) for value in row) for row in rows)


def joined(left, right, on, *, how, where=None, nulls_equal=False, names=None):
    """Join two lists of rows, which are dicts; the columns are those of the left, then the right's others.

    ``names``: what the columns of the right are called in the result.
    """
    names = names or {}
    left_columns, right_columns = (list(side[0]) if side else [] for side in (left, right))
    renamed = {c: names.get(c, c) for c in right_columns if c not in on.values()}

    def matches(one, other):
        for ours, theirs in on.items():
            a, b = plain(one[ours]), plain(other[theirs])
            if a != b or (a is None and not nulls_equal):
                return False
        return where is None or where({**one, **_renamed(other, renamed)}) is True

    pairs = [
        (x, y) for x, one in enumerate(left) for y, other in enumerate(right) if matches(one, other)
    ]
    with_partner = {x for x, _ in pairs}
    if how in ("semi", "anti"):
        return [row for x, row in enumerate(left) if (x in with_partner) == (how == "semi")]
    made = [{**left[x], **_renamed(right[y], renamed)} for x, y in pairs]
    if how in ("left", "full"):
        made += [row for x, row in enumerate(left) if x not in with_partner]
    if how in ("right", "full"):
        taken = {y for _, y in pairs}
        for y, row in enumerate(right):
            if y not in taken:
                keys = {ours: row[theirs] for ours, theirs in on.items()}
                made.append({**dict.fromkeys(left_columns), **keys, **_renamed(row, renamed)})
    return made


def _renamed(row, names):
    return {new: row[old] for old, new in names.items()}


class KernelRun:
    """Runs one operator batch by batch, divided into buckets, its state written and read in between."""

    def __init__(self, kernel, *, buckets=1, seed=0):
        self.kernel, self.buckets, self.seed = kernel, buckets, seed
        self.store = MemoryRunStore()
        self.manifests = {}
        self.counts = Counter()

    def batch(self, tables):
        """Give the operator a batch: frames by input; return the rows that come out, or None."""
        made = []
        for bucket, inputs in self._routed(tables).items():
            state = OperatorState.from_message(self.manifests.get(bucket), self.store)
            result = self.kernel.process(state, inputs, BatchContext(0, 0, seed=self.seed))
            self.manifests[bucket] = json.loads(json.dumps(state.to_message()))
            self.counts.update(result.counts)
            if result.rows is not None:
                made.append(result.rows)
        return pl.concat(made) if made else None

    def _routed(self, tables):
        by_bucket = {}
        for number, frames in tables.items():
            for frame in frames:
                self.counts["read"] += frame.height
                prepared = self.kernel.prepare(frame, number)
                self.counts.update(prepared.counts)
                hashes = routing.hash_columns(prepared.table, self.kernel.by, self.seed)
                chosen = buckets_of(hashes, self.buckets)
                for bucket in np.unique(chosen).tolist():
                    part = prepared.table.filter(pl.Series(chosen == bucket))
                    by_bucket.setdefault(bucket, {}).setdefault(number, []).append(part)
        return by_bucket

    def check_counts(self):
        """Every row that was read is counted by one exit."""
        counts = dict(self.counts)
        read = counts.pop("read", 0)
        assert read == sum(counts.values()), (read, counts)


class Folded:
    """The sum of all changes that came out."""

    def __init__(self):
        self.rows = Counter()

    def take(self, changes):
        for row in changes.iter_rows(named=True) if changes is not None else ():
            sign = row.pop(DIFF, 1)
            self.rows[tuple(sorted((name, plain(value)) for name, value in row.items()))] += sign
        assert all(count >= 0 for count in self.rows.values()), (
            "a row was taken back that was not there"
        )
        self.rows = +self.rows

    def holds(self, rows):
        """Whether that is these rows, which are dicts with ``__time``."""
        meant = Counter(tuple(sorted((n, plain(v)) for n, v in row.items())) for row in rows)
        assert self.rows == meant, f"missing {meant - self.rows}, too many {self.rows - meant}"


__all__ = ["DIFF", "TIME", "Folded", "KernelRun", "bag", "joined", "plain"]
