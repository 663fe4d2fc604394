"""One call to reach a log: :func:`connect`. What it returns is in ``embedded``."""

from __future__ import annotations

from pathlib import Path

from millstream.client.embedded import EventLog
from millstream.errors import ConfigError

__all__ = ["EventLog", "connect"]


def connect(address: Path | str) -> EventLog:
    """Return the event log in a folder. The folder is made when something is first written to it.

    Reading needs no right; the first call that writes makes this process the folder's owner until
    ``close``. Several connections of one process to a folder share the ownership.

    Raises:
        ConfigError: the address is not a folder. (Writing, later on, raises FolderOwnedError when
            another process owns the folder.)
    """
    text = str(address)
    if "://" in text:
        scheme = text.partition("://")[0]
        raise ConfigError(
            f"the address {text!r} begins with {scheme}://, but connect opens folders in this "
            "version; give the path of a folder, such as './data'"
        )
    folder = Path(address)
    if not text or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{text!r} is not a folder; give the path of a folder, such as './data'")
    return EventLog(folder)
