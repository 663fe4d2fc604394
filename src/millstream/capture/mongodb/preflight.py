"""What a deployment and its collections must be like to be captured: each fault, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from millstream.capture.mongodb.session import FoundCollection, MongoDbSession
from millstream.errors import ConfigError

OLDEST = (6, 0)


def deployment_faults(session: MongoDbSession) -> Iterator[str]:
    """Yield why a deployment cannot be captured."""
    hello = session.ask("hello")
    if not hello.get("setName") and hello.get("msg") != "isdbgrid":
        yield (
            "it is a standalone server, which has no change streams. Make it a replica set, of one member if need be: start it "
            'with --replSet rs0, then rs.initiate({_id: "rs0", members: [{_id: 0, host: "…:27017"}]}).'
        )
    version = session.version()
    if version[:2] < OLDEST:
        shown, oldest = (".".join(map(str, one)) for one in (version, OLDEST))
        yield (
            f"it is MongoDB {shown}; capture needs {oldest}, the oldest that records documents before and after changes. "
            "Upgrade it."
        )


def collection_faults(collections: Iterable[FoundCollection]) -> Iterator[str]:
    """Yield why collections cannot be captured."""
    for one in collections:
        if not one.with_images:
            yield (
                f"the collection {one.name} does not record documents before and after changes: db.runCommand({{collMod: "
                f'"{one.name}", changeStreamPreAndPostImages: {{enabled: true}}}}).'
            )


def refuse_faults(faults: Sequence[str], about: str) -> None:
    """Return if there are no faults.

    Raises:
        ConfigError: there are; the message has each.
    """
    if faults:
        listed = "".join(f"\n- {fault}" for fault in faults)
        raise ConfigError(f"{about} cannot be captured:{listed}")
