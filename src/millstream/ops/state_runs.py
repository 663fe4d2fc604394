"""The runs of state of an app, to read them where they are: in its folder, or in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from millstream.engine.stages.run_files import RunFiles
from millstream.object_store.folder import FolderStore
from millstream.object_store.place import StatePlace

_NO_RUN = 0  # it writes nothing


@contextmanager
def state_runs(folder: Path, place: StatePlace | None) -> Iterator[RunFiles]:
    """Open the runs that the manifests of the app in ``folder`` name; ``place`` has them if the folder has not."""
    if place is None:
        yield RunFiles(FolderStore(folder / "runs"), _NO_RUN)
        return
    with closing(place.open("runs")) as store:
        yield RunFiles(store, _NO_RUN)
