"""A file of secrets that several processes change: one at a time, whole, and for its owner alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from millstream.errors import ConfigError


@contextmanager
def locked_file(path: Path) -> Iterator[Callable[[str], None]]:
    """Keep other processes from changing a file; yield a function that replaces its text, or makes it.

    1. Write ``<name>.new`` beside the file and sync it. A crash leaves a stray file, which nothing reads and the next change
       replaces.
    2. Rename. A crash leaves the old text or the new one.
    3. Sync the folder. From here on the change is durable.

    Raises:
        ConfigError: the folder is not there, or the file cannot be written.
    """
    import fcntl  # noqa: PLC0415 - not on Windows, where servers read files of tokens, too

    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"The folder of {path} cannot be used ({error.strerror}). Make it, or choose another."
        ) from error

    def replace(text: str) -> None:
        fresh = path.with_name(path.name + ".new")
        _write(fresh, text, path)
        fresh.replace(path)
        os.fsync(folder)

    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield replace
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}).") from error
    finally:
        os.close(folder)


def _write(fresh: Path, text: str, replaced: Path) -> None:
    """Write a file that only its owner can read, or with the permissions of the one it replaces."""
    fresh.unlink(missing_ok=True)
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as file:
        with suppress(FileNotFoundError):
            old = replaced.stat()
            with suppress(PermissionError):
                os.fchown(handle, old.st_uid, old.st_gid)
            os.fchmod(handle, old.st_mode & 0o777)
        file.write(text)
        file.flush()
        os.fsync(handle)
