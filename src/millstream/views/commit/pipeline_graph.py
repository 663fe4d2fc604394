"""The graph of a pipeline as plain values, to be stored with an app and drawn.

Nodes are what rows come from, go through, and end in; an edge leads from one to the next. A node's
``step`` is the name under which the books account for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from millstream.kernels.plan import (
    ConsumerEdge,
    DatasetSinkSpec,
    ForeachSinkSpec,
    JobPlan,
    PlanEdge,
    SinkSpec,
    StepEdge,
    TopicSinkSpec,
    ViewSinkSpec,
)


def pipeline_graph(plan: JobPlan) -> dict[str, Any]:
    """Return the graph of a plan: ``nodes`` and ``edges``, in the order of the graph.

    A node has ``id``, ``kind`` (topic, dataframe, step, operator, native, view, dataset, function),
    ``name``, ``step``, and ``does``: the class of a step or operator, or where an output ends. An
    edge has ``from``, ``to``, and ``late``: whether rows that came too late take it.
    """
    drawing = _GraphBuilder()
    takers = _node_by_port(plan)
    for node in takers.values():
        drawing.nodes[node["id"]] = node
    for source in plan.sources:
        start = drawing.add("source", source.number, "topic", source.name, source.topic)
        drawing.follow(start, source.edges, takers)
    for frame in plan.frames:
        start = drawing.add("source", frame.number, "dataframe", frame.name, "Spark")
        drawing.follow(start, frame.edges, takers)
    for native in plan.natives:
        drawing.follow(takers[native.port]["id"], native.edges, takers)
    for stage in plan.stages:
        for operator in stage.operators:
            start = takers[operator.port]["id"]
            drawing.follow(start, operator.edges, takers)
            drawing.follow(start, operator.late_edges, takers, late=True)
    order = {step: number for number, step in enumerate(plan.steps)}
    nodes = sorted(drawing.nodes.values(), key=lambda node: order.get(node["step"], len(order)))
    return {"nodes": nodes, "edges": list(drawing.edges.values())}


def _node_by_port(plan: JobPlan) -> dict[int, dict[str, str]]:
    """Give the node of each port."""
    takers: dict[int, dict[str, str]] = {}
    for native in plan.natives:
        takers[native.port] = _node(f"port-{native.port}", "native", native.name, "Spark")
    for stage in plan.stages:
        for operator in stage.operators:
            does = type(operator.kernel).__name__
            node = _node(f"port-{operator.port}", "operator", operator.kernel.name, does)
            takers.update(dict.fromkeys(operator.ports, node))
    for sink in plan.sinks:
        kind, where = _sink_node(sink.spec)
        takers[sink.port] = _node(f"port-{sink.port}", kind, sink.name, where)
    return takers


def _node(identity: str, kind: str, name: str, does: str) -> dict[str, str]:
    return {"id": identity, "kind": kind, "name": name, "step": name, "does": does}


def _sink_node(end: SinkSpec) -> tuple[str, str]:
    """Say what kind of output it is, and where it ends. An address may hold a password: not shown."""
    if isinstance(end, ViewSinkSpec):
        return "view", "SQLite" if end.store is None else "PostgreSQL"
    if isinstance(end, TopicSinkSpec):
        return "topic", end.topic
    if isinstance(end, DatasetSinkSpec):
        return "dataset", end.path
    assert isinstance(end, ForeachSinkSpec)
    return "function", str(getattr(end.function, "__name__", "function"))


@dataclass
class _GraphBuilder:
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    edges: dict[tuple[str, str, bool], dict[str, Any]] = field(default_factory=dict)

    def add(self, group: str, number: int | str, kind: str, name: str, does: str) -> str:
        node = _node(f"{group}-{number}", kind, name, does)
        self.nodes.setdefault(node["id"], node)
        return node["id"]

    def follow(
        self,
        start: str,
        ways: Iterable[PlanEdge],
        takers: dict[int, dict[str, str]],
        *,
        late: bool = False,
    ) -> None:
        """Draw the ways down from a node. A step below a union comes by several ways: it is one."""
        for way in ways:
            if isinstance(way, StepEdge):
                name, does = way.step.name, type(way.step).__name__
                end = self.add("step", name, "step", name, does)
                self.follow(end, way.downstream, takers)
            else:
                assert isinstance(way, ConsumerEdge)
                end = takers[way.port]["id"]
            self.edges[start, end, late] = {"from": start, "to": end, "late": late}
