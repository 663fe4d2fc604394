"""The schema of a view: named columns of known kinds, and a key; plain values without any I/O.

The kinds are few: those that a view store keeps and returns exactly. `views/state_store/sqlite_values.py`
turns polars frames into these kinds and into SQLite's values; `views/state_store/store.py` stores them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.column_types import view_kind

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,127}")
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")
_COLUMNS_MAX = 1000
_APP = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")

JOB = "main"
"""The name of an app's job, of which it has one. Fences carry the names of app and job."""

RESERVED_COLUMNS = frozenset({"_seq", "_batch_id", "_op", "_one"})
"""Names that a view's own columns may not take: the change log and the store use them."""

_DTYPES: dict[str, pl.DataType] = {
    "int": pl.Int64(),
    "float": pl.Float64(),
    "str": pl.String(),
    "bool": pl.Boolean(),
    "datetime": pl.Datetime("us", "UTC"),
    "date": pl.Date(),
    "duration": pl.Duration("us"),
    "decimal": pl.Decimal(38, 9),
    "bytes": pl.Binary(),
    "json": pl.String(),
}


def check_app_name(name: str) -> None:
    """Make sure that a text can be the name of an app, and of its folder.

    Raises:
        ConfigError: it cannot; give another name.
    """
    if not _APP.fullmatch(name):
        raise ConfigError(
            f"The app's name is {name!r}. Use up to 63 lower-case letters, digits, '-' and '_', "
            "beginning with a letter or digit."
        )


def dtype_of(kind: str) -> pl.DataType:
    """Return the polars type in which a column of this kind is kept and returned.

    ``decimal`` alone has nine decimal places; ``decimal(38,2)`` says how many. ``json`` (lists and
    structs) is JSON text.

    Raises:
        ConfigError: There is no such kind; the message lists those there are.
    """
    if kind in _DTYPES:
        return _DTYPES[kind]
    match = _DECIMAL.fullmatch(kind)
    if match and 1 <= int(match[1]) <= 38 and int(match[2]) <= int(match[1]):
        return pl.Decimal(int(match[1]), int(match[2]))
    raise ConfigError(
        f"A view column has the kind {kind!r}; allowed are {', '.join(_DTYPES)} and "
        "decimal(precision,scale) with precision up to 38. Choose one of them."
    )


@dataclass(frozen=True)
class ViewSchema:
    """A view's name, its columns as ``(name, kind)`` in order, and the columns that are its key.

    A view with an empty key has one row at most. Column names may be any text; view names are
    letters, digits and ``_ . -``, beginning with a letter.

    Raises:
        ConfigError: A name, kind or key that a store could not keep; the message says which.
    """

    name: str
    columns: tuple[tuple[str, str], ...]
    key: tuple[str, ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name.lower().startswith("sqlite_"):
            raise ConfigError(
                f"{self.name!r} is no name for a view. Use a letter, then up to 127 letters, "
                "digits and _ . - (and not the beginning sqlite_)."
            )
        names = self.names
        if not 1 <= len(names) <= _COLUMNS_MAX:
            raise ConfigError(
                f"The view {self.name!r} has {len(names)} columns; 1 to {_COLUMNS_MAX} are allowed."
            )
        for group, what in ((names, "column"), (self.key, "key column")):
            twice = sorted({name for name in group if group.count(name) > 1})
            if twice:
                raise ConfigError(
                    f"The view {self.name!r} names the {what} {twice[0]!r} twice. Rename one."
                )
        self._check_columns()

    def _check_columns(self) -> None:
        for name, kind in self.columns:
            dtype_of(kind)
            if name in RESERVED_COLUMNS:
                raise ConfigError(
                    f"The view {self.name!r} has a column {name!r}, a name that the store uses "
                    "itself. Rename the column."
                )
        for name in self.key:
            if name not in self.names:
                raise ConfigError(
                    f"The key of the view {self.name!r} names {name!r}, which is none of its "
                    f"columns: {', '.join(self.names)}. Add the column or correct the key."
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The column names, in order."""
        return tuple(name for name, _ in self.columns)

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each column, by name."""
        return dict(self.columns)

    @property
    def dtypes(self) -> dict[str, pl.DataType]:
        """The polars type of each column, by name, as frames of this view have it."""
        return {name: dtype_of(kind) for name, kind in self.columns}

    def to_json(self) -> str:
        """Return the schema as JSON text, the form in which a store keeps it."""
        return json.dumps({"name": self.name, "columns": self.columns, "key": self.key})

    @classmethod
    def from_json(cls, text: str) -> ViewSchema:
        """Return the schema that :meth:`to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        columns = tuple((str(name), str(kind)) for name, kind in data["columns"])
        return cls(data["name"], columns, tuple(data["key"]))

    def difference(self, wanted: ViewSchema) -> str:
        """Return a text that says how the schema that is wanted for this view differs from it."""
        parts = []
        if self.name != wanted.name:
            parts.append(f"its name is {self.name!r}")
        if self.key != wanted.key:
            parts.append(f"its key is ({', '.join(self.key)}), not ({', '.join(wanted.key)})")
        for name in dict.fromkeys(self.names + wanted.names):
            was, now = self.kinds.get(name), wanted.kinds.get(name)
            if was != now:
                parts.append(f"column {name!r} is {was or 'not there'}, not {now or 'left out'}")
        return "; ".join(parts) or "its columns are in another order"

    @classmethod
    def of(cls, name: str, frame: pl.DataFrame, key: tuple[str, ...]) -> ViewSchema:
        """Return the schema of a view that keeps frames like this one."""
        columns = tuple((column, view_kind(dtype)) for column, dtype in frame.schema.items())
        return cls(name, columns, key)


@dataclass(frozen=True)
class Fence:
    """The batch, run and job that a commit belongs to; it is part of the commit itself."""

    app: str
    job: str
    run: int
    batch_id: int


@dataclass(frozen=True)
class ViewChange:
    """What one batch does to one view.

    ``upserts`` holds whole rows; if a key occurs more than once, its last row counts. ``deletes``
    holds the key columns; deletes come before upserts, so a key in both ends with its upsert.
    """

    view: str
    upserts: pl.DataFrame
    deletes: pl.DataFrame | None = None
