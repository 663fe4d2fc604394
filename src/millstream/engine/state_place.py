"""Which place has the runs of an app's state: what the state store says, compared with what the app declares."""

from __future__ import annotations

from pathlib import Path

from millstream.errors import ConfigError
from millstream.object_store.address import ObjectUrl
from millstream.object_store.generations import check_newest, register_run
from millstream.object_store.place import DESCRIPTION, StatePlace, new_place
from millstream.views.commit.committer import BatchCommitter
from millstream.views.runs.control_files import reset_command
from millstream.views.schema import JOB
from millstream.views.state_store.store import StateStore

_LOST = "state-lost"  # in the state store: another copy of it has the place


def load_or_create_place(
    app: str, state_store: StateStore, url: ObjectUrl | None, folder: Path
) -> StatePlace | None:
    """Return where the runs of state are; None if they are in the app's folder.

    A new place is noted in the state store before anything is put there, so that a reset finds it.

    Raises:
        ConfigError: the state is somewhere else than the app declares, or this state store is older than the
            runs there. No run number is taken.
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
        # Of two first runs at once, both use the place that was noted first.
        new = new_place(app, url).to_message()
        known = StatePlace.from_message(state_store.put_first_description(app, DESCRIPTION, new))
    if known is not None:
        lost = state_store.description(app, _LOST)
        if lost is not None:
            raise ConfigError(lost)
        check_newest(known, state_store.newest_run(app, JOB) + 1)
    return known


def begin_at_place(place: StatePlace, committer: BatchCommitter) -> None:
    """Note at the place of state that a run has begun.

    Raises:
        ConfigError: another copy of the state store has the place. It is refused from now on.
        FencedError: a newer run has begun meanwhile.
    """
    try:
        register_run(place, committer.run)
    except ConfigError as error:
        committer.check_not_fenced()  # a newer run of this store is no other copy
        committer.state_store.put_description(committer.plan.app, _LOST, str(error))
        raise
