"""What each stateful step and each output of a graph means: all that its state, or its rows, depend on.

That is the step itself, and everything on the ways from the sources to it: topics, the fields that are
read, event time, watermarks, stateless steps. A stateful step on the way stands for all above it. Names
of steps are no part of it, and neither is the order of declaration.

Left out, because they move no event into or out of a state: how long a partition is waited for
(``idle``, ``align``), what becomes of rows that fail, and where rows end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.kernels.meaning import Description, describe_step, described, exact, keys_of, spoken
from millstream.kernels.plan import Meaning, Program
from millstream.kernels.python_code import code_digest, digest, validators
from millstream.kernels.steps import Drop
from millstream.pipeline.graph import (
    FrameNode,
    LateNode,
    NativeNode,
    Node,
    OperatorNode,
    Output,
    SourceNode,
    UnionNode,
)

Wanted = set[str] | None  # names of columns; None stands for all
_RULE = ("delay_us", "future_max_us", "producers_max", "settle_us", "marks")


@dataclass
class Meanings:
    """The meanings of a graph's stateful steps and outputs, and the keys of what holds state."""

    nodes: Sequence[Node | Output]
    steps: dict[OperatorNode, Description] = field(default_factory=dict)
    keys: dict[OperatorNode, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        operators = [node for node in self.nodes if isinstance(node, OperatorNode)]
        for node in operators:  # each after those above it
            reads = [
                self._reads(parent, node.kernel.columns_read(number))
                for number, parent in enumerate(node.inputs)
            ]
            self.steps[node] = {**describe_step(node.kernel), "reads": reads}
        keys = keys_of([self.steps[node] for node in operators])
        self.keys = dict(zip(operators, keys, strict=True))

    def program(self) -> Program:
        """Give all that a later run is compared with."""
        outputs = [node for node in self.nodes if isinstance(node, Output)]
        topics = {node.topic for node in self.nodes if isinstance(node, SourceNode)}
        return Program(
            steps={
                self.keys[node]: Meaning(node.kernel.name, meaning)
                for node, meaning in self.steps.items()
            },
            outputs={output.name: self._output(output) for output in outputs},
            topics=tuple(sorted(topics)),
            frames=sum(isinstance(node, FrameNode) for node in self.nodes),
        )

    def clock_key(self, node: SourceNode | FrameNode | OperatorNode) -> str:
        """Say by what an operator below knows this node's time: what it reads like, and its code."""
        if isinstance(node, OperatorNode):
            return _digests(self.steps[node])
        reads = _read(node, set())
        told = {name: reads[name] for name in ("topic", "dataframe") if name in reads}
        return _digests({**told, "time": reads["time"], "rule": reads["watermark"]})

    def _output(self, output: Output) -> Description:
        columns = [name for name, _ in output.schema]
        schema = {name: repr(dtype) for name, dtype in output.schema}
        return {
            "key": list(output.key),
            "columns": schema,
            "reads": [self._reads(output.parent, set(columns))],
        }

    def _reads(self, node: Node, wanted: Wanted) -> dict[str, Any]:
        """Describe the way from the sources, or the nearest stateful steps, down to a node."""
        if isinstance(node, (SourceNode, FrameNode)):
            return _read(node, wanted)
        if isinstance(node, (OperatorNode, LateNode)):
            late = isinstance(node, LateNode)
            meaning = self.steps[node.parent if isinstance(node, LateNode) else node]
            reference = {"says": digest(exact(spoken(meaning))), "code": digest(exact(meaning))}
            return {"late rows of" if late else "rows of": reference, "steps": []}
        if isinstance(node, UnionNode):
            inputs = sorted((self._reads(one, wanted) for one in node.inputs), key=exact)
            return {"union": inputs, "steps": []}
        if isinstance(node, NativeNode):
            way = self._reads(node.parent, set(node.schema_in.names))
            native = described({"function": node.function, "time": node.time})
            return {**way, "steps": [*way["steps"], {"is": "spark", **native}]}
        way = self._reads(node.parent, node.step.columns_before(wanted))
        steps = [] if isinstance(node.step, Drop) else [describe_step(node.step)]
        return {**way, "steps": [*way["steps"], *steps]}


def _digests(meaning: Description) -> str:
    return f"{digest(exact(spoken(meaning)))}|{digest(exact(meaning))}"


def _read(node: SourceNode | FrameNode, wanted: Wanted) -> dict[str, Any]:
    """Describe a source: what is read of it, and its time."""
    rule = {name: described(getattr(node.rule, name)) for name in _RULE}
    told: dict[str, Any] = {"time": described(node.time), "watermark": rule, "steps": []}
    if isinstance(node, FrameNode):
        columns = dict(zip(node.schema.names, map(str, node.schema.types), strict=True))
        return {"dataframe": columns, **told}
    if wanted is not None:
        wanted = wanted | node.rule.marks.columns_read()
        wanted |= set() if node.time is None else set(node.time.meta.root_names())
    read = sorted((f for f in node.fields if wanted is None or f.name in wanted), key=_name)
    fields = {f.name: describe_step(f) for f in read}
    return {"topic": node.topic, "format": _format(node.values), "fields": fields, **told}


def _name(named: Any) -> str:
    return str(named.name)


def _format(values: Any) -> Description:
    """Describe how values are written: the format, and the code of a pydantic model.

    Which schemas values were written with is no part of it: more of them are to be expected.
    """
    word, model = type(values).__name__, getattr(values, "model", None)
    return word if model is None else {"says": word, "code": code_digest(list(validators(model)))}
