"""Who delivers for a group: one of its webhooks is on duty, the others stand by.

On a folder it is who holds ``flock`` on a file of the log's: the kernel frees it exactly when its process
dies, so there is no lease, and a duty that was taken lasts as long as its process. Behind ``kafka://`` it is
a member of a consumer group (``client.kafka.duty``), which can lose it while it lives.
"""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from millstream.client.kafka.address import is_kafka
from millstream.client.kafka.extra import kafka_module
from millstream.errors import ConfigError
from millstream.log.files import DISK, Files, read_whole, write_whole

FOLDER = "webhooks"
_NAME_BYTES_MAX = 200  # file systems take 255, and a topic's name may have 249 of them


class Duty(Protocol):
    """The right to deliver for a group. Of one thread."""

    @property
    def held(self) -> bool:
        """Whether it is ours."""

    @property
    def stands_by(self) -> str | None:
        """Why this one stands by, as a sentence; None: it is on duty, or that is not known yet."""

    def poll(self, timeout_s: float) -> None:
        """Wait for what changes. Whoever made it is told here, before the duty goes to another.

        Raises:
            MillstreamError: it can never be had.
        """

    def close(self) -> None:
        """Give it up. Harmless when called again."""


def duty_of(log: Path | str, group: str, topic: str, relieve: Callable[[bool], None]) -> Duty:
    """Return the duty to deliver a topic for a group; it is not ours yet.

    Args:
        relieve: Called by :meth:`Duty.poll` when the duty ends, and the next one may begin when it has
            returned. With True: finish, and commit. With False: it may have begun already, so stop
            at once, and commit nothing.

    Raises:
        ConfigError: it can never be had.
        BrokerAwayError: no broker answers.
    """
    if is_kafka(log):
        duty: Duty = kafka_module("duty").KafkaDuty(str(log), group, topic, relieve)
        return duty
    return FolderDuty(Path(log), group, topic)


_held: weakref.WeakSet[FolderDuty] = weakref.WeakSet()


class FolderDuty:
    """The duty on a folder: nobody takes it away while its process lives.

    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, group: str, topic: str, files: Files = DISK) -> None:
        self._files = files
        self._group = group
        self._path = folder / FOLDER / file_name(group, topic)
        self._handle: int | None = None
        self._stands_by: str | None = None
        self._try()

    @property
    def held(self) -> bool:
        return self._handle is not None

    @property
    def stands_by(self) -> str | None:
        return self._stands_by

    def poll(self, timeout_s: float) -> None:
        time.sleep(timeout_s)
        if self._handle is None:
            self._try()

    def _try(self) -> None:
        try:
            self._files.make_folder(self._path.parent)
            self._handle = self._files.lock(self._path)
        except BlockingIOError:
            if self._stands_by is None:
                who = self._who()
                self._stands_by = (
                    f"Process {who} delivers for group {self._group!r}; standing by until it ends"
                )
            return
        except OSError as error:
            raise ConfigError(
                f"the webhooks of group {self._group!r} cannot agree on who delivers, as {self._path} cannot "
                f"be locked ({error}): let this process write to that folder"
            ) from error
        self._stands_by = None
        _held.add(self)
        with suppress(OSError):  # it is for those who stand by to tell, and for nothing else
            self._files.truncate(self._handle, 0)
            write_whole(self._files, self._handle, f"{os.getpid()}\n".encode("ascii"), 0)

    def _who(self) -> str:
        with suppress(OSError):
            return (
                read_whole(self._files, self._path).decode("ascii", "replace").strip() or "unknown"
            )
        return "unknown"

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            # A forked child may not have come to closing its copy, and as long as it has one, the lock
            # would go on.
            self._files.unlock(handle)
            self._files.close(handle)

    def drop(self) -> None:
        """Close a copy of the handle in a forked child; the parent stays on duty."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._files.close(handle)


def file_name(group: str, topic: str) -> str:
    """Return the name of the file that is locked: another for every group and topic, and possible."""
    name = f"{quote(group, safe='')}@{topic}"
    if len(name) > _NAME_BYTES_MAX:
        name = hashlib.sha256(name.encode()).hexdigest()
    return f"{name}.lock"


def _drop_in_child() -> None:
    # A flock belongs to the open file, which parent and child share: if the child kept its copy, nobody
    # could take over after the parent's death.
    for duty in list(_held):
        duty.drop()


os.register_at_fork(after_in_child=_drop_in_child)
