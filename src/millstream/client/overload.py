"""What gives way when more is on its way than a producer may hold: one policy for each name.

===============  ===============================================================================
overload         a record for which there is no room
===============  ===============================================================================
``block``        waits for room in ``send``, up to ``block_timeout_s``: then OverloadError
``drop_newest``  is not taken: its future fails with OverloadError
``drop_oldest``  is taken: the oldest that are queued give way, and their futures fail
``spill``        is taken: what is queued moves to a buffer on disk (see ``spill``); if the disk
                 has no room either, ``block``
===============  ===============================================================================

A record that is dropped counts in ``Producer.dropped``, and the next ``flush`` raises the error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

from millstream.client.buffer import Buffer
from millstream.errors import DiskFullError, OverloadError

Overload = Literal["block", "drop_newest", "drop_oldest", "spill"]
OVERLOADS: tuple[str, ...] = get_args(Overload)


# A policy is called without locks, when a record found no room and again if it still finds none:
# with the size of the record, and when it first found none (by ``time.monotonic``). None: try the
# record again. An error: it is not taken, and why. If it raises OverloadError, so does ``send``.
MakeRoom = Callable[[int, float], OverloadError | None]


def block(buffer: Buffer, timeout_s: float) -> MakeRoom:
    """Return the policy that waits."""

    def make_room(size: int, since_s: float) -> None:
        left_s = since_s + timeout_s - time.monotonic()
        if not buffer.wait_for_room(size, left_s):
            raise OverloadError(
                f"{_waiting(buffer)} for {timeout_s:g} s; slow down, or make the producer with a "
                "larger buffer_bytes, a longer block timeout, or another overload policy"
            )

    return make_room


def drop_newest(buffer: Buffer) -> MakeRoom:
    """Return the policy that does not take what comes."""

    def make_room(_size: int, _since_s: float) -> OverloadError:
        return OverloadError(
            f"{_waiting(buffer)}, and the record was dropped as its producer drops the newest; "
            "slow down, or make the producer with a larger buffer_bytes or overload='block'"
        )

    return make_room


def drop_oldest(buffer: Buffer) -> MakeRoom:
    """Return the policy by which queued records give way, or the new one if only it can."""

    def make_room(size: int, _since_s: float) -> OverloadError | None:
        error = OverloadError(
            f"{_waiting(buffer)}, and the record was dropped as its producer drops the oldest; "
            "slow down, or make the producer with a larger buffer_bytes or overload='block'"
        )
        return None if buffer.drop_oldest(size, error) else error

    return make_room


def spill(buffer: Buffer, timeout_s: float, move_to_disk: Callable[[int], None]) -> MakeRoom:
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


def _waiting(buffer: Buffer) -> str:
    return (
        f"{buffer.on_the_way_bytes:,} bytes are on their way and the limit is "
        f"{buffer.limit_bytes:,}, so there was no room for another record"
    )
