"""``millstream reset``: remove all that an app has made, so that it starts over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from millstream.cli.audit_option import audited
from millstream.cli.byte_sizes import describe_bytes
from millstream.cli.tables import (
    address_option,
    confirm,
    json_option,
    pluralize,
    print_json,
    yes_option,
)
from millstream.client.address import log_folder, shown
from millstream.client.default_log import DEFAULT_FOLDER
from millstream.errors import ConfigError
from millstream.ops.reset import AppFootprint, find_footprint
from millstream.ops.reset import reset as work


@click.command()
@click.argument("app")
@address_option
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="The folder of its state: App(state=…). By default that of the log.",
)
@click.option(
    "--store",
    "stores",
    multiple=True,
    metavar="URL",
    help="A PostgreSQL database in which it keeps views or its state; several may be given. A password is better left "
    "to PGPASSWORD or ~/.pgpass: a command line can be read by others.",
)
@yes_option
@json_option
def reset(
    app: str,
    address: Path | str,
    state: Path | None,
    stores: tuple[str, ...],
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove all that APP has made, so that its next run starts over from the log.

    That is its state, position, views, datasets, and what topics and databases store about it. It says
    first what it removes, and what it cannot undo: records in topics stay, and the next run writes
    its own besides them. The records that APP reads are not touched. The app must be stopped.

    \b
    Examples:
      millstream reset ads
      millstream reset ads --store postgresql://user@host/database --yes
      millstream reset ads --log kafka://broker:9092 --state ./data
    """
    if state is None:
        # Its folder on this machine has nothing that a state store in a database needs.
        state = log_folder(address) or (Path(DEFAULT_FOLDER) if stores else None)
        if state is None:
            raise ConfigError(
                f"The log is {shown(address)}, and brokers keep no state of apps. Give the folder in which it "
                "lies: --state ./data"
            )
    found = find_footprint(app, state, address, stores)
    if not as_json:
        for line in [*_removed(found), *_stays(found)]:
            click.echo(line)
    if not yes:
        confirm(f"Remove this, and have {app} start over?")
    with audited(state, app, "reset"):
        work(found)
    if as_json:
        print_json(_values(found))
    else:
        click.echo(f"{app} is reset; its next run starts over.")


def _removed(found: AppFootprint) -> list[str]:
    size = describe_bytes(found.size_bytes)
    lines = [f"To be removed of {found.app}:"]
    if found.folder.exists():
        lines.append(
            f"  {found.folder}: state, position and views, {pluralize(found.files, 'file')}, {size}"
        )
    if found.state_store is not None:
        lines.append(f"  {found.state_store}: state, position and views")
    lines += [f"  view {name}: {pluralize(rows, 'row')}" for name, rows in found.views.items()]
    for kept in found.databases.values():
        views = ", ".join(kept.views) or "no view, only what it remembers of the app"
        lines.append(f"  in {kept.shown}: {views}")
    for dataset in found.datasets:
        files = pluralize(dataset.files, "file")
        lines.append(f"  dataset {dataset.address}: {files}, {describe_bytes(dataset.size_bytes)}")
    if found.objects is not None:
        count = pluralize(found.objects.count, "object")
        lines.append(f"  runs of state at {found.objects.place.text}: {count}")
    if found.fences:
        lines.append(f"  in {shown(found.log)}: how far it had written to topics")
    if found.state_store_problem is not None:
        lines.append(
            f"Which databases and datasets it wrote to is not known, as its own store cannot be read "
            f"({found.state_store_problem}) Give the databases with --store; empty the datasets' folders, and "
            f"apps/{found.app}/ under the URL of its state, if it has one."
        )
    return lines


def _stays(found: AppFootprint) -> list[str]:
    lines = []
    for topic, records in found.topics.items():
        count = "its records" if records is None else f"up to {pluralize(records, 'record')}"
        lines.append(f"  topic {topic}: {count}; the next run adds its own")
    lines += [
        f"  topic {topic}: {pluralize(records, 'dead letter')} appended again by a replay; the next run "
        "reads both, and counts twice those that no longer fail"
        for topic, records in found.replayed.items()
    ]
    lines += [f"  what {name} was called with; it is called again" for name in found.functions]
    return ["Cannot be undone:", *lines] if lines else []


def _values(found: AppFootprint) -> dict[str, Any]:
    return {
        "app": found.app,
        "folder": str(found.folder),
        "files": found.files,
        "size_bytes": found.size_bytes,
        "views": found.views,
        "state_store": None if found.state_store is None else str(found.state_store),
        "databases": {kept.shown: list(kept.views) for kept in found.databases.values()},
        "datasets": {
            one.address: {"files": one.files, "size_bytes": one.size_bytes}
            for one in found.datasets
        },
        "objects": (
            {found.objects.place.text: found.objects.count} if found.objects is not None else {}
        ),
        "fences": found.fences,
        "topics": found.topics,
        "replayed": found.replayed,
        "functions": list(found.functions),
    }
