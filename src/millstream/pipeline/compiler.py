"""From the declared graph to the executable plan: ports, stages, edges, and the fields needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from millstream.errors import ConfigError
from millstream.kernels.errors.user_code import OnError, UserCode
from millstream.kernels.frames import PORT_FIRST
from millstream.kernels.joins.lookup import Lookup
from millstream.kernels.operator import Operator
from millstream.kernels.plan import (
    ClockPlan,
    ConsumerEdge,
    DataFramePlan,
    JobPlan,
    NativePlan,
    OperatorPlan,
    PlanEdge,
    SinkPlan,
    SourcePlan,
    StagePlan,
    StepEdge,
    Updates,
)
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.steps import Step
from millstream.kernels.tables.upserts import Upserts
from millstream.kernels.time.log_order import SOURCES_MAX
from millstream.pipeline.definitions import Definitions
from millstream.pipeline.graph import (
    DataFrameNode,
    GraphNode,
    LateNode,
    NativeNode,
    OperatorNode,
    Output,
    SourceNode,
    StepNode,
    UnionNode,
    parents,
    time_parents,
    upstream_nodes,
)
from millstream.pipeline.look_up_order import look_up_levels
from millstream.pipeline.promotion import emitting_changes, replaces_rows, updates_of

ConsumerNode = NativeNode | OperatorNode | Output


class ConsumerPath(NamedTuple):
    """How rows get from a node to a consumer: through steps, as its input ``number``."""

    steps: tuple[Step, ...]
    consumer: ConsumerNode
    number: int


class RowKind(NamedTuple):
    """What the rows of an edge are: see :class:`ConsumerEdge`."""

    signed: bool = False
    updates: Updates | None = None


AS_EMITTED = RowKind()


def compile_plan(
    app: str,
    outputs: Sequence[Output],
    buckets: Buckets,
    on_error: OnError = "dead-letter",
    topics: Sequence[str] = (),
) -> JobPlan:
    """Compile the part of the graph that leads to the outputs. Declaration order fixes the ports.

    ``on_error``: what happens to rows on which an operator's expressions fail. ``topics`` are those of the
    program that the outputs are a part of, so that places in its state mean the same to both.
    """
    return _Compiler(app, outputs, buckets, on_error, topics).plan()


@dataclass
class _Compiler:
    app: str
    outputs: Sequence[Output]
    buckets: Buckets
    on_error: OnError
    numbered: Sequence[str] = ()  # topics that have numbers though nothing here reads them
    # Each with the number of its input: a node may take the same rows twice.
    children: dict[GraphNode, list[tuple[GraphNode | Output, int]]] = field(default_factory=dict)
    ports: dict[ConsumerNode, tuple[int, ...]] = field(default_factory=dict)
    depths: dict[OperatorNode, int] = field(default_factory=dict)
    sources: dict[SourceNode | DataFrameNode, int] = field(default_factory=dict)
    kernels: dict[OperatorNode, Operator] = field(default_factory=dict)
    definitions: Definitions = field(init=False)
    look_ups: dict[str, int] = field(init=False)  # which topics are read first

    def plan(self) -> JobPlan:
        nodes = upstream_nodes(self.outputs)
        self.definitions = Definitions(nodes)
        self.look_ups = look_up_levels(nodes)
        for node in nodes:
            self._register(node)
        for node in self.depths:
            emits = replaces_rows(node.kernel) and self._takes_changes(node)
            self.kernels[node] = emitting_changes(node.kernel) if emits else node.kernel
        stages = max(self.depths.values(), default=-1) + 1
        return JobPlan(
            app=self.app,
            sources=tuple(self._source(n) for n in self.sources if isinstance(n, SourceNode)),
            natives=tuple(self._native(n) for n in self.ports if isinstance(n, NativeNode)),
            stages=tuple(
                StagePlan(tuple(self._operators(depth)), self._topics) for depth in range(stages)
            ),
            sinks=tuple(
                SinkPlan(
                    o.name,
                    self.ports[o][0],
                    o.key,
                    o.schema,
                    o.spec,
                    o.replaces,
                    o.row_keys,
                    o.question,
                )
                for o in self.outputs
            ),
            buckets=self.buckets,
            frames=tuple(self._frame(n) for n in self.sources if isinstance(n, DataFrameNode)),
            steps=tuple(name for node in nodes if (name := _name(node)) is not None),
            heartbeat_ms=self._heartbeat_ms(),
            program=self.definitions.program(),
        )

    @property
    def _topics(self) -> tuple[str, ...]:
        """All topics that are read, by number: a program that resumes from the state reads the same."""
        read = {n.topic for n in self.sources if isinstance(n, SourceNode)}
        return tuple(sorted(read.union(self.numbered)))

    def _heartbeat_ms(self) -> int | None:
        wanted = [node.kernel.heartbeat_ms for node in self.depths]
        return min((ms for ms in wanted if ms is not None), default=None)

    def _register(self, node: GraphNode | Output) -> None:
        """Register a node below its parents; number its ports, or its place among the sources."""
        for number, parent in enumerate(parents(node)):
            self.children.setdefault(parent, []).append((node, number))
        if isinstance(node, (SourceNode, DataFrameNode)):
            self.sources[node] = len(self.sources)
            if len(self.sources) > SOURCES_MAX:
                raise ConfigError(
                    f"The app {self.app!r} reads more than {SOURCES_MAX} streams, with {node.name!r}. "
                    f"A job reads up to {SOURCES_MAX}: divide it into several apps, or bring the "
                    "topics together into fewer."
                )
        elif isinstance(node, (NativeNode, OperatorNode, Output)):
            first = PORT_FIRST + sum(len(ports) for ports in self.ports.values())
            count = max(1, len(node.inputs)) if isinstance(node, OperatorNode) else 1
            self.ports[node] = tuple(range(first, first + count))
        if isinstance(node, OperatorNode):
            above = [self._depth_above(parent) for parent in node.inputs]
            self.depths[node] = max(above, default=0)

    def _depth_above(self, node: GraphNode) -> int:
        """Return the earliest stage for an operator right below a node."""
        if isinstance(node, OperatorNode):
            return self.depths[node] + 1
        return max((self._depth_above(parent) for parent in parents(node)), default=0)

    # ── paths down ──────────────────────────────────────────────────────────────────────────

    def _paths(self, node: GraphNode) -> Iterator[ConsumerPath]:
        """Follow steps and unions below a node to the consumers of its rows."""
        for child, number in self.children.get(node, ()):
            if isinstance(child, (StepNode, UnionNode)):
                steps = (child.step,) if isinstance(child, StepNode) else ()
                for path in self._paths(child):
                    yield path._replace(steps=(*steps, *path.steps))
            elif isinstance(child, (NativeNode, OperatorNode, Output)):
                yield ConsumerPath((), child, number)

    def _takes_changes(self, node: OperatorNode) -> bool:
        """Return whether anything takes a node's rows as signed changes, and not as they replace one another."""
        consumers = (path.consumer for path in self._paths(node))
        return not all(isinstance(one, Output) and one.replaces for one in consumers)

    def _edges(self, node: GraphNode, kind: RowKind = AS_EMITTED) -> tuple[PlanEdge, ...]:
        """Return the edges below a node as a tree, so that shared steps are run once."""
        if isinstance(node, OperatorNode) and self.kernels[node] is not node.kernel:
            kind = kind._replace(updates=updates_of(node.kernel))
        edges: list[PlanEdge] = []
        for child, number in self.children.get(node, ()):
            if isinstance(child, StepNode):
                below = self._edges(child, kind)
                edges.append(StepEdge(child.step, child.schema_out, child.code, below))
            elif isinstance(child, UnionNode):
                edges += self._edges(child, kind._replace(signed=kind.signed or child.signed))
            elif isinstance(child, (NativeNode, OperatorNode, Output)):
                edges.append(self._edge(ConsumerPath((), child, number), kind))
        return tuple(edges)

    def _edge(self, path: ConsumerPath, kind: RowKind) -> ConsumerEdge:
        consumer, wanted = path.consumer, self._columns_wanted(path)
        columns = None if wanted is None else tuple(sorted(wanted))
        if isinstance(consumer, Output):
            columns = tuple(name for name, _ in consumer.schema)
        operator = self.kernels[consumer] if isinstance(consumer, OperatorNode) else None
        replaces = isinstance(consumer, Output) and consumer.replaces
        name = _name(consumer)
        assert name is not None
        return ConsumerEdge(
            step=name,
            port=self.ports[consumer][path.number],
            operator=operator,
            number=path.number,
            columns=columns,
            ordered=self._needs_order(consumer),
            arrived=self._needs_arrival(path),
            code=UserCode(name, on_error=self.on_error),
            latest_by=consumer.key if isinstance(consumer, Output) else (),
            signed=kind.signed,
            updates=kind.updates if replaces else None,
            released=isinstance(operator, Upserts),
        )

    def _time_ports(self, node: GraphNode) -> tuple[int, ...]:
        """List the operators whose time follows this node's: straight below, or past those that
        change neither rows nor time.
        """
        ports: list[int] = []
        for path in self._paths(node):
            if isinstance(path.consumer, OperatorNode):
                transparent = path.consumer.kernel.transparent
                if transparent and path.number:
                    continue
                ports.append(self.ports[path.consumer][0])
                if transparent:
                    ports += self._time_ports(path.consumer)
            elif isinstance(path.consumer, NativeNode):
                ports += self._time_ports(path.consumer)
        return tuple(dict.fromkeys(ports))

    @property
    def _ports_without_input(self) -> tuple[int, ...]:
        return tuple(self.ports[node][0] for node in self.depths if not node.inputs)

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
            time_ports=(*self._time_ports(node), *self._ports_without_input),
            values=node.values,
            bad=node.bad,
            topic_number=self._topics.index(node.topic),
            table_key=node.table_key,
            arrived=self._arrival_below(node),
            looked_up=self.look_ups.get(node.topic, 0),
        )

    def _columns_needed(self, node: GraphNode) -> set[str] | None:
        """Return the columns of a node's rows that anything below it reads; None stands for all."""
        needed: set[str] = set()
        for path in self._paths(node):
            wanted = self._columns_wanted(path)
            for step in reversed(path.steps):
                wanted = step.columns_before(wanted)
            if wanted is None:
                return None
            needed |= wanted
        return needed

    def _columns_wanted(self, path: ConsumerPath) -> set[str] | None:
        consumer = path.consumer
        if isinstance(consumer, Output):
            return {name for name, _ in consumer.schema}
        if isinstance(consumer, NativeNode):
            return set(consumer.schema_in.names)
        wanted: set[str] | None = consumer.kernel.columns_read(path.number)
        for node in self._passed_on(path):
            below = self._columns_needed(node)
            wanted = None if wanted is None or below is None else wanted | below
        return wanted

    def _passed_on(self, path: ConsumerPath) -> list[GraphNode]:
        """Return the nodes with rows of a path that its operator passes on: itself, and its late rows."""
        node = path.consumer
        if not isinstance(node, OperatorNode) or path.number:
            return []
        return [*([node] if node.kernel.transparent else []), *self._late_nodes(node)]

    def _late_nodes(self, node: OperatorNode) -> list[LateNode]:
        children = (child for child, _ in self.children.get(node, ()))
        return [child for child in children if isinstance(child, LateNode)]

    def _ordered_below(self, node: GraphNode) -> bool:
        """Return whether a consumer of this node's rows needs their order."""
        return any(self._needs_order(path.consumer) for path in self._paths(node))

    def _arrival_below(self, node: GraphNode) -> bool:
        """Return whether a consumer of this node's rows needs the time of their arrival."""
        return any(self._needs_arrival(path) for path in self._paths(node))

    def _needs_arrival(self, path: ConsumerPath) -> bool:
        looks_up = isinstance(path.consumer, OperatorNode) and isinstance(
            path.consumer.kernel, Lookup
        )
        return looks_up or any(map(self._arrival_below, self._passed_on(path)))

    def _needs_order(self, consumer: ConsumerNode) -> bool:
        if isinstance(consumer, OperatorNode):
            kernel = consumer.kernel
            passed_on: list[GraphNode] = [consumer] if kernel.transparent else []
            passed_on += self._late_nodes(consumer)
            return kernel.ordered or any(map(self._ordered_below, passed_on))
        # A request that cannot be answered becomes a dead letter, which names its place.
        return isinstance(consumer, Output) and (
            consumer.question is not None or self._comes_divided(consumer.parent)
        )

    def _comes_divided(self, node: GraphNode) -> bool:
        """Return whether a node's rows come by several paths or from several buckets, so not in order."""
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

    def _frame(self, node: DataFrameNode) -> DataFramePlan:
        assert node.rule.delay_us is not None, "from_spark takes no rule without a delay"
        return DataFramePlan(
            number=self.sources[node],
            name=node.name,
            frame=node.frame,
            schema=node.schema,
            time=node.time,
            delay_us=node.rule.delay_us,
            edges=self._edges(node),
            time_ports=(*self._time_ports(node), *self._ports_without_input),
        )

    # ── operators ───────────────────────────────────────────────────────────────────────────

    def _operators(self, depth: int) -> Iterable[OperatorPlan]:
        for node, at in self.depths.items():
            if at == depth:
                passes_no_time = node.kernel.transparent or not node.inputs
                late = self._late_nodes(node)
                yield OperatorPlan(
                    ports=self.ports[node],
                    key=self.definitions.keys[node],
                    kernel=self.kernels[node],
                    clocks=_with_distinct_keys(dict.fromkeys(self._clocks(node))),
                    edges=self._edges(node),
                    late_edges=tuple(edge for child in late for edge in self._edges(child)),
                    time_ports=() if passes_no_time else self._time_ports(node),
                )

    def _clocks(self, node: GraphNode) -> Iterator[ClockPlan]:
        """Name what a node's time follows: the nearest sources and operators that make time."""
        for parent in time_parents(node):
            if isinstance(parent, (SourceNode, DataFrameNode)):
                key = self.definitions.clock_key(parent)
                yield ClockPlan(parent.name, self.sources[parent], parent.rule, key)
            elif isinstance(parent, OperatorNode) and not parent.inputs:
                continue
            elif isinstance(parent, OperatorNode) and not parent.kernel.transparent:
                yield ClockPlan(parent.kernel.name, None, None, self.definitions.clock_key(parent))
            else:
                yield from self._clocks(parent)


def _with_distinct_keys(clocks: Iterable[ClockPlan]) -> tuple[ClockPlan, ...]:
    """Return the clocks with distinct keys: their text, and a number where texts are equal.

    The numbers follow the code. Clocks with the same text and code are interchangeable: they show
    the same time.
    """
    listed = list(clocks)
    seen: Counter[str] = Counter()
    keys: dict[str, str] = {}
    for clock in sorted(listed, key=lambda one: one.key):
        stem = clock.key.partition("|")[0]
        seen[stem] += 1
        keys[clock.name] = stem if seen[stem] == 1 else f"{stem}#{seen[stem]}"
    return tuple(replace(clock, key=keys[clock.name]) for clock in listed)


def _name(node: GraphNode | Output) -> str | None:
    """Return a node's name in the ledger; None where it has no entry."""
    if isinstance(node, StepNode):
        return node.step.name
    if isinstance(node, OperatorNode):
        return node.kernel.name
    if isinstance(node, Output) and node.step:
        return node.step
    return None if isinstance(node, (UnionNode, LateNode)) else node.name
