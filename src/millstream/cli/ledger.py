"""``millstream ledger``: the ledger of an app, per batch or in total."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from millstream.cli.app_folder import app_store
from millstream.cli.tables import TableColumn, app_store_option, json_option, log_option, print_rows
from millstream.kernels.routing import LEDGER_EXITS
from millstream.views.store_location import StoreLocation, open_state_store

_COUNTS = ("read", *LEDGER_EXITS)


@click.command()
@click.argument("app")
@log_option
@app_store_option
@json_option
@click.option("--batches", type=click.IntRange(min=1), help="Only of the last so many batches.")
@click.option("--each", is_flag=True, help="Batch by batch, instead of added up.")
@click.option("--step", help="Only this step.")
def ledger(
    app: str,
    folder: Path,
    store: str | None,
    batches: int | None,
    step: str | None,
    *,
    each: bool,
    as_json: bool,
) -> None:
    """Show where every event of APP went: the ledger, per batch or in total.

    At every step, read = emitted + held + late + dead + filtered + duplicate. Each batch was checked
    when it was committed; this adds the batches up again.

    \b
    Examples:
      millstream ledger ads
      millstream ledger ads --batches 10 --each
      millstream ledger ads --step "tumbling(1 minute) by ad" --json
    """
    lines = _lines(app_store(folder, app, store), app, batches)
    if step is not None:
        lines = [line for line in lines if line["step"] == step]
    rows = lines if each else _added_up(lines)
    for row in rows:
        row["balance"] = row["read"] - sum(row[name] for name in LEDGER_EXITS)
    columns = [
        TableColumn("step", left=True),
        *(TableColumn(name) for name in _COUNTS),
        TableColumn("balance"),
    ]
    if each:
        columns.insert(0, TableColumn("batch", "batch_id"))
    print_rows(rows, columns, as_json=as_json)


def _lines(location: StoreLocation, app: str, batches: int | None) -> list[dict[str, Any]]:
    with open_state_store(location, readonly=True) as store:
        since = 0
        if batches is not None:
            since = (store.last_batch_id(app) or 0) - batches + 1
        return store.ledger(app, since=since)


def _added_up(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    totals: dict[str, Counter[str]] = {}
    for line in lines:
        counts = {name: line[name] for name in _COUNTS}
        totals.setdefault(line["step"], Counter(dict.fromkeys(_COUNTS, 0))).update(counts)
    return [{"step": step, **counts} for step, counts in totals.items()]
