"""FolderSource: files of a folder, or objects under a URL, each new one once, row by row."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal, get_args

from millstream.choices import choose
from millstream.connectors.batch_rows import BatchRows
from millstream.connectors.connector import RECORDS_MAX, Guarantee, Position, SourceBatch
from millstream.connectors.folder.csv_rows import COLUMN_TYPES, CsvRows
from millstream.connectors.folder.file_content import (
    Compression,
    FileContent,
    UnreadableFileError,
)
from millstream.connectors.folder.found_files import (
    FilePlace,
    FoundFile,
    LocalFolder,
    ObjectFolder,
)
from millstream.connectors.folder.json_lines import JsonLines
from millstream.connectors.folder.parquet_rows import ParquetRows
from millstream.connectors.folder.read_files import Changed, ReadFiles, read_file
from millstream.connectors.folder.row_format import RowFormat, RowPosition
from millstream.connectors.record_fields import RecordFields
from millstream.durations import Duration, to_us
from millstream.errors import ConfigError, RetriableError
from millstream.log.clocks import wall_clock_ms
from millstream.object_store.address import check_is_folder, is_url, parse_url
from millstream.object_store.client import ObjectClient

FileFormat = Literal["json-lines", "csv", "parquet"]
_ENDINGS: Mapping[str, FileFormat] = {
    ".jsonl": "json-lines",
    ".ndjson": "json-lines",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_LIST_PAUSE = (
    9  # times as long as a listing took: a folder of very many files takes a tenth of the time
)
_COMPRESSIONS: Mapping[str, Compression] = {".gz": "gz", ".zst": "zst"}


@dataclass(frozen=True)
class FolderSource:
    """A source connector, made by :func:`folder`."""

    place: FilePlace
    format: FileFormat | None
    fields: RecordFields
    csv: CsvRows
    changed: Changed
    settled_s: float
    every_s: float
    records_max: int = RECORDS_MAX
    clock_ms: Callable[[], int] = wall_clock_ms
    monotonic_s: Callable[[], float] = time.monotonic
    sleep_s: Callable[[float], None] = time.sleep
    kind: str = "folder"
    guarantee: Guarantee = "each once"

    @property
    def origin(self) -> str:
        """The folder, or the URL."""
        return self.place.shown

    def open(self, positions: Mapping[str, Position]) -> FolderReader:
        """Return what reads on; see :class:`~millstream.connectors.connector.SourceConnector`."""
        if not positions and isinstance(self.place, LocalFolder) and not self.place.folder.is_dir():
            raise ConfigError(f"{self.place.shown!r} is no folder. Create it, or correct the path.")
        return FolderReader(self, positions)

    def format_of(self, path: str) -> tuple[RowFormat, Compression] | None:
        """Return the format of a file, and how it is compressed; None if its name does not say."""
        ending = Path(path).suffix.lower()
        compression = _COMPRESSIONS.get(ending, "")
        plain = path[: -len(ending)] if compression else path
        format_ = self.format or _ENDINGS.get(Path(plain).suffix.lower())
        if format_ is None or (format_ == "parquet" and compression):
            return None
        if format_ == "csv":
            tabs = plain.lower().endswith(".tsv") and self.csv.delimiter == ","
            return (CsvRows("\t", self.csv.columns) if tabs else self.csv), compression
        return (JsonLines() if format_ == "json-lines" else ParquetRows()), compression


@dataclass
class _OpenFile:
    file: FoundFile
    rows: Iterator[RowPosition]
    begun_before: bool
    """Whether rows of it are stored already."""


class FolderReader:
    """Reads files; see :class:`~millstream.connectors.connector.SourceReader`."""

    def __init__(self, source: FolderSource, positions: Mapping[str, Position]) -> None:
        self._source = source
        self._rows = BatchRows(source.fields, source.records_max)
        self._files = ReadFiles.of(
            positions,
            changed=source.changed,
            settled_s=source.settled_s,
            clock_ms=source.clock_ms,
            monotonic_s=source.monotonic_s,
        )
        self._queue: list[FoundFile] = []
        self._open: _OpenFile | None = None
        self._list_s = -math.inf  # when it is listed next
        self._waits = False
        self._unknown: set[str] = set()
        self._mtime_ns = 0

    @property
    def alarm(self) -> str:
        """Which files were passed over: first what may be lost, then what is not read at all."""
        return ". ".join(filter(None, (self._files.passed_over, self._unknown_files())))

    def _unknown_files(self) -> str:
        if not self._unknown:
            return ""
        return (
            f"{len(self._unknown)} files are of no known format, such as {min(self._unknown)}, and are not read: give a "
            f"format, or a pattern that they do not fit. Known are {', '.join(_ENDINGS)}, the first four also with .gz or .zst."
        )

    def read(self, wait_s: float) -> SourceBatch | None:
        """Return the next rows, perhaps of many files; see the protocol."""
        deadline_s = self._source.monotonic_s() + wait_s
        while True:
            while not self._rows.is_full and self._read_on():
                pass
            if (batch := self._batch()) is not None:
                return batch
            self._list_when_due()
            if self._queue or self._files.positions:
                continue
            left_s = deadline_s - self._source.monotonic_s()
            if left_s <= 0:
                return SourceBatch() if self._waits else None
            self._source.sleep_s(min(left_s, self._source.every_s))

    def stored(self, batch: SourceBatch) -> None:
        """Do nothing: positions are in the log."""

    def close(self) -> None:
        """Close the file that is being read."""
        self._open = None
        self._queue = []

    def _batch(self) -> SourceBatch | None:
        positions = self._files.positions
        if not positions:
            return None
        self._files.positions = {}
        return self._rows.take(positions, self._mtime_ns // 1_000_000 or None)

    def _list_when_due(self) -> None:
        begun_s = self._source.monotonic_s()
        if begun_s < self._list_s:
            return
        known: list[FoundFile] = []
        self._unknown.clear()
        for file in self._source.place.files():
            if self._source.format_of(file.path) is None:
                self._unknown.add(file.path)
            else:
                known.append(file)
        self._queue, self._waits = self._files.next_files(known)
        now_s = self._source.monotonic_s()
        self._list_s = now_s + max(self._source.every_s, _LIST_PAUSE * (now_s - begun_s))

    def _read_on(self) -> bool:
        """Read until the batch is full, or a file ends; return whether there may be more to read."""
        if self._open is None:
            if not self._queue:
                return False
            self._open = self._opened(self._queue.pop(0))
        opened = self._open
        try:
            at = next(opened.rows)
        except StopIteration:
            self._end(opened)
        except UnreadableFileError as error:
            self._rows.add_dead(b"", opened.file.path, str(error))
            self._end(opened)
        except FileNotFoundError:  # removed since it was listed; nothing of it was read
            self._open = None
        except OSError as error:
            raise RetriableError(
                f"{opened.file.path} in {self._source.origin} cannot be read: {error}"
            ) from error
        else:
            self._refuse_if_written(opened)
            self._files.note(opened.file.path, read_file(opened.file, at))
            opened.begun_before = True
        self._mtime_ns = opened.file.mtime_ns
        return True

    def _opened(self, file: FoundFile) -> _OpenFile:
        found = self._source.format_of(file.path)
        assert found is not None
        format_, compression = found
        content = FileContent(file.path, partial(self._open_as_found, file), compression)
        entry = self._files.known.get(file.path)
        start = (entry.at if entry is not None else None) or {}
        return _OpenFile(file, format_.read(content, start, self._rows), entry is not None)

    def _open_as_found(self, file: FoundFile) -> IO[bytes]:
        """Open a file that is still what was found: another one may have come into its place since (a log that rotates).

        Raises:
            RetriableError: it is not.
        """
        place = self._source.place
        stream = place.open(file.path)
        if file.inode and place.found(file.path) != file:
            stream.close()
            raise self._was_written(file)
        return stream

    def _refuse_if_written(self, opened: _OpenFile) -> None:
        """Refuse a file that is being written. Of what was read nothing is stored: it is read again when it is settled."""
        now = self._source.place.found(opened.file.path)
        if now is not None and now != opened.file and not opened.begun_before:
            raise self._was_written(opened.file)

    def _was_written(self, file: FoundFile) -> RetriableError:
        return RetriableError(
            f"{file.path} in {self._source.origin} was written while it was read; it is read again when it has not "
            f"changed for {self._source.settled_s:g} s"
        )

    def _end(self, opened: _OpenFile) -> None:
        """Note that a file was read to its end."""
        self._refuse_if_written(opened)
        self._files.note(opened.file.path, read_file(opened.file, None))
        self._open = None


def folder(
    path: Path | str,
    *,
    pattern: str = "*",
    format: FileFormat | None = None,  # noqa: A002 - what users call it
    key: str | None = None,
    time: str | None = None,
    delimiter: str = ",",
    columns: Mapping[str, type] | None = None,
    changed: Changed = "stop",
    settled: Duration = "2 seconds",
    every: Duration = "1 second",
) -> FolderSource:
    """Return a source of the files in a folder, or of the objects under a URL: each new one is read once.

    ::

        ms.source(ms.folder("incoming", pattern="*.csv", key="id"), topic="orders").run()

    Files are read in the order of their times, then of their paths; objects in that of their names. Names that begin with
    a dot or an underscore, or end with .tmp, .part, .partial, .filepart or .crdownload, are not read.

    Args:
        path: A folder, with those in it, or ``s3://bucket/prefix``, ``gs://``, ``az://``, ``hdfs://``.
        pattern: Which names are read, with ``*`` and ``?``, without the folder.
        format: "json-lines", "csv" or "parquet"; by default what the name ends with.
        key: The field that is the record's key: text or a whole number.
        time: The field that is the record's time: ISO 8601, or milliseconds since 1970. Now, if not given.
        delimiter: Of CSV.
        columns: Of CSV, the types of columns that are not text: int, float or bool. Empty fields of them are null.
        changed: What happens when a file that was read has changed: "stop" (with an error), "skip" (it stays as it was
            read, and there is an alarm), "read" (all of it is read again, as if it were new).
        settled: A file is read when it has not changed for so long.
        every: How often new files are looked for.

    Raises:
        ConfigError: an option is not possible.
    """
    if format is not None:
        choose("format", format, get_args(FileFormat))
    choose("changed", changed, get_args(Changed))
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
        raise ConfigError(f"delimiter is {delimiter!r}. Give one character, such as ; or a tab.")
    types = dict(columns or {})
    for name, type_ in types.items():
        if type_ not in COLUMN_TYPES:
            raise ConfigError(
                f"the column {name!r} has the type {type_!r}. Give int, float, bool or str."
            )
    return FolderSource(
        _place(path, pattern),
        format,
        RecordFields(key, time),
        CsvRows(delimiter, types),
        changed,
        to_us(settled, what="settled") / 1e6,
        max(to_us(every, what="every"), 10_000) / 1e6,
    )


def _place(path: Path | str, pattern: str) -> FilePlace:
    if is_url(path):
        url = parse_url(str(path), "The URL of the folder")
        if url.folder is None:
            return ObjectFolder(ObjectClient(url.text), pattern)
        path = url.folder
    check_is_folder(str(path), "The path of the folder")
    return LocalFolder(Path(path).absolute(), pattern)
