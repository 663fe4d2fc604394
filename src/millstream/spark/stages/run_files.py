"""Sorted runs as files of the app's folder, named by the manifests that are committed with the views.

A run never changes, so a file serves as well as rows of Spark's state store would, and costs a tenth: it
is written once, where that store writes a changelog, a memtable and files that are rewritten, uploaded, and
read as a whole after a start. A large run is a file of its own. The small runs that a task makes in a batch
share one file, a *bundle*, and are named by their position in it. So a batch costs each task at most one
sync, and small state has few files.

1. A file is written and synced, and its folder synced, before the manifest that names it goes to the
   driver. A crash before leaves a file that no manifest names: the next run of the app removes it.
2. The state store commits the manifests with the batch's rows. A crash before leaves the manifests of the
   batch before, whose files are all there: the batch is run again, and writes its files again.
3. After that commit, files that no manifest names any more are removed. A crash before leaves such files:
   the next run removes them.
4. A file's name begins with the number of the app's run that made it. A sweep removes only files of earlier
   runs, and a run removes replaced files only after a commit of its own. So an old run that wakes up while
   a newer one works does no harm: its commit is refused.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from millstream.errors import CorruptionError
from millstream.kernels.state.sorted_runs import Run, decode_run, encode_run, write_run
from millstream.log.files import DISK

OWN_FILE_BYTES_MIN = 256 << 10  # smaller runs share a bundle
_ALIGNMENT_BYTES = 64  # of a table that Arrow uses in place
_AT = "@"  # between a bundle's name and a run's position in it


@dataclass
class _RunCache:
    """Runs that this process has opened, newest last. A run never changes, so neither does its entry."""

    count_max: int
    bytes_max: int
    tables: OrderedDict[Path, pa.Table] = field(default_factory=OrderedDict)
    bytes: int = 0

    def get(self, path: Path) -> pa.Table | None:
        if path not in self.tables:
            return None
        self.tables.move_to_end(path)
        return self.tables[path]

    def put(self, path: Path, table: pa.Table) -> None:
        self.forget(path)
        self.tables[path] = table
        self.bytes += table.nbytes
        while len(self.tables) > self.count_max or self.bytes > self.bytes_max:
            self.forget(next(iter(self.tables)))

    def forget(self, path: Path) -> None:
        table = self.tables.pop(path, None)
        if table is not None:
            self.bytes -= table.nbytes


_mapped = _RunCache(count_max=256, bytes_max=1 << 62)  # each takes a file descriptor, and no memory
_copied = _RunCache(count_max=8192, bytes_max=64 << 20)


@dataclass
class RunFiles:
    """The runs that one task reads and writes in one batch. ``run`` is the number of the app's run.

    Nothing is durable before :meth:`sync`.
    """

    folder: Path
    run: int
    _bundle: str = ""
    _waiting: dict[str, bytes] = field(default_factory=dict)  # what the bundle will hold, in order
    _waiting_bytes: int = 0
    _written: bool = False

    def load(self, run: Run) -> pa.Table:
        """Return a run's rows; a large run is mapped into memory.

        Raises:
            CorruptionError: its file is missing or incomplete.
        """
        opened, path = _run_cache(run.name), self.folder / run.name
        table = opened.get(path)
        if table is None:
            table = decode_run(self._fetch(run))
            opened.put(path, table)
        return table

    def save(self, slot: int, table: pa.Table) -> Run:
        """Write a run. It is on disk once :meth:`sync` has returned."""
        if table.nbytes >= OWN_FILE_BYTES_MIN:
            name = self._new_name()
            size_bytes = self._write(name, lambda file: write_run(table, file))
        else:
            encoded = encode_run(table)
            name, size_bytes = self._append_to_bundle(encoded), len(encoded)
            _copied.put(self.folder / name, decode_run(pa.py_buffer(encoded)))
        return Run(name, slot, table.num_rows, size_bytes)

    def drop(self, run: Run) -> None:
        """Forget a run; its file stays until the batch is committed."""
        _run_cache(run.name).forget(self.folder / run.name)

    def sync(self) -> None:
        """Write the bundle and sync the folder: all runs of the batch's manifests are on disk."""
        if self._waiting:
            runs = map(_padded, self._waiting.values())
            self._write(self._bundle, lambda file: file.writelines(runs))
            self._waiting, self._waiting_bytes, self._bundle = {}, 0, ""
        if self._written:
            DISK.sync_folder(self.folder)
            self._written = False

    def _append_to_bundle(self, encoded: bytes) -> str:
        self._bundle = self._bundle or self._new_name()
        name = f"{self._bundle}{_AT}{self._waiting_bytes}"
        self._waiting[name] = encoded
        self._waiting_bytes += len(encoded) + _padding_bytes(encoded)
        return name

    def _new_name(self) -> str:
        return f"{self.run}-{uuid.uuid4().hex[:20]}"

    def _write(self, name: str, put: Callable[[BinaryIO], None]) -> int:
        """Write a file and sync it; return its size in bytes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / name).open("xb") as file:
            put(file)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        self._written = True
        return size_bytes

    def _fetch(self, run: Run) -> pa.Buffer:
        if run.name in self._waiting:  # written by this task, and no longer in the cache
            return pa.py_buffer(self._waiting[run.name])
        file, _, position = run.name.partition(_AT)
        path, start = self.folder / file, int(position or 0)
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError:
            size_bytes = 0
        end = start + run.size_bytes
        whole = size_bytes >= end if position else size_bytes == end
        if not whole:
            raise CorruptionError(
                f"{path} has {size_bytes} bytes; the state needs {run.size_bytes} of it from byte "
                f"{start} on. Restore the app's whole folder from where you keep copies of it, or "
                "start over from the log: `millstream reset` with the app's name."
            )
        if not position:
            return pa.memory_map(str(path)).read_buffer()
        with path.open("rb") as opened:
            opened.seek(start)
            return pa.py_buffer(opened.read(run.size_bytes))


def _padding_bytes(encoded: bytes) -> int:
    return -len(encoded) % _ALIGNMENT_BYTES


def _padded(encoded: bytes) -> bytes:
    return encoded + bytes(_padding_bytes(encoded))


def _run_cache(run_name: str) -> _RunCache:
    return _copied if _AT in run_name else _mapped


def file_name(run_name: str) -> str:
    """Return the name of a run's file."""
    return run_name.partition(_AT)[0]


@dataclass
class FilesInUse:
    """Which files the committed manifests name, and how often."""

    folder: Path
    named: Counter[str] = field(default_factory=Counter)

    def replace_manifest(self, before: Iterable[str], after: Iterable[str]) -> None:
        """Replace the runs of a manifest, and remove the files that no manifest names any more.

        Call it once the new manifest is committed.
        """
        lost = Counter(map(file_name, before))
        self.named.update(map(file_name, after))
        self.named.subtract(lost)
        for name in lost:
            if self.named[name] <= 0:
                del self.named[name]
                (self.folder / name).unlink(missing_ok=True)

    def sweep(self, run: int) -> None:
        """Remove files of earlier runs of the app that no manifest names."""
        if not self.folder.exists():
            return
        for path in self.folder.iterdir():
            number = path.name.partition("-")[0]
            if number.isdigit() and int(number) < run and path.name not in self.named:
                path.unlink(missing_ok=True)
