"""The rows of an app's views that are new, in the terminal, while the app runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click

from millstream.cli.tables import TableColumn, pluralize, print_table
from millstream.cli.view import format_value
from millstream.errors import OffsetOutOfRangeError
from millstream.views.store_location import StoreLocation, open_state_store, state_store_exists

ROWS_MAX = 10
"""How many of a view's changes are shown at once: the newest."""


@dataclass
class NewRows:
    """Shows what changes in the views of a state store."""

    location: StoreLocation
    _seen: dict[str, int] = field(default_factory=dict)  # by view: the newest change that was shown

    def begin(self) -> None:
        """Take all that there is as seen."""
        if state_store_exists(self.location):
            with open_state_store(self.location, readonly=True) as store:
                self._seen = store.newest_changes()

    def show(self) -> None:
        """Print what is new since the last call, view by view."""
        if not state_store_exists(self.location):
            return
        with open_state_store(self.location, readonly=True) as store:
            for view, newest in store.newest_changes().items():
                seen = self._seen.get(view, 0)
                self._seen[view] = newest
                if newest == seen:
                    continue
                try:
                    changes = store.changes(view, since=max(seen, newest - ROWS_MAX))
                except OffsetOutOfRangeError:  # the view was made anew; the next change is shown
                    continue
                rows = list(changes.iter_rows(named=True))
                _print_changes(view, rows, newest - seen)


def _print_changes(view: str, rows: list[dict[str, Any]], count: int) -> None:
    more = f", the last {len(rows)}" if count > len(rows) else ""
    click.echo(f"{click.style(view, bold=True)}: {pluralize(count, 'change')}{more}")
    if rows:
        print_table(rows, list(_columns(rows)))


def _columns(rows: list[dict[str, Any]]) -> Iterator[TableColumn]:
    for name in rows[0]:
        if name in ("_seq", "_batch_id"):
            continue
        left = not all(isinstance(row[name], int | float | None) for row in rows)
        yield TableColumn("" if name == "_op" else name, partial(_cell, name), left=left)


def _cell(name: str, row: Any) -> str:
    if name == "_op":
        return {"upsert": "+", "delete": "-"}.get(row[name], str(row[name]))
    return format_value(row[name])
