"""Sorted runs as files of the checkpoint: Spark's state names them, and does not carry them.

A run never changes, so a file serves as well as rows of a state store would, and costs a tenth: it is
written once, where the state store writes it into a log of changes, a table in memory and files that
are rewritten, uploaded, and after a start read again in whole before the first batch. Small runs
are worth no file and lie in the state store, which also has the manifest.

1. A file is written whole and synced, and its folder synced, before the manifest that names it is given
   to Spark. A crash between leaves a file that no manifest names: the next run of the app sweeps it.
2. Spark commits the manifest with the batch. A batch that is run again begins with the manifest before
   it. So a file that a batch drops stays for the batches from which Spark may start again, and a few
   more: the manifest says which files are left like that, and counts the batches.
3. A file's name has the number of the run of the app that made it. A sweep removes files of earlier runs
   only, and only what its own manifest neither names nor counts. An old run that wakes while a newer one
   works therefore harms nothing: what the newer one has of runs before both, the old manifest
   names as well.
"""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from millstream.errors import CorruptionError
from millstream.kernels.sorted_runs import Run, decode_run, encode_run
from millstream.spark.run_store import COPY_BYTES_MIN, PartMap, SparkRunStore

# Spark keeps ten batches to start from (see the session), of which it uses the last or the one before.
BATCHES_KEPT = 12
_OPEN_MAX = 256

# Opened files of this worker process, newest last. A file never changes, so neither does its entry.
_open: OrderedDict[Path, pa.Table] = OrderedDict()


@dataclass
class RunFiles:
    """The files of one bucket of a stage, while a batch is worked on.

    ``run`` numbers the run of the app. ``left`` are files that the manifest has ceased to name, with
    the batches for which each is still kept.
    """

    folder: Path
    run: int
    left: dict[str, int] = field(default_factory=dict)
    _written: bool = False

    def open(self, run: Run) -> pa.Table:
        """Give a run's rows, mapped into memory.

        Raises:
            CorruptionError: the file is not there, or not whole.
        """
        path = self._path(run.name)
        table = _open.get(path)
        if table is None:
            self._require_whole(path, run)
            table = _open[path] = decode_run(pa.memory_map(str(path)))
            if len(_open) > _OPEN_MAX:
                _open.popitem(last=False)
        else:
            _open.move_to_end(path)
        return table

    def write(self, name: str, encoded: bytes) -> None:
        """Write a run, and have it on disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._path(name).open("xb") as file:
            file.write(encoded)
            file.flush()
            os.fsync(file.fileno())
        self._written = True

    def leave(self, run: Run) -> None:
        """Take it that the manifest names a run no longer."""
        _open.pop(self._path(run.name), None)
        self.left[run.name] = BATCHES_KEPT

    def settle(self) -> None:
        """End the batch, before its manifest is given to Spark: all written is synced, old files go."""
        if self._written:
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self.left = {name: batches - 1 for name, batches in self.left.items()}
        for name in [name for name, batches in self.left.items() if batches < 0]:
            self._path(name).unlink(missing_ok=True)
            del self.left[name]

    def sweep(self, prefix: str, named: set[str]) -> None:
        """Remove what batches of earlier runs of the app wrote and did not commit."""
        for path in self.folder.glob(f"{prefix}*"):
            run = int(path.stem.removeprefix(prefix).partition("-")[0])
            if run < self.run and path.stem not in named and path.stem not in self.left:
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.arrow"

    def _require_whole(self, path: Path, run: Run) -> None:
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError:
            size_bytes = 0
        if size_bytes != run.size_bytes:
            raise CorruptionError(
                f"{path} has {size_bytes} bytes; the state needs it with {run.size_bytes}. Restore "
                "the whole checkpoint from where you keep copies of it, or delete the app's folder to "
                "rebuild state and views from the log."
            )


class FileRunStore:
    """The runs of one operator in one bucket: large ones in files. ``prefix`` begins their names."""

    def __init__(self, parts: PartMap, files: RunFiles, prefix: str) -> None:
        self._small = SparkRunStore(parts, files.folder, prefix)
        self._files = files
        self._prefix = prefix

    def load(self, run: Run) -> pa.Table:
        """Give a run's rows.

        Raises:
            CorruptionError: its file is not there, or not whole.
        """
        return self._files.open(run) if _in_file(run) else self._small.load(run)

    def save(self, slot: int, table: pa.Table) -> Run:
        """Write a run; it is on disk when this returns, or goes to disk with the state store."""
        encoded = encode_run(table)
        if len(encoded) < COPY_BYTES_MIN:
            return self._small.save_encoded(slot, table.num_rows, encoded)
        name = f"{self._prefix}{self._files.run}-{uuid.uuid4().hex[:20]}"
        self._files.write(name, encoded)
        return Run(name, slot, table.num_rows, len(encoded))

    def drop(self, run: Run) -> None:
        """Forget a run."""
        if _in_file(run):
            self._files.leave(run)
        else:
            self._small.drop(run)

    def sweep(self, named: set[str]) -> None:
        """Remove files of this operator and bucket that no manifest names."""
        self._files.sweep(self._prefix, named)


def _in_file(run: Run) -> bool:
    return run.size_bytes >= COPY_BYTES_MIN
