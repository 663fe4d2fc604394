"""The leader lease: of the webhooks of a group, one holds it and delivers, the others are on standby.

On a folder, the holder has a ``flock`` on a file of the log. The kernel frees it exactly when the process
dies, so the lease has no timeout and lasts as long as its process. Over ``kafka://`` the holder is a member
of a consumer group (``client.kafka.leader_lease``), and can lose the lease while it lives.
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

from millstream.client.address import log_folder
from millstream.client.kafka.extra import kafka_module
from millstream.errors import ConfigError
from millstream.log.files import DISK, Files, read_whole, write_whole

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


_held: weakref.WeakSet[FolderLease] = weakref.WeakSet()


class FolderLease:
    """The lease on a folder: nobody revokes it while its process lives.

    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, group: str, topic: str, files: Files = DISK) -> None:
        self._files = files
        self._group = group
        self._path = folder / FOLDER / file_name(group, topic)
        self._handle: int | None = None
        self._standby_reason: str | None = None
        self._try_acquire()

    @property
    def held(self) -> bool:
        return self._handle is not None

    @property
    def standby_reason(self) -> str | None:
        return self._standby_reason

    def poll(self, timeout_s: float) -> None:
        time.sleep(timeout_s)
        if self._handle is None:
            self._try_acquire()

    def _try_acquire(self) -> None:
        try:
            self._files.make_folder(self._path.parent)
            self._handle = self._files.lock(self._path)
        except BlockingIOError:
            if self._standby_reason is None:
                who = self._holder()
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
        _held.add(self)
        with suppress(OSError):  # it only tells a standby who the leader is
            self._files.truncate(self._handle, 0)
            write_whole(self._files, self._handle, f"{os.getpid()}\n".encode("ascii"), 0)

    def _holder(self) -> str:
        with suppress(OSError):
            return (
                read_whole(self._files, self._path).decode("ascii", "replace").strip() or "unknown"
            )
        return "unknown"

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            # A forked child may not have closed its copy yet. As long as it has one, the lock would be
            # held.
            self._files.unlock(handle)
            self._files.close(handle)

    def close_in_child(self) -> None:
        """Close a copy of the handle in a forked child; the parent keeps the lease."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._files.close(handle)


def file_name(group: str, topic: str) -> str:
    """Return the name of the lock file: unique per group and topic, and short enough."""
    name = f"{quote(group, safe='')}@{topic}"
    if len(name) > _NAME_BYTES_MAX:
        name = hashlib.sha256(name.encode()).hexdigest()
    return f"{name}.lock"


def _close_in_child() -> None:
    # A flock belongs to the open file, which parent and child share: if the child kept its copy, nobody
    # could take over after the parent's death.
    for lease in list(_held):
        lease.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
