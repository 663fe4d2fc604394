"""What every view store can be asked, and the one row of a key, found the same way in each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import polars as pl

from millstream.errors import ConfigError
from millstream.views.schema import ViewSchema


class ReadableStore(Protocol):
    """A view store as readers see it: each call answers from one commit, the newest.

    What each method gives, and raises, is told at :class:`millstream.views.store.ViewStore`.
    """

    def views(self) -> list[ViewSchema]: ...
    def schema(self, view: str) -> ViewSchema: ...
    def count(self, view: str) -> int: ...
    def scan(
        self, view: str, *, where: Mapping[str, Any] | None = None, limit: int | None = None
    ) -> pl.DataFrame: ...
    def get(self, view: str, /, **key: Any) -> dict[str, Any] | None: ...
    def changes(self, view: str, *, since: int = 0) -> pl.DataFrame: ...
    def position(self, view_or_app: str) -> dict[str, Any]: ...
    def wait_for(
        self,
        view_or_app: str,
        *,
        batch_id: int | None = None,
        position: Mapping[str, Any] | None = None,
        timeout_s: float = 10.0,
    ) -> bool: ...
    def close(self) -> None: ...


def row_of(store: ReadableStore, view: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the row of a key, or None. Lists and structs come back as Python values.

    Raises:
        UnknownViewError: There is no such view.
        ConfigError: What is given is not exactly the view's key columns.
    """
    schema = store.schema(view)
    if set(key) != set(schema.key):
        raise ConfigError(
            f"The key of the view {view!r} is ({', '.join(schema.key)}), and "
            f"({', '.join(key)}) was given. Give a value for each key column and no other."
        )
    frame = store.scan(view, where=key, limit=1)
    if frame.is_empty():
        return None
    row = frame.row(0, named=True)
    for name, kind in schema.columns:
        if kind == "json" and row[name] is not None:
            row[name] = json.loads(row[name])
    return row
