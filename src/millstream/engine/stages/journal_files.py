"""The journals of operators as files of the app's folder: see :mod:`millstream.kernels.state.journal`.

An entry is one file, whose name says its batch, its operator and bucket, and what the operator called it. All
processes of a job share the folder, and any attempt at the batch reads it: that of another task, and of the next
run of the app.

1. The entry is written to a draft, under a name that nobody else has, and synced. A crash leaves a draft,
   which nobody reads; the next run removes it.
2. The draft is linked to the entry's name. If that is taken, the entry is another attempt's: its draft was
   whole and on disk before it was linked. A crash leaves both names, or after a power failure perhaps only
   the draft: then the entry was not there for anybody who had told of it, because of step 3.
3. The folder is synced, by whoever links or reads an entry, before anything that follows from it is told. From
   here on the entry is there for every later attempt.
4. The draft is removed. A crash before leaves it to the next run.
5. The state store commits the batch; then the batch's entries are removed. A crash between the two leaves
   entries of a committed batch, which nobody reads: the next run removes them.

A run begins by removing what is not of the batch that comes next. An old run that wakes up while a newer one
works cannot replace an entry. If it is first, its answer counts for the newer run, too: both work on
the same batch, as that is in Spark's offset log before it is run. It removes entries only after a commit, and
its commit is refused. A reset removes the folder. What an old run writes after that has names which no
new run uses: they follow from the hashes of keys, and the new app hashes with another seed.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import EnvironmentProblem
from millstream.log.files import DISK, NewFile, read_whole

JOURNAL_FOLDER = "journal"
DRAFT = ".draft"


@dataclass(frozen=True)
class JournalFiles:
    """The journal of one operator in one bucket and batch."""

    folder: Path
    batch_id: int
    key: str
    bucket: int

    def read(self, name: str) -> bytes | None:
        """Return the entry of a name, durable; None if there is none."""
        try:
            entry = read_whole(DISK, self._path(name))
        except FileNotFoundError:
            return None
        DISK.sync_folder(self.folder)  # step 3, if the one who linked it did not come to it
        return entry

    def write(self, name: str, entry: bytes) -> bytes:
        """Keep an entry unless its name has one; return the one that is kept, durable.

        Raises:
            EnvironmentProblem: the file system has no links, by which the first of two is the one.
        """
        path = self._path(name)
        self.folder.mkdir(parents=True, exist_ok=True)
        DISK.sync_folder(self.folder.parent)
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}{DRAFT}")
        with NewFile(DISK, draft) as file:
            file.write(entry)
            file.sync()  # step 1
        try:
            with suppress(FileExistsError):
                os.link(draft, path)  # step 2
        except OSError as error:
            draft.unlink()
            raise EnvironmentProblem(
                f"The file system of {self.folder} has no hard links ({error}), which enrich() and answer() need: of "
                "two attempts at a batch the answers of one count. Keep the app's folder on another one."
            ) from error
        DISK.sync_folder(self.folder)  # step 3
        draft.unlink()  # step 4
        return read_whole(DISK, path)

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.batch_id}-{self.bucket}-{self.key}-{name}"


def remove_entries(folder: Path, *, keep: int) -> None:
    """Remove all entries and drafts but those of one batch; nobody else may be working on another."""
    for name in DISK.names(folder):
        if name.partition("-")[0] != str(keep) or name.endswith(DRAFT):
            (folder / name).unlink(missing_ok=True)
