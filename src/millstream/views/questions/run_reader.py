"""Reads runs of state that another process writes, and removes.

A run never changes, and its name is never used again. So what was opened once stays right, and can be read after the
job has removed it: a file that is mapped into memory, or bytes that were copied. What no manifest names any more is let go.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from millstream.kernels.state.sorted_runs import Run, decode_run
from millstream.object_store.folder import FolderStore
from millstream.object_store.place import StatePlace
from millstream.object_store.run_names import RunName
from millstream.object_store.store import ObjectStore


class RunReader:
    """The runs of an app's state, for reading only. Thread-safe."""

    def __init__(self, folder: Path, place: StatePlace | None) -> None:
        """Read runs in an app's folder, or at a place of its own."""
        self._store: ObjectStore = (
            FolderStore(folder / "runs") if place is None else place.open("runs")
        )
        self._opened: dict[str, pa.Table] = {}
        self._opening = threading.Lock()

    def load(self, run: Run) -> pa.Table:
        """Return a run's rows.

        Raises:
            CorruptionError: it is not there, or no longer.
        """
        found = self._opened.get(run.name)
        if found is not None:
            return found
        with self._opening:  # an object store is used by one at a time
            if run.name not in self._opened:
                name = RunName.parse(run.name)
                loaded = self._store.read(name.object, name.extent(run.size_bytes))
                self._opened[run.name] = decode_run(loaded.data)
            return self._opened[run.name]

    def save(self, slot: int, table: pa.Table) -> Run:
        """Refuse to write."""
        raise AssertionError(f"a reader does not write {table.num_rows} rows into slot {slot}")

    def drop(self, run: Run) -> None:
        """Refuse to remove."""
        raise AssertionError(f"a reader does not remove {run.name}")

    def keep(self, names: Iterable[str]) -> None:
        """Let go of all runs but these."""
        wanted = {*names}
        with self._opening:
            self._opened = {name: table for name, table in self._opened.items() if name in wanted}

    def close(self) -> None:
        """Let go of all runs."""
        self.keep(())
        self._store.close()


@dataclass(frozen=True)
class QuestionRuns:
    """The runs that one question reads. What it has opened stays until it is answered, whatever the reader lets go."""

    reader: RunReader
    opened: dict[str, pa.Table] = field(default_factory=dict)

    def load(self, run: Run) -> pa.Table:
        """Return a run's rows: see :meth:`RunReader.load`."""
        if run.name not in self.opened:
            self.opened[run.name] = self.reader.load(run)
        return self.opened[run.name]

    def save(self, slot: int, table: pa.Table) -> Run:
        """Refuse to write."""
        return self.reader.save(slot, table)

    def drop(self, run: Run) -> None:
        """Refuse to remove."""
        self.reader.drop(run)
