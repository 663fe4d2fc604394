"""CSV: a file with a header, whose rows become JSON objects of text, or of the types that are given."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream.connectors.batch_rows import BatchRows
from millstream.connectors.folder.file_content import (
    LINE_BYTES_MAX,
    FileContent,
    FileLines,
    UnreadableFileError,
)
from millstream.connectors.folder.row_format import RowPosition

_BOM = "\ufeff"
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
COLUMN_TYPES: tuple[type, ...] = (int, float, bool, str)


@dataclass(frozen=True)
class CsvRows:
    """The format of ``.csv`` and, with a tab, of ``.tsv``.

    Args:
        delimiter: What is between fields: one character.
        columns: The types of columns that are not text. A field of them that is empty is null.
    """

    delimiter: str = ","
    columns: Mapping[str, type] = field(default_factory=dict)

    def read(
        self, content: FileContent, start: RowPosition, rows: BatchRows
    ) -> Iterator[RowPosition]:
        """Read rows; see :class:`~millstream.connectors.folder.row_format.RowFormat`."""
        with content.open() as stream:
            lines = FileLines(stream)
            header = self._header(lines)
            if not header:  # the file is empty
                return
            if start:
                content.pass_over(stream, start["offset"] - lines.offset)
                lines = FileLines(stream, start["offset"], start["line"])
            for _ in self._rows(lines, header, content.path, rows):
                yield {"offset": lines.offset, "line": lines.number}

    def _header(self, lines: FileLines) -> list[str]:
        """Return the names of the columns; the next line is the one behind them."""
        try:
            names = next(self._parser(_Texts(lines)), [])
            "".join(names).encode()
        except (csv.Error, UnicodeEncodeError) as error:
            raise UnreadableFileError(f"its header cannot be read: {error}") from error
        if lines.number and (not names or not all(names) or len(set(names)) != len(names)):
            raise UnreadableFileError(
                f"its header is {names!r:.200}: give each column a name of its own, in the first line"
            )
        if lines.number and (missing := sorted(self.columns.keys() - set(names))):
            raise UnreadableFileError(
                f"its header is {names!r:.200}, and has not {', '.join(missing)}, whose types are given in columns"
            )
        return names

    def _parser(self, texts: _Texts) -> Iterator[list[str]]:
        return csv.reader(texts, delimiter=self.delimiter, strict=True)

    def _rows(
        self, lines: FileLines, header: list[str], path: str, rows: BatchRows
    ) -> Iterator[None]:
        """Add rows, and yield whenever ``rows`` is full."""
        texts = _Texts(lines)
        parser = self._parser(texts)
        converted = [
            (place, _CONVERTERS[self.columns[name]])
            for place, name in enumerate(header)
            if self.columns.get(name, str) is not str
        ]
        while True:
            first = lines.number + 1
            try:
                fields = next(parser)
                if not fields:  # an empty line
                    texts.read.clear()
                    continue
                event = _event(fields, header, converted)
                rows.add(_ENCODE(event).encode(), event)
            except StopIteration:
                return
            except (csv.Error, ValueError, OverflowError) as error:
                reason = "it is no UTF-8" if isinstance(error, UnicodeError) else str(error)
                rows.add_dead(b"".join(texts.read), f"{path}, line {first}", reason)
            texts.read.clear()
            if rows.is_full:
                yield


@dataclass
class _Texts:
    """Lines as text for the parser of CSV, and the bytes that it has read since they were cleared."""

    lines: FileLines
    read: list[bytes] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.lines.next()
        if line is None:
            raise StopIteration
        self.read.append(line)
        if self.lines.is_cut:
            raise csv.Error(f"a line of it is longer than {LINE_BYTES_MAX:,} bytes")
        # Bytes that are no UTF-8 are kept until the row is whole: refused here, the rest of a row of several lines would
        # be taken for rows.
        text = line.decode("utf-8", "surrogateescape")
        return text.removeprefix(_BOM) if self.lines.number == 1 else text


def _event(
    fields: list[str], header: list[str], converted: list[tuple[int, Callable[[str], Any]]]
) -> dict[str, Any]:
    if len(fields) != len(header):
        raise ValueError(f"it has {len(fields)} fields, and the header has {len(header)}")
    event: dict[str, Any] = dict(zip(header, fields, strict=True))
    for place, convert in converted:
        name, text = header[place], fields[place]
        try:
            event[name] = convert(text) if text else None
        except (ValueError, KeyError):
            raise ValueError(f"{name} is {text!r:.100}: not of the type given in columns") from None
    return event


def _number(text: str) -> float:
    found = float(_plain(text))
    if not math.isfinite(found):
        raise ValueError(text)
    return found


def _whole(text: str) -> int:
    return int(_plain(text))


def _plain(text: str) -> str:
    """Return text in which Python would not find a number that others do not."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return text


_CONVERTERS: Mapping[type, Callable[[str], Any]] = {
    int: _whole,
    float: _number,
    bool: lambda text: _TRUTHS[text.lower()],
}
