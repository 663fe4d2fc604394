"""Whether an edited program was compared with what is there still: another machine may have deployed or run one meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.errors import ConflictError
from millstream.views.state_store.database import Database
from millstream.views.state_store.program_switch import SWITCHED_BY, ComparedProgram
from millstream.views.state_store.program_tables import stored_program
from millstream.views.state_store.reader import fence_json, stored_description


def check_unchanged(
    db: Database, app: str, job: str, position: Mapping[str, Any], compared: ComparedProgram
) -> None:
    """Make sure that a job is as it was when an edited program was compared with it, and has read no further.

    Raises:
        ConflictError: it is not.
    """
    stored = stored_program(db, app, job)
    divided = None if stored is None else stored.partitioning
    if fence_json(db, "position", app, job) != position or divided != compared.program.partitioning:
        raise ConflictError(
            f"{app} has read more of the log, or was rescaled, since its new state was computed. Nothing was "
            "changed. Deploy again."
        )
    switched_by = stored_description(db, app, SWITCHED_BY)
    if stored is None or ComparedProgram(stored, switched_by) != compared:
        raise ConflictError(
            f"Another program of {app} was deployed, or run, since this one was compared with what is there. Nothing was "
            "changed. See what this one would change now (millstream plan), and deploy again."
        )
