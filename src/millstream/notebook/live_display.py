"""Displays that are updated in place while what they show changes.

A kernel sends a display with an id, and later others in its place: front ends of Jupyter show them
where the first one was. A file that nbclient writes has the last one of the cell's own run. One thread updates all
displays of a process, once in a second at most, until their cell runs again.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from millstream.notebook.cells import cell_run, is_kernel, is_newest

Bundle = dict[str, Any]  # by MIME type what to show
_EVERY_S = 1.0
_DISPLAYS_MAX = 50  # the oldest ones stay as they are


@dataclass(eq=False)
class _LiveDisplay:
    """A display, by its handle. ``render`` returns what to show, ``version`` what differs when that does.

    ``shown`` is the version of ``bundle``, which is shown.
    """

    handle: Any
    cell: int
    render: Callable[[], Bundle]
    version: Callable[[], object]
    shown: object
    bundle: Bundle

    def update(self) -> bool:
        """Show what there is now; return whether this goes on."""
        if not is_newest(self.cell):
            return False
        try:
            version = self.version()
            if version == self.shown:
                return True
            self.bundle = self.render()
        except Exception as error:  # noqa: BLE001 - the display says it, as nobody waits for an answer
            self.handle.update(_ended(self.bundle, f"No longer updated: {error}"), raw=True)
            return False
        self.shown = version
        self.handle.update(self.bundle, raw=True)
        return True


def _ended(bundle: Bundle, why: str) -> Bundle:
    """Return what is shown, with a line below it."""
    ended = {**bundle, "text/plain": f"{bundle['text/plain']}\n{why}"}
    if "text/html" in bundle:
        ended["text/html"] = f"{bundle['text/html']}<p>{escape(why)}</p>"
    return ended


_displays: deque[_LiveDisplay] = deque(maxlen=_DISPLAYS_MAX)
_lock = threading.Lock()
_thread: threading.Thread | None = None


def show_live(render: Callable[[], Bundle], version: Callable[[], object]) -> None:
    """Show something in the cell that runs, and go on showing it as it changes.

    ``version`` is called once in a second, and is cheap; when it returns something else, ``render`` is called. Where
    there is no kernel, it is shown once.
    """
    from IPython import display as ipython  # noqa: PLC0415 - IPython has called us

    display: Callable[..., Any] = ipython.display
    seen, bundle = version(), render()
    if not is_kernel():
        display(bundle, raw=True)
        return
    handle = display(bundle, raw=True, display_id=True)
    with _lock:
        _displays.append(_LiveDisplay(handle, cell_run(), render, version, seen, bundle))
        _start()


def _start() -> None:
    global _thread  # noqa: PLW0603 - a process has one
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_update_all, name="millstream displays", daemon=True)
        _thread.start()


def _update_all() -> None:
    """Update the displays until there is none left."""
    main = threading.main_thread()
    while main.is_alive() and not sys.is_finalizing():
        main.join(_EVERY_S)  # ends at once when the process does
        with _lock:
            displays = [*_displays]
            if not displays:
                return
        ended = [one for one in displays if not one.update()]
        with _lock:
            for one in ended:
                if one in _displays:
                    _displays.remove(one)
