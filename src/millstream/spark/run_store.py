"""Sorted runs in Spark's state store, with memory-mapped copies on the executor's disk.

For streams that are given to Spark: the checkpoint is then the user's, wherever it lies. A job that
is run by us has its runs in files of the app's folder (`run_files.py`).

The state store is the truth: a run's bytes lie there in parts, and are committed with the batch. A
run is fetched from it once per machine and kept as a file beside, which never changes, so the copy
needs no invalidation: its name is unique to the attempt that wrote the run. Small runs are not worth
a file and are fetched each time.
"""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from millstream.kernels.sorted_runs import Run, decode_run, encode_run

PART_BYTES = 4 << 20
COPY_BYTES_MIN = 256 << 10  # smaller runs are quicker fetched than found on disk
_OPEN_MAX = 256

# Opened copies of this worker process, newest last. A run never changes, so neither does its entry.
_open: OrderedDict[Path, pa.Table] = OrderedDict()


class PartMap(Protocol):
    """The part of Spark's MapState that is used: (name, part) → bytes."""

    def getValue(self, key: tuple[Any, ...]) -> Any: ...  # noqa: N802 - Spark's
    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None: ...  # noqa: N802
    def removeKey(self, key: tuple[Any, ...]) -> None: ...  # noqa: N802


class SparkRunStore:
    """The runs of one operator in one bucket. ``prefix`` begins the names of its runs."""

    def __init__(self, parts: PartMap, copies: Path, prefix: str) -> None:
        self._parts = parts
        self._copies = copies
        self._prefix = prefix

    def load(self, run: Run) -> pa.Table:
        """Give a run's rows from the copy on disk, or from the state store."""
        if run.size_bytes < COPY_BYTES_MIN:
            return decode_run(pa.py_buffer(self._fetch(run)))
        path = self._copy(run.name)
        table = _open.get(path)
        if table is None:
            if not _is_whole(path, run.size_bytes):
                self._keep_copy(run.name, self._fetch(run))
            table = decode_run(pa.memory_map(str(path)))
            _open[path] = table
            if len(_open) > _OPEN_MAX:
                _open.popitem(last=False)
        else:
            _open.move_to_end(path)
        return table

    def save(self, slot: int, table: pa.Table) -> Run:
        """Put a run into the state store, and a copy on disk where it is worth it.

        The state store commits with the batch; the copy is there at once. A crash before that
        commit leaves a copy whose name no manifest holds: it is never read, and is swept away.
        """
        encoded = encode_run(table)
        name = f"{self._prefix}{uuid.uuid4().hex[:20]}"
        for part, start in enumerate(range(0, len(encoded), PART_BYTES)):
            self._parts.updateValue((name, part), (encoded[start : start + PART_BYTES],))
        if len(encoded) >= COPY_BYTES_MIN:
            self._keep_copy(name, encoded)
        return Run(name, slot, table.num_rows, len(encoded))

    def drop(self, run: Run) -> None:
        """Forget a run. A retry that still needs its copy fetches it again."""
        for part in range(-(-run.size_bytes // PART_BYTES)):
            self._parts.removeKey((run.name, part))
        if run.size_bytes >= COPY_BYTES_MIN:
            _open.pop(self._copy(run.name), None)
            with suppress(FileNotFoundError):
                self._copy(run.name).unlink()

    def sweep(self, retained: set[str]) -> None:
        """Remove the copies of this operator and bucket that no manifest names."""
        for path in self._copies.glob(f"{self._prefix}*"):
            if path.stem not in retained:
                with suppress(FileNotFoundError):
                    path.unlink()

    def _fetch(self, run: Run) -> bytes:
        parts = range(-(-run.size_bytes // PART_BYTES))
        return b"".join(bytes(self._parts.getValue((run.name, part))[0]) for part in parts)

    def _copy(self, name: str) -> Path:
        return self._copies / f"{name}.arrow"

    def _keep_copy(self, name: str, encoded: bytes) -> None:
        self._copies.mkdir(parents=True, exist_ok=True)
        half_made = self._copies / f"{name}.{os.getpid()}"
        half_made.write_bytes(encoded)
        half_made.rename(self._copy(name))


def _is_whole(path: Path, size_bytes: int) -> bool:
    try:
        return path.stat().st_size == size_bytes
    except FileNotFoundError:
        return False


def copies_folder(folder: Path) -> Path:
    """Name the folder for copies on this machine, as it has run since it was started.

    Copies are not synced to disk: after a power failure one may have its length and not its
    content. So each start of the machine has a folder of its own, and so has each machine, where
    several share a disk. Call it where the copies are made: on a cluster that is not the driver.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = f"process-{os.getpid()}"  # no way to tell: copies serve one process only
    return folder / boot
