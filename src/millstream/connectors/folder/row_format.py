"""What reads the rows of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

from millstream.connectors.batch_rows import BatchRows
from millstream.connectors.folder.file_content import FileContent

RowPosition: TypeAlias = dict[str, Any]
"""How far a file has been read: JSON, which only its format understands. Empty at the beginning."""


class RowFormat(Protocol):
    """A format of files; see ``read``."""

    def read(
        self, content: FileContent, start: RowPosition, rows: BatchRows
    ) -> Iterator[RowPosition]:
        """Add the rows of a file behind ``start`` to ``rows``; yield how far it is whenever these are full.

        Raises:
            UnreadableFileError: the rest of the file cannot be read; the rows before it were added.
        """
        ...
