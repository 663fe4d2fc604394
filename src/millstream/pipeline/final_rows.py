"""What waits for the watermark anyhow takes rows that may be taken back when they are final."""

from __future__ import annotations

from dataclasses import replace

from millstream.errors import ConfigError
from millstream.kernels.final_rows import FinalRows
from millstream.pipeline.graph import GraphNode, OperatorNode
from millstream.pipeline.shape import StreamShape


def when_final(
    node: GraphNode, shape: StreamShape, by: tuple[str, ...], what: str
) -> tuple[GraphNode, StreamShape]:
    """Return a stream whose rows come once: the same, unless rows may be replaced or taken back.

    Then they wait until the watermark has passed them, by their lateness; what does not hold by then never comes.
    ``by`` are columns by which rows are divided.

    Raises:
        ConfigError: it is not known when a row is final.
    """
    if shape.is_late or not may_change(shape):
        return node, shape
    shape = timed_changes(shape, what)
    kernel = FinalRows(
        shape.names.unique(f"final rows for {what}"),
        tuple(shape.columns.items()),
        by,
        shape.lateness_us,
    )
    final = replace(
        shape,
        mode="final",
        lateness_us=0,
        late_policy="drop",
        late_columns=None,
        stable=(),
        takes_back=False,
        may_fail=False,
    )
    return OperatorNode((node,), kernel), final


def may_change(shape: StreamShape) -> bool:
    """Return whether rows may be replaced or taken back."""
    return shape.mode == "update" or shape.has_retractions


def timed_changes(shape: StreamShape, what: str) -> StreamShape:
    """Return the shape of a stream whose rows come with a sign, and are final when the watermark has passed them.

    Raises:
        ConfigError: they cannot, or it is not known when they are final.
    """
    if shape.no_windows:
        raise ConfigError(f"{what} comes after {shape.no_windows}")
    if shape.late_policy == "side":
        raise ConfigError(
            f'{what} comes after rows that may be taken back, and some are read with late="side": a row that is late '
            'there may take back one that has come out. Read them with late="drop": they are counted.'
        )
    return shape.as_changes()
