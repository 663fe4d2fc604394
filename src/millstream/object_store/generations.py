"""Which runs of an app have begun on a place of state: one small object each, named by the run's number.

Run numbers come from the state store and only rise. So a run whose number is there already, or is less than one
that is, belongs to a state store that is older than the place: a backup, or one of two copies. It would name
objects that are gone, and sweep those of the other; so it is refused. The object is put only if it is not there,
so of two copies that begin at once one is refused.
"""

from __future__ import annotations

from millstream.errors import ConfigError
from millstream.object_store.place import StatePlace

_FOLDER = "started/"


def register_run(place: StatePlace, run: int) -> None:
    """Note that a run begins.

    Raises:
        ConfigError: a run of this number or of a later one has begun there before.
    """
    store = place.open()
    known = list(store.names(_FOLDER))
    newest = max((int(name.removeprefix(_FOLDER)) for name in known), default=-1)
    if newest >= run:
        raise _older(place, run, newest)
    own = f"{_FOLDER}{run:012d}"
    try:
        store.put(own, lambda file: file.write(b"\n"))
        store.sync()
    except FileExistsError:
        raise _older(place, run, run) from None
    store.delete(name for name in known if name < own)


def _older(place: StatePlace, run: int, newest: int) -> ConfigError:
    return ConfigError(
        f"The state at {place.text} was used by run {newest} of the app, and this state store is at run {run}: "
        "it is a backup, or another copy of the app's folder is in use. Use the newest copy, or reset the app to "
        "rebuild its state from the log."
    )
