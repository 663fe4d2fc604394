"""What of a table a sink writes, as it was asked for: columns and key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from millstream.choices import choose, did_you_mean
from millstream.connectors.sinks.table_changes import ExtraFields, SinkColumn
from millstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TableChoice:
    """A table as it was asked for.

    Attributes:
        key: The columns of its primary key, or none to add rows.
        columns: Those that are written; None for all.
        extra: What becomes of a row with other fields.
    """

    table: str
    key: tuple[str, ...]
    columns: tuple[str, ...] | None
    extra: ExtraFields

    @classmethod
    def of(
        cls,
        shown: str,
        table: str,
        key: str | Sequence[str] | None,
        columns: str | Sequence[str] | None,
        extra: ExtraFields,
    ) -> TableChoice:
        """Return what was asked for of a table in a database, as that is ``shown``.

        Raises:
            ConfigError: an option is not possible.
        """
        choose("extra", extra, get_args(ExtraFields))
        if not isinstance(table, str) or not table:
            raise ConfigError(f"table is {table!r}. Give the name of a table in {shown}.")
        named = None if columns is None else given_names("columns", columns)
        return cls(table, given_names("key", key), named, extra)


def given_names(what: str, given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return names that were given, also as one text with commas between them.

    Raises:
        ConfigError: one is empty, or there twice.
    """
    if given is None:
        return ()
    names = tuple(given.split(",")) if isinstance(given, str) else tuple(given)
    stripped = tuple(name.strip() for name in names)
    if not all(stripped) or len(set(stripped)) < len(stripped):
        raise ConfigError(f"{what} is {given!r}. Give names of columns, each once.")
    return stripped


def no_table(shown: str, name: str, there: Iterable[str]) -> ConfigError:
    """Return the error of a table that is not among those that are there."""
    return ConfigError(
        f"there is no {shown}.{did_you_mean(name, [*there])} Correct the name, or create the table with the columns that the "
        "rows have; its primary key is the key of the topic."
    )


def check_primary(shown: str, key: Sequence[str], primary: Sequence[str]) -> None:
    """Check that the key of a sink is the primary key of its table.

    Raises:
        ConfigError: it is not.
    """
    if set(key) != set(primary):
        raise ConfigError(
            f"key is {', '.join(key)}, and the primary key of {shown} is {', '.join(primary) or 'not there'}. Give the columns of "
            "the primary key; or none, to add a row for each record."
        )


def choose_columns(
    shown: str, found: Mapping[str, SinkColumn], choice: TableChoice
) -> dict[str, SinkColumn]:
    """Return the columns that a sink writes.

    Raises:
        ConfigError: one is not there, or the key is not among them.
    """
    key, columns = choice.key, choice.columns
    wanted = tuple(found) if columns is None else columns
    for name in (*key, *wanted):
        if name not in found:
            raise ConfigError(
                f"{shown} has no column {name!r} that can be written.{did_you_mean(name, tuple(found))} It has "
                f"{', '.join(found)}."
            )
    left_out = [
        name
        for name, column in found.items()
        if name not in wanted and (name in key or column.is_required)
    ]
    if left_out:
        raise ConfigError(
            f"columns is {', '.join(wanted)}. Give those of the key, too, and those of {shown} that are NOT NULL and have no "
            f"default: {', '.join(left_out)}."
        )
    return {name: found[name] for name in wanted}
