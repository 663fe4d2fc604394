"""What clients say besides questions: settings, transactions, cursors. Each is a few words, which are read here.

Transactions hold nothing: every statement is as of the newest position, as with PostgreSQL's READ COMMITTED.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millstream.errors import ConfigError, SqlError
from millstream.sql_queries.tokens import SqlToken, to_text, without_spaces
from millstream.views.position import checked_position

AT_LEAST = "millstream.at_least"
TIMEOUT = "statement_timeout"
POSITION = "millstream.position"
SERVER_VERSION = "15.0"

REPORTED: Mapping[str, str] = {
    "server_version": SERVER_VERSION,
    "server_encoding": "UTF8",
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "integer_datetimes": "on",
    "standard_conforming_strings": "on",
    "default_transaction_read_only": "on",
    "in_hot_standby": "off",
    "is_superuser": "off",
}
_SETTINGS: Mapping[str, str] = {
    **{name.lower(): value for name, value in REPORTED.items()},
    "server_version_num": "150000",
    "transaction_isolation": "read committed",
    "transaction isolation level": "read committed",
    "default_transaction_isolation": "read committed",
    "transaction_read_only": "on",
    "search_path": "views, topics",
    "max_identifier_length": "63",
    "max_index_keys": "32",
    TIMEOUT: "0",
    "lc_collate": "C",
    "lc_ctype": "C",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "application_name": "",
    AT_LEAST: "{}",
    POSITION: "{}",
}
# Settings whose other values would change what statements mean, each with the values that may be given.
_FIXED = {
    "timezone": re.compile(r"utc|gmt|etc/utc|zulu|default|0", re.IGNORECASE),
    "client_encoding": re.compile(r"utf-?8|unicode|default", re.IGNORECASE),
    "datestyle": re.compile(r"iso.*|default", re.IGNORECASE),
    "intervalstyle": re.compile(r"postgres|default", re.IGNORECASE),
    "standard_conforming_strings": re.compile(r"on|true|default", re.IGNORECASE),
    "bytea_output": re.compile(r"hex|default", re.IGNORECASE),
}
_TIMEOUT = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|min|h|d|)")
_UNIT_S = {"us": 1e-6, "ms": 1e-3, "": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_NO_WORDS = frozenset({"SESSION", "LOCAL", "TO", "="})

CommandKind = Literal[
    "begin",
    "commit",
    "rollback",
    "savepoint",
    "set",
    "set local",
    "show",
    "declare",
    "fetch",
    "close",
    "deallocate",
    "discard",
    "nothing",
]


@dataclass(frozen=True)
class SessionCommand:
    """A command, its tag in the answer, and what it names.

    Of ``set`` and ``set local`` a setting and its ``value``; of ``declare`` a cursor and its statement in ``tokens``; of ``fetch`` a
    cursor and ``count``, None for all.
    """

    kind: CommandKind
    tag: str
    name: str = ""
    value: str = ""
    tokens: tuple[SqlToken, ...] = ()
    count: int | None = None


def parse_command(tokens: Sequence[SqlToken]) -> SessionCommand | None:
    """Return the command that a statement is; None if it is a question, or for the engine to refuse.

    Raises:
        SqlError: it is a command that cannot be obeyed.
    """
    kept = without_spaces(tokens)
    first = kept[0].text.upper()
    if first in ("PREPARE", "EXECUTE", "LISTEN", "COPY", "LOCK"):
        raise SqlError(
            f"{first} is not known here. Statements that ask are: SELECT, WITH, VALUES, FROM; clients prepare by the protocol.",
            sqlstate="0A000",
        )
    words = [token.text.upper() for token in kept]
    if first in _TRANSACTIONS:
        return _transaction(words)
    if first in ("UNLISTEN", "NOTIFY", "RESET", "DISCARD", "DEALLOCATE"):
        return _small(first, kept)
    if first == "DECLARE":
        return _declare(kept, tokens)
    readers = {"SET": _set, "SHOW": _show, "FETCH": _fetch, "MOVE": _fetch, "CLOSE": _close}
    return readers[first](kept) if first in readers else None


_TRANSACTIONS: Mapping[str, tuple[CommandKind, str]] = {
    "BEGIN": ("begin", "BEGIN"),
    "START": ("begin", "START TRANSACTION"),
    "COMMIT": ("commit", "COMMIT"),
    "END": ("commit", "COMMIT"),
    "ROLLBACK": ("rollback", "ROLLBACK"),
    "ABORT": ("rollback", "ROLLBACK"),
    "SAVEPOINT": ("savepoint", "SAVEPOINT"),
    "RELEASE": ("savepoint", "RELEASE"),
}


def _transaction(words: Sequence[str]) -> SessionCommand:
    kind, tag = _TRANSACTIONS[words[0]]
    text = " ".join(words)
    if "REPEATABLE READ" in text or "SERIALIZABLE" in text:
        raise SqlError(
            "Transactions are READ COMMITTED: every statement is as of the newest position. Ask for all that must be of one "
            "position in one statement.",
            sqlstate="0A000",
        )
    if "PREPARED" in words:
        raise SqlError(
            "There are no prepared transactions: nothing is written here.", sqlstate="0A000"
        )
    if words[0] == "ROLLBACK" and "TO" in words:
        return SessionCommand("savepoint", tag, value="to")
    return SessionCommand(kind, tag)


def _small(first: str, kept: Sequence[SqlToken]) -> SessionCommand:
    if first == "DEALLOCATE":
        name = kept[-1].name if len(kept) > 1 else ""
        return SessionCommand("deallocate", "DEALLOCATE", "" if name == "all" else name)
    if first == "DISCARD":
        return SessionCommand("discard", "DISCARD ALL")
    if first == "RESET":
        name = _name(kept[1:])
        return SessionCommand("set", "RESET", "" if name == "all" else name, "default")
    return SessionCommand("nothing", first)


def _set(kept: Sequence[SqlToken]) -> SessionCommand:
    words = [token for token in kept[1:] if token.text.upper() not in _NO_WORDS]
    upper = [token.text.upper() for token in words]
    if upper[:2] == ["TIME", "ZONE"]:
        words = [SqlToken("name", "timezone"), *words[2:]]
    elif upper[:1] == ["NAMES"]:
        words = [SqlToken("name", "client_encoding"), *words[1:]]
    elif upper[:1] in (["TRANSACTION"], ["CHARACTERISTICS"]):
        _transaction(["BEGIN", *upper])
        return SessionCommand("nothing", "SET")
    name = _name(words)
    after = len(name.split(".")) * 2 - 1
    kind: CommandKind = "set local" if kept[1].text.upper() == "LOCAL" else "set"
    return SessionCommand(kind, "SET", name, to_text(map(_unquoted, words[after:])))


def _show(kept: Sequence[SqlToken]) -> SessionCommand | None:
    upper = [token.text.upper() for token in kept[1:]]
    if upper in (["TABLES"], ["ALL", "TABLES"], ["DATABASES"]):
        return None  # the engine's
    if upper == ["TRANSACTION", "ISOLATION", "LEVEL"]:
        return SessionCommand("show", "SHOW", "transaction_isolation")
    if upper == ["TIME", "ZONE"]:
        return SessionCommand("show", "SHOW", "timezone")
    return SessionCommand("show", "SHOW", _name(kept[1:]))


def _declare(kept: Sequence[SqlToken], tokens: Sequence[SqlToken]) -> SessionCommand:
    upper = [token.text.upper() for token in tokens]
    if "CURSOR" not in upper or "FOR" not in upper or not kept[1].name:
        raise SqlError(
            "A cursor is declared with DECLARE name CURSOR FOR SELECT …", sqlstate="42601"
        )
    start = upper.index("FOR")
    hold = "hold" if "HOLD" in upper[:start] and "WITHOUT" not in upper[:start] else ""
    return SessionCommand(
        "declare", "DECLARE CURSOR", kept[1].name, hold, tuple(tokens[start + 1 :])
    )


def _fetch(kept: Sequence[SqlToken]) -> SessionCommand:
    words = [token for token in kept[1:-1] if token.text.upper() not in ("FROM", "IN")]
    upper = [token.text.upper() for token in words]
    first = upper[0] if upper else "NEXT"
    count: int | None = 1
    if first in ("BACKWARD", "PRIOR", "ABSOLUTE", "RELATIVE", "LAST", "-"):
        raise SqlError(f"A cursor goes forward only, and {first} was asked for.", sqlstate="55000")
    if upper[-1:] == ["ALL"]:
        count = None
    elif upper and upper[-1].isdecimal():
        count = int(upper[-1])
    return SessionCommand("fetch", kept[0].text.upper(), kept[-1].name, count=count)


def _close(kept: Sequence[SqlToken]) -> SessionCommand:
    name = kept[1].name if len(kept) > 1 else ""
    return SessionCommand("close", "CLOSE CURSOR", "" if name == "all" else name)


def _name(tokens: Sequence[SqlToken]) -> str:
    """Return the name at the beginning: one, or several with points between them."""
    if not tokens or not tokens[0].name:
        raise SqlError("A setting is named here: SET name = value, SHOW name.", sqlstate="42601")
    parts = [tokens[0].name]
    for point, part in zip(tokens[1::2], tokens[2::2], strict=False):
        if point.text != ".":
            break
        parts.append(part.name)
    return ".".join(parts).lower()


def _unquoted(token: SqlToken) -> SqlToken:
    if token.kind == "string":
        return SqlToken("string", token.text.strip("'").replace("''", "'"))
    return token


class SessionSettings:
    """The settings of a session: what clients ask about, and set."""

    def __init__(self) -> None:
        self._values = dict(_SETTINGS)
        self._outside: dict[str, str] = {}  # what a transaction has set for itself, as it was

    def set(self, name: str, value: str) -> None:
        """Set one; "" resets all.

        Raises:
            SqlError: it cannot have that value.
        """
        if not name:
            self._values = dict(_SETTINGS)
            self._outside.clear()
            return
        self._set(name, value)
        self._outside.pop(name, None)

    def set_local(self, name: str, value: str) -> None:
        """Set one until :meth:`end_transaction`.

        Raises:
            SqlError: it cannot have that value.
        """
        before = self._values.get(name, "")
        self._set(name, value)
        self._outside.setdefault(name, before)

    def end_transaction(self) -> None:
        """Put back what was set for one transaction."""
        self._values |= self._outside
        self._outside.clear()

    def _set(self, name: str, value: str) -> None:
        allowed = _FIXED.get(name)
        if allowed is not None and not allowed.fullmatch(value):
            raise SqlError(
                f"The setting {name} is to be {value!r}, and is {_SETTINGS[name]} here. Leave it; convert in the statement, "
                "such as with timezone('Europe/Berlin', column).",
                sqlstate="0A000",
            )
        if name == AT_LEAST and value.lower() not in ("default", ""):
            parse_position(value)
        if name == TIMEOUT and value.lower() != "default":
            _parse_timeout(value)
        if allowed is None:
            self._values[name] = _SETTINGS.get(name, "") if value.lower() == "default" else value

    def keep(self, name: str, value: str) -> None:
        """Note what the server itself has to say."""
        self._values[name] = value

    def get(self, name: str) -> str:
        """Return one.

        Raises:
            SqlError: there is none.
        """
        if name not in self._values:
            raise SqlError(f"There is no setting {name!r}.", sqlstate="42704")
        return self._values[name]

    @property
    def at_least(self) -> Mapping[str, Any]:
        """The position that statements must reflect."""
        return parse_position(self._values[AT_LEAST] or "{}")

    @property
    def timeout_s(self) -> float | None:
        """How long a statement may take; None: as long as the server lets it."""
        return _parse_timeout(self._values[TIMEOUT]) or None


def parse_position(text: str) -> Mapping[str, Any]:
    """Return a position, topic → partition → offset, from JSON.

    Raises:
        SqlError: it is none.
    """
    try:
        found = checked_position(json.loads(text))
    except (ValueError, ConfigError):
        found = None
    if found is None:
        raise SqlError(
            f'{AT_LEAST} is {text[:80]!r}. Give a position as JSON, such as {{"clicks": {{"0": 17}}}}.',
            sqlstate="22023",
        )
    return found


def _parse_timeout(text: str) -> float:
    """Return seconds, from milliseconds or a number with its unit.

    Raises:
        SqlError: it is neither.
    """
    found = _TIMEOUT.fullmatch(text.strip())
    if found is None:
        raise SqlError(
            f"{TIMEOUT} is {text[:80]!r}. Give milliseconds, or a number with us, ms, s, min, h or d, such as '30s'; 0 "
            "leaves it to the server.",
            sqlstate="22023",
        )
    return float(found[1]) * _UNIT_S[found[2]]
