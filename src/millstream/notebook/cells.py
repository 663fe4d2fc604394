"""The cells of a notebook: which run of which cell goes on, and whether it is the newest run of its cell.

What a cell declares counts until the cell runs again (docs/decisions/0143). A cell is known by the id that the
front end gives it; where there is none, by its text. A program has no cells: all that it declares counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PROGRAM = 0  # the number that stands for a run in programs


@dataclass
class _Cells:
    """The runs of the cells of one IPython, by number."""

    shell: Any
    cells: dict[int, str] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    before_cell: list[Callable[[], None]] = field(default_factory=list)

    def begin(self, cell: str) -> None:
        """Note that a cell begins to run."""
        number = len(self.cells) + 1
        self.cells[number] = cell
        self.newest[cell] = number

    def on_cell(self, info: Any) -> None:
        """Follow IPython's event."""
        self.begin(getattr(info, "cell_id", None) or info.raw_cell)
        for call in self.before_cell:
            call()


_known: _Cells | None = None


def running_shell() -> Any:
    """Return the IPython that runs cells in this process; None in a program."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def is_kernel() -> bool:
    """Return whether cells run in a kernel, whose front end shows HTML and updates what it has shown."""
    return getattr(running_shell(), "kernel", None) is not None


def cell_run() -> int:
    """Return the number of the run of a cell that goes on; PROGRAM where there are no cells."""
    cells = _cells()
    if cells is None:
        return PROGRAM
    number = len(cells.cells)
    # The history has the cell from before its first line runs; the counter differs among versions of IPython.
    cells.prompts.setdefault(number, len(cells.shell.history_manager.input_hist_raw) - 1)
    return number


def is_newest(run: int) -> bool:
    """Return whether what a run of a cell has declared counts: the cell has not run again."""
    if run == PROGRAM or _known is None or run not in _known.cells:
        return True
    return _known.newest[_known.cells[run]] == run


def cell_name(run: int) -> str:
    """Return how a front end shows a run of a cell, as ``cell [3]``; empty in a program."""
    prompt = None if _known is None else _known.prompts.get(run)
    return "" if prompt is None else f"cell [{prompt}]"


def declared_by(run: int) -> str:
    """Return what a message adds of the cell that has declared something before; empty in a program."""
    name = cell_name(run)
    if not name or run == cell_run():
        return ""
    return f", before in {name} (if that cell is gone, run the one with ms.App again)"


def before_each_cell(call: Callable[[], None]) -> None:
    """Call a function whenever a cell begins to run; never in a program."""
    cells = _cells()
    if cells is not None and call not in cells.before_cell:
        cells.before_cell.append(call)


def _cells() -> _Cells | None:
    """Return the cells of this process, followed from the first call on; None in a program."""
    global _known  # noqa: PLW0603 - a process has one IPython at a time
    shell = running_shell()
    if shell is None:
        return None
    if _known is None or _known.shell is not shell:
        _known = _Cells(shell)
        _known.begin(_cell_that_runs(shell))
        shell.events.register("pre_run_cell", _known.on_cell)
    return _known


def _cell_that_runs(shell: Any) -> str:
    """Return what :meth:`_Cells.on_cell` would have been given of the cell that makes the first call."""
    request = shell.get_parent() if hasattr(shell, "get_parent") else {}
    cell_id = request.get("metadata", {}).get("cellId")
    code = request.get("content", {}).get("code")
    return str(cell_id or code or shell.history_manager.input_hist_raw[-1])
