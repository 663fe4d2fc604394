"""What the state of each step of a plan follows from, and which of it can be computed of tables that are held.

==========================================  =========  ====================================================================
a step                                      is filled  because its state and rows
==========================================  =========  ====================================================================
aggregates of groups, distinct, except,     yes        follow from the rows that hold in its inputs, with their event times:
intersect, joins of tables, latest rows                all rows that ever came and went come to these
top                                         yes        ... if no two rows are alike in all that orders them
windows, sessions, patterns, dedup,         no         depend on when rows came and went, or on their order
process, enrich, a stream's look-up
==========================================  =========  ====================================================================

Between them are filters, splits, explode, expressions of single rows, and look-ups in static tables: what these make of a sum of changes is
the sum of what they make of each. What a function makes of a frame may depend on its other rows.

Source: Budiu et al., "DBSP: Automatic Incremental View Maintenance for Rich Query Languages", PVLDB 16(7), 2023 (arXiv
2203.16684), section 4: a query over Z-sets is a function of the sum of all changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from millstream.kernels.given_out import HeldTable
from millstream.kernels.joins.table_join import TableJoin
from millstream.kernels.operator import Operator
from millstream.kernels.plan import (
    ConsumerEdge,
    JobPlan,
    OperatorPlan,
    PlanEdge,
    StagePlan,
    StepEdge,
)
from millstream.kernels.static_lookup import StaticLookup
from millstream.kernels.steps import (
    AssignBranch,
    Drop,
    Explode,
    Filter,
    Rename,
    Select,
    SelectBranch,
    Step,
    WithColumns,
)
from millstream.kernels.tables.captured_table import CapturedTable
from millstream.kernels.tables.group_by import GroupBy
from millstream.kernels.tables.latest import LatestRows
from millstream.kernels.tables.top import TopRows

_LINEAR = (
    *(Filter, WithColumns, Select, Rename, Drop, Explode),
    *(AssignBranch, SelectBranch, StaticLookup),
)

Path = tuple[str | None, tuple[StepEdge, ...]]
"""The key of the step whose rows it takes, None for a source or for late rows; and the stateless steps."""


@dataclass(frozen=True)
class StepInputs:
    """Where a step has its rows from.

    ``above`` are the keys of the steps whose rows it takes. ``filled``: its state and what it gives out follow from the rows that hold
    in these steps. ``table``: the step, where its state is what it has given out.
    """

    above: frozenset[str]
    filled: bool
    table: HeldTable | None


def is_linear(step: Step) -> bool:
    """Return whether what a step makes of a sum of changes is the sum of what it makes of each."""
    return isinstance(step, _LINEAR)


def step_inputs(plan: JobPlan) -> dict[str, StepInputs]:
    """Return where each step of a plan has its rows from, by their keys."""
    found = {}
    for operator in _operators(plan):
        paths = [path for port in operator.ports for path in paths_to(plan, port)]
        above = frozenset(key for key, _ in paths if key is not None)
        from_steps = bool(paths) and all(key is not None for key, _ in paths)
        linear = all(is_linear(edge.step) for _, edges in paths for edge in edges)
        follows = from_steps and linear and _follows_from_rows(operator.kernel)
        found[operator.key] = StepInputs(above, follows, held_table(operator.kernel))
    return found


def _follows_from_rows(kernel: Operator) -> bool:
    if isinstance(kernel, TopRows):
        return kernel.weighted and kernel.is_total
    if isinstance(kernel, GroupBy):
        return kernel.weighted
    return isinstance(kernel, (LatestRows, TableJoin))


def held_table(kernel: Operator) -> HeldTable | None:
    """Return a step whose state is what it has given out; None of another."""
    is_held = not (isinstance(kernel, CapturedTable) and kernel.versions)
    is_held &= not (isinstance(kernel, TopRows) and not kernel.is_total)
    return kernel if is_held and isinstance(kernel, HeldTable) else None


def paths_to(plan: JobPlan, port: int) -> Iterator[Path]:
    """Yield the paths to a port."""
    others = [
        *(source.edges for source in plan.sources),
        *(native.edges for native in plan.natives),
        *(frame.edges for frame in plan.frames),
        *(operator.late_edges for operator in _operators(plan)),
    ]
    for edges in others:
        yield from ((None, path) for path in _down(edges, port))
    for operator in _operators(plan):
        yield from ((operator.key, path) for path in _down(operator.edges, port))


def _down(
    edges: Iterable[PlanEdge], port: int, above: tuple[StepEdge, ...] = ()
) -> Iterator[tuple[StepEdge, ...]]:
    for edge in edges:
        if isinstance(edge, StepEdge):
            yield from _down(edge.downstream, port, (*above, edge))
        elif edge.port == port:
            yield above


def _operators(plan: JobPlan) -> Iterator[OperatorPlan]:
    return (operator for stage in plan.stages for operator in stage.operators)


def part_below_tables(
    plan: JobPlan, tables: Iterable[str], steps: Iterable[str], views: Iterable[str]
) -> JobPlan:
    """Return the part of a plan that computes some ``steps`` and ``views`` of the rows of ``tables``.

    It has no source. The tables are in it, and get nothing: their rows come from elsewhere, by their edges.
    """
    tables, steps, views = {*tables}, {*steps}, {*views}
    sinks = tuple(sink for sink in plan.sinks if sink.name in views)
    ports = {sink.port for sink in sinks}
    for operator in _operators(plan):
        ports.update(operator.ports if operator.key in steps else ())

    def cut(operator: OperatorPlan) -> OperatorPlan:
        edges = tuple(_cut(operator.edges, ports))
        time_ports = tuple(port for port in operator.time_ports if port in ports)
        return replace(operator, edges=edges, late_edges=(), time_ports=time_ports)

    stages = tuple(
        StagePlan(
            tuple(cut(one) for one in stage.operators if one.key in tables | steps), stage.topics
        )
        for stage in plan.stages
    )
    return replace(plan, sources=(), natives=(), frames=(), stages=stages, sinks=sinks)


def _cut(edges: Iterable[PlanEdge], ports: set[int]) -> Iterator[PlanEdge]:
    """Yield the edges that lead to some ports."""
    for edge in edges:
        if isinstance(edge, ConsumerEdge):
            if edge.port in ports:
                yield edge
        elif downstream := tuple(_cut(edge.downstream, ports)):
            yield replace(edge, downstream=downstream)
