"""The definition of each stateful step and output of a graph: all that its state, or its rows, depend on.

That is the step itself, and everything on the paths from the sources to it: topics, the fields that are
read, event time, watermarks, stateless steps. A stateful step on a path represents all above it. The
names of steps and the order of declaration are not part of it.

A step that passes on rows as they came (a dedup, a budget, a look-up, the late rows of a window) is defined by the columns that it
reads itself. What the others are is said beside the definition of whatever takes them below, as ``passed``
(docs/decisions/0125).

Left out, because they move no event into or out of a state: how long the job waits for a partition
(``idle``, ``align``), what happens to rows that fail, and the sinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.kernels.code_digest import code_digest, digest, validators
from millstream.kernels.decode.debezium_records import DebeziumFormat
from millstream.kernels.definition import (
    Description,
    canonical_text,
    definition_keys,
    describe,
    describe_step,
    without_code,
)
from millstream.kernels.plan import Program, StepDefinition
from millstream.kernels.static_lookup import StaticLookup
from millstream.kernels.steps import Drop, is_defining
from millstream.kernels.tables.static_rows import StaticRows
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
)

WantedColumns = set[str] | None  # names of columns; None stands for all
_RULE = ("delay_us", "future_max_us", "producers_max", "settle_us", "marks")


@dataclass
class Definitions:
    """The definitions of a graph's stateful steps and outputs, and the keys of what holds state."""

    nodes: Sequence[GraphNode | Output]
    steps: dict[OperatorNode, Description] = field(default_factory=dict)
    passed: dict[OperatorNode, list[Description]] = field(default_factory=dict)
    keys: dict[OperatorNode, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        operators = [node for node in self.nodes if isinstance(node, OperatorNode)]
        for node in operators:  # each after those above it
            wanted = [node.kernel.columns_read(number) for number in range(len(node.inputs))]
            edges = [*zip(node.inputs, wanted, strict=True)]
            reads = [self._reads(*edge) for edge in edges]
            self.steps[node] = {**describe_step(node.kernel), "reads": reads}
            self.passed[node] = [one for edge in edges for one in _passed_on(*edge)]
        keys = definition_keys([self.steps[node] for node in operators])
        self.keys = dict(zip(operators, keys, strict=True))

    def program(self) -> Program:
        """Return all that a later run is compared with."""
        outputs = [node for node in self.nodes if isinstance(node, Output)]
        topics = {node.topic for node in self.nodes if isinstance(node, SourceNode)}
        return Program(
            steps={
                self.keys[node]: StepDefinition(
                    node.kernel.name, definition, self.passed[node] or None
                )
                for node, definition in self.steps.items()
            },
            outputs={output.name: self._output(output) for output in outputs},
            topics=tuple(sorted(topics)),
            frames=sum(isinstance(node, DataFrameNode) for node in self.nodes),
            given={table.name: table.digest for table in map(_static_table, self.nodes) if table},
        )

    def clock_key(self, node: SourceNode | DataFrameNode | OperatorNode) -> str:
        """Return the key by which an operator below knows this node's clock: its text, and its code."""
        if isinstance(node, OperatorNode):
            return _digests(self.steps[node])
        reads = _read(node, set())
        source = {name: reads[name] for name in ("topic", "dataframe") if name in reads}
        return _digests({**source, "time": reads["time"], "rule": reads["watermark"]})

    def _output(self, output: Output) -> Description:
        columns = [name for name, _ in output.schema]
        schema = {name: repr(dtype) for name, dtype in output.schema}
        passed = [*_passed_on(output.parent, set(columns))]
        return {
            "key": list(output.key),
            "columns": schema,
            "reads": [self._reads(output.parent, set(columns))],
            **({"passed": passed} if passed else {}),
        }

    def _reads(self, node: GraphNode, wanted: WantedColumns) -> dict[str, Any]:
        """Describe the path from the sources, or the nearest stateful steps, down to a node."""
        if isinstance(node, (SourceNode, DataFrameNode)):
            return _read(node, wanted)
        if isinstance(node, (OperatorNode, LateNode)):
            late = isinstance(node, LateNode)
            definition = self.steps[node.parent if isinstance(node, LateNode) else node]
            reference = {
                "text": digest(canonical_text(without_code(definition))),
                "code": digest(canonical_text(definition)),
            }
            return {"late rows of" if late else "rows of": reference, "steps": []}
        if isinstance(node, UnionNode):
            inputs = sorted((self._reads(one, wanted) for one in node.inputs), key=canonical_text)
            return {"union": inputs, "steps": []}
        if isinstance(node, NativeNode):
            path = self._reads(node.parent, set(node.schema_in.names))
            native = describe({"function": node.function, "time": node.time})
            return {**path, "steps": [*path["steps"], {"class": "spark", **native}]}
        path = self._reads(node.parent, node.step.columns_before(wanted))
        steps = [describe_step(node.step)] if is_defining(node.step, wanted) else []
        return {**path, "steps": [*path["steps"], *steps]}


def _passed_on(
    node: GraphNode, wanted: WantedColumns, *, crossed: bool = False
) -> Iterator[Description]:
    """Describe what the columns are that come to a node through steps that pass on rows as they came.

    There is one description for each source of such rows: the fields that are taken, and the steps that leave columns out where an
    expression below stands for all. All else on the way is part of the definitions of the steps that pass the rows on.
    Of a DataFrame all columns are. ``crossed``: one of them has been crossed.
    """
    if isinstance(node, SourceNode) and crossed:
        read = _read(node, wanted)
        yield {name: read[name] for name in ("topic", "fields", "steps")}
    elif isinstance(node, UnionNode):
        found = (one for each in node.inputs for one in _passed_on(each, wanted, crossed=crossed))
        yield from sorted(found, key=canonical_text)
    elif isinstance(node, LateNode):
        yield from _passed_on(node.parent.inputs[0], wanted, crossed=True)
    elif isinstance(node, OperatorNode) and node.kernel.transparent:
        yield from _passed_on(node.inputs[0], wanted, crossed=True)
    elif isinstance(node, NativeNode):
        yield from _passed_on(node.parent, set(node.schema_in.names), crossed=crossed)
    elif isinstance(node, StepNode):
        leaves_out = wanted is None and isinstance(node.step, Drop)
        steps = [describe_step(node.step)] if leaves_out else []
        before = node.step.columns_before(wanted)
        for one in _passed_on(node.parent, before, crossed=crossed):
            yield {**one, "steps": [*one["steps"], *steps]}


def _static_table(node: GraphNode | Output) -> StaticRows | None:
    """Return the static table that a node is, or looks rows up in."""
    if isinstance(node, StepNode) and isinstance(node.step, StaticLookup):
        return node.step.table
    if isinstance(node, OperatorNode) and isinstance(node.kernel, StaticRows):
        return node.kernel
    return None


def _digests(definition: Description) -> str:
    return (
        f"{digest(canonical_text(without_code(definition)))}|{digest(canonical_text(definition))}"
    )


def _read(node: SourceNode | DataFrameNode, wanted: WantedColumns) -> dict[str, Any]:
    """Describe a source: what is read of it, and its time."""
    rule = {name: describe(getattr(node.rule, name)) for name in _RULE}
    clock: dict[str, Any] = {"time": describe(node.time), "watermark": rule, "steps": []}
    if isinstance(node, DataFrameNode):
        columns = dict(zip(node.schema.names, map(str, node.schema.types), strict=True))
        return {"dataframe": columns, **clock}
    if wanted is not None:
        wanted = wanted | node.rule.marks.columns_read()
        wanted |= set() if node.time is None else set(node.time.meta.root_names())
    read = sorted((f for f in node.fields if wanted is None or f.name in wanted), key=_name)
    fields = {f.name: describe_step(f) for f in read}
    table = {} if node.table_key is None else {"table_key": node.table_key}
    return {"topic": node.topic, "format": _format(node.values), "fields": fields, **table, **clock}


def _name(named: Any) -> str:
    return str(named.name)


def _format(values: Any) -> Description:
    """Describe how values are written: the format, and the code of a pydantic model.

    The schemas that values were written with are not part of it: more of them will follow.
    """
    if isinstance(values, DebeziumFormat):
        return describe(values)
    word, model = type(values).__name__, getattr(values, "model", None)
    return word if model is None else {"text": word, "code": code_digest(list(validators(model)))}
