"""Where a dataset is: in a folder, or under a URL; ``dataset_address.py`` tells them apart.

A place has the manifest, which is replaced as a whole, and files that never change. Of a folder a lock keeps other
writers out; under a URL there is none, and a manifest is replaced only if it is the one that was read
(``dataset_url.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import polars as pl

from millstream.views.sinks.dataset_manifest import Manifest


class ManifestReplacedError(Exception):
    """Another writer has replaced the manifest since it was read: read it again."""


class DatasetPlace(Protocol):
    """The manifest and the files of one dataset; paths are relative, with ``/`` between."""

    @property
    def text(self) -> str:
        """Its path or URL, without credentials."""
        ...

    @property
    def merged_tiers(self) -> int:
        """Files of how many tiers are merged: see ``dataset_merge.py``."""
        ...

    def lock(self) -> AbstractContextManager[None]:
        """Keep other writers out until the block ends, if that is possible here."""
        ...

    def create(self, fresh: Manifest) -> None:
        """Make the place, with this manifest if it has none.

        Raises:
            ConfigError: somebody else's files are there.
        """
        ...

    def read(self) -> Manifest | None:
        """Return the newest manifest; None where there is none."""
        ...

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest that :meth:`read` gave, durably.

        Raises:
            ManifestReplacedError: it is not the newest any more. Nothing was replaced.
        """
        ...

    def stamp(self, manifest: Manifest, run: int) -> str:
        """Return what the names of a run's files have besides the batch and what makes them unique."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write a file, durably; nobody else has its name."""
        ...

    def size_bytes(self, path: str) -> int | None:
        """Return the size of a file; None if it is not there."""
        ...

    def open_file(self, path: str) -> Path | bytes:
        """Return what polars reads a file from."""
        ...

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files; those that are not there are no error."""
        ...

    def files(self, manifest: Manifest, before_run: int | None = None) -> dict[str, int]:
        """Return the files of the dataset that are there, named by its manifest or not, with their sizes.

        With ``before_run`` only those which no run of this number or a later one can have written. Those of datasets
        that were deleted here are among them, as nobody reads them.
        """
        ...

    def scan(self, paths: Sequence[str], schema: pl.Schema, *, some_lack: bool) -> pl.LazyFrame:
        """Return the rows of files lazily. ``some_lack`` columns of the schema; they are null there."""
        ...

    def address_of(self, path: str) -> Path | str:
        """Return the path or the URL of a file."""
        ...

    def delete(self, identity: str) -> None:
        """Delete the dataset, so that a job can begin it again; nothing if it is another one."""
        ...
