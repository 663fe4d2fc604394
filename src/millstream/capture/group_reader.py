"""Reads a source in a thread of its own, and gives what there is as groups of whole units.

While the log makes one group durable, the next is read: so the more there is to read, the larger are the groups,
and a single change waits for nothing. A unit goes through the queue in pieces, and may be larger than memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from millstream.capture.lag import SourceLag
from millstream.capture.signals import RereadRequest
from millstream.capture.units import (
    CaptureUnit,
    Progress,
    UnitContent,
    UnitKind,
    content_rows,
)

PIECE_CONTENTS = 1000
PIECES_MAX = 32
GROUP_CONTENTS = 20_000  # a group that has so many is not extended
GROUP_S = 0.1  # nor one that has been gathered for so long
_LOOK_S = 0.2  # how often a thread that waits looks whether it is to stop


class CaptureSource(Protocol):
    """A database whose tables and changes can be read; see ``units.py``."""

    def check(self) -> list[tuple[str, str]]:
        """Return the tables that are captured: schema or database, and name. Raise a ConfigError if one cannot be."""

    def units(self, progress: Progress | None) -> Iterator[CaptureUnit]: ...
    def acknowledge(self, progress: Progress) -> None:
        """Note that all up to ``progress`` is durable in the log. Called from another thread than ``units``."""

    def measure(self, progress: Progress) -> SourceLag:
        """Measure how far the log, which has all up to ``progress``, is behind. Called from another thread."""

    def release(self, progress: Progress) -> None:
        """Let the database remove what it keeps for this capture, which ends with that. From another thread."""

    def check_reread(self, request: RereadRequest) -> None:
        """Return if a table can be read again so; else raise a ConfigError. From any thread."""

    def reread(self, request: RereadRequest) -> None:
        """Have ``units`` read a table again, soon: all of it after a truncate. From another thread."""

    def remove(self) -> list[str]:
        """Take out of the database what captures of this name have installed there; return what it was."""


@dataclass(frozen=True)
class _Piece:
    """Some contents of a unit; the last piece has the progress after the unit."""

    kind: UnitKind
    position: str
    timestamp_ms: int
    contents: list[UnitContent]
    progress: Progress | None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class GroupReader:
    """The units of a source from ``progress`` on. Close it, or use it in ``with``.

    What the source raises comes out of :meth:`group`, after all units that it gave before.
    """

    source: CaptureSource
    progress: Progress | None
    monotonic_s: Callable[[], float] = time.monotonic
    _pieces: queue.Queue[_Piece | BaseException] = field(
        default_factory=lambda: queue.Queue(PIECES_MAX)
    )
    _closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, name="capture source", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading. A source that waits for its server ends with its next heartbeat."""
        self._closed.set()

    # ── in the thread ───────────────────────────────────────────────────────────────────────

    def _read(self) -> None:
        try:
            for unit in self.source.units(self.progress):
                self._divide(unit)
                if self._closed.is_set():
                    return
            self._put(EOFError("the source has ended"))
        except BaseException as error:  # noqa: BLE001 - raised where groups are taken
            self._put(error)

    def _divide(self, unit: CaptureUnit) -> None:
        contents: list[UnitContent] = []
        rows = 0
        for content in unit.contents:
            contents.append(content)
            rows += content_rows(content)
            if rows >= PIECE_CONTENTS:
                self._put(self._piece(unit, contents, None))
                contents, rows = [], 0
        self._put(self._piece(unit, contents, unit.progress))

    def _piece(
        self, unit: CaptureUnit, contents: list[UnitContent], progress: Progress | None
    ) -> _Piece:
        return _Piece(unit.kind, unit.position, unit.timestamp_ms, contents, progress, unit.details)

    def _put(self, piece: _Piece | BaseException) -> None:
        while not self._closed.is_set():
            try:
                self._pieces.put(piece, timeout=_LOOK_S)
            except queue.Full:
                continue
            return

    # ── for the writer ──────────────────────────────────────────────────────────────────────

    def wait(self, timeout_s: float) -> bool:
        """Return whether there is something to take, after waiting for so long at most."""
        with self._pieces.not_empty:
            return self._pieces.not_empty.wait_for(lambda: bool(self._pieces.queue), timeout_s)

    def group(self) -> Iterator[CaptureUnit]:
        """Yield units until there are no more at the moment, or the group is large enough.

        The contents of each are to be read to their end before the next is asked for.

        Raises:
            Whatever the source raised: only before the first unit of a group.
        """
        begun, count = self.monotonic_s(), 0
        while not self._pieces.empty():
            with self._pieces.mutex:
                head = self._pieces.queue[0]
            if isinstance(head, BaseException) and count:
                return
            piece = self._pieces.get()
            if isinstance(piece, BaseException):
                raise piece
            unit = CaptureUnit(
                piece.kind,
                piece.position,
                piece.timestamp_ms,
                iter(()),
                piece.progress or {},
                piece.details,
            )
            read = _Contents(self, piece, unit)
            unit.contents = iter(read)
            yield unit
            count += 1 + read.count
            if count >= GROUP_CONTENTS or self.monotonic_s() - begun >= GROUP_S:
                return

    def take(self) -> _Piece:
        """Return the next piece of a unit, waiting for it.

        Raises:
            Whatever the source raised.
        """
        piece = self._pieces.get()
        if isinstance(piece, BaseException):
            raise piece
        return piece


@dataclass
class _Contents:
    """The contents of one unit, piece by piece; at their end the unit gets its progress."""

    reader: GroupReader
    piece: _Piece
    unit: CaptureUnit
    count: int = 0

    def __iter__(self) -> Iterator[UnitContent]:
        piece = self.piece
        while True:
            self.count += sum(map(content_rows, piece.contents))
            yield from piece.contents
            if piece.progress is not None:
                self.unit.progress = piece.progress
                return
            piece = self.reader.take()
