"""JSON lines: each line of a file is an object, and becomes the value of a record as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from millstream.connectors.batch_rows import BatchRows
from millstream.connectors.folder.file_content import (
    LINE_BYTES_MAX,
    FileContent,
    FileLines,
)
from millstream.connectors.folder.row_format import RowPosition

_BOM = b"\xef\xbb\xbf"


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


_DECODE = json.JSONDecoder(parse_constant=_refuse).decode


class JsonLines:
    """The format of ``.jsonl`` and ``.ndjson``."""

    def read(
        self, content: FileContent, start: RowPosition, rows: BatchRows
    ) -> Iterator[RowPosition]:
        """Read lines; see :class:`~millstream.connectors.folder.row_format.RowFormat`."""
        with content.open(start.get("offset", 0)) as stream:
            lines = FileLines(stream, start.get("offset", 0), start.get("line", 0))
            while (line := lines.next()) is not None:
                _add(rows, line, lines, content.path)
                if rows.is_full:
                    yield {"offset": lines.offset, "line": lines.number}


def _add(rows: BatchRows, line: bytes, lines: FileLines, path: str) -> None:
    if lines.number == 1:
        line = line.removeprefix(_BOM)
    text = line.strip()
    if not text:
        return
    try:
        rows.add(text, _event(text, is_cut=lines.is_cut))
    except (ValueError, RecursionError) as error:
        rows.add_dead(text, f"{path}, line {lines.number}", str(error))


def _event(text: bytes, *, is_cut: bool) -> dict[str, Any]:
    if is_cut:
        raise ValueError(f"it is longer than {LINE_BYTES_MAX:,} bytes")
    event: Any = _DECODE(text.decode())
    if type(event) is not dict:
        raise ValueError(f"it is no JSON object, but {event!r:.100}")
    return event
