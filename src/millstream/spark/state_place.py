"""Which place has the runs of an app's state: what the state store says, compared with what the app declares."""

from __future__ import annotations

from pathlib import Path

from millstream.errors import ConfigError
from millstream.object_store.address import StateUrl
from millstream.object_store.place import DESCRIPTION, StatePlace, new_place
from millstream.views.runs.control_files import reset_command
from millstream.views.schema import JOB
from millstream.views.state_store.store import StateStore


def load_or_create_place(
    app: str, state_store: StateStore, url: StateUrl | None, folder: Path
) -> StatePlace | None:
    """Return where the runs of state are; None if they are in the app's folder.

    A new place is noted in the state store before anything is put there, so that a reset finds it.

    Raises:
        ConfigError: the state is somewhere else than the app declares.
    """
    known = StatePlace.from_message(state_store.description(app, DESCRIPTION))
    declared = "in the app's folder" if url is None else f"at {url.text}"
    there = f"in {folder}" if known is None else f"at {known.url.text}"
    begun = known is not None or bool(state_store.state_manifests(app, JOB))
    if begun and (None if known is None else known.url) != url:
        raise ConfigError(
            f"The state of {app} is {there}, and the app declares it {declared}. Give the state= that it was "
            "made with, give the app another name to build its state again beside the old, or start over: "
            f"{reset_command(folder)}."
        )
    if known is None and url is not None:
        known = new_place(app, url)
        state_store.put_description(app, DESCRIPTION, known.to_message())
    return known
