"""Where the journals of an app's operators are: files of its folder, or objects beside its runs of state.

An object is put in one request, whole or not at all, and only if its name is free. So of two attempts at a batch
the first whose put is acknowledged is the one, as with files (`journal_files.py`), and it is durable then. What
was put, and whose batch was not committed, is there for every later attempt, on whichever machine. Entries
are removed after their batch's commit; what a crash leaves is removed by the next run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from millstream.engine.stages.journal_files import (
    DRAFT,
    JOURNAL_FOLDER,
    JournalFiles,
    remove_entries,
)
from millstream.errors import RetriableError
from millstream.kernels.state.journal import Journal
from millstream.log.files import DISK
from millstream.object_store.client import ObjectClient
from millstream.object_store.place import StatePlace


@dataclass(frozen=True)
class JournalObjects:
    """The journal of one operator in one bucket and batch, in an object store."""

    client: ObjectClient
    batch_id: int
    key: str
    bucket: int

    def read(self, name: str) -> bytes | None:
        """Return the entry of a name, durable; None if there is none."""
        try:
            return bytes(self.client.get(self._name(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, entry: bytes) -> bytes:
        """Keep an entry unless its name has one; return the one that is kept, durable.

        Raises:
            RetriableError: another run has committed the batch meanwhile.
        """
        try:
            self.client.put(self._name(name), memoryview(entry))
        except FileExistsError:
            kept = self.read(name)
            if kept is None:
                raise RetriableError(
                    f"{self.client.url}/{self._name(name)} was there and is gone: another run has committed this "
                    "batch. Let that one go on, or run the app again."
                ) from None
            return kept
        return entry

    def _name(self, name: str) -> str:
        return f"{self.batch_id}-{self.bucket}-{self.key}-{name}"


@dataclass(frozen=True)
class JournalPlace:
    """Where all journals of an app are: in a folder, or at a place of its own."""

    folder: Path
    place: StatePlace | None = None

    def journal(self, batch_id: int, key: str, bucket: int) -> Journal:
        """Return the journal of one operator in one bucket and batch."""
        if self._url is None:
            return JournalFiles(self._folder, batch_id, key, bucket)
        return JournalObjects(ObjectClient(self._url), batch_id, key, bucket)

    def has_entries(self, batch_id: int) -> bool:
        """Return whether a batch has entries."""
        if self._url is None:
            names: Iterable[str] = DISK.names(self._folder)
        else:
            names = ObjectClient(self._url).names()
        return any(
            name.partition("-")[0] == str(batch_id) and not name.endswith(DRAFT) for name in names
        )

    def remove(self, *, keep: int) -> None:
        """Remove all entries but those of one batch; nobody else may be working on another."""
        if self._url is None:
            remove_entries(self._folder, keep=keep)
            return
        client = ObjectClient(self._url)
        gone = [name for name in client.names() if name.partition("-")[0] != str(keep)]
        if gone:
            client.delete(gone)

    @property
    def _folder(self) -> Path:
        """The folder of the files: that of ``file://``, if the place has one."""
        if self.place is None or self.place.url.folder is None:
            return self.folder / JOURNAL_FOLDER
        return self.place.url.folder / self.place.prefix / JOURNAL_FOLDER

    @property
    def _url(self) -> str | None:
        if self.place is None or self.place.url.folder is not None:
            return None
        return f"{self.place.text}/{JOURNAL_FOLDER}"
