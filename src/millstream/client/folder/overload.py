"""What happens when more is in flight than a producer may hold: one policy for each name.

===============  ===============================================================================
overload         a record for which there is no room
===============  ===============================================================================
``block``        waits for room in ``send``, up to ``block_timeout_s``: then OverloadError
``drop_newest``  is dropped: its future fails with OverloadError
``drop_oldest``  is accepted: the oldest queued ones are dropped, and their futures fail
``spill``        is accepted: what is queued moves to a buffer on disk (see ``spill``); if the disk
                 has no room either, ``block``
===============  ===============================================================================

A record that is dropped counts in ``FolderProducer.dropped``, and the next ``flush`` raises the error.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from millstream.client.folder.buffer import ProducerBuffer
from millstream.errors import DiskFullError, OverloadError

# A policy is called without locks when there is no room for a record, and again while there is none: with the
# size of the record, and when there was first no room (by ``time.monotonic``). It returns None to retry the
# record, or the error with which the record's future fails. If it raises OverloadError, so does ``send``.
OverloadPolicy = Callable[[int, float], OverloadError | None]


def block(buffer: ProducerBuffer, timeout_s: float) -> OverloadPolicy:
    """Return the policy that waits."""

    def make_room(size: int, since_s: float) -> None:
        left_s = since_s + timeout_s - time.monotonic()
        if not buffer.wait_for_room(size, left_s):
            raise OverloadError(
                f"{_waiting(buffer)} for {timeout_s:g} s; slow down, or make the producer with a "
                "larger buffer_bytes, a longer block timeout, or another overload policy"
            )

    return make_room


def drop_newest(buffer: ProducerBuffer) -> OverloadPolicy:
    """Return the policy that drops the new record."""

    def make_room(_size: int, _since_s: float) -> OverloadError:
        return OverloadError(
            f"{_waiting(buffer)}, and the record was dropped as its producer drops the newest; "
            "slow down, or make the producer with a larger buffer_bytes or overload='block'"
        )

    return make_room


def drop_oldest(buffer: ProducerBuffer) -> OverloadPolicy:
    """Return the policy that drops queued records, or the new one if none is queued."""

    def make_room(size: int, _since_s: float) -> OverloadError | None:
        error = OverloadError(
            f"{_waiting(buffer)}, and the record was dropped as its producer drops the oldest; "
            "slow down, or make the producer with a larger buffer_bytes or overload='block'"
        )
        return None if buffer.drop_oldest(size, error) else error

    return make_room


def spill(
    buffer: ProducerBuffer, timeout_s: float, move_to_disk: Callable[[int], None]
) -> OverloadPolicy:
    """Return the policy that moves what is queued to disk, and waits if the disk has no room.

    Args:
        move_to_disk: Moves it, unless so many bytes fit by now; raises DiskFullError.
    """
    wait = block(buffer, timeout_s)

    def make_room(size: int, since_s: float) -> OverloadError | None:
        try:
            move_to_disk(size)
        except DiskFullError:
            return wait(size, since_s)
        with buffer.changed:
            fits = buffer.fits(size)
        return None if fits else wait(size, since_s)

    return make_room


def _waiting(buffer: ProducerBuffer) -> str:
    return (
        f"{buffer.pending_bytes:,} bytes are in flight and the limit is "
        f"{buffer.limit_bytes:,}, so there was no room for another record"
    )
