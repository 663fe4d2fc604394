"""From the declared graph to the executable plan: ports, stages, edges, and the fields needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millstream.kernels.frames import PORT_FIRST
from millstream.kernels.plan import (
    ClockPlan,
    Edge,
    JobPlan,
    NativePlan,
    OperatorPlan,
    SinkPlan,
    SourcePlan,
    StagePlan,
)
from millstream.kernels.steps import Step, columns_needed
from millstream.pipeline.graph import (
    LateNode,
    NativeNode,
    Node,
    OperatorNode,
    Output,
    SourceNode,
    StepNode,
    UnionNode,
    nodes_above,
    parents,
)

Taker = NativeNode | OperatorNode | Output


class Way(NamedTuple):
    """How rows get from a node to what takes them: through steps, as its input ``number``."""

    steps: tuple[Step, ...]
    taker: Taker
    number: int


def compile_plan(app: str, outputs: Sequence[Output], bucket_labels: tuple[int, ...]) -> JobPlan:
    """Compile the part of the graph that leads to the outputs. Declaration order fixes the ports."""
    return _Compiler(app, outputs, bucket_labels).plan()


@dataclass
class _Compiler:
    app: str
    outputs: Sequence[Output]
    bucket_labels: tuple[int, ...]
    children: dict[Node, list[Node | Output]] = field(default_factory=dict)
    ports: dict[Taker, tuple[int, ...]] = field(default_factory=dict)
    depths: dict[OperatorNode, int] = field(default_factory=dict)
    sources: dict[SourceNode, int] = field(default_factory=dict)

    def plan(self) -> JobPlan:
        for node in nodes_above(self.outputs):
            self._enter(node)
        stages = max(self.depths.values(), default=-1) + 1
        return JobPlan(
            app=self.app,
            sources=tuple(self._source(node) for node in self.sources),
            natives=tuple(self._native(n) for n in self.ports if isinstance(n, NativeNode)),
            stages=tuple(StagePlan(tuple(self._operators(depth))) for depth in range(stages)),
            sinks=tuple(
                SinkPlan(output.name, self.ports[output][0], output.key, output.schema)
                for output in self.outputs
            ),
            bucket_labels=self.bucket_labels,
        )

    def _enter(self, node: Node | Output) -> None:
        """Enter a node below its parents; number its ports, or its place among the sources."""
        for parent in parents(node):
            self.children.setdefault(parent, []).append(node)
        if isinstance(node, SourceNode):
            self.sources[node] = len(self.sources)
        elif isinstance(node, (NativeNode, OperatorNode, Output)):
            first = PORT_FIRST + sum(len(ports) for ports in self.ports.values())
            count = len(node.inputs) if isinstance(node, OperatorNode) else 1
            self.ports[node] = tuple(range(first, first + count))
        if isinstance(node, OperatorNode):
            above = [self._depth_above(parent) for parent in node.inputs]
            self.depths[node] = max(above)

    def _depth_above(self, node: Node) -> int:
        """Say in which stage, at the earliest, an operator right below a node can stand."""
        if isinstance(node, OperatorNode):
            return self.depths[node] + 1
        return max((self._depth_above(parent) for parent in parents(node)), default=0)

    # ── ways down ───────────────────────────────────────────────────────────────────────────

    def _ways(self, node: Node) -> Iterator[Way]:
        """Follow steps and unions below a node to whatever takes its rows."""
        for child in self.children.get(node, ()):
            if isinstance(child, (StepNode, UnionNode)):
                steps = (child.step,) if isinstance(child, StepNode) else ()
                for way in self._ways(child):
                    yield way._replace(steps=(*steps, *way.steps))
            elif isinstance(child, (NativeNode, OperatorNode, Output)):
                yield Way((), child, parents(child).index(node))

    def _edges(self, node: Node) -> tuple[Edge, ...]:
        return tuple(
            Edge(
                step=way.taker.kernel.name
                if isinstance(way.taker, OperatorNode)
                else way.taker.name,
                steps=way.steps,
                port=self.ports[way.taker][way.number],
                operator=way.taker.kernel if isinstance(way.taker, OperatorNode) else None,
                number=way.number,
            )
            for way in self._ways(node)
        )

    def _time_ports(self, node: Node) -> tuple[int, ...]:
        """List the operators whose time follows this node's: straight below, or past those that
        change neither rows nor time.
        """
        ports: list[int] = []
        for way in self._ways(node):
            if isinstance(way.taker, OperatorNode):
                ports.append(self.ports[way.taker][0])
                if way.taker.kernel.transparent:
                    ports += self._time_ports(way.taker)
            elif isinstance(way.taker, NativeNode):
                ports += self._time_ports(way.taker)
        return tuple(dict.fromkeys(ports))

    # ── sources and native steps ────────────────────────────────────────────────────────────

    def _source(self, node: SourceNode) -> SourcePlan:
        needed = self._columns_needed(node)
        if needed is not None:
            needed |= node.rule.marks.columns_read()
        if needed is not None and node.time is not None:
            needed |= set(node.time.meta.root_names())
        return SourcePlan(
            number=self.sources[node],
            name=node.name,
            topic=node.topic,
            fields=tuple(f for f in node.fields if needed is None or f.name in needed),
            time=node.time,
            rule=node.rule,
            edges=self._edges(node),
            time_ports=self._time_ports(node),
            ordered=self._ordered_below(node),
        )

    def _columns_needed(self, node: Node) -> set[str] | None:
        """Say which columns of a node's rows anything below it reads; None stands for all."""
        needed: set[str] = set()
        for way in self._ways(node):
            came_in = columns_needed(way.steps, self._columns_wanted(way))
            if came_in is None:
                return None
            needed |= came_in
        return needed

    def _columns_wanted(self, way: Way) -> set[str] | None:
        taker = way.taker
        if isinstance(taker, Output):
            return {name for name, _ in taker.schema}
        if isinstance(taker, NativeNode):
            return set(taker.schema_in.names)
        wanted: set[str] | None = taker.kernel.columns_read(way.number)
        passed_on: list[Node] = [taker] if taker.kernel.transparent else []
        passed_on += self._late_nodes(taker)
        for node in passed_on:
            below = self._columns_needed(node)
            wanted = None if wanted is None or below is None else wanted | below
        return wanted

    def _late_nodes(self, node: OperatorNode) -> list[LateNode]:
        return [child for child in self.children.get(node, ()) if isinstance(child, LateNode)]

    def _ordered_below(self, node: Node) -> bool:
        """Say whether an operator that gets this node's rows as they are needs their order."""
        takers = [w.taker for w in self._ways(node) if isinstance(w.taker, OperatorNode)]
        return any(
            taker.kernel.ordered or (taker.kernel.transparent and self._ordered_below(taker))
            for taker in takers
        )

    def _native(self, node: NativeNode) -> NativePlan:
        return NativePlan(
            name=node.name,
            port=self.ports[node][0],
            function=node.function,
            schema_in=node.schema_in,
            schema_out=node.schema_out,
            time=node.time,
            edges=self._edges(node),
        )

    # ── operators ───────────────────────────────────────────────────────────────────────────

    def _operators(self, depth: int) -> Iterable[OperatorPlan]:
        for node, at in self.depths.items():
            if at == depth:
                transparent = node.kernel.transparent
                late = self._late_nodes(node)
                yield OperatorPlan(
                    ports=self.ports[node],
                    kernel=node.kernel,
                    clocks=tuple(dict.fromkeys(self._clocks(node))),
                    edges=self._edges(node),
                    late_edges=tuple(edge for child in late for edge in self._edges(child)),
                    time_ports=() if transparent else self._time_ports(node),
                )

    def _clocks(self, node: Node) -> Iterator[ClockPlan]:
        """Name what a node's time follows: the nearest sources and operators that make time."""
        for parent in parents(node):
            if isinstance(parent, SourceNode):
                yield ClockPlan(parent.name, self.sources[parent], parent.rule)
            elif isinstance(parent, OperatorNode) and not parent.kernel.transparent:
                yield ClockPlan(parent.kernel.name, None, None)
            else:
                yield from self._clocks(parent)
