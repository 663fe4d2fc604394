"""The graph of a pipeline as plain values, to be stored with an app and drawn.

Nodes are sources, steps and outputs; an edge leads from one to the next. A node's ``step`` is its name in
the ledger.
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
    ``name``, ``step``, and ``does``: the class of a step or operator, or the sink of an output. An edge
    has ``from``, ``to``, and ``late``: whether it is that of a side output of late rows.
    """
    graph = _GraphBuilder()
    nodes = _node_by_port(plan)
    for node in nodes.values():
        graph.nodes[node["id"]] = node
    for source in plan.sources:
        start = graph.add("source", source.number, "topic", source.name, source.topic)
        graph.follow(start, source.edges, nodes)
    for frame in plan.frames:
        start = graph.add("source", frame.number, "dataframe", frame.name, "Spark")
        graph.follow(start, frame.edges, nodes)
    for native in plan.natives:
        graph.follow(nodes[native.port]["id"], native.edges, nodes)
    for stage in plan.stages:
        for operator in stage.operators:
            start = nodes[operator.port]["id"]
            graph.follow(start, operator.edges, nodes)
            graph.follow(start, operator.late_edges, nodes, late=True)
    order = {step: number for number, step in enumerate(plan.steps)}
    ordered = sorted(graph.nodes.values(), key=lambda node: order.get(node["step"], len(order)))
    return {"nodes": ordered, "edges": list(graph.edges.values())}


def _node_by_port(plan: JobPlan) -> dict[int, dict[str, str]]:
    nodes: dict[int, dict[str, str]] = {}
    for native in plan.natives:
        nodes[native.port] = _node(f"port-{native.port}", "native", native.name, "Spark")
    for stage in plan.stages:
        for operator in stage.operators:
            does = type(operator.kernel).__name__
            node = _node(f"port-{operator.port}", "operator", operator.kernel.name, does)
            nodes.update(dict.fromkeys(operator.ports, node))
    for sink in plan.sinks:
        kind, does = _sink_node(sink.spec)
        nodes[sink.port] = _node(f"port-{sink.port}", kind, sink.name, does)
    return nodes


def _node(identity: str, kind: str, name: str, does: str) -> dict[str, str]:
    return {"id": identity, "kind": kind, "name": name, "step": name, "does": does}


def _sink_node(spec: SinkSpec) -> tuple[str, str]:
    """Return the kind of an output, and what ``does`` shows; no address, as it may hold a password."""
    if isinstance(spec, ViewSinkSpec):
        return "view", "SQLite" if spec.store is None else "PostgreSQL"
    if isinstance(spec, TopicSinkSpec):
        return "topic", spec.topic
    if isinstance(spec, DatasetSinkSpec):
        return "dataset", spec.path
    assert isinstance(spec, ForeachSinkSpec)
    return "function", str(getattr(spec.function, "__name__", "function"))


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
        edges: Iterable[PlanEdge],
        nodes: dict[int, dict[str, str]],
        *,
        late: bool = False,
    ) -> None:
        """Add what is downstream of a node. A step below a union is reached several times: it is one."""
        for edge in edges:
            if isinstance(edge, StepEdge):
                name, does = edge.step.name, type(edge.step).__name__
                end = self.add("step", name, "step", name, does)
                self.follow(end, edge.downstream, nodes)
            else:
                assert isinstance(edge, ConsumerEdge)
                end = nodes[edge.port]["id"]
            self.edges[start, end, late] = {"from": start, "to": end, "late": late}
