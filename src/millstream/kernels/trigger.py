"""When a window emits results, and what each of them contains: panes, as in the Dataflow model.

A *pane* is what one firing of a window emits for one key. In the life of a window ``[s, e)`` with
allowed lateness L, and W the operator's watermark, there are

============  ===================================================================================
early panes   before W reaches ``e``, as ``early`` says
on-time pane  one, when W reaches ``e``, with the events that came before their own split reached it
late panes    after that, until W reaches ``e + L``, as ``late`` says
============  ===================================================================================

An event is late when the watermark of its split had reached ``e`` before it was read. So its pane
does not depend on batch boundaries, or on how fast other partitions are read. A late event whose
split is ahead of the others waits for the on-time pane, and joins the late ones right after it. But
if early panes fire by batch or running time, and rows do not name their pane, it is
in the next early one, because waiting would only delay it. The on-time pane fires for every key that
has an event in time; a key that has none begins with a late pane. When W reaches ``e + L``, events
that are in no pane yet are emitted in a last, late one. With ``late`` None the window closes with its
on-time pane, and no late event is counted in it.

With ``once`` a window and key has one pane, and is closed by it: the early one, or if that has not fired
when W reaches ``e``, the on-time one. What comes between that and ``e`` is left out, and counted as
``filtered`` by the ledger.

In one batch, panes due by running time fire first, with the events of earlier batches; then the
batch's rows in their order, then panes due by the watermark. The ``mode`` says what panes contain.

Source: Akidau et al., "The Dataflow Model", VLDB 2015, sections 2.3 (triggers and accumulation). ``once`` is
Apache Beam's ``AfterFirst(trigger, AfterWatermark.pastEndOfWindow())`` without ``Repeatedly``: a trigger that has
finished closes its window.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Mode = Literal["final", "update", "discard", "retract"]
LatePolicy = Literal["drop", "side", "correct"]


@dataclass(frozen=True)
class AfterTime:
    """Fire this much running time (milliseconds) after the first event that no pane has."""

    delay_ms: int


@dataclass(frozen=True)
class AfterCount:
    """Fire with every ``count``-th event since the last firing, in the order of arrival."""

    count: int


@dataclass(frozen=True)
class EachBatch:
    """Fire at the end of every batch that brought something."""


Trigger = AfterTime | AfterCount | EachBatch


@dataclass(frozen=True)
class Once:
    """Fire one pane, and close the window with it."""

    trigger: AfterTime | AfterCount


@dataclass(frozen=True)
class EmitStrategy:
    """How an operator emits.

    ``mode``:

    ``final``    one row per window and key, when it expires (W ≥ e + L). With ``late`` policy
                 ``correct``: the on-time pane, then a row for each late pane that replaces it.
    ``update``   every pane gives the value so far; a later one replaces an earlier one. What no later
                 one replaces (a session that became part of another) is retracted.
    ``discard``  every pane gives only what came since the pane before.
    ``retract``  as ``update``, and each pane but the first comes after a row with ``__diff`` -1,
                 equal to the one that it replaces.

    ``early`` and ``late`` say when panes fire before and after the on-time pane (None: not at all).
    ``suppress_unchanged`` leaves out a pane that would say what the one before said; of ``discard``,
    one that nothing came for. ``panes`` adds the columns ``pane_kind`` ("early", "on_time", "late"),
    ``pane_index`` (from 0, over all panes of the window and key that came out), ``pane_first`` and
    ``pane_last`` (it is known that none can follow: the one at ``e + L``).
    ``once`` closes a window and key with its first pane; ``late`` is None then.

    Over an input that takes rows back, a key of which nothing is left has no row: its pane is a row
    with ``__diff`` -1 alone, in mode ``update``, too.
    """

    mode: Mode = "final"
    early: Trigger | None = None
    late: Trigger | None = EachBatch()
    late_policy: LatePolicy = "drop"
    suppress_unchanged: bool = True
    panes: bool = False
    once: bool = False

    @property
    def replaces(self) -> bool:
        """Whether a row may replace an earlier one without a retraction."""
        return self.mode == "update" or (self.mode == "final" and self.late_policy == "correct")

    @property
    def marks_replaced(self) -> bool:
        """Whether rows have ``__replaced``."""
        return False

    @property
    def heartbeat_ms(self) -> int | None:
        """How often a batch must come, in running time, even without input; None: never."""
        delays = [one.delay_ms for one in (self.early, self.late) if isinstance(one, AfterTime)]
        return min(delays, default=None)


@dataclass(frozen=True)
class EmitChanges(EmitStrategy):
    """``retract``, where rows that replace one another were declared, and an operator below needs retractions.

    The retraction of a row that another replaces is marked with ``__replaced``: without those, and otherwise
    as they are, the rows are the ones that were declared.
    """

    @property
    def marks_replaced(self) -> bool:
        return True

    @classmethod
    def of(cls, declared: EmitStrategy) -> EmitChanges:
        """Return how to emit the changes of what was declared with ``update``, or is corrected."""
        given = {one.name: getattr(declared, one.name) for one in fields(declared)}
        return cls(**{**given, "mode": "retract"})
