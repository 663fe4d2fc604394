"""The ledger of an operator's state: held before + came in = went out + held after, in every batch.

What is held is counted from what is stored: each run's manifest entry has the sum that was made of its
table when that was written, and what was given out of it since is known by what was read for it
(`sorted_runs.py`). What came is counted when it arrives, and what went out on the rows that go out; so the
four numbers are made at four places.

===================  ================  ===========================  ==================================
kind                 counts            comes in                     goes out
===================  ================  ===========================  ==================================
final windows        events            in time for a window         with the last window that has them
panes                events, once for  in time, times the windows   in a firing
                     each window       still open for it
panes, emitted       the same          in a firing                  with a window that expires
windows that fire    marks             the one pane                 with a window that expires
once, fired
sessions             events            arrived                      too late; with a session that
                                                                    expires, of which all must have been
                                                                    emitted; ``discard``: in a pane
count windows        events, once for  arrived, times the windows   in a window that is complete
                     each window       that begin at or before it
count windows over   rows              in time, less taken back     when nothing can take them back any
rows taken back                                                     more; then as count windows
rows that wait       rows              in time, less taken back     when nothing can take them back any
to be final                                                         more
rows with what       rows              added, less taken back       with their slot; of a table never
they were given
sliding windows      events            in time                      when no row can count them any more
sliding, rows due    rows not settled  in time for a row            the settled row (``final``)
exact deduplication  ids               emitted with an id           when nothing can repeat them
... of changes       rows, kept ids    added, less taken back       with their slot
Bloom filters        ids               emitted with an id           with their generation
interval joins       rows              in time, and not past their  alone; with their slot, of whose rows
                                       end                          the others must have had a partner
as-of joins          rows, versions    in time; counting            due; not needed any more; with
                                                                    their slot, if they are corrected
stored searches      rows (a copy      in time; counting            due; not needed any more
                     for each shard),
                     versions
patterns             rows              in time; for a partial       due; with the last partial
                                       match                        match that has them
process functions    rows, keys        in time; with the first      due; when nothing is left of them
                                       that is to know of them
tables               keys              with their first row         deleted; expired
budgets              money             granted, less refunds        with a day that is over
compare              rows              added, less taken back       no window is compared with theirs
                                                                    any more
alerts               rows, alerts      added, less taken back;      of a window that is over; resolved;
                     that fire, runs   fired; begun or longer       their next window is over
enrichment           answers           from the function            when they have expired
groups               events and        arrived                      with a group of which no row is left
                     retractions
groups, times        rows              arrived, less taken back     never
first of a group     rows              arrived, less taken back     of rows that stay: not among the
                                                                    first any more
===================  ================  ===========================  ==================================

Windows in ``discard`` panes whose rows name their pane keep numbers of panes, and are counted by
these. A filter's bits cannot be counted: the number of its ids is stored with it. Sliding windows whose rows
may come again (``update``, ``retract``, corrected) are counted by events alone.

Where rows replace others, what was replaced must have been read: a fold of all runs of a slot finds
what was not, and so does the end of the slot (:meth:`SortedRuns.check_slot`). Kept ids and the events of
sliding windows are looked up and stay, so nothing shows whether a look-up found all of them.

After buckets were divided, it is not known how many of the events that the old ones had emitted are in which new
one. Until all runs of a slot have been folded, its number is right but for a constant, which the difference of two batches does not
have. In the batch that finds the constant, by the fold or the end of the slot, the step's equation is not checked.

A second equation finds what is never looked at again: of what waits for a time, nothing may be left
when that has come (:class:`millstream.kernels.state.timers.WaitingLedger`; of joined rows, that is found with
their slot).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.errors import CorruptionError
from millstream.kernels.state.sorted_runs import SortedRuns


@dataclass
class StateLedger:
    """What some families of runs hold, while a batch is worked on. Make it before they change."""

    step: str
    runs: tuple[SortedRuns, ...]
    events_in: int = 0
    events_out: int = 0
    held_before: int = field(init=False)

    def __post_init__(self) -> None:
        self.held_before = self._held()

    def _held(self) -> int:
        return sum(runs.events for runs in self.runs)

    def check(self) -> None:
        """Check that all that came is held, or has left.

        Nothing is known in a batch that has restated what is held: see :class:`SortedRuns`.

        Raises:
            CorruptionError: events were lost or doubled; the batch must not be committed.
        """
        if any(runs.restated for runs in self.runs):
            return
        after = self._held()
        if (
            self.held_before + self.events_in - self.events_out - after
        ) % 2**64:  # sums of money may go round
            raise CorruptionError(
                f"The ledger of step {self.step!r} does not balance: its state held {self.held_before} "
                f"events, {self.events_in} came in and {self.events_out} went out, and it holds {after}. "
                "Nothing of this batch was committed. Please report this; the log still holds every "
                "event."
            )
