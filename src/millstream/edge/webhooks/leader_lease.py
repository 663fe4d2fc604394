"""The leader lease: of the webhooks of a group, one holds it and delivers, the others are on standby.

On a folder, the leader holds a lock file (``log.lock_file``): the lease has no timeout and lasts as long as
its process. Over ``kafka://`` the leader is a member of a consumer group (``client.kafka.leader_lease``), and
can lose the lease while it lives.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from millstream.client.address import log_folder
from millstream.client.kafka.extra import kafka_module
from millstream.errors import ConfigError
from millstream.log.files import DISK, Files
from millstream.log.lock_file import LockFile, lock_holder

FOLDER = "webhooks"
_NAME_BYTES_MAX = 200  # file systems take 255, and a topic's name may have 249 of them


class LeaderLease(Protocol):
    """The right to deliver for a group. Of one thread."""

    @property
    def held(self) -> bool:
        """Whether this process holds the lease."""

    @property
    def standby_reason(self) -> str | None:
        """Why this process is on standby, as a sentence; None: it holds the lease, or that is unknown."""

    def poll(self, timeout_s: float) -> None:
        """Wait for a change. Calls ``on_revoked`` before the lease goes to another process.

        Raises:
            MillstreamError: the lease can never be acquired.
        """

    def close(self) -> None:
        """Release the lease. May be called again."""


def open_lease(
    log: Path | str, group: str, topic: str, on_revoked: Callable[[bool], None]
) -> LeaderLease:
    """Return the lease to deliver a topic for a group; it need not be acquired yet.

    Args:
        on_revoked: Called by :meth:`LeaderLease.poll` when the lease ends. The next leader may start when
            it returns. With True: finish, and commit. With False: the next leader may have started
            already, so stop at once, and commit nothing.

    Raises:
        ConfigError: the lease can never be acquired.
        BrokerUnavailableError: no broker responds.
    """
    folder = log_folder(log)
    if folder is not None:
        return FolderLease(folder, group, topic)
    lease: LeaderLease = kafka_module("leader_lease").KafkaLeaderLease(
        str(log), group, topic, on_revoked
    )
    return lease


class FolderLease:
    """The lease on a folder: nobody revokes it while its process lives.

    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, group: str, topic: str, files: Files = DISK) -> None:
        self._files = files
        self._group = group
        self._path = folder / FOLDER / file_name(group, topic)
        self._lock: LockFile | None = None
        self._standby_reason: str | None = None
        self._try_acquire()

    @property
    def held(self) -> bool:
        return self._lock is not None and self._lock.held

    @property
    def standby_reason(self) -> str | None:
        return self._standby_reason

    def poll(self, timeout_s: float) -> None:
        time.sleep(timeout_s)
        if not self.held:
            self._try_acquire()

    def _try_acquire(self) -> None:
        try:
            self._files.make_folder(self._path.parent)
            self._lock = LockFile(self._path, self._files)
        except BlockingIOError:
            if self._standby_reason is None:
                who = lock_holder(self._path, self._files)
                self._standby_reason = (
                    f"Process {who} delivers for group {self._group!r}; on standby until it ends"
                )
            return
        except OSError as error:
            raise ConfigError(
                f"the webhooks of group {self._group!r} cannot agree on who delivers, as {self._path} cannot "
                f"be locked ({error}): let this process write to that folder"
            ) from error
        self._standby_reason = None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()


def file_name(group: str, topic: str) -> str:
    """Return the name of the lock file: unique per group and topic, and short enough."""
    name = f"{quote(group, safe='')}@{topic}"
    if len(name) > _NAME_BYTES_MAX:
        name = hashlib.sha256(name.encode()).hexdigest()
    return f"{name}.lock"
