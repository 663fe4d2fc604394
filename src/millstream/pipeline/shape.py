"""The shape of a stream: what is known about its rows where the stream is declared.

Functions that build operators and sinks take a shape and return the next one. They know neither
:class:`~millstream.Stream` nor the graph, so the modules of this package import each other one way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

from millstream.errors import ConfigError
from millstream.kernels.column_types import check_column, check_key
from millstream.kernels.late import LATE_COLUMNS, LATE_WINDOW_COLUMNS
from millstream.kernels.trigger import EmitStrategy, LatePolicy, Mode
from millstream.notebook.cells import PROGRAM, cell_run, is_newest
from millstream.pipeline.checks import require_column, require_free
from millstream.pipeline.expressions import names_given
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.window_columns import WINDOW_COLUMNS

EqualRows = Literal["together", "apart"]


class StepNames:
    """The names of an app's steps, each used once."""

    def __init__(self) -> None:
        self._used: dict[str, dict[int, int]] = {}  # by name: of each number the cell's run

    def unique(self, name: str) -> str:
        """Return the name for a step; the second step of one name is ``name #2``.

        In a notebook the names of a cell's steps are free again once the cell runs again.
        """
        used = self._used.setdefault(name, {})
        number = len(used) + 1
        if cell_run() != PROGRAM:
            number = next(one for one in count(1) if one not in used or not is_newest(used[one]))
        used[number] = cell_run()
        return name if number == 1 else f"{name} #{number}"


@dataclass(frozen=True)
class StreamShape:
    """The columns of a stream's rows, and how they are keyed, emitted and judged late.

    Attributes:
        mode: How the window above emits; None above the first window.
        late_columns: The columns of the side output of the step right above; None if it has none.
        is_late: Whether the stream is such a side output.
        window_key: The columns that distinguish windows; by default part of a view's key.
        primary_key: The columns that identify a row of a table; None of a stream, and of a table whose
            rows may be equal.
        key_not_null: Whether no column of the primary key is ever null.
        is_table: Whether the rows are a table, and come as signed changes.
        append_only: Of a table: rows are only added, and none is ever taken back.
        row_keys: Of the rows of windows that are not parts: sets of columns, each of which identifies a
            row among those that hold.
        stable: Of such a stream, while no row is taken back without another in its place: the columns that
            both have in common.
        timed: The columns that each say the same as the event time.
        equal_rows: Whether several equal rows may have one of ``row_keys``, and are taken back together, or apart.
        takes_back: Whether rows may be taken back without another in their place, also where rows replace
            one another.
        may_fail: Whether a step since the window above may fail on a row, where rows replace one another.
        no_windows: Why no window may follow, and what to do; empty if one may.
        names: The names that the app's steps have so far.

    Raises:
        ConfigError: a column has a type that cannot be stored or sent.
    """

    columns: ColumnTypes
    key: tuple[str, ...] = ()
    mode: Mode | None = None
    lateness_us: int = 0
    late_policy: LatePolicy = "drop"
    late_columns: ColumnTypes | None = None
    is_late: bool = False
    window_key: tuple[str, ...] = WINDOW_COLUMNS[:1]
    primary_key: tuple[str, ...] | None = None
    key_not_null: bool = False
    is_table: bool = False
    append_only: bool = False
    row_keys: tuple[tuple[str, ...], ...] = ()
    stable: tuple[str, ...] = ()
    timed: tuple[str, ...] = ()
    equal_rows: EqualRows | None = None
    takes_back: bool = False
    may_fail: bool = False
    no_windows: str = ""
    names: StepNames = field(default_factory=StepNames, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, dtype in self.columns.items():
            check_column(name, dtype)

    def key_columns(self, columns: str | Sequence[str], what: str) -> tuple[str, ...]:
        """Return the names of columns that are to be a key, or part of one.

        Raises:
            ConfigError: what is given is not a name, there is no such column, or its type cannot be
                a key.
        """
        names = names_given(columns, what)
        for name in names:
            require_column(name, self.columns, what)
            check_key(name, self.columns[name], what)
        return names

    @property
    def rows_stay(self) -> bool:
        """Whether no row is ever taken back or replaced."""
        signed = self.is_table and not self.append_only
        return not (signed or self.takes_back or self.has_retractions or self.mode == "update")

    @property
    def has_retractions(self) -> bool:
        """Whether rows may be taken back by rows with ``_diff`` -1."""
        return self.mode == "retract" and not self.append_only

    def as_changes(self) -> StreamShape:
        """Return the shape for an operator that must be told which rows no longer hold.

        Where a row replaces another, the window above then emits both, as with ``"retract"``.
        """
        return replace(self, mode="retract") if self.mode == "update" else self

    def is_alone(self, key: Sequence[str]) -> bool:
        """Whether it is known that no two of the rows that hold agree in these columns and the event time."""
        told = {*key, *self.timed}
        return self.equal_rows is None and any(set(one) <= told for one in self.row_keys)


def check_events(shape: StreamShape, what: str) -> None:
    """Make sure that rows are neither late ones nor parts.

    Raises:
        ConfigError: they are, before the operator that ``what`` names.
    """
    if shape.is_late:
        raise ConfigError(f"{what} comes after late rows. View them, or send them to a topic.")
    if shape.mode == "discard":
        raise ConfigError(
            f'{what} comes after emit("discard"), whose rows are parts that add up. Emit "final" above.'
        )


def late_columns_of(shape: StreamShape, what: str) -> ColumnTypes | None:
    """Return the columns of the late rows that an operator gives to the side output; None if it gives none.

    Raises:
        ConfigError: the stream has a column of that name, before the operator that ``what`` names.
    """
    if shape.late_policy != "side":
        return None
    require_free(LATE_COLUMNS, shape.columns, f"{what} gives late rows")
    return {**shape.columns, **LATE_COLUMNS}


def windowed_shape(
    shape: StreamShape,
    emission: EmitStrategy,
    columns: ColumnTypes,
    key: tuple[str, ...],
    window_key: tuple[str, ...],
    *,
    row_keys: tuple[tuple[str, ...], ...] = (),
    stable: tuple[str, ...] = (),
    timed: tuple[str, ...] = (),
    equal_rows: EqualRows | None = None,
    no_windows: str = "",
) -> StreamShape:
    """Return the shape of what windows over a stream emit."""
    if emission.late_policy == "side":
        require_free(LATE_WINDOW_COLUMNS, shape.columns, "A window gives late rows")
    mode: Mode = "update" if emission.replaces else emission.mode
    changes = mode in ("update", "retract")
    late_columns = {**shape.columns, **LATE_WINDOW_COLUMNS}
    return replace(
        shape,
        columns=columns,
        key=key,
        mode=mode,
        lateness_us=0,
        late_policy="drop",
        late_columns=late_columns if emission.late_policy == "side" else None,
        window_key=window_key,
        row_keys=() if mode == "discard" else row_keys,
        stable=stable if changes else (),
        timed=timed,
        equal_rows=equal_rows,
        takes_back=changes and shape.mode == "retract",
        may_fail=False,
        no_windows=no_windows,
    )
