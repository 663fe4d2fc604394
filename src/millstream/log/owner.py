"""Who may write into a folder, and which folder it is: the files LOCK and FORMAT.

One process at a time owns a folder: it holds the lock file LOCK (see ``lock_file``). Readers need no lock.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from millstream.errors import ConfigError, FolderOwnedError
from millstream.log.files import Files, read_whole, replace_file, sync_names
from millstream.log.lock_file import LockFile, lock_holder

FORMAT_VERSION = 3
LOCK_NAME = "LOCK"
SOCKET_NAME = "owner.sock"  # the socket at which other processes reach the owner


def lock_folder(folder: Path, files: Files) -> LockFile:
    """Return the lock of a folder: the right to write into it.

    Raises:
        FolderOwnedError: another process (or another object here) holds it; the message has the
            process id. Wait for it, or stop that process.
    """
    try:
        return LockFile(folder / LOCK_NAME, files)
    except BlockingIOError:
        raise FolderOwnedError(
            f"the log folder {folder} is owned by process {owner_of(folder, files)}; only one process may write "
            "to it: stop that one, or read the folder without writing"
        ) from None


def owner_of(folder: Path, files: Files) -> str:
    """Return the process id of the last owner; "unknown" for a moment while it changes."""
    return lock_holder(folder / LOCK_NAME, files)


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
            f"{path} is not a valid FORMAT file ({error}); restore it from a backup"
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
        # The process that made it may have died before its name was synced; nothing may depend on a name that
        # a power cut could remove.
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
