"""The parameters of a request: queries on views, and positions to wait for.

=======================  ==========================================================================
parameter                meaning
=======================  ==========================================================================
``COLUMN=VALUE``         rows where the column equals the value
``COLUMN.from=VALUE``    rows where it is this or more
``COLUMN.to=VALUE``      rows where it is less than this
``COLUMN.null=true``     rows where it is null
``order=A,-B``           the order: columns, ``-`` for the largest first; by default the key
``limit=N``              at most so many rows
``app=NAME``             the app, where several have a view of that name
``at_least=POSITION``    wait until the view reflects this position of the log
``timeout=DURATION``     ... for at most so long, such as ``5 seconds``
=======================  ==========================================================================

For a column with the name of one of the last five parameters, use ``COLUMN.equals=VALUE``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from millstream.durations import to_us
from millstream.errors import ConfigError
from millstream.views.position import checked_position
from millstream.views.query import Query
from millstream.views.schema import ViewSchema
from millstream.views.state_store.sqlite_values import parse_value

ROWS_DEFAULT = 100
ROWS_MAX = 100_000
TIMEOUT_S_MAX = 600.0
_RESERVED = ("order", "limit", "app", "at_least", "timeout")
_RELATIONS = ("equals", "from", "to", "null")


def parse_query(parameters: Iterable[tuple[str, str]], schema: ViewSchema) -> Query:
    """Return the query of a request's parameters.

    Raises:
        ConfigError: a parameter is unknown, or its value is invalid.
    """
    where: dict[str, Any] = {}
    between: dict[str, tuple[Any, Any]] = {}
    order: tuple[str, ...] = ()
    limit = ROWS_DEFAULT
    for name, text in parameters:
        if name == "order":
            order = tuple(part for part in text.split(",") if part)
        elif name == "limit":
            limit = _rows(text)
        elif name not in _RESERVED:
            column, relation = _column(name, schema)
            value = None if relation == "null" else _value(text, schema.kinds[column])
            start, end = between.get(column, (None, None))
            if relation in ("equals", "null"):
                where[column] = value
            else:
                between[column] = (value, end) if relation == "from" else (start, value)
    return Query(where, between, order, limit)


def _column(name: str, schema: ViewSchema) -> tuple[str, str]:
    """Return the column and the relation that a parameter names."""
    if name in schema.names:
        return name, "equals"
    column, _, relation = name.rpartition(".")
    if column in schema.names and relation in _RELATIONS:
        return column, relation
    raise ConfigError(
        f"The view {schema.name!r} has no column {column or name!r}; it has "
        f"{', '.join(schema.names)}. Ask with COLUMN=VALUE, COLUMN.from=, COLUMN.to= or "
        f"COLUMN.null=true; other words are {', '.join(_RESERVED)}."
    )


def _value(text: str, kind: str) -> Any:
    if kind == "datetime" and "T" in text:
        text = text.replace(" ", "+")  # an unescaped + of a time zone arrives as a blank
    return parse_value(text, kind)


def _rows(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= ROWS_MAX:
        raise ConfigError(f"limit is {text!r}. Give a whole number from 1 to {ROWS_MAX}.")
    return int(text)


def parse_position(text: str) -> dict[str, dict[str, int]]:
    """Return the position of a text.

    ``ad-events/0/18`` is the position after all records of partition 0 before offset 18; commas separate
    several. Or the JSON object ``position`` of a response.

    Raises:
        ConfigError: it is neither.
    """
    if text.startswith("{"):
        try:
            return checked_position(json.loads(text)) or {}
        except (ValueError, RecursionError, ConfigError):
            raise _bad_position(text) from None
    position: dict[str, dict[str, int]] = {}
    for part in text.split(","):
        topic, partition, offset = [*part.strip().rsplit("/", 2), "", ""][:3]
        if not (topic and partition.isdecimal() and offset.isdecimal()):
            raise _bad_position(text)
        position.setdefault(topic, {})[partition] = int(offset)
    return position


def _bad_position(text: str) -> ConfigError:
    return ConfigError(
        f"at_least is {text!r}. Give TOPIC/PARTITION/OFFSET, several with commas between them, "
        'such as "ad-events/0/18" (the offset after the last record that is to be there), or the '
        "JSON object of a response's position."
    )


def parse_timeout(text: str | None) -> float:
    """Return how long to wait, in seconds; by default 10.

    Raises:
        ConfigError: it is not a duration, or too long.
    """
    if text is None:
        return 10.0
    seconds = to_us(text, what="timeout") / 1e6
    if seconds > TIMEOUT_S_MAX:
        raise ConfigError(
            f"timeout is {text!r}. Allowed are up to 10 minutes; ask again after that."
        )
    return seconds


def parse_change_id(text: str, what: str) -> tuple[int, str]:
    """Return the number of a change, and the id of its view (empty: not given).

    Raises:
        ConfigError: it is not the id of a change.
    """
    number, _, view_id = text.partition("-")
    if not number.isdecimal():
        raise ConfigError(
            f"{what} is {text!r}. Give the number of a change, such as the change of a response, or 0 "
            "for all that are kept."
        )
    return int(number), view_id
