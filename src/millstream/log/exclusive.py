"""What compaction, archiving and transactions need of the writer: to change files while nobody appends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from millstream.log.control import ControlDb


class ExclusiveLog(Protocol):
    """The writer of a log, as compaction and archiving use it to change files."""

    control: ControlDb

    def exclusively(self, action: Callable[[], None]) -> None:
        """Run ``action`` while nothing is being appended."""

    def sync(self) -> None:
        """Return when everything appended is durable and published."""
