"""The ledger of an operator's state: held before + came in = went out + held after, in every batch.

What is held is counted from what is stored: each run's manifest entry has the sum that was made of its
table when that was written, and what was given out of it since is known by what was read for it
(:mod:`millstream.kernels.sorted_runs`). What came is counted when it arrives, and what went out on the rows
that go out; so the four numbers are made at four places.

===================  ================  ===========================  ==================================
kind                 counts            comes in                     goes out
===================  ================  ===========================  ==================================
final windows        events            in time for a window         with the last window that has them
panes                events, once for  in time, times the windows   in a firing
                     each window       still open for it
panes, told          the same          in a firing                  with a window that expires
sessions             events            arrived                      too late; with a session that
                                                                    expires, of which all must have been
                                                                    told; ``discard``: in a pane
count windows        events, once for  arrived, times the windows   in a window that is complete
                     each window       that begin at or before it
sliding windows      events            in time                      when no row can count them any more
sliding, rows owed   rows not settled  in time for a row            the settled row (``final``)
exact deduplication  kept ids          emitted with an id           when nothing can repeat them
Bloom filters        kept ids          emitted with an id           with their generation
budgets              money             granted, less refunds        with a day that is over
===================  ================  ===========================  ==================================

Windows in panes over ``discard`` that tell which pane a row is keep numbers of panes, and are counted by
these. A filter's bits cannot be counted: what it was given stands beside it. Sliding windows whose rows
may come again (``update``, ``retract``, corrected) are counted by events alone.

Where rows replace others, what was replaced must have been read: a fold of all runs of a slot finds
what was not, and so does the end of the slot (:meth:`SortedRuns.settle`). Kept ids and the events of
sliding windows are looked up and stay, so of them nothing tells whether a look-up found all.

A second equation finds what is never looked at again: of what waits for a time, nothing may be left
when that has come (:class:`millstream.kernels.timers.Waiting`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.errors import CorruptionError
from millstream.kernels.sorted_runs import SortedRuns


@dataclass
class HeldEvents:
    """What some families of runs hold, while a batch is worked on. Make it before they change."""

    step: str
    runs: tuple[SortedRuns, ...]
    came: int = 0
    left: int = 0
    before: int = field(init=False)

    def __post_init__(self) -> None:
        self.before = self._held()

    def _held(self) -> int:
        return sum(runs.events for runs in self.runs)

    def close(self) -> None:
        """Check that all that came is held, or has left.

        Raises:
            CorruptionError: events were lost or doubled; the batch must not be committed.
        """
        after = self._held()
        if (self.before + self.came - self.left - after) % 2**64:  # sums of money may go round
            raise CorruptionError(
                f"The ledger of step {self.step!r} does not balance: its state held {self.before} "
                f"events, {self.came} came into it and {self.left} left it, and it holds {after}. "
                "Nothing of this batch was committed. Please report this; the log still holds every "
                "event."
            )
