"""How far the log is behind a database, and what the database keeps for it: measured beside the capture.

It is measured in a thread of its own, with a connection of its own: what the database keeps grows above all while the
capture does nothing, because its log accepts nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from millstream.errors import MillstreamError


@dataclass(frozen=True, slots=True)
class SourceLag:
    """What was measured; None is not known.

    Attributes:
        bytes_behind: Of the database's own log, between the last stored place and its end.
        bytes_kept: Of it, that the database cannot remove because of the capture.
        rows_expected: Of the tables that are not read to their end, about, as the database estimates.
        alarm: What somebody should do something about; else empty.
        exceeded: More is kept than was allowed.
    """

    bytes_behind: int | None = None
    bytes_kept: int | None = None
    rows_expected: int | None = None
    alarm: str = ""
    exceeded: bool = False


@dataclass
class LagWatch:
    """Measures again and again, in ``with``; ``last`` is what was measured last.

    ``measure`` and ``on_measured`` are called from the watch's thread. That measuring fails is no failure of the capture,
    which will notice itself what is wrong with the database.
    """

    measure: Callable[[], SourceLag]
    on_measured: Callable[[SourceLag], None]
    every_s: float = 5.0
    last: SourceLag = SourceLag()
    _closed: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, name="capture lag", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            try:
                self.last = self.measure()
                self.on_measured(self.last)
            except MillstreamError:
                pass  # tried again
            if self._closed.wait(self.every_s):
                return
