"""``millstream sourcing``: check what is kept beside the events of an event store."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.sourcing.store import EventStore


@click.group()
def sourcing() -> None:
    """Check what is kept beside the events of an event store.

    \b
    Example:
      millstream sourcing verify shop.py:open_store
    """


@sourcing.command()
@click.argument("file", metavar="FILE[:FUNCTION]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def verify(context: click.Context, file: str, *, as_json: bool) -> None:
    """Fold every aggregate from its first event, and compare it with its snapshot.

    FUNCTION in FILE takes nothing and returns the open event store; `open_store` if it is not given.
    Changes nothing. Exits with 0 if every snapshot is what the events say, with 1 if not.

    \b
    Example:
      millstream sourcing verify shop.py:open_store
    """
    with _open_store(file) as store:
        found = list(store.verify_snapshots())
    faults = {stream_id: fault for stream_id, fault in found if fault is not None}
    if as_json:
        click.echo(json.dumps({"compared": len(found), "faults": faults}, indent=2))
    else:
        for stream_id, fault in faults.items():
            click.echo(f"{stream_id}: {fault}")
        click.echo(f"{len(found)} snapshots compared, {len(faults)} differ")
        if faults:
            click.echo(
                "decide or evolve looks at more than its arguments, or changes them: correct that, and "
                "delete the index, which is made again from the log"
            )
    if faults:
        context.exit(1)


def _open_store(file: str) -> EventStore:
    from millstream.sourcing.store import EventStore

    path, _, name = file.partition(":")
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path!r}; give a Python file, as shop.py:open_store")
    sys.path.insert(0, str(Path(path).resolve().parent))
    found: Any = runpy.run_path(path, run_name="millstream_store").get(name or "open_store")
    store = found() if callable(found) else None
    if not isinstance(store, EventStore):
        raise ConfigError(
            f"{path} has no function {name or 'open_store'!r} that returns an ms.EventStore; write one, and "
            "give its name as FILE:FUNCTION"
        )
    return store
