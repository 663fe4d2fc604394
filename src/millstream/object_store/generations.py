"""Which runs of an app have begun on a place of state: one small object each, named by the run's number.

Run numbers come from the state store and only rise. So a run whose number is there already, or is less than one
that is, belongs to a state store that is older than the place: a backup, or one of two copies. It would name
objects that are gone, and sweep those of the other; so it is refused. The object is put only if it is not there,
so of two copies that begin at once one is refused.

A run that is refused has taken a number all the same. So that no number of tries makes an older state store
the newest, :func:`check_newest` is asked before a number is taken.
"""

from __future__ import annotations

import uuid

from millstream.errors import ConfigError
from millstream.object_store.place import StatePlace
from millstream.object_store.store import ObjectStore

_FOLDER = "started/"


def check_newest(place: StatePlace, run: int) -> None:
    """Make sure that a run, which would have this number, is newer than all that have begun there.

    Raises:
        ConfigError: a run of this number or of a later one has begun there before.
    """
    newest = max(_started(place.open()).values(), default=-1)
    if newest >= run:
        raise _older(place, run, newest)


def register_run(place: StatePlace, run: int) -> None:
    """Note that a run begins.

    Raises:
        ConfigError: a run of this number or of a later one has begun there before.
    """
    check_newest(place, run)
    store = place.open()
    own = f"{_FOLDER}{run:012d}"
    # No other run's object has these bytes: an answer that was lost is not taken for another's.
    token = uuid.uuid4().hex.encode() + b"\n"
    try:
        store.put(own, lambda file: file.write(token))
        store.sync()
    except FileExistsError:
        raise _older(place, run, run) from None
    store.delete(name for name, number in _started(store).items() if number < run)


def _started(store: ObjectStore) -> dict[str, int]:
    """Return the objects of runs by name; a file system may have put others beside them."""
    names = {name: name.removeprefix(_FOLDER) for name in store.names(_FOLDER)}
    return {name: int(text) for name, text in names.items() if text.isdecimal()}


def _older(place: StatePlace, run: int, newest: int) -> ConfigError:
    return ConfigError(
        f"The state at {place.text} was used by run {newest} of the app, and this state store is at run {run}: "
        "it is a backup, or another copy of the app's folder is in use. Use the newest copy, or reset the app to "
        "rebuild its state from the log."
    )
