"""The sink that calls a function of the user's: once per batch with rows, before the state store commits.

A function has no transaction that could carry a fence, so it is called at least once for each batch: when
a batch is repeated after a crash, it is called again with the same rows and the same key. Its effect is
exactly once if it stores the key together with the effect, and does nothing for a key that it has stored.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.plan import ForeachSinkSpec, SinkPlan
from millstream.views.coverage import OutputSink
from millstream.views.retractions import with_diff_column
from millstream.views.schema import Fence
from millstream.views.sink import RunStart, SinkBatch


@dataclass(frozen=True)
class ForeachContext:
    """The argument of a function of ``foreach`` besides the rows.

    ``key`` is a text that identifies this call: the same whenever the batch is repeated, and different
    for every other call. ``app``, ``name`` (of the step) and ``batch_id`` are for people.
    """

    app: str
    name: str
    batch_id: int
    key: str


class ForeachSink:
    """Calls one function; see :class:`millstream.views.sink.Sink` for the methods."""

    has_fence = False

    def __init__(self, sink: SinkPlan) -> None:
        assert isinstance(sink.spec, ForeachSinkSpec)
        self.name = sink.name
        self.identity = f"foreach:{sink.name}"
        self._function: Callable[[pl.DataFrame, ForeachContext], object] = sink.spec.function
        self._checkpoint_id = ""

    def begin_run(self, start: RunStart) -> int | None:
        self._checkpoint_id = start.checkpoint_id
        return None

    def end_offsets(self) -> Mapping[OutputSink, Sequence[int]]:
        """Return {}: rows have no offsets here."""
        return {}

    def participates(self, part: SinkBatch) -> bool:
        return self.name in part.rows

    def stager(self, fence: Fence, output: str) -> None:
        """Return None: the function is called on the driver."""

    def commit(self, fence: Fence, part: SinkBatch) -> bool:
        # The checkpoint is in the key: when an app is built again, its batches are others.
        key = f"{fence.app}/{fence.job}/{self.name}/{self._checkpoint_id[:12]}/{fence.batch_id}"
        context = ForeachContext(fence.app, self.name, fence.batch_id, key)
        rows = with_diff_column(part.rows[self.name])
        try:
            self._function(rows, context)
        except Exception as error:
            raise UserCodeError(
                f"step {self.name!r} failed in batch {fence.batch_id}, {_code_location(error)}: "
                f"{type(error).__name__}: {error}. Correct the function and run again: it is called "
                f"with the same {rows.height} rows and the same key.",
                step=self.name,
            ) from error
        return True

    def close(self) -> None:
        """Nothing is open."""


def _code_location(error: BaseException) -> str:
    """Return where in the user's code an error was raised: the innermost frame outside of libraries."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
    libraries = tuple(filter(None, (sysconfig.get_path(name) for name in ("stdlib", "purelib"))))
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    if not frames:
        return "in a function that has no Python code"
    frame = (own or frames)[-1]
    return f"at {frame.filename}:{frame.lineno}"
