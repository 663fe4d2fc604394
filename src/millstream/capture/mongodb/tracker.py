"""Which collections are captured, and how far the snapshot of each is.

State of a collection, as it is stored; each has the ``uuid`` that tells it from another one of its name:

==================================  ===============================================================
``{"after": null}``                 to be read, from its beginning
``{"after": "{…}"}``                read up to this ``_id``
with ``"where"``                    the same of the documents of this filter, which were asked for
``{"read": true}``                  read; its changes keep it up to date
==================================  ===============================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from millstream.capture.mongodb.events import ChangeEvent
from millstream.capture.mongodb.session import FoundCollection
from millstream.errors import ConflictError

State = dict[str, Any]


class CollectionTracker:
    """The captured collections, by name.

    Args:
        collections: Their states as they were stored.
    """

    def __init__(self, collections: dict[str, State]) -> None:
        self._states = deepcopy(collections)

    def stored(self) -> dict[str, State]:
        """Return the states as they are stored."""
        return deepcopy(self._states)

    def names(self) -> list[str]:
        """Return the collections that are captured."""
        return list(self._states)

    def add(self, collections: Iterable[FoundCollection]) -> None:
        """Have collections that are not known yet read."""
        for one in collections:
            self._states.setdefault(one.name, {"after": None, "uuid": one.uuid})

    def state(self, name: str) -> State | None:
        """Return a collection's state: the same object until it has another beginning."""
        return self._states.get(name)

    def pending(self) -> str | None:
        """Return a collection that is to be read; None if all are."""
        return next((name for name, state in self._states.items() if "read" not in state), None)

    def restart(self, name: str, uuid: str, *, where: str = "") -> None:
        """Have a collection read from its beginning; with ``where`` the documents of that filter."""
        self._states[name] = {
            "after": None,
            "uuid": uuid,
            **({"where": where} if where else {}),
        }

    def created(self, name: str, uuid: str) -> None:
        """Note a collection that is created here, empty: the stream has all its documents."""
        if self._states.get(name, {}).get("uuid") != uuid:
            self._states[name] = {"read": True, "uuid": uuid}

    def drop(self, name: str) -> None:
        """Forget a collection."""
        self._states.pop(name, None)

    def chunk_read(self, name: str, last: str | None) -> None:
        """Note how far a collection is read: to an ``_id``, or to its end."""
        state = self._states[name]
        kept = {"uuid": state["uuid"]}
        asked = {"where": state["where"]} if "where" in state else {}
        state.clear()
        state.update({"read": True, **kept} if last is None else {"after": last, **kept, **asked})

    def check(self, event: ChangeEvent) -> None:
        """Return if an event is of the collection that is captured under its name.

        Raises:
            ConflictError: it is of another one, whose creation was not seen: a restored backup, or another deployment.
        """
        known = self._states[event.collection]["uuid"]
        if event.uuid and known and event.uuid != known:
            raise ConflictError(
                f"the collection {event.database}.{event.collection} is another one than was captured, and how it came to be is "
                "not in the change stream: a backup was restored, or this is another deployment. Changes may be missing: "
                "capture under a new name (--name), which begins with a new snapshot."
            )
