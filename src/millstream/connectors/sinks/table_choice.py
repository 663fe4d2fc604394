"""What of a table a sink writes, as it was asked for: columns and key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millstream.choices import did_you_mean
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
