"""The writer's lock: one process at a time holds ``flock(LOCK)`` on the folder.

The kernel releases the lock exactly when the owner dies, so there are no leases and no timeouts:
a stopped owner still owns. The handle is neither inherited by programs that the owner starts
(O_CLOEXEC) nor kept by a forked child (closed at the fork, so that the lock dies with its owner).
Readers need no lock.
"""

from __future__ import annotations

import json
import os
import uuid
import weakref
from pathlib import Path

from millstream.errors import ConfigError, FolderOwnedError
from millstream.log.files import Files, read_whole, replace_file, sync_names, write_whole

FORMAT_VERSION = 3
SOCKET_NAME = "owner.sock"  # the socket at which other processes reach the owner

_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """The right to write into one folder, until :meth:`release` or the end of the process.

    Raises:
        FolderOwnedError: another process (or another object here) holds it; the message has the
            process id. Wait for it, or stop that process.
    """

    def __init__(self, folder: Path, files: Files) -> None:
        self._files = files
        path = folder / "LOCK"
        try:
            self._handle: int | None = files.lock(path)
        except BlockingIOError:
            raise FolderOwnedError(
                f"the log folder {folder} is owned by process {owner_of(folder, files)}; only one process may write "
                "to it: stop that one, or read the folder without writing"
            ) from None
        files.truncate(self._handle, 0)
        write_whole(files, self._handle, f"{os.getpid()}\n".encode("ascii"), 0)
        _held.add(self)

    @property
    def held(self) -> bool:
        """Whether this process still owns the folder; False in a forked child."""
        return self._handle is not None

    def release(self) -> None:
        """Let the next owner in. Calling it again does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            # A forked child may not have come to closing its copy yet, and as long as it has one,
            # the lock would remain: so it is released, and not only the handle.
            self._files.unlock(handle)
            self._files.close(handle)

    def drop(self) -> None:
        """Close a copy of the handle in a forked child; the parent goes on owning the folder."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._files.close(handle)


def _drop_in_child() -> None:
    # A flock belongs to the open file, which parent and child share: if the child kept its copy,
    # the folder would remain locked after the owner's death.
    for lock in list(_held):
        lock.drop()


os.register_at_fork(after_in_child=_drop_in_child)


def owner_of(folder: Path, files: Files) -> str:
    """Return the process id of the last that took the lock; "unknown" for a moment meanwhile."""
    return read_whole(files, folder / "LOCK").decode("ascii", "replace").strip() or "unknown"


def remove_socket(folder: Path, files: Files) -> None:
    """Remove the socket of an owner that died. Only the holder of the lock may do so."""
    if files.exists(folder / SOCKET_NAME):
        files.remove(folder / SOCKET_NAME)


def read_format(folder: Path, files: Files) -> str | None:
    """Return the folder's identity (32 hexadecimal digits), or None if it is not a log yet.

    Raises:
        ConfigError: another version of Millstream made the folder, or FORMAT cannot be read.
    """
    path = folder / "FORMAT"
    if not files.exists(path):
        return None
    try:
        content = json.loads(read_whole(files, path))
        version, directory_id = content["version"], str(content["directory_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not what a log writes there ({error}); restore it from a backup"
        ) from error
    if version != FORMAT_VERSION:
        raise ConfigError(_other_version(folder, version))
    return directory_id


def _other_version(folder: Path, version: object) -> str:
    formats = f"log format {version}; this one reads {FORMAT_VERSION}"
    if isinstance(version, int) and version > FORMAT_VERSION:
        return f"{folder} was made by a newer version of Millstream ({formats}). Read it with that version"
    return (
        f"{folder} was made by an earlier version of Millstream ({formats}). Read it with that "
        "version, or begin in a new folder"
    )


def make_format(folder: Path, files: Files) -> str:
    """Return the folder's identity, giving it one first if it has none.

    Raises:
        ConfigError: the folder holds other things than a log.
    """
    known = read_format(folder, files)
    if known is not None:
        # Whoever made it may have died before its name was synced; nothing may come to depend on
        # a name that a power cut could take away.
        sync_names(files, folder)
        return known
    if files.names(folder / "t"):
        raise ConfigError(
            f"{folder} holds topics but no FORMAT file; restore FORMAT from a backup of the folder"
        )
    directory_id = uuid.uuid4().hex
    content = json.dumps({"version": FORMAT_VERSION, "directory_id": directory_id})
    replace_file(files, folder / "FORMAT", content.encode("ascii") + b"\n")
    return directory_id
