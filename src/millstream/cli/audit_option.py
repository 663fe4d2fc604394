"""Recording in an app's audit log what a command changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millstream.access.audit_log import Actor, AuditLog


@contextmanager
def audited(
    log: Path, app: str, what: str, details: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Record what the block does to an app, by the user of this process. Yield what is added to the details.

    Where there is no folder ``log``, nothing can be done to an app of it, and nothing is recorded.
    """
    if not log.is_dir():
        yield {}
        return
    with AuditLog(log, app).recorded(Actor.of_process(), what, details) as found:
        yield found
