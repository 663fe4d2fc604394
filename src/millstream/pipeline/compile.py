"""From the declared graph to the executable plan: ports, stages, edges, and the fields needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from millstream.kernels.frames import PORT_FIRST
from millstream.kernels.plan import (
    Edge,
    InputPlan,
    JobPlan,
    NativePlan,
    OperatorPlan,
    SinkPlan,
    SourcePlan,
    StagePlan,
)
from millstream.kernels.steps import Step, columns_needed
from millstream.pipeline.graph import (
    NativeNode,
    Node,
    Output,
    SourceNode,
    StepNode,
    WindowNode,
    path_from,
)

Taker = NativeNode | WindowNode | Output


def compile_plan(app: str, outputs: Sequence[Output], bucket_labels: tuple[int, ...]) -> JobPlan:
    """Compile the part of the graph that leads to the outputs. Declaration order fixes the ports."""
    return _Compiler(app, outputs, bucket_labels).plan()


@dataclass
class _Compiler:
    app: str
    outputs: Sequence[Output]
    bucket_labels: tuple[int, ...]
    children: dict[Node, list[StepNode | Taker]] = field(default_factory=dict)
    ports: dict[Taker, int] = field(default_factory=dict)
    depths: dict[WindowNode, int] = field(default_factory=dict)

    def plan(self) -> JobPlan:
        for output in self.outputs:
            self._number(output)
        stages = max(self.depths.values(), default=-1) + 1
        return JobPlan(
            app=self.app,
            sources=tuple(self._source(n) for n in self.children if isinstance(n, SourceNode)),
            natives=tuple(self._native(n) for n in self.ports if isinstance(n, NativeNode)),
            stages=tuple(StagePlan(tuple(self._operators(depth))) for depth in range(stages)),
            sinks=tuple(
                SinkPlan(output.name, self.ports[output], output.key, output.schema, output.end)
                for output in self.outputs
            ),
            bucket_labels=self.bucket_labels,
        )

    def _number(self, output: Output) -> None:
        """Enter the path of one output: children, ports, and how deep each window lies."""
        path: list[Node | Output] = [*path_from(output.parent), output]
        depth = 0
        for parent, child in pairwise(path):
            assert not isinstance(parent, Output)
            assert not isinstance(child, SourceNode)
            known = self.children.setdefault(parent, [])
            if child not in known:
                known.append(child)
            if not isinstance(child, StepNode):
                self.ports.setdefault(child, PORT_FIRST + len(self.ports))
            if isinstance(child, WindowNode):
                self.depths[child] = depth
                depth += 1

    def _takers(self, node: Node) -> Iterable[tuple[tuple[Step, ...], Taker]]:
        """Follow the steps below a node to whatever takes the rows."""
        for child in self.children.get(node, ()):
            if isinstance(child, StepNode):
                for steps, taker in self._takers(child):
                    yield (child.step, *steps), taker
            else:
                yield (), child

    def _edges(self, node: Node) -> tuple[Edge, ...]:
        return tuple(
            Edge(
                step=taker.kernel.name if isinstance(taker, WindowNode) else taker.name,
                steps=steps,
                port=self.ports[taker],
                operator=taker.kernel if isinstance(taker, WindowNode) else None,
            )
            for steps, taker in self._takers(node)
        )

    def _time_ports(self, node: Node) -> tuple[int, ...]:
        """List the operators whose time follows this node's: straight below, or past natives."""
        ports: list[int] = []
        for _, taker in self._takers(node):
            if isinstance(taker, WindowNode):
                ports.append(self.ports[taker])
            elif isinstance(taker, NativeNode):
                ports += self._time_ports(taker)
        return tuple(dict.fromkeys(ports))

    def _source(self, node: SourceNode) -> SourcePlan:
        needed = self._fields_needed(node)
        return SourcePlan(
            name=node.name,
            topic=node.topic,
            fields=tuple(f for f in node.fields if needed is None or f.name in needed),
            time=node.time,
            rule=node.rule,
            edges=self._edges(node),
            time_ports=self._time_ports(node),
        )

    def _fields_needed(self, node: SourceNode) -> set[str] | None:
        needed = set(node.time.meta.root_names()) if node.time is not None else set()
        for steps, taker in self._takers(node):
            if isinstance(taker, WindowNode):
                wanted: set[str] | None = taker.kernel.columns_read
            elif isinstance(taker, NativeNode):
                wanted = set(taker.schema_in.names)
            else:
                wanted = {name for name, _ in taker.schema}
            came_in = columns_needed(steps, wanted)
            if came_in is None:
                return None
            needed |= came_in
        return needed

    def _native(self, node: NativeNode) -> NativePlan:
        return NativePlan(
            name=node.name,
            port=self.ports[node],
            function=node.function,
            schema_in=node.schema_in,
            schema_out=node.schema_out,
            time=node.time,
            edges=self._edges(node),
        )

    def _operators(self, depth: int) -> Iterable[OperatorPlan]:
        for node, at in self.depths.items():
            if at == depth:
                yield OperatorPlan(
                    port=self.ports[node],
                    kernel=node.kernel,
                    inputs=(self._input(node),),
                    edges=self._edges(node),
                    time_ports=self._time_ports(node),
                )

    def _input(self, node: WindowNode) -> InputPlan:
        above: Node = node.parent
        while isinstance(above, (StepNode, NativeNode)):
            above = above.parent
        if isinstance(above, SourceNode):
            return InputPlan(above.name, above.rule)
        return InputPlan(above.kernel.name, None)
