"""Why an edited app is not deployed: what is refused, and what has to be confirmed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.errors import ConfigError
from millstream.ops.plan import ChangePlan
from millstream.views.runs.control_files import check_no_reset

if TYPE_CHECKING:
    from millstream.pipeline.app import App


def check_deployable(app: App, plan: ChangePlan, *, gone_ok: bool, ask_again: bool) -> None:
    """Check that what is planned may be deployed, by itself or as it was confirmed.

    Raises:
        ConfigError: it may not; the message says what to do.
    """
    check_no_reset(app.folder)
    if plan.verdict == "refuses":
        refused = [*plan.change.refusals]
        refused += [
            f"{part.kind} {part.name!r}: {'; '.join(part.why)}"
            for part in plan.change.parts
            if part.verdict == "refuses"
        ]
        raise ConfigError(
            f"{app.name} cannot take the place of what has run: {'; '.join(refused)}. Undo that, or give the app "
            "another name."
        )
    if plan.lacks_records and not gone_ok:
        lost = [f"The topic {one!r} is compacted" for one in plan.compacted_topics]
        if plan.gone:
            gone = f"The log no longer holds {plan.gone:,} records that {app.name} has read before"
            lost.insert(0, gone)
        raise ConfigError(
            f"{'. '.join(lost)}: what is rebuilt would lack the records that are gone. Confirm it by --gone-ok, or "
            "undo the change."
        )
    if plan.asking and not ask_again:
        raise ConfigError(
            f"{app.name} asks a service again, in {', '.join(map(repr, plan.asking))}, for the records that are read again: "
            "it may get other answers than those that the app has given. Confirm it by --ask-again, or undo the change."
        )


def cannot_go_back(app: App, why: str) -> ConfigError:
    """Return the error of a way back that what is kept does not allow."""
    return ConfigError(
        f"{app.name} cannot go back by what is kept of the version before: {why}. Deploy the file instead (millstream "
        "deploy), which reads what the log holds from its start."
    )
