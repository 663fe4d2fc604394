"""A key that most rows of a step have: one task processes them, and all others wait for it.

Aggregates of windows and groups are computed in part before rows are divided by key, so there a frequent key is one
row of each task. Steps that need every event (sessions, joins, deduplication, windows by count) get them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from millstream.kernels.routing import HOT_SHARE, HotKey

_ROWS_MIN = 100_000  # of a batch: fewer take no noticeable time


@dataclass
class SkewWatch:
    """Looks at batch after batch, and warns of each step once in a run."""

    on_notice: Callable[[str], None]
    _warned: set[str] = field(default_factory=set)

    def observe(self, hot_keys: Iterable[HotKey], sent: Mapping[str, int]) -> None:
        """Look at what the tasks of a batch have found; ``sent`` has the rows of each port."""
        rows: Counter[tuple[str, str, str, str]] = Counter()
        for each in hot_keys:
            rows[each[:-1]] += each.rows
        for (port, step, _, key), count in rows.items():
            total = sent.get(port, 0)
            if step not in self._warned and total >= _ROWS_MIN and count >= HOT_SHARE * total:
                self._warned.add(step)
                self.on_notice(
                    f"{count / total:.0%} of the {total:,} rows of a batch that went to {step!r} have one key, {key}. "
                    "One task processes them all, and the others wait for it. If the key stands for a missing value, "
                    "filter its rows out before the step, or take them to a step of their own; otherwise aggregate in "
                    "two steps, first by the key and a further column, and then the results by the key."
                )
