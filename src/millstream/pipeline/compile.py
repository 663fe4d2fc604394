"""From the declared graph to the executable plan: ports, stages, edges, and the fields needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from millstream.errors import ConfigError
from millstream.kernels.frames import PORT_FIRST
from millstream.kernels.isolation import OnError, UserCode
from millstream.kernels.keyhash import Buckets
from millstream.kernels.log_order import SOURCES_MAX
from millstream.kernels.plan import (
    ClockPlan,
    Edge,
    FramePlan,
    JobPlan,
    NativePlan,
    OperatorPlan,
    Passage,
    SinkPlan,
    SourcePlan,
    StagePlan,
)
from millstream.kernels.plan import Way as PlanWay
from millstream.kernels.steps import Step
from millstream.pipeline.graph import (
    FrameNode,
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
from millstream.pipeline.meaning import Meanings

Taker = NativeNode | OperatorNode | Output


class Way(NamedTuple):
    """How rows get from a node to what takes them: through steps, as its input ``number``."""

    steps: tuple[Step, ...]
    taker: Taker
    number: int


def compile_plan(
    app: str,
    outputs: Sequence[Output],
    bucket_labels: Buckets,
    on_error: OnError = "dead-letter",
) -> JobPlan:
    """Compile the part of the graph that leads to the outputs. Declaration order fixes the ports.

    ``on_error`` says what rows lead to on which an operator's expressions fail.
    """
    return _Compiler(app, outputs, bucket_labels, on_error).plan()


@dataclass
class _Compiler:
    app: str
    outputs: Sequence[Output]
    bucket_labels: Buckets
    on_error: OnError
    children: dict[Node, list[Node | Output]] = field(default_factory=dict)
    ports: dict[Taker, tuple[int, ...]] = field(default_factory=dict)
    depths: dict[OperatorNode, int] = field(default_factory=dict)
    sources: dict[SourceNode | FrameNode, int] = field(default_factory=dict)
    meanings: Meanings = field(init=False)

    def plan(self) -> JobPlan:
        nodes = nodes_above(self.outputs)
        self.meanings = Meanings(nodes)
        for node in nodes:
            self._enter(node)
        stages = max(self.depths.values(), default=-1) + 1
        return JobPlan(
            app=self.app,
            sources=tuple(self._source(n) for n in self.sources if isinstance(n, SourceNode)),
            natives=tuple(self._native(n) for n in self.ports if isinstance(n, NativeNode)),
            stages=tuple(
                StagePlan(tuple(self._operators(depth)), self._topics) for depth in range(stages)
            ),
            sinks=tuple(
                SinkPlan(o.name, self.ports[o][0], o.key, o.schema, o.end, o.replaces)
                for o in self.outputs
            ),
            bucket_labels=self.bucket_labels,
            frames=tuple(self._frame(n) for n in self.sources if isinstance(n, FrameNode)),
            steps=tuple(name for node in nodes if (name := _name(node)) is not None),
            heartbeat_ms=self._heartbeat_ms(),
            program=self.meanings.program(),
        )

    @property
    def _topics(self) -> tuple[str, ...]:
        """All topics that are read, by number: a program that goes on with the state reads the same."""
        return tuple(sorted({n.topic for n in self.sources if isinstance(n, SourceNode)}))

    def _heartbeat_ms(self) -> int | None:
        wanted = [node.kernel.heartbeat_ms for node in self.depths]
        return min((ms for ms in wanted if ms is not None), default=None)

    def _enter(self, node: Node | Output) -> None:
        """Enter a node below its parents; number its ports, or its place among the sources."""
        for parent in parents(node):
            self.children.setdefault(parent, []).append(node)
        if isinstance(node, (SourceNode, FrameNode)):
            self.sources[node] = len(self.sources)
            if len(self.sources) > SOURCES_MAX:
                raise ConfigError(
                    f"The app {self.app!r} reads more than {SOURCES_MAX} streams, with {node.name!r}. "
                    f"A job reads up to {SOURCES_MAX}: divide it into several apps, or bring the "
                    "topics together into fewer."
                )
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

    def _edges(self, node: Node) -> tuple[PlanWay, ...]:
        """Give the ways down from a node as a tree, so that shared steps are run once."""
        ways: list[PlanWay] = []
        for child in self.children.get(node, ()):
            if isinstance(child, StepNode):
                ways.append(Passage(child.step, child.made, child.code, self._edges(child)))
            elif isinstance(child, UnionNode):
                ways += self._edges(child)
            elif isinstance(child, (NativeNode, OperatorNode, Output)):
                ways.append(self._edge(Way((), child, parents(child).index(node))))
        return tuple(ways)

    def _edge(self, way: Way) -> Edge:
        taker, wanted = way.taker, self._columns_wanted(way)
        columns = None if wanted is None else tuple(sorted(wanted))
        if isinstance(taker, Output):
            columns = tuple(name for name, _ in taker.schema)
        operator = taker.kernel if isinstance(taker, OperatorNode) else None
        name = taker.kernel.name if isinstance(taker, OperatorNode) else taker.name
        return Edge(
            step=name,
            port=self.ports[taker][way.number],
            operator=operator,
            number=way.number,
            columns=columns,
            ordered=self._needs_order(taker),
            code=UserCode(name, on_error=self.on_error),
            latest_by=taker.key if isinstance(taker, Output) else (),
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
            values=node.values,
            bad=node.bad,
            topic_number=self._topics.index(node.topic),
        )

    def _columns_needed(self, node: Node) -> set[str] | None:
        """Say which columns of a node's rows anything below it reads; None stands for all."""
        needed: set[str] = set()
        for way in self._ways(node):
            wanted = self._columns_wanted(way)
            for step in reversed(way.steps):
                wanted = step.columns_before(wanted)
            if wanted is None:
                return None
            needed |= wanted
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
        """Say whether what gets this node's rows as they are needs their order."""
        return any(self._needs_order(way.taker) for way in self._ways(node))

    def _needs_order(self, taker: Taker) -> bool:
        if isinstance(taker, OperatorNode):
            kernel = taker.kernel
            passed_on: list[Node] = [taker] if kernel.transparent else []
            passed_on += self._late_nodes(taker)
            return kernel.ordered or any(map(self._ordered_below, passed_on))
        return isinstance(taker, Output) and self._comes_divided(taker.parent)

    def _comes_divided(self, node: Node) -> bool:
        """Say whether a node's rows come by several ways, or out of several buckets: not in their order."""
        if isinstance(node, StepNode):
            return self._comes_divided(node.parent)
        if isinstance(node, OperatorNode):
            return node.kernel.transparent
        return isinstance(node, LateNode) or (isinstance(node, UnionNode) and len(node.inputs) > 1)

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

    def _frame(self, node: FrameNode) -> FramePlan:
        assert node.rule.delay_us is not None, "from_spark takes no rule without a delay"
        return FramePlan(
            number=self.sources[node],
            name=node.name,
            frame=node.frame,
            schema=node.schema,
            time=node.time,
            delay_us=node.rule.delay_us,
            edges=self._edges(node),
            time_ports=self._time_ports(node),
        )

    # ── operators ───────────────────────────────────────────────────────────────────────────

    def _operators(self, depth: int) -> Iterable[OperatorPlan]:
        for node, at in self.depths.items():
            if at == depth:
                transparent = node.kernel.transparent
                late = self._late_nodes(node)
                yield OperatorPlan(
                    ports=self.ports[node],
                    key=self.meanings.keys[node],
                    kernel=node.kernel,
                    clocks=_told_apart(dict.fromkeys(self._clocks(node))),
                    edges=self._edges(node),
                    late_edges=tuple(edge for child in late for edge in self._edges(child)),
                    time_ports=() if transparent else self._time_ports(node),
                )

    def _clocks(self, node: Node) -> Iterator[ClockPlan]:
        """Name what a node's time follows: the nearest sources and operators that make time."""
        for parent in parents(node):
            if isinstance(parent, (SourceNode, FrameNode)):
                key = self.meanings.clock_key(parent)
                yield ClockPlan(parent.name, self.sources[parent], parent.rule, key)
            elif isinstance(parent, OperatorNode) and not parent.kernel.transparent:
                yield ClockPlan(parent.kernel.name, None, None, self.meanings.clock_key(parent))
            else:
                yield from self._clocks(parent)


def _told_apart(clocks: Iterable[ClockPlan]) -> tuple[ClockPlan, ...]:
    """Give clocks keys of what they read like; of those that read alike numbers, by their code.

    Of those that are the same in both, any may take another's place: they tell the same time.
    """
    listed = list(clocks)
    seen: Counter[str] = Counter()
    keys: dict[str, str] = {}
    for clock in sorted(listed, key=lambda one: one.key):
        stem = clock.key.partition("|")[0]
        seen[stem] += 1
        keys[clock.name] = stem if seen[stem] == 1 else f"{stem}#{seen[stem]}"
    return tuple(replace(clock, key=keys[clock.name]) for clock in listed)


def _name(node: Node | Output) -> str | None:
    """Name what has a line in the books."""
    if isinstance(node, StepNode):
        return node.step.name
    if isinstance(node, OperatorNode):
        return node.kernel.name
    return None if isinstance(node, (UnionNode, LateNode)) else node.name
