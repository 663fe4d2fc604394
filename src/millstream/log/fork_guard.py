"""A log belongs to the process that opened it: in a forked child its writers refuse every call."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkGuarded(Protocol):
    """What must not be used in a forked child."""

    def disable_after_fork(self) -> None:
        """Refuse every call: the log belongs to the parent."""


_open: weakref.WeakSet[ForkGuarded] = weakref.WeakSet()


def guard(writer: ForkGuarded) -> None:
    """Let a writer refuse every call in children that are forked while it is open."""
    _open.add(writer)


def unguard(writer: ForkGuarded) -> bool:
    """Mark a writer as closed; return False if it was closed before."""
    if writer not in _open:
        return False
    _open.discard(writer)
    return True


def _disable_in_child() -> None:
    for writer in list(_open):
        writer.disable_after_fork()
    _open.clear()


os.register_at_fork(after_in_child=_disable_in_child)
