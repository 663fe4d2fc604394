"""Process functions over a stream: checked where they are declared, and built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, get_args

from millstream.choices import choose, did_you_mean
from millstream.errors import ConfigError
from millstream.kernels.column_types import check_column
from millstream.kernels.errors.user_code import OnError, UnusableRowError, UserCode
from millstream.kernels.process.declarations import StateDeclaration
from millstream.kernels.process.frame_function import FrameFunction
from millstream.kernels.process.function import VERSION_MAX, ProcessFunction, states_of
from millstream.kernels.process.operator import KeyedProcess, OutputColumns, RowOrder
from millstream.kernels.process.side_outputs import SelectOutput
from millstream.kernels.process.signed_process import SignedProcess
from millstream.kernels.process.values import conversion
from millstream.pipeline.checks import declared_at, require_unreserved, whole_number
from millstream.pipeline.final_rows import may_change, timed_changes
from millstream.pipeline.graph import (
    GraphNode,
    OperatorNode,
    StepNode,
    reads_dataframes,
)
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape, late_columns_of
from millstream.pipeline.stateless import FrameSchema, declared_columns

_OUTPUTS_MAX = 1000
_BY_ROW = ("on_row", "on_retraction", "on_timer", "on_processing_timer")
_IN_FRAMES = ("on_rows", "on_retractions", "on_timers")


def build_process(
    shape: StreamShape,
    node: GraphNode,
    function: ProcessFunction | FrameFunction,
    by: tuple[str, ...],
    *,
    schema: FrameSchema,
    side_outputs: Mapping[str, FrameSchema] | None,
    order: RowOrder,
    on_error: OnError,
    name: str | None,
) -> tuple[GraphNode, StreamShape]:
    """Check what is declared; return the node of the main output, and its shape."""
    _check_function(function)
    choose("process's order", order, get_args(RowOrder))
    shape, changes = _rows_taken(shape, function)
    signed = changes or _retracts(function)
    if signed and order != "arrival":
        raise ConfigError(
            'process has order="time" and a function that takes rows back: what is taken back comes after the watermark has '
            'passed it. Say order="arrival".'
        )
    main = _columns("process's schema", schema)
    outputs: list[tuple[str | None, OutputColumns]] = [(None, tuple(main.items()))]
    for output, given in _named(side_outputs):
        outputs.append((output, tuple(_columns(f"The side output {output!r}", given).items())))
    states = states_of(function)
    _check_states(states)
    if isinstance(function, FrameFunction):
        _check_frame_states(states, by)
    processing_timers = function.defines("on_processing_timer")
    if processing_timers and reads_dataframes(node):
        raise ConfigError(
            "process is given a function with on_processing_timer, and the stream comes from a DataFrame of Spark's, "
            "whose batches have no clock. Use event-time timers: on_timer."
        )
    late_columns = late_columns_of(shape, "process")
    step = shape.names.unique(name or f"process({type(function).__name__})")
    given = dict[str, Any](
        name=step,
        by=by,
        function=function,
        states=states,
        outputs=tuple(outputs),
        columns=tuple(shape.columns.items()),
        order=order,
        lateness_us=shape.lateness_us,
        side_output=late_columns is not None,
        version=whole_number(function.version, 1, VERSION_MAX, "The version of the function"),
        migrates=function.defines("migrate"),
        processing_timers=processing_timers,
        code=UserCode(step, declared_at(), on_error),
    )
    kernel = SignedProcess(**given, changes=changes) if signed else KeyedProcess(**given)
    made = _shape_of(kernel, replace(shape, columns=main, late_columns=late_columns))
    operator = OperatorNode((node,), kernel)
    return (operator if len(outputs) == 1 else _output_node(operator, kernel, 0)), made


def side_output_of(
    node: GraphNode, shape: StreamShape, output: str
) -> tuple[GraphNode, StreamShape]:
    """Return the node and the shape of a side output of the process function right above.

    Raises:
        ConfigError: there is none of that name.
    """
    operator = process_node(node)
    kernel = operator.kernel if operator is not None else None
    if operator is None or not isinstance(kernel, KeyedProcess):
        raise ConfigError(
            "The stream has no side outputs. What process(…, side_outputs={…}) returns has those that are declared there."
        )
    names = [name for name, _ in kernel.outputs[1:]]
    if output not in names:
        there = ", ".join(map(str, names)) or "(none)"
        raise ConfigError(
            f"{kernel.name} has no side output {output!r}. Those that are declared are {there}."
            f"{did_you_mean(str(output), [name for name in names if name is not None])}"
        )
    number = 1 + names.index(output)
    columns = dict(kernel.outputs[number][1])
    made = _shape_of(kernel, replace(shape, columns=columns, late_columns=None))
    return _output_node(operator, kernel, number), made


def process_node(node: GraphNode) -> OperatorNode | None:
    """Return the stateful step whose main output a node is; None if it is no such output."""
    if isinstance(node, StepNode) and isinstance(node.step, SelectOutput) and not node.step.number:
        node = node.parent
    return node if isinstance(node, OperatorNode) else None


def _output_node(operator: OperatorNode, kernel: KeyedProcess, number: int) -> StepNode:
    output, columns = kernel.outputs[number]
    name = f"{kernel.name}[{'main' if output is None else output}]"
    step = SelectOutput(name, number, tuple(column for column, _ in columns))
    return StepNode(operator, step, columns, UserCode(name, kernel.code.declared))


def _check_function(function: object) -> None:
    if not isinstance(function, (ProcessFunction, FrameFunction)):
        raise ConfigError(
            f"process is given {function!r}. Give an instance of a class of yours that derives from "
            "ms.ProcessFunction, or from ms.FrameFunction."
        )
    frames = isinstance(function, FrameFunction)
    base = "ms.FrameFunction" if frames else "ms.ProcessFunction"
    methods, others = (_IN_FRAMES, _BY_ROW) if frames else (_BY_ROW, _IN_FRAMES)
    for method in others:
        if hasattr(function, method):
            raise ConfigError(
                f"{type(function).__name__} has {method}, which is never called: it derives from {base}, whose methods are "
                f"{', '.join(methods)}."
            )
    for method in methods:
        code = getattr(function, method, None)
        if isgeneratorfunction(code) or iscoroutinefunction(code) or isasyncgenfunction(code):
            raise ConfigError(
                f"{method} of {type(function).__name__} has a yield or is async, so that calling it does nothing. Give "
                "rows to context.emit."
            )


def _shape_of(kernel: KeyedProcess, shape: StreamShape) -> StreamShape:
    """Return the shape of an output, of which its columns and late columns are known."""
    made = StreamShape(columns=shape.columns, late_columns=shape.late_columns, names=shape.names)
    return replace(made, mode="retract", takes_back=True) if kernel.signed else made


def _events(shape: StreamShape, method: str) -> StreamShape:
    """Return the shape of rows that hold for good. ``method``: with which a function takes others.

    Raises:
        ConfigError: they may be taken back.
    """
    if shape.is_late:
        raise ConfigError("process comes after late rows. View them, or send them to a topic.")
    if shape.is_table or shape.mode not in (None, "final"):
        raise ConfigError(
            "process comes after rows that may be replaced or taken back, and the function does not say what it does "
            f'then. Give it an {method}, emit "final" above, or process the events before the window or table.'
        )
    return shape


def _retracts(function: ProcessFunction | FrameFunction) -> bool:
    """Return whether a function says that it takes back what it has emitted, whatever comes in."""
    said = getattr(function, "retracts", False)
    if not isinstance(said, bool):
        raise ConfigError(
            f"{type(function).__name__} has retracts = {said!r}. Say True if it takes back what it emitted over events, or "
            "leave it out."
        )
    return said


def _rows_taken(
    shape: StreamShape, function: ProcessFunction | FrameFunction
) -> tuple[StreamShape, bool]:
    """Return the shape of the rows that a function is given, and whether they may be taken back.

    Raises:
        ConfigError: they are parts, or late rows; or they may be taken back, and the function does not say what it does then.
    """
    method = "on_retraction" if isinstance(function, ProcessFunction) else "on_retractions"
    if not function.defines(method):
        return _events(shape, method), False
    if shape.mode == "discard" or shape.is_table or not may_change(shape):
        return (shape, False) if shape.mode == "retract" else (_events(shape, method), False)
    if shape.is_late:
        raise ConfigError("process comes after late rows. View them, or send them to a topic.")
    return timed_changes(shape, "process"), True


def _named(side_outputs: Mapping[str, FrameSchema] | None) -> list[tuple[str, FrameSchema]]:
    if side_outputs is None:
        return []
    if not isinstance(side_outputs, Mapping):
        raise ConfigError(
            f'side_outputs is {side_outputs!r}. Give the schema of each by its name: {{"alerts": Alert}}.'
        )
    for name in side_outputs:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"side_outputs has the name {name!r}. Give a text, such as 'alerts'.")
    if len(side_outputs) > _OUTPUTS_MAX:
        raise ConfigError(
            f"side_outputs has {len(side_outputs)} names, and may have {_OUTPUTS_MAX}. Put a column into the rows instead."
        )
    return [*side_outputs.items()]


def _columns(what: str, schema: FrameSchema) -> ColumnTypes:
    columns = declared_columns(schema, what)
    if not columns:
        raise ConfigError(f"{what} has no column. Say which it has: {{'user': pl.String}}.")
    return columns


def _check_frame_states(
    states: tuple[tuple[str, StateDeclaration], ...], by: tuple[str, ...]
) -> None:
    if not states:
        raise ConfigError(
            "process is given a FrameFunction that declares no state. Declare one, such as count = "
            "ms.value_state(pl.Int64, default=0); rows that need none are for map_frames."
        )
    for name, one in states:
        if name in by:
            raise ConfigError(
                f"The state {name!r} of a FrameFunction has the name of a column of the key, and both are in one frame. "
                "Give the state another name."
            )
        if one.ttl_us is not None:
            raise ConfigError(
                f"The state {name!r} of a FrameFunction has a ttl, and a frame does not say which of its states were written. "
                "Set a timer in __timers, and leave the key out of what on_timers returns."
            )
        if one.default is not None and one.dtype.is_nested():
            raise ConfigError(
                f"The state {name!r} of a FrameFunction has the default {one.default!r} of a nested type. Leave it out: "
                "a key without one then has null."
            )


def _check_states(states: tuple[tuple[str, StateDeclaration], ...]) -> None:
    for name, one in states:
        require_unreserved(name, "The function")
        check_column(name, one.stored_dtype)
        if one.default is None:
            continue
        try:
            conversion(one.dtype, f"The default of the state {name!r}")(one.default)
        except UnusableRowError as error:
            raise ConfigError(f"{error}. Give a default of that type.") from error
