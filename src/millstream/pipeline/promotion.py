"""Windows that emit changes although rows that replace one another were declared.

``emit("update")``, and final rows that are corrected, are enough for a sink. An operator below that may drop a
row, or adds rows up, must be told which rows no longer hold. So such a window emits as with ``"retract"`` if one
follows. It is compiled in, and not declared: the definition of the window is the same, and so is its state, which
has what a row was made of in both modes. Sinks that take the window's rows as they are leave out the
retractions of rows that others replace.

A retraction must be in time for what follows. So a session that has grown since its row came has a new one, if no
other pane is due, by the time at which that row expires (:mod:`millstream.kernels.sessions.panes`): sinks show it, too.
"""

from __future__ import annotations

from dataclasses import replace

from millstream.kernels.operator import Operator
from millstream.kernels.plan import Updates
from millstream.kernels.sessions.config import SessionConfig
from millstream.kernels.trigger import EmitChanges
from millstream.kernels.windows.aggregate_operator import AggregateOperator
from millstream.kernels.windows.sliding_panes import SlidingCorrections, SlidingPaneOperator
from millstream.kernels.windows.sliding_windows import SlidingWindowOperator


def replaces_rows(kernel: Operator) -> bool:
    """Return whether rows of an operator may replace earlier ones without a retraction."""
    if isinstance(kernel, SessionConfig):
        return kernel.panes.emission.replaces
    return isinstance(kernel, AggregateOperator) and kernel.emission.replaces


def emitting_changes(kernel: Operator) -> Operator:
    """Return such an operator, emitting changes."""
    if isinstance(kernel, SessionConfig):
        panes = replace(kernel.panes, emission=EmitChanges.of(kernel.panes.emission))
        return replace(kernel, panes=panes)
    assert isinstance(kernel, AggregateOperator)
    emission = EmitChanges.of(kernel.emission)
    if isinstance(kernel, SlidingWindowOperator) and _is_corrected(kernel):
        whole = replace(emission, suppress_unchanged=False)  # such rows come with each late event
        return SlidingCorrections(
            kernel.name, kernel.aggregation, whole, kernel.window, kernel.lateness_us
        )
    return replace(kernel, emission=emission)


def _is_corrected(kernel: SlidingWindowOperator) -> bool:
    return kernel.settles and not isinstance(kernel, SlidingPaneOperator)


def updates_of(kernel: Operator) -> Updates:
    """Return what sinks show of such an operator: with a sign, where it takes some rows back for good."""
    if isinstance(kernel, SessionConfig):
        return Updates(signed=kernel.panes.retracts)
    assert isinstance(kernel, AggregateOperator)
    return Updates(signed=kernel.aggregation.weighted)
