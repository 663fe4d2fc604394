"""Sliding windows over rows that may be taken back, as their rule has them."""

from collections import Counter

import millstream as ms

SIZE = 10
AGGREGATES = {"rows": ms.count(), "total": ms.sum("n"), "top": ms.max("n"), "avg": ms.mean("n")}


class Model:
    """Looks back from every row, over the events that came, those taken back counted out."""

    def __init__(self, lateness):
        self.lateness, self.events = lateness, []

    def take(self, changes, seen):
        """Take changes that are in time for some row; give how many are not."""
        in_time = [c for c in changes if seen <= c.time + SIZE + self.lateness]
        self.events += [(c.time, c.key, c.n, c.diff, seen) for c in in_time]
        return len(changes) - len(in_time)

    def row(self, key, time, *, deferring=False):
        """How often the row is there, and its values; ``deferring``: without what is late for it."""
        allowed = 0 if deferring else self.lateness
        counted = [
            (t, n, diff)
            for t, k, n, diff, seen in self.events
            if k == key and time - SIZE <= t <= time and seen <= time + allowed
        ]
        times = sum(diff for t, _, diff in counted if t == time)
        bag = Counter()
        for _, n, diff in counted:
            bag[n] += diff
        assert times >= 0
        assert all(count >= 0 for count in bag.values())
        if not times:
            return 0, None
        values = list(bag.elements())
        return times, (len(values), sum(values), max(values), sum(values) / len(values))

    def waited_for(self, key, time):
        """Whether there is anything that was late for the row when it came, and is not taken back."""
        left = Counter()
        for t, k, n, diff, seen in self.events:
            if k == key and time - SIZE <= t <= time < seen <= time + self.lateness:
                left[t, n, seen] += diff
        return any(left.values())

    @property
    def places(self):
        return sorted({(k, t) for t, k, *_ in self.events})

    def rows(self, visible):
        bag = Counter()
        for key, time in self.places:
            times, values = self.row(key, time)
            if times and visible(time):
                bag[(time - SIZE, time, key, *values)] = times
        return bag
