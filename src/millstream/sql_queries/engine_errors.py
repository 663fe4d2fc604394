"""What the engine raises, as our errors with PostgreSQL's codes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from millstream.errors import SqlError

# By the engine's class of error.
_STATES = {
    "BinderException": "42P10",
    "ConversionException": "22P02",
    "DataError": "22000",
    "InterruptException": "57014",
    "InvalidInputException": "22023",
    "InvalidTypeException": "42804",
    "NotImplementedException": "0A000",
    "NotSupportedError": "0A000",
    "OutOfMemoryException": "53200",
    "OutOfRangeException": "22003",
    "ParserException": "42601",
    "PermissionException": "42501",
    "SyntaxException": "42601",
    "TypeMismatchException": "42804",
}
# What the class leaves open, by the message.
_BY_MESSAGE = (
    (re.compile(r"Table with name|Table .* does not exist|Referenced table"), "42P01"),
    (re.compile(r"Schema with name"), "3F000"),
    (re.compile(r"Function with name|No function matches"), "42883"),
    (re.compile(r"Type with name"), "42704"),
    (re.compile(r"Referenced column|does not have a column"), "42703"),
    (re.compile(r"Ambiguous reference"), "42702"),
)
_NEAREST = re.compile(r' Did you mean "[^"]*"\?')
_NEXT = {
    "42501": "Only views and topics can be asked: files, networks and settings of the engine are closed.",
    "53200": "Ask for less, or give statements more memory.",
}


@contextmanager
def translate_errors(tables: Callable[[], str]) -> Iterator[None]:
    """Turn what the engine raises into SqlError; ``tables`` lists the tables that there are."""
    import duckdb  # noqa: PLC0415 - an extra, which is there where an engine is

    try:
        yield
    except duckdb.Error as error:
        raise sql_error(error, tables) from error


def sql_error(error: Exception, tables: Callable[[], str]) -> SqlError:
    """Return an error of the engine as one of ours."""
    text = str(error).strip()
    name = type(error).__name__
    if name == "InterruptException":
        return SqlError("The statement was cancelled.", sqlstate="57014")
    state = _STATES.get(name, "XX000")
    if name in ("BinderException", "CatalogException"):
        known = (code for pattern, code in _BY_MESSAGE if pattern.search(text))
        state = next(known, state if name in _STATES else "42704")
    said = _plain(text)
    if state == "42P01":
        said = _NEAREST.sub("", said)  # it may be a table of the engine's own
        said = f"{said} There are: {tables()}."
    elif state in _NEXT:
        said = f"{said} {_NEXT[state]}"
    return SqlError(said, sqlstate=state)


def _plain(text: str) -> str:
    """Return the first paragraph of a message of the engine, without its kind, as one sentence."""
    first = text.split("\n\n", 1)[0].replace("\n", " ")
    said = re.sub(r"^[A-Za-z ]+ Error: ", "", first).strip()
    return said if said.endswith((".", "!", "?")) else f"{said}."
