"""Windows that emit changes although rows that replace one another were declared.

``emit("update")``, and final rows that are corrected, are enough for a sink. An operator below that may drop a
row, or adds rows up, must be told which rows no longer hold. So such a window emits as with ``"retract"`` if one
follows. It is compiled in, and not declared: the definition of the window is the same, and so is its state, which
has the last row of each key in both modes. Sinks that take the window's rows as they are leave out the
retractions of rows that others replace.
"""

from __future__ import annotations

from dataclasses import replace

from millstream.kernels.operator import Operator
from millstream.kernels.plan import Updates
from millstream.kernels.sessions.operator import SessionOperator
from millstream.kernels.trigger import EmitChanges
from millstream.kernels.windows.aggregate_operator import AggregateOperator


def replaces_rows(kernel: Operator) -> bool:
    """Return whether rows of an operator may replace earlier ones without a retraction."""
    if isinstance(kernel, SessionOperator):
        return kernel.panes.emission.replaces
    return isinstance(kernel, AggregateOperator) and kernel.emission.replaces


def emitting_changes(kernel: Operator) -> Operator:
    """Return such an operator, emitting changes."""
    if isinstance(kernel, SessionOperator):
        panes = replace(kernel.panes, emission=EmitChanges.of(kernel.panes.emission))
        return replace(kernel, panes=panes)
    assert isinstance(kernel, AggregateOperator)
    return replace(kernel, emission=EmitChanges.of(kernel.emission))


def updates_of(kernel: Operator) -> Updates:
    """Return what sinks show of such an operator: with a sign, where it takes some rows back for good."""
    if isinstance(kernel, SessionOperator):
        return Updates(signed=True)
    assert isinstance(kernel, AggregateOperator)
    return Updates(signed=kernel.aggregation.weighted)
